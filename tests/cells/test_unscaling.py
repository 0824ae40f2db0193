"""The train-step cell divides gradients by the loss scale in float32, for every dtype of the weights."""

import numpy as np
import pytest
from mindspore import Parameter, ParameterTuple, Tensor, amp, nn, ops
from mindspore import dtype as mstype

from mindformers_adaptive import (
    AdaptiveLossScaler,
    AdaptiveLossScaleUpdateCell,
    FixedScaleTrainOneStepCell,
    GradientGuidedLossScaleUpdateCell,
    build_train_network,
)
from mindformers_adaptive.cells.train_step import LossScaleTrainStep
from mindformers_adaptive.cells.unscaling import MapInFloat32
from mindformers_adaptive.mindformers.trainer import MeanOverMicroBatches
from mindformers_adaptive.wrapper import MFTrainOneStepCell, TrainOneStepWithLossScaleCell

pytestmark = pytest.mark.slow

SIZE = 8
DTYPES = (mstype.float16, mstype.bfloat16, mstype.float32)
# The largest relative and the largest absolute error of rounding to FP16, BF16 and float32.
ROUNDING = {mstype.float16: (2.0**-11, 2.0**-25), mstype.bfloat16: (2.0**-8, 0.0), mstype.float32: (2.0**-23, 0.0)}
POWERS = [2.0**exponent for exponent in (-24, -17, -14, 0, 16, 24, 25, 26, 40)]
OTHERS = [1.5 * 2.0**22, 1.5 * 2.0**23, 65535.0, *2.0 ** np.random.default_rng(7).uniform(-24, 40, 6)]


class Products(nn.Cell):
    """The loss is the float32 sum of weight * x, so the gradient of a weight is x times the loss scale."""

    def __init__(self, dtypes=DTYPES):
        super().__init__()
        weights = [Parameter(Tensor(np.zeros(SIZE), dtype), name=f"weight_{dtype}") for dtype in dtypes]
        self.weights = ParameterTuple(weights)

    def construct(self, x):
        loss = 0.0
        for weight in self.weights:
            loss = loss + (ops.cast(weight, mstype.float32) * x).sum()
        return loss


class KeepGradients(nn.Optimizer):
    """An optimizer that only stores the gradients in float32, because no optimizer on a CPU takes BF16 weights."""

    def __init__(self, weights):
        super().__init__(1.0, weights)
        copies = [Parameter(Tensor(np.zeros(SIZE, np.float32)), name=f"kept_{weight.name}") for weight in weights]
        self.kept = ParameterTuple(copies)

    def construct(self, gradients):
        for copy, gradient in zip(self.kept, gradients):  # noqa: B905  MindSpore compiles no keyword of zip
            ops.assign(copy, ops.cast(gradient, mstype.float32))
        return True


class OfMindSpore(LossScaleTrainStep, nn.TrainOneStepWithLossScaleCell):
    pass


class CallsTheStockConstruct(TrainOneStepWithLossScaleCell):
    def construct(self, *inputs):
        loss, overflow, loss_scale = super().construct(*inputs)
        return loss * 2, overflow, loss_scale


def fixed(cell, **arguments):
    return lambda network, optimizer: cell(network, optimizer, scale_sense=Tensor(1.0, mstype.float32), **arguments)


def with_manager(network, optimizer):
    return build_train_network(network, optimizer, loss_scale_manager=amp.DynamicLossScaleManager(2.0**10))


def accumulating(network, optimizer):
    return fixed(TrainOneStepWithLossScaleCell)(MeanOverMicroBatches(network, 2), optimizer)


WAYS = {
    "cell": fixed(TrainOneStepWithLossScaleCell),
    "mixin": fixed(OfMindSpore),
    "subclass": fixed(CallsTheStockConstruct),
    "clipping": fixed(MFTrainOneStepCell, use_clip_grad=True, max_grad_norm=1e30),
    "manager": with_manager,
    "accumulation": accumulating,
}


def inputs_at(scale, random, dtype=np.float32):
    """Return inputs that FP16 can represent exactly, also after multiplication by the loss scale."""
    most = min(2.0**15, 6e4 / scale)
    least = min(max(2.0**-24, 2.0**-14 / scale), most)
    return (np.exp(random.uniform(np.log(least), np.log(most), SIZE)) * random.choice([-1, 1], SIZE)).astype(dtype)


def rounded(values, dtype):
    return Tensor(values, mstype.float32).astype(dtype).astype(mstype.float32).asnumpy()


