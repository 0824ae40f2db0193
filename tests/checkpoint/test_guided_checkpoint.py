"""The state of gradient-guided scaling in checkpoints: shown by ``inspect``, and kept in ``loss_scale.json``."""

import json

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn
from test_checkpoint_report import save, table

from mindformers_adaptive.checkpoint.callback import _CommonInfoWithLossScale, restores_sidecar
from mindformers_adaptive.checkpoint.sidecar import read_sidecar, write_sidecar
from mindformers_adaptive.cli.program import main
from mindformers_adaptive.wrapper import (
    AdaptiveLossScaleUpdateCell,
    GradientGuidedLossScaleUpdateCell,
    TrainOneStepWithLossScaleCell,
)

# MindFormers before 1.7 has no `checkpoint:` format.
pytest.importorskip("mindformers.checkpoint.checkpoint")

pytestmark = pytest.mark.usefixtures("graph_mode")

OVERFLOWS = (True, True, False, False, False, True)


@pytest.fixture
def inspect(capsys):
    """Return a function that runs the command, which must succeed, and returns what it printed."""

    def run(*arguments):
        assert main(["inspect", *map(str, arguments)]) == 0
        return capsys.readouterr().out

    return run


def build(update_cell):
    network = nn.Dense(3, 2, weight_init="ones", bias_init="zeros")
    optimizer = nn.Momentum(network.trainable_params(), 0.01, 0.9)
    return TrainOneStepWithLossScaleCell(nn.WithLossCell(network, nn.MSELoss()), optimizer, scale_sense=update_cell)


@pytest.fixture(scope="module")
def trained():
    """A guided and an adaptive train step after six steps, the last of which overflowed."""
    mode = mindspore.get_context("mode")
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    steps = {
        "guided": build(GradientGuidedLossScaleUpdateCell(2.0**14)),
        "adaptive": build(AdaptiveLossScaleUpdateCell(2.0**14, 2, 20)),
    }
    for step in steps.values():
        for overflow in OVERFLOWS:
            features = np.full((4, 3), np.inf if overflow else 1, np.float32)
            step(Tensor(features), Tensor(np.zeros((4, 2), np.float32)))
    mindspore.set_context(mode=mode)
    return steps


@pytest.mark.parametrize("file_format", ["ckpt", "safetensors"])
def test_inspect_shows_the_state(trained, tmp_path, inspect, file_format):
    step = trained["guided"]
    state = step.loss_scaling_manager.state()
    file = save(step, tmp_path / "mine", file_format)
    (shown,) = json.loads(inspect(file, "--json"))["checkpoints"]
    assert (shown["kind"], shown["loss_scale"]) == ("guided", float(step.scale_sense))
    assert state["skipped_steps"] == 3
    assert state["observed_steps"] == 3
    assert {name: shown[name] for name in state} == {
        **state,
        "overflow_rate": list(state["overflow_rate"]),
        "largest_gradient": "inf",
    }
    printed = inspect(file)
    (row,) = table(printed)
    for name, value in state.items():
        assert name == "overflow_rate" or float(row[name]) == pytest.approx(value)
    assert row.keys().isdisjoint({"window_index", "growth_num", "down_num", "hysteresis_budget", "overflow_rate"})
    assert "state: guided" in printed.splitlines()


def test_both_kinds_in_one_folder_have_one_table(trained, tmp_path, inspect):
    for name, step in trained.items():
        save(step, tmp_path / name, "safetensors")
    adaptive, guided = table(inspect(tmp_path))
    assert (adaptive["window_index"], guided["window_index"]) == ("0", "-")
    assert (adaptive["observed_steps"], guided["observed_steps"]) == ("-", "3")
    assert adaptive["cur_iter"] == guided["cur_iter"] == "7"


def test_ranks_that_differ_in_a_rate_are_told(trained, tmp_path, inspect):
    step = trained["guided"]
    content = {name: parameter.asnumpy() for name, parameter in step.parameters_dict().items()}
    for rank in (0, 1):
        content["guided_overflow_rate"] = content["guided_overflow_rate"] + np.float32(rank)
        save(content, tmp_path / f"rank_{rank}" / "x-1_6", "safetensors")
    assert "ranks: they differ" in inspect(tmp_path)


