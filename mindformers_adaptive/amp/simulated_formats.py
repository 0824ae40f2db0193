"""Formats that the device does not have, simulated in float32: for study and for tests, not for speed."""

from __future__ import annotations

import collections
import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any

from mindspore import Tensor, context, nn, ops
from mindspore import dtype as mstype

from mindformers_adaptive.rules.checks import SMALLEST_FLOAT32, require_names
from mindformers_adaptive.rules.formats import FORMATS, Format, find_format

__all__ = ["RoundToFormat", "simulate_formats", "simulated_products"]

_GivenFormat = str | Mapping[str, Any] | Format | None

# Their first two inputs are multiplied; others, such as a bias, are not.
_PRODUCTS: tuple[str, ...] = ("MatMul", "BatchMatMul", "MatMulExt", "BatchMatMulExt", "Dense")
_PRODUCTS += ("Conv2D", "Conv3D", "Conv2DTranspose", "Conv3DTranspose", "Conv2DBackpropInput")


class _Rounding(nn.Cell):
    """Rounds to a format, and returns float32."""

    def __init__(self, one: Format) -> None:
        super().__init__()
        self.add_flags()
        # Its smallest numbers are those that devices flush to 0, but not where they convert.
        self.converts = one == FORMATS["bfloat16"]
        if self.converts:
            return
        lowest, _, highest = map(math.floor, one.exponents)
        quanta = [one.quantum(exponent) for exponent in range(lowest, highest + 1)]
        if min(quanta) < SMALLEST_FLOAT32:
            raise ValueError(
                f"A format that is simulated must be coarser than float32, but {one.name} has numbers {min(quanta)} "
                "apart, which devices flush to 0. Make 'smallest_subnormal' larger."
            )
        # The exponent by comparisons with exact powers of two, because a logarithm differs from device to device.
        self.powers = Tensor([2.0**exponent for exponent in range(lowest + 1, highest + 1)], mstype.float32)
        self.quanta = Tensor(quanta, mstype.float32)
        self.place = ops.SearchSorted(dtype=mstype.int32, right=True)
        self.round = ops.Round()
        self.away = one.rounding == "away"
        self.half = Tensor(0.5, mstype.float32)
        self.zero = Tensor(0.0, mstype.float32)
        self.largest = Tensor(one.largest, mstype.float32)
        beyond = {"inf": math.inf, "nan": math.nan, "saturate": one.largest}[one.overflow]
        self.beyond = Tensor(beyond, mstype.float32)

    def add_flags(self, **flags: bool) -> Any:
        """Compute in float32, whatever the cells around compute in."""
        dtypes = {"fp16": mstype.float16, "bf16": mstype.bfloat16, "fp32": mstype.float32}
        # What they make of the numbers that come in: MindSpore converts these in graph mode only.
        self.dtype_around = next((dtype for flag, dtype in dtypes.items() if flags.get(flag)), None)
        return super().add_flags(**{**flags, "fp16": False, "bf16": False, "fp32": True})

    def construct(self, x: Any) -> Any:
        if self.dtype_around is not None:
            x = ops.cast(x, self.dtype_around)
        given = ops.cast(x, mstype.float32)
        if self.converts:
            return ops.cast(ops.cast(given, mstype.bfloat16), mstype.float32)
        size = ops.abs(given)
        quantum = ops.gather(self.quanta, self.place(self.powers, size), 0)
        parts = size / quantum
        # To the even one from the middle between two.
        count = self.round(parts)
        if self.away:
            count = count + ops.cast(ops.equal(parts - count, self.half), mstype.float32)
        rounded = count * quantum
        rounded = ops.select(ops.greater(rounded, self.largest), self.beyond, rounded)
        return ops.select(ops.less(given, self.zero), -rounded, rounded)


