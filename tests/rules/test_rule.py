"""A user's own rule may be written in many ways, and its update cell takes the same steps as the rule in NumPy."""

import copy
import importlib
import importlib.util
import inspect
import itertools
import math
import pickle
import random
import re
import warnings
from fractions import Fraction
from typing import ClassVar

import numpy as np
import pytest
from log_max import LogMaxRule

from mindformers_adaptive import RuleLossScaleUpdateCell
from mindformers_adaptive.rules import Rule, float32, int32
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.rules.checks import LARGEST_FLOAT32
from mindformers_adaptive.rules.description import RESERVED
from mindformers_adaptive.rules.guided import GuidedRule
from mindformers_adaptive.rules.lanes import Lanes
from tests.conftest import ROOT
from tests.shared.every_rule import SILENT, Owned, is_same
from tests.shared.own_rules import Follow, Weigh, rule_of, with_every_operation

SCALAR, INTEGER, VECTOR = {"x": float32}, {"x": int32}, {"x": float32[2]}
FLAGS = [False, False, True, False, True, True, False, False]


def test_rule_shows_its_arguments():
    assert repr(Follow(margin=3)).startswith("Follow(margin=3, ")
    assert "scale_factor=4" in repr(AdaptiveRule(4))
    assert "margin=5" in repr(GuidedRule(5))


@pytest.mark.parametrize("language", ["en", "zh"])
def test_documents_list_the_names_that_a_state_cannot_have(language):
    text = (ROOT / "docs" / language / "own_rule.md").read_text(encoding="utf-8")
    paragraph = next(part for part in text.split("\n\n") if "`growth_tracker`" in part)
    assert set(re.findall("`(\\w+)`", paragraph)) - {"state"} == RESERVED


@pytest.mark.parametrize(
    ("package", "name", "said"),
    [
        ("mindformers_adaptive", "TextRule", "Use mindformers_adaptive.Rule"),
        *(
            ("mindformers_adaptive.rules", name, r"a dict as its state .*make_step\(self, xp\), .*docs/en/own_rule\.md")
            for name in ("TextRule", "Field", "where")
        ),
    ],
)
def test_a_name_of_before_says_what_is_there_instead(package, name, said):
    with pytest.raises(ImportError, match=f"{package} .*{name}.*{said}"):
        getattr(importlib.import_module(package), name)


def run(rule, flags=FLAGS, loss_scale=2.0**16, gradients=(None,) * 99):
    """Step a rule, and return its state after each step."""
    states = [rule.start(loss_scale)]
    for overflow, gradient in zip(flags, gradients, strict=False):
        states.append(rule.step(states[-1], overflow, gradient))
    return states[1:]


def scales(rule, flags=FLAGS, **arguments):
    return [state.loss_scale for state in run(rule, flags, **arguments)]


HALVING = """
def step(loss_scale, overflow):
    return {"loss_scale": xp.where(overflow, loss_scale * half, loss_scale)}
"""


def halved(**options):
    return rule_of(HALVING, "half = xp.floats(0.5)", **options)


HALVED = [2.0**16, 2.0**16, 2.0**15, 2.0**15, 2.0**14, 2.0**13, 2.0**13, 2.0**13]


# What the package does before and after a rule's own step.


def result(text, constants="", **options):
    """Return a rule whose step returns the given code as its results, beside an unchanged loss scale."""
    keys = ", ".join(options.get("state", {}))
    shown = ", gradient_known, max_safe_exponent, largest_gradient" if options.get("needs_gradients") else ""
    step = f"def step(loss_scale, overflow, {keys}{shown}):\n    return {{'loss_scale': loss_scale, {text}}}"
    return rule_of(step, constants, **options)


def test_scale_moves_to_the_nearer_bound_and_nan_stays():
    moved = "'loss_scale': loss_scale * xp.where(overflow, low, high)"
    rule = result(moved, "low, high = xp.floats(1e-30, 1e30)", min_loss_scale=4.0, max_loss_scale=2.0**20)
    assert scales(rule, [False, True, False]) == [2.0**20, 4.0, 2.0**20]
    for number, expected in (("inf", LARGEST_FLOAT32), ("-inf", 1.0), (-3, 1.0), (3, 3.0), ("nan", 2.0**16)):
        rule = result("'loss_scale': number", f"number = xp.floats(float('{number}'))")
        assert scales(rule, [False]) == [expected]


