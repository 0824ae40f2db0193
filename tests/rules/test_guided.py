"""The gradient-guided rule computes the same steps as a version with if statements, and stays within its bounds."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindformers_adaptive.rules.formats import FLOAT16, FORMATS
from mindformers_adaptive.rules.guided import ANCHORED, ANCHORED_TRIAL, MOVING, TRIAL, GuidedRule
from mindformers_adaptive.rules.lanes import Lanes
from mindformers_adaptive.rules.operations import possible_exponents, safe_exponents
from mindformers_adaptive.rules.saved_state import to_values
from tests.rules.readable_guided import ReadableGuided

# An exchange rate of 10 gives the rule a patience of 1000 / 10 = 100 steps. An overflow counts as recent for a twelfth
# of the patience, 8 steps. The scale window is half of the patience, 50 steps. After a failed trial, the window is 32
# times larger, 1600 steps.
RULE = GuidedRule(exchange_rate=10)


def gradient(bits):
    """Return the largest gradient of a step whose ceiling is 2^bits, but at most 3e38."""
    return min(65504 / 2.0**bits, 3e38)


def run(rule, state, events):
    """Step the rule by events: each is "!" (overflow), None (no gradient known) or a number (log2 of the ceiling)."""
    lanes = Lanes([rule], [state])
    for event in events:
        lanes.step(np.array([event == "!"]), np.array([math.nan if event in ("!", None) else gradient(event)]))
    return lanes.states()[0]


def train(rule, state, ceilings, shown=None):
    """Step the rule under ceilings given as log2; return the last state and the overflow flags of the steps."""
    lanes, overflow = Lanes([rule], [state]), []
    for ceiling, bits in zip(ceilings, ceilings if shown is None else shown, strict=True):
        overflow.append(bool(lanes.loss_scale[0] > 2.0**ceiling))
        lanes.step(np.array(overflow[-1:]), np.array([math.nan if overflow[-1] else gradient(bits)]))
    return lanes.states()[0], overflow


def bits_of(state):
    return math.log2(state.loss_scale)


def settled(rule=RULE, bits=18, steps=400):
    """Return the guided rule's state after many steps with one ceiling, when the loss scale equals this ceiling."""
    state = run(rule, rule.start(2.0**10), [bits] * steps)
    assert (bits_of(state), state.limit, state.skipped_steps) == (bits, 0, 0)
    return state


RATES = (0.001, 0.2, 1.0, 5.0, 50.0, 333.0, 1000.0)
# Pairs of the lowest and the highest exponent of the loss scale.
BOUNDS = ((0, 127), (4, 20), (-10, 40))


