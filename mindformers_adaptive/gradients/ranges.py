"""Runs the backward pass of a network at several loss scales, without changing the network."""

from __future__ import annotations

import functools
import itertools
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from mindspore import Tensor, get_context, nn
from mindspore import dtype as mstype

from mindformers_adaptive.gradients import recommendation
from mindformers_adaptive.gradients.backward import backward_pass, counts_for, to_numpy
from mindformers_adaptive.gradients.batch_file import read_batch
from mindformers_adaptive.gradients.layers import LayerOutputs
from mindformers_adaptive.gradients.recommendation import LossScaleRecommendation
from mindformers_adaptive.gradients.report import GradientRanges, ScaleRanges
from mindformers_adaptive.gradients.statistics import array_statistics, merge_statistics
from mindformers_adaptive.gradients.temporary_changes import unchanged
from mindformers_adaptive.rules.checks import require_integer, require_names, require_positive
from mindformers_adaptive.rules.formats import Format, find_format
from mindformers_adaptive.rules.rule import Rule

# The default loss scales of a sweep: every fourth power of two from 2^0 to 2^32.
DEFAULT_LOSS_SCALES = recommendation.EVERY_POWER[::4]

# A schedule is asked for the learning rate of these steps, of which the largest is taken: it can begin at 0.
_STEPS = (0, 1, 10, 100, 1000, 10000)

# At this multiple of a loss scale, every value of the backward pass is rounded differently, because it is no power of
# two. So two passes show the rounding error in the gradients. The multiple is below 1, so that nothing overflows.
_OTHER_ROUNDING = 0.75

# Losses of the same network and batch may differ by this relative difference, due to the order of summation.
_SAME_LOSS = 1e-5


def gradient_ranges(
    network: Any,
    inputs: Any,
    loss_scales: Iterable[float] = DEFAULT_LOSS_SCALES,
    *,
    layers: Iterable[str] = (),
    progress: Callable[[int], object] | None = None,
    observe: Callable[[float, dict[str, Any]], object] | None = None,
    gradient_format: str | Mapping[str, Any] | Format = "float16",
    micro_batches: int = 1,
) -> GradientRanges:
    """Run the backward pass of a network at each of the loss scales, and return the ranges of the gradients.

    Give the train-step cell, if there is one: then the gradients are as in the training, by the cell's own gradient
    function. That matters with ``calculate_per_token_loss``, and where the network returns several losses. A network
    without it is differentiated as by MindSpore's train-step cells: its first output times the loss scale.

    The network is in training mode. Only dropout is off, so that every scale sees the same network and no random number
    is drawn. Parameters, modes and random states are restored afterwards.

    Args:
        network (Cell): a train-step cell, a subclass of ``nn.TrainOneStepCell``, or a network that returns its loss: a
            Tensor, or a tuple whose first element is the loss.
        inputs (Union[Tensor, tuple, list, Iterable, str]): one batch, a Tensor or a tuple of Tensors, of the shapes and
            dtypes that the network takes; or several, an iterable of such tuples, like
            ``dataset.create_tuple_iterator(num_epochs=1)``, NumPy arrays included; or the path of a batch that
            ``LossScaleMonitor(explain=True)`` saved.
        loss_scales (Iterable[float]): in any order. Default: 2^0, 2^4, ..., 2^32.
        layers (Iterable[str]): cells of the network whose outputs are measured too, and the gradients of these at each
            scale, by name or by the name of their class; see
            :class:`mindformers_adaptive.gradients.layers.LayerOutputs`. Default: none.
        progress (Callable, optional): called with the number of backward passes done. Default: None.
        observe (Callable, optional): called after each backward pass with the loss scale and a dict from Parameter
            name to gradient, a NumPy array, as the optimizer takes it. Default: None.
        gradient_format (Union[str, dict, Format]): the format of the gradients in the backward pass, which the report
            and its texts name: "float16", "bfloat16", "float8_e5m2", "float8_e4m3fn", "hifloat8", or the numbers of
            another, see :class:`~mindformers_adaptive.rules.formats.Format`. Default: "float16".
        micro_batches (int): the number of micro-batches whose gradients one step of the training adds up. Each batch is
            measured as one of them, with its loss divided by their number before the backward pass. Leave it out where
            the network itself divides, or where nobody divides before the backward pass. Default: 1.

    Returns:
        GradientRanges.

    Raises:
        TypeError: if ``network`` is not a Cell, or an input, a loss scale or a layer is not of its type.
        ValueError: if a loss scale is not finite and above 0, there is no loss scale, no batch or no Parameter to
            train, or the network has no such layer.

    Examples:
        >>> from mindspore import nn
        >>> net = nn.WithLossCell(nn.Dense(3, 2).to_float(mstype.float16), nn.MSELoss())
        >>> batch = (Tensor(np.ones((4, 3), np.float32)), Tensor(np.ones((4, 2), np.float32)))
        >>> ranges = gradient_ranges(net, batch, [1, 2**30], layers=["Dense"])
        >>> ranges.loss_scales, ranges.overflowed_batches(2**30), list(ranges.outputs)
        ((1.0, 1073741824.0), 1, ['_backbone'])
    """
    sweep = GradientSweep(network, layers, gradient_format, micro_batches)
    return sweep(inputs, loss_scales, progress=progress, observe=observe)


