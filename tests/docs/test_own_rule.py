"""The page on a user's own rules shows code that runs, complete tables, and the real error messages."""

import math
import re
from typing import ClassVar

import pytest

from mindformers_adaptive.rules import Rule, float32, int32
from mindformers_adaptive.rules.lanes import GRADIENT
from mindformers_adaptive.rules.operations import NUMPY, OPERATIONS
from tests.shared.own_rules import make_step_of
from tests.shared.pages import ENGLISH_DOCS, blocks

PAGE = ENGLISH_DOCS / "own_rule.md"


def table_of(heading):
    """Return the rows of the page's table whose first column has this heading. A cell may contain a bar, as ``\\|``."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    [first] = [number for number, line in enumerate(lines) if line.startswith(f"| {heading} |")]
    rows = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            return rows
        rows.append([cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return rows


def code_of(rows):
    return [code for row in rows for code in re.findall("`([^`]+)`", row[0])]


def test_the_first_example_does_what_it_says(capsys):
    names = {}
    exec(next(text for language, text in blocks(PAGE) if language == "python"), names)
    assert "loss_scale=32768.0, clean=0, skipped_steps=1" in capsys.readouterr().out
    rule = names["Steady"](window=2, max_loss_scale=2.0**17)
    states = [rule.start(2.0**16)]
    for overflow in (False, False, False, True, False, False, False, False):
        states.append(rule.step(states[-1], overflow))
    assert [math.log2(state.loss_scale) for state in states] == [16, 16, 17, 17, 16, 16, 17, 17, 17]


def test_page_is_short():
    assert len(PAGE.read_text(encoding="utf-8").splitlines()) <= 155


def test_table_of_operations_has_all_of_them():
    written = {name for code in code_of(table_of("operation")) for name in re.findall(r"xp\.(\w+)\(", code)}
    assert written == {*OPERATIONS, "ints", "floats", "tabulate"}
    assert all(hasattr(NUMPY, name) for name in written)


def test_names_of_a_rule_and_of_its_step_are_complete():
    named = {code.partition("(")[0] for code in code_of(table_of("name"))}
    attributes = re.search(r"Attributes:\n((?: {8}.*\n)+)", Rule.__doc__)[1]
    attributes = set(re.findall(r"^ {8}(\w+) \(", attributes, re.MULTILINE))
    taken = {"loss_scale", "exponent", "overflow", "skipped_steps", "consecutive_overflows", *GRADIENT}
    assert named == attributes | taken | {"__init__", "first_state", "make_step"}


def refused(code):
    """Return the error message for a rule with the given code in its step."""
    lines = """import numpy as np
def make_step(self, xp):
    half = xp.floats(0.5)
    def step(loss_scale, overflow, low, parts):
        found = {}
        return dict(loss_scale=loss_scale, low=low, parts=parts)
    return step
"""

    class Mine(Rule):
        name = "mine"
        state: ClassVar = {"low": int32, "parts": float32[4]}
        make_step = make_step_of(lines.format(code))

    with pytest.raises(ValueError, match="The step of the rule 'mine'") as refusal:
        Mine()
    return str(refusal.value)


@pytest.mark.parametrize(("code", "message"), [[cell.strip("`") for cell in row] for row in table_of("in the step")])
def test_what_is_refused_is_refused_as_the_page_says(code, message):
    assert re.fullmatch(rf"The step of the rule 'mine' {re.escape(message)}, in line 5 of .*\.py\.", refused(code))


def test_a_step_of_the_same_kind_is_taken():
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        refused("parts * half")
