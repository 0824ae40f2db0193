"""A state from a checkpoint is repaired if it is damaged or if its scale window is not on the rule's ladder."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.rules.guided import GuidedRule
from mindformers_adaptive.rules.saved_state import from_values, own_keys, repair, repair_loss_scale, to_values

RULE = AdaptiveRule(max_scale_window=1000)
COUNTERS = {"cur_iter": 700, "last_overflow_iter": 650, "skipped_steps": 40, "consecutive_overflows": 2}
GOOD = {"scale_window": 200, "window_index": 5, "growth_num": 2, "down_num": 1, **COUNTERS}
SCALE = 1024.0

GUIDED = GuidedRule()


def guided_values(steps=30):
    """Return the state values that a guided update cell has after ``steps`` steps."""
    state = GUIDED.start(SCALE)
    for step in range(steps):
        overflow = step in (3, 4, 20)
        state = GUIDED.step(state, overflow, None if overflow else 2.0 ** -(step % 3))
    return {**to_values(GUIDED, state, steps), "largest_gradient": 0.5}


def test_a_good_state_is_left_as_it_is():
    assert repair(RULE, GOOD, SCALE) == (GOOD, [])
    hidden = {**GOOD, "scale_window": 1, "window_index": -1}
    assert repair(RULE, hidden, SCALE) == (hidden, [])
    values = guided_values()
    assert repair(GUIDED, values, SCALE) == (values, [])


@pytest.mark.parametrize(
    ("bounds", "window", "index", "expected"),
    [
        # The list of scale windows up to 2000 has all windows of the list up to 1000, and one more. So the repair keeps
        # each restored window.
        *(((2000, 20), RULE.window_at(index), index, (RULE.window_at(index), index)) for index in range(-1, 8)),
        *(((100, 20), RULE.window_at(index), index, (RULE.window_at(index), index)) for index in range(-1, 5)),
        *(((100, 20), RULE.window_at(index), index, (100, 4)) for index in range(5, 8)),
        ((1000, 20), 45, 3, (40, 2)),
        ((1000, 30), 20, 0, (30, 0)),
        ((1000, 30), 50, 3, (50, 2)),
        ((1000, 1), 1, -1, (1, -1)),
        ((1000, 1), 1, 0, (1, 0)),
    ],
)
def test_window_keeps_its_size_or_takes_the_nearest(bounds, window, index, expected):
    repaired, problems = repair(
        AdaptiveRule(max_scale_window=bounds[0], min_scale_window=bounds[1]),
        {**GOOD, "scale_window": window, "window_index": index},
        SCALE,
    )
    assert repaired == {**GOOD, "scale_window": expected[0], "window_index": expected[1]}
    assert len(problems) == ((window, index) != expected)
    for problem in problems:
        assert f"'scale_window' {window} with 'list_index' {index}" in problem
        assert f"nearest window, {expected[0]} (index {expected[1]})" in problem


NO_STEPS = {"cur_iter": 1, "last_overflow_iter": 0}
NO_SKIPS = {"skipped_steps": 0, "consecutive_overflows": 0}


@pytest.mark.parametrize(
    ("damage", "mended_to", "message"),
    [
        ({"scale_window": -5}, {}, r"'scale_window' -5 with 'list_index' 5.* the window of this index"),
        ({"scale_window": 0, "window_index": 99}, {"scale_window": 20, "window_index": 0}, r"neither can be used.*20"),
        ({"window_index": 99}, {}, r"'scale_window' 200 with 'list_index' 99.*nearest window, 200 \(index 5\)"),
        ({"window_index": -7}, {}, r"'scale_window' 200 with 'list_index' -7"),
        (
            {"scale_window": 1},
            {"scale_window": 1, "window_index": -1},
            r"'scale_window' 1 with 'list_index' 5.*hidden window 1",
        ),
        (
            {"growth_num": 9},
            {"growth_num": 3},
            r"'scale_window_up_count' 9, which must lie between 0 and 3: 3 is used instead",
        ),
        ({"down_num": -1}, {"down_num": 0}, r"'scale_window_down_count' -1, which .*: 0 is used"),
        # Damaged counters that every rule has, and the values to which these counters are repaired.
        ({"cur_iter": 0}, NO_STEPS, r"'current_iterator_step' 0, which must lie between 1 and"),
        ({"cur_iter": 2**31 - 5}, NO_STEPS, r"'current_iterator_step' 2147483643, which"),
        ({"last_overflow_iter": 700}, {"last_overflow_iter": 699}, r"'last_overflow_iterator_step' 700, which .* 699"),
        ({"last_overflow_iter": -1}, {"last_overflow_iter": 699}, r"'last_overflow_iterator_step' -1, which .* 699"),
        ({"skipped_steps": 2**31 - 1}, NO_SKIPS, r"'skipped_steps' 2147483647"),
        ({"skipped_steps": -1}, NO_SKIPS, r"'skipped_steps' -1, which must lie between 0 and"),
        ({"consecutive_overflows": 41}, {"consecutive_overflows": 0}, r"'consecutive_overflows' 41, .*40, the number"),
    ],
)
def test_damage_is_mended_and_named(damage, mended_to, message):
    repaired, problems = repair(RULE, {**GOOD, **damage}, SCALE)
    assert repaired == {**GOOD, **mended_to}
    assert any(re.search(message, problem) for problem in problems), problems


def test_a_hysteresis_budget_beyond_the_hysteresis_is_mended():
    repaired, [problem] = repair(AdaptiveRule(hysteresis=2), {**GOOD, "hysteresis_budget": 3}, SCALE)
    assert repaired == {**GOOD, "hysteresis_budget": 2}
    assert "'hysteresis_budget' 3, which must lie between 0 and 2: 2 is used" in problem


@pytest.mark.parametrize(
    "damage",
    [
        {"low": 2**20},
        {"low": -(2**20)},
        {"current_margin": -(2**24)},
        {"current_margin": 5000},
        {"first_exponent": 600},
        {"clean_steps": -1},
        {"clean_steps": 2**31 - 1},
        {"wait": -2},
        {"wait": 8000},
    ],
)
def test_a_state_that_the_guided_rule_cannot_have_starts_afresh(damage):
    values = guided_values()
    repaired, [problem] = repair(GUIDED, {**values, **damage}, SCALE)
    assert re.search(r"that the rule cannot reach: the rule starts afresh at loss scale 1024\.", problem)
    fresh = to_values(GUIDED, GUIDED.start(SCALE), 0)
    fresh_values = {name: fresh[name] for name in own_keys(GuidedRule)}
    assert repaired == {**values, **fresh_values, "last_overflow_iter": 30}


@pytest.mark.parametrize(("before", "margin"), [(3, 6), (6, 3), (6, 0)])
def test_a_guided_state_goes_on_with_another_margin(before, margin):
    former, state = GuidedRule(before), GuidedRule(before).start(SCALE)
    for _ in range(100):
        state = former.step(state, False, 2.0**-3)
    rule, values = GuidedRule(margin), to_values(former, state, 100)
    assert repair(rule, values, state.loss_scale) == (values, [])
    after = rule.step(from_values(rule, state.loss_scale, values), False, 2.0**-3)
    assert (after.low, after.current_margin) == (state.low, max(margin, state.current_margin))


@pytest.mark.parametrize(
    ("restored", "message"),
    [
        ({"cur_iter"}, r"has 30 steps but no state of gradient-guided scaling: .* starts afresh"),
        ({"cur_iter", "low_and_margin"}, None),
        (set(), None),
        (None, None),
    ],
)
def test_checkpoint_without_all_guided_state_starts_it_afresh(restored, message):
    values = guided_values()
    repaired, problems = repair(GUIDED, values, SCALE, restored)
    assert [bool(re.search(message, problem)) for problem in problems] == ([True] if message else [])
    assert (repaired == values) is (message is None)


FRESH = {**dict.fromkeys(GOOD, 0), "scale_window": 20, "cur_iter": 1}
STEP_NAMES = {"cur_iter", "last_overflow_iter"}


@pytest.mark.parametrize(
    ("changes", "restored", "lacks_window"),
    [
        ({}, STEP_NAMES, False),
        ({"cur_iter": 15}, STEP_NAMES, False),
        ({"cur_iter": 501}, STEP_NAMES, True),
        ({"cur_iter": 31, "last_overflow_iter": 16}, STEP_NAMES, True),
        ({"cur_iter": 31, "skipped_steps": 4}, STEP_NAMES, True),
        ({"cur_iter": 501}, {*STEP_NAMES, "window_index"}, False),
        ({"cur_iter": 501}, set(), False),
        ({"cur_iter": 501}, None, False),
    ],
)
def test_steps_without_a_window_start_the_ladder_afresh(changes, restored, lacks_window):
    values = {**FRESH, **changes}
    repaired, problems = repair(RULE, values, SCALE, restored)
    last_step = values["cur_iter"] - 1
    assert repaired == ({**values, "last_overflow_iter": last_step} if lacks_window else values)
    assert ["no window" in problem for problem in problems] == [True] * lacks_window


WHOLE_NUMBERS = st.integers(-(2**31), 2**31 - 1)


def anything_like(value):
    """Return a Hypothesis strategy for values of the same type as ``value``."""
    if isinstance(value, tuple):
        return st.tuples(*map(anything_like, value))
    return st.integers(-2, 3300) | WHOLE_NUMBERS if isinstance(value, int) else st.floats(0, 1) | st.floats(width=32)


RULES = [GUIDED] + [
    AdaptiveRule(max_scale_window=largest, min_scale_window=smallest, hysteresis=hysteresis)
    for largest, smallest, hysteresis in ((1000, 20, 1), (2000, 7, 3))
]


@pytest.mark.parametrize("rule", RULES)
@given(data=st.data())
def test_rule_goes_on_from_any_restored_state(rule, data):
    values = to_values(rule, rule.start(SCALE), 0) | {"largest_gradient": 0.5}
    repaired, _ = repair(rule, {name: data.draw(anything_like(value)) for name, value in values.items()}, SCALE)
    assert repair(rule, repaired, SCALE) == (repaired, [])
    state = from_values(rule, SCALE, repaired)
    for overflow, gradient in data.draw(st.lists(st.tuples(st.booleans(), st.sampled_from([None, 1.0])), max_size=10)):
        state = rule.step(state, overflow, gradient)
        assert rule.min_loss_scale <= state.loss_scale <= rule.max_loss_scale
        assert rule is GUIDED or state.scale_window in {1, *rule.ladder}


@pytest.mark.parametrize(
    ("rule", "restored", "expected", "message"),
    [
        (RULE, 1024.0, 1024.0, None),
        (RULE, 1000.0, 1000.0, None),
        (AdaptiveRule(max_loss_scale=512.0), 1024.0, 512.0, "needs a loss scale between 'min_loss_scale'"),
        (AdaptiveRule(min_loss_scale=2048.0), 1024.0, 2048.0, "2048.0 is used"),
        (GUIDED, 1024.0, 1024.0, None),
        (GUIDED, 1000.0, 512.0, "1000.0, but gradient-guided scaling needs a power of two"),
        (GuidedRule(max_loss_scale=512.0), 1000.0, 512.0, "'scale_sense' 1000.0, but"),
    ],
)
def test_restored_scale_moves_within_the_bounds_with_a_warning(rule, restored, expected, message, recwarn):
    assert repair_loss_scale(rule, restored, "scale_sense") == expected
    assert [message in str(warning.message) for warning in recwarn] == ([True] if message else [])
