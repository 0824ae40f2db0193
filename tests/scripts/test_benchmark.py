"""The benchmarks: what they say of times that are known, and the form of what they print. No test looks at a time."""

import dataclasses
import json
import math
import re

import benchmark
import benchmark_sweep
import pytest
from benchmark import ADAPTIVE, CELLS, DYNAMIC, EMPTY, GRADIENTS, MINDFORMERS
from conftest import ROOT
from paired_timing import ratio, spread_percent, take_turns, typical_time

from mindformers_adaptive.lab.replay.configuration import Configuration
from mindformers_adaptive.lab.replay.sweep import sweep

SCRIPT = ROOT / "scripts" / "benchmark.py"
# On a busy machine the rounds differ fourfold.
ROUNDS = (1.0, 2.0, 1.0, 4.0)


def times(**copies):
    """Times of each way, with copies that take so long in the first round."""
    return {name: [[first * factor for factor in ROUNDS] for first in each] for name, each in copies.items()}


def test_times_are_compared_within_a_round():
    taken = times(base=(100.0, 100.0), other=(101.0, 101.0))
    assert ratio(taken, "other", "base") == (pytest.approx(1.01), pytest.approx(0.0))
    assert ratio(taken, "base", "base") == (1.0, 0.0)
    # In the middle of the rounds.
    assert typical_time(taken, "other")[0] == pytest.approx(101.0 * 1.5)
    assert typical_time(taken, "other", "base")[0] == pytest.approx(1.5)


def test_error_is_that_of_the_differences_between_copies_of_a_way():
    taken = times(base=(100.0, 100.0), other=(110.0, 100.0 / 1.1))
    assert ratio(taken, "other", "base") == (pytest.approx(1.0), pytest.approx(math.log(1.1)))
    assert spread_percent(taken) == pytest.approx(100 * math.log(1.1))
    value, error = ratio(times(base=(100.0,), other=(110.0,)), "other", "base")
    assert (value, math.isnan(error)) == (pytest.approx(1.1), True)


def test_what_an_empty_call_takes_is_left_out():
    taken = times(empty=(1.0, 1.0), base=(3.0, 3.0), other=(7.0, 7.0))
    assert ratio(taken, "other", "base", above="empty")[0] == pytest.approx(3.0)
    assert ratio(taken, "empty", "base", above="empty")[0] == pytest.approx(0.0)


def test_copies_take_turns_in_random_order():
    built, called = [], []

    def build(name):
        built.append(name)
        copy = f"{name}{built.count(name)}"
        return lambda count: called.append((copy, count))

    taken = take_turns({name: lambda name=name: build(name) for name in "abc"}, copies=2, rounds=20)
    assert {name: [len(copy) for copy in each] for name, each in taken.items()} == {name: [20, 20] for name in "abc"}
    assert sorted(built) == list("aabbcc") != built
    # Each is called twice before it is timed.
    rounds = [called[place : place + 6] for place in range(12, len(called), 6)]
    assert [{count for _, count in one} for one in rounds] == [{number} for number in range(20)]
    assert len({tuple(copy for copy, _ in one) for one in rounds}) > 10
    assert all(len(set(one)) == 6 for one in rounds)


def test_a_look_every_100_steps_costs_a_hundredth_of_it():
    taken = times(**{DYNAMIC: (100.0, 100.0), ADAPTIVE: (101.0, 101.0), GRADIENTS: (200.0, 200.0)})
    assert [benchmark.extra_cost(taken, name) for name in taken] == ["0", "+1.0 ± 0.0", "+3.0 ± 0.0"]


def lines_of(printed, columns):
    """The rows of a table in Markdown, below its columns."""
    [rows] = re.findall(re.escape(columns) + r"\n\|[-|]+\n((?:\|.*\n)+)", printed)
    return [row.strip("| ").split(" | ") for row in rows.splitlines()]


def run_quickly(run_forked, tmp_path, *arguments):
    printed = run_forked(SCRIPT, *arguments, "--quick", "--json", "result.json").stdout
    assert "nan" not in printed
    assert "inf" not in printed
    return printed, json.loads((tmp_path / "result.json").read_text())


