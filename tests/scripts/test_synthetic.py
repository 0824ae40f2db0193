"""Synthetic traces follow their formulas, and the same seed gives the same trace."""

import numpy as np
import pytest

from mindformers_adaptive.record.trace import consecutive_runs
from scripts.studies.synthetic import KINDS, REGIMES, regime_levels, synthetic_trace, with_gradients

STEPS = 20_000
TRACES = {kind: np.log2(synthetic_trace(kind, STEPS, seed=3).ceiling) for kind in KINDS}


def test_there_are_eight_kinds_and_a_seed_repeats_them():
    assert len(TRACES) == 8
    for kind, log2_ceiling in TRACES.items():
        again, other = (synthetic_trace(kind, STEPS, seed) for seed in (3, 4))
        assert (np.log2(again.ceiling) == log2_ceiling).all(), kind
        assert (np.log2(other.ceiling) != log2_ceiling).mean() > 0.9, kind
        assert again.name == kind


# log2 of the ceilings of each kind, without noise and less their level of 18.
PART = np.linspace(-0.5, 0.5, STEPS)
LOW = TRACES["spikes"] < 15
PATHS = {
    "stationary": 0.0 * PART,
    "slowly rising": 6.0 * PART,
    "slowly falling": -6.0 * PART,
    "sudden drop": -10.0 * (PART > 0),
    "sudden rise": -10.0 * (PART < 0),
    "spikes": -6.0 * LOW,
}


@pytest.mark.parametrize("name", PATHS)
def test_ceilings_vary_about_the_path_of_their_kind(name):
    noise = TRACES[name] - 18 - PATHS[name]
    assert (noise.mean(), noise.std()) == (pytest.approx(0, abs=0.02), pytest.approx(0.5, rel=0.03))
    slope, _ = np.polyfit(PART, noise, 1)
    assert slope == pytest.approx(0, abs=0.05)


def test_spikes_are_one_step_in_a_hundred():
    assert LOW.mean() == pytest.approx(0.01, rel=0.3)


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


def shown_beyond(trace):
    return np.log2(65504 / trace.largest_gradient) - np.log2(trace.ceiling)


def test_offset_and_spread_are_in_bits():
    for kind in KINDS:
        assert shown_beyond(synthetic_trace(kind, 1000, seed=3)) == pytest.approx(0, abs=1e-9), kind
    trace = synthetic_trace("spikes", 20_000, seed=0)
    assert shown_beyond(with_gradients(trace, -2)) == pytest.approx(-2)
    hidden = shown_beyond(with_gradients(trace, 3, 0.4, seed=1))
    assert (hidden.mean(), hidden.std()) == (pytest.approx(3, abs=0.02), pytest.approx(0.4, abs=0.02))
    assert (shown_beyond(with_gradients(trace, 3, 0.4, seed=1)) == hidden).all()
    assert (shown_beyond(with_gradients(trace, 3, 0.4, seed=2)) != hidden).any()
