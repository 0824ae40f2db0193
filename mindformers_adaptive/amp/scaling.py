"""Multiplication by a loss scale or by its reciprocal, in graphs."""

from mindspore import dtype as mstype
from mindspore import ops

__all__ = ["multiply_in_float32"]


def multiply_in_float32(factor, tensor):
    """Multiply a loss or a gradient in float32, and return the product in its dtype.

    In float16, a loss scale would be inf from 2**16 on, and its reciprocal 0 from 2**25 on.

    Args:
        factor (Tensor): float32 of shape ().
        tensor (Tensor): of any shape and floating-point dtype.

    Returns:
        Tensor, shape and dtype of `tensor`.

    Examples:
        >>> from mindspore import Tensor
        >>> float(multiply_in_float32(Tensor(2.0**-26), Tensor(2.0**12, mstype.float16)))
        6.103515625e-05
    """
    return ops.cast(ops.cast(tensor, mstype.float32) * factor, tensor.dtype)