def find_loss_scale(
    network: Any,
    batches: Any,
    margin: int | None = None,
    *,
    progress: Callable[[int], object] | None = None,
    gradient_format: str | Mapping[str, Any] | Format = "float16",
    learning_rate: float | None = None,
    micro_batches: int = 1,
) -> LossScaleRecommendation:
    """Find the loss scale from which to start the training of a network.

    :func:`gradient_ranges` tries every power of two from 2^0 to 2^32.

    Args:
        network (Cell): returns the loss, as in :func:`gradient_ranges`.
        batches (Iterable): a few batches, as in :func:`gradient_ranges`.
        margin (int, optional): how many powers of two to stay below the largest scale that does not overflow.
            Where the gradient of a Parameter is 0 at every scale, 2 more are left. Default: None, 2, and 4 in a format
            whose mantissa has at most 3 bits.
        progress (Callable, optional): called with the number of backward passes done, 33 a batch. Default: None.
        gradient_format (Union[str, dict, Format]): as in :func:`gradient_ranges`. Default: "float16".
        learning_rate (float, optional): learning rate of the training, to count what weights in float16 lose of their
            updates. Default: None, the learning rate of the optimizer in a train-step cell; not counted without one.
        micro_batches (int): as in :func:`gradient_ranges`. Default: 1.

    Returns:
        LossScaleRecommendation; ``print`` it for the text and the update cell to start with.

    Raises:
        TypeError: if an argument is not of its type.
        ValueError: if ``margin`` is below 0, or there is no batch.

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from mindspore import dtype as mstype
        >>> net = nn.WithLossCell(nn.Dense(3, 1, "ones", has_bias=False).to_float(mstype.float16), nn.MSELoss())
        >>> batch = (Tensor(np.ones((4, 3), np.float32)), Tensor(np.ones((4, 1), np.float32)))
        >>> recommendation = find_loss_scale(net, [batch])
        >>> recommendation.ceiling, recommendation.loss_scale_value
        (8192.0, 2048.0)
    """
    recommendation.check_margin(margin)
    sweep = GradientSweep(network, gradient_format=gradient_format, micro_batches=micro_batches)
    ranges = sweep(batches, recommendation.EVERY_POWER, progress=progress)
    if learning_rate is None and ranges.float16_weights:
        learning_rate = learning_rate_of(getattr(network, "optimizer", None))
    start = recommendation.recommend_loss_scale(ranges, margin, learning_rate)
    # Recommend the update cell that the train step has, if it is of this package.
    rule = getattr(getattr(network, "loss_scaling_manager", None), "rule", None)
    return replace(start, rule=rule if isinstance(rule, Rule) else None, in_python=True)


def learning_rate_of(optimizer: Any) -> float | None:
    """Return the largest learning rate of an optimizer, or None if it is not known or not above 0.

    Args:
        optimizer (Optional[Cell]): an optimizer of ``mindspore.nn``, ``mindspore.mint.optim`` or MindFormers.

    Examples:
        >>> from mindspore import Parameter
        >>> learning_rate_of(nn.SGD([Parameter(Tensor([1.0]))], learning_rate=0.5)), learning_rate_of(None)
        (0.5, None)
    """
    groups = getattr(optimizer, "param_groups", None)
    rates = [group["lr"] for group in groups] if groups else getattr(optimizer, "learning_rate", None)
    largest = [_largest(rate) for rate in (rates if isinstance(rates, list | tuple) else [rates])]
    rate = max((each for each in largest if each is not None and np.isfinite(each)), default=0.0)
    return rate if rate > 0 else None


def _largest(rate: Any) -> float | None:
    if isinstance(rate, nn.Cell):
        # MindSpore puts a list of learning rates into a cell that looks up the step.
        listed = getattr(rate, "learning_rate", None)
        if isinstance(listed, Tensor):
            return float(listed.asnumpy().max())
        return max(float(rate(Tensor(step, mstype.int32)).asnumpy().max()) for step in _STEPS)
    if isinstance(rate, Tensor):
        return float(rate.asnumpy().max())
    return float(rate) if isinstance(rate, int | float) else None


