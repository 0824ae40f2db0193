"""Files of earlier versions are still read, and trainings continue from these files as they did then.

The files are in ``written_before``; its README says how they were made.
"""

import json
import shutil
from pathlib import Path

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, dataset, nn
from mindspore.train import Model

from mindformers_adaptive import AdaptiveLossScaleManager
from mindformers_adaptive.mindformers.callbacks import restores_sidecar
from mindformers_adaptive.monitor.loss_scale_monitor import LossScaleMonitor
from mindformers_adaptive.record.writer import read_record
from mindformers_adaptive.wrapper import TrainOneStepWithLossScaleCell
from tests.mindformers.training_runs import CheckpointSection, TrainingRun
from tests.shared.every_rule import KINDS, adjust
from tests.shared.versions import NEEDS_SECTION

# A pattern for the warning when a gradient-guided update cell loads a state of an earlier version.
OLDER_FORM_WARNING = "(older form of the|a|no) state of gradient-guided scaling.*: the rule starts afresh at loss scale"

WRITTEN = Path(__file__).parent / "written_before"
EXPECTED = json.loads((WRITTEN / "expected.json").read_text())
ADAPTIVE, GUIDED = ["adaptive", "adaptive_hysteresis_2"], ["guided", "guided_exchange_rate"]
LAUNCHED = ["adaptive_launched", "guided_launched"]
CHECKPOINTS = ["train_step.ckpt", "train_step.safetensors"]
SIDECAR = "iteration_00000060"
STATE_DICTS = ["update_cell.json", "manager.json", "scaler.json"]
STEP_COUNTERS = ("cur_iter", "last_overflow_iter", "skipped_steps", "consecutive_overflows")


def go_on(run, file):
    """Return a new update cell, manager or scaler that continues from a file, and a function that takes a step.

    The argument of the function is whether the step overflows. The manager and the scaler have files of their own; an
    update cell in a train step continues from any other file.
    """
    kind = KINDS[EXPECTED[run]["kind"]]
    # The cells start with a loss scale of 8.0, so that the file's loss scale must be restored.
    arguments, path = {"scale_factor": 2, **EXPECTED[run]["arguments"]}, WRITTEN / run / file
    if file == "manager.json":
        manager = kind.manager_class(8.0, **arguments)
        manager.load_state_dict(json.loads(path.read_text()))
        return manager, manager.update_loss_scale
    if file == "scaler.json":
        scaler = kind.scaler_class(8.0, **arguments)
        scaler.load_state_dict(json.loads(path.read_text()))
        return scaler, lambda overflow: adjust(scaler, Tensor(not overflow))
    step = train_step_of(run, file)
    cell = step.loss_scaling_manager
    return cell, lambda overflow: cell(step.scale_sense, Tensor(overflow))


def train_step_of(run, file):
    """Return a new train step into which the loss-scaling state is loaded from a file of version 0.1.0."""
    arguments, path = {"scale_factor": 2, **EXPECTED[run]["arguments"]}, WRITTEN / run / file
    cell = KINDS[EXPECTED[run]["kind"]].cell_class(8.0, **arguments)
    network = nn.Dense(3, 2, has_bias=False)
    optimizer = nn.Momentum(network.trainable_params(), 0.001, 0.9)
    step = TrainOneStepWithLossScaleCell(nn.WithLossCell(network, nn.MSELoss()), optimizer, scale_sense=cell)
    if file == "update_cell.json":
        cell.load_state_dict(json.loads(path.read_text()))
    elif file == SIDECAR:
        # MindFormers itself restores the loss scale, from common.json. The sidecar file restores the state of the rule.
        step.scale_sense.set_data(Tensor(EXPECTED[run]["loss_scale"], mindspore.float32))
        restores_sidecar(lambda checkpoint, network, optimizer: None)(str(path), network, optimizer)
    else:
        saved = mindspore.load_checkpoint(str(path), format=path.suffix[1:])
        mindspore.load_param_into_net(step, saved)
    step.set_train()
    return step


@pytest.mark.parametrize("file", [*CHECKPOINTS, SIDECAR, *STATE_DICTS])
@pytest.mark.parametrize("run", ADAPTIVE)
def test_adaptive_scaling_takes_the_steps_that_it_took_then(graph_mode, run, file):
    expected = EXPECTED[run]
    owner, take_step = go_on(run, file)
    state = owner.state_dict()
    assert (state["scale"], {name: state[name] for name in expected["state"]}) == (
        expected["loss_scale"],
        expected["state"],
    )
    assert len(expected["next"]) == 30
    # An update cell has the same state from each of its files, so it takes the steps from one of them.
    takes_steps = file in (CHECKPOINTS[0], "manager.json", "scaler.json")
    for number, (overflow, *after) in enumerate(expected["next"] if takes_steps else ()):
        take_step(overflow)
        state = owner.state_dict()
        assert [state["scale"], state["scale_window"]] == after, number


