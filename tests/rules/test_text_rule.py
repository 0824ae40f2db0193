"""What the text of a rule may be made of, what it takes and returns, and how its lanes keep states."""

import math
import runpy

import numpy as np
import pytest
from mindformers_adaptive.rules.backend import int32, where
from own_rules import Follow, Weigh

from mindformers_adaptive.rules import Field, TextRule

HUGE = 1e30


def fixed(loss_scale):
    """Keep the scale."""
    return {"loss_scale": loss_scale}


def rule_of(text, **others):
    """A class of rules with a text."""
    return type("Own", (TextRule,), {"name": "own", "text": staticmethod(text), **others})


def start(text, **others):
    return rule_of(text, **others)().start(2.0**16)


BRANCH = r"has a branch. Use where\(condition, a, b\): "
LOOP = r"has a loop. Keep several values in a field with a shape: "
FLAGS = r"combines flags by an operator. Use logical_and, logical_or and logical_not: "
INEXACT = r"has an operator that devices compute differently. Use products, or a table and count: "
OTHERWISE = r"has something that is no arithmetic, comparison or call of a function by its name: "
FOREIGN = r"uses what is neither of mindformers_adaptive.rules.backend nor of its own module: "


HEAD = """
import functools

import numpy as np

from mindformers_adaptive.rules.backend import float32, int32, where

TWO, TABLE = 2.0, np.arange(4)


def of(scale):
    return scale if scale > TWO else TWO


def plain(function):
    return functools.wraps(function)(lambda *arguments: function(*arguments))


"""


@pytest.fixture
def text_in_a_module(tmp_path, monkeypatch):
    """Return a function that makes the text of a rule in a module of its own, whose source can be read."""

    def make(source):
        file = tmp_path / "own_text.py"
        file.write_text(HEAD + source, encoding="utf-8")
        return runpy.run_path(str(file))["text"]

    return make


# Beside those that the page on rules of one's own shows, which tests/docs/test_own_rule.py takes from there.
@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("if overflow: return {}", BRANCH + "'if overflow:"),
        ("return of(loss_scale)", BRANCH + "'scale if scale > TWO else TWO'"),
        ("for _ in TABLE: return {}", LOOP + "'for _ in TABLE:"),
        ("while loss_scale < TWO: return {}", LOOP + "'while loss_scale < TWO:"),
        ("return overflow | (loss_scale > TWO)", FLAGS + r"'overflow \| \(loss_scale > TWO\)'"),
        ("return not overflow", FLAGS + "'not overflow'"),
        ("return ~overflow", FLAGS + "'~overflow'"),
        ("return loss_scale % TWO", INEXACT + "'loss_scale % TWO'"),
        ("return np.log2(loss_scale)", OTHERWISE + "'np.log2'"),
        ("return (lambda scale: scale * TWO)(loss_scale)", OTHERWISE),
        ("loss_scale *= TWO", OTHERWISE + r"'loss_scale \*= TWO'"),
        ("print(loss_scale)", OTHERWISE + r"'print\(loss_scale\)'"),
        ("return max(loss_scale, TWO)", FOREIGN + "'max'"),
        ("return loss_scale * nothing", FOREIGN + "'nothing'"),
    ],
)
def test_text_that_cannot_be_compiled_for_every_device_is_refused_when_the_class_is_made(
    text_in_a_module, statement, message
):
    text = text_in_a_module(f"def text(loss_scale, overflow):\n    {statement}\n")
    with pytest.raises(ValueError, match=f"The text of the rule 'own' {message}") as refusal:
        rule_of(text)
    if "of(" not in statement:
        assert f"in line {text.__code__.co_firstlineno + 1} of" in str(refusal.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("@plain\ndef text(loss_scale):\n    return {}\n", "has a decorator. Leave it out: 'plain'"),
        ("@functools.cache\ndef text(loss_scale):\n    return {}\n", "must be a function .*, but is <functools._lru"),
        ("text = lambda loss_scale: {}\n", "must be a function defined with def, but is <function <lambda>"),
    ],
)
def test_what_is_no_plain_function_is_refused_when_the_class_is_made(text_in_a_module, source, message):
    with pytest.raises(ValueError, match=f"The text of the rule 'own' {message}"):
        rule_of(text_in_a_module(source))


