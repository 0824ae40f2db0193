"""One training in each way of scaling the loss, on the same data and from the same weights, and what comes of it."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import mindspore
import numpy as np
from mindformers.wrapper.adaptive_loss_scale import AdaptiveLossScaleUpdateCell as MindFormersUpdateCell
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from mindformers_adaptive.gradients.backward import backward_pass
from mindformers_adaptive.gradients.recommendation import find_loss_scale
from mindformers_adaptive.wrapper import (
    AdaptiveLossScaleUpdateCell,
    GradientGuidedLossScaleUpdateCell,
    NoLossScaleUpdateCell,
)

__all__ = ["FOUND", "FP32", "REACHED_AT", "SETTLED", "UNSCALED", "WAYS", "Trainings", "Way", "fixed", "use_one_thread"]

FP32, UNSCALED = "FP32", "FP16, no scaling"
# In place of a number: the scale that find_loss_scale() recommends for the seed.
FOUND = "found"
LARGEST_START = 2.0**32
FIND_BATCHES = 2
# A run has left its start once it has applied so many steps in a row: the smallest window of the adaptive rules.
SETTLED = 20
# FP32's result at this share of its steps is what the others have to reach.
REACHED_AT = 0.8
HIGHEST_EXPONENT = 60


@dataclass(frozen=True)
class Way:
    """A way of scaling the loss.

    Attributes:
        name (str): what it is called.
        cell (Callable): makes the update cell from an initial scale.
        start (float or str): the initial scale, or ``FOUND``.
        dtype (mindspore.dtype): what the network computes in.
        graph (str): ways of the same are trained by one graph, from different initial scales.
    """

    name: str
    cell: Callable
    start: float | str = 1.0
    dtype: object = mstype.float16
    graph: str = ""


def fixed(loss_scale):
    """Return the way of a fixed scale, at which overflowed steps are skipped."""
    return Way(f"fixed 2^{math.log2(loss_scale):g}", nn.FixedLossScaleUpdateCell, loss_scale, graph="fixed")


def dynamic(window):
    # MindSpore's default start.
    return Way(f"MindSpore's dynamic, window {window}", lambda s: nn.DynamicLossScaleUpdateCell(s, 2, window), 2.0**24)


def adaptive(loss_scale):
    return AdaptiveLossScaleUpdateCell(loss_scale, 2, 20)


def megatron(loss_scale):
    return AdaptiveLossScaleUpdateCell(loss_scale, 2, 1000, 1000, 1000, hysteresis=2)


WAYS = (
    Way(FP32, lambda _: NoLossScaleUpdateCell(), dtype=mstype.float32),
    Way(UNSCALED, lambda _: NoLossScaleUpdateCell()),
    fixed(64.0),
    fixed(512.0),
    fixed(2.0**16),
    dynamic(20),
    dynamic(100),
    dynamic(1000),
    Way("Megatron-LM's, window 1000, hysteresis 2", megatron, LARGEST_START),
    Way("MindFormers' adaptive", lambda s: MindFormersUpdateCell(s, 2, 20), LARGEST_START),
    Way("ours, adaptive from 2^32", adaptive, LARGEST_START, graph="adaptive"),
    Way("ours, adaptive from the found scale", adaptive, FOUND, graph="adaptive"),
    Way("ours, guided from 2^32", GradientGuidedLossScaleUpdateCell, LARGEST_START, graph="guided"),
    Way("ours, guided from the found scale", GradientGuidedLossScaleUpdateCell, FOUND, graph="guided"),
)


class Trainings:
    """All trainings of one task. A graph is compiled once; between runs its Parameters are put back.

    Args:
        task: a task of ``worth_tasks`` or ``worth_llama``.
        look_every (int, optional): after how many steps ceiling, underflow and quality are measured, each with more
            forward or backward passes that change nothing. Default: None, what the task says.
    """

    def __init__(self, task, look_every=None):
        self.task = task
        self.look_every = look_every or task.look_every
        self.networks = {}
        self.graphs = {}
        self.found = {}
        self.weights = {}
        self._gradients = None

    def run(self, way, seed, steps=None):
        """Train once.

        Args:
            way (Way): how to scale.
            seed (int): of weights and data.
            steps (int, optional): how many. Default: None, those of the task.

        Returns:
            dict: ``start``, ``skipped`` (the numbers of the skipped steps, from 0), ``steps``, ``looks`` (``step``,
            ``quality`` and, in FP16, ``loss_scale``, ``ceiling``, ``underflow``) and ``quality`` at the end.
        """
        data = self.task.data(seed)
        network, train_step, initial = self._graph(way)
        start = self.find(seed) if way.start == FOUND else way.start
        put_back(initial)
        set_weights(network, self._weights_of(seed))
        ops.assign(train_step.scale_sense, Tensor(start, mstype.float32))
        skipped, looks, scale = [], [], start
        steps = steps or self.task.steps
        for step in range(steps):
            batch = data.batch(step)
            look = {"step": step, "quality": self.task.quality(network, data)} if step % self.look_every == 0 else None
            if look is not None and way.dtype == mstype.float16:
                look |= self._look(network, batch, scale)
            overflow = bool(train_step(*batch)[1])
            scale = float(train_step.scale_sense.asnumpy())
            if overflow:
                skipped.append(step)
            if look is not None:
                looks.append({**look, "skipped": overflow})
        quality = self.task.quality(network, data)
        looks.append({"step": steps, "quality": quality, "skipped": True})
        return {"start": start, "steps": steps, "skipped": skipped, "looks": looks, "quality": quality}

    def find(self, seed):
        """Return the scale that find_loss_scale() recommends for the weights and the first batches of a seed."""
        if seed not in self.found:
            network, data = self._network(mstype.float16), self.task.data(seed)
            set_weights(network, self._weights_of(seed))
            self.found[seed] = self.recommendation(seed, data).loss_scale_value
        return self.found[seed]

    def recommendation(self, seed, data):
        """Return what find_loss_scale() says of a seed."""
        network = self._network(mstype.float16)
        set_weights(network, self._weights_of(seed))
        return find_loss_scale(network, [data.batch(step) for step in range(FIND_BATCHES)])

    def _network(self, dtype):
        if dtype not in self.networks:
            self.networks[dtype] = self.task.network(dtype, 0)
        return self.networks[dtype]

    def _weights_of(self, seed):
        if seed not in self.weights:
            network = self.task.network(mstype.float32, seed)
            self.weights[seed] = [weight.asnumpy().copy() for weight in network.trainable_params()]
        return self.weights[seed]

    def _graph(self, way):
        key = way.graph or way.name
        if key not in self.graphs:
            network = self._network(way.dtype)
            train_step = self.task.train_step(network, way.cell(LARGEST_START if way.start == FOUND else way.start))
            initial = [(value, value.asnumpy().copy()) for value in train_step.get_parameters()]
            self.graphs[key] = (network, train_step, initial)
        return self.graphs[key]

    def _look(self, network, batch, scale):
        """Measure the ceiling of a step to a quarter of a bit, and the share of gradients that underflow."""
        if self._gradients is None:
            self._gradients = backward_pass(network)
        passes = {}

        def gradients(exponent):
            if exponent not in passes:
                _, each, _ = self._gradients(Tensor(2.0**exponent, mstype.float32), *batch)
                flat = np.concatenate([one.asnumpy().ravel() for one in each])
                passes[exponent] = flat if np.isfinite(flat).all() else None
            return passes[exponent]

        exponent = self._last_ceiling if hasattr(self, "_last_ceiling") else 20
        while gradients(exponent) is None and exponent > -HIGHEST_EXPONENT:
            exponent -= 1
        while gradients(exponent + 1) is not None and exponent < HIGHEST_EXPONENT:
            exponent += 1
        self._last_ceiling = exponent
        reference = gradients(exponent)
        if reference is None:
            return {"loss_scale": scale, "ceiling": None, "underflow": None}
        part = 0.5
        ceiling = float(exponent)
        for _ in range(2):
            ceiling += part if gradients(ceiling + part) is not None else 0.0
            part /= 2.0
        at_scale = gradients(math.log2(scale)) if 0 < scale < math.inf else None
        underflow = None if at_scale is None else float(np.mean((at_scale == 0) & (reference != 0)))
        return {"loss_scale": scale, "ceiling": 2.0**ceiling, "underflow": underflow}


def put_back(initial):
    """Give Parameters the values they had before training."""
    for value, array in initial:
        # Of a copy, because a Tensor has the memory of its array. Not by set_data(), which a compiled graph that has
        # run once does not see for the optimizer's Parameters.
        ops.assign(value, Tensor(array.copy(), value.dtype))


def set_weights(network, weights):
    """Give a network these weights, in the order of its trainable Parameters."""
    put_back(zip(network.trainable_params(), weights, strict=True))


def use_one_thread():
    """Compute with one thread, so that the same seeds give the same figures. Only before the first graph."""
    mindspore.set_device("CPU")
    mindspore.device_context.cpu.op_tuning.threads_num(1)
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
