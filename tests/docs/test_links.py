"""Links of the documentation lead to existing files and headings, and paths on its pages exist."""

import re

import pytest

from tests.conftest import ROOT
from tests.shared.pages import CHINESE, ENGLISH, anchors, links, name_of

PAGES = [*ENGLISH, *CHINESE]
OTHER_PAGES = [ROOT / "CHANGELOG.md"]


def broken_links(page):
    """Yield the links of a page that lead to no file, or to a heading that the file does not have."""
    for link in links(page):
        path, _, anchor = link.partition("#")
        if re.match(r"https?://", link):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield link


@pytest.mark.parametrize("page", [*PAGES, *OTHER_PAGES], ids=name_of)
def test_links_lead_to_files_and_headings(page):
    assert list(broken_links(page)) == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_paths_that_a_page_names_are_there(page):
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"(?<![\w/])((?:scripts|configs|tests|mindformers_adaptive)/[\w./-]*\w)", text)
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("pages", [ENGLISH, CHINESE], ids=["english", "chinese"])
def test_first_page_leads_to_every_other_and_each_leads_back(pages):
    first, *more = pages
    linked = {(first.parent / link).resolve() for link in links(first) if "#" not in link}
    assert set(more) <= linked
    for page in more:
        assert first in {(page.parent / link).resolve() for link in links(page)}, page


def test_every_picture_is_shown():
    shown = {(page.parent / link).resolve() for page in PAGES for link in links(page)}
    assert set((ROOT / "docs" / "images").iterdir()) <= shown