class RoundToFormat(nn.Cell):
    """Rounds to a format and, in the backward pass, the gradient to another: a simulation in float32.

    Numbers keep their dtype and get values that the format has: the nearest one, subnormal numbers among them, and
    beyond the largest what an overflow gives. The gradient goes through as if nothing had been rounded. The zero of a
    negative number loses its sign, but in bfloat16.

    Args:
        forward (Union[str, dict, Format], optional): the format of the output, as
            :func:`~mindformers_adaptive.rules.formats.find_format` takes it. Default: None, the input as it is.
        gradients (Union[str, dict, Format], optional): the format of the gradient. Default: None, as it is.

    Inputs:
        - **x** (Tensor) - of any shape and floating-point dtype.

    Outputs:
        Tensor, shape and dtype of `x`.

    Raises:
        TypeError: if a format is not of its type.
        ValueError: if there is no such format, or it is finer near 0 than float32.

    Supported Platforms:
        ``Ascend`` ``CPU``

    Examples:
        >>> RoundToFormat("float8_e4m3fn")(Tensor([0.3, 500.0, -17.0], mstype.float32)).tolist()
        [0.3125, nan, -16.0]
    """

    def __init__(self, forward: _GivenFormat = None, gradients: _GivenFormat = None) -> None:
        super().__init__()
        formats = {"forward": forward, "gradients": gradients}
        self.round_forward, self.round_gradient = (
            nn.Identity() if one is None else _Rounding(find_format(one, name)) for name, one in formats.items()
        )

    def construct(self, x: Any) -> Any:
        return ops.cast(self.round_forward(x), x.dtype)

    def bprop(self, x: Any, out: Any, dout: Any) -> tuple[Any, ...]:
        return (ops.cast(self.round_gradient(dout), dout.dtype),)


class _Product(nn.Cell):
    """A product of rounded matrices or images, whose gradient is rounded before it goes to either of them."""

    def __init__(self, product: Any, forward: _GivenFormat, gradients: _GivenFormat) -> None:
        super().__init__()
        self.product = product
        self.round = RoundToFormat(forward)
        self.round_gradient = RoundToFormat(gradients=gradients)

    def construct(self, x: Any, y: Any, *others: Any) -> Any:
        return self.round_gradient(self.product(self.round(x), self.round(y), *others))


def simulate_formats(
    network: Any, forward: _GivenFormat = None, gradients: _GivenFormat = None, layers: Iterable[str] | None = None
) -> Any:
    """Let the products of a network compute as in other formats, simulated in the dtype that they have.

    Both inputs of a product are rounded, and so is the gradient of its result, before the gradients of the matrices
    are computed from it. The product itself, biases and everything between the layers stay as they are. It is a
    simulation, for study and tests: with `forward` "float8_e4m3fn" and `gradients` "float8_e5m2" that of the usual FP8
    training without scales for each tensor.

    The products are those that a cell has as an operator, such as ``ops.MatMul``: of ``nn.Dense``, the convolutions of
    ``nn`` and ``mint.nn.Linear``, and in MindFormers' models of the linear layers, of attention that is not fused, and
    of the adapters of LoRA. :func:`simulated_products` counts them. Not seen are functions in ``construct``, as
    ``ops.matmul(x, y)`` and ``x @ y``, recurrent layers, and fused operators, as flash attention and grouped products.

    Args:
        network (Cell): changed in place, before it is first run.
        forward (Union[str, dict, Format], optional): the format of the matrices, as
            :func:`~mindformers_adaptive.rules.formats.find_format` takes it. Default: None, as they are.
        gradients (Union[str, dict, Format], optional): the format of the gradients. Default: None, as they are.
        layers (Iterable[str], optional): names of cells, or of their classes. Default: None, all that have a product.

    Returns:
        Cell, the network.

    Raises:
        TypeError: if an argument is not of its type.
        ValueError: if no format or layer is of that name, one is simulated already, or the network has been compiled.

    Examples:
        >>> net = simulate_formats(nn.Dense(1, 1, "ones", has_bias=False), forward="float8_e4m3fn")
        >>> net(Tensor([[0.3]], mstype.float32)).tolist()
        [[0.3125]]
    """
    names = None if layers is None else require_names("layers", layers)
    if names == ():
        raise ValueError("'layers' must name at least 1 layer, but got none. Leave it out to take all that have one.")
    found = _products_of(network)
    _refuse_compiled(network)
    known = [known for name, (cell, _, _) in found.items() for known in (name, type(cell).__name__)]
    for layer in names or ():
        if layer not in known:
            near = ", ".join(dict.fromkeys(difflib.get_close_matches(layer, known, cutoff=0.0))) or "none"
            raise ValueError(
                f"'layers' must name cells with a product, or a class of them, but got {layer!r}. The nearest names "
                f"are {near}."
            )
    chosen = {name: one for name, one in found.items() if names is None or {name, type(one[0]).__name__} & {*names}}
    if done := [name for name, (_, _, is_done) in chosen.items() if is_done]:
        raise ValueError(
            f"'network' must have products that are not simulated yet, but those of {', '.join(map(repr, done[:3]))} "
            "are. Make the network anew, or name others in 'layers'."
        )
    if not chosen:
        raise ValueError(
            f"'network' must have a cell with one of {', '.join(_PRODUCTS)}, such as nn.Dense, but has none."
        )
    for cell, products, _ in chosen.values():
        for key in products:
            # It computes in what `to_float` made the cell compute in.
            flags = {flag: getattr(cell, flag, False) for flag in ("fp16", "bf16", "fp32")}
            product = _Product(getattr(cell, key), forward, gradients).add_flags_recursive(**flags)
            # A primitive stands in two places, neither of which is that of a cell.
            del vars(cell)[key], cell._primitives[key]
            setattr(cell, key, product)
    return network


