"""The state of loss scaling in MindSpore's own checkpoints, and in checkpoints from other sources."""

import functools

import mindformers.wrapper
import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore.train import CheckpointConfig, Model, ModelCheckpoint

from mindformers_adaptive.cells.update_cells import AdaptiveLossScaleUpdateCell
from mindformers_adaptive.wrapper import (
    GradientGuidedLossScaleUpdateCell,
    MFTrainOneStepCell,
    NoLossScaleUpdateCell,
    RuleLossScaleUpdateCell,
    TrainOneStepWithLossScaleCell,
)
from tests.shared.networks import Dense, batches
from tests.shared.own_rules import Weigh

pytestmark = pytest.mark.slow

OVERFLOWS = [False, False, True, False, True, False, False, False, True, False] * 4
WINDOWS = {"max_scale_window": 4, "min_scale_window": 1}


def build_step(train_step=TrainOneStepWithLossScaleCell, update_cell=None, **arguments):
    dense = Dense()
    # Use a learning-rate schedule. For a constant rate, MFTrainOneStepCell makes a second Parameter of the same name,
    # so MindSpore cannot load the whole checkpoint.
    learning_rate = nn.PolynomialDecayLR(0.01, 0.001, 100, 1.0)
    optimizer = nn.Adam(dense.layer.trainable_params(), learning_rate)
    if update_cell is None:
        update_cell = AdaptiveLossScaleUpdateCell(
            1024, 2, arguments.get("min_scale_window", 1), **{**WINDOWS, **arguments}
        )
    return train_step(dense.network, optimizer, scale_sense=update_cell)


def train(step, overflows):
    """Train, and return for each step its loss, overflow flag, loss scale and state."""
    record = []
    for overflow in overflows:
        loss, flag = step(*Dense.batch(overflow))[:2]
        state = step.loss_scaling_manager.state()
        record.append((float(loss), bool(flag), float(step.scale_sense), state))
    return record


def without_loss_of_skipped(record):
    # The loss of an overflowed step is inf or NaN, so there is nothing to compare.
    return [(None if flag else loss, flag, scale, state) for loss, flag, scale, state in record]


@pytest.mark.parametrize(
    ("train_step", "mode", "form"),
    [
        (TrainOneStepWithLossScaleCell, "graph", "ckpt"),
        (MFTrainOneStepCell, "graph", "safetensors"),
        (MFTrainOneStepCell, "pynative", "ckpt"),
    ],
    indirect=["mode"],
)
def test_resumed_run_takes_the_steps_of_one_that_never_stopped(mode, train_step, form, tmp_path, mindformers_log):
    saved = build_step(train_step, hysteresis=2)
    before = train(saved, OVERFLOWS[:20])
    file = str(tmp_path / f"step_20.{form}")
    mindspore.save_checkpoint(saved, file, format=form)

    resumed = build_step(train_step, hysteresis=2)
    mindspore.load_param_into_net(resumed, mindspore.load_checkpoint(file, format=form))
    end = 30 if mode == "graph" else 25
    record = train(resumed, OVERFLOWS[20:end])
    assert without_loss_of_skipped(record) == without_loss_of_skipped(train(saved, OVERFLOWS[20:end]))
    assert len({state["scale_window"] for *_, state in (*before, *record)}) > 1
    scale, state = before[-1][2:]
    assert state["loss_scale"] == scale
    listed = ", ".join(f"{name} {value}" for name, value in state.items())
    assert f"Loss scaling goes on from: {listed}" in mindformers_log.text


def test_model_and_its_checkpoint_callback_keep_the_state(graph_mode, tmp_path):
    data = functools.partial(batches, len(OVERFLOWS), np.flatnonzero(OVERFLOWS))
    whole = build_step()
    # The callback saves a checkpoint in the middle of the training.
    saving = ModelCheckpoint("net", str(tmp_path), CheckpointConfig(save_checkpoint_steps=20))
    Model(whole).train(1, data(), callbacks=[saving], dataset_sink_mode=False)
    resumed = build_step()
    mindspore.load_param_into_net(resumed, mindspore.load_checkpoint(str(tmp_path / "net-1_20.ckpt")))
    Model(resumed).train(1, data().skip(20), dataset_sink_mode=False)
    assert resumed.loss_scaling_manager.state() == whole.loss_scaling_manager.state()
    assert float(resumed.scale_sense) == float(whole.scale_sense)
    for name, value in whole.parameters_dict().items():
        np.testing.assert_array_equal(resumed.parameters_dict()[name].asnumpy(), value.asnumpy())


def test_mindformers_checkpoint_after_window_1_keeps_counters(graph_mode):
    """A checkpoint of MindFormers' adaptive scaling resumes as adaptive, though its values also fit dynamic scaling.

    If resuming took the checkpoint for one of dynamic scaling, the loss scale would rise only after 20 steps.
    """
    theirs = mindformers.wrapper.AdaptiveLossScaleUpdateCell(1024, 2, 20, 1000, 20)
    loss_scale = Parameter(Tensor(1024.0, mindspore.float32), name="loss_scale")
    for overflow in [False] * 60 + [True] * 3 + [False] * 15:
        theirs(loss_scale, Tensor(overflow))
    assert int(theirs.list_index.asnumpy()) == int(theirs.window_up_count.asnumpy()) == 0
    saved = {name: Parameter(value.asnumpy()) for name, value in theirs.parameters_dict().items()}
    saved["scale_sense"] = Parameter(loss_scale.asnumpy())
    resumed = build_step(max_scale_window=1000, min_scale_window=20)
    mindspore.load_param_into_net(resumed, saved)
    scales = [scale for _, _, scale, _ in train(resumed, [False] * 8)]
    assert scales == [float(loss_scale)] * 7 + [2 * float(loss_scale)]