def random_steps(random, steps):
    """Return noisy ceilings and gradients; each column is a run. Some gradients imply a wrong ceiling."""
    lanes, step = len(RATES) * len(BOUNDS), np.arange(steps)[:, np.newaxis]
    low = random.integers(3, 20, lanes) * (step // random.integers(40, 400, lanes) % 2)
    ceiling = random.normal(17, 1, lanes) - low + random.normal(0, 0.6, (steps, lanes))
    hidden = np.where(step // 700 % 2, random.choice([-3.0, 0.0, 2.5, 8.0], lanes), 0.0)
    gradients = 65504 / 2.0 ** (ceiling + hidden)
    gradients[random.random(gradients.shape) < 0.05] = np.nan
    gradients[random.random(gradients.shape) < 0.01] = 0.0
    # Half of the runs start with 60 steps without a gradient.
    gradients[:60, ::2] = np.nan
    return ceiling, gradients


@pytest.mark.parametrize("start", [0, 8, 16, 20])
def test_text_equals_the_form_with_branches_at_every_step(start):
    ceiling, gradients = random_steps(np.random.default_rng(start), 1500)
    lanes_of = [(rate, max(lowest, 0), highest) for rate in RATES for lowest, highest in BOUNDS]
    rules = [
        GuidedRule(rate, min_loss_scale=2.0**lowest, max_loss_scale=None if highest == 127 else 2.0**highest)
        for rate, lowest, highest in lanes_of
    ]
    readable = [ReadableGuided(*arguments) for arguments in lanes_of]
    exponents = [max(start, lowest) for _, lowest, _ in lanes_of]
    lanes = Lanes(rules, [rule.start(2.0**exponent) for rule, exponent in zip(rules, exponents, strict=True)])
    states = [rule.start(exponent) for rule, exponent in zip(readable, exponents, strict=True)]
    seen = set()
    for limits, shown in zip(ceiling, gradients, strict=True):
        overflow = lanes.loss_scale > 2.0**limits
        lanes.step(overflow, shown)
        flags = overflow.tolist()
        each = zip(readable, states, flags, shown.tolist(), strict=True)
        states = [rule.step(state, over, None if over else value) for rule, state, over, value in each]
        assert lanes.states() == states
        seen |= {(state.trial, state.contradictions > 0, state.limit > 0, state.low == 1024) for state in states}
    assert len(seen) >= 8
    assert {trial for trial, *_ in seen} == {0, 1, -1, -2}


@pytest.mark.parametrize("value", [None, 0.0, -1.0, 2.0**-127, math.inf, math.nan, 1e39])
def test_what_is_no_positive_number_of_a_device_shows_nothing(value):
    assert not safe_exponents(math.nan if value is None else value, FLOAT16.largest)[0]


@given(value=st.floats(min_value=2.0**-126, width=32, allow_infinity=False), name=st.sampled_from([*FORMATS]))
def test_shown_is_the_largest_scale_as_a_device_counts_it(value, name):
    largest = FORMATS[name].largest
    known, exponent = safe_exponents(value, largest)
    assert known
    shown = int(exponent)
    assert Fraction(value) * Fraction(2) ** shown <= largest < Fraction(value) * Fraction(2) ** (shown + 1)
    lowest, *more = possible_exponents(largest)
    thresholds = (largest * 2.0 ** -np.array(more, np.float64)).astype(np.float32)
    assert shown == int((np.float32(value) <= thresholds).sum()) + lowest


def test_float16_shows_what_it_always_did():
    assert possible_exponents(FLOAT16.largest) == range(-113, 142)


@pytest.mark.parametrize("name", [*FORMATS])
def test_a_format_moves_what_gradients_show_and_nothing_else(name):
    """The rule takes equal steps in all formats if the gradient is the same fraction of the format's largest number."""
    rule, steps = GuidedRule(exchange_rate=10, gradient_format=name), []
    for guided, largest in ((RULE, 65504.0), (rule, FORMATS[name].largest)):
        state = guided.start(2.0**20)
        for bits in (18, 12.5, 13, 9, 16):
            ceiling = 2.0**bits
            state = guided.step(state, state.loss_scale > ceiling, largest / ceiling)
            steps.append(state)
    assert steps[:5] == steps[5:]
    lanes = Lanes([RULE, rule], [RULE.start(2.0**20), rule.start(2.0**20)])
    lanes.step(np.array([False, False]), np.array([1.0, 1.0]))
    assert [state.base for state in lanes.states()] == [15, math.floor(math.log2(FORMATS[name].largest))]


@pytest.mark.parametrize(("overflows", "expected"), [(0, 32), (1, 22), (2, 12), (3, 2), (4, 0), (5, 0)])
def test_every_overflow_drops_ten_bits(overflows, expected):
    state = run(RULE, RULE.start(2.0**32), ["!"] * overflows)
    assert bits_of(state) == expected
    assert (state.skipped_steps, state.consecutive_overflows, state.first_exponent) == (overflows, overflows, 32)


def test_scale_rests_at_a_fixed_ceiling_and_below_a_moving_one():
    assert bits_of(settled()) == 18
    noise = np.random.default_rng(0).normal(18.5, 0.5, 4000)
    state, overflow = train(GuidedRule(), GuidedRule().start(2.0**10), noise)
    assert bits_of(state) == 17
    assert sum(overflow) <= 3


@pytest.mark.parametrize("ceiling", [1.5, 7, 18.2, 31])
def test_a_start_from_far_above_costs_at_most_four_steps(ceiling):
    _, overflow = train(GuidedRule(), GuidedRule().start(2.0**32), [ceiling] * 400)
    assert sum(overflow) == overflow.index(False) <= 4


@pytest.mark.parametrize("spread", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("level", [18.0, 18.3, 18.7, 18.95])
def test_a_ceiling_that_drops_tenfold_costs_at_most_three_steps(level, spread):
    noise = np.random.default_rng(1).normal(0, spread, 2200)
    ceilings = np.where(np.arange(2200) < 2000, level, level - 10) + noise
    _, overflow = train(GuidedRule(), GuidedRule().start(2.0**16), ceilings)
    assert sum(overflow[2000:]) <= 3
    assert sum(overflow) - sum(overflow[2000:]) <= 2


@pytest.mark.parametrize("after", [200, 400, 1000])
def test_a_lone_spike_costs_its_step_and_is_gone(after):
    state = run(RULE, RULE.start(2.0**10), [18] * after)
    spiked = run(RULE, state, ["!"])
    assert bits_of(spiked) == bits_of(state) - 10
    back = run(RULE, spiked, [18])
    assert (back.loss_scale, back.limit, back.trial, back.clean_steps) == (state.loss_scale, 0, 0, 0)
    # The rule's overflow histogram leaves out the step after an overflow, because large gradients are expected there.
    assert (back.overflow_rate, back.weight) == (state.overflow_rate, state.weight)


def limited():
    """Return the guided rule's state after two overflows close together that the gradients do not explain."""
    return run(RULE, settled(), ["!", 18, "!", 18])


def test_two_unexplained_overflows_set_a_limit_with_an_anchor():
    state = limited()
    assert (bits_of(state), state.limit, state.trial) == (17, state.base + 1 - 17, ANCHORED)
    assert (state.scale_window, state.clean_steps) == (50, 0)
    apart = run(RULE, settled(), ["!", *[18] * 12, "!", 18])
    assert (bits_of(apart), apart.limit) == (18, 0)
    # Each of three consecutive overflows lowers the loss scale by 10 bits for the moment. But each lowers the limit,
    # the lasting upper bound of the loss scale, by only one bit.
    row = run(RULE, settled(), ["!", 18, "!", "!", "!", 18])
    assert (bits_of(row), row.limit) == (15, row.base + 1 - 15)


def test_failed_trial_makes_the_window_32_times_larger():
    state = limited()
    for _ in range(3):
        state = run(RULE, state, [18] * (state.scale_window - state.clean_steps))
        assert (bits_of(state), state.trial, state.scale_window) == (18, ANCHORED_TRIAL, 50)
        state = run(RULE, state, ["!", 18])
        assert (bits_of(state), state.trial, state.clean_steps) == (17, ANCHORED, 0)
        assert state.scale_window == 1600
    # Two more overflows follow that the gradients do not explain. At both, the rule is not trying a higher limit of the
    # loss scale. The first overflow makes the scale window small again, and the limit then moves with the gradients.
    # The second overflow fixes the limit at one loss scale.
    state = run(RULE, state, ["!", 18])
    assert (state.scale_window, state.trial) == (50, MOVING)
    assert run(RULE, state, ["!", 18]).trial == ANCHORED


def test_limit_moves_with_base_unless_it_has_an_anchor():
    anchored = limited()
    moving = run(RULE, anchored, ["!", 18])
    for state, follows in ((anchored, 0), (moving, 1)):
        after = run(RULE, state, [*[19] * 20, *[20] * 20])
        assert after.base == state.base + 1
        assert bits_of(after) == bits_of(state) + follows
    # Gradients that are much smaller or larger than usual begin a new regime. In a new regime, the limit of the loss
    # scale moves with the gradients.
    after = run(RULE, anchored, [22] * 40)
    assert bits_of(after) >= bits_of(anchored) + 2


def test_higher_limit_that_holds_takes_the_anchor_away():
    trial = run(RULE, limited(), [18] * 50)
    assert run(RULE, trial, [18] * 49).trial == ANCHORED_TRIAL
    assert run(RULE, trial, [18] * 50).trial == TRIAL
    assert run(RULE, limited(), [19, 19]).trial == ANCHORED
    assert run(RULE, limited(), [23, 23]).trial == MOVING
    assert [run(RULE, limited(), [18, shown]).trial for shown in (14, 12)] == [ANCHORED, MOVING]


def test_it_learns_that_gradients_show_too_little():
    noise = np.random.default_rng(2).normal(18.5, 0.5, 10_000)
    state, _ = train(GuidedRule(5), GuidedRule(5).start(2.0**10), noise, noise - 2)
    assert state.contradictions // 2 == 2
    assert bits_of(state) >= 16


@pytest.mark.parametrize("nothing", [None, 0.0, math.nan, math.inf, -math.inf, 1e-40])
def test_step_that_shows_nothing_counts_as_clean(nothing):
    for before in (settled(), limited()):
        after = RULE.step(before, False, nothing)
        assert after == before._replace(clean_steps=before.clean_steps + 1)


def test_without_gradients_it_is_adaptive_scaling():
    state = run(RULE, RULE.start(2.0**10), [None] * 49)
    assert (bits_of(state), state.low, state.clean_steps) == (10, 1024.0, 49)
    state = run(RULE, state, [None])
    assert (bits_of(state), state.trial) == (11, TRIAL)
    state = run(RULE, state, [None] * 100)
    assert bits_of(state) == 13
    fallen = run(RULE, state, ["!", None])
    assert (bits_of(fallen), fallen.scale_window, fallen.trial) == (12, 1600, MOVING)
    # The first known gradient gives a ceiling, the largest loss scale without overflow. Then the loss scale follows
    # this ceiling.
    shown = run(RULE, fallen, [20])
    assert (shown.limit, shown.base, shown.low) == (0, 20, 20.0)


@pytest.mark.parametrize(
    ("rate", "patience", "windows"),
    [(1, 1000, (500, 32000)), (5, 200, (100, 6400)), (1000, 1, (1, 64)), (0.001, 1_000_000, (500_000, 32_000_000))],
)
def test_exchange_rate_is_the_one_unit_of_time(rate, patience, windows):
    rule = GuidedRule(rate)
    assert (rule.patience, (rule.smallest_window, rule.largest_window)) == (patience, windows)


EVENTS = st.lists(st.sampled_from(["!", None, -200, 0, 3, 10, 17, 18, 19, 30, 140]), max_size=80)
RULES = st.builds(
    GuidedRule,
    st.sampled_from([0.001, 1, 10, 100, 1000]),
    min_loss_scale=st.sampled_from([0.25, 1.0, 3.0]),
    max_loss_scale=st.sampled_from([None, 2.0**24, 70000.0]),
)


@given(rule=RULES, events=EVENTS)
def test_state_stays_within_its_bounds(rule, events):
    state = rule.start(2.0**16)
    for number, event in enumerate(events, start=1):
        after = run(rule, state, [event])
        assert rule.min_loss_scale <= after.loss_scale <= rule.max_loss_scale
        assert math.frexp(after.loss_scale)[0] == 0.5
        assert all(2.0**-100 <= rate <= 1.0 for rate in after.overflow_rate)
        assert after.low == 1024 or after.low - 9 / 16 <= after.level
        assert after.low == 1024 or abs(after.base - after.level) <= 1.25
        assert after.skipped_steps == state.skipped_steps + (event == "!")
        assert after.consecutive_overflows == (state.consecutive_overflows + 1 if event == "!" else 0)
        # An overflow never raises the loss scale.
        assert event != "!" or after.loss_scale <= state.loss_scale
        # A checkpoint can have every state that a run can reach. So the rule must accept all these states when they are
        # restored.
        assert rule.find_state_problem(to_values(rule, after, number)) is None
        state = after


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"exchange_rate": 0}, ValueError, r"'exchange_rate' must be a number from 0.001 to 1000 .* but got 0"),
        ({"exchange_rate": math.nan}, ValueError, r"'exchange_rate' .* but got nan"),
        ({"exchange_rate": "1"}, TypeError, r"'exchange_rate' must be a number .*, but got '1' of type str"),
        ({"scale_factor": 3}, ValueError, r"'scale_factor' must be 2 in float32, but got 3. Leave it out"),
        ({"scale_factor": "2"}, TypeError, r"'scale_factor' must be 2, but got '2' of type str"),
        (
            {"min_loss_scale": 5.0, "max_loss_scale": 7.0},
            ValueError,
            r"a power of two from 'min_loss_scale' to 'max_loss_scale', but got 5.0 and 7.0. Lower 'min_loss_scale'",
        ),
    ],
)
def test_bad_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        GuidedRule(**arguments)


@pytest.mark.parametrize(("value", "expected"), [(1000.0, 512.0), (3.5, 4.0), (5.0, 4.0)])
def test_initial_scale_between_powers_of_two_warns(value, expected):
    rule = GuidedRule(min_loss_scale=3.0)
    with pytest.warns(UserWarning, match=rf"must be a power .*'guided', .*got {value}. .* at {expected}"):
        assert rule.start(value).loss_scale == expected
    assert rule.start(expected).loss_scale == expected