def test_arrays_of_another_size_are_no_state(tmp_path, inspect):
    arrays = {"guided_counters": np.zeros(4, np.int32), "guided_overflow_rate": np.zeros(3, np.float32)}
    printed = inspect(save({**arrays, "scale_sense": 8.0}, tmp_path / "mine", "safetensors"))
    assert "state: loss scale only" in printed.splitlines()


def save_sidecar(step, folder):
    _CommonInfoWithLossScale(step).save_common(str(folder / "common.json"))


def restore_sidecar(step, folder):
    """As where a checkpoint has no optimizer state; MindFormers restores the loss scale itself."""
    step.scale_sense.set_data(Tensor(read_sidecar(folder)[0], mindspore.float32))
    restores_sidecar(lambda checkpoint, network, optimizer=None: None)(str(folder), step.network, step.optimizer)


@pytest.mark.parametrize("kind", ["guided", "adaptive"])
def test_the_sidecar_brings_all_of_the_state_back(trained, tmp_path, inspect, kind):
    step = trained[kind]
    folder = tmp_path / "iteration_00000006"
    folder.mkdir()
    save_sidecar(step, folder)
    restored = build(type(step.loss_scaling_manager)(2.0**3, 2, *([20] if kind == "adaptive" else [])))
    restore_sidecar(restored, folder)
    assert restored.loss_scaling_manager.state() == step.loss_scaling_manager.state()
    restored.set_train()
    assert float(restored.scale_sense) == float(step.scale_sense)
    (shown,) = json.loads(inspect(folder, "--json"))["checkpoints"]
    assert (shown["kind"], shown["cur_iter"], shown["skipped_steps"]) == (kind, 7, 3)
    assert (shown["level"] is not None) == (kind == "guided")


@pytest.mark.parametrize(
    ("saved", "cell", "warning"),
    [
        (
            "adaptive",
            lambda: GradientGuidedLossScaleUpdateCell(2.0**3),
            "6 steps but no state of gradient-guided scaling: .* starts afresh at loss scale 2048",
        ),
        (
            "guided",
            lambda: AdaptiveLossScaleUpdateCell(2.0**3, 2, 20),
            "as one of dynamic or gradient-guided loss scaling: the ladder starts afresh at window 20",
        ),
    ],
)
@pytest.mark.parametrize("source", ["sidecar", "checkpoint"])
def test_a_state_of_the_other_cell_goes_on_at_its_scale_with_one_warning(
    trained, tmp_path, saved, cell, warning, source
):
    step, resumed = trained[saved], build(cell())
    save_sidecar(step, tmp_path)
    mindspore.save_checkpoint(step, str(tmp_path / "step.ckpt"))

    def resume():
        if source == "sidecar":
            restore_sidecar(resumed, tmp_path)
        else:
            mindspore.load_param_into_net(resumed, mindspore.load_checkpoint(str(tmp_path / "step.ckpt")))
        resumed.set_train()

    with pytest.warns(UserWarning, match=warning) as caught:
        resume()
    assert len(caught) == 1
    state = resumed.loss_scaling_manager.state()
    assert float(resumed.scale_sense) == float(step.scale_sense)
    assert (state["cur_iter"], state["last_overflow_iter"], state["skipped_steps"]) == (7, 6, 3)
    # It takes the next step as one that has just started.
    resumed(Tensor(np.full((4, 3), np.inf, np.float32)), Tensor(np.zeros((4, 2), np.float32)))
    assert float(resumed.scale_sense) == float(step.scale_sense) / 2
    assert resumed.loss_scaling_manager.state()["skipped_steps"] == 4


def test_a_sidecar_of_an_earlier_version_is_read(tmp_path):
    cell = AdaptiveLossScaleUpdateCell(2.0**10, 2, 20)
    step = build(cell)
    write_sidecar(tmp_path, 2.0**10, {**cell.state(), "scale_window": 30, "window_index": 1, "cur_iter": 9})
    restore_sidecar(step, tmp_path)
    assert (cell.state()["scale_window"], cell.state()["cur_iter"]) == (30, 9)
