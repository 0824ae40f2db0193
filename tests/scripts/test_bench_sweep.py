"""The benchmark of the sweep: what it promises of speed and memory holds, and no configuration differs."""

import json

import bench_sweep
import pytest
from conftest import ROOT

from mindformers_adaptive.lab.replay.configuration import Configuration
from mindformers_adaptive.lab.replay.sweep import sweep


@pytest.mark.slow
def test_sweep_is_as_fast_as_promised_and_equals_the_rule(run_python):
    result = json.loads(run_python(ROOT / "scripts" / "bench_sweep.py", "--json").stdout)
    assert result["missed"] == []
    assert result["configurations"] == 1000
    assert result["against_the_rule"]["different_configurations"] == 0
    assert result["large"]["sweep_steps_a_second"] >= 1e7
    assert 0 < result["large"]["peak_gibibytes"] < 2
    assert "configurations whose results differ: 0\n" in bench_sweep.as_text(result)


@pytest.mark.parametrize(("changed", "missing"), [("steps", "agrees"), ("speed", "10 million"), ("memory", "2 GiB")])
def test_benchmark_names_what_is_missed(changed, missing):
    result = {
        "against_the_rule": {"different_configurations": int(changed == "steps")},
        "large": {
            "sweep_steps_a_second": 9e6 if changed == "speed" else 2e7,
            "seconds": 10.0,
            "peak_gibibytes": 2.5 if changed == "memory" else 0.1,
        },
    }
    assert [missing in name for name in bench_sweep.missed(result)] == [True]


def test_benchmark_would_see_a_result_that_differs():
    result = sweep([Configuration("adaptive")], bench_sweep.make_trace(2000))
    measures = result.measures[0].as_dict()
    assert bench_sweep.same_measures(measures, measures)
    assert not bench_sweep.same_measures({**measures, "skipped": measures["skipped"] + 1}, measures)
    assert not bench_sweep.same_measures({**measures, "headroom_lost": measures["headroom_lost"] + 1e-6}, measures)
