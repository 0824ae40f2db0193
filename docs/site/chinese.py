"""What Chinese pages need beside their words: no blanks where Chinese has none, and the dash of MindSpore's pages."""

import re

from docutils import nodes

_HAN = "[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]"
# What markup needs before and after a name in code.
_BLANK = re.compile("^ (?=[\u3001\u3002\uff01\uff09\uff0c\uff1a\uff1b\uff1f])|(?<=\uff08) $")


def without_blanks(app, doctree):
    """Take out the ends of lines beside Chinese characters, and blanks before a stop."""
    if app.config.language != "zh_CN":
        return
    for text in list(doctree.findall(nodes.Text)):
        if isinstance(text.parent, nodes.FixedTextElement | nodes.literal | nodes.math):
            continue
        new = re.sub(f"(?<={_HAN})\n|\n(?={_HAN})", "", _BLANK.sub("", text)).replace(" -- ", " - ")
        # An end of a line on a page of Markdown is a node of its own.
        if text == "\n" and any(re.search(_HAN, side) for side in sides(text)):
            new = ""
        if new != text:
            text.parent.replace(text, nodes.Text(new))


def sides(node):
    """Return the characters before and after a node."""
    texts, index = [each.astext() for each in node.parent.children], node.parent.index(node)
    return "".join(texts[:index])[-1:], "".join(texts[index + 1 :])[:1]


def setup(app):
    app.connect("doctree-read", without_blanks)
