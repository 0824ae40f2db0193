"""The pages of the documentation, their parts, code blocks, headings, tables, links, and the data of their figures."""

import json
import re

from tests.conftest import ROOT

ENGLISH_DOCS = ROOT / "docs" / "en"
ENGLISH = [ROOT / "README.md", *sorted(ENGLISH_DOCS.glob("*.md"))]


def chinese(page):
    """The Chinese page of an English one."""
    return ROOT / "README_CN.md" if page.name == "README.md" else ROOT / "docs" / "zh" / page.name


CHINESE = [ROOT / "README_CN.md", *sorted((ROOT / "docs" / "zh").glob("*.md"))]

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def figure(name):
    """What docs/figures holds of a figure."""
    return json.loads((ROOT / "docs" / "figures" / f"{name}.json").read_text(encoding="utf-8"))


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def blocks(page):
    """All code blocks of a page, in order: language and text."""
    return _BLOCK.findall(page.read_text(encoding="utf-8"))


def blocks_in(language):
    """All code blocks in a language on the English pages, by page and number: ``docs/en/rule.md 1``."""
    return {
        f"{name_of(page)} {number}": text
        for page in ENGLISH
        for number, (its_language, text) in enumerate(blocks(page), start=1)
        if its_language == language
    }


def prose(page):
    """The text of a page without its code blocks."""
    return _BLOCK.sub("", page.read_text(encoding="utf-8"))


def headings(page):
    """Level and text of each heading."""
    return [(len(marks), text) for marks, text in re.findall(r"^(#+) (.+)$", prose(page), re.MULTILINE)]


def anchors(page):
    """The anchors that GitHub gives to the headings of a page."""
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for _, text in headings(page)}


def links(page):
    """The targets of all links and pictures."""
    return re.findall(r"\]\(([^)]+)\)", prose(page))


def tables(page):
    """Each table as a list of rows, each row as a list of cells."""
    blocks = re.findall(r"(?:^\|.*\|\n)+", prose(page) + "\n", re.MULTILINE)
    return [[[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()] for table in blocks]
