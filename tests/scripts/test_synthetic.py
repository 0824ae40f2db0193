"""Synthetic traces follow their formulas; test_guided_rule.py compares figures from all kinds with the data."""

import numpy as np
import pytest

from mindformers_adaptive.record.trace import consecutive_runs
from scripts.studies.synthetic import regime_levels, synthetic_trace

STEPS = 20_000
PART = np.linspace(-0.5, 0.5, STEPS)
LOW = synthetic_trace("spikes", STEPS, seed=3).ceiling < 2.0**15
# log2 of the ceilings of each kind, without noise and less their level of 18.
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
    noise = np.log2(synthetic_trace(name, STEPS, seed=3).ceiling) - 18 - PATHS[name]
    assert (noise.mean(), noise.std()) == (pytest.approx(0, abs=0.02), pytest.approx(0.5, rel=0.03))
    slope, _ = np.polyfit(PART, noise, 1)
    assert slope == pytest.approx(0, abs=0.05)
    assert LOW.mean() == pytest.approx(0.01, rel=0.3)


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