class GradientSweep:
    """Measures one network any number of times, as :func:`gradient_ranges` does, but compiles it only once.

    Args:
        network (Cell): as in :func:`gradient_ranges`.
        layers (Iterable[str]): as in :func:`gradient_ranges`. Default: none.
        gradient_format (Union[str, dict, Format]): as in :func:`gradient_ranges`. Default: "float16".
        micro_batches (int): as in :func:`gradient_ranges`. Default: 1.

    Attributes:
        weights (tuple[Parameter]): the trainable Parameters, in the order of the reports.

    Raises:
        TypeError: if ``network`` is not a Cell, a layer is not a string, or ``micro_batches`` not an integer.
        ValueError: if it has no Parameter to train, or no such layer, or ``micro_batches`` is below 1.

    Examples:
        >>> from mindspore import nn
        >>> sweep = GradientSweep(nn.WithLossCell(nn.Dense(3, 2), nn.MSELoss()))
        >>> [weight.shape for weight in sweep.weights]
        [(2, 3), (2,)]
    """

    def __init__(
        self,
        network: Any,
        layers: Iterable[str] = (),
        gradient_format: str | Mapping[str, Any] | Format = "float16",
        micro_batches: int = 1,
    ) -> None:
        remedy = "1 is a training without accumulation."
        self._micro_batches = require_integer("micro_batches", micro_batches, 1, remedy, unit="number of micro-batches")
        self._network = network
        self._format = find_format(gradient_format)
        self._backward = backward_pass(network)
        layers = require_names("layers", layers)
        self._layer_outputs = LayerOutputs(network, layers) if layers else None
        self.weights = tuple(self._backward.weights)

    def __call__(
        self,
        inputs: Any,
        loss_scales: Iterable[float] = DEFAULT_LOSS_SCALES,
        *,
        progress: Callable[[int], object] | None = None,
        observe: Callable[[float, dict[str, Any]], object] | None = None,
        observe_output: Callable[[str, Any], object] | None = None,
        observe_output_gradients: Callable[[float, dict[str, Any]], object] | None = None,
    ) -> GradientRanges:
        """Run the backward passes and return the ranges of the gradients, as :func:`gradient_ranges` does.

        Args:
            inputs, loss_scales, progress: as in :func:`gradient_ranges`.
            observe (Callable, optional): called after each backward pass with the loss scale and a dict from
                Parameter name to gradient, a NumPy array, divided as the train-step cell does. Default: None.
            observe_output (Callable, optional): called with the name and the output of each layer, a NumPy array.
                Default: None.
            observe_output_gradients (Callable, optional): like ``observe``, with the gradients of the outputs by layer.
                Default: None.
        """
        scales, ranges, done = checked_loss_scales(loss_scales), [], counts_for(progress)
        outputs: list[dict[str, Any]] = []
        of_outputs = []
        with unchanged(self._network) as restore_random_state:
            for batch in batches_of(inputs):
                run = functools.partial(_sweep, batch, scales, self._micro_batches, restore_random_state, done)
                ranges.append(run(self._weight_gradients, observe))
                _warn_if_random(ranges[-1])
                if self._layer_outputs:
                    outputs.append(self._layer_outputs(batch, observe_output))
                    of_outputs.append(run(self._output_gradients, observe_output_gradients))
        if not ranges:
            raise ValueError("'inputs' must hold at least one batch, but is empty. Give a tuple of Tensors.")
        weights = {weight.name: array_statistics(to_numpy(weight)) for weight in self.weights}
        # Different batches may run different layers, so collect the layers of all batches.
        called = dict.fromkeys(itertools.chain(*outputs))
        merged = {name: merge_statistics(part[name] for part in outputs if name in part) for name in called}
        in_float16 = tuple(weight.name for weight in self.weights if weight.dtype == mstype.float16)
        return GradientRanges(
            weights,
            tuple(ranges),
            merged,
            self._format,
            in_float16,
            activation_gradients=tuple(of_outputs),
            micro_batches=self._micro_batches,
        )

    def _weight_gradients(self, scale: Any, batch: tuple[Any, ...]) -> tuple[Any, dict[str, Any], Any]:
        loss, gradients, divisor = self._backward(scale, *batch)
        return loss, {w.name: to_numpy(each) for w, each in zip(self.weights, gradients, strict=True)}, divisor

    def _output_gradients(self, scale: Any, batch: tuple[Any, ...]) -> tuple[Any, dict[str, Any], Any]:
        assert self._layer_outputs is not None
        (loss, _, divisor), gradients = self._layer_outputs.gradients(lambda: self._backward(scale, *batch))
        return loss, gradients, divisor


