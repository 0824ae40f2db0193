"""Made traces follow their formulas and repeat by their seeds."""

import numpy as np
import pytest

from mindformers_adaptive.lab.traces.synthetic import synthetic_trace, synthetic_traces

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


@pytest.mark.parametrize("name", TRACES)
def test_ceilings_are_known_positive_and_finite(name):
    trace = synthetic_traces(50, seed=0)[name]
    assert trace.known(2.0**17).all()
    assert (np.isfinite(trace.ceiling) & (trace.ceiling > 0)).all()


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


def test_heavy_tails_have_outliers_that_normal_numbers_do_not_have():
    assert np.abs(TRACES["heavy-tailed"] - 18).max() > 0.5 * 20
    assert np.median(TRACES["heavy-tailed"]) == pytest.approx(18, abs=0.03)


def test_a_random_walk_takes_small_steps_far_away():
    steps = np.diff(TRACES["random walk"])
    assert steps.std() == pytest.approx(0.1, rel=0.03)
    assert np.ptp(TRACES["random walk"]) > 5


def test_a_trace_of_one_step_can_be_made():
    assert all(len(trace) == 1 for trace in synthetic_traces(1, seed=0).values())


def test_ceilings_stay_within_float32():
    far = synthetic_trace("random walk", 1000, 0, level=500.0)
    assert far.ceiling.max() == 2.0**127


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 0), ValueError, r"'steps' must be at least 1, but got 0"),
        ((5.0, 0), TypeError, r"'steps' must be an integer, but got 5.0 of type float"),
        ((True, 0), TypeError, r"'steps' must be an integer, but got True of type bool"),
        ((5, -1), ValueError, r"'seed' must be at least 0, but got -1"),
        ((5, "1"), TypeError, r"'seed' must be an integer, but got '1' of type str"),
    ],
)
def test_bad_steps_and_seeds_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        synthetic_traces(*arguments)