@pytest.mark.parametrize("overflow", [1, np.int64(1), np.bool_(True), 1.0])
def test_a_flag_may_be_a_number_that_is_one(overflow):
    rule = result("'x': xp.where(~overflow, one, two)", "one, two = xp.ints(1, 2)", state=INTEGER)
    assert rule.step(rule.start(1.0), overflow).x == 2


@pytest.mark.parametrize("overflow", [None, 5, -1, math.nan, "yes"])
def test_what_is_no_flag_and_no_state_of_the_rule_is_refused(overflow):
    rule, other = halved(), result("'x': x", state=INTEGER)
    with pytest.raises(TypeError, match=rf"'overflow' must be True or False, .* {overflow!r}\."):
        rule.step(rule.start(1.0), overflow)
    with pytest.raises(TypeError, match=r"'state' must be .*start\(\) or step\(\) of the rule 'own'"):
        other.step(rule.start(1.0), False)


def test_a_gradient_beyond_float64_shows_nothing():
    rule = result("'x': xp.int32(gradient_known)", state=INTEGER, needs_gradients=True)
    assert [rule.step(rule.start(1.0), False, gradient).x for gradient in (1.0, 10**400)] == [1, 0]


MADE = ("start", "step", "fields", "State", "arguments", "moves_by_bits", "nearest_scale")


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({"keeps_bounds": True}, r"'keeps_bounds', .*of this package.* Leave it out"),
        ({"fixed_state": {}}, r"'fixed_state', .*of this package.* Leave it out"),
        *(({name: 3}, f"'{name}', .*of this package.* rename it") for name in MADE),
        # A rule that defines step() is refused, because the package would never call this step().
        ({"step": lambda self, state, overflow: state}, "'step', .*of this package.* rename it"),
        ({"title": 5}, r"one line .*'title', .* 5\."),
        ({"title": "two\nlines"}, r"one line .*'title', .* 'two\\nlines'"),
    ],
)
def test_impossible_description_of_a_rule_is_refused(attributes, said):
    with pytest.raises(ValueError, match=rf"^The rule 'own' of .*Own (has|must have)? ?{said}"):
        type("Own", (Rule,), {"name": "own", "make_step": type(halved()).make_step, **attributes})()


@pytest.mark.parametrize("attribute", MADE)
def test_attribute_named_like_the_rules_own_is_refused(attribute):
    class Own(Rule):
        name, make_step = "own", type(halved()).make_step

        def __init__(self):
            super().__init__()
            setattr(self, attribute, 3)

    with pytest.raises(ValueError, match=f"The rule 'own' assigns self.{attribute}, .*Choose another name"):
        Own()


def test_step_takes_counts_and_bounds():
    step = """
def step(overflow, exponent, skipped_steps, consecutive_overflows):
    return {"exponent": xp.where(overflow, lowest + skipped_steps, highest - consecutive_overflows)}
"""
    constants = "lowest, highest = xp.ints(self.min_exponent, self.max_exponent)"
    rule = rule_of(step, constants, min_loss_scale=3.0, max_loss_scale=1000.0)
    states = run(rule, [True, True, False, True, False, False], 2.0**5)
    assert [int(math.log2(state.loss_scale)) for state in states] == [2, 3, 7, 4, 8, 9]
    assert (states[-1].skipped_steps, states[-1].consecutive_overflows) == (3, 0)
    rising = rule_of("step = lambda exponent: {'exponent': exponent + more}", "more = xp.ints(99)")
    assert [state.loss_scale for state in run(rising, [False, True])] == [2.0**115, 2.0**127]