def _sweep(
    batch: tuple[Any, ...],
    scales: list[float],
    micro_batches: int,
    restore_random_state: Callable[[], None],
    done: Callable[[], object],
    backward: Callable[[Any, tuple[Any, ...]], tuple[Any, dict[str, Any], Any]],
    observe: Callable[[float, dict[str, Any]], object] | None,
) -> tuple[ScaleRanges, ...]:
    at_scales: list[ScaleRanges] = []
    reference: dict[str, Any] = {}
    noise: dict[str, float] = {}
    reference_scale = 1.0

    def run(scale: float) -> tuple[Any, dict[str, Any], Any]:
        restore_random_state()
        with _unsupported_operator_named():
            return backward(Tensor(scale / micro_batches, mstype.float32), batch)

    # Go from the highest loss scale down: the gradients at the first scale without overflow are the reference for all
    # lower scales.
    for scale in reversed(scales):
        loss, gradients, divisor = run(scale)
        # Divide the gradients of each micro-batch by this factor, so that their mean over the micro-batches is the
        # gradient that the optimizer takes.
        factor = float(to_numpy(divisor).mean()) / micro_batches
        if not reference and len(scales) > 1 and all(np.isfinite(array).all() for array in gradients.values()):
            reference, reference_scale = gradients, scale
            noise = _difference(run(scale * _OTHER_ROUNDING)[1], reference, scale * factor)
        statistics = {
            name: replace(
                array_statistics(array, reference.get(name), scale / reference_scale, scale * factor),
                noise=noise.get(name),
            )
            for name, array in gradients.items()
        }
        at_scales.insert(0, ScaleRanges(scale, float(to_numpy(loss).mean()), statistics, factor))
        if observe is not None:
            observe(scale, {name: array / np.float32(scale * factor) for name, array in gradients.items()})
        done()
    return tuple(at_scales)


@contextmanager
def _unsupported_operator_named() -> Iterator[None]:
    try:
        yield
    except TypeError as error:
        # MindSpore raises a TypeError for BF16 on a CPU, with a stack trace in the message.
        if match := re.search(r"operator\[(\w+)\] fail.*?but get (input.*?)\n", str(error), re.DOTALL):
            raise TypeError(
                f"The operator {match[1]} does not support {match[2].rstrip('. ')} on this "
                f"{get_context('device_target')}. Compute in float16 or float32, or measure on the device on which "
                "you train."
            ) from error
        raise


def _difference(gradients: dict[str, Any], reference: dict[str, Any], unit: float) -> dict[str, float]:
    """Return, for each gradient at another scale, the norm of its difference to the reference, divided by a unit."""
    return {
        name: array_statistics(array, reference[name], _OTHER_ROUNDING, unit * _OTHER_ROUNDING).lost or 0.0
        for name, array in gradients.items()
    }


def _warn_if_random(at_scales: tuple[ScaleRanges, ...]) -> None:
    losses = np.array([ranges.loss for ranges in at_scales])
    if np.isfinite(losses).all() and np.ptp(losses) > _SAME_LOSS * np.abs(losses).max():
        warnings.warn(
            f"The loss of one batch must be the same at every loss scale, but lies between {losses.min()} and "
            f"{losses.max()}: the network draws random numbers outside of a Dropout cell. So the measured shares of "
            "underflow are not exact. Switch this randomness off for the measurement.",
            stacklevel=4,
        )


def checked_loss_scales(loss_scales: Iterable[float]) -> list[float]:
    """Return the loss scales as a sorted list of distinct float32 values.

    Raises:
        TypeError: if ``loss_scales`` is not a list of numbers.
        ValueError: if ``loss_scales`` is empty, or a loss scale is not finite and above 0.
    """
    if isinstance(loss_scales, str | Mapping) or not isinstance(loss_scales, Iterable):
        raise TypeError(
            f"'loss_scales' must be a list of numbers, but got {loss_scales!r} of type {type(loss_scales).__name__}. "
            "For a single loss scale, write [65536]."
        )
    scales = sorted({require_positive("loss_scales", scale) for scale in loss_scales})
    if not scales:
        raise ValueError("'loss_scales' must hold at least one number, but is empty. The default is 2^0 to 2^32.")
    return scales


def batches_of(inputs: Any) -> Iterator[tuple[Any, ...]]:
    """Yield each batch in the ``inputs`` of :func:`gradient_ranges` as a tuple of Tensors."""
    if isinstance(inputs, str | os.PathLike):
        inputs = read_batch(inputs)
    elif _is_array(inputs):
        inputs = (inputs,)
    for batch in inputs if isinstance(inputs, Iterable) and not _is_batch(inputs) else [inputs]:
        if not _is_batch(batch):
            raise TypeError(
                f"'inputs' must be a Tensor, a tuple of Tensors, or a list of such tuples, but got {batch!r} of type "
                f"{type(batch).__name__}. Give the columns of a batch in the order of the network's inputs."
            )
        yield tuple(value if isinstance(value, Tensor) else Tensor(value) for value in batch)


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray)


def _is_batch(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) > 0 and all(map(_is_array, value))