@pytest.mark.slow
def test_update_prints_each_cell(run_forked, tmp_path):
    printed, result = run_quickly(run_forked, tmp_path, "update")
    assert (result["mode"], result["copies"], result["rounds"], list(result["times"])) == ("graph", 2, 3, list(CELLS))
    row = r"^(\S.*?) +(-?\d+\.\d\d) ± \d+\.\d\d +-?\d+\.\d us +\d+\.\d us +(\d+|unknown)$"
    rows = re.findall(row, printed, re.MULTILINE)
    assert [label for label, *_ in rows] == list(CELLS.values())
    kernels = {name: row[2] for name, row in zip(CELLS, rows, strict=True)}
    assert int(kernels[EMPTY]) < int(kernels[ADAPTIVE]) < int(kernels[benchmark.HYSTERESIS]) < int(kernels[MINDFORMERS])
    assert [name for name in CELLS if kernels[name] == "unknown"] == [benchmark.HISTORY, benchmark.GUIDED_HISTORY]
    assert re.search(r"\nratio: .*, MindFormers' cell = 1; ours: \d", printed)


@pytest.mark.slow
def test_step_prints_ways_parts_and_updates(run_forked, tmp_path):
    printed, result = run_quickly(run_forked, tmp_path, "step")
    names = [*benchmark.QUICK_STEPS, GRADIENTS]
    assert list(result["times"]["graph"]) == [*names, "forward", "forward and backward"]
    extra = dict(lines_of(printed, "| way of scaling | graph mode |"))
    assert list(extra) == names
    assert extra.pop(DYNAMIC) == "0"
    assert all(re.fullmatch(r"[+-]\d+\.\d ± \d+\.\d", cell) for cell in extra.values())
    assert len(lines_of(printed, "| part | share |")) == 3
    assert [row[0] for row in lines_of(printed, "| update cell | graph mode |")] == list(benchmark.UPDATES[1:])
    assert "\nThe figures of train steps with the same cell differ by " in printed


def test_one_way_alone_is_reported_without_the_rest():
    taken = times(**{DYNAMIC: (100.0, 100.0), ADAPTIVE: (101.0, 101.0)})
    about = {"mindspore": "2.9.0", "mindformers": "1.9.0", "task": "a task", "copies": 2}
    lines = list(benchmark.step_lines({**about, "times": {"graph": taken}, "updates": {}}))
    spread = "The figures of train steps with the same cell differ by 0.0% in graph mode (standard deviation)."
    assert lines[-4:] == [f"| {DYNAMIC} | 0 |", "| adaptive | +1.0 ± 0.0 |", "", spread]


def test_detection_is_compared_with_a_plain_pass(run_forked, tmp_path):
    printed, result = run_quickly(run_forked, tmp_path, "detection")
    ways = ["amp.all_finite", *benchmark.DETECTIONS.values(), "NumPy's pass"]
    [row] = lines_of(printed, f"| Tensors | {' | '.join(ways)} |")
    assert len(row) == 5
    assert row[0] == "4"
    assert all(re.fullmatch(r"-?\d+\.\d ± \d+\.\d", cell) for cell in row[1:])
    assert [len(copies) for copies in result["times"]["4"].values()] == [2] * 6


def test_sweep_comes_to_the_same_as_the_rule(run_forked, tmp_path):
    printed, result = run_quickly(run_forked, tmp_path, "sweep")
    assert printed.startswith("20 configurations on 400 steps, policy-steps a second on one core:\n")
    assert "  configurations whose results differ: 0\n20 configurations on 800 steps, of which " in printed
    assert (result["configurations"], result["different_configurations"]) == (20, 0)
    assert len(benchmark_sweep.make_configurations()) == 1000


def test_a_result_that_differs_would_be_seen():
    configuration, trace = Configuration("adaptive"), benchmark_sweep.make_trace(2000)
    swept = sweep([configuration], trace)
    [replayed] = benchmark_sweep.replay_by_rule([configuration], trace)
    assert benchmark_sweep.count_different(swept, [replayed]) == 0
    for name, by in (("skipped", 1), ("headroom_lost", 1e-6)):
        measures = dataclasses.replace(replayed.measures, **{name: getattr(replayed.measures, name) + by})
        assert benchmark_sweep.count_different(swept, [dataclasses.replace(replayed, measures=measures)]) == 1
    state = {**replayed.final_state, "down_num": replayed.final_state["down_num"] + 1}
    assert benchmark_sweep.count_different(swept, [dataclasses.replace(replayed, final_state=state)]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("update", "--json", "missing/result.json"), "there is no folder 'missing'"),
        (("step", "--json", "."), "is no regular file"),
        (("sweep", "--rounds", "0"), "must be at least 1, but got 0"),
        (("update", "--only", "our"), "invalid choice: 'our'"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_measured(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr("sys.argv", ["benchmark.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        benchmark.parse_arguments()
    assert message in capsys.readouterr().err
