"""The English and the Chinese pages have the same headings, code, tables, figures and links."""

import re

import pytest

from tests.conftest import ROOT
from tests.shared.pages import CHINESE, ENGLISH, blocks, chinese, headings, links, name_of, prose, tables


def test_each_page_is_there_in_both_languages():
    assert len(ENGLISH) >= 12
    assert [chinese(page) for page in ENGLISH] == CHINESE


@pytest.mark.parametrize("page", ENGLISH, ids=name_of)
class TestBothLanguages:
    def test_headings_have_the_same_levels(self, page):
        assert [level for level, _ in headings(chinese(page))] == [level for level, _ in headings(page)]

    def test_code_blocks_are_the_same(self, page):
        assert blocks(chinese(page)) == blocks(page)

    def test_tables_have_the_same_figures_and_code(self, page):
        assert list(map(facts_of_rows, tables(chinese(page)))) == list(map(facts_of_rows, tables(page)))

    def test_figures_in_the_text_are_the_same(self, page):
        assert figures(prose(chinese(page))) == figures(prose(page))

    def test_links_lead_to_the_same_pages(self, page):
        assert sorted(map(target_of, links(chinese(page)))) == sorted(map(target_of, links(page)))


def facts_of_rows(table):
    """Return, for each table row of a page, the number of cells, and all numbers and code in the row."""
    return [(len(row), sorted(re.findall(r"\d+(?:\.\d+)?|`[^`]+`", " | ".join(row)))) for row in table]


def figures(text):
    """Return the decimal numbers of a text, and its integers of at least two digits."""
    return set(re.findall(r"\d+\.\d+|\d{2,}", text))


def target_of(link):
    """Return a link without its anchor and without the language in its path."""
    path = link.partition("#")[0]
    return re.sub(r"\b(?:zh|en)/", "", path).replace("README_CN.md", "README.md")


@pytest.mark.parametrize("page", [ENGLISH[0], CHINESE[0]], ids=name_of)
def test_first_page_is_short(page):
    assert len(page.read_text(encoding="utf-8").splitlines()) <= 160


@pytest.mark.parametrize("page", CHINESE, ids=name_of)
def test_bold_type_in_chinese_is_seen_as_such(page):
    # Markdown does not close bold type if a punctuation mark precedes the ** and a letter follows it.
    without_code = re.sub(r"`[^`]*`", "code", prose(page))
    assert re.findall(r"\*\*[^*\n]*[^\w\s*]\*\*\w", without_code) == []


# Each pair holds two Chinese words for the same term. The pages use only the second word, never the first.
WORDS = {
    "启动器": "启动脚本",
    "警告": "告警",
    "逐位": "逐比特",
    "loss scale的上限": "loss scale的最大值",
    "断点(?!续训)": "checkpoint",
}


@pytest.mark.parametrize("page", [*CHINESE, ROOT / "docs/site/locale/zh_CN/LC_MESSAGES/reference.po"], ids=name_of)
def test_chinese_words_are_the_same_on_every_page(page):
    text = page.read_text(encoding="utf-8")
    assert [f"{word}: {better}" for word, better in WORDS.items() if re.search(word, text)] == []
