"""Made traces follow their formulas and repeat by their seeds; measured ceilings are read from JSON."""

import json

import numpy as np
import pytest

from mindformers_adaptive.lab import synthetic
from mindformers_adaptive.lab.synthetic import from_ceilings, synthetic_traces

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
    far = synthetic.random_walk(1000, 0, level=500.0)
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


@pytest.mark.parametrize(
    "measured",
    [
        {"ceilings": [65536.0, "inf", 0]},
        {"steps": [{"step": 3, "ceiling": 65536}, {"step": 5, "ceiling": "inf"}, {"step": 6, "ceiling": 0, "more": 1}]},
    ],
)
def test_measured_ceilings_are_read(tmp_path, measured):
    file = tmp_path / "sweep.json"
    file.write_text(json.dumps(measured), encoding="utf-8")
    assert (from_ceilings(file).name, from_ceilings(file).ceiling.tolist()) == ("sweep", [65536.0, np.inf, 0.0])
    file.write_text(json.dumps({"name": "llama", **measured}), encoding="utf-8")
    assert from_ceilings(str(file)).name == "llama"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"sweep.json must be a JSON file of ceilings, but: Expecting value"),
        (b"\xff", r"must be a JSON file of ceilings"),
        (b'{"ceilings": [NaN]}', r"must be a JSON file of ceilings, but: NaN is not JSON"),
        (b"[1.0]", r"must hold a JSON object, but holds a list"),
        (b"{}", r"must hold ceilings, or steps that increase"),
        (b'{"ceilings": []}', r"must hold ceilings, or steps that increase"),
        (b'{"ceilings": 3}', r"must hold ceilings, or steps that increase"),
        (b'{"steps": [{"step": 2, "ceiling": 1}, {"step": 2, "ceiling": 1}]}', r"must hold .* steps that increase"),
        (b'{"steps": [{"ceiling": 1}]}', r"must hold .* steps that increase"),
        (b'{"steps": [3]}', r"must hold .* steps that increase"),
        (b'{"steps": [{"step": 2}]}', r"must be a number of at least 0, but number 0 is None"),
        (b'{"ceilings": [1.0, -1]}', r"must be a number of at least 0, but number 1 is -1"),
        (b'{"ceilings": [true]}', r"must be a number of at least 0, but number 0 is True"),
        (b'{"ceilings": ["1"]}', r"must be a number of at least 0, but number 0 is '1'"),
    ],
)
def test_files_of_another_form_are_refused(tmp_path, content, message):
    file = tmp_path / "sweep.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        from_ceilings(file)


def test_a_missing_file_of_ceilings_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError):
        from_ceilings(tmp_path / "none.json")
