"""The documentation's table of features names tests that exist, or says why there is no test of a feature."""

import ast
import re

import pytest

from scripts.ascend.program import problem
from tests.conftest import ROOT
from tests.shared.pages import CHINESE, ENGLISH, figure, tables

PAGES = [page for page in (*ENGLISH, *CHINESE) if page.name == "compatibility.md"]


def rows_of(page):
    """Return the rows of the feature table on a page, and a dict from each test number in the table to the test."""
    features, numbers, *_ = tables(page)
    return features[2:], {row[0]: row[1].strip("`") for row in numbers[2:]}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_each_named_test_exists_and_is_named_in_the_table(page):
    rows, named = rows_of(page)
    used = {number for row in rows for cell in row[1:-1] for number in re.findall(r"\d+", cell)}
    assert used <= set(named)
    for test in named.values():
        file, _, name = test.partition("::")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test


def test_each_entry_is_a_test_or_says_that_there_is_none():
    english, _ = PAGES
    rows, _ = rows_of(english)
    assert len(rows) >= 20
    for row in rows:
        assert len(row) == 4
        for cell in row[1:-1]:
            assert re.match(r"\d+|cannot|not tested|has no effect", cell), row
        # A table cell about something that a CPU cannot do gives a reason, or refers to a reason.
        assert all("because" in cell or "as " in cell or ": 14" in cell for cell in row[1:] if "cannot" in cell), row


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_each_case_for_ascend_is_one_that_compiles(page):
    rows, _ = rows_of(page)
    compiled = [result["case"] for result in figure("ascend_dry_run")["cases"] if not problem(result)]
    for row in rows:
        names = re.findall(r"`(\w+)`", row[-1])
        assert names or re.match(r"6|not (compiled|tested)|未(编译|测试)", row[-1]), row
        for name in names:
            assert any(re.match(rf"{name}/.*(adaptive|guided)", case) for case in compiled), name