class Halving(nn.FixedLossScaleUpdateCell):
    """A user's subclass of MindSpore's update cell for a fixed loss scale. The subclass changes the loss scale."""

    def construct(self, loss_scale, overflow):
        return ops.depend(overflow, ops.assign(loss_scale, loss_scale / 2))


@pytest.mark.parametrize(
    ("train_step", "scale_sense", "wanted"),
    [
        (TrainOneStepWithLossScaleCell, lambda: Tensor(8.0, mindspore.float32), 8.0),
        (MFTrainOneStepCell, lambda: nn.FixedLossScaleUpdateCell(8.0), 8.0),
        (TrainOneStepWithLossScaleCell, lambda: NoLossScaleUpdateCell(), 1.0),
    ],
)
def test_a_fixed_scale_stays_whatever_a_checkpoint_has(graph_mode, train_step, scale_sense, wanted):
    before = build_step()
    saved = {name: Parameter(value.asnumpy()) for name, value in before.parameters_dict().items()}
    step = build_step(train_step, scale_sense())
    mindspore.load_param_into_net(step, saved)
    assert step.scale_sense.asnumpy().item() == 1024.0
    with pytest.warns(UserWarning, match=f"has loss scale 1024.0, but 'scale_sense' is fixed at {wanted}: "):
        step.set_train()
    _, _, used = step(*Dense.batch())[:3]
    assert used.asnumpy().item() == step.scale_sense.asnumpy().item() == wanted
    # The train-step cell does not mistake a loss scale set by hand for the loss scale of a checkpoint.
    step.set_sense_scale(Tensor(np.full(step.scale_sense.shape, 16.0), mindspore.float32))
    step.set_train()
    assert step.scale_sense.asnumpy().item() == 16.0


def test_a_users_cell_that_moves_the_scale_is_not_fixed(graph_mode):
    step = build_step(update_cell=Halving(64.0))
    for _ in range(2):
        step.set_train()
        step(*Dense.batch())
    assert step.scale_sense.asnumpy().item() == 16.0


def test_a_network_loaded_into_a_new_training_does_not_warn(graph_mode):
    step = build_step()
    mindspore.load_param_into_net(step.network, build_step().network.parameters_dict())
    step(*Dense.batch())


def damage(update_cell, **values):
    for name, value in values.items():
        getattr(update_cell, name).set_data(Tensor(value, mindspore.int32))


def test_a_checkpoint_loaded_after_set_train_is_checked_too(graph_mode, mindformers_log):
    step = build_step().set_train()
    damage(step.loss_scaling_manager, window_index=12, cur_iter=9, last_overflow_iter=8, skipped_steps=3)
    with pytest.warns(UserWarning, match="'list_index' 12"):
        step(*Dense.batch())
    assert "window_index 0, growth_num 0, down_num 0, cur_iter 9" in mindformers_log.text
    assert mindformers_log.text.count("Loss scaling goes on from") == 1


@pytest.mark.parametrize(
    ("scale_sense", "line"),
    [
        (
            lambda: AdaptiveLossScaleUpdateCell(1024, 2, 20),
            "AdaptiveLossScaleUpdateCell of mindformers_adaptive: loss_",
        ),
        (
            lambda: GradientGuidedLossScaleUpdateCell(1024),
            "GradientGuidedLossScaleUpdateCell of mindformers_adaptive: ",
        ),
        (lambda: NoLossScaleUpdateCell(), "NoLossScaleUpdateCell of mindformers_adaptive: loss_scale 1.0\n"),
        (
            lambda: RuleLossScaleUpdateCell("tests.shared.own_rules.Follow", 1024),
            "RuleLossScaleUpdateCell of mindformers_adaptive by the rule "
            "tests.shared.own_rules.Follow: loss_scale 1024.0",
        ),
        (
            lambda: mindformers.wrapper.AdaptiveLossScaleUpdateCell(1024, 2, 20, 1000, 20),
            "AdaptiveLossScaleUpdateCell of mindformers: loss_scale 1024.0, scale_window 20\n",
        ),
        (
            lambda: nn.DynamicLossScaleUpdateCell(1024, 2, 50),
            "DynamicLossScaleUpdateCell of mindspore: loss_scale 1024.0, scale_window 50\n",
        ),
        (lambda: nn.FixedLossScaleUpdateCell(8), "FixedLossScaleUpdateCell of mindspore: loss_scale 8.0\n"),
        (lambda: Tensor(8.0), "a fixed scale: loss_scale 8.0\n"),
    ],
)
def test_log_says_once_which_cell_scales_the_loss(mindformers_log, scale_sense, line):
    step = Dense().train_step(scale_sense())
    for _ in range(2):
        step.set_train()
    assert mindformers_log.text.count("Loss scaling by ") == 1
    assert f"Loss scaling by {line}" in mindformers_log.text


@pytest.mark.parametrize("number", [5, 2.5, None])
def test_a_number_in_place_of_a_vector_is_named(number):
    cell = RuleLossScaleUpdateCell(Weigh(), 1024)
    state = {name: value for name, value in cell.state_dict().items() if not name.startswith("weights")}
    with pytest.raises(TypeError, match=f"'weights' must be 3 numbers, but got {number}"):
        cell.load_state_dict({**state, "weights": number})
