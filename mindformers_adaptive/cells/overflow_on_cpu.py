"""Whether gradients have an inf or a NaN, on a CPU."""

from mindspore import dtype as mstype
from mindspore import ops

__all__ = ["has_inf_or_nan"]

_no_difference = ops.MultitypeFuncGraph("no_difference")
_hyper_map = ops.HyperMap()
_subtract = ops.Sub()
_sum = ops.ReduceSum()
_stack = ops.Stack()


@_no_difference.register("Tensor")
def _sum_of_differences(gradient):
    # An inf or a NaN minus itself is NaN, all else 0. A sum keeps a NaN; ReduceMax on CPU drops one that is not first.
    return ops.cast(_sum(_subtract(gradient, gradient)), mstype.float32)


def has_inf_or_nan(gradients):
    """Return whether any gradient has an inf or a NaN.

    The same answer as ``mindspore.amp.all_finite``, negated, in less time on a CPU: ``scripts/benchmark.py detection``
    measures both.

    Args:
        gradients (tuple[Tensor]): of any shapes and floating-point dtypes.

    Returns:
        Tensor, bool of shape ().

    Examples:
        >>> from mindspore import Tensor
        >>> from mindformers_adaptive.cells.overflow_on_cpu import has_inf_or_nan
        >>> bool(has_inf_or_nan((Tensor([1.0, 2.0]), Tensor([[1.0, float("nan")]]))))
        True
    """
    differences = _stack(_hyper_map(_no_difference, gradients))
    return ops.logical_not(ops.less_equal(_sum(differences), 0.0))
