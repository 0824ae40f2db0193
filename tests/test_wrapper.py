"""The train-step cells: a skipped step changes nothing, an applied one is the step of FP32 training."""

import mindformers.wrapper
import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from mindformers_adaptive import wrapper
from mindformers_adaptive.cells import overflow as detection
from mindformers_adaptive.cells.update_cell import AdaptiveLossScaleUpdateCell
from mindformers_adaptive.rule.adaptive_rule import AdaptiveRule

STOCK = {
    "AdaptiveLossScaleUpdateCell": nn.DynamicLossScaleUpdateCell,
    "TrainOneStepWithLossScaleCell": nn.TrainOneStepWithLossScaleCell,
    "MFTrainOneStepCell": mindformers.wrapper.MFTrainOneStepCell,
    "MFPipelineWithLossScaleCell": mindformers.wrapper.MFPipelineWithLossScaleCell,
}
TRAIN_STEP_CELLS = [wrapper.TrainOneStepWithLossScaleCell, wrapper.MFTrainOneStepCell]

# float16 has 11 significant bits; a matrix product of 8 terms loses a few more.
FLOAT16_TOLERANCE = 2.0**-8


def test_every_cell_is_a_subclass_of_the_stock_one():
    assert set(wrapper.__all__) == set(STOCK)
    for name, stock in STOCK.items():
        assert issubclass(getattr(wrapper, name), stock)


@pytest.mark.parametrize("cell", TRAIN_STEP_CELLS)
@pytest.mark.parametrize("optimizer", ["Momentum", "Adam"])
def test_skipped_step_changes_nothing_and_applied_step_is_that_of_fp32(mode, cell, optimizer):
    half, full = Regression(mindspore.float16), Regression(mindspore.float32)
    update_cell = AdaptiveLossScaleUpdateCell(1024, 2, 20)
    step = cell(half, build_optimizer(optimizer, half), scale_sense=update_cell)
    reference = nn.TrainOneStepCell(full, build_optimizer(optimizer, full))
    rule = AdaptiveRule()
    state = rule.start(1024.0)
    for overflow in (False, True, False, True, True, False):
        features, target = batch(overflow)
        before = weights_and_optimizer_state(step)
        outputs = step(features, target)
        after = weights_and_optimizer_state(step)
        state = rule.step(state, overflow)
        assert bool(outputs[1]) == overflow
        assert float(step.scale_sense) == state.loss_scale
        if overflow:
            assert before.keys() == after.keys()
            assert all(np.array_equal(before[name], after[name]) for name in before)
        else:
            loss = reference(features, target)
            np.testing.assert_allclose(float(outputs[0]), float(loss), rtol=FLOAT16_TOLERANCE)
            change = full.weight.asnumpy() - before["weight"]
            np.testing.assert_allclose(
                after["weight"] - before["weight"], change, rtol=0.02, atol=1e-3 * abs(change).max()
            )
            assert not np.array_equal(before["weight"], after["weight"])
    assert update_cell.state()["skipped_steps"] == 3


@pytest.mark.parametrize("cell", TRAIN_STEP_CELLS)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_any_value_that_is_not_finite_is_an_overflow(graph_mode, cell, value):
    network = Regression(mindspore.float32)
    step = cell(network, build_optimizer("Momentum", network), scale_sense=AdaptiveLossScaleUpdateCell(1024, 2, 20))
    features, target = batch(overflow=False)
    features[3, 2] = value
    assert bool(step(features, target)[1])


def test_real_float16_overflow_of_the_scaled_gradient_is_detected(graph_mode):
    """No inf is put in: the gradient itself passes 65504 once it is scaled, and fits after some drops."""
    network = Regression(mindspore.float16)
    step = wrapper.TrainOneStepWithLossScaleCell(
        network, build_optimizer("Momentum", network), scale_sense=AdaptiveLossScaleUpdateCell(2**32, 2, 20)
    )
    features, target = batch(overflow=False)
    overflows = [bool(step(features, target)[1]) for _ in range(30)]
    skipped = overflows.index(False)
    assert 5 < skipped < 30
    assert not any(overflows[skipped:])
    assert float(step.scale_sense) == 2.0 ** (32 - skipped)


def test_clipping_works_with_the_adaptive_scale(graph_mode):
    network = Regression(mindspore.float16)
    optimizer = nn.SGD(network.trainable_params(), learning_rate=1.0)
    step = wrapper.MFTrainOneStepCell(
        network, optimizer, use_clip_grad=True, max_grad_norm=0.01, scale_sense=AdaptiveLossScaleUpdateCell(1024, 2, 20)
    )
    before = network.weight.asnumpy().copy()
    global_norm = step(*batch(overflow=False))[4]
    assert float(global_norm) > 0.01
    np.testing.assert_allclose(np.linalg.norm(network.weight.asnumpy() - before), 0.01, rtol=0.01)


def test_a_fixed_scale_and_mindspores_dynamic_cell_work_on_cpu_too(graph_mode):
    for scale_sense, expected in (
        (Tensor(64.0, mindspore.float32), 64.0),
        (nn.FixedLossScaleUpdateCell(64.0), 64.0),
        (nn.DynamicLossScaleUpdateCell(64.0, 2, 20), 32.0),
    ):
        network = Regression(mindspore.float32)
        step = wrapper.TrainOneStepWithLossScaleCell(network, build_optimizer("Momentum", network), scale_sense)
        assert bool(step(*batch(overflow=True))[1])
        assert float(step.scale_sense) == expected


def test_off_cpu_the_stock_detection_is_what_is_compiled(graph_mode, monkeypatch):
    """Off CPU an instance is the stock one, and here MindSpore refuses that by the name of its Ascend primitive."""
    monkeypatch.setattr(detection, "_runs_on_cpu", lambda: False)
    network = Regression(mindspore.float32)
    step = wrapper.TrainOneStepWithLossScaleCell(
        network, build_optimizer("Momentum", network), scale_sense=AdaptiveLossScaleUpdateCell(1024, 2, 20)
    )
    assert step.get_overflow_status.__func__ is nn.TrainOneStepWithLossScaleCell.get_overflow_status
    with pytest.raises(RuntimeError, match="NPUGetFloatStatusV2"):
        step(*batch(overflow=False))


class Regression(nn.Cell):
    """A linear regression whose product is taken in a given dtype; returns the loss."""

    def __init__(self, dtype):
        super().__init__()
        weight = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
        self.weight = Parameter(Tensor(weight), name="weight")
        self.dtype = dtype
        self.matmul = ops.MatMul()

    def construct(self, features, target):
        product = self.matmul(features.astype(self.dtype), self.weight.astype(self.dtype))
        return ((product.astype(mindspore.float32) - target) ** 2).mean()


def batch(overflow):
    random = np.random.default_rng(1)
    features = random.normal(size=(16, 8)).astype(np.float32)
    target = random.normal(size=(16, 4)).astype(np.float32)
    if overflow:
        features[0, 0] = np.inf
    return Tensor(features), Tensor(target)


def build_optimizer(name, network):
    weights = network.trainable_params()
    return nn.Momentum(weights, 0.01, 0.9) if name == "Momentum" else nn.Adam(weights, 0.01)


def weights_and_optimizer_state(step):
    """By name; the update cell, which is a part of the optimizer, and the loss scale are left out."""
    scaling = {"scale_sense", *step.loss_scaling_manager.parameters_dict()}
    return {name: value.asnumpy().copy() for name, value in step.parameters_dict().items() if name not in scaling}
