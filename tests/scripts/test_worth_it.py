"""The comparison on real training: what it trains, what it counts, and what loss scaling is worth on one task."""

import json

import mindspore
import pytest
from conftest import ROOT, mindspore_mode
from worth_report import OURS, at_the_start, table
from worth_tasks import SMALL_TASKS
from worth_training import FOUND, FP32, METHODS, UNSCALED, Trainings, fixed

# Of 400 steps. MindSpore 2.7 rounds otherwise.
MOST_SKIPPED = 4 if mindspore.__version__.startswith("2.7") else 3
METHOD = {method.name: method for method in METHODS}
GUIDED = "ours, guided from the found scale"


@pytest.fixture(scope="module")
def trainings():
    """Of the damped output, with quality measured at the end only."""
    with mindspore_mode("graph"):
        yield Trainings(SMALL_TASKS[0], look_every=1000)


def test_without_scaling_the_damped_output_is_not_learned_and_with_it_as_in_fp32(trainings):
    runs = {name: trainings.run(METHOD[name], seed=0) for name in (FP32, OURS, GUIDED)}
    scale_1 = trainings.run(fixed(1.0), seed=0)
    assert scale_1["skipped"] == []
    assert scale_1["quality"] <= runs[FP32]["quality"] - 0.5
    assert runs[FP32]["quality"] > 0.98
    for name in (OURS, GUIDED):
        assert runs[name]["start"] > 2.0**20
        assert abs(runs[name]["quality"] - runs[FP32]["quality"]) <= 0.005
        assert len(runs[name]["skipped"]) <= MOST_SKIPPED


def test_found_scale_comes_with_the_verdict_that_scaling_is_needed(trainings):
    found = trainings.find(0)
    lowest, start = found.verdicts
    assert (found.needs_scaling, start.is_harmful) == (True, False)
    assert lowest.groups == {"first": 1.0, "middle": 1.0, "last": 1.0}


def test_a_second_run_of_the_same_graph_is_as_the_first(trainings):
    first, second = (trainings.run(fixed(512.0), seed=1, steps=5)["quality"] for _ in range(2))
    other = trainings.run(fixed(512.0), seed=2, steps=5)["quality"]
    assert first == second != other


def test_methods_differ_in_name_and_share_graphs_only_within_a_rule():
    assert len(METHOD) == len(METHODS) == 14
    graphs = {}
    for method in METHODS:
        rule = method.name.split(" from")[0].split(" 2^")[0]
        graphs.setdefault(method.graph or method.name, set()).add((rule, method.dtype))
    assert all(len(rules) == 1 for rules in graphs.values())
    assert [method.name for method in METHODS if method.start == FOUND] == [OURS, GUIDED]


@pytest.mark.parametrize(
    ("skipped", "at_start"),
    [
        ([], 0),
        ([0, 1, 2], 3),
        ([0, 1, 2, 22], 4),
        ([0, 1, 2, 23], 3),
        ([20, 21], 0),
        ([19], 1),
        (list(range(100)), 100),
    ],
)
def test_start_ends_with_20_applied_steps_in_a_row(skipped, at_start):
    assert at_the_start(skipped, 100) == at_start


def look(step, skipped=False, scale=4.0, underflow=0.5):
    seen = {"step": step, "quality": step / 100, "skipped": skipped}
    return seen | {"loss_scale": scale, "ceiling": 64.0, "underflow": underflow}


def test_row_of_each_method_sums_up_its_runs():
    fp32 = {"start": 1.0, "steps": 100, "skipped": [], "quality": 0.9}
    fp32["looks"] = [{"step": step, "quality": step / 100, "skipped": False} for step in range(0, 100, 10)]
    fp16 = {"start": 4.0, "steps": 100, "skipped": [0, 50], "quality": 0.7}
    # The scale of a skipped step counts for nothing.
    fp16["looks"] = [look(0, skipped=True, scale=2.0**20), look(10), look(20, scale=16.0, underflow=0.0)]
    task = {"look_every": 10, "higher_is_better": True, "measure": "R²", "ways": {FP32: [fp32], UNSCALED: [fp16]}}
    assert list(table(task))[-2:] == [
        f"| {FP32} | - | 0.0 ± 0.0 | 0.0 ± 0.0 | - | - | 0.9000 ± 0.0000 | 0.0000 ± 0.0000 | 80 ± 0 |",
        f"| {UNSCALED} | 2^2 | 1.0 ± 0.0 | 1.0 ± 0.0 | 3.0 ± 0.0 | 25.00 ± 0.00 % | 0.7000 ± 0.0000 "
        "| -0.2000 ± 0.0000 | never |",
    ]


@pytest.mark.slow
def test_quick_run_prints_tables_and_draws(run_forked, tmp_path):
    arguments = ["--quick", "--tasks", "damped", "--json", "worth.json", "--picture", "worth.svg"]
    printed = run_forked(ROOT / "scripts" / "worth_it.py", *arguments).stdout
    result = json.loads((tmp_path / "worth.json").read_text())
    [task] = result["tasks"]
    assert (task["steps"], list(task["ways"])) == (30, [FP32, UNSCALED, OURS])
    assert "\n".join(table(task)) in printed
    assert printed.startswith("MindSpore ")
    assert printed.splitlines()[-1] == "Drawn: worth.svg"
    assert (tmp_path / "worth.svg").read_text().startswith("<?xml")


def test_file_that_cannot_be_written_is_refused_before_anything_is_trained(run_python):
    finished = run_python(ROOT / "scripts" / "worth_it.py", "--json", "missing/a.json", expect_exit=2)
    assert "there is no folder 'missing'" in finished.stderr
