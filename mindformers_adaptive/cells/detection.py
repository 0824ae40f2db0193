"""Overflow detection on a CPU, and measurement of the largest absolute gradient of a training step."""

from typing import Any

from mindspore import Tensor, context, nn, ops
from mindspore import dtype as mstype

from mindformers_adaptive.rules.checks import LARGEST_FLOAT32

_hyper_map = ops.HyperMap()
_reduce_max = ops.ReduceMax()
_reduce_max_of_one_element = ops.ReduceMax(keep_dims=True)
_reduce_sum = ops.ReduceSum()
_argmax_with_value = ops.ArgMaxWithValue()
_half_sum_of_squares = ops.L2Loss()


def _magnitudes_of(gradient: Any) -> Any:
    return ops.abs(ops.cast(gradient, mstype.float32))


def _largest_on_cpu(magnitudes: Any) -> Any:
    # On a CPU, ArgMaxWithValue takes a fraction of the processor time of ReduceMax.
    return _argmax_with_value(ops.reshape(magnitudes, (-1,)))[1]


class LargestGradient(nn.Cell):
    """Measures the largest absolute value of a step's gradients, and assigns it to a Parameter of the update cell.

    Args:
        update_cell (Cell): the update cell; it has the Parameter ``largest_gradient``.
        is_distributed (bool): whether several processes train together; then the largest value in all processes counts.
        is_divided (bool): whether the gradients were divided by more than the loss scale. Then :meth:`keep_divisor` is
            called first in each step, and the gradients are measured as they were before this division. Default: False.
        sum_of_squares (MultitypeFuncGraph, optional): the function that returns the sum of squares of a gradient, of
            one element, when the same step clips by the norm. MindSpore then computes these sums once. Default: None.

    Inputs:
        - **gradients** (tuple[Tensor]) - unscaled, of any shapes and floating-point dtypes.

    Outputs:
        Tensor, bool of shape (), whether any gradient is an inf or a NaN.
    """

    def __init__(
        self, update_cell: Any, is_distributed: bool = False, is_divided: bool = False, sum_of_squares: Any = None
    ) -> None:
        super().__init__(auto_prefix=False)
        # Bypass nn.Cell.__setattr__, which would make this cell an owner of the Parameter. A Parameter must have one
        # owner, and the update cell, a child of the train-step cell, owns this Parameter already.
        object.__setattr__(self, "largest_gradient", update_cell.largest_gradient)
        self.is_divided, self.sum_of_squares = is_divided, sum_of_squares
        self.is_distributed = is_distributed
        self.on_cpu = context.get_context("device_target") == "CPU"
        self.largest_float32 = Tensor(LARGEST_FLOAT32, mstype.float32)
        self.infinite = Tensor(float("inf"), mstype.float32)
        if is_distributed:
            # On CPU, AllReduce supports only sums, so gather the largest values of all processes instead.
            self.collect = ops.AllGather() if self.on_cpu else ops.AllReduce(ops.ReduceOp.MAX)

    def construct(self, gradients: tuple[Any, ...]) -> Any:
        magnitudes = _hyper_map(_magnitudes_of, gradients)
        each = ops.stack(_hyper_map(_largest_on_cpu if self.on_cpu else _reduce_max, magnitudes))
        # On a CPU, both reductions drop a NaN that is not the first element. So detect NaN by a sum of the magnitudes
        # or of their squares, which is NaN only if a magnitude is NaN.
        if self.sum_of_squares is not None:
            sums = ops.addn(_hyper_map(self.sum_of_squares, gradients))
        else:
            sums = ops.stack(_hyper_map(_half_sum_of_squares if self.on_cpu else _reduce_sum, magnitudes))
        without_nan = ops.less_equal(sums, self.infinite)
        if self.is_divided:
            each = each * self.largest_gradient
        # Replace NaN by inf, because ReduceMax may drop a NaN but never drops an inf.
        is_finite = ops.logical_and(ops.less_equal(each, self.largest_float32), without_nan)
        # Do not read the shape of the stacked gradient maxima: with pipeline stages, this shape also counts the
        # gradients of the other stages. Do not call Reshape either: semi-automatic parallelism would treat the call as
        # an operator of the model.
        largest = _reduce_max_of_one_element(ops.select(is_finite, each, self.infinite))
        if self.is_distributed:
            largest = self.collect(largest)
        largest = _reduce_max(largest)
        ops.assign(self.largest_gradient, largest)
        return ops.logical_not(ops.less_equal(largest, self.largest_float32))

    def keep_divisor(self, divisor: Any) -> None:
        """Store ``divisor``, a Tensor of one element. Gradients are divided by this number and by the loss scale."""
        # Until the gradients are measured, the Parameter largest_gradient holds their divisor. A separate Parameter for
        # the divisor would not be registered with any cell, and a graph loaded from MindSpore's compile cache does not
        # update such a Parameter.
        ops.assign(self.largest_gradient, ops.reshape(ops.cast(divisor, mstype.float32), ()))


