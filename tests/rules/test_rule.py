"""A user's own rule may be written in many ways, and its update cell takes the same steps as the rule in NumPy."""

import copy
import dataclasses
import functools
import importlib
import importlib.util
import itertools
import math
import pickle
import random
import re
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from types import MappingProxyType
from typing import ClassVar

import numpy as np
import pytest
from log_max import LogMaxRule

from mindformers_adaptive import RuleLossScaleUpdateCell
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
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.rules.checks import LARGEST_FLOAT32
from mindformers_adaptive.rules.description import RESERVED
from mindformers_adaptive.rules.guided import GuidedRule
from mindformers_adaptive.rules.lanes import Lanes
from tests.conftest import ROOT
from tests.shared.every_rule import SILENT, Owned, is_same
from tests.shared.own_rules import Follow, Plain, Weigh

SCALAR, INTEGER, VECTOR = {"x": float32}, {"x": int32}, {"x": float32[2]}
FLAGS = [False, False, True, False, True, True, False, False]


def rule_of(next_state, *, state=None, first=MappingProxyType({}), needs_gradients=False, **arguments):
    """Return a rule with the given step function and state fields."""
    names = {"name": "own", "state": state or {}, "needs_gradients": needs_gradients, "next_state": next_state}
    if first != {}:
        names["first_state"] = lambda self, loss_scale: first
    return type("Own", (Rule,), names)(**arguments)


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
        ("mindformers_adaptive.rules", "TextRule", r"a method next_state\. .*docs/en/own_rule\.md"),
        ("mindformers_adaptive.rules", "Field", "a dict as its state"),
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


def halved(self, state, seen):
    return where(seen.overflow, state.replace(loss_scale=state.loss_scale / 2), state)


HALVED = [2.0**16, 2.0**16, 2.0**15, 2.0**15, 2.0**14, 2.0**13, 2.0**13, 2.0**13]


# What the package does before and after a rule's own step.


def to_the_ends(self, state, seen):
    return state.replace(loss_scale=state.loss_scale * where(seen.overflow, 1e-30, 1e30))


def test_scale_moves_to_the_nearer_bound_and_nan_stays():
    rule = rule_of(to_the_ends, min_loss_scale=4.0, max_loss_scale=2.0**20)
    assert scales(rule, [False, True, False]) == [2.0**20, 4.0, 2.0**20]
    for divisor in (0.0, math.inf - 0.0):
        rule = rule_of(
            lambda self, state, seen, by=divisor: state.replace(loss_scale=(by - float32(seen.overflow)) / by)
        )
        assert scales(rule, [False]) == [2.0**16]
    for number, expected in ((math.inf, LARGEST_FLOAT32), (-math.inf, 1.0), (-3, 1.0), (3, 3.0)):
        rule = rule_of(lambda self, state, seen, number=number: state.replace(loss_scale=number))
        assert scales(rule, [False]) == [expected]


@pytest.mark.parametrize("overflow", [1, np.int64(1), np.bool_(True), 1.0])
def test_a_flag_may_be_a_number_that_is_one(overflow):
    rule = rule_of(lambda self, state, seen: state.replace(x=where(~seen.overflow, 1, 2)), state=INTEGER)
    assert rule.step(rule.start(1.0), overflow).x == 2


@pytest.mark.parametrize("overflow", [None, 5, -1, math.nan, "yes"])
def test_what_is_no_flag_and_no_state_of_the_rule_is_refused(overflow):
    rule, other = rule_of(halved), rule_of(halved, state=INTEGER)
    with pytest.raises(TypeError, match=rf"'overflow' must be True or False, .* {overflow!r}\."):
        rule.step(rule.start(1.0), overflow)
    with pytest.raises(TypeError, match=r"'state' must be .*start\(\) or step\(\) of the rule 'own'"):
        other.step(rule.start(1.0), False)


def test_a_gradient_beyond_float64_shows_nothing():
    rule = rule_of(
        lambda self, state, seen: state.replace(x=int32(seen.gradient_known)), state=INTEGER, needs_gradients=True
    )
    assert [rule.step(rule.start(1.0), False, gradient).x for gradient in (1.0, 10**400)] == [1, 0]


def test_bounds_may_be_set_after_the_constructor_of_rule():
    class Tight(Rule):
        name = "tight"

        def __init__(self):
            super().__init__()
            self.min_loss_scale, self.max_loss_scale = 64.0, 2.0**18

        def next_state(self, state, seen):
            return state.replace(exponent=where(seen.overflow, state.exponent - 20, state.exponent + 20))

    assert scales(Tight(), [False, True, True]) == [2.0**18, 64.0, 64.0]


