"""Read documentation pages: code blocks, headings, tables, links, and the data of figures."""

import json
import re

from tests.conftest import ROOT

ENGLISH_DOCS = ROOT / "docs" / "en"
ENGLISH = [ROOT / "README.md", *sorted(ENGLISH_DOCS.glob("*.md"))]


def chinese(page):
    """Return the Chinese translation of an English page."""
    return ROOT / "README_CN.md" if page.name == "README.md" else ROOT / "docs" / "zh" / page.name


CHINESE = [ROOT / "README_CN.md", *sorted((ROOT / "docs" / "zh").glob("*.md"))]

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def figure(name):
    """Return the measured data of a figure, read from docs/figures."""
    return json.loads((ROOT / "docs" / "figures" / f"{name}.json").read_text(encoding="utf-8"))


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def blocks(page):
    """Return all code blocks of a page, in order, as pairs of language and text."""
    return _BLOCK.findall(page.read_text(encoding="utf-8"))


def blocks_in(language):
    """Return the English pages' code blocks in a language; keys are page and number, such as ``docs/en/rule.md 1``."""
    return {
        f"{name_of(page)} {number}": text
        for page in ENGLISH
        for number, (its_language, text) in enumerate(blocks(page), start=1)
        if its_language == language
    }


def prose(page):
    """Return the text of a page without its code blocks."""
    return _BLOCK.sub("", page.read_text(encoding="utf-8"))


def headings(page):
    """Return the level and text of each heading of a page."""
    return [(len(marks), text) for marks, text in re.findall(r"^(#+) (.+)$", prose(page), re.MULTILINE)]


def anchors(page):
    """Return the anchors that GitHub gives to the headings of a page."""
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for _, text in headings(page)}


def links(page):
    """Return the targets of all links and pictures on a page."""
    return re.findall(r"\]\(([^)]+)\)", prose(page))


def tables(page):
    """Return each table of a page as a list of rows, and each row as a list of cells."""
    blocks = re.findall(r"(?:^\|.*\|\n)+", prose(page) + "\n", re.MULTILINE)
    return [[[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()] for table in blocks]
