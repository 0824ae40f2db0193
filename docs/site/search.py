"""Search in Chinese. Sphinx cuts the pages into words with jieba but not the query, so that most queries find nothing.

Here both are cut into pairs of characters: 损失缩放 is 损失, 失缩 and 缩放, and a page has to have all of them.
"""

import re

from sphinx.search import SearchEnglish

_WORD = re.compile(r"\w+", re.ASCII)
_HAN = re.compile("[\u4e00-\u9fff]+")


def pairs(text):
    """Return each two characters that follow each other; a single character as it is."""
    return [text[start : start + 2] for start in range(max(len(text) - 1, 1))]


class SearchChinese(SearchEnglish):
    lang = "zh"
    # The name of the stemmer of what is written in Latin letters.
    language_name = "English"
    js_splitter_code = r"""
const pairs = (text) => Array.from({length: Math.max(text.length - 1, 1)}, (_, place) => text.slice(place, place + 2));
var splitQuery = (query) => [
  ...(query.match(/[A-Za-z0-9_]+/g) || []),
  ...(query.match(/[\u4e00-\u9fff]+/g) || []).flatMap(pairs),
];
"""

    def split(self, input):
        return [*_WORD.findall(input), *(pair for text in _HAN.findall(input) for pair in pairs(text))]


def setup(app):
    app.add_search_language(SearchChinese)
