"""Multiplication by a loss scale or by its reciprocal, in graphs."""

from mindspore import amp, ops
from mindspore import dtype as mstype

__all__ = ["ParameterScaler", "multiply_in_float32"]

_map = ops.HyperMap()


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


class ParameterScaler(amp.LossScaler):
    """A loss scaler with its loss scale in the Parameter ``scale_value``, float32 of shape ()."""

    def scale(self, inputs):
        """Multiply a loss, or gradients, by the loss scale.

        Args:
            inputs (Union[Tensor, tuple[Tensor]]): of any shapes and floating-point dtypes.

        Returns:
            Union[Tensor, tuple[Tensor]], shapes and dtypes of `inputs`. A float16 loss can be scaled to 65504 only.
        """
        return _map(ops.partial(multiply_in_float32, self.scale_value), inputs)

    def unscale(self, inputs):
        """Divide gradients, or a loss, by the loss scale.

        Args:
            inputs (Union[Tensor, tuple[Tensor]]): of any shapes and floating-point dtypes.

        Returns:
            Union[Tensor, tuple[Tensor]], shapes and dtypes of `inputs`.
        """
        return _map(ops.partial(multiply_in_float32, ops.reciprocal(self.scale_value)), inputs)
