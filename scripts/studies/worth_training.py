"""Trainings by each method of scaling the loss, on the same data and from the same weights, and their results."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from mindformers.wrapper.adaptive_loss_scale import AdaptiveLossScaleUpdateCell as MindFormersUpdateCell
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from mindformers_adaptive.gradients.backward import backward_pass
from mindformers_adaptive.gradients.ranges import find_loss_scale
from mindformers_adaptive.wrapper import (
    AdaptiveLossScaleUpdateCell,
    GradientGuidedLossScaleUpdateCell,
    NoLossScaleUpdateCell,
)
from scripts.studies.simulated_formats import simulate_formats
from scripts.studies.worth_report import ADAPTIVE_HIGH, FP32, GUIDED, GUIDED_HIGH, MEGATRON, MINDFORMERS, OURS, UNSCALED

# A method with this ``start`` begins at the loss scale that find_loss_scale() recommends for the training's seed.
FOUND = "found"
LARGEST_START = 2.0**32
FIND_BATCHES = 2
HIGHEST_EXPONENT = 60


@dataclass(frozen=True)
class Method:
    """A method of scaling the loss.

    Attributes:
        name (str): the name of the method.
        cell (Callable): makes the update cell from an initial scale; methods with the same ``cell`` share a graph.
        start (float or str): the initial scale, or ``FOUND``.
        dtype (mindspore.dtype): the dtype in which the network computes.
    """

    name: str
    cell: Callable
    start: float | str = 1.0
    dtype: object = mstype.float16


def fixed(loss_scale):
    """Return the method with a fixed loss scale that skips overflowed steps."""
    return Method(f"fixed 2^{math.log2(loss_scale):g}", nn.FixedLossScaleUpdateCell, loss_scale)


def dynamic(window):
    name = f"MindSpore's dynamic, window {window}"
    # 2^24 is MindSpore's default initial scale.
    return Method(name, lambda s: nn.DynamicLossScaleUpdateCell(s, 2, window), 2.0**24)


def adaptive(loss_scale):
    return AdaptiveLossScaleUpdateCell(loss_scale, 2, 20)


def divided(way, loss_scale, micro_batches):
    """Return a loss-scaling method whose loss scale is divided by the number of micro-batches in a batch.

    A training by this method takes one micro-batch in each step. Gradient accumulation divides the loss by the number
    of micro-batches. Dividing the loss scale instead gives the
    same gradients, before and after they are unscaled.

    Args:
        way (str): "none", "fixed", "dynamic" (window 1000), "adaptive" or "guided".
        loss_scale (float): the fixed or the initial loss scale; "none" is a scale of 1.
        micro_batches (int): the number of micro-batches.
    """
    cell = {
        "none": nn.FixedLossScaleUpdateCell,
        "fixed": nn.FixedLossScaleUpdateCell,
        "dynamic": _dynamic_1000,
        "adaptive": adaptive,
        "guided": GradientGuidedLossScaleUpdateCell,
    }[way]
    return Method(way, cell, (1.0 if way == "none" else loss_scale) / micro_batches)


def _dynamic_1000(loss_scale):
    return nn.DynamicLossScaleUpdateCell(loss_scale, 2, 1000)


METHODS = (
    Method(FP32, lambda _: NoLossScaleUpdateCell(), dtype=mstype.float32),
    Method(UNSCALED, lambda _: NoLossScaleUpdateCell()),
    fixed(64.0),
    fixed(512.0),
    fixed(2.0**16),
    dynamic(20),
    dynamic(100),
    dynamic(1000),
    Method(MEGATRON, lambda s: AdaptiveLossScaleUpdateCell(s, 2, 1000, 1000, 1000, hysteresis=2), LARGEST_START),
    Method(MINDFORMERS, lambda s: MindFormersUpdateCell(s, 2, 20), LARGEST_START),
    Method(ADAPTIVE_HIGH, adaptive, LARGEST_START),
    Method(OURS, adaptive, FOUND),
    Method(GUIDED_HIGH, GradientGuidedLossScaleUpdateCell, LARGEST_START),
    Method(GUIDED, GradientGuidedLossScaleUpdateCell, FOUND),
)


class CompiledTraining:
    """A train step that is compiled once; its Parameters are reset before each run.

    Args:
        network (Cell): the network with its loss.
        make_train_step (Callable): makes the train-step cell from the network and the update cell.
        make_cell (Callable): makes the update cell from an initial scale.
    """

    def __init__(self, network, make_train_step, make_cell):
        self.network, self.make_cell = network, make_cell
        self.train_step = make_train_step(network, make_cell(LARGEST_START))
        self.initial = [(value, value.asnumpy().copy()) for value in self.train_step.get_parameters()]

    def run(self, loss_scale, weights, batches):
        """Train from an initial loss scale and initial weights; return a record as ``LossScaleMonitor`` writes it."""
        self.begin(loss_scale, weights)
        return list(self.go_on(batches))

    def begin(self, loss_scale, weights):
        """Reset all Parameters, then set the initial loss scale and the weights."""
        put_back(self.initial)
        set_weights(self.network, weights)
        manager = self.train_step.loss_scaling_manager
        fresh = (value.asnumpy() for value in self.make_cell(loss_scale).get_parameters())
        put_back(zip(manager.get_parameters(), fresh, strict=True))
        ops.assign(self.train_step.scale_sense, Tensor(loss_scale, mstype.float32))
        if self.train_step._fixed_scale is not None:
            # The train-step cell remembers its fixed loss scale, and restores it if a checkpoint has replaced the loss
            # scale. So change the remembered value too.
            self.train_step._fixed_scale = loss_scale

    def go_on(self, batches, first=1):
        """Train from the present Parameters; yield each step's record. The first step has the number ``first``."""
        gradient = getattr(self.train_step.loss_scaling_manager, "largest_gradient", None)
        for step, batch in enumerate(batches, start=first):
            scale = self.loss_scale
            loss, overflow = self.train_step(*batch)[:2]
            yield (
                {"step": step, "loss": float(loss), "overflow": bool(overflow)}
                | {"loss_scale": scale, "next_loss_scale": self.loss_scale}
                | {"largest_gradient": None if gradient is None else float(gradient)}
            )

    @property
    def loss_scale(self):
        """Return the loss scale of the next step."""
        return float(self.train_step.scale_sense.asnumpy())


