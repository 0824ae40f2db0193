"""One training by each method of scaling the loss, on the same data and from the same weights, and what comes of it."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import mindspore
import numpy as np
from mindformers.wrapper.adaptive_loss_scale import AdaptiveLossScaleUpdateCell as MindFormersUpdateCell
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from worth_report import ADAPTIVE_HIGH, FP32, GUIDED, GUIDED_HIGH, MEGATRON, MINDFORMERS, OURS, UNSCALED

from mindformers_adaptive.gradients.backward import backward_pass
from mindformers_adaptive.gradients.ranges import find_loss_scale
from mindformers_adaptive.wrapper import (
    AdaptiveLossScaleUpdateCell,
    GradientGuidedLossScaleUpdateCell,
    NoLossScaleUpdateCell,
)

# In place of a number: the scale that find_loss_scale() recommends for the seed.
FOUND = "found"
LARGEST_START = 2.0**32
FIND_BATCHES = 2
HIGHEST_EXPONENT = 60


@dataclass(frozen=True)
class Method:
    """A method of scaling the loss.

    Attributes:
        name (str): what it is called.
        cell (Callable): makes the update cell from an initial scale.
        start (float or str): the initial scale, or ``FOUND``.
        dtype (mindspore.dtype): what the network computes in.
        graph (str): methods of the same are trained by one graph, from different initial scales.
    """

    name: str
    cell: Callable
    start: float | str = 1.0
    dtype: object = mstype.float16
    graph: str = ""


def fixed(loss_scale):
    """Return the method of a fixed scale, at which overflowed steps are skipped."""
    return Method(f"fixed 2^{math.log2(loss_scale):g}", nn.FixedLossScaleUpdateCell, loss_scale, graph="fixed")


def dynamic(window):
    # MindSpore's default start.
    return Method(
        f"MindSpore's dynamic, window {window}", lambda s: nn.DynamicLossScaleUpdateCell(s, 2, window), 2.0**24
    )


def adaptive(loss_scale):
    return AdaptiveLossScaleUpdateCell(loss_scale, 2, 20)


def megatron(loss_scale):
    return AdaptiveLossScaleUpdateCell(loss_scale, 2, 1000, 1000, 1000, hysteresis=2)


METHODS = (
    Method(FP32, lambda _: NoLossScaleUpdateCell(), dtype=mstype.float32),
    Method(UNSCALED, lambda _: NoLossScaleUpdateCell()),
    fixed(64.0),
    fixed(512.0),
    fixed(2.0**16),
    dynamic(20),
    dynamic(100),
    dynamic(1000),
    Method(MEGATRON, megatron, LARGEST_START),
    Method(MINDFORMERS, lambda s: MindFormersUpdateCell(s, 2, 20), LARGEST_START),
    Method(ADAPTIVE_HIGH, adaptive, LARGEST_START, graph="adaptive"),
    Method(OURS, adaptive, FOUND, graph="adaptive"),
    Method(GUIDED_HIGH, GradientGuidedLossScaleUpdateCell, LARGEST_START, graph="guided"),
    Method(GUIDED, GradientGuidedLossScaleUpdateCell, FOUND, graph="guided"),
)


class CompiledTraining:
    """A train step that is compiled once; before each run its Parameters are put back.

    Args:
        task: a task of ``worth_tasks``.
        network (Cell): of the task.
        make_cell (Callable): makes the update cell from an initial scale.
    """

    def __init__(self, task, network, make_cell):
        self.network, self.make_cell = network, make_cell
        self.train_step = task.train_step(network, make_cell(LARGEST_START))
        self.initial = [(value, value.asnumpy().copy()) for value in self.train_step.get_parameters()]

    def begin(self, loss_scale, weights):
        """Put everything back, with this initial scale, and these weights in the order of the network's Parameters."""
        put_back(self.initial)
        set_weights(self.network, weights)
        fresh = (value.asnumpy() for value in self.make_cell(loss_scale).get_parameters())
        put_back(zip(self.train_step.loss_scaling_manager.get_parameters(), fresh, strict=True))
        ops.assign(self.train_step.scale_sense, Tensor(loss_scale, mstype.float32))

    def step(self, batch):
        """Take a step, and return its loss, whether it overflowed, and the next scale."""
        loss, overflow = self.train_step(*batch)[:2]
        return float(loss), bool(overflow), float(self.train_step.scale_sense.asnumpy())


