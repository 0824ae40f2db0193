"""With known times as input, the benchmarks compute the right statistics, and their output has the right form."""

import itertools
import json
import math
import re

# MindSpore collects garbage before it compiles a graph. Import MindFormers before the first test of this file, because
# the objects that exist then are left out of the collection.
import mindformers  # noqa: F401
import pytest

from mindformers_adaptive.record.logs import read_log
from scripts.benchmarks import costs as benchmark
from scripts.benchmarks import long_records as benchmark_long
from scripts.benchmarks.costs import GRADIENTS, MONITOR, STEP
from scripts.benchmarks.paired_timing import ratio, take_turns, time_above, typical_times
from scripts.benchmarks.update_cells import (
    ADAPTIVE,
    CELLS,
    DYNAMIC,
    EMPTY,
    GUIDED_HISTORY,
    HISTORY,
    HYSTERESIS,
    MINDFORMERS,
)
from tests.shared.pages import figure

pytestmark = pytest.mark.slow

# The made-up times differ up to fourfold between rounds, as on a busy machine.
ROUNDS = (1.0, 2.0, 1.0, 4.0)


def rounds(**copies):
    """Return made-up times of each variant's copies in four rounds; ``copies`` has their times in the first round."""
    return {name: [[first * factor for factor in ROUNDS] for first in each] for name, each in copies.items()}


def times(**copies):
    return typical_times(rounds(**copies))


def test_times_are_compared_within_a_round():
    taken = times(base=(100.0, 100.0), other=(101.0, 101.0))
    assert ratio(taken, "other", "base") == (pytest.approx(1.01), pytest.approx(0.0))
    assert ratio(taken, "base", "base") == (1.0, 0.0)
    # The time of a benchmarked variant is the median over the four rounds.
    assert time_above(taken, "other")[0] == pytest.approx(101.0 * 1.5)
    assert time_above(taken, "other", "base")[0] == pytest.approx(1.5)


def test_error_comes_from_differences_between_copies_of_a_way():
    taken = rounds(base=(100.0, 100.0), other=(110.0, 100.0 / 1.1))
    assert ratio(typical_times(taken), "other", "base") == (pytest.approx(1.0), pytest.approx(math.log(1.1)))
    value, error = ratio(times(base=(100.0,), other=(110.0,)), "other", "base")
    assert (value, math.isnan(error)) == (pytest.approx(1.1), True)


def test_what_an_empty_call_takes_is_left_out():
    taken = times(empty=(1.0, 1.0), base=(3.0, 3.0), other=(7.0, 7.0))
    assert ratio(taken, "other", "base", above="empty")[0] == pytest.approx(3.0)
    assert ratio(taken, "empty", "base", above="empty")[0] == pytest.approx(0.0)


def test_copies_take_turns_in_random_order():
    copies, called = itertools.count(), []

    def build():
        copy = next(copies)
        return lambda count: called.append((copy, count))

    taken = take_turns(dict.fromkeys("abc", build), copies=2, rounds=20)
    assert {name: [len(copy) for copy in each] for name, each in taken.items()} == {name: [20, 20] for name in "abc"}
    # The benchmark calls each copy of a benchmarked variant twice before it times the copy. Leave these calls out.
    rounds = [called[first : first + 6] for first in range(12, len(called), 6)]
    assert [{count for _, count in of_round} for of_round in rounds] == [{number} for number in range(20)]
    orders = [[copy for copy, _ in of_round] for of_round in rounds]
    assert all(sorted(order) == list(range(6)) for order in orders)
    assert len(set(map(tuple, orders))) > 10


def test_a_look_every_100_steps_costs_a_hundredth_of_it():
    of_a_step = times(**{STEP: (100.0, 100.0), MONITOR: (0.5, 0.5), GRADIENTS: (200.0, 200.0)})
    result = {"copies": 4, "times": of_a_step, "scalings": times(**{DYNAMIC: (3.0, 3.0), ADAPTIVE: (4.0, 4.0)})}
    costs = [benchmark.extra_cost(result, name) for name in (DYNAMIC, ADAPTIVE, MONITOR, GRADIENTS)]
    assert costs == ["0", "+1.00 ± 0.00", "+1.50 ± 0.00", "+3.00 ± 0.00"]


def lines_of(printed, columns):
    """Return the rows of the Markdown table with the given columns."""
    [rows] = re.findall(re.escape(columns) + r"\n\|[-|]+\n((?:\|.*\n)+)", printed)
    return [row.strip("| ").split(" | ") for row in rows.splitlines()]