MADE = ("start", "step", "fields", "State", "traced", "arguments", "moves_by_bits", "nearest_scale")


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
        ({"tried": {"margin": 2.0}}, r"'tried' as a dict .*'margin': \(2\.0, .* has \{'margin': 2\.0\}"),
        ({"tried": [1.0]}, r"'tried' as a dict .* has \[1\.0\]"),
        ({"state": {"ﬁne": int32}}, r"has 'ﬁne' in its state, .*NFKC.* Rename it"),
    ],
)
def test_impossible_description_of_a_rule_is_refused(attributes, said):
    with pytest.raises(ValueError, match=rf"^The rule 'own' of .*Own (has|must have)? ?{said}"):
        type("Own", (Rule,), {"name": "own", "next_state": halved, **attributes})()


@pytest.mark.parametrize("attribute", MADE)
def test_attribute_named_like_the_rules_own_is_refused(attribute):
    class Own(Rule):
        name, next_state = "own", halved

        def __init__(self):
            super().__init__()
            setattr(self, attribute, 3)

    with pytest.raises(ValueError, match=f"The rule 'own' assigns self.{attribute}, .*Choose another name"):
        Own()


def test_an_error_in_the_first_state_is_told_with_its_line():
    rule = rule_of(halved)
    type(rule).first_state = lambda self, loss_scale: {}["x"]
    with pytest.raises(
        ValueError,
        match=rf"^first_state\(\) of the rule 'own' raises KeyError: 'x', in line \d+ of {__file__}\. Correct ",
    ):
        rule.start(1.0)


def test_step_takes_counts_and_bounds():
    def count_skips(self, state, seen):
        skipped, in_a_row = self.min_exponent + state.skipped_steps, self.max_exponent - state.consecutive_overflows
        return state.replace(exponent=where(seen.overflow, skipped, in_a_row))

    rule = rule_of(count_skips, min_loss_scale=3.0, max_loss_scale=1000.0)
    states = run(rule, [True, True, False, True, False, False], 2.0**5)
    assert [int(math.log2(state.loss_scale)) for state in states] == [2, 3, 7, 4, 8, 9]
    assert (states[-1].skipped_steps, states[-1].consecutive_overflows) == (3, 0)
    exponents = run(rule_of(lambda self, state, seen: state.replace(exponent=state.exponent + 99)), [False, True])
    assert [state.loss_scale for state in exponents] == [2.0**115, 2.0**127]


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
    assert rule_of(halved).start(1000.0).loss_scale == 1000.0
    assert not rule_of(halved, min_loss_scale=5.0, max_loss_scale=7.0).moves_by_bits
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

    def next_state(self, state, seen):
        return where(
            seen.overflow, state.replace(loss_scale=self.lowered(state.loss_scale), clean=0), self.later(state)
        )

    def lowered(self, scale):
        return scale / self.factor

    def later(self, state):
        return state.replace(clean=state.clean + 1)


class Further(Bounded):
    """A rule with one more argument than its parent class; its next_state() first calls the parent's next_state()."""

    name = "further"

    def __init__(self, window=2, **arguments):
        super().__init__(**arguments)
        self.window = window

    def next_state(self, state, seen):
        after = super().next_state(state, seen)
        raised = after.replace(loss_scale=after.loss_scale * self.factor, clean=0)
        return where(after.clean >= self.window, raised, after)

    def lowered(self, scale):
        return super().lowered(scale) / 2


def test_arguments_and_methods_of_a_page_are_the_classs():
    rule = Further(window=3, factor=4, min_loss_scale=2.0, gradient_format="bfloat16")
    assert list(rule.arguments) == ["window", "factor", "min_loss_scale", "max_loss_scale", "gradient_format"]
    assert (rule.arguments["factor"], rule.min_loss_scale, rule.gradient_format.name) == (4, 2.0, "bfloat16")
    assert scales(Bounded(4)) == [2.0**16, 2.0**16, 2.0**14, 2.0**14, 2.0**12, 2.0**10, 2.0**10, 2.0**10]
    assert scales(Further()) == [2.0**16, 2.0**17, 2.0**15, 2.0**15, 2.0**13, 2.0**11, 2.0**11, 2.0**12]
    with pytest.raises(TypeError, match="unexpected keyword argument 'windo'"):
        Further(windo=3)
    again = Further(**rule.arguments)
    assert (again.arguments, again.traced.shape, scales(again)) == (rule.arguments, rule.traced.shape, scales(rule))