def test_state_has_parts_vectors_and_numbers_of_python():
    state = Weigh(length=2).step(Weigh(length=2).start(8.0), False)
    assert state == (8.0, (2.0, 1.0), 0, 0)
    assert [type(value) for value in state] == [float, tuple, int, int]
    assert Follow().start(8.0)._fields == ("loss_scale", "shown", "skipped_steps", "consecutive_overflows")
    start = LogMaxRule().start(8.0)
    assert start._fields[1:4] == ("mean", "quick_spread", "slow_spread")
    assert start[1:4] == (3.0, 1.0, 1.0)
    before = copy.copy(start)
    LogMaxRule().step(start, True)
    assert start == before


@pytest.mark.parametrize(("gradient", "shown"), [(1.0, 15), (None, 16), (0.0, 16), (math.inf, 16), (1e-40, 16)])
def test_a_gradient_counts_where_it_shows_something(gradient, shown):
    rule = Follow()
    assert rule.step(rule.start(4.0), False, gradient).shown == shown
    assert rule.step(rule.start(4.0), True, gradient).shown == 16


def test_only_a_rule_that_moves_by_bits_needs_a_power_of_two():
    assert halved().start(1000.0).loss_scale == 1000.0
    assert not halved(min_loss_scale=5.0, max_loss_scale=7.0).moves_by_bits
    with pytest.warns(UserWarning, match=r"'loss_scale_value' .*power of two .* 1000\.0.* 512\.0"):
        assert Follow().start(1000.0).loss_scale == 512.0
    with pytest.raises(ValueError, match=r"power of two from 'min_loss_scale' to 'max_loss_scale', .* 5\.0 and 7\.0"):
        Follow(min_loss_scale=5.0, max_loss_scale=7.0)
    assert scales(Follow(min_loss_scale=8.0, max_loss_scale=8.0), [True, False], loss_scale=8.0) == [8.0, 8.0]


# Ways to write a rule: arguments, helper methods, statements of the step, dataclasses, and copies of the rule.


class Bounded(Rule):
    """A rule with an argument ``factor``, and with the bounds of the loss scale from ``Rule``."""

    name = "bounded"
    state: ClassVar = {"clean": int32}

    def __init__(self, factor=2.0, **bounds):
        super().__init__(**bounds)
        self.factor = factor

    def make_step(self, xp):
        zero, one = xp.ints(0, 1)
        share = xp.floats(self.drop())

        def step(loss_scale, overflow, clean):
            return {
                "loss_scale": xp.where(overflow, loss_scale * share, loss_scale),
                "clean": xp.where(overflow, zero, clean + one),
            }

        return step

    def drop(self):
        return 1 / self.factor


class Further(Bounded):
    """A rule with one more argument than its parent class; its step first calls the parent's step."""

    name = "further"

    def __init__(self, window=2, **arguments):
        super().__init__(**arguments)
        self.window = window

    def make_step(self, xp):
        bounded, window, factor = super().make_step(xp), xp.ints(self.window), xp.floats(self.factor)

        def step(loss_scale, overflow, clean):
            after = bounded(loss_scale, overflow, clean)
            raises = after["clean"] >= window
            after["loss_scale"] = xp.where(raises, after["loss_scale"] * factor, after["loss_scale"])
            after["clean"] = xp.where(raises, clean - clean, after["clean"])
            return after

        return step

    def drop(self):
        return super().drop() / 2


def test_arguments_and_methods_of_a_page_are_the_classs():
    rule = Further(window=3, factor=4, min_loss_scale=2.0, gradient_format="bfloat16")
    assert list(rule.arguments) == ["window", "factor", "min_loss_scale", "max_loss_scale", "gradient_format"]
    assert (rule.arguments["factor"], rule.min_loss_scale, rule.gradient_format.name) == (4, 2.0, "bfloat16")
    assert scales(Bounded(4)) == [2.0**16, 2.0**16, 2.0**14, 2.0**14, 2.0**12, 2.0**10, 2.0**10, 2.0**10]
    assert scales(Further()) == [2.0**16, 2.0**17, 2.0**15, 2.0**15, 2.0**13, 2.0**11, 2.0**11, 2.0**12]
    with pytest.raises(TypeError, match="unexpected keyword argument 'windo'"):
        Further(windo=3)
    again = Further(**rule.arguments)
    assert (again.arguments, scales(again)) == (rule.arguments, scales(rule))


