"""The gradient-guided rule in plain Python: a hand-made table a branch, bounds on lost steps, invariants, bad input."""

import math
import warnings
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindformers_adaptive.rules.guided import PLACES, GuidedRule, GuidedState
from mindformers_adaptive.rules.safe_exponent import max_safe_exponent

# A patience of 100 steps: trouble is recent for 10, windows are 50, 400 and 3200.
RULE = GuidedRule(exchange_rate=10)


def gradient(bits):
    """A largest gradient whose ceiling is 2^bits, at most the largest float32."""
    return min(65504 / 2.0**bits, 3e38)


def run(rule, state, events):
    """Take events: "!" for an overflow, None for an applied step that shows nothing, else the bits that it shows."""
    for event in events:
        state = rule.step(state, event == "!", None if event in ("!", None) else gradient(event))
    return state


def train(rule, state, ceilings, shown=None):
    """Take steps whose ceilings are known, in bits; returns the last state and the flags of the steps."""
    overflow = []
    for ceiling, bits in zip(ceilings, ceilings if shown is None else shown, strict=True):
        overflow.append(state.loss_scale > 2.0**ceiling)
        state = rule.step(state, overflow[-1], None if overflow[-1] else gradient(bits))
    return state, overflow


def bits_of(state):
    return math.log2(state.loss_scale)


def settled(rule=RULE, bits=18, steps=400):
    """The state after many steps that all show the same ceiling; the scale is then just that."""
    state = run(rule, rule.start(2.0**10), [bits] * steps)
    assert (bits_of(state), state.limit, state.skipped_steps) == (bits, 0, 0)
    return state


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.0, 15),
        (65504.0, 0),
        (np.nextafter(np.float32(65504), np.float32(1e9)), -1),
        (65504 / 2.0**18, 18),
        (65536 / 2.0**18, 17),
        (2.0**-126, 141),
        (3.4e38, -112),
        (np.finfo(np.float32).max, -113),
        *[(nothing, None) for nothing in (None, 0.0, -1.0, 2.0**-127, math.inf, math.nan, 1e39)],
    ],
)
def test_what_a_gradient_shows(value, expected):
    assert max_safe_exponent(value) == expected


@given(value=st.floats(min_value=2.0**-126, width=32, allow_infinity=False))
def test_shown_is_the_largest_scale_without_overflow_as_a_device_counts_it(value):
    shown = max_safe_exponent(value)
    assert Fraction(value) * Fraction(2) ** shown <= 65504 < Fraction(value) * Fraction(2) ** (shown + 1)
    thresholds = (65504 * 2.0 ** -np.arange(-112, 142)).astype(np.float32)
    assert shown == int((np.float32(value) <= thresholds).sum()) - 113


@pytest.mark.parametrize(
    ("overflows", "expected"), [(0, 32), (1, 31), (2, 29), (3, 25), (4, 17), (5, 9), (6, 1), (7, 0), (8, 0)]
)
def test_overflows_in_a_row_drop_further_and_further(overflows, expected):
    state = run(RULE, RULE.start(2.0**32), ["!"] * overflows)
    assert bits_of(state) == expected
    assert (state.skipped_steps, state.consecutive_overflows) == (overflows, overflows)
    assert state.first_exponent == (32 if overflows else 0)


def test_first_step_that_shows_something_sets_the_frame_and_leads_close_below():
    state = run(GuidedRule(), GuidedRule().start(2.0**32), ["!"] * 4 + [18.5])
    assert (state.level, state.base, state.limit, state.observed_steps, state.clean_steps) == (18.0, 18, 0, 1, 1)
    # Only 2^19, the first place, would have overflowed; the record counts as if 8 steps had been seen before.
    rates = [0.5 + 0.5 / 9, *(2.0 ** -(place + 1) * 8 / 9 for place in range(1, PLACES))]
    assert state.overflow_rate == pytest.approx(rates, rel=1e-6)
    # 1000 * 2^-9 * 8 / 9 + 8 is the least cost.
    assert bits_of(state) == 19 - 8


def test_scale_comes_to_rest_at_a_ceiling_that_does_not_move_and_stays_below_one_that_does():
    assert bits_of(settled()) == 18
    noise = np.random.default_rng(0).normal(18.5, 0.5, 4000)
    state, overflow = train(GuidedRule(), GuidedRule().start(2.0**10), noise)
    assert (bits_of(state), sum(overflow)) == (17, 0)


