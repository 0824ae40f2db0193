"""Simulate formats that the device does not have, such as FP8, in float32: for the studies, not for speed.

Both inputs of each product of a network (matrix products and convolutions that a cell has as an operator) are rounded
to one format, and the gradient of the result to another. The product itself, biases and everything between the layers
are not rounded. FP8 training usually scales each tensor separately; this simulation does not.
"""

import math

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from mindformers_adaptive.rules.formats import FORMATS, find_format

# These operators multiply their first two inputs. Further inputs, such as a bias, are not multiplied.
_PRODUCTS = ("MatMul", "BatchMatMul", "MatMulExt", "BatchMatMulExt", "Dense")
_PRODUCTS += ("Conv2D", "Conv3D", "Conv2DTranspose", "Conv3DTranspose", "Conv2DBackpropInput")
_DTYPES = {"fp16": mstype.float16, "bf16": mstype.bfloat16, "fp32": mstype.float32}


class _Rounding(nn.Cell):
    """A cell that rounds its input to a number format, and returns float32."""

    def __init__(self, target):
        super().__init__()
        self.add_flags()
        # Simulated BF16 must keep subnormal numbers. Devices flush BF16 subnormals to 0 in float32 arithmetic, but keep
        # them in a cast, so round to BF16 by a cast.
        self.converts = target == FORMATS["bfloat16"]
        if self.converts:
            return
        lowest, _, highest = map(math.floor, target.exponents)
        # Find the exponent by comparison with exact powers of two, because a logarithm differs from device to device.
        self.powers = Tensor([2.0**exponent for exponent in range(lowest + 1, highest + 1)], mstype.float32)
        quanta = [target.quantum(exponent) for exponent in range(lowest, highest + 1)]
        self.quanta = Tensor(quanta, mstype.float32)
        self.search = ops.SearchSorted(dtype=mstype.int32, right=True)
        self.round = ops.Round()
        self.away = target.rounding == "away"
        self.half = Tensor(0.5, mstype.float32)
        self.zero = Tensor(0.0, mstype.float32)
        self.largest = Tensor(target.largest, mstype.float32)
        beyond = {"inf": math.inf, "nan": math.nan, "saturate": target.largest}[target.overflow]
        self.beyond = Tensor(beyond, mstype.float32)

    def add_flags(self, **flags):
        """Compute in float32, whatever dtype the surrounding cells compute in."""
        # In graph mode, MindSpore casts the inputs to the dtype of the surrounding cells; in PyNative mode it does not.
        self.dtype_around = next((dtype for flag, dtype in _DTYPES.items() if flags.get(flag)), None)
        return super().add_flags(**{**flags, "fp16": False, "bf16": False, "fp32": True})

    def construct(self, x):
        if self.dtype_around is not None:
            x = ops.cast(x, self.dtype_around)
        x = ops.cast(x, mstype.float32)
        if self.converts:
            return ops.cast(ops.cast(x, mstype.bfloat16), mstype.float32)
        size = ops.abs(x)
        quantum = ops.gather(self.quanta, self.search(self.powers, size), 0)
        parts = size / quantum
        # ops.Round rounds a number halfway between two integers to the even integer.
        count = self.round(parts)
        if self.away:
            count = count + ops.cast(ops.equal(parts - count, self.half), mstype.float32)
        rounded = count * quantum
        rounded = ops.select(ops.greater(rounded, self.largest), self.beyond, rounded)
        return ops.select(ops.less(x, self.zero), -rounded, rounded)


class RoundToFormat(nn.Cell):
    """Rounds its input to one format and, in the backward pass, the gradient to another format.

    Args:
        forward, gradients (Union[str, dict, Format], optional): the formats of input and gradient. Default: None, not
            rounded.

    Inputs:
        - **x** (Tensor) - of any shape and floating-point dtype, which the output keeps.
    """

    def __init__(self, forward=None, gradients=None):
        super().__init__()
        self.round_forward, self.round_gradient = (
            nn.Identity() if format_name is None else _Rounding(find_format(format_name))
            for format_name in (forward, gradients)
        )

    def construct(self, x):
        return ops.cast(self.round_forward(x), x.dtype)

    def bprop(self, x, out, dout):
        return (ops.cast(self.round_gradient(dout), dout.dtype),)


class _Product(nn.Cell):
    """A product of rounded inputs, whose gradient is rounded before it is passed back to the inputs."""

    def __init__(self, product, forward, gradients):
        super().__init__()
        self.product = product
        self.round = RoundToFormat(forward)
        self.round_gradient = RoundToFormat(gradients=gradients)

    def construct(self, x, y, *inputs):
        return self.round_gradient(self.product(self.round(x), self.round(y), *inputs))


def simulate_formats(network, forward=None, gradients=None):
    """Change a network before its first run, so that it rounds inputs and gradients of products and convolutions.

    Args:
        network (Cell): the network.
        forward, gradients (Union[str, dict, Format], optional): the formats of inputs and gradients. Default: None, not
            rounded.

    Returns:
        int, the number of products that are rounded. Recurrent layers, fused operators such as flash attention, and
        functions in ``construct`` such as ``x @ y`` are not found.
    """
    products = [
        (cell, key)
        for _, cell in network.cells_and_names()
        for key, operator in vars(cell).items()
        if isinstance(operator, ops.Primitive) and operator.name in _PRODUCTS
    ]
    for cell, key in products:
        # Compute the product in the dtype that `to_float` set for the cell to which the operator belongs.
        flags = {flag: getattr(cell, flag, False) for flag in _DTYPES}
        product = _Product(getattr(cell, key), forward, gradients).add_flags_recursive(**flags)
        # nn.Cell stores a primitive in __dict__ and in _primitives, but a child cell in a third dict. Remove the
        # primitive from both, so that the child cell replaces it.
        del vars(cell)[key], cell._primitives[key]
        setattr(cell, key, product)
    return len(products)
