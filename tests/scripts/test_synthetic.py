"""Synthetic traces follow their formulas, and the same seed gives the same trace."""

import numpy as np
import pytest

from mindformers_adaptive.record.trace import Trace, consecutive_runs
from scripts.studies.synthetic import REGIMES, regime_levels, synthetic_trace, synthetic_traces, with_gradients

STEPS = 20_000
TRACES = {name: np.log2(trace.ceiling) for name, trace in synthetic_traces(STEPS, seed=3).items()}
FIRST, SECOND = slice(0, STEPS // 2), slice(STEPS // 2, None)


def test_there_are_eight_kinds_and_a_seed_repeats_them():
    assert len(TRACES) == 8
    again, other = synthetic_traces(STEPS, seed=3), synthetic_traces(STEPS, seed=4)
    for name, log2_ceiling in TRACES.items():
        assert (np.log2(again[name].ceiling) == log2_ceiling).all(), name
        assert (np.log2(other[name].ceiling) != log2_ceiling).mean() > 0.9, name
        assert again[name].name == name


def test_stationary_ceilings_vary_about_their_level():
    assert TRACES["stationary"].mean() == pytest.approx(18, abs=0.02)
    assert TRACES["stationary"].std() == pytest.approx(0.5, rel=0.03)


@pytest.mark.parametrize(("name", "bits"), [("slowly rising", 6), ("slowly falling", -6)])
def test_slow_changes_are_straight_lines_of_six_bits(name, bits):
    slope, start = np.polyfit(np.linspace(-0.5, 0.5, STEPS), TRACES[name], 1)
    assert (slope, start) == (pytest.approx(bits, abs=0.05), pytest.approx(18, abs=0.02))


@pytest.mark.parametrize(("name", "levels"), [("sudden drop", (18, 8)), ("sudden rise", (8, 18))])
def test_sudden_changes_are_of_2_to_the_10_in_the_middle(name, levels):
    trace = TRACES[name]
    assert (trace[FIRST].mean(), trace[SECOND].mean()) == tuple(pytest.approx(level, abs=0.03) for level in levels)
    assert abs(trace[STEPS // 2] - trace[STEPS // 2 - 1]) > 5


def test_spikes_are_one_step_in_a_hundred_and_six_bits_low():
    low = TRACES["spikes"] < 15
    assert low.mean() == pytest.approx(0.01, rel=0.3)
    assert TRACES["spikes"][low].mean() == pytest.approx(12, abs=0.15)


def test_heavy_tails_have_outliers():
    assert np.abs(TRACES["heavy-tailed"] - 18).max() > 0.5 * 20
    assert np.median(TRACES["heavy-tailed"]) == pytest.approx(18, abs=0.03)


def test_a_random_walk_takes_small_steps_far_away():
    steps = np.diff(TRACES["random walk"])
    assert steps.std() == pytest.approx(0.1, rel=0.03)
    assert np.ptp(TRACES["random walk"]) > 5


def stretches(levels):
    """Return the length and the level of each stretch of a trace; a stretch is a run of steps with equal levels."""
    begins = np.flatnonzero(np.diff(levels, prepend=np.nan))
    return np.diff(begins, append=len(levels)), levels[begins]


@pytest.mark.parametrize("kind", ["alternating regimes", "rare regimes", "one-off regime", "levels"])
def test_regimes_have_their_lengths_and_distances(kind):
    lengths, levels = stretches(regime_levels(kind, STEPS, seed=3))
    depths = np.abs(np.diff(levels))
    assert ((depths >= 4) & (depths <= 14)).all()
    in_regime = slice(0, -1) if kind == "levels" else slice(1, -1, 2)
    assert ((lengths[in_regime] >= 30) & (lengths[in_regime] <= 400)).all()
    if kind != "levels":
        assert (levels[::2] == 18).all()
    usual = {"rare regimes": (1000, 3000), "alternating regimes": (30, 400), "one-off regime": (STEPS // 2, STEPS // 2)}
    low, high = usual.get(kind, (30, 400))
    assert ((lengths[0:-1:2] >= low) & (lengths[0:-1:2] <= high)).all()
    assert (len(lengths) == 3) == (kind == "one-off regime")
    assert levels.min() >= 4


def test_ramps_take_20_steps_and_are_straight():
    change = np.diff(regime_levels("ramped regimes", STEPS, seed=3))
    ramps = consecutive_runs(np.flatnonzero(change))
    assert len(ramps) > 40
    for first, last in ramps.tolist():
        assert last - first == 20 - 1
        assert change[first : last + 1] == pytest.approx(change[first])
        assert 4 <= abs(20 * change[first]) <= 14


@pytest.mark.parametrize("kind", REGIMES)
def test_ceilings_of_regimes_are_levels_with_noise_and_spikes(kind):
    trace, levels = synthetic_trace(kind, STEPS, seed=3), regime_levels(kind, STEPS, seed=3)
    noise = np.log2(trace.ceiling) - levels
    spikes = noise < -3
    assert (trace.name, spikes.any()) == (kind, kind.endswith("spikes"))
    assert np.std(noise[~spikes]) == pytest.approx(0.25, rel=0.03)
    np.testing.assert_array_equal(synthetic_trace(kind, STEPS, seed=3).ceiling, trace.ceiling)


def test_a_trace_of_one_step_can_be_made():
    assert all(len(trace) == 1 for trace in synthetic_traces(1, seed=0).values())
    assert all(len(synthetic_trace(kind, 1, seed=0)) == 1 for kind in REGIMES)


def test_ceilings_stay_within_float32():
    far = synthetic_trace("random walk", 1000, 0, level=500.0)
    assert far.ceiling.max() == 2.0**127


def shown_beyond(trace):
    return np.log2(65504 / trace.largest_gradient) - np.log2(trace.ceiling)


@pytest.mark.parametrize("kind", synthetic_traces(10, seed=0))
def test_made_traces_show_their_ceilings(kind):
    trace = synthetic_traces(1000, seed=3)[kind]
    assert shown_beyond(trace) == pytest.approx(0, abs=1e-9)


def test_offset_and_spread_are_in_bits():
    trace = synthetic_trace("spikes", 20_000, seed=0)
    assert shown_beyond(with_gradients(trace, -2)) == pytest.approx(-2)
    hidden = shown_beyond(with_gradients(trace, 3, 0.4, seed=1))
    assert (hidden.mean(), hidden.std()) == (pytest.approx(3, abs=0.02), pytest.approx(0.4, abs=0.02))
    assert (shown_beyond(with_gradients(trace, 3, 0.4, seed=1)) == hidden).all()
    assert (shown_beyond(with_gradients(trace, 3, 0.4, seed=2)) != hidden).any()


def test_a_ceiling_of_0_and_one_without_bound_are_shown_as_such():
    assert with_gradients(Trace.exact("made", [0.0, np.inf])).largest_gradient.tolist() == [np.inf, 0.0]