def test_it_follows_in_both_directions_without_windows():
    rise = [18] * 400 + [28] * 100
    state, overflow = train(RULE, RULE.start(2.0**10), rise)
    # The last bit waits until the record has seen that the frame's first place no longer overflows.
    assert (bits_of(state), sum(overflow)) == (27, 0)
    state, overflow = train(RULE, state, [28] * 500)
    assert (bits_of(state), sum(overflow)) == (28, 0)
    gradual = np.linspace(28, 8, 4000)
    state, overflow = train(RULE, state, gradual)
    assert 6 <= bits_of(state) <= 8
    assert sum(overflow) <= 20


@pytest.mark.parametrize("ceiling", [1.5, 7, 18.2, 31])
def test_a_start_from_far_above_costs_at_most_six_steps(ceiling):
    _, overflow = train(GuidedRule(), GuidedRule().start(2.0**32), [ceiling] * 400)
    assert sum(overflow) == overflow.index(False) <= 6


@pytest.mark.parametrize("spread", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("level", [18.0, 18.3, 18.7, 18.95])
def test_a_ceiling_that_drops_tenfold_costs_at_most_five_steps(level, spread):
    noise = np.random.default_rng(1).normal(0, spread, 2200)
    ceilings = np.where(np.arange(2200) < 2000, level, level - 10) + noise
    _, overflow = train(GuidedRule(), GuidedRule().start(2.0**16), ceilings)
    assert sum(overflow[2000:]) <= 5
    assert sum(overflow) - sum(overflow[2000:]) <= 2


@pytest.mark.parametrize("after", [200, 400, 1000])
def test_a_lone_spike_costs_its_step_and_is_gone(after):
    state = run(RULE, RULE.start(2.0**10), [18] * after)
    spiked = run(RULE, state, ["!"])
    assert bits_of(spiked) == bits_of(state) - 1
    back = run(RULE, spiked, [18])
    assert (back.loss_scale, back.limit, back.bound, back.trial) == (state.loss_scale, 0, False, False)


def test_overflows_that_the_gradients_explain_set_no_limit():
    state, overflow = train(RULE, settled(), [12.5, 12.5, 12.5, 12.5, 9.5, 9.5, 9.5])
    assert overflow == [True, True, True, False, True, True, False]
    assert (state.limit, state.clean_steps, state.level, state.base) == (0, 1, 9.0, 9)


def test_two_unexplained_overflows_close_together_set_a_limit():
    state = run(RULE, settled(), ["!", 18, "!", 18])
    assert (bits_of(state), state.limit, state.bound, state.trial) == (17, state.base + 1 - 17, True, False)
    assert (state.scale_window, state.clean_steps) == (50, 1)
    apart = run(RULE, settled(), ["!", *[18] * 11, "!", 18])
    assert (bits_of(apart), apart.limit) == (18, 0)


def limited():
    return run(RULE, settled(), ["!", 18, "!", 18])


def test_limit_rises_after_a_window_and_a_trial_that_holds_keeps_the_window_small():
    state = run(RULE, limited(), [18] * 48)
    assert (bits_of(state), state.clean_steps) == (17, 49)
    state = run(RULE, state, [18])
    assert (bits_of(state), state.trial, state.clean_steps, state.scale_window) == (18, True, 0, 50)
    # At 2^18 the gradients decide again.
    assert not state.bound


def test_a_trial_that_fails_makes_the_window_larger_up_to_64_times():
    state, windows = limited(), []
    for _ in range(4):
        state = run(RULE, state, [18] * (state.scale_window - state.clean_steps))
        assert (bits_of(state), state.trial) == (18, True)
        state = run(RULE, state, ["!", 18])
        assert (bits_of(state), state.trial, state.clean_steps) == (17, False, 1)
        windows.append(state.scale_window)
    assert windows == [400, 3200, 3200, 3200]
    # A fall that no trial brought about makes it small again.
    assert run(RULE, state, ["!", 18]).scale_window == 50


def test_two_trials_that_hold_make_the_window_small_again():
    state = run(RULE, settled(), ["!", 18, "!", "!", "!", 18])
    assert (bits_of(state), state.scale_window) == (11, 50)
    failed = run(RULE, state, [18] * 49 + ["!", 18])
    assert (bits_of(failed), failed.scale_window) == (11, 400)
    once = run(RULE, failed, [18] * 399)
    assert (bits_of(once), once.scale_window, once.trial) == (12, 400, True)
    twice = run(RULE, once, [18] * 400)
    assert (bits_of(twice), twice.scale_window, twice.trial) == (13, 50, True)


def test_limit_moves_with_the_frame():
    state = run(RULE, limited(), [24] * 20)
    assert state.limit == limited().limit
    assert bits_of(state) == state.base + 1 - state.limit > 17


def test_gradients_that_show_too_little_twice_count_as_a_bit_more():
    once = run(RULE, settled(), [16])
    assert (once.contradictions, bits_of(once)) == (1, 18)
    twice = run(RULE, once, [16])
    assert (twice.contradictions, bits_of(twice)) == (2, 16)
    # From then on 16 stands for 17, which the scale comes to rest at.
    later = run(RULE, twice, [16] * 400)
    assert (later.contradictions, bits_of(later), round(later.level, 3)) == (2, 17, 17)
    assert run(RULE, settled(), [1] * 20).contradictions == 6
    fallen = run(RULE, twice, ["!", 16, "!", 16])
    assert (fallen.contradictions, fallen.limit > 0) == (0, True)


def test_it_learns_that_gradients_show_too_little():
    noise = np.random.default_rng(2).normal(18.5, 0.5, 20_000)
    state, _ = train(GuidedRule(5), GuidedRule(5).start(2.0**10), noise, noise - 2)
    assert state.contradictions // 2 == 2
    assert bits_of(state) >= 16


@pytest.mark.parametrize("nothing", [None, 0.0, math.nan, math.inf, -math.inf, 1e-40])
def test_a_step_that_shows_nothing_counts_as_clean_and_nothing_else(nothing):
    before = settled()
    after = RULE.step(before, False, nothing)
    assert after == before._replace(clean_steps=before.clean_steps + 1)


def test_without_gradients_it_is_adaptive_scaling():
    state = run(RULE, RULE.start(2.0**10), [None] * 49)
    assert (bits_of(state), state.observed_steps) == (10, 0)
    state = run(RULE, state, [None])
    assert (bits_of(state), state.trial) == (11, True)
    state = run(RULE, state, [None] * 100)
    assert bits_of(state) == 13
    fallen = run(RULE, state, ["!", None])
    assert (bits_of(fallen), fallen.scale_window, fallen.trial) == (12, 400, False)
    # As soon as something is shown, that decides.
    shown = run(RULE, fallen, [20])
    assert (shown.limit, shown.base, bits_of(shown) > 12) == (0, 20, True)


def test_floor_and_cap_are_powers_of_two_within_the_bounds():
    rule = GuidedRule(10, min_loss_scale=100.0, max_loss_scale=3000.0)
    assert run(rule, rule.start(1024.0), ["!"] * 9).loss_scale == 128.0
    assert run(rule, rule.start(1024.0), [18] * 400).loss_scale == 2048.0
    silent = run(rule, rule.start(1024.0), [None] * 400)
    assert (silent.loss_scale, silent.limit) == (2048.0, -1)
    assert run(rule, rule.start(1024.0), [3] * 400).loss_scale == 128.0


def test_scale_stays_finite_whatever_is_shown():
    rule = GuidedRule()
    state = rule.start(2.0**100)
    for _ in range(3000):
        state = rule.step(state, False, 2.0**-126)
    assert bits_of(state) == 127
    for _ in range(3000):
        state = rule.step(state, False, np.finfo(np.float32).max)
    assert bits_of(state) == 0
    assert all(0 <= rate <= 1 for rate in state.overflow_rate)


def test_level_and_record_are_float32_in_the_written_order():
    rule, rng = GuidedRule(3.3), np.random.default_rng(3)
    state = rule.start(2.0**8)
    for bits in rng.normal(18, 2, 500):
        base, level, seen = state.base, np.float32(state.level), state.observed_steps
        rates = np.array(state.overflow_rate, np.float32)
        state = rule.step(state, False, gradient(bits))
        shown = np.float32(math.floor(bits) + state.contradictions // 2)
        if seen == 0:
            base, level = int(shown), shown
        weight = max(np.float32(1 / rule.patience), np.float32(1) / np.float32(seen + 9))
        for place in range(PLACES):
            rates[place] += (np.float32(base + 1 - place > shown) - rates[place]) * weight
        assert state.overflow_rate == tuple(rates.tolist())
        assert state.level == float(level + (shown - level) * np.float32(1 / 32))


@pytest.mark.parametrize(
    ("rate", "patience", "windows"),
    [(1, 1000, (500, 32000)), (5, 200, (100, 6400)), (1000, 1, (1, 64)), (0.001, 1_000_000, (500_000, 32_000_000))],
)
def test_exchange_rate_is_the_one_unit_of_time(rate, patience, windows):
    rule = GuidedRule(rate)
    assert (rule.patience, (rule.smallest_window, rule.largest_window)) == (patience, windows)


def test_a_higher_rate_goes_nearer_to_the_ceiling():
    noise = np.random.default_rng(4).normal(18, 1.0, 6000)
    runs = [train(GuidedRule(rate), GuidedRule(rate).start(2.0**10), noise) for rate in (0.1, 1, 10, 100)]
    skipped = [sum(overflow) for _, overflow in runs]
    assert skipped == sorted(skipped)
    assert skipped[0] < 5 < 100 < skipped[-1]


def test_a_patience_of_one_step_still_trains():
    state, overflow = train(GuidedRule(1000), GuidedRule(1000).start(2.0**30), [18.0] * 500)
    assert 17 <= bits_of(state) <= 19
    assert not all(overflow[-20:])


EVENTS = st.lists(st.sampled_from(["!", None, -200, 0, 3, 10, 17, 18, 19, 30, 140]), max_size=150)
RULES = st.builds(
    GuidedRule,
    st.sampled_from([0.001, 1, 10, 100, 1000]),
    min_loss_scale=st.sampled_from([0.25, 1.0, 3.0]),
    max_loss_scale=st.sampled_from([None, 2.0**24, 70000.0]),
)


@given(rule=RULES, events=EVENTS)
def test_state_stays_within_its_bounds(rule, events):
    state = rule.start(2.0**16)
    for event in events:
        after = run(rule, state, [event])
        assert rule.min_loss_scale <= after.loss_scale <= rule.max_loss_scale
        assert math.frexp(after.loss_scale)[0] == 0.5
        assert all(0.0 <= rate <= 1.0 for rate in after.overflow_rate)
        assert rule.smallest_window <= after.scale_window <= rule.largest_window
        assert abs(after.base - after.level) <= 1.25 or after.observed_steps == 0
        assert 0 <= after.contradictions <= 6
        assert after.skipped_steps == state.skipped_steps + (event == "!")
        assert after.consecutive_overflows == (state.consecutive_overflows + 1 if event == "!" else 0)
        # An overflow never raises the scale.
        assert event != "!" or after.loss_scale <= state.loss_scale
        state = after


@given(rule=RULES, events=EVENTS, cut=st.integers(0, 150))
def test_a_run_taken_up_from_its_state_goes_on_as_if_never_stopped(rule, events, cut):
    first = run(rule, rule.start(2.0**16), events[:cut])
    copied = GuidedState(*(tuple(value) if isinstance(value, tuple) else type(value)(value) for value in first))
    assert run(rule, copied, events[cut:]) == run(rule, rule.start(2.0**16), events)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"exchange_rate": 0}, ValueError, r"'exchange_rate' must be a number from 0.001 to 1000 .* but got 0"),
        ({"exchange_rate": 1001}, ValueError, r"'exchange_rate' must be a number from 0.001 to 1000 .* but got 1001"),
        ({"exchange_rate": math.nan}, ValueError, r"'exchange_rate' .* but got nan"),
        ({"exchange_rate": "1"}, TypeError, r"'exchange_rate' must be a number .*, but got '1' of type str"),
        ({"exchange_rate": True}, TypeError, r"'exchange_rate' .* but got True of type bool"),
        ({"scale_factor": 3}, ValueError, r"'scale_factor' must be 2 in float32, but got 3. Leave it out"),
        ({"scale_factor": "2"}, TypeError, r"'scale_factor' must be 2, but got '2' of type str"),
        ({"min_loss_scale": 0}, ValueError, r"'min_loss_scale' must be finite and above 0 .* but got 0"),
        ({"max_loss_scale": math.inf}, ValueError, r"'max_loss_scale' must be finite .* but got inf"),
        (
            {"min_loss_scale": 5.0, "max_loss_scale": 7.0},
            ValueError,
            r"a power of two from 'min_loss_scale' to 'max_loss_scale', but got 5.0 and 7.0. Lower the first",
        ),
    ],
)
def test_bad_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        GuidedRule(**arguments)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (0, ValueError, r"'init_loss_scale' must be finite and above 0 in float32, but got 0"),
        ("2e16", TypeError, r"'init_loss_scale' must be a number, but got '2e16' of type str"),
        (0.5, ValueError, r"'init_loss_scale' must lie between 'min_loss_scale' \(1.0\) and .* but got 0.5"),
        (2**25, ValueError, r"'init_loss_scale' must lie between .* 'max_loss_scale' \(16777216.0\), but got 33554432"),
    ],
)
def test_bad_initial_scale_is_refused(value, error, message):
    with pytest.raises(error, match=message):
        GuidedRule(max_loss_scale=2.0**24).start(value, argument="init_loss_scale")


@pytest.mark.parametrize(("value", "expected"), [(1000.0, 512.0), (3.5, 4.0), (5.0, 4.0)])
def test_an_initial_scale_between_powers_of_two_is_moved_with_a_warning(value, expected):
    rule = GuidedRule(min_loss_scale=3.0)
    with pytest.warns(
        UserWarning, match=rf"must be a power of two here, but got {value}: training starts at {expected}"
    ):
        assert rule.start(value).loss_scale == expected
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rule.start(expected).loss_scale == expected