class Trainings:
    """All trainings of one task.

    Args:
        task: a task of ``worth_tasks``.
        look_every (int, optional): the number of steps between two looks, which measure ceiling, underflow and quality
            by extra passes that change nothing. Default: None, the task's ``look_every``.
        formats (tuple, optional): the formats of matrices and gradients, simulated wherever a method says FP16.
            Default: None, the FP16 of the device.
    """

    def __init__(self, task, look_every=None, formats=None):
        self.task = task
        self.look_every = look_every or task.look_every
        self.formats = formats
        # Cache each network by its dtype, each compiled training by its dtype and update cell, and the weights and the
        # recommended loss scale by the seed.
        self._network = functools.cache(self._new_network)
        self.compiled = functools.cache(
            lambda dtype, cell: CompiledTraining(self._network(dtype), task.train_step, cell)
        )
        self.weights = functools.cache(lambda seed: weights_of(task.network(mstype.float32, seed)))
        self.recommendation = functools.cache(self._find)
        self.last_ceiling = 20

    def run(self, method, seed, steps=None):
        """Train once by a method, and return the results.

        Args:
            method (Method): the method of scaling the loss.
            seed (int): the seed of weights and data.
            steps (int, optional): the number of steps. Default: None, the steps of the task.

        Returns:
            dict: ``start``, ``skipped`` (the numbers of the skipped steps, from 0), ``scales`` (the loss scale of each
            step), ``steps``, ``looks`` (``step``, ``quality`` and, in FP16, ``loss_scale``, ``ceiling``, ``underflow``,
            ``lost``) and ``quality`` at the end.
        """
        data, network, steps = self.task.data(seed), self._network(method.dtype), steps or self.task.steps
        training, looks = self.compiled(method.dtype, method.cell), []

        def batches():
            for step in range(steps):
                batch = data.batch(step)
                if step % self.look_every == 0:
                    looks.append({"step": step, "quality": self.task.quality(network, data)})
                    if method.dtype == mstype.float16:
                        looks[-1] |= self.look(batch, training.loss_scale)
                yield batch

        start = self.recommendation(seed).loss_scale_value if method.start == FOUND else method.start
        record = training.run(start, self.weights(seed), batches())
        skipped = [step for step, row in enumerate(record) if row["overflow"]]
        quality = self.task.quality(network, data)
        looks.append({"step": steps, "quality": quality})
        scales = [row["loss_scale"] for row in record]
        run = {"start": start, "steps": steps, "skipped": skipped, "scales": scales}
        return run | {"looks": looks, "quality": quality}

    def _new_network(self, dtype):
        if self.formats is None or dtype != mstype.float16:
            return self.task.network(dtype, 0)
        network = self.task.network(mstype.float32, 0)
        simulate_formats(network, *self.formats)
        return network

    def _find(self, seed):
        """Return the loss scale that find_loss_scale() recommends for the weights and the first batches of a seed."""
        network, data = self._network(mstype.float16), self.task.data(seed)
        set_weights(network, self.weights(seed))
        batches = [data.batch(step) for step in range(FIND_BATCHES)]
        return find_loss_scale(network, batches, gradient_format=self.formats[1] if self.formats else "float16")

    @functools.cached_property
    def _backward(self):
        return backward_pass(self._network(mstype.float16))

    def look(self, batch, scale):
        """Return a step's loss scale, its ceiling (rounded down to 1/4 bit), and its shares of lost gradients.

        ``underflow`` is the share of gradient elements that become 0, ``lost`` the lost share of the gradient norm, and
        ``worst`` the lost share of the Parameter that loses most.
        """

        @functools.cache
        def gradients(exponent):
            _, each, _ = self._backward(Tensor(2.0**exponent, mstype.float32), *batch)
            arrays = [array.asnumpy().ravel() for array in each]
            return arrays if all(np.isfinite(array).all() for array in arrays) else None

        exponent = self.last_ceiling
        while gradients(exponent) is None and exponent > -HIGHEST_EXPONENT:
            exponent -= 1
        while gradients(exponent + 1) is not None and exponent < HIGHEST_EXPONENT:
            exponent += 1
        self.last_ceiling = exponent
        reference = gradients(exponent)
        if reference is None:
            return {"loss_scale": scale, "ceiling": None, "underflow": None, "lost": None, "worst": None}
        ceiling = float(exponent)
        for part in (0.5, 0.25):
            ceiling += part if gradients(ceiling + part) is not None else 0.0
        at_scale = gradients(math.log2(scale)) if 0 < scale < math.inf else None
        underflow = lost = worst = None
        if at_scale is not None:
            expected = [array.astype(np.float64) * (scale / 2.0**exponent) for array in reference]
            became_0 = [(array == 0) & (exact != 0) for array, exact in zip(at_scale, expected, strict=True)]
            underflow = float(np.concatenate(became_0).mean())
            differences = [np.linalg.norm(array - exact) for array, exact in zip(at_scale, expected, strict=True)]
            norms = [np.linalg.norm(exact) for exact in expected]
            lost = float(np.linalg.norm(differences) / np.linalg.norm(norms))
            # A Parameter whose gradient is 0 at the ceiling loses nothing.
            worst = float(max(part / norm for part, norm in zip(differences, norms, strict=True) if norm))
        shares = {"underflow": underflow, "lost": lost, "worst": worst}
        return {"loss_scale": scale, "ceiling": 2.0**ceiling, **shares}


def put_back(values):
    """Set Parameters to given values, from pairs of a Parameter and an array."""
    for value, array in values:
        # Copy the array, because a Tensor uses the memory of the array that it is made from. Do not use set_data():
        # after its first run, a compiled graph keeps using the old data of the optimizer's Parameters.
        ops.assign(value, Tensor(array.copy(), value.dtype))


def weights_of(network):
    return [weight.asnumpy().copy() for weight in network.trainable_params()]


def set_weights(network, weights):
    """Set the weights of a network, in the order of its trainable Parameters."""
    put_back(zip(network.trainable_params(), weights, strict=True))
