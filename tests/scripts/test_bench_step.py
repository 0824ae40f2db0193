"""The benchmark of a whole step: what it says of times that are known, and that it measures."""

import json
import math

import pytest
from bench_detection import ALL_FINITE, EMPTY, LARGEST, NUMPY, OVERFLOW, PLAIN, detection_table
from bench_step import QUICK_NAMES
from conftest import ROOT
from step_report import DYNAMIC, GRADIENTS, extra_percent, report, spread_percent, update_shares

SCRIPT = ROOT / "scripts" / "bench_step.py"


def times(**others):
    """Two train steps of each way; the rounds differ fourfold, as on a busy machine."""
    dynamic, adaptive = [100.0, 200.0, 100.0, 400.0], [101.0, 202.0, 101.0, 404.0]
    return {DYNAMIC: [dynamic, dynamic], "adaptive": [adaptive, adaptive], **others}


def test_extra_cost_is_that_of_paired_steps():
    assert extra_percent(times(), "adaptive") == (pytest.approx(1.0), pytest.approx(0.0))
    assert extra_percent(times(), DYNAMIC)[0] == 0.0


def test_error_is_that_of_the_differences_between_train_steps_of_one_way():
    slow, fast = [110.0, 220.0, 110.0, 440.0], [100.0 / 1.1, 200.0 / 1.1, 100.0 / 1.1, 400.0 / 1.1]
    extra, error = extra_percent(times(guided=[slow, fast]), "guided")
    assert (extra, error) == (pytest.approx(0.0), pytest.approx(100 * math.log(1.1)))
    assert spread_percent(times(guided=[slow, fast])) == pytest.approx(100 * (2 * math.log(1.1) ** 2 / 3) ** 0.5)
    extra, error = extra_percent(times(guided=[slow]), "guided")
    assert (extra, math.isnan(error)) == (pytest.approx(10.0), True)


def test_a_look_every_100_steps_costs_a_hundredth_of_it():
    extra, _ = extra_percent(times(**{GRADIENTS: [[300.0, 300.0]]}), GRADIENTS)
    assert extra == pytest.approx(1.0 + 100 * 300.0 / 100 / 150.0)


def test_detection_is_compared_with_a_plain_pass_above_an_empty_call():
    taken = {EMPTY: 1.0, PLAIN: 3.0, ALL_FINITE: 7.0, OVERFLOW: 5.0, LARGEST: 4.0, NUMPY: 1.0}
    assert list(detection_table({50: taken}))[-1] == "| 50 | 3.0 | 2.0 | 1.5 | 0.5 |"


@pytest.mark.slow
def test_quick_run_prints_what_it_measured(run_forked, tmp_path):
    printed = run_forked(SCRIPT, "--quick", "--seq-length", 32, "--json", "step.json").stdout
    result = json.loads((tmp_path / "step.json").read_text())
    taken = result["modes"]["graph"]
    assert list(taken) == [*QUICK_NAMES, GRADIENTS]
    assert all(len(taken[name][0]) == 4 and min(taken[name][0]) > 0 for name in QUICK_NAMES)
    assert 0 < result["parts"]["forward"] < result["parts"]["whole step, dynamic"]
    assert all(math.isfinite(extra_percent(taken, name)[0]) for name in taken)
    # The step is that of a smaller model than the demo's.
    assert update_shares(result, "graph")["adaptive"] <= 0.01
    assert printed.splitlines() == list(report({**result, "detection": by_count(result["detection"])}))


def test_one_way_alone_is_reported_without_the_rest():
    result = {"mindspore": "2.9.0", "mindformers": "1.9.0", "seq_length": 128, "modes": {"graph": times()}}
    lines = list(report(result))
    assert "2 train steps" in lines[2]
    assert lines[-4:-1] == ["| MindSpore's dynamic | 0 |", "| adaptive | +1.0 ± 0.0 |", ""]
    assert lines[-1].startswith("The figures of train steps with the same cell differ by 0.0% in graph mode")


def by_count(detection):
    return {int(count): taken for count, taken in detection.items()}


def test_bad_arguments_are_refused_before_anything_is_measured(run_python):
    assert "must be at least 1, but got 0" in run_python(SCRIPT, "--rounds", "0", expect_exit=2).stderr
    assert "there is no folder 'missing'" in run_python(SCRIPT, "--json", "missing/a.json", expect_exit=2).stderr
