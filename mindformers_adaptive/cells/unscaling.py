"""Division of gradients by the loss scale in float32, whatever the dtype of the weights.

In FP16 the reciprocal of a loss scale is 0 from 2**25 on, and inf below 2**-15. In BF16 it has 8 bits.
"""

from __future__ import annotations

from typing import Any

from mindspore import dtype as mstype
from mindspore import nn, ops

__all__ = ["HALF_PRECISION", "GradientReducer", "MapInFloat32", "multiply_in_float32"]

HALF_PRECISION = (mstype.float16, mstype.bfloat16)

_map = ops.HyperMap()
_in_float32 = ops.MultitypeFuncGraph("in_float32")
_in_dtype = ops.MultitypeFuncGraph("in_dtype")


def multiply_in_float32(factor: Any, tensor: Any) -> Any:
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


@_in_float32.register("Tensor")
def _tensor_in_float32(gradient: Any) -> Any:
    # Gradients in float64 stay as they are.
    if gradient.dtype in HALF_PRECISION:
        return ops.cast(gradient, mstype.float32)
    return gradient


@_in_float32.register("RowTensor")
def _row_tensor_unchanged(gradient: Any) -> Any:
    # A sparse gradient is divided in its own dtype, as by MindSpore.
    return gradient


@_in_dtype.register("Tensor", "TypeType")
def _tensor_in_dtype(gradient: Any, dtype: Any) -> Any:
    return ops.cast(gradient, dtype)


@_in_dtype.register("RowTensor", "TypeType")
def _row_tensor_in_its_dtype(gradient: Any, _: Any) -> Any:
    return gradient


class MapInFloat32(nn.Cell):
    """``ops.HyperMap`` that gives its function FP16 and BF16 gradients in float32.

    Inputs:
        - **function** (function) - of a gradient and what `others` have for it.
        - **gradients** (tuple[Tensor]) - of any shapes and floating-point dtypes.
        - **others** (tuple) - as in ``ops.HyperMap``.

    Outputs:
        tuple, what the function returns.
    """

    def construct(self, function: Any, gradients: Any, *more_arguments: Any) -> Any:
        return _map(function, _map(_in_float32, gradients), *more_arguments)


class GradientReducer(nn.Cell):
    """Reduces gradients in the dtypes of their weights, which most of MindSpore's optimizers need.

    Args:
        reducer (Cell): reduces the gradients over the processes.
        dtypes (Sequence[Type]): of the weights.

    Inputs:
        - **gradients** (tuple[Tensor]) - of any shapes and floating-point dtypes.

    Outputs:
        tuple[Tensor], of the shapes of the gradients and the dtypes of the weights.
    """

    def __init__(self, reducer: Any, dtypes: Any) -> None:
        super().__init__(auto_prefix=False)
        self.reducer, self.dtypes = reducer, tuple(dtypes)

    def construct(self, gradients: Any) -> Any:
        return self.reducer(_map(_in_dtype, gradients, self.dtypes))