class MeasuredClipping(nn.Cell):
    """Measures the largest gradient, then clips the gradients with another cell."""

    def __init__(self, measure: LargestGradient, clip: Any) -> None:
        super().__init__(auto_prefix=False)
        self.measure, self.clip = measure, clip

    def construct(self, gradients: tuple[Any, ...]) -> Any:
        self.measure(gradients)
        return self.clip(gradients)


def _sum_of_differences(gradient: Any) -> Any:
    # MindSpore has no arithmetic kernels for BF16 on CPU.
    if gradient.dtype == mstype.bfloat16:
        gradient = ops.cast(gradient, mstype.float32)
    # An inf or a NaN minus itself is NaN, any other number minus itself is 0. A sum of squares keeps a NaN; ReduceMax
    # on CPU may drop it.
    return ops.cast(_half_sum_of_squares(ops.sub(gradient, gradient)), mstype.float32)


def has_inf_or_nan(gradients: tuple[Any, ...]) -> Any:
    """Return whether any gradient has an inf or a NaN.

    The result is the negation of ``mindspore.amp.all_finite``, but takes less time on a CPU:
    ``python -m scripts.benchmarks.costs detection`` measures both.

    Args:
        gradients (tuple[Tensor]): of any shapes and floating-point dtypes.

    Returns:
        Tensor, bool of shape ().

    Examples:
        >>> from mindspore import Tensor
        >>> from mindformers_adaptive.cells.detection import has_inf_or_nan
        >>> bool(has_inf_or_nan((Tensor([1.0, 2.0]), Tensor([[1.0, float("nan")]]))))
        True
    """
    differences = ops.stack(_hyper_map(_sum_of_differences, gradients))
    return ops.logical_not(ops.less_equal(_reduce_sum(differences), 0.0))


def refuse_sparse_gradients(train_step: Any) -> None:
    """Raise ValueError in graph mode for a sparse gradient, which this overflow detection does not support.

    Args:
        train_step (Cell): the train-step cell, with the attributes ``network`` and ``on_cpu``.

    Raises:
        ValueError: in graph mode, if a layer looks up rows of a table with sparse gradients, and the detection runs on
            a CPU or measures the largest gradient.
    """
    is_detected_here = train_step.on_cpu or hasattr(train_step, "measure_largest_gradient")
    if not is_detected_here or context.get_context("mode") != context.GRAPH_MODE:
        return
    for name, cell in train_step.network.cells_and_names():
        if any(isinstance(value, ops.SparseGatherV2) for value in vars(cell).values()):
            raise ValueError(
                f"The gradient of {name or type(cell).__name__!r} must be dense, but it is sparse (RowTensor), which "
                "overflow detection on a CPU and the gradient-guided rule do not support. Create the "
                "layer with sparse=False."
            )
