"""Runs the backward pass of a network at several loss scales, without changing the network."""

import contextlib
import itertools
import sys
import warnings
from collections.abc import Iterable

import mindspore
import numpy as np
from mindspore import ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype

from mindformers_adaptive.gradients.report import GradientRanges, ScaleRanges
from mindformers_adaptive.gradients.statistics import array_statistics, count_underflows
from mindformers_adaptive.rule.checks import require_positive

__all__ = ["DEFAULT_LOSS_SCALES", "GradientSweep", "checked_loss_scales", "gradient_ranges", "to_numpy"]

# From no scaling to 2^32, where the published FP16 trainings of large models start, 16-fold each.
DEFAULT_LOSS_SCALES = tuple(2.0**exponent for exponent in range(0, 33, 4))

# Losses of the same network and batch differ by the order of their sums only.
_SAME_LOSS = 1e-5


def gradient_ranges(network, inputs, loss_scales=DEFAULT_LOSS_SCALES, *, progress=None):
    """Run the backward pass at each loss scale and return the ranges of the gradients.

    The gradients are those of the train-step cells: of the loss times the scale, through the FP16 casts of the network,
    in training mode. Only dropout is off, so that every scale sees the same network and no random number is drawn.
    Parameters, modes and random states are restored afterwards.

    Args:
        network (Cell): returns the loss: a Tensor, or a tuple whose first element is the loss.
        inputs (Union[Tensor, tuple, list, Iterable]): one batch, a Tensor or a tuple of Tensors; or several, an
            iterable of such tuples, like ``dataset.create_tuple_iterator(num_epochs=1)``. NumPy arrays are accepted.
        loss_scales (Iterable[float]): in any order. Default: 2^0, 2^4, ..., 2^32.
        progress (Callable, optional): called with the number of backward passes done. Default: None.

    Returns:
        GradientRanges.

    Raises:
        TypeError: if ``network`` is not a Cell, or an input or a loss scale is not of its type.
        ValueError: if a loss scale is not finite and above 0, or there is no loss scale, no batch or no Parameter to
            train.

    Examples:
        >>> net = nn.WithLossCell(nn.Dense(3, 2).to_float(mstype.float16), nn.MSELoss())
        >>> batch = (Tensor(np.ones((4, 3), np.float32)), Tensor(np.ones((4, 2), np.float32)))
        >>> ranges = gradient_ranges(net, batch, [1, 2**30])
        >>> ranges.loss_scales, ranges.overflowed_batches(2**30)
        ((1.0, 1073741824.0), 1)
    """
    return GradientSweep(network)(inputs, loss_scales, progress=progress)


class GradientSweep:
    """:func:`gradient_ranges` for one network, any number of times, compiled once.

    Args:
        network (Cell): as there.

    Attributes:
        weights (tuple[Parameter]): the trainable Parameters, in the order of the reports.

    Raises:
        TypeError: if ``network`` is not a Cell.
        ValueError: if it has no Parameter to train.
    """

    def __init__(self, network):
        if not isinstance(network, nn.Cell):
            raise TypeError(
                f"'network' must be a Cell that returns the loss, but got {network!r} of type "
                f"{type(network).__name__}. Give nn.WithLossCell(network, loss_fn) or a model that has its loss inside."
            )
        if not network.trainable_params():
            raise ValueError(
                f"'network' must have a Parameter to train, but {type(network).__name__} has none with requires_grad. "
                "Give the network before it is frozen."
            )
        self._network = network
        self._backward = _Backward(network)
        self.weights = tuple(self._backward.weights)

    def __call__(self, inputs, loss_scales=DEFAULT_LOSS_SCALES, *, progress=None, observe=None):
        """Return what :func:`gradient_ranges` returns.

        Args:
            inputs, loss_scales, progress: as there.
            observe (Callable, optional): called after each backward pass with the loss scale and a dict from
                Parameter name to gradient, a NumPy array, still multiplied by the scale. Default: None.
        """
        scales, ranges, passes = checked_loss_scales(loss_scales), [], itertools.count(1)

        def observe_pass(scale, gradients):
            if observe is not None:
                observe(scale, gradients)
            if progress is not None:
                progress(next(passes))

        with _unchanged(self._network) as restore_random_state:
            for batch in _batches(inputs):
                ranges.append(self._sweep(batch, scales, restore_random_state, observe_pass))
        if not ranges:
            raise ValueError("'inputs' must hold at least one batch, but is empty. Give a tuple of Tensors.")
        weights = {weight.name: array_statistics(to_numpy(weight)) for weight in self.weights}
        return GradientRanges(weights, tuple(ranges))

    def _sweep(self, batch, scales, restore_random_state, observe):
        at_scales, reference = [], None
        # Downwards: the first scale that does not overflow is the reference for all below it.
        for scale in reversed(scales):
            restore_random_state()
            loss, gradients = self._backward(Tensor(scale, mstype.float32), *batch)
            gradients = {w.name: to_numpy(gradient) for w, gradient in zip(self.weights, gradients, strict=True)}
            if reference is None and len(scales) > 1 and all(np.isfinite(array).all() for array in gradients.values()):
                reference = {name: array == 0 for name, array in gradients.items()}
            statistics = {
                name: array_statistics(array, None if reference is None else count_underflows(array, reference[name]))
                for name, array in gradients.items()
            }
            at_scales.insert(0, ScaleRanges(scale, float(to_numpy(loss).mean()), statistics))
            observe(scale, gradients)
        _warn_if_random(at_scales)
        return tuple(at_scales)


