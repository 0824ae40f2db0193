"""A state from a checkpoint becomes one that the rule can go on with: other windows, damage, other cells."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mindformers_adaptive.rules.restored_state import PARAMETER_NAMES, is_foreign_state, repair_state

from mindformers_adaptive.rules.adaptive import AdaptiveRule, LossScaleState
from mindformers_adaptive.rules.ladder import window_ladder

RULE = AdaptiveRule(max_scale_window=1000)
GOOD = {
    "scale_window": 200,
    "window_index": 5,
    "growth_num": 2,
    "down_num": 1,
    "cur_iter": 700,
    "last_overflow_iter": 650,
    "skipped_steps": 40,
    "consecutive_overflows": 2,
}


def test_a_good_state_is_left_as_it_is():
    assert repair_state(RULE, GOOD) == (GOOD, [])
    hidden = {**GOOD, "scale_window": 1, "window_index": -1}
    assert repair_state(RULE, hidden) == (hidden, [])


@pytest.mark.parametrize("index", range(-1, 8))
def test_windows_of_1000_resume_with_2000(index):
    """The ladder for 2000 is that for 1000 and one more window: nothing has to change."""
    rule = AdaptiveRule(max_scale_window=2000)
    state = {**GOOD, "scale_window": RULE.window_at(index), "window_index": index}
    assert repair_state(rule, state) == (state, [])


@pytest.mark.parametrize(
    ("index", "nearest"), [(-1, -1), (0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, 4), (6, 4), (7, 4)]
)
def test_windows_of_1000_resume_with_100(index, nearest):
    rule = AdaptiveRule(max_scale_window=100)
    window = RULE.window_at(index)
    repaired, problems = repair_state(rule, {**GOOD, "scale_window": window, "window_index": index})
    assert repaired == {**GOOD, "scale_window": rule.window_at(nearest), "window_index": nearest}
    assert len(problems) == (1 if index > nearest else 0)
    if problems:
        assert f"'scale_window' {window} with 'list_index' {index}" in problems[0]
        assert "goes on at its nearest window, 100 (index 4)" in problems[0]


@pytest.mark.parametrize(
    ("minimum", "window", "index", "expected"),
    [
        (20, 45, 3, (40, 2)),
        (30, 20, 0, (30, 0)),
        (30, 50, 3, (50, 2)),
        (1, 1, -1, (1, -1)),
        (1, 1, 0, (1, 0)),
    ],
)
def test_a_window_keeps_its_size_and_takes_the_index_of_the_new_ladder(minimum, window, index, expected):
    rule = AdaptiveRule(max_scale_window=1000, min_scale_window=minimum)
    repaired, _ = repair_state(rule, {**GOOD, "scale_window": window, "window_index": index})
    assert (repaired["scale_window"], repaired["window_index"]) == expected


@pytest.mark.parametrize(
    ("damage", "mended_to", "message"),
    [
        ({"scale_window": -5}, {}, r"'scale_window' -5 with 'list_index' 5.* index is kept"),
        ({"scale_window": 0, "window_index": 99}, {"scale_window": 20, "window_index": 0}, r"neither can be used.*20"),
        ({"window_index": 99}, {}, r"'scale_window' 200 with 'list_index' 99.*nearest window, 200 \(index 5\)"),
        ({"window_index": -7}, {}, r"'scale_window' 200 with 'list_index' -7"),
        (
            {"scale_window": 1},
            {"scale_window": 1, "window_index": -1},
            r"'scale_window' 1 with 'list_index' 5.*hidden window 1",
        ),
        ({"growth_num": 9}, {"growth_num": 3}, r"'scale_window_up_count' 9, which must lie between 0 and 3: 3 is used"),
        ({"down_num": -1}, {"down_num": 0}, r"'scale_window_down_count' -1, which .*: 0 is used"),
        (
            {"cur_iter": 0},
            {"cur_iter": 1, "last_overflow_iter": 0},
            r"'current_iterator_step' 0, which must lie between 1 and",
        ),
        ({"last_overflow_iter": 700}, {"last_overflow_iter": 699}, r"'last_overflow_iterator_step' 700, which .* 699"),
        ({"last_overflow_iter": -1}, {"last_overflow_iter": 699}, r"'last_overflow_iterator_step' -1, which .* 699"),
        (
            {"cur_iter": 2**31 - 5},
            {"cur_iter": 1, "last_overflow_iter": 0},
            r"'current_iterator_step' 2147483643, which",
        ),
        ({"skipped_steps": 2**31 - 1}, {"skipped_steps": 0, "consecutive_overflows": 0}, r"'skipped_steps' 2147483647"),
        (
            {"skipped_steps": -1},
            {"skipped_steps": 0, "consecutive_overflows": 0},
            r"'skipped_steps' -1, which must lie between 0 and",
        ),
        (
            {"consecutive_overflows": 41},
            {"consecutive_overflows": 0},
            r"'consecutive_overflows' 41, .*40, the number of",
        ),
        ({"hysteresis_budget": 3}, {"hysteresis_budget": 1}, r"'hysteresis_budget' 3, which must lie between 0 and 1"),
    ],
)
def test_damage_is_mended_and_named(damage, mended_to, message):
    repaired, problems = repair_state(RULE, {**GOOD, **damage})
    assert repaired == {**GOOD, **mended_to}
    assert any(re.search(message, problem) for problem in problems), problems


WHOLE_NUMBERS = st.integers(-(2**31), 2**31 - 1)


@given(
    state=st.fixed_dictionaries(dict.fromkeys(PARAMETER_NAMES, WHOLE_NUMBERS)),
    bounds=st.tuples(st.integers(1, 50), st.integers(0, 2000)),
    hysteresis=st.integers(1, 3),
    overflows=st.lists(st.booleans(), max_size=30),
)
def test_whatever_was_restored_the_rule_can_go_on_and_a_second_look_finds_nothing(state, bounds, hysteresis, overflows):
    smallest, span = bounds
    rule = AdaptiveRule(max_scale_window=smallest + span, min_scale_window=smallest, hysteresis=hysteresis)
    repaired, _ = repair_state(rule, state)
    assert repair_state(rule, repaired) == (repaired, [])
    counters = {name: repaired[name] for name in ("scale_window", "window_index", "growth_num", "down_num")}
    clean_steps = repaired["cur_iter"] - 1 - repaired["last_overflow_iter"]
    going_on = LossScaleState(
        1024.0, **counters, clean_steps=clean_steps, hysteresis_budget=repaired["hysteresis_budget"]
    )
    for overflow in overflows:
        going_on = rule.step(going_on, overflow)
        assert going_on.scale_window in {1, *window_ladder(smallest + span, smallest)}


@pytest.mark.parametrize(
    ("changes", "foreign"),
    [
        ({}, False),
        ({"cur_iter": 15}, False),
        ({"cur_iter": 501}, True),
        ({"cur_iter": 31, "last_overflow_iter": 16}, True),
        ({"cur_iter": 31, "last_overflow_iter": 16, "growth_num": 1}, False),
        ({"cur_iter": 31, "last_overflow_iter": 16, "down_num": 1}, False),
        ({"cur_iter": 31, "last_overflow_iter": 16, "skipped_steps": 4}, False),
        ({"cur_iter": 31, "last_overflow_iter": 16, "scale_window": 30}, False),
    ],
)
def test_steps_without_a_window_are_told_by_what_left_no_trace(changes, foreign):
    fresh = {**dict.fromkeys(GOOD, 0), "scale_window": 20, "cur_iter": 1}
    assert is_foreign_state({**fresh, **changes}, start_window=20) is foreign
