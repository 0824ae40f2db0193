"""The page on rules of one's own: its example is the file, its tables are complete, its messages are the real ones."""

import importlib
import re
import sys

import pytest
from conftest import ROOT
from log_max import LogMaxRule
from pages import ENGLISH_DOCS, blocks, tables

from mindformers_adaptive.rules import backend

PAGE = ENGLISH_DOCS / "own_rule.md"

HEAD = """
import numpy as np

from mindformers_adaptive.rules import Field, TextRule
from mindformers_adaptive.rules.backend import int32, maximum, stack, where

ONE, TWO, HALF = 1.0, 2.0, 0.5
FACTORS = np.array([0.5, 2.0], np.float32)
"""


def table_of(heading):
    [rows] = [rows for rows in tables(PAGE) if rows[0][0] == heading]
    return rows[2:]


REFUSED = table_of("in the text")


def names_in(rows):
    return {name for row in rows for name in re.findall(r"`(\w+)`", row[0])}


@pytest.fixture
def make_class(tmp_path, monkeypatch):
    """Make the class of a rule in a module of its own, as a user would, from what its text returns."""
    monkeypatch.syspath_prepend(tmp_path)
    # A name for each module, because Python keeps those that it has imported.
    number = sum(name.startswith("own_rule_") for name in sys.modules)

    def make(returned, takes="loss_scale, overflow, rare", fields='(Field("rare"),)'):
        name = f"own_rule_{number}"
        text = f"def step({takes}):\n    return {returned}\n"
        rule = f'class Mine(TextRule):\n    name = "mine"\n    fields = {fields}\n    text = step\n'
        (tmp_path / f"{name}.py").write_text(f"{HEAD}\n\n{text}\n\n{rule}", encoding="utf-8")
        return importlib.import_module(name).Mine

    return make


def test_example_is_the_file():
    [shown] = [text for language, text in blocks(PAGE) if language == "python" and "class LogMaxRule" in text]
    assert shown == (ROOT / "scripts" / "examples" / "log_max.py").read_text(encoding="utf-8")


def test_names_that_a_text_can_take_are_all_of_them():
    named = names_in(table_of("name")) - {"constants"}

    class Unknown(LogMaxRule):
        inputs = (*LogMaxRule.inputs, "nothing")

    with pytest.raises(ValueError, match="takes 'nothing', which is none of") as refusal:
        Unknown().start(1024.0)
    listed = re.search(r"none of (.*)\.", str(refusal.value))[1].split(", ")
    assert named == set(listed) - {"mean", "spreads", "margin", "share"}


def test_functions_are_those_of_the_backend():
    assert names_in(table_of("functions")) == set(backend.__all__)


@pytest.mark.parametrize(("code", "message"), [[cell.strip("`") for cell in row[:2]] for row in REFUSED])
def test_what_a_text_may_not_do_is_refused_as_the_page_says(make_class, code, message):
    with pytest.raises(ValueError, match=re.escape(f"The text of the rule 'mine' {message}: '")):
        make_class(f'{{"loss_scale": {code}, "rare": rare}}')


def test_a_text_of_the_same_kind_is_taken(make_class):
    rule = make_class('{"loss_scale": where(overflow, loss_scale * HALF, loss_scale), "rare": rare}')()
    assert rule.step(rule.start(1024.0), overflow=True).loss_scale == 512.0


@pytest.mark.parametrize(
    ("place", "returned", "takes", "fields"),
    [
        (0, '{"loss_scale": maximum(loss_scale, largest_gradient)}', "loss_scale, largest_gradient", "()"),
        (1, '{"loss_scale": loss_scale}', "loss_scale", '(Field("low"),)'),
        (2, '{"loss_scale": loss_scale, "low": loss_scale}', "loss_scale", '(Field("low"),)'),
    ],
)
def test_messages_of_the_first_use_are_those_shown(make_class, place, returned, takes, fields):
    [shown] = [text.splitlines() for language, text in blocks(PAGE) if language == "text"]
    with pytest.raises(ValueError, match="The text of the rule") as refusal:
        make_class(returned, takes, fields)().start(1024.0)
    assert shown[place] == f"ValueError: {refusal.value}"
