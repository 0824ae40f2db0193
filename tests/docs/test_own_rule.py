"""The page on a user's own rules shows the code of the example file, complete tables, and the real error messages."""

import math
import re
from typing import ClassVar

import numpy as np
import pytest
from log_max import LogMaxRule

from mindformers_adaptive import rules
from mindformers_adaptive.rules import (
    Rule,
    argmin,
    ceil,
    count,
    float32,
    int32,
    maximum,
    minimum,
    stack,
    tabulate,
    take,
    where,
)
from mindformers_adaptive.rules.operations import OPERATIONS
from tests.conftest import ROOT
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


def test_example_is_the_file():
    [shown] = [text for language, text in blocks(PAGE) if language == "python" and "class LogMaxRule" in text]
    assert shown == (ROOT / "scripts" / "examples" / "log_max.py").read_text(encoding="utf-8")


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


# How a rule's code writes operations that are not called by their names, such as x + y for the operation add.
WRITTEN = {
    **{"add": "x + y", "sub": "x - y", "mul": "x * y", "div": "x / y", "floordiv": "x // y", "neg": "-x"},
    **{"less": "x < y", "less_equal": "x <= y", "equal": "x == y", "and": "x & y", "or": "x | y", "not": "~x"},
    **{"element": "v[0]", "lookup": "tabulate"},
}
# Operations that only the package itself uses, not a user's rule.
OWN = {"exponent", "power", "max_safe_exponent"}


def test_table_of_operations_has_all_of_them():
    written = code_of(table_of("operation"))
    operations = {name.partition(" ")[0] for name in OPERATIONS} - OWN
    for name in operations:
        wanted = WRITTEN.get(name, name)
        assert [code for code in written if code == wanted or code.startswith(f"{wanted}(")], name
    functions = {name for name in rules.__all__ if name.islower() and "_" not in name}
    assert {re.match(r"\w+", code)[0] for code in written if "(" in code} == {*functions, "abs"}


def test_names_of_a_rule_and_of_its_step_are_complete():
    named = {code.partition("(")[0] for code in code_of(table_of("name"))}
    attributes = re.search(r"Attributes:\n((?: {8}.*\n)+)", Rule.__doc__)[1]
    attributes = set(re.findall(r"^ {8}(\w+) \(", attributes, re.MULTILINE))
    available = set()

    class Look(LogMaxRule):
        def next_state(self, state, seen):
            for name in ("gradient_known", "largest_gradient", "max_safe_exponent"):
                getattr(seen, name)
            available.update(f"state.{name}" for name in state._values)
            available.update(f"seen.{name}" for name in vars(seen) if not name.startswith("_"))
            return super().next_state(state, seen)

    Look()
    available -= {"state.mean", "state.quick_spread", "state.slow_spread"}
    assert named == attributes | available | {"__init__", "first_state"}


def step_of(change, **fields):
    """Return the state after a step of a rule that applies ``change`` to a state with the given fields."""

    def kind_of(value):
        kind = float32 if isinstance(np.ravel(value).tolist()[0], float) else int32
        return kind[len(value)] if np.ndim(value) else kind

    class Mine(Rule):
        name = "mine"
        state: ClassVar = {name: kind_of(value) for name, value in fields.items()}

        def first_state(self, loss_scale):
            return fields

        def next_state(self, state, seen):
            return change(state)

    rule = Mine()
    return rule.step(rule.start(1024.0), overflow=False)


NAN, INF = math.nan, math.inf


def test_operations_give_at_the_edges_what_the_table_says():
    integers = {"x": -(2**31) + 1, "y": 0}
    after = step_of(lambda s: s.replace(x=abs(s.x - 1), y=(s.x - 1) // -1), **integers)
    assert (after.x, after.y) == (-(2**31), -(2**31))
    assert step_of(lambda s: s.replace(x=s.x // s.y), **integers).x == 0
    floats = {"x": [INF, NAN, 1.0, 0.0], "y": [0.0, -0.0, NAN, -0.0]}
    after = step_of(lambda s: s.replace(x=s.x / s.y), **floats)
    assert all(map(math.isnan, after.x))
    after = step_of(lambda s: s.replace(x=minimum(s.x, s.y), y=maximum(s.x, s.y)), **floats)
    assert repr(after.x) == repr((0.0, -0.0, NAN, -0.0))
    assert repr(after.y) == repr((INF, -0.0, NAN, -0.0))
    after = step_of(lambda s: s.replace(x=ceil(s.x)), x=[INF, NAN, -0.0])
    assert repr(after.x) == repr((INF, NAN, -0.0))
    flags = step_of(lambda s: s.replace(y=stack([int32(s.x != s.x), int32(s.x <= s.x)])), x=NAN, y=[0, 1])
    assert flags.y == (1, 0)
    converted = step_of(lambda s: s.replace(y=int32(s.x)), x=[-1.5, INF, -INF, NAN], y=[0, 0, 0, 0])
    assert converted.y == (-1, 2147483520, -(2**31), -(2**31))
    assert step_of(lambda s: s.replace(y=float32(s.x)), x=2**24 + 1, y=0.0).y == 2.0**24


def test_functions_of_vectors_give_what_the_table_says():
    vector = {"v": [NAN, 2.0, INF, 2.0], "i": 9}
    taken = step_of(lambda s: s.replace(v=stack([take(s.v, s.i), take(s.v, -s.i), s.v[-1], s.v[2]])), **vector)
    assert repr(taken.v) == repr((2.0, NAN, 2.0, INF))
    assert step_of(lambda s: s.replace(i=argmin(s.v)), **vector).i == 1
    assert step_of(lambda s: s.replace(i=count(s.v > 1)), **vector).i == 3

    def machine(x, flag):
        return (x + 10 if flag else x,)

    def look_up(state):
        [row] = tabulate(machine, x=(state.i, 0, 3), flag=state.v[1] == 2.0)
        return state.replace(i=row)

    assert step_of(look_up, **vector).i == 13


def test_number_nearer_to_0_than_the_table_allows_warns():
    with pytest.warns(UserWarning, match=r"subnormal number \(below 2\^-126\)"):
        step_of(lambda s: s.replace(x=s.x * 0.5), x=2.0**-126)


def refused(code):
    """Return the error message for a rule with the given code in its step."""
    lines = "def next_state(self, state, seen):\n    found = {}\n    return where(seen.overflow, state, state)\n"
    names = {"np": np, "where": where}
    exec(lines.format(code), names)

    class Mine(Rule):
        name = "mine"
        state: ClassVar = {"low": int32, "parts": float32[4]}
        next_state = names["next_state"]

    with pytest.raises(ValueError, match="The step of the rule 'mine'") as refusal:
        Mine()
    return str(refusal.value)


@pytest.mark.parametrize(("code", "message"), [[cell.strip("`") for cell in row] for row in table_of("in the step")])
def test_what_is_refused_is_refused_as_the_page_says(code, message):
    assert refused(code) == f"The step of the rule 'mine' {message}, in line 2 of <string>."


def test_a_step_of_the_same_kind_is_taken():
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        refused("state.parts[2] * 2")
