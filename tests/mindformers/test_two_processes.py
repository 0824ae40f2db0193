"""An overflow in one of two processes on a CPU makes both processes skip the step; the scaling states stay equal."""

import json
import math

import pytest

from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.rules.guided import GuidedRule
from tests.conftest import ROOT
from tests.shared.launched import run_in_processes
from tests.shared.versions import NEEDS_SECTION

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("several processes")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("two_processes")


@pytest.fixture(scope="module")
def two_processes(folder):
    """Train in two processes; return, for each process, a dict from the kind of training to the results."""
    worker = ROOT / "tests" / "mindformers" / "two_processes.py"
    run_in_processes(2, folder, worker, folder)
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("kind", ["data_parallel", "pipeline"])
def test_overflow_in_one_process_is_skipped_by_both(two_processes, kind):
    first, second = (seen[kind] for seen in two_processes)
    rule = AdaptiveRule(max_scale_window=2, min_scale_window=2)
    state, expected = rule.start(4096.0), []
    for overflow in (False, False, True, False, False):
        state = rule.step(state, overflow)
        expected.append({"overflow": overflow, "loss_scale": state.loss_scale, "changed": not overflow})
    assert first["steps"] == expected
    assert second["steps"] == expected
    assert first["state"] == second["state"]
    assert first["state"]["skipped_steps"] == 1
    # The overflow detection adds one float32, 4 bytes, to the data that the processes exchange.
    detection = ["AllReduce", "FLOAT", []]
    if kind == "data_parallel":
        assert first["weight"] == second["weight"]
        gradients = [["AllReduce", "FLOAT", [3, 4]], ["AllReduce", "FLOAT", [3]]]
        assert first["collectives"] == [*gradients, detection]
    else:
        assert first["collectives"] == [detection]
    assert_both_are_guided_by_the_largest_gradient_of_all(kind, first["guided"], second["guided"])


def assert_both_are_guided_by_the_largest_gradient_of_all(kind, first, second):
    assert first["steps"] == second["steps"]
    assert first["state"] == second["state"]
    rule = GuidedRule()
    state = rule.start(4096.0)
    for step in first["steps"]:
        state = rule.step(state, step["overflow"], step["largest"])
        assert step["loss_scale"] == state.loss_scale
    assert [step["overflow"] for step in first["steps"]] == [False, False, True, False, False]
    assert [math.isinf(step["largest"]) for step in first["steps"]] == [False, False, True, False, False]
    # At the first step the largest gradient is 8 / 3 in the first process, and 32 / 3 in the second.
    largest = {"data_parallel": (8 / 3 + 32 / 3) / 2, "pipeline": 32 / 3}[kind]
    assert first["steps"][0]["largest"] == pytest.approx(largest)


def test_fixed_scale_gives_the_weights_of_unscaled_training(two_processes):
    first, second = (seen["fixed_scale"] for seen in two_processes)
    # If the gradients were not averaged, the weights would differ between the processes, because their batches do.
    assert first["weight"] == second["weight"] == first["plain"] == second["plain"]


def test_each_process_records_the_ranges_of_its_own_gradients(two_processes, folder):
    names = [f"{kind}_rank_{rank}.jsonl" for kind in ("ranges", "record") for rank in range(len(two_processes))]
    assert sorted(file.name for file in folder.glob("*.jsonl")) == names
    lines = [[json.loads(line) for line in (folder / name).read_text().splitlines()] for name in names]
    for number, (first, second, *recorded) in enumerate(zip(*lines, strict=True), start=1):
        assert [line["step"] for line in (first, second, *recorded)] == [number] * 4
        assert first["weights"] == second["weights"]
        assert first["loss_scale"] == second["loss_scale"]
        measured = [line["batches"][0]["loss_scales"][0] for line in (first, second)]
        # Each process has its own data, so the losses differ. A step is skipped if one of the two processes overflows.
        assert measured[0]["loss"] != measured[1]["loss"]
        assert [each["overflow"] for each in measured] == [False, number == 3]
        assert [line["overflow"] for line in recorded] == [number == 3] * 2


@NEEDS_SECTION
def test_mindformers_cannot_save_from_two_processes_on_cpu(two_processes):
    # If this test fails, MindFormers can save from two processes on a CPU, and the documentation's table of checkpoint
    # formats can say so.
    for seen in two_processes:
        assert seen["data_parallel"]["shards"].startswith("RuntimeError: `get_strategy_metadata` returns `None`")
