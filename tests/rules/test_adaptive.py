"""The adaptive rule in plain Python reaches the states that hand-made tables of events expect; bad input is refused."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindformers_adaptive.rules.adaptive import AdaptiveRule

# Each table is (events, expected). An event is "." for a clean step or "!" for an overflow; expected is (loss_scale,
# scale_window, window_index, growth_num, down_num) after the last event. Every table starts at scale 1024.
LADDER_2_3_4 = {"max_scale_window": 4, "min_scale_window": 2}


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ("", (1024, 2, 0, 0, 0)),
        (".", (1024, 2, 0, 0, 0)),
        ("..", (2048, 2, 0, 1, 0)),
        (".!.", (512, 2, 0, 0, 1)),
        (".!..", (1024, 2, 0, 1, 0)),
        ("....", (4096, 2, 0, 2, 0)),
        ("." * 6, (8192, 3, 1, 0, 0)),
        ("." * 15, (65536, 4, 2, 0, 0)),
        ("." * 27, (524288, 4, 2, 3, 0)),
        ("." * 31, (1048576, 4, 2, 3, 0)),
        ("!!!!!", (32, 2, 0, 0, 3)),
        ("." * 6 + "!!", (2048, 3, 1, 0, 2)),
        ("." * 6 + "!!!", (1024, 1, -1, 0, 0)),
        ("." * 6 + "!!" + "..." + "!", (2048, 3, 1, 1, 1)),
        ("." * 6 + "!.!..!", (1024, 1, -1, 0, 0)),
        ("." * 6 + "!!!" + ".", (2048, 1, -1, 1, 0)),
        ("." * 6 + "!!!" + "...", (8192, 2, 0, 0, 0)),
        ("." * 6 + "!!!" + "!!!!", (64, 1, -1, 0, 3)),
    ],
)
def test_scale_and_window_follow_the_rule(events, expected):
    rule = AdaptiveRule(**LADDER_2_3_4)
    state = replay(rule, rule.start(1024.0), events)
    assert (state.loss_scale, state.scale_window, state.window_index, state.growth_num, state.down_num) == expected


@pytest.mark.parametrize(
    ("events", "scale", "budget"),
    [
        ("!", 1024, 1),
        ("!!", 512, 0),
        ("!!!", 256, 0),
        ("!.!", 512, 0),
        ("!..!", 2048, 1),
        ("!!..!", 1024, 1),
    ],
)
def test_overflows_spend_the_hysteresis_and_raises_refill_it(events, scale, budget):
    rule = AdaptiveRule(**LADDER_2_3_4, hysteresis=2)
    state = replay(rule, rule.start(1024.0), events)
    assert (state.loss_scale, state.hysteresis_budget) == (scale, budget)


def test_three_drops_lead_to_window_1_only_if_asked_for():
    for shrink, expected in ((False, (2, 0, 3)), (True, (1, -1, 0))):
        rule = AdaptiveRule(**LADDER_2_3_4, shrink_from_min_window=shrink)
        state = replay(rule, rule.start(1024.0), "!!!")
        assert (state.scale_window, state.window_index, state.down_num) == expected


@pytest.mark.parametrize("events", ["!!!", "..", "." * 6, "." * 27, "." * 6 + "!!!", "." * 6 + "!!!" + "." * 9 + "!"])
def test_the_window_counts_at_the_bounds_as_without_them(events):
    bounded = AdaptiveRule(**LADDER_2_3_4, scale_factor=3, min_loss_scale=700.0, max_loss_scale=2000.0)
    states = [replay(rule, rule.start(1024.0), events) for rule in (bounded, AdaptiveRule(**LADDER_2_3_4))]
    counted = [(each.scale_window, each.window_index, each.growth_num, each.down_num) for each in states]
    assert counted[0] == counted[1]
    # A raise beyond the upper bound leaves the loss scale as it is, and a drop beyond the lower bound stops at the
    # lower bound.
    assert states[0].loss_scale == (700.0 if "!" in events else 1024.0)


RULES = st.builds(
    lambda smallest, span, **arguments: AdaptiveRule(
        max_scale_window=smallest + span, min_scale_window=smallest, **arguments
    ),
    smallest=st.integers(1, 5),
    span=st.integers(0, 20),
    scale_factor=st.sampled_from([2, 3, 1.5]),
    backoff_factor=st.sampled_from([None, 0.5, 0.1]),
    min_loss_scale=st.sampled_from([1.0, 0.25]),
    max_loss_scale=st.sampled_from([None, 2.0**24]),
    hysteresis=st.integers(1, 3),
    shrink_from_min_window=st.booleans(),
)
OVERFLOWS = st.lists(st.booleans(), max_size=200)


@given(rule=RULES, overflows=OVERFLOWS)
def test_scale_stays_in_its_bounds_and_the_index_on_the_ladder(rule, overflows):
    state = rule.start(2.0**16)
    for overflow in overflows:
        state = rule.step(state, overflow)
        assert rule.min_loss_scale <= state.loss_scale <= rule.max_loss_scale
        assert state.loss_scale == np.float32(state.loss_scale)
        assert -1 <= state.window_index < len(rule.ladder)
        assert state.scale_window == (1 if state.window_index == -1 else rule.ladder[state.window_index])
        assert 0 <= state.clean_steps < state.scale_window


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"scale_factor": 1}, ValueError, r"'scale_factor' must be .* above 1 .* got 1\. .*FixedLossScale"),
        ({"scale_factor": 1 + 1e-12}, ValueError, r"'scale_factor' must be .* above 1 in float32, .* 1\.0{11}1\."),
        ({"scale_factor": math.nan}, ValueError, r"'scale_factor' .* but got nan"),
        ({"scale_factor": "2"}, TypeError, r"'scale_factor' must be .* above 1, .* '2' of type str"),
        ({"backoff_factor": 1.0}, ValueError, r"'backoff_factor' must be .* between 0 and 1 .* got 1\.0\."),
        ({"backoff_factor": 1e-40}, ValueError, r"'backoff_factor' must be .* between 0 and 1 in float32, .* 1e-40"),
        ({"backoff_factor": "0.5"}, TypeError, r"'backoff_factor' must be .* leave it out for 1 / 'scale_factor'"),
        ({"hysteresis": 0}, ValueError, r"'hysteresis' must be at least 1, but got 0"),
        ({"hysteresis": True}, TypeError, r"'hysteresis' must be an integer .* True of type bool"),
        ({"shrink_from_min_window": 1}, TypeError, r"'shrink_from_min_window' must be True or False, .* 1 of type int"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        AdaptiveRule(**arguments)


def test_initial_window_off_the_ladder_warns():
    with pytest.warns(UserWarning, match=r"'scale_window' must be .* ladder \(20, 30.* got 25: .* 20\."):
        state = AdaptiveRule().start(1024.0, scale_window=25)
    assert (state.scale_window, state.window_index) == (20, 0)
    with pytest.raises(TypeError, match="'scale_window' must be an integer"):
        AdaptiveRule().start(1024.0, scale_window=20.0)


def replay(rule, state, events):
    for event in events:
        state = rule.step(state, overflow=event == "!")
    return state