def test_an_attribute_is_read_when_the_rule_is_made():
    rules = [Bounded(2), Bounded(8)]
    # If an attribute of a rule could change, the rule's arguments and labels would not match its compiled step.
    with pytest.raises(
        AttributeError, match=r"The rule 'bounded' cannot change its 'factor' after .*\. Make another rule"
    ):
        rules[0].factor = 4
    assert scales(rules[0]) == HALVED != scales(rules[1])


@pytest.mark.parametrize(
    "again",
    [
        copy.deepcopy,
        copy.copy,
        lambda rule: pickle.loads(pickle.dumps(rule)),
        lambda rule: type(rule)(**rule.arguments),
    ],
)
@pytest.mark.parametrize("rule", [Further(factor=1.5), Weigh(length=4), Follow(margin=3), LogMaxRule(share=0.3)])
def test_a_copy_of_a_rule_takes_the_same_steps(rule, again):
    gradients = [None, 1e-3, 5.0, 2.0**-20, 1.0, 0.0, math.inf, 3e-5]
    expected = run(rule, gradients=gradients)
    other = again(rule)
    assert other is not rule
    assert other.arguments == rule.arguments
    assert run(other, gradients=gradients) == expected
    assert run(copy.deepcopy(other), gradients=gradients) == expected


@pytest.mark.parametrize("rule", [Weigh(length=4), LogMaxRule(), AdaptiveRule(), GuidedRule(), Bounded(2)])
@pytest.mark.parametrize("again", [copy.deepcopy, copy.copy, lambda state: pickle.loads(pickle.dumps(state))])
def test_a_copy_of_a_state_is_the_state(rule, again):
    for state in run(rule, gradients=[1e-3] * 8):
        assert is_same(again(state)._asdict(), state._asdict())
        assert type(again(state)) is type(state)
        assert rule.step(again(state), True) == rule.step(state, True)


class Listed(Rule):
    """A rule that stores its argument as it is."""

    name = "listed"

    def __init__(self, factors, **bounds):
        super().__init__(**bounds)
        self.factors = factors

    def make_step(self, xp):
        share = xp.floats(1 / next(iter(self.factors)))
        return lambda loss_scale, overflow: {"loss_scale": xp.where(overflow, loss_scale * share, loss_scale)}


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ([2.0, 3.0], lambda factors: factors.insert(0, 8.0)),
        ([2.0, 3.0], lambda factors: factors.__setitem__(0, 8.0)),
        ({2.0: [1]}, lambda factors: factors.__setitem__(8.0, [2])),
        ({2.0: [1]}, lambda factors: factors[2.0].append(2)),
        (([2.0], 3.0)[0], lambda factors: factors.clear()),
        ({2.0}, lambda factors: factors.add(0.5)),
        (np.array([2.0, 3.0]), lambda factors: factors.__setitem__(0, 8.0)),
    ],
)
def test_an_attribute_stays_as_it_was_when_the_rule_was_made(value, change):
    rule, shown = Listed(value), repr(Listed(copy.deepcopy(value)).arguments)
    change(value)
    with pytest.raises((AttributeError, TypeError, ValueError)):
        change(rule.factors)
    restored = pickle.loads(pickle.dumps(rule))
    with pytest.raises((AttributeError, TypeError, ValueError)):
        change(restored.factors)
    assert repr(rule.arguments) == repr(restored.arguments) == shown
    for each in (rule, restored):
        assert each.step(each.start(2.0**16), True).loss_scale == 2.0**15


# Lanes: many runs at once in NumPy.

EXCHANGED = [1.0, 2.0**-9, 70000.0, 1e-39, np.nan]