def _refuse_compiled(network: Any) -> None:
    """Refuse a network whose graph MindSpore would take again, without the rounding."""
    marks = ["compile_cache", "_compile_phase"]
    if context.get_context("mode") == context.GRAPH_MODE:
        # What a function around the network was compiled from has these; so has a network that ran in PyNative mode,
        # which does no harm there.
        marks.append("_lazy_forward_pre_hook")
    for name, cell in network.cells_and_names():
        if any(getattr(cell, mark, None) not in (None, set()) for mark in marks):
            raise ValueError(
                f"'network' must not have run in graph mode yet, but {type(cell).__name__}{name and f' {name!r}'} has "
                "been compiled, and that graph would be used again. Call simulate_formats() before the first run."
            )


def _products_of(network: Any) -> dict[str, tuple[Any, list[str], bool]]:
    """Return by the name of each cell with products it, the keys of these, and whether some are simulated already."""
    if not isinstance(network, nn.Cell):
        raise TypeError(f"'network' must be a Cell, but got {type(network).__name__}. Give the network itself.")
    found = {}
    for name, cell in network.cells_and_names():
        if isinstance(cell, _Product):
            continue
        keys = [key for key, one in vars(cell).items() if isinstance(one, ops.Primitive) and one.name in _PRODUCTS]
        is_done = any(isinstance(part, _Product) for part in cell.cells())
        if keys or is_done:
            found[name] = cell, keys, is_done
    return found


def simulated_products(network: Any) -> dict[str, int]:
    """Return how many products of a network are rounded.

    Args:
        network (Cell): as :func:`simulate_formats` returned it.

    Returns:
        dict[str, int], by the class of the cell that has them.

    Raises:
        TypeError: if ``network`` is not a Cell.

    Examples:
        >>> simulated_products(simulate_formats(nn.SequentialCell(nn.Dense(3, 8), nn.Dense(8, 1)), "float8_e4m3fn"))
        {'Dense': 2}
    """
    cells = [cell for cell, _, _ in _products_of(network).values()]
    owners = [type(cell).__name__ for cell in cells for part in cell.cells() if isinstance(part, _Product)]
    return dict(collections.Counter(owners))