@pytest.mark.parametrize(
    ("takes", "returned", "message"),
    [
        ("window", "{'loss_scale': window}", r"takes 'window', which is none of consecutive_overflows, exponent, "),
        ("loss_scale", "{'exponent': loss_scale}", r"must return a dict with loss_scale, but returns \['exponent'\]\."),
        ("loss_scale", "loss_scale * TWO", r"must return a dict with loss_scale, but returns ndarray\."),
        (
            "loss_scale, clean, places",
            "{'loss_scale': loss_scale, 'clean': clean + places}",
            r"must return 'clean' as int32 of shape \(\), but returns int32 of shape \(3,\)\. Put",
        ),
    ],
)
def test_text_that_takes_or_returns_something_else_is_refused_at_the_start(text_in_a_module, takes, returned, message):
    text = text_in_a_module(f"def text({takes}):\n    return {returned}\n")
    fields = (Field("clean"),) if "clean" in takes else ()
    with pytest.raises(ValueError, match=f"The text of the rule 'own' {message}"):
        start(text, fields=fields, constants={"places": [1, 2, 3]})


def to_huge(loss_scale, overflow):
    return {"loss_scale": where(overflow, loss_scale / HUGE, loss_scale * HUGE)}


def to_nan(loss_scale):
    return {"loss_scale": (loss_scale - loss_scale) / (loss_scale - loss_scale)}


def test_scale_is_moved_to_the_nearer_bound_and_nan_leaves_it_as_it_is():
    rule = rule_of(to_huge)(min_loss_scale=4.0, max_loss_scale=2.0**20)
    state = rule.start(2.0**16)
    assert rule.step(state, False).loss_scale == 2.0**20
    assert rule.step(state, True).loss_scale == 4.0
    assert rule_of(to_nan)().step(start(to_nan), False).loss_scale == 2.0**16


def count_skips(exponent, skipped_steps, consecutive_overflows, overflow, min_exponent, max_exponent):
    moved = where(overflow, min_exponent + skipped_steps, max_exponent - consecutive_overflows)
    return {"exponent": int32(moved) + exponent - exponent}


def test_text_takes_counts_and_bounds():
    rule = rule_of(count_skips)(min_loss_scale=3.0, max_loss_scale=1000.0)
    state, exponents = rule.start(2.0**5), []
    for overflow in (True, True, False, True, False, False):
        state = rule.step(state, overflow)
        exponents.append(int(math.log2(state.loss_scale)))
    assert exponents == [2, 3, 7, 4, 8, 9]
    assert (state.skipped_steps, state.consecutive_overflows) == (3, 0)


def test_state_has_parts_vectors_and_numbers_of_python():
    state = Weigh(length=2).step(Weigh(length=2).start(8.0), False)
    assert state == (8.0, (2.0, 1.0), 0, 0)
    assert [type(value) for value in state] == [float, tuple, int, int]
    assert Follow().start(8.0)._fields == ("loss_scale", "shown", "skipped_steps", "consecutive_overflows")


@pytest.mark.parametrize(("gradient", "shown"), [(1.0, 15), (None, 16), (0.0, 16), (math.inf, 16), (1e-40, 16)])
def test_a_gradient_counts_where_it_shows_something(gradient, shown):
    rule = Follow()
    assert rule.step(rule.start(4.0), False, gradient).shown == shown
    assert rule.step(rule.start(4.0), True, gradient).shown == 16


def test_only_a_rule_that_moves_by_bits_needs_a_power_of_two():
    assert start(fixed)._replace(loss_scale=1.0) == rule_of(fixed)().start(1.0)
    assert rule_of(fixed)().start(1000.0).loss_scale == 1000.0
    with pytest.warns(UserWarning, match=r"must be a power of two here, but got 1000.0: training starts at 512.0"):
        assert Follow().start(1000.0).loss_scale == 512.0
    with pytest.raises(ValueError, match=r"There must be a power of two from .* but got 5.0 and 7.0"):
        Follow(min_loss_scale=5.0, max_loss_scale=7.0)


def to_the_top(exponent, clean, max_exponent):
    return {"exponent": max_exponent, "clean": int32(3)}


def test_what_a_text_returns_for_all_lanes_at_once_is_that_of_each():
    rule = rule_of(to_the_top, fields=(Field("clean"),))(max_loss_scale=1024.0)
    lanes = type(rule).lanes([rule] * 3, [rule.start(4.0)] * 3)
    lanes.step(np.array([False, True, False]), np.full(3, np.nan))
    assert lanes.states() == [(1024.0, 3, 0, 0), (1024.0, 3, 1, 1), (1024.0, 3, 0, 0)]