@pytest.mark.parametrize(
    "rule",
    [
        *(Weigh(growth=growth) for growth in (1.5, 3.25)),
        *(Follow(margin, bound) for margin, bound in ((0, 1.0), (-2, 0.25))),
        with_every_operation(),
        *(LogMaxRule(margin, share, gradient_format="bfloat16") for margin, share in ((1.0, 0.5), (3.0, 1 / 3))),
        result("'clean': three", "three = xp.ints(3)", state={"clean": int32}),
    ],
    ids=lambda rule: type(rule).__name__,
)
def test_lanes_equal_their_runs(rule):
    numbers, count = np.random.default_rng(1), 5
    states = [rule.start(2.0 ** (12 + number)) for number in range(count)]
    lanes = Lanes(rule, states)
    for _ in range(60):
        flags, gradients = numbers.random(count) < 0.3, numbers.choice(EXCHANGED, count)
        lanes.step(flags, gradients)
        seen = zip(states, flags.tolist(), gradients.tolist(), strict=True)
        states = [rule.step(state, flag, gradient) for state, flag, gradient in seen]
        assert lanes.states() == states
        assert lanes.loss_scale.tolist() == [state.loss_scale for state in states]


# Subnormal numbers, which some devices flush to 0.


@pytest.mark.parametrize(
    ("text", "warns"),
    [
        ("'x': loss_scale * a", True),
        ("'x': loss_scale * a * b", True),
        # This intermediate product is subnormal and inexact.
        ("'x': (loss_scale * third) * a * b * c", True),
        ("'x': xp.maximum(loss_scale * a, one)", False),
        ("'x': loss_scale * a * c", False),
        ("'x': (loss_scale - loss_scale) * a * b", False),
    ],
)
def test_subnormal_numbers_are_noticed(text, warns):
    constants = "a, b, c, one, third = xp.floats(2.0**-120, 2.0**-30, 2.0**60, 1, 1 / 3)"
    rule = result(text, constants, state=SCALAR)
    start = rule.start(1.0)._replace(loss_scale=2.0**-10)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rule.step(start, False)
    said = r"'own' computed a subnormal number \(below 2\^-126\).* by xp\.maximum"
    assert [bool(re.search(said, str(warning.message))) for warning in caught] == [True] * warns


# The first state of a rule.


def unchanged(state, first):
    """Return a rule that never changes its state."""
    keys = [key for kind in state.values() for key in (kind if isinstance(kind, dict) else ())] or list(state)
    results = ", ".join(f"{key!r}: {key}" for key in keys)
    arguments = ", ".join(["loss_scale", *keys])
    step = f"def step({arguments}):\n    return {{'loss_scale': loss_scale, {results}}}"
    return rule_of(step, state=state, first=first)


@pytest.mark.parametrize(
    ("state", "first", "message"),
    [
        (INTEGER, {"y": 1}, r"has 'y', .*'state'.* x\. Correct first_state\(\) or 'state'"),
        ({}, {"y": 1}, r"has 'y', .*'state'.* {}\. Correct first_state\(\) or 'state'"),
        (INTEGER, {"loss_scale": 1}, r"has 'loss_scale', .*'state'.* x\."),
        ({"x": {"a": float32}}, {"x": 1.0}, r"has 'x', .*'state'.* a\."),
        (INTEGER, {"x": 2**40}, "has 'x' .*1099511627776, .*int32 number.* change .*state"),
        (INTEGER, {"x": 1.5}, "has 'x' .*1.5, .*int32"),
        (INTEGER, {"x": True}, "has 'x' .*True, .*int32"),
        (INTEGER, {"x": "1"}, "has 'x' .*'1', .*int32"),
        (INTEGER, {"x": [1]}, r"has 'x' .*\[1\], .*int32"),
        (SCALAR, {"x": 1e39}, r"has 'x' .*1e\+39, .*float32"),
        (SCALAR, {"x": 10**400}, "has 'x' .*, .*float32"),
        (SCALAR, {"x": 1e-40}, "has 'x' .*1e-40, .*float32"),
        (VECTOR, {"x": [1, 2, 3]}, r"has 'x' .*\[1, 2, 3\], .*vector.*list of 2 numbers"),
        (VECTOR, {"x": 1.0}, "has 'x' .*1.0, .*vector"),
        (VECTOR, {"x": ["a", "b"]}, "has 'x' .*'a', .*float32"),
        (INTEGER, None, "must be a dict, but is None"),
    ],
)
def test_a_first_state_that_is_none_is_refused_at_the_start(state, first, message):
    rule = unchanged(state, first)
    with pytest.raises(ValueError, match=f"first state .*'own' {message}"):
        rule.start(2.0**16)