@pytest.mark.parametrize("file", [*CHECKPOINTS, SIDECAR, *STATE_DICTS])
@pytest.mark.parametrize("run", GUIDED)
def test_guided_scaling_goes_on_at_its_loss_scale_and_step(graph_mode, run, file):
    expected = EXPECTED[run]
    with pytest.warns(UserWarning, match=OLDER_FORM_WARNING) as caught:
        owner, take_step = go_on(run, file)
    assert len(caught) == 1

    def seen():
        state = owner.state_dict()
        return state["scale"], state["cur_iter"], state["skipped_steps"]

    steps, skipped = expected["state"]["cur_iter"], expected["state"]["skipped_steps"]
    assert seen() == (expected["loss_scale"], steps, skipped)
    if file == CHECKPOINTS[0]:
        # The last step in the file was clean, so this overflow is the first in a row.
        take_step(True)
        assert seen() == (expected["loss_scale"] / 2**10, steps + 1, skipped + 1)


@pytest.fixture
def printed_json(run_program):
    """Return a function that runs a command with ``--json``, and returns the object that it printed."""

    def run(*arguments):
        code, printed, _ = run_program(*arguments, "--json")
        assert code == 0
        return json.loads(printed, parse_constant=pytest.fail)

    return run


@pytest.mark.parametrize(
    ("run", "file"),
    [
        *((run, file) for run in (*ADAPTIVE, *GUIDED) for file in (*CHECKPOINTS, SIDECAR)),
        *((run, file) for run in LAUNCHED for file in ("saved", "saved/iteration_00000020")),
    ],
)
def test_inspect_shows_the_state(printed_json, run, file):
    expected = EXPECTED[run]
    shown = printed_json("inspect", WRITTEN / run / file)
    # For a gradient-guided update cell, compare only those counters that every update cell has in its state.
    names = expected["state"] if expected["kind"] == "adaptive" else STEP_COUNTERS
    assert (shown["kind"], shown["loss_scale"]) == (expected["kind"], expected["loss_scale"])
    assert {name: shown[name] for name in names} == {name: expected["state"][name] for name in names}
    assert shown["notes"] == []


@pytest.mark.parametrize("run", EXPECTED)
def test_records_are_read_and_analyzed(printed_json, run):
    expected, file = EXPECTED[run], WRITTEN / run / "loss_scale_record.jsonl"
    entries = read_record(file)
    lines = [json.loads(line, object_hook=with_infinities) for line in file.read_text().splitlines()]
    # The first line has the number of the run, which is not part of the entry of a step.
    lines[0].pop("run", None)
    assert entries == lines
    assert [entry["step"] for entry in entries] == list(range(1, expected["steps"] + 1))
    last = entries[-1]
    skipped = expected["state"]["skipped_steps"]
    assert (last["next_loss_scale"], last["skipped_steps"]) == (expected["loss_scale"], skipped)
    analysis = printed_json("analyze", file)
    assert (analysis["steps"]["count"], analysis["skipped"]["count"]) == (expected["steps"], skipped)
    assert analysis["log"]["lines_used"] == expected["steps"]


@pytest.mark.parametrize("file", [CHECKPOINTS[0], SIDECAR])
def test_a_record_without_the_number_of_its_run_goes_on(graph_mode, tmp_path, file):
    record, before = tmp_path / "record.jsonl", (WRITTEN / "adaptive" / "loss_scale_record.jsonl").read_text()
    record.write_text(before)
    step, rows = train_step_of("adaptive", file), np.ones((3, 3), np.float32)
    for _ in range(2):
        data = dataset.NumpySlicesDataset((rows, rows[:, :2])).batch(1)
        Model(step).train(1, data, callbacks=[LossScaleMonitor(record)], dataset_sink_mode=False)
    assert record.read_text().startswith(before)
    assert [entry["step"] for entry in read_record(record)] == list(range(1, 67))
    assert list(tmp_path.iterdir()) == [record]


def with_infinities(line):
    return {name: float(value) if value in ("inf", "-inf", "nan") else value for name, value in line.items()}


# The YAML options of the tiny model that the launched runs train.
TINY = {"model.model_config.hidden_size": 8, "model.model_config.num_heads": 2, "model.model_config.multiple_of": 8}
LAST = 30


@NEEDS_SECTION
@pytest.mark.slow
def test_a_launched_run_goes_on_by_the_rule(long_corpus, tmp_path):
    expected, output, form = EXPECTED["adaptive_launched"], tmp_path / "output", CheckpointSection()
    shutil.copytree(WRITTEN / "adaptive_launched", output)
    options = TINY | form.save_options(output, every=LAST, keep=3) | form.resume_options(output)
    resumed = TrainingRun(output, long_corpus, options, LAST).wait()
    assert resumed.restored_state() == {"loss_scale": expected["loss_scale"], **expected["state"]}
    assert list(resumed.steps()) == list(range(expected["steps"] + 1, LAST + 1))
    assert form.newest_complete(output) == LAST
    # Replay the overflows that the resumed run printed. The test cannot list them: they depend on the training data,
    # which is cut from the source files of the installed Python.
    manager = AdaptiveLossScaleManager(8.0, max_scale_window=4, min_scale_window=1)
    manager.load_state_dict({"scale": expected["loss_scale"], **expected["state"]})
    for number, step in resumed.steps().items():
        manager.update_loss_scale(step.overflow)
        assert manager.get_loss_scale() == step.loss_scale, number
    # The earlier run and the resumed run write to one record.
    record = read_record(output / "loss_scale_record.jsonl")
    assert record[: expected["steps"]] == read_record(WRITTEN / "adaptive_launched" / "loss_scale_record.jsonl")
    entries = {entry["step"]: entry["next_loss_scale"] for entry in record[expected["steps"] :]}
    assert entries == {number: step.loss_scale for number, step in resumed.steps().items()}
