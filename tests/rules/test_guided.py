"""The gradient-guided rule computes the same steps as a version with if statements, and loses few steps."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindformers_adaptive.rules.formats import FLOAT16, FORMATS
from mindformers_adaptive.rules.guided import UNSEEN, GuidedRule
from mindformers_adaptive.rules.lanes import Lanes
from mindformers_adaptive.rules.operations import possible_exponents
from mindformers_adaptive.rules.saved_state import to_values
from tests.rules.readable_guided import ReadableGuided, shown_by

RULE = GuidedRule()


def gradient(bits):
    """Return the largest gradient of a step whose ceiling is 2^bits, but at most 3e38."""
    return np.minimum(65504 / 2.0**bits, 3e38)


def run(rule, state, events):
    """Step the rule by events: each is "!" (overflow), None (no gradient known) or a number (log2 of the ceiling)."""
    lanes = Lanes(rule, [state])
    for event in events:
        lanes.step(np.array([event == "!"]), np.array([math.nan if event in ("!", None) else gradient(event)]))
    return lanes.states()[0]


def train(ceilings, shown=None, start=16):
    """Step the rule under ceilings given as log2; return the exponents of the loss scales and the overflow flags.

    For several trainings side by side, ``ceilings`` and ``shown`` have a column and ``start`` an element for each.
    """
    ceilings, starts = np.asarray(ceilings, float), np.atleast_1d(start)
    shown = ceilings if shown is None else np.array(shown, float)
    lanes, exponents = Lanes(RULE, [RULE.start(2.0**each) for each in starts]), []
    for ceiling, bits in zip(ceilings, shown, strict=True):
        exponents.append(np.log2(lanes.loss_scale.astype(np.float64)))
        overflow = exponents[-1] > ceiling
        lanes.step(overflow, np.where(overflow, math.nan, gradient(bits)))
    exponents = np.reshape(exponents, ceilings.shape)
    return exponents, exponents > ceilings


def bits_of(state):
    return math.log2(state.loss_scale)


def settled(bits=18):
    """Return the state of the guided rule when the loss scale is 2 bits below a ceiling that is always the same."""
    return run(RULE, RULE.start(2.0 ** (bits - 2)), [bits] * 3)


MARGINS = (0, 2, 6, 40)
# Pairs of the lowest and the highest exponent of the loss scale.
BOUNDS = ((0, 127), (4, 20), (-10, 40))


def random_steps(random, steps, lanes):
    """Return noisy ceilings and gradients; each column is a run. Some gradients imply a wrong ceiling."""
    step = np.arange(steps)[:, np.newaxis]
    low = random.integers(3, 20, lanes) * (step // random.integers(40, 400, lanes) % 2)
    ceiling = random.normal(17, 1, lanes) - low + random.normal(0, 0.6, (steps, lanes))
    hidden = np.where(step // 700 % 2, random.choice([-3.0, 0.0, 2.5, 8.0], lanes), 0.0)
    gradients = 65504 / 2.0 ** (ceiling + hidden)
    gradients[random.random(gradients.shape) < 0.05] = np.nan
    gradients[random.random(gradients.shape) < 0.01] = 0.0
    # Half of the runs start with 1200 steps without a gradient.
    gradients[:1200, ::2] = np.nan
    return ceiling, gradients


@pytest.mark.parametrize(("start", "steps"), [(0, 2500), (16, 1500)])
def test_text_equals_the_form_with_branches_at_every_step(start, steps):
    lanes_of = [(margin, max(lowest, 0), highest) for margin in MARGINS for lowest, highest in BOUNDS]
    ceiling, gradients = random_steps(np.random.default_rng(start), steps, len(lanes_of))
    rules = [
        GuidedRule(margin, min_loss_scale=2.0**lowest, max_loss_scale=None if highest == 127 else 2.0**highest)
        for margin, lowest, highest in lanes_of
    ]
    readable = [ReadableGuided(*arguments) for arguments in lanes_of]
    exponents = [max(start, lowest) for _, lowest, _ in lanes_of]
    lanes = [Lanes(rule, [rule.start(2.0**exponent)]) for rule, exponent in zip(rules, exponents, strict=True)]
    states = [rule.start(exponent) for rule, exponent in zip(readable, exponents, strict=True)]
    waits = set()
    for limits, shown in zip(ceiling, gradients, strict=True):
        overflow = np.array([lane.loss_scale[0] for lane in lanes]) > 2.0**limits
        for lane, flag, value in zip(lanes, overflow, shown, strict=True):
            lane.step(np.array([flag]), np.array([value]))
        each = zip(readable, states, overflow.tolist(), shown.tolist(), strict=True)
        states = [rule.step(state, over, value) for rule, state, over, value in each]
        assert [lane.states()[0] for lane in lanes] == states
        waits |= {np.sign(state.wait) for state in states}
    assert waits == {-1, 0, 1}


@pytest.mark.parametrize("value", [None, 0.0, -1.0, 2.0**-127, math.inf, math.nan, 1e39])
def test_what_is_no_positive_number_of_a_device_shows_nothing(value):
    assert not shown_by(math.nan if value is None else value)[0]


@given(value=st.floats(min_value=2.0**-126, width=32, allow_infinity=False), name=st.sampled_from([*FORMATS]))
def test_shown_is_the_largest_scale_as_a_device_counts_it(value, name):
    largest = FORMATS[name].largest
    known, exponent = shown_by(value, largest)
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
    rule, steps = GuidedRule(RULE.margin, gradient_format=name), []
    for guided, largest in ((RULE, 65504.0), (rule, FORMATS[name].largest)):
        state = guided.start(2.0**20)
        for bits in (18, 12.5, 13, 9, 16):
            ceiling = 2.0**bits
            state = guided.step(state, state.loss_scale > ceiling, largest / ceiling)
            steps.append(state)
    assert steps[:5] == steps[5:]


def test_default_margin_is_the_same_in_all_formats():
    assert {GuidedRule(gradient_format=name).margin for name in FORMATS} == {2}
    assert GuidedRule(6).margin == 6


@pytest.mark.parametrize(("overflows", "expected"), [(0, 32), (1, 22), (2, 12), (3, 2), (4, 0), (5, 0)])
def test_every_overflow_drops_ten_bits(overflows, expected):
    state = run(RULE, RULE.start(2.0**32), ["!"] * overflows)
    assert bits_of(state) == expected
    assert (state.skipped_steps, state.consecutive_overflows, state.first_exponent) == (overflows, overflows, 32)


def test_scale_falls_at_once_and_climbs_back_slowly():
    state = settled()
    assert (bits_of(state), state.low, state.current_margin) == (16, 18 * 16, 2)
    fallen = run(RULE, state, [10])
    assert bits_of(fallen) == 8
    assert [bits_of(run(RULE, fallen, [18] * steps)) for steps in (1, 10, 40)] == [8, 13, 15]


@pytest.mark.parametrize(
    ("start", "ceiling", "expected"),
    [(16, 18, 16), (10, 18, 10), (6, 18, 6), (0, 18, 6), (32, 18, 16)],
)
def test_the_first_ceiling_lowers_the_scale_or_keeps_it(start, ceiling, expected):
    exponents, overflow = train([ceiling] * 40, start=start)
    assert exponents[-1] == expected
    assert overflow.sum() == {32: 2}.get(start, 0)


def test_an_unexplained_overflow_enlarges_the_margin():
    state = run(RULE, settled(), ["!", 18])
    assert (bits_of(state), state.current_margin, state.wait) == (12, 6, 0)
    # Where overflows come often, also beyond 15 bits; where they are rare, up to 15 bits.
    for clean, margins in ((50, [6, 10, 14, 18, 22]), (500, [6, 10, 14, 15, 15])):
        state = settled(40)
        for margin in margins:
            state = run(RULE, state, [*[40] * clean, "!", 40])
            assert state.current_margin == margin
    explained = run(RULE, settled(), ["!", 11])
    assert (bits_of(explained), explained.current_margin) == (9, 2)


def test_only_a_ceiling_that_falls_again_enlarges_the_margin():
    once = run(RULE, settled(), [*[18] * 20, "!", 10, "!", 5, *[18] * 60])
    assert once.current_margin == 2
    for clean, margin in ((4, 2), (5, 12), (400, 12), (401, 2)):
        again = run(RULE, once, [18] * 100)._replace(clean_steps=clean)
        assert run(RULE, again, ["!", again.low // 16 - 12]).current_margin == margin
    assert run(RULE, once._replace(clean_steps=50), ["!", -20]).current_margin == 15


def test_a_margin_that_does_not_help_goes_back():
    infs, margins, state = [*[40] * 20, "!", 40], [], settled(40)
    for _ in range(8):
        state = run(RULE, state, infs)
        margins.append(state.current_margin)
    assert (margins, state.wait) == ([6, 10, 14, 18, 22, 26, 8, 8], 8 * 21)
    # If overflows become as rare as ``wait`` says, the margin grows again.
    assert run(RULE, state, [*[40] * (8 * 21 - 2), "!", 40]).current_margin == 8
    assert run(RULE, state, [*[40] * (8 * 21), "!", 40]).current_margin == 12


def test_the_margin_shrinks_after_a_thousand_clean_steps():
    state = run(RULE, settled(), ["!", 18])
    assert run(RULE, state, [18] * 998).current_margin == 6
    shrunk = run(RULE, state, [18] * 999)
    assert (shrunk.current_margin, shrunk.clean_steps) == (5, 1000)
    assert run(RULE, state, [18] * 2000).current_margin == 4
    assert run(RULE, shrunk, [18] * 9000).current_margin == 2


def test_after_gradients_were_known_it_is_dynamic_scaling_again():
    state = run(RULE, settled(), [None] * 5001)
    assert (state.current_margin, bits_of(state)) == (-3, 21)
    # An overflow lowers the loss scale by 4 bits, and a known gradient brings the margin back.
    assert bits_of(run(RULE, state, ["!", None])) == 17
    assert run(RULE, state, [18]).current_margin == 2
    assert train([18] * 6000, [18] * 100 + [None] * 5900)[1].sum() <= 2


@pytest.mark.parametrize("every", [8, 20, 90, 500, 1500])
def test_an_inf_in_the_data_lowers_the_scale_for_a_while(every):
    ceilings = np.full(10 * every, 18.0)
    ceilings[every - 1 :: every] = -300
    exponents, overflow = train(ceilings, np.full(len(ceilings), 18.0))
    assert overflow.sum() == 10
    # The step just after an overflow has a loss scale that is 10 bits lower.
    applied = exponents[1:][~overflow[:-1]]
    assert applied[len(applied) // 2 :].min() >= 18 - 15


@pytest.mark.parametrize("period", [2, 3, 7, 50, 149, 400])
def test_batches_in_turn_are_all_trained(period):
    depths = [5, 14, 17]
    ceilings = np.where((np.arange(20 * period) % period == 0)[:, np.newaxis], 18.0 - np.array(depths), 18.0)
    _, overflow = train(ceilings, start=[16] * len(depths))
    # Of the last 10 batches with a low ceiling, at most 2 are skipped.
    assert overflow.sum(axis=0).max() <= 10
    assert overflow[10 * period :].sum(axis=0).max() <= 2


def test_a_ceiling_that_the_gradients_hide_is_found():
    hidden, starts = np.array([(hidden, start) for hidden in (3, 8, 14, 20) for start in (16, 28)]).T
    noise = np.repeat(np.random.default_rng(1).normal(18, 0.3, (6000, 1)), len(starts), axis=1)
    exponents, overflow = train(noise, noise + hidden, starts)
    assert overflow.sum(axis=0).max() <= 8
    assert overflow[1000:].sum(axis=0).max() <= 4
    assert -8 <= exponents[-1].min() <= exponents[-1].max() <= 18


@pytest.mark.parametrize("nothing", [None, 0.0, math.nan, math.inf, -math.inf, 1e-40])
def test_step_that_shows_nothing_counts_as_clean(nothing):
    state = settled()
    assert RULE.step(state, False, nothing) == state._replace(clean_steps=state.clean_steps + 1)


def test_without_gradients_it_is_dynamic_scaling():
    state = run(RULE, RULE.start(2.0**10), [None] * 3000)
    assert (bits_of(state), state.low) == (13, UNSEEN)
    exponents, overflow = train(np.full(3000, 18.0), [None] * 3000, start=32)
    assert exponents[-1] in (17, 18)
    assert overflow.sum() <= 8
    # The first known gradient gives a ceiling, and the loss scale follows it from then on.
    assert run(RULE, state, [20]).low == 20 * 16


EVENTS = st.lists(st.sampled_from(["!", None, -200, 0, 3, 10, 17, 18, 19, 30, 140]), max_size=80)
RULES = st.builds(
    GuidedRule,
    st.sampled_from([0, 2, 6, 100]),
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
        assert event in ("!", None, -200, 140) or after.current_margin >= rule.margin
        assert after.skipped_steps == state.skipped_steps + (event == "!")
        # An overflow never raises the loss scale.
        assert event != "!" or after.loss_scale <= state.loss_scale
        # A checkpoint can have every state that a run can reach. So the rule must accept all these states when they are
        # restored.
        assert rule.find_state_problem(to_values(rule, after, number)) is None
        state = after


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"margin": -1}, ValueError, r"'margin' must be at least 0, but got -1"),
        ({"margin": 101}, ValueError, r"'margin' must be at most 100, but got 101"),
        ({"margin": 5.5}, TypeError, r"'margin' must be an integer .*, but got 5.5"),
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