TWO = 2


def half(x):
    return x / TWO


def halving(by):
    def next_state(self, state, seen):
        def lowered(scale):
            return scale / by

        return where(seen.overflow, state.replace(loss_scale=lowered(state.loss_scale)), state)

    return next_state


def by_loops(self, state, seen):
    candidates, scale = [state.loss_scale / 2**n for n in (1, 0)], state.loss_scale
    for n, (flag, candidate) in enumerate(zip((seen.overflow, ~seen.overflow), candidates, strict=True)):
        assert n < TWO
        scale = where(flag, candidate, scale)
    return state.replace(loss_scale=scale)


@pytest.mark.parametrize(
    "next_state",
    [
        halved,
        halving(TWO),
        lambda self, state, seen: where(seen.overflow, state.replace(loss_scale=half(state.loss_scale)), state),
        by_loops,
        staticmethod(lambda state, seen: halved(None, state, seen)),
        classmethod(halved),
        functools.partialmethod(lambda self, by, state, seen: halving(by)(self, state, seen), TWO),
        lambda self, state, seen: state.replace(
            loss_scale=state.loss_scale * (0.5, 1.0)[0 if seen is None else 1]
        ).replace(loss_scale=where(~seen.overflow, state.loss_scale, 0.5 * state.loss_scale)),
        lambda self, state, seen: state.replace(
            loss_scale=functools.reduce(lambda x, y: x * y, [state.loss_scale, where(seen.overflow, 0.5, 1)])
        ),
        lambda self, state, seen: state.replace(loss_scale=take([1.0, 0.5], int32(seen.overflow)) * state.loss_scale),
        lambda self, state, seen: state.replace(
            loss_scale=np.float64(0.5) * state.loss_scale * where(seen.overflow, 1.0, 2.0)
        ),
        lambda self, state, seen: state.replace(
            loss_scale=state.loss_scale / float32(tabulate(lambda o: (2 if o else 1,), o=seen.overflow)[0])
        ),
    ],
)
def test_step_is_any_function_that_computes_with_values(next_state):
    assert scales(rule_of(next_state)) == HALVED


def test_pick_between_equal_numbers_by_a_vector_is_a_vector():
    def step(self, state, seen):
        return state.replace(x=where(state.x < 1, state.loss_scale, state.loss_scale))

    assert run(rule_of(step, state=VECTOR), [False])[0].x == (2.0**16,) * 2


@dataclasses.dataclass
class Dated(Rule):
    """A rule that has no hash, because it is a dataclass, and that holds another rule as an attribute."""

    name: ClassVar = "dated"
    state: ClassVar = {"clean": int32, "rung": int32}
    factor: float = 2.0

    def __post_init__(self):
        super().__init__()
        self.inner = Bounded(self.factor)

    def next_state(self, state, seen):
        [rung] = tabulate(self.moved, rung=(state.rung, 0, 5), overflow=seen.overflow)
        return self.inner.next_state(state, seen).replace(rung=rung)

    def moved(self, rung, overflow):
        return (0,) if overflow else (min(rung + 1, 5),)


def test_a_rule_may_be_a_dataclass_and_use_another_rule():
    rule = Dated(4.0)
    assert scales(rule) == scales(Bounded(4.0))
    assert [state.rung for state in run(rule)] == [1, 2, 0, 1, 0, 0, 1, 2]
    assert (rule.arguments, Dated(**rule.arguments) == rule) == ({"factor": 4.0}, True)


def test_rules_may_be_made_in_several_threads():
    def slow(self, state, seen):
        time.sleep(0.005)
        return halved(self, state, seen)

    with ThreadPoolExecutor(4) as threads:
        rules = list(threads.map(lambda _: rule_of(slow), range(8)))
    assert [scales(rule) for rule in rules] == [HALVED] * 8


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

    def next_state(self, state, seen):
        first = next(iter(self.factors))
        return where(seen.overflow, state.replace(loss_scale=state.loss_scale / first), state)


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