@pytest.mark.parametrize(
    ("way", "mode"),
    [*((way, "graph") for way in WAYS), *((way, "pynative") for way in ("cell", "accumulation"))],
    indirect=["mode"],
)
def test_gradients_are_those_of_float64_at_every_scale(mode, way):
    network = Products((mstype.float16, mstype.float32) if way == "accumulation" else DTYPES)
    optimizer = KeepGradients(network.trainable_params())
    step, random = WAYS[way](network, optimizer), np.random.default_rng(0)
    for scale in (*POWERS, *OTHERS):
        x = inputs_at(scale, random)
        step.set_sense_scale(Tensor(scale, mstype.float32))
        batch = np.stack([x, x]) if way == "accumulation" else x
        assert not bool(step(Tensor(batch))[1]), scale
        for weight, copy in zip(network.weights, optimizer.kept, strict=True):
            relative, absolute = ROUNDING[weight.dtype]
            used = np.float64(np.float32(scale))
            expected = rounded(x * np.float32(scale), weight.dtype).astype(np.float64) / used
            # Gradient accumulation adds half of the gradient of each of two micro-batches. The halves may be subnormal,
            # and the sum is rounded too, so allow a larger error.
            relative = relative * (4 if way == "accumulation" else 1.01) + 2.0**-23
            np.testing.assert_allclose(copy.asnumpy(), expected, relative, absolute, err_msg=str(scale))
            if weight.dtype == mstype.float32 and way == "cell":
                scaled = x * np.float32(scale)
                np.testing.assert_array_equal(copy.asnumpy(), scaled * (np.float32(1) / np.float32(scale)))


@pytest.mark.parametrize(
    ("update_cell", "steps"),
    [(AdaptiveLossScaleUpdateCell(2.0**16, 2, 20), 320), (GradientGuidedLossScaleUpdateCell(2.0**26), 80)],
)
def test_fp16_weights_move_at_every_scale_that_a_rule_reaches(graph_mode, update_cell, steps):
    network = Products((mstype.float16,))
    optimizer = nn.SGD(network.trainable_params(), 1.0)
    step = TrainOneStepWithLossScaleCell(network, optimizer, scale_sense=update_cell).set_train()
    x, weight = Tensor(np.full(SIZE, 1e-5, np.float32)), 0.0
    for _ in range(steps):
        overflow, before = bool(step(x)[1]), weight
        weight = float(network.weights[0].asnumpy()[0])
        assert (weight == before) is overflow
    assert update_cell.loss_scale_value > 2.0**25
    assert weight == pytest.approx(-1e-5 * (steps - update_cell.state()["skipped_steps"]), rel=0.2)


def test_the_scaler_divides_in_float32(mode):
    scaler, random = AdaptiveLossScaler(2.0**10), np.random.default_rng(1)
    for scale in (*POWERS, *OTHERS):
        scaler.scale_value.set_data(Tensor(scale, mstype.float32))
        gradient = (inputs_at(scale, random).astype(np.float64) * scale).astype(np.float16)
        half, full = scaler.unscale((Tensor(gradient), Tensor(gradient.astype(np.float32))))
        assert (half.dtype, full.dtype) == (mstype.float16, mstype.float32)
        expected = gradient.astype(np.float64) / np.float64(np.float32(scale))
        np.testing.assert_allclose(half.asnumpy(), expected, 2**-10, 2.0**-25, err_msg=str(scale))
        np.testing.assert_allclose(full.asnumpy(), expected, 2**-22, err_msg=str(scale))


def test_an_overflow_in_bf16_is_detected(mode):
    network = Products((mstype.bfloat16,))
    optimizer = KeepGradients(network.trainable_params())
    step = fixed(TrainOneStepWithLossScaleCell)(network, optimizer)
    for value, overflow in ((1.0, False), (np.inf, True), (np.nan, True)):
        assert bool(step(Tensor(np.full(SIZE, value, np.float32)))[1]) is overflow


def test_float32_weights_keep_the_stock_unscaling():
    network = Products((mstype.float32,))
    step = fixed(TrainOneStepWithLossScaleCell)(network, nn.SGD(network.trainable_params()))
    assert type(step.hyper_map) is ops.HyperMap
    assert type(step.grad_reducer) is nn.Identity


class WithMovingAverages(TrainOneStepWithLossScaleCell):
    """A user's train-step cell that calls ``hyper_map`` with its weights too, so ``hyper_map`` must not cast values."""

    def construct(self, *inputs):
        self.hyper_map(ops.assign, self.averages, self.weights)
        return super().construct(*inputs)


def test_a_construct_that_maps_by_itself_is_left_alone():
    network = Products((mstype.float16,))
    step = fixed(WithMovingAverages)(network, nn.SGD(network.trainable_params()))
    assert not isinstance(step.hyper_map, MapInFloat32)


class HalfLoss(nn.Cell):
    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(np.zeros(2, np.float16)), name="weight")

    def construct(self, x):
        return (self.weight * x).sum()


@pytest.mark.parametrize("loss_scale", [65519, 65520])
def test_fixed_scale_beyond_a_float16_loss_is_refused(mode, loss_scale):
    network = HalfLoss()
    step = FixedScaleTrainOneStepCell(network, nn.SGD(network.trainable_params(), 1.0), loss_scale)
    x = Tensor(np.full(2, 2.0**-6, np.float16))
    if loss_scale < 65520:
        step(x)
        np.testing.assert_allclose(network.weight.asnumpy(), -(2.0**-6), rtol=2**-10)
    else:
        with pytest.raises(ValueError, match=rf"'loss_scale' must be below 65520.*but got {loss_scale}.*in float32"):
            step(x)
