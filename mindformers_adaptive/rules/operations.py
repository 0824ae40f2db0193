"""Each operation of a step, once for NumPy and once for MindSpore: the whole of what could differ between them.

The generated functions are these lines. In NumPy each array has the lanes, one for each run, as its last axis; what is
not an operator is a function of this module. In MindSpore ``ops`` and ``mstype`` are those of MindSpore, and the rest
is made in :mod:`mindformers_adaptive.cells.graph_form`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.rules.checks import LARGEST_FLOAT32, SMALLEST_FLOAT32

__all__ = ["OPERATIONS", "UNSHOWN", "Operation", "fold", "largest_int32_of_float32", "operation_of"]
__all__ += ["possible_exponents", "safe_exponents"]

Array = NDArray[Any]

# What max_safe_exponent is where nothing is shown.
UNSHOWN = -1024

# The smallest normal number, and its bits without the sign, less one.
_TINY, _SMALLEST_BITS = np.float32(SMALLEST_FLOAT32), np.uint32(2**24 - 1)

# The bounds of float32 numbers that become int32.
SMALLEST_AS_INT32, largest_int32_of_float32 = np.float32(-(2.0**31)), np.float32(2.0**31 - 2.0**7)


class Operation(NamedTuple):
    """An operation as an expression of what it takes, ``{0}``, ``{1}``, ...

    Attributes:
        numpy (str): with the functions of this module.
        mindspore (str): with ``ops``, ``mstype`` and the names of ``cells/graph_form.py``.
    """

    numpy: str
    mindspore: str


def _both(text: str) -> Operation:
    return Operation(text, text)


# By name, or by name and dtype of the first thing that it takes.
OPERATIONS = {
    "add": _both("{0} + {1}"),
    "sub": _both("{0} - {1}"),
    "mul": _both("{0} * {1}"),
    "div": Operation("{0} / or_nan({1})", "{0} / ops.select(ops.equal({1}, ZERO), NAN, {1})"),
    "div by a constant": _both("{0} / {1}"),
    "floordiv": Operation("{0} // {1}", "ops.select(ops.equal({1}, NONE), NONE, {0} // {1})"),
    "floordiv by a constant": _both("{0} // {1}"),
    "neg": _both("-{0}"),
    "abs": Operation("np.absolute({0})", "ops.abs({0})"),
    "minimum": Operation("np.where({0} < {1}, {0}, {1})", "ops.minimum({0}, {1})"),
    "maximum": Operation("np.where({1} < {0}, {0}, {1})", "ops.maximum({0}, {1})"),
    # The compiler leaves out a minimum with a number from 2^127 on, and inf would pass.
    "minimum with an end": Operation("np.where({0} < {1}, {0}, {1})", "ops.select(ops.less({0}, {1}), {0}, {1})"),
    "maximum with an end": Operation("np.where({1} < {0}, {0}, {1})", "ops.select(ops.less({1}, {0}), {0}, {1})"),
    "minimum int32": Operation("np.minimum({0}, {1})", "ops.minimum({0}, {1})"),
    "maximum int32": Operation("np.maximum({0}, {1})", "ops.maximum({0}, {1})"),
    "floor": Operation("np.floor({0})", "ops.floor({0})"),
    "ceil": Operation("np.ceil({0})", "ops.ceil({0})"),
    "less": Operation("{0} < {1}", "ops.less({0}, {1})"),
    "less_equal": Operation("{0} <= {1}", "ops.less_equal({0}, {1})"),
    "equal": Operation("{0} == {1}", "ops.equal({0}, {1})"),
    "and": Operation("{0} & {1}", "ops.logical_and({0}, {1})"),
    "or": Operation("{0} | {1}", "ops.logical_or({0}, {1})"),
    "not": Operation("~{0}", "ops.logical_not({0})"),
    "where": Operation("np.where({0}, {1}, {2})", "ops.select({0}, {1}, {2})"),
    "int32": Operation("{0}.astype(np.int32)", "ops.cast({0}, mstype.int32)"),
    "int32 float32": Operation(
        "np.fmin(np.fmax({0}, SMALLEST_AS_INT32), largest_int32_of_float32).astype(np.int32)",
        "ops.cast(ops.minimum(ops.maximum({0}, SMALLEST_AS_INT32), LARGEST_AS_INT32), mstype.int32)",
    ),
    "float32": Operation("{0}.astype(np.float32)", "ops.cast({0}, mstype.float32)"),
    "stack": Operation("stacked({all})", "ops.stack(({all},))"),
    "element": Operation("{0}[{extra}]", "{0}_parts[{extra}]"),
    "take": Operation("taken({0}, {1})", "ops.gather({0}, ops.minimum(ops.maximum({1}, NONE), {last}), 0)"),
    # In float32, exact up to 2**24 flags, because Ascend sums float32.
    "count": Operation(
        "np.count_nonzero({0}, axis=0).astype(np.int32)",
        "ops.cast(reduce_sum(ops.cast({0}, mstype.float32)), mstype.int32)",
    ),
    "argmin": Operation(
        "np.argmin(np.where({0} == {0}, {0}, np.float32(np.inf)), axis=0).astype(np.int32)",
        "argmin(ops.select(ops.equal({0}, {0}), {0}, INF))",
    ),
    # The place in a table, one vector; the bounds of the places; their strides and the first row in NumPy's table.
    "lookup": Operation(
        "{1}[..., 0].take(np.add.reduce(np.minimum(np.maximum({0}, {2}), {3}) * {4}, axis=0) + {5}, axis=0).T",
        "ops.gather_nd({table}, ops.minimum(ops.maximum({0}, {2}), {3}){minus_lowest})",
    ),
    # Those that only the package uses: log2 of a power of two and back, and the largest gradient as an exponent.
    "exponent": Operation(
        "np.frexp({0})[1].astype(np.int32) - np.int32(1)",
        "below_lowest + ops.cast(reduce_sum(ops.cast(ops.less_equal(powers, {0}), mstype.float32)), mstype.int32)",
    ),
    "power": Operation("np.ldexp(np.float32(1), {0})", "ops.gather(powers, {0} - {1}, 0)"),
    "max_safe_exponent": Operation(
        "shown({0}, {1}, {2})",
        "ops.gather(exponents, ops.select({1}, NONE, ops.cast(reduce_sum("
        "ops.cast(ops.less_equal({0}, fits_at), mstype.float32)), mstype.int32)), 0)",
    ),
}


def operation_of(op: str, dtype: str, constants: Sequence[Array | None]) -> Operation:
    """Return an operation for what it takes: its dtype, and the constants among it."""
    second = constants[1] if len(constants) > 1 else None
    if op in ("div", "floordiv") and second is not None and second.all():
        return OPERATIONS[f"{op} by a constant"]
    if op in ("minimum", "maximum") and dtype == "float32":
        known = [array for array in constants if array is not None]
        if any((np.abs(array) >= 2.0**126).any() for array in known):
            return OPERATIONS[f"{op} with an end"]
    return OPERATIONS.get(f"{op} {dtype}", OPERATIONS[op])


def fold(op: str, extra: Any, constants: Sequence[Array]) -> Array | None:
    """Return what an operation of constants gives, computed once in NumPy; None for one that is left to be computed.

    That is also what comes nearer to 0 than 2^-126, so that each step notices it.
    """
    if op not in OPERATIONS or op in ("lookup", "exponent", "power", "max_safe_exponent"):
        return None
    dtype = str(constants[0].dtype)
    text = operation_of(op, dtype, constants).numpy
    names = [f"v{place}" for place in range(len(constants))]
    expression = text.format(*names, all=", ".join(names), extra=extra)
    try:
        with np.errstate(all="ignore", under="raise"):
            found: Array = eval(expression, globals(), dict(zip(names, constants, strict=True)))
            if found.dtype == np.float32:
                notice_subnormal(found)
    except FloatingPointError:
        return None
    return found


def or_nan(divisor: Array) -> Array:
    """Return a divisor with NaN in place of 0."""
    return np.where(divisor == 0, np.float32(np.nan), divisor)


def stacked(*parts: Array) -> Array:
    """Return numbers as a vector, each with its lanes, or with one for all."""
    joined, lanes = np.concatenate(parts), parts[0].shape[-1]
    if joined.size != len(parts) * lanes:
        return np.stack(np.broadcast_arrays(*parts))
    return joined.reshape(len(parts), lanes)


def taken(vector: Array, index: Array) -> Array:
    """Return the elements of vectors at computed places, the nearest ends where these are beyond them."""
    places = np.clip(index, 0, len(vector) - 1)[np.newaxis]
    lanes = max(vector.shape[-1], places.shape[-1])
    vector = np.broadcast_to(vector, (len(vector), lanes))
    found: Array = np.take_along_axis(vector, np.broadcast_to(places, (1, lanes)), 0)[0]
    return found


def safe_exponents(largest_gradient: Any, largest: Any) -> tuple[Any, Any]:
    """Return for each gradient whether it shows something, and log2 of the largest power of two at which it fits.

    Args:
        largest_gradient (ArrayLike): absolute values, unscaled.
        largest (ArrayLike): the largest number of the format, or of that of each gradient.

    Returns:
        tuple[NDArray, NDArray], bool and int32; the second means something where the first is True.

    Examples:
        >>> known, exponents = safe_exponents([1.0, 0.0], 65504.0)
        >>> known.tolist(), int(exponents[0])
        ([True, False], 15)
    """
    with np.errstate(over="ignore"):
        gradient = np.asarray(largest_gradient, np.float64).astype(np.float32)
    known = (gradient >= SMALLEST_FLOAT32) & (gradient <= LARGEST_FLOAT32)
    fraction, exponent = np.frexp(np.where(known, gradient, np.float32(1.0)))
    largest_fraction, largest_exponent = np.frexp(np.asarray(largest, np.float64))
    return known, (largest_exponent - exponent - (fraction > largest_fraction)).astype(np.int32)


def possible_exponents(largest: float) -> range:
    """Return what :func:`safe_exponents` can give for normal float32 numbers; the first is that of the largest ones.

    But for that one, ``largest * 2**-n`` is a normal float32 number for each n.

    Args:
        largest (float): the largest number of the format.
    """
    exponent = int(np.frexp(largest)[1])
    return range(exponent - 129, exponent + 126)


def shown(largest_gradient: Array, overflow: Array, largest: Array) -> Array:
    """Return :func:`safe_exponents` as int32, ``UNSHOWN`` where a step overflowed or its gradient shows nothing."""
    known, exponents = safe_exponents(largest_gradient, largest)
    return np.where(known & ~overflow, exponents, np.int32(UNSHOWN))


def notice_subnormal(*computed: Array) -> None:
    """Let NumPy's underflow rise where a float32 number is nearer to 0 than 2^-126, but not 0."""
    bits = np.concatenate([one.ravel() for one in computed]).view(np.uint32) << 1
    # Without the sign, and 0 as the largest.
    if (bits - np.uint32(1)).min() < _SMALLEST_BITS:
        np.multiply(_TINY, _TINY)
