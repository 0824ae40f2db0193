"""Trains one network twice: with this package's cells, and with MindFormers' own cells at the same loss scales.

MindFormers' cell gets the loss scale as a Tensor before each step. On a CPU, MindFormers' cell runs its branch for
Ascend 910B.
"""

from typing import Any, NamedTuple

import mindformers.wrapper
import mindspore
import numpy as np
from mindformers.core import optim
from mindspore import Tensor, nn
from mindspore import dtype as mstype

from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.wrapper import AdaptiveLossScaleUpdateCell, MFTrainOneStepCell
from tests.shared.printed import forget_printed

STEPS, START = 30, 2.0**24
# MindFormers' train-step cell keeps the learning rates that the callback prints in these Parameters.
LEARNING_RATES = ("current_default_lr", "current_grouped_lr")
# Number of steps in PyNative mode, where each step takes long.
PYNATIVE_STEPS = 5
WINDOWS = {"max_scale_window": 8, "min_scale_window": 4}
BATCH, FEATURES, CLASSES = 8, 12, 4


class Layers(nn.Cell):
    """A network of two dense layers in FP16, with a mean loss in FP32."""

    def __init__(self):
        super().__init__()
        self.first = nn.Dense(FEATURES, 16, activation="relu").to_float(mstype.float16)
        self.second = nn.Dense(16, CLASSES).to_float(mstype.float16)
        self.loss = nn.MSELoss()

    def construct(self, features, target):
        return self.loss(self.second(self.first(features)).astype(mstype.float32), target)


class SumAndNumber(Layers):
    """The network ``Layers``, with the sum of the losses and the number of losses as outputs."""

    def __init__(self):
        super().__init__()
        self.loss = nn.MSELoss(reduction="sum")
        self.number = Tensor([BATCH * CLASSES], mstype.float32)

    def construct(self, features, target):
        return super().construct(features, target).reshape((1,)), self.number


class Vision(nn.Cell):
    """An image network in FP16: a convolution over 12 pixels, pooling and a dense layer."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3, weight_init="normal").to_float(mstype.float16)
        self.pool = nn.MaxPool2d(2, 2)
        self.dense = nn.Dense(4 * 2, CLASSES).to_float(mstype.float16)
        self.loss = nn.SoftmaxCrossEntropyWithLogits(reduction="mean")

    def construct(self, pictures, target):
        maps = self.pool(nn.ReLU()(self.convolution(pictures.reshape((-1, 1, 4, 3)))).astype(mstype.float32))
        return self.loss(self.dense(maps.reshape((maps.shape[0], -1))).astype(mstype.float32), target)


def schedule(learning_rate=0.01):
    """Return a learning rate that falls to a tenth over the steps of a training."""
    return nn.CosineDecayLR(learning_rate / 10, learning_rate, STEPS)


def adamw(network):
    return optim.AdamW(network.trainable_params(), schedule(), weight_decay=0.01)


class Seen(NamedTuple):
    """What this package's train-step cell did in each step of a training."""

    overflows: list[bool]
    losses: list[float]
    learning_rates: list[float]
    applied_steps: int
    outputs: list[Any]


def rows(steps=STEPS, seed=0):
    random = np.random.default_rng(seed)
    solution = random.normal(size=(FEATURES, CLASSES)).astype(np.float32)
    for _ in range(steps):
        features = random.normal(size=(BATCH, FEATURES)).astype(np.float32)
        yield features, features @ solution


def train_both(build, build_optimizer=adamw, batches=None, start=START, **arguments):
    """Train with MindFormers' cell and ours. Assert that both agree at each step, and that a skip changes nothing.

    Args:
        build (Callable): returns the network, the same each time.
        build_optimizer (Callable): returns the optimizer of a network.
        batches (Iterable, optional): tuples of arrays. Default: None, :func:`rows`.
        start (float): the initial loss scale.
        **arguments: further arguments of both train-step cells.

    Returns:
        Seen, what this package's cell did.
    """
    update_cell = AdaptiveLossScaleUpdateCell(start, 2, 4, **WINDOWS)
    ours = _train_step(MFTrainOneStepCell, build, build_optimizer, update_cell, arguments)
    stock_cell = mindformers.wrapper.MFTrainOneStepCell
    stock = _train_step(stock_cell, build, build_optimizer, Tensor(start, mstype.float32), arguments)
    stock.ascend_910b_target, stock.enable_allfinite = True, False
    of_cell = {*update_cell.parameters_dict(), "scale_sense"}
    rule = AdaptiveRule(**WINDOWS)
    state = rule.start(start, 4)
    seen = Seen([], [], [], 0, [])
    before = _values(ours, of_cell)
    for number, batch in enumerate(rows() if batches is None else batches, start=1):
        stock.set_sense_scale(Tensor(state.loss_scale, mstype.float32))
        outputs = [_arrays(step(*map(Tensor, batch))) for step in (ours, stock)]
        overflow = bool(outputs[0][1])
        state = rule.step(state, overflow)
        assert float(outputs[0][2]) == state.loss_scale, number
        # Compare all outputs except the loss scale, which MindFormers' cell does not update.
        for ours_output, other in zip(outputs[0], outputs[1], strict=True):
            if ours_output is not outputs[0][2]:
                np.testing.assert_array_equal(ours_output, other, err_msg=f"step {number}")
        after = _values(ours, of_cell)
        for name, value in _values(stock, of_cell).items():
            np.testing.assert_array_equal(after[name], value, err_msg=f"{name} after step {number}")
        if overflow:
            changed = {name for name in after if not np.array_equal(before[name], after[name], equal_nan=True)}
            assert changed <= set(LEARNING_RATES)
        before = after
        seen.overflows.append(overflow)
        seen.losses.append(float(np.mean(outputs[0][0])))
        seen.learning_rates.append(float(outputs[0][3]))
        seen.outputs.append(outputs[0])
    return seen._replace(applied_steps=int(ours.optimizer.global_step.asnumpy()[0]))


def _train_step(cell, build, build_optimizer, scale_sense, arguments):
    mindspore.set_seed(0)
    np.random.seed(0)
    forget_printed(LEARNING_RATES)
    network = build()
    return cell(network, build_optimizer(network), scale_sense=scale_sense, **arguments).set_train()


def _values(train_step, of_cell):
    return {name: it.asnumpy().copy() for name, it in train_step.parameters_dict().items() if name not in of_cell}


def _arrays(outputs):
    return [None if it is None else np.asarray(it.asnumpy() if isinstance(it, Tensor) else it) for it in outputs]
