"""Division of gradients by the loss scale in float32, whatever the dtype of the weights.

In FP16 the reciprocal of a loss scale of 2**25 or more is 0, and below 2**-15 it is inf. In BF16 it has only 8 bits.
"""

from typing import Any

from mindspore import dtype as mstype
from mindspore import nn, ops

HALF_PRECISION = (mstype.float16, mstype.bfloat16)

_map = ops.HyperMap()
_in_float32 = ops.MultitypeFuncGraph("in_float32")
_in_dtype = ops.MultitypeFuncGraph("in_dtype")


def multiply_in_float32(factor: Any, tensor: Any) -> Any:
    """Multiply a loss or a gradient in float32, and return the product in the dtype of `tensor`.

    In float16, a loss scale of 2**16 or more would be inf, and the reciprocal of 2**25 or more would be 0.

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
    # Cast only gradients in half precision. Gradients in float32 and float64 stay as they are.
    if gradient.dtype in HALF_PRECISION:
        return ops.cast(gradient, mstype.float32)
    return gradient


@_in_float32.register("RowTensor")
def _row_tensor_unchanged(gradient: Any) -> Any:
    # A sparse gradient (RowTensor) is divided by the loss scale in its own dtype, as MindSpore does.
    return gradient


@_in_dtype.register("Tensor", "TypeType")
def _tensor_in_dtype(gradient: Any, dtype: Any) -> Any:
    return ops.cast(gradient, dtype)


@_in_dtype.register("RowTensor", "TypeType")
def _row_tensor_in_its_dtype(gradient: Any, _: Any) -> Any:
    return gradient


class MapInFloat32(nn.Cell):
    """Variant of ``ops.HyperMap`` that casts FP16 and BF16 gradients to float32 before it calls the function.

    Inputs:
        - **function** (function) - called with each gradient and the corresponding elements of `others`.
        - **gradients** (tuple[Tensor]) - of any shapes and floating-point dtypes.
        - **others** (tuple) - as in ``ops.HyperMap``.

    Outputs:
        tuple, the results of the function.
    """

    def construct(self, function: Any, gradients: Any, *more_arguments: Any) -> Any:
        return _map(function, _map(_in_float32, gradients), *more_arguments)


class GradientReducer(nn.Cell):
    """Casts gradients to the dtypes of their weights, as most of MindSpore's optimizers need, and reduces them.

    Args:
        reducer (Cell): reduces the gradients over the processes.
        dtypes (Sequence[Type]): the dtypes of the weights.

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