@pytest.fixture
def run_quickly(graph_mode, monkeypatch, capfd, tmp_path):
    """Return a function that runs a command of the benchmark, and returns what it prints and its result."""

    def run(command):
        file = tmp_path / "result.json"
        monkeypatch.setattr("sys.argv", ["costs.py", command, "--quick", "--json", str(file)])
        with pytest.raises(SystemExit, match=r"^0$"):
            benchmark.main()
        printed = capfd.readouterr().out
        assert "nan" not in printed
        assert "inf" not in printed
        return printed, json.loads(file.read_text())

    return run


def test_update_prints_each_cell_with_the_kernels_of_the_page(run_quickly):
    printed, result = run_quickly("update")
    cells = benchmark.QUICK_CELLS
    assert (result["mode"], result["copies"], result["rounds"], tuple(result["times"])) == ("graph", 1, 3, cells)
    rows = lines_of(printed, "| update cell | ratio | above an empty call | one update | kernels |")
    assert [row[0] for row in rows] == [CELLS[name] for name in cells]
    # With one copy, only the ratio of a cell to itself has an error: 0.
    times = r"-?\d+\.\d\d( ± 0.00)?, -?\d+\.\d µs, \d+\.\d µs"
    assert all(re.fullmatch(times, ", ".join(row[1:4])) for row in rows)
    kernels = result["kernels"]
    assert kernels[EMPTY] < kernels[ADAPTIVE] < kernels[HYSTERESIS] < kernels[MINDFORMERS]
    assert set(CELLS) - set(kernels) == {HISTORY, GUIDED_HISTORY}
    assert [row[4] for row in rows] == [str(kernels.get(name, "unknown")) for name in cells]
    for name in ("update", "update_pynative"):
        assert figure(name)["kernels"] == kernels


def test_step_prints_ways_and_parts(run_quickly):
    printed, result = run_quickly("step")
    assert list(result["times"]) == [STEP, MONITOR, GRADIENTS, "forward", "forward and backward"]
    extra = dict(lines_of(printed, "| way of scaling | extra time, percent |"))
    assert list(extra) == [*benchmark.QUICK_SCALINGS, MONITOR, GRADIENTS]
    assert extra.pop(DYNAMIC) == "0"
    assert all(re.fullmatch(r"[+-]\d+\.\d\d", cell) for cell in extra.values())
    assert len(lines_of(printed, "| part | share |")) == 3


def test_detection_is_compared_with_a_plain_pass(run_quickly):
    printed, result = run_quickly("detection")
    ways = ["`amp.all_finite`", *benchmark.DETECTIONS.values(), "NumPy's pass"]
    [row] = lines_of(printed, f"| Tensors | {' | '.join(ways)} |")
    assert len(row) == 5
    assert row[0] == "4"
    # Each time is printed as a multiple of the time of a plain pass over the tensors. Before the division, the time of
    # an empty call is subtracted from both times. On a busy machine, such a difference may be 0 or negative, so the
    # test also accepts negative numbers, inf and nan.
    assert all(re.fullmatch(r"-?\d+\.\d|-?inf|nan", cell) for cell in row[1:]), row
    assert (list(result["times"]), len(result["times"]["4"])) == (["4"], 6)


def test_a_long_record_goes_through_every_command(monkeypatch, capsys, tmp_path):
    result = tmp_path / "long.json"
    monkeypatch.setattr("sys.argv", ["long_records.py", "--steps", "300", "--json", str(result)])
    benchmark_long.main()
    growth = "times as long, 300 to 300 steps"
    rows = lines_of(capsys.readouterr().out, f"| command | 300 steps, s | {growth} | times JSON alone | MB |")
    assert [row[0] for row in rows] == list(benchmark_long.commands("", "", 1))
    assert all(float(cell) > 0 for row in rows for cell in row[3:])
    assert json.loads(result.read_text())["steps"] == [300]
    # The benchmark writes a record in the monitor's format. So the lab must read it like the record of a training.
    benchmark_long.write_record(tmp_path / "record.jsonl", 300)
    run = read_log(tmp_path / "record.jsonl")
    assert (len(run), run.problems, run.notes) == (300, (), ())


def test_growth_is_from_the_shortest_to_the_longest_record():
    measured = {benchmark_long.JSON: [(0.5, 10.0), (2.0, 20.0)], "analyze": [(1.0, 30.0), (6.0, 40.0)]}
    _, *rows = benchmark_long.tables({"steps": [300, 900], "found": measured})["commands"]
    assert rows == [
        [benchmark_long.JSON, "0.50", "2.00", "4", "1.0", "20"],
        ["analyze", "1.00", "6.00", "6", "3.0", "40"],
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("update", "--json", "missing/result.json"), "there is no folder 'missing'"),
        (("step", "--json", "."), "exists, but is not a regular file"),
        (("detection", "--rounds", "0"), "must be at least 1, but got 0"),
        (("update", "--mode", "our"), "invalid choice: 'our'"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_measured(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr("sys.argv", ["benchmark.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        benchmark.parse_arguments()
    assert message in capsys.readouterr().err