@pytest.mark.parametrize(
    ("state", "first", "expected"),
    [
        (SCALAR, {"x": math.nan}, math.nan),
        (SCALAR, {"x": -math.inf}, -math.inf),
        (SCALAR, {"x": 3}, 3.0),
        (SCALAR, {"x": 0.1}, float(np.float32(0.1))),
        (SCALAR, {"x": Fraction(1, 10)}, float(np.float32(0.1))),
        (SCALAR, {}, 0.0),
        (INTEGER, {"x": np.int64(-7)}, -7),
        (INTEGER, {"x": -(2**31)}, -(2**31)),
        (VECTOR, {"x": np.arange(2)}, (0.0, 1.0)),
        (VECTOR, {"x": (math.nan, 0.1)}, (math.nan, float(np.float32(0.1)))),
        (VECTOR, {}, (0.0, 0.0)),
    ],
)
def test_a_first_state_has_the_dtypes_of_its_fields(state, first, expected):
    rule = unchanged(state, first)
    start = rule.start(2.0**16)
    assert is_same(start.x, expected)
    assert is_same(rule.step(start, False).x, expected)


# Rules for which the update cell once computed other states than the same rule in NumPy.


def assert_cell_equals(rule, steps=100, loss_scale=2.0**16, gradients=None, seed=0):
    """Step a rule in NumPy and in its update cell; assert equal states after each step, and return the states."""
    numbers, states, owned = (
        random.Random(seed),
        [rule.start(loss_scale)],
        Owned(RuleLossScaleUpdateCell(rule, loss_scale)),
    )
    for number in range(steps):
        overflow, gradient = numbers.random() < 0.3, numbers.choice(gradients or [np.nan])
        states.append(rule.step(states[-1], overflow, gradient))
        owned.step(overflow, gradient)
        assert is_same(owned.update_cell.rule_state(), states[-1]), number
    return states[1:]


def test_a_value_that_is_handed_on_is_that_of_before_the_step(mode):
    state = {"last": float32, "before": float32, "once_more": float32, "pair": {"a": int32, "b": int32}}
    state |= {"vector": float32[3], "other": float32[3], "count": int32, "further": int32}
    step = """
def step(loss_scale, overflow, last, before, once_more, a, b, vector, other, count, further, skipped_steps):
    first, second, third = xp.unstack(vector)
    return {
        "loss_scale": loss_scale * xp.where(overflow, half, growth),
        "last": loss_scale, "before": last, "once_more": before * one, "a": b, "b": a,
        "vector": xp.stack((third, first, second + one)), "other": vector,
        "count": skipped_steps, "further": count * minus * minus,
    }
"""
    constants = "half, growth, one = xp.floats(0.5, 1.25, 1)\nminus = xp.ints(-1)"
    states = assert_cell_equals(rule_of(step, constants, state=state, first={"a": 1, "b": 2, "vector": [1, 2, 3]}))
    for before, after in itertools.pairwise(states):
        assert (after.last, after.before, after.other) == (before.loss_scale, before.last, before.vector)
        assert (after.once_more, after.a, after.further) == (before.before, before.b, before.count)


def test_fields_may_be_called_like_what_other_rules_have(graph_mode):
    names = ("clean_steps", "window_index", "hysteresis_budget", "growth_num", "scale_window", "steps", "count")
    state = {**dict.fromkeys(names, float32), "clean_steps": int32, "scale_window": int32}
    numbers = [(name, "ints" if state[name] is int32 else "floats", n) for n, name in enumerate(names, 1)]
    results = ", ".join(f"{name!r}: {name} + more_{name}" for name, *_ in numbers)
    step = f"def step(loss_scale, {', '.join(names)}):\n    return {{'loss_scale': loss_scale, {results}}}"
    constants = "\n".join(f"more_{name} = xp.{kind}({n})" for name, kind, n in numbers)
    [*_, last] = assert_cell_equals(rule_of(step, constants, state=state), steps=3)
    assert [getattr(last, name) for name in names] == [3 * n for n in range(1, 8)]