class Trainings:
    """All trainings of one task.

    Args:
        task: a task of ``worth_tasks``.
        look_every (int, optional): after how many steps ceiling, underflow and quality are measured, each with more
            forward or backward passes that change nothing. Default: None, what the task says.
    """

    def __init__(self, task, look_every=None):
        self.task = task
        self.look_every = look_every or task.look_every
        self._made = {}
        self._last_ceiling = 20

    def run(self, method, seed, steps=None):
        """Train once.

        Args:
            method (Method): how to scale.
            seed (int): of weights and data.
            steps (int, optional): how many. Default: None, those of the task.

        Returns:
            dict: ``start``, ``skipped`` (the numbers of the skipped steps, from 0), ``steps``, ``looks`` (``step``,
            ``quality`` and, in FP16, ``loss_scale``, ``ceiling``, ``underflow``) and ``quality`` at the end.
        """
        data, network, steps = self.task.data(seed), self._network(method.dtype), steps or self.task.steps
        training = self._once(method.graph or method.name, lambda: CompiledTraining(self.task, network, method.cell))
        start = self.find(seed).loss_scale_value if method.start == FOUND else method.start
        training.begin(start, self._weights_of(seed))
        skipped, looks, scale = [], [], start
        for step in range(steps):
            batch = data.batch(step)
            look = {"step": step, "quality": self.task.quality(network, data)} if step % self.look_every == 0 else None
            if look is not None and method.dtype == mstype.float16:
                look |= self._look(network, batch, scale)
            _, overflow, scale = training.step(batch)
            if overflow:
                skipped.append(step)
            if look is not None:
                looks.append({**look, "skipped": overflow})
        quality = self.task.quality(network, data)
        looks.append({"step": steps, "quality": quality, "skipped": True})
        return {"start": start, "steps": steps, "skipped": skipped, "looks": looks, "quality": quality}

    def find(self, seed):
        """Return what find_loss_scale() says of the weights and the first batches of a seed."""

        def find():
            network, data = self._network(mstype.float16), self.task.data(seed)
            set_weights(network, self._weights_of(seed))
            return find_loss_scale(network, [data.batch(step) for step in range(FIND_BATCHES)])

        return self._once(("found", seed), find)

    def _network(self, dtype):
        return self._once(("network", dtype), lambda: self.task.network(dtype, 0))

    def _weights_of(self, seed):
        return self._once(("weights", seed), lambda: weights_of(self.task.network(mstype.float32, seed)))

    def _once(self, key, make):
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _look(self, network, batch, scale):
        """Measure the ceiling of a step to a quarter of a bit, and the share of gradients that underflow."""
        backward = self._once("backward", lambda: backward_pass(network))
        passes = {}

        def gradients(exponent):
            if exponent not in passes:
                _, each, _ = backward(Tensor(2.0**exponent, mstype.float32), *batch)
                flat = np.concatenate([one.asnumpy().ravel() for one in each])
                passes[exponent] = flat if np.isfinite(flat).all() else None
            return passes[exponent]

        exponent = self._last_ceiling
        while gradients(exponent) is None and exponent > -HIGHEST_EXPONENT:
            exponent -= 1
        while gradients(exponent + 1) is not None and exponent < HIGHEST_EXPONENT:
            exponent += 1
        self._last_ceiling = exponent
        reference = gradients(exponent)
        if reference is None:
            return {"loss_scale": scale, "ceiling": None, "underflow": None}
        ceiling = float(exponent)
        for part in (0.5, 0.25):
            ceiling += part if gradients(ceiling + part) is not None else 0.0
        at_scale = gradients(math.log2(scale)) if 0 < scale < math.inf else None
        underflow = None if at_scale is None else float(np.mean((at_scale == 0) & (reference != 0)))
        return {"loss_scale": scale, "ceiling": 2.0**ceiling, "underflow": underflow}


def put_back(values):
    """Give Parameters the values they had, from pairs of a Parameter and an array."""
    for value, array in values:
        # Of a copy, because a Tensor has the memory of its array. Not by set_data(), which a compiled graph that has
        # run once does not see for the optimizer's Parameters.
        ops.assign(value, Tensor(array.copy(), value.dtype))


def weights_of(network):
    return [weight.asnumpy().copy() for weight in network.trainable_params()]


def set_weights(network, weights):
    """Give a network these weights, in the order of its trainable Parameters."""
    put_back(zip(network.trainable_params(), weights, strict=True))


def use_one_thread():
    """Compute with one thread, so that the same seeds give the same figures. Only before the first graph."""
    mindspore.set_device("CPU")
    mindspore.device_context.cpu.op_tuning.threads_num(1)
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