class _FirstOutput(nn.Cell):
    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, *inputs):
        outputs = self.network(*inputs)
        if isinstance(outputs, tuple):
            outputs = outputs[0]
        return outputs


class _Backward(nn.Cell):
    """Loss and gradients as MindSpore's train-step cells compute them; the scale is an input, so it compiles once."""

    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = _FirstOutput(network)
        self.weights = ParameterTuple(network.trainable_params())
        self.grad = ops.GradOperation(get_by_list=True, sens_param=True)
        self.cast = ops.Cast()

    def construct(self, loss_scale, *inputs):
        loss = self.network(*inputs)
        # In the dtype of the loss, as in training: a scale beyond FP16 overflows a loss in FP16.
        sens = ops.ones_like(loss) * self.cast(loss_scale, ops.dtype(loss))
        return loss, self.grad(self.network, self.weights)(*inputs, sens)


def _warn_if_random(at_scales):
    losses = np.array([ranges.loss for ranges in at_scales])
    if np.isfinite(losses).all() and np.ptp(losses) > _SAME_LOSS * np.abs(losses).max():
        warnings.warn(
            f"The loss of one batch must be the same at every loss scale, but goes from {losses.min()} to "
            f"{losses.max()}: the network draws random numbers outside of a Dropout cell. The shares of underflow "
            "are not exact.",
            stacklevel=4,
        )


@contextlib.contextmanager
def _unchanged(network):
    """Put a network into training mode without dropout, and restore everything afterwards.

    Yields a function that restores MindSpore's present random states.
    """
    cells = [cell for _, cell in network.cells_and_names()]
    modes = [(cell, cell.training, cell.phase) for cell in cells]
    # A forward pass may write to these, as BatchNorm does to its moving averages.
    state = [(value, to_numpy(value).copy()) for value in network.get_parameters() if not value.requires_grad]
    generator = mindspore.get_rng_state()
    # By its name, because mindspore.common has a function called seed.
    kernel_seeds = getattr(sys.modules["mindspore.common.seed"], "_KERNEL_SEED", {})
    seeds = dict(kernel_seeds)

    def restore_random_state():
        mindspore.set_rng_state(generator)
        kernel_seeds.clear()
        kernel_seeds.update(seeds)

    network.set_train(True)
    for cell in cells:
        # MindSpore and MindFormers have several classes of this name. One with cells inside is a network.
        if "Dropout" in type(cell).__name__ and not cell.cells():
            cell.set_train(False)
    try:
        yield restore_random_state
    finally:
        for cell, training, phase in modes:
            cell.add_flags(training=training)
            cell.phase = phase
        for value, before in state:
            if not np.array_equal(to_numpy(value), before, equal_nan=before.dtype.kind == "f"):
                value.set_data(Tensor(before, value.dtype))
        restore_random_state()


def checked_loss_scales(loss_scales):
    """Return the loss scales as a sorted list of distinct float32 values.

    Raises:
        TypeError: if it is not a list of numbers.
        ValueError: if it is empty, or a loss scale is not finite and above 0.
    """
    if isinstance(loss_scales, str) or not isinstance(loss_scales, Iterable):
        raise TypeError(
            f"'loss_scales' must be a list of numbers, but got {loss_scales!r} of type {type(loss_scales).__name__}. "
            "Write [65536] for a single one."
        )
    scales = sorted({require_positive("loss_scales", scale) for scale in loss_scales})
    if not scales:
        raise ValueError("'loss_scales' must hold at least one number, but is empty. The default is 2^0 to 2^32.")
    return scales


def _batches(inputs):
    """Yield the batches, each as a tuple of Tensors."""
    if _is_array(inputs):
        inputs = [(inputs,)]
    elif _is_batch(inputs):
        inputs = [inputs]
    for batch in inputs if isinstance(inputs, Iterable) and not isinstance(inputs, dict) else [inputs]:
        if not _is_batch(batch):
            raise TypeError(
                f"'inputs' must be a Tensor, a tuple of Tensors, or a list of such tuples, but got {batch!r} of type "
                f"{type(batch).__name__}. Give the columns of a batch in the order of the network's inputs."
            )
        yield tuple(value if isinstance(value, Tensor) else Tensor(value) for value in batch)


def _is_array(value):
    return isinstance(value, Tensor | np.ndarray)


def _is_batch(value):
    return isinstance(value, tuple | list) and len(value) > 0 and all(map(_is_array, value))


def to_numpy(tensor):
    """Return a Tensor as a NumPy array of the same dtype, bfloat16 as float32."""
    # NumPy has no bfloat16.
    return (tensor.astype(mstype.float32) if tensor.dtype == mstype.bfloat16 else tensor).asnumpy()