class Counters(Rule):
    """A rule with a vector of counters; an argument of the rule sets the length of the vector."""

    name = "counters"
    state: ClassVar = {"rung": int32, "wait": int32[2]}

    def __init__(self, rungs=3, factors=(2.0, 4.0)):
        super().__init__()
        self.rungs, self.factors = rungs, tuple(factors)

    def next_state(self, state, seen):
        rung, wait = tabulate(self.moved, fell=seen.overflow, rung=(state.rung, 0, self.rungs))
        factor = take(self.factors, rung // 2)
        scale = where(seen.overflow, state.loss_scale / factor, minimum(state.loss_scale * self.factors[0], 1e30))
        return state.replace(rung=rung, wait=stack([wait, state.wait[0]]), loss_scale=scale)

    def moved(self, fell, rung):
        return (0, rung) if fell else (min(rung + 1, self.rungs), self.rungs * 10)


@pytest.mark.parametrize(
    "rules",
    [
        [Weigh(growth=growth) for growth in (1.5, 2.0, 1.5, 3.25)],
        [Plain(window, max_loss_scale=bound) for window, bound in ((1, None), (2, 2.0**18), (3, 2.0**17), (2, None))],
        [Follow(margin, bound) for margin, bound in ((0, 1.0), (3, 4.0), (-2, 0.25), (3, 1.0))],
        [Counters(rungs, factors) for rungs, factors in ((1, (2.0, 8.0)), (3, (2.0, 4.0)), (7, (1.5, 3.0)))],
        [LogMaxRule(margin, share) for margin, share in ((1.0, 0.5), (2.0, 0.1), (3.0, 1 / 3))],
        [rule_of(lambda _, state, seen, by=by: state.replace(loss_scale=state.loss_scale / by)) for by in (0.5, 0.0)],
        [rule_of(lambda self, state, seen: state.replace(exponent=self.max_exponent, clean=3), state={"clean": int32})]
        * 3,
    ],
    ids=lambda rules: type(rules[0]).__name__,
)
def test_lanes_of_rules_with_other_numbers_equal_their_runs(rules):
    assert_lanes_equal_runs(rules)


def assert_lanes_equal_runs(rules):
    numbers = np.random.default_rng(1)
    states = [rule.start(2.0 ** (12 + number)) for number, rule in enumerate(rules)]
    lanes = Lanes(rules, states)
    for _ in range(60):
        flags, gradients = numbers.random(len(rules)) < 0.3, numbers.choice(EXCHANGED, len(rules))
        lanes.step(flags, gradients)
        seen = zip(rules, states, flags.tolist(), gradients.tolist(), strict=True)
        states = [rule.step(state, flag, gradient) for rule, state, flag, gradient in seen]
        assert lanes.states() == states
        assert lanes.loss_scale.tolist() == [state.loss_scale for state in states]


class Numbers(Rule):
    """A rule with conditions, tables, vectors and reductions that depend on the rule's arguments only."""

    name = "numbers"
    state: ClassVar = {"n": int32, "v": float32[3], "places": int32[2]}
    needs_gradients = True

    def __init__(self, k=1.0, m=2, **arguments):
        super().__init__(**arguments)
        self.k, self.m = k, m

    def next_state(self, state, seen):
        is_large = float32(self.k) > 2
        vector = where(is_large | seen.overflow, stack([self.k, 1.0, 2.0]), state.v)
        least, many = argmin([self.k, 2.0, float(self.m)]), count([self.k > 1, True, self.m > 2])
        moved, _ = tabulate(self.moved, n=(state.n, -self.m, self.m), overflow=seen.overflow)
        scale = take([self.k, 2.5, 3.5], least + state.n) * state.loss_scale / float32(self.m)
        bounded = minimum(maximum(scale, self.k), 1e20 / self.k) + seen.largest_gradient
        after = state.replace(v=vector + 1.0, n=moved + least - many, places=stack([least, seen.max_safe_exponent]))
        return where(seen.overflow, after, after.replace(loss_scale=where(is_large, bounded, bounded * 1.5)))

    def moved(self, n, overflow):
        return (n * self.m, -n) if overflow else (n - 1, 0)


def test_lanes_have_numbers_of_their_own_in_every_place():
    cases = [
        (1.0, 2, "float16"),
        (3.0, 5, "bfloat16"),
        (2.5, 3, "float16"),
        (7.0, 2, "float8_e4m3fn"),
        (3.0, 5, "float16"),
    ]
    assert_lanes_equal_runs([Numbers(k, m, gradient_format=name) for k, m, name in cases])


def test_lanes_of_rules_that_compute_otherwise_are_refused():
    def first(self, state, seen):
        return state.replace(loss_scale=state.v[0])

    def last(self, state, seen):
        return state.replace(loss_scale=state.v[-1])

    rules = [rule_of(step, state={"v": float32[2]}, first={"v": [5, 7]}) for step in (first, last)]
    assert [scales(rule, [False]) for rule in rules] == [[5.0], [7.0]]
    with pytest.raises(ValueError, match=r"traced\.shape"):
        Lanes(rules, [rule.start(2.0) for rule in rules]).step(np.array([False] * 2), np.array([np.nan] * 2))


def test_zeros_of_either_sign_are_numbers_of_their_own():
    rules = [rule_of(lambda self, state, seen, zero=zero: state.replace(x=zero), state=SCALAR) for zero in (0.0, -0.0)]
    lanes = Lanes(rules, [rule.start(2.0) for rule in rules])
    lanes.step(np.array([False] * 2), np.array([np.nan] * 2))
    assert [math.copysign(1, state.x) for state in lanes.states()] == [1, -1]


# Subnormal numbers, which some devices flush to 0.


def large_again(number):
    """Return a number that is not subnormal. For the input 2^16, an intermediate product is subnormal (< 2^-126)."""
    return abs(number * 2.0**-80 * 2.0**-64 * 2.0**100 * 2.0**10 - 2.0) + 1.0


@pytest.mark.parametrize(
    "next_state",
    [
        lambda self, state, seen: state.replace(x=state.loss_scale * 1e-30 * 1e-20 * 1e30),
        lambda self, state, seen: state.replace(x=state.loss_scale * 2.0**-80 * 2.0**-64),
        # The result is not subnormal, but an intermediate product is, so the rule must warn.
        lambda self, state, seen: state.replace(x=state.loss_scale * 2.0**-80 * 2.0**-64 * 2.0**100),
        lambda self, state, seen: state.replace(x=ceil(state.loss_scale * 2.0**-80 * 2.0**-64)),
        lambda self, state, seen: where(seen.overflow, state, state.replace(x=large_again(state.loss_scale))),
        # The product of the two constants, 2^-140, is subnormal, so the rule must warn at every loss scale.
        lambda self, state, seen: state.replace(x=state.loss_scale * (float32(2.0**-80) * 2.0**-60)),
    ],
)
def test_numbers_nearer_to_zero_than_the_smallest_are_noticed(next_state):
    rule = rule_of(next_state, state=SCALAR)
    with pytest.warns(UserWarning, match=r"'own' computed a subnormal number \(below 2\^-126\).* by maximum"):
        rule.step(rule.start(2.0**16), False)


@pytest.mark.parametrize(
    "next_state",
    [
        lambda self, state, seen: state.replace(x=maximum(state.loss_scale * 2.0**-80 * 2.0**-64, 0.5)),
        lambda self, state, seen: state.replace(x=(state.loss_scale - 2.0**16) * 2.0**-80 * -(2.0**-64)),
        lambda self, state, seen: state.replace(x=state.loss_scale * 2.0**-80 * 2.0**-62),
    ],
)
def test_numbers_that_no_device_flushes_are_not_noticed(next_state):
    rule = rule_of(next_state, state=SCALAR)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rule.step(rule.start(2.0**16), False)


# The first state of a rule.


@pytest.mark.parametrize(
    ("state", "first", "message"),
    [
        (INTEGER, {"y": 1}, r"has 'y', .*'state'.* x\. Correct first_state\(\) or 'state'"),
        ({}, {"y": 1}, r"has 'y', .*'state'.* {}\. Correct first_state\(\) or 'state'"),
        (INTEGER, {"loss_scale": 1}, r"has 'loss_scale', .*'state'.* x\."),
        ({"x": {"a": float32}}, {"x": 1.0}, r"has 'x', .*'state'.* a\."),
        (
            INTEGER,
            {"x": 2**40},
            "has 'x' .*1099511627776, .*int32 number.* change .*state",
        ),
        (INTEGER, {"x": 1.5}, "has 'x' .*1.5, .*int32"),
        (INTEGER, {"x": 1.0}, "has 'x' .*1.0, .*int32"),
        (INTEGER, {"x": True}, "has 'x' .*True, .*int32"),
        (INTEGER, {"x": "1"}, "has 'x' .*'1', .*int32"),
        (INTEGER, {"x": None}, "has 'x' .*None, .*int32"),
        (INTEGER, {"x": [1]}, r"has 'x' .*\[1\], .*int32"),
        (INTEGER, {"x": np.array([1, 2])}, "has 'x' .*, .*int32"),
        (SCALAR, {"x": Fraction(1, 3)}, r"has 'x' .*Fraction\(1, 3\), .*float32"),
        (SCALAR, {"x": 1j}, "has 'x' .*1j, .*float32"),
        (SCALAR, {"x": 1e39}, r"has 'x' .*1e\+39, .*float32"),
        (SCALAR, {"x": 10**400}, "has 'x' .*, .*float32"),
        (SCALAR, {"x": True}, "has 'x' .*True, .*float32"),
        (SCALAR, {"x": 1e-40}, "has 'x' .*1e-40, .*float32"),
        (VECTOR, {"x": [1, 2, 3]}, r"has 'x' .*\[1, 2, 3\], .*vector.*list of 2 numbers"),
        (VECTOR, {"x": 1.0}, "has 'x' .*1.0, .*vector"),
        (VECTOR, {"x": "ab"}, "has 'x' .*'ab', .*vector"),
        (VECTOR, {"x": ["a", "b"]}, "has 'x' .*'a', .*float32"),
        (VECTOR, {"x": np.ones((2, 2))}, "has 'x' .*, .*float32"),
        (VECTOR, {"x": {2.0, 1.0}}, "has 'x' .*, .*vector"),
        (INTEGER, [1], r"must be a dict, but is \[1\]"),
        (INTEGER, None, "must be a dict, but is None"),
    ],
)
def test_a_first_state_that_is_none_is_refused_at_the_start(state, first, message):
    rule = rule_of(lambda self, state, seen: state, state=state, first=first)
    with pytest.raises(ValueError, match=f"first state .*'own' {message}"):
        rule.start(2.0**16)


@pytest.mark.parametrize(
    ("state", "first", "expected"),
    [
        (SCALAR, {"x": math.nan}, math.nan),
        (SCALAR, {"x": -math.inf}, -math.inf),
        (SCALAR, {"x": 3}, 3.0),
        (SCALAR, {"x": 0.1}, float(np.float32(0.1))),
        (SCALAR, {}, 0.0),
        (INTEGER, {"x": np.int64(-7)}, -7),
        (INTEGER, {"x": -(2**31)}, -(2**31)),
        (VECTOR, {"x": np.arange(2)}, (0.0, 1.0)),
        (VECTOR, {"x": (math.nan, 0.1)}, (math.nan, float(np.float32(0.1)))),
        (VECTOR, {}, (0.0, 0.0)),
    ],
)
def test_a_first_state_has_the_dtypes_of_its_fields(state, first, expected):
    rule = rule_of(lambda self, state, seen: state, state=state, first=first)
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


def remembers(self, state, seen):
    first, second, third = state.vector
    return state.replace(
        loss_scale=state.loss_scale * where(seen.overflow, 0.5, 1.25),
        last=state.loss_scale,
        before=state.last,
        once_more=state.before * 1,
        a=state.b,
        b=state.a,
        vector=stack([third, first, second + 1]),
        other=state.vector,
        count=state.skipped_steps,
        further=state.count,
    )


def test_a_value_that_is_handed_on_is_that_of_before_the_step(mode):
    state = {"last": float32, "before": float32, "once_more": float32, "pair": {"a": int32, "b": int32}}
    state |= {"vector": float32[3], "other": float32[3], "count": int32, "further": int32}
    states = assert_cell_equals(rule_of(remembers, state=state, first={"a": 1, "b": 2, "vector": [1, 2, 3]}))
    for before, after in itertools.pairwise(states):
        assert (after.last, after.before, after.other) == (before.loss_scale, before.last, before.vector)
        assert (after.once_more, after.a, after.further) == (before.before, before.b, before.count)


class Watching(AdaptiveRule):
    """An adaptive rule that also counts the steps since the last overflow or raise before the present step."""

    name = "watching"
    state: ClassVar = {**AdaptiveRule.state, "clean": int32}

    def next_state(self, state, seen):
        return super().next_state(state, seen).replace(clean=state.clean_steps + 1)


def drawn_together(self, state, seen):
    mean = (state.vector[0] + state.vector[1]) / 2
    together = (state.vector + mean) / 2 + minimum(mean, 1.0)
    return state.replace(vector=where(seen.overflow, together, state.vector), first=state.vector[0])


def test_overflow_change_leaves_a_value_that_is_handed_on():
    states = run(Watching(max_scale_window=3, min_scale_window=3))
    assert [state.clean for state in states] == [1, 2, 3, 1, 2, 1, 1, 2]
    states = run(rule_of(drawn_together, state={"vector": float32[2], "first": float32}, first={"vector": [1, 3]}))
    assert len({state.vector for state in states}) == 4
    assert [state.first for state in states] == [1, *(state.vector[0] for state in states[:-1])]


def test_constants_of_the_compiler_leave_a_value_handed_on(graph_mode):
    # In each of these functions, the product of the constants is 1 in int32 arithmetic, so the compiler may replace the
    # function's result by ``a`` itself. The fields must still get the value of ``a`` before the step.
    before = (lambda a: a * -1 * -1, lambda a: a * 3 * -1431655765, lambda a: 65537 * (-65535 * a))
    state = {"a": int32} | {f"before_{n}": int32 for n in range(len(before))}

    def step(self, state, seen):
        called = {f"before_{n}": function(state.a) for n, function in enumerate(before)}
        return state.replace(a=state.a + 1, **called)

    states = assert_cell_equals(rule_of(step, state=state), steps=3)
    assert states[-1][1:5] == (3, 2, 2, 2)


def test_fields_may_be_called_like_what_other_rules_have(graph_mode):
    names = ("clean_steps", "window_index", "hysteresis_budget", "growth_num", "scale_window", "steps", "count")

    def step(self, state, seen):
        return state.replace(**{name: getattr(state, name) + n for n, name in enumerate(names, 1)})

    rule = rule_of(step, state=dict.fromkeys(names, float32))
    rule = rule_of(step, state={**rule.state, "clean_steps": int32, "scale_window": int32})
    [*_, last] = assert_cell_equals(rule, steps=3)
    assert [getattr(last, name) for name in names] == [3 * n for n in range(1, 8)]


def test_a_rule_may_call_anything_a_scale_factor():
    rule_of_factors = type("Factors", (type(rule_of(halved)),), {"scale_factor": {"up": 2, "down": 4}})()
    assert RuleLossScaleUpdateCell(rule_of_factors, 8.0).rule_state() == rule_of_factors.start(8.0)


class FarGuided(GuidedRule):
    """A guided rule that moves the loss scale far beyond its bounds. The package must clip the loss scale to them."""

    name = "far_guided"

    def next_state(self, state, seen):
        after = super().next_state(state, seen)
        return after.replace(exponent=after.exponent + where(seen.overflow, -300, 300))


class FarAdaptive(AdaptiveRule):
    """An adaptive rule that moves the loss scale beyond its bounds, and also counts the raises."""

    name = "far_adaptive"
    state: ClassVar = {**AdaptiveRule.state, "raises": float32}

    def next_state(self, state, seen):
        after = super().next_state(state, seen)
        factor = where(seen.overflow, 1e-30, 1e30)
        return after.replace(loss_scale=after.loss_scale * factor, raises=state.raises + float32(~seen.overflow))


@pytest.mark.parametrize(("rule_class", "arguments"), [(FarGuided, {}), (FarAdaptive, {"hysteresis": 2})])
def test_rule_made_from_ours_stays_within_its_bounds(graph_mode, rule_class, arguments):
    rule = rule_class(min_loss_scale=4.0, max_loss_scale=2.0**20, **arguments)
    states = assert_cell_equals(rule, steps=8, gradients=[1.0, 1e-3])
    assert {state.loss_scale for state in states} == {4.0, 2.0**20}
    if rule_class is FarAdaptive:
        assert states[-1].raises == sum(state.loss_scale > 4 for state in states)


class SpendsMore(AdaptiveRule):
    """An adaptive rule with a hysteresis of 1 that, unlike AdaptiveRule, changes the field ``hysteresis_budget``."""

    name = "spends_more"

    def next_state(self, state, seen):
        after = super().next_state(state, seen)
        low = state.hysteresis_budget > 2
        budget = where(low, 0, state.hysteresis_budget + 1)
        return after.replace(hysteresis_budget=budget, loss_scale=where(low, after.loss_scale / 2, after.loss_scale))


def test_rule_made_from_the_adaptive_one_may_change_each_part(graph_mode):
    states = assert_cell_equals(SpendsMore(), steps=8)
    assert {state.hysteresis_budget for state in states} == {0, 1, 2, 3}


def test_raises_without_a_bound_end_at_the_largest_float32(mode):
    def rising(self, state, seen):
        wanted = state.loss_scale * where(seen.overflow, 0.5, 1e20)
        return state.replace(loss_scale=wanted, capped=minimum(wanted, LARGEST_FLOAT32), floor=maximum(-wanted, -3e38))

    states = assert_cell_equals(rule_of(rising, state={"capped": float32, "floor": float32}), steps=20)
    assert max(state.loss_scale for state in states) == LARGEST_FLOAT32
    assert max(state.capped for state in states) == LARGEST_FLOAT32


DECAY, ONE, SHARE = 0.99, 1.0, 0.3


def test_counts_are_weighed_in_float32(graph_mode):
    def weighed(self, state, seen):
        gap = where(seen.overflow, state.gap + 7, state.gap)
        clean = where(seen.overflow, 0, state.clean + 3)
        wait = int32(SHARE * float32(gap + clean))
        return state.replace(gap=gap, clean=clean, wait=wait, loss_scale=where(clean > wait, 2.0, 1.5) * 2.0**10)

    states = assert_cell_equals(rule_of(weighed, state=dict.fromkeys(("gap", "clean", "wait"), int32)), steps=200)
    assert len({state.wait for state in states}) > 50


def test_constants_are_pythons_numbers_and_with_values_float32(graph_mode):
    def averaged(self, state, seen):
        mean = state.mean * DECAY + state.loss_scale * (ONE - DECAY)
        return state.replace(mean=mean, loss_scale=where(seen.overflow, mean / 3, mean * 1.1))

    states = assert_cell_equals(rule_of(averaged, state={"mean": float32}, first={"mean": 3e4}), steps=200)
    mean, share = np.float32(3e4), np.float32(ONE - DECAY)
    assert states[0].mean == mean * np.float32(DECAY) + np.float32(2.0**16) * share


def test_nan_and_division_by_zero_give_the_same_everywhere(graph_mode):
    inf, largest = math.inf, 2**31 - 1

    def strange(self, state, seen):
        zero = int32(~seen.overflow)
        nan = state.loss_scale / float32(zero)
        bad = where(seen.overflow, nan, state.loss_scale)
        vector = stack([3.0, bad, 2.0, where(seen.overflow, state.loss_scale, nan)])
        return state.replace(
            loss_scale=bad * 2,
            low=stack([minimum(bad, 1.0), minimum(1.0, bad), minimum(bad, inf), minimum(bad, bad)]),
            high=stack([maximum(bad, 1.0), maximum(1.0, bad), maximum(bad, -inf), maximum(-0.0, bad * 0.0)]),
            least=argmin(vector) * 10 + argmin(stack([bad, bad])),
            whole=stack([7 // zero, -7 // zero, state.least // 0, largest // (zero - 1)]),
            quotient=stack([1.0 / float32(zero), -1.0 / (bad * 0.0), bad / 0.0, float32(zero) / float32(zero)]),
            cast=stack([int32(bad), int32(bad * 1e9), int32(-bad * 1e9), int32(inf * float32(zero))]),
        )

    state = {"low": float32[4], "high": float32[4], "least": int32, "whole": int32[4], "quotient": float32[4]}
    states = assert_cell_equals(rule_of(strange, state={**state, "cast": int32[4]}), steps=40)
    assert {after.whole[2] for after in states} == {0}
    assert len(set(map(str, states))) > 3


def test_max_safe_exponent_is_minus_1024_where_nothing_is_known(graph_mode):
    def shows(self, state, seen):
        lower = where(seen.gradient_known, minimum(state.exponent, seen.max_safe_exponent), state.exponent - 1)
        return state.replace(
            exponent=lower,
            shown=seen.max_safe_exponent,
            known=int32(seen.gradient_known),
            largest=seen.largest_gradient,
        )

    rule = rule_of(shows, state={"shown": int32, "known": int32, "largest": float32}, needs_gradients=True)
    gradients = [*SILENT, -1.0, 1.0, 65504.0, 65505.0, 2.0**-126, 2.0**-14, 1e38]
    states = assert_cell_equals(rule, steps=80, loss_scale=2.0**100, gradients=gradients)
    assert {after.known for after in states} == {0, 1}
    for after in states:
        assert (after.known == 0) == (after.shown == -1024) == (after.largest == 0.0)


def test_two_modules_of_one_name_have_their_own_constants(graph_mode, tmp_path, monkeypatch):
    def cell(factor):
        file = tmp_path / str(factor) / "twin.py"
        file.parent.mkdir()
        text = f"from mindformers_adaptive.rules import Rule\n\nFACTOR = {factor}\n\n\nclass Twin(Rule):\n"
        text += '    name = "twin"\n\n    def next_state(self, state, seen):\n'
        text += "        return state.replace(loss_scale=state.loss_scale * FACTOR)\n"
        file.write_text(text)
        spec = importlib.util.spec_from_file_location("twin", file)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "twin", module)
        spec.loader.exec_module(module)
        return Owned(RuleLossScaleUpdateCell(module.Twin, 1024.0)), module.Twin()

    both = [cell(2.0), cell(3.0)]
    for _ in range(2):
        for owned, _rule in both:
            owned.step(False)
    assert [float(owned.scale_sense) for owned, _ in both] == [4096.0, 9216.0]
    assert [scales(rule, [False])[0] for _, rule in both] == [2.0**17, 3 * 2.0**16]