def test_a_rule_may_call_anything_a_scale_factor():
    rule_of_factors = type("Factors", (type(halved()),), {"scale_factor": {"up": 2, "down": 4}})()
    assert RuleLossScaleUpdateCell(rule_of_factors, 8.0).rule_state() == rule_of_factors.start(8.0)


class FarAdaptive(AdaptiveRule):
    """An adaptive rule that changes what the adaptive rule keeps, and moves the loss scale far beyond its bounds.

    It has a hysteresis of 1, but changes the field ``hysteresis_budget``, and keeps the number of clean steps.
    """

    name = "far_adaptive"
    state: ClassVar = {**AdaptiveRule.state, "clean": int32}

    def make_step(self, xp):
        adaptive, (zero, one, two) = super().make_step(xp), xp.ints(0, 1, 2)
        up, down = xp.floats(1e30, 1e-30)

        def step(clean, clean_steps, overflow, loss_scale, hysteresis_budget, *values):
            after = adaptive(loss_scale, overflow, *values, hysteresis_budget, clean_steps)
            after["loss_scale"] = after["loss_scale"] * xp.where(overflow, down, up)
            after["hysteresis_budget"] = xp.where(hysteresis_budget > two, zero, hysteresis_budget + one)
            after["clean"] = clean_steps + one
            return after

        scale, overflow, *further, budget, clean = inspect.signature(adaptive).parameters.values()
        step.__signature__ = inspect.Signature([clean.replace(name="clean"), clean, overflow, scale, budget, *further])
        return step


def test_rule_made_from_the_adaptive_one_keeps_its_bounds(graph_mode):
    states = assert_cell_equals(FarAdaptive(max_scale_window=20, min_loss_scale=4.0, max_loss_scale=2.0**20), steps=12)
    assert {state.loss_scale for state in states} == {4.0, 2.0**20}
    assert {state.hysteresis_budget for state in states} == {0, 1, 2, 3}
    assert [state.clean for state in states[1:]] == [state.clean_steps + 1 for state in states[:-1]]


def test_raises_without_a_bound_end_at_the_largest_float32(mode):
    step = """
def step(loss_scale, overflow, capped, floor):
    wanted = loss_scale * xp.where(overflow, half, growth)
    return {"loss_scale": wanted, "capped": xp.minimum(wanted, largest), "floor": xp.maximum(-wanted, smallest)}
"""
    constants = f"half, growth, largest, smallest = xp.floats(0.5, 1e20, {LARGEST_FLOAT32!r}, -3e38)"
    states = assert_cell_equals(rule_of(step, constants, state={"capped": float32, "floor": float32}), steps=20)
    assert max(state.loss_scale for state in states) == LARGEST_FLOAT32
    assert max(state.capped for state in states) == LARGEST_FLOAT32


def test_max_safe_exponent_is_minus_1024_where_nothing_is_known(graph_mode):
    step = """
def step(exponent, gradient_known, max_safe_exponent, largest_gradient, shown, known, largest):
    return {
        "exponent": xp.where(gradient_known, xp.minimum(exponent, max_safe_exponent), exponent - one),
        "shown": max_safe_exponent, "known": xp.int32(gradient_known), "largest": largest_gradient,
    }
"""
    state = {"shown": int32, "known": int32, "largest": float32}
    rule = rule_of(step, "one = xp.ints(1)", state=state, needs_gradients=True)
    gradients = [*SILENT, -1.0, 1.0, 65504.0, 65505.0, 2.0**-126, 2.0**-14, 1e38]
    states = assert_cell_equals(rule, steps=80, loss_scale=2.0**100, gradients=gradients)
    assert {after.known for after in states} == {0, 1}
    for after in states:
        assert (after.known == 0) == (after.shown == -1024) == (after.largest == 0.0)
