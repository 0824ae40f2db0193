"""The operations that a rule's step may use, each as a NumPy expression and as a MindSpore expression.

A row of ``OPERATIONS`` has both expressions of an operation; the two forms of a step can differ only here. A guard
restricts the row to some values, such as constants for which MindSpore's compiler would give another result than the
plain expression. In NumPy, the last axis of each array has one index per lane (run), and functions without a prefix
are defined in this module. In MindSpore, names in capitals are Tensors of ``CONSTANTS``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.rules.checks import LARGEST_FLOAT32, SMALLEST_FLOAT32

__all__ = ["CONSTANTS", "OPERATIONS", "UNSHOWN", "Operation", "fold", "operation_of"]
__all__ += ["possible_exponents", "safe_exponents"]

Array = NDArray[Any]

# The value of max_safe_exponent for a step that overflowed or has no usable largest gradient.
UNSHOWN = -1024

# _TINY is the smallest normal float32 number. _SMALLEST_BITS is the bit pattern of this number, shifted left by one bit
# to drop the sign, minus 1.
_TINY, _SMALLEST_BITS = np.float32(SMALLEST_FLOAT32), np.uint32(2**24 - 1)

# Constants in the expressions of OPERATIONS. SMALLEST_AS_INT32 and LARGEST_AS_INT32 are the smallest and the largest
# float32 number that fit into int32.
ZERO, NONE, NAN, INF = np.float32(0), np.int32(0), np.float32(np.nan), np.float32(np.inf)
SMALLEST_AS_INT32, LARGEST_AS_INT32 = np.float32(-(2.0**31)), np.float32(2.0**31 - 2.0**7)
CONSTANTS = {"ZERO": ZERO, "NONE": NONE, "NAN": NAN, "INF": INF}
CONSTANTS |= {"SMALLEST_AS_INT32": SMALLEST_AS_INT32, "LARGEST_AS_INT32": LARGEST_AS_INT32}


def _constant(value: Any, position: int) -> Array | None:
    """Return the array of an operation's argument at ``position`` if this argument is a constant, else None."""
    argument = value.args[position]
    numbers: Array | None = argument.extra if argument.op == "constant" else None
    return numbers


def _is_known_divisor(value: Any) -> bool:
    divisor = _constant(value, 1)
    return divisor is not None and bool(divisor.all())


def _has_nearly_largest(value: Any) -> bool:
    numbers = [_constant(value, 0), _constant(value, 1)]
    return any(number is not None and bool((np.abs(number) >= 2.0**126).any()) for number in numbers)


def _has_nearly_zero(value: Any) -> bool:
    number = _constant(value, 1) if value.dtype == "float32" else None
    return number is not None and bool((np.abs(number) <= SMALLEST_FLOAT32).any())


def _has_nan(value: Any) -> bool:
    number = _constant(value, 1) if value.dtype == "float32" else None
    return number is not None and bool(np.isnan(number).any())


def _is_product_of_product(value: Any) -> bool:
    inner = value.args[0]
    is_product = value.dtype == "float32" and inner.op == "mul" and _constant(inner, 1) is not None
    return is_product and _constant(value, 1) is not None


def _is_of_float32(value: Any) -> bool:
    return bool(value.args[0].dtype == "float32")


def _powers(value: Any) -> Array:
    lowest, highest = (int(value.args[position].extra) for position in (1, 2))
    return np.array([2.0**exponent for exponent in range(lowest, highest + 1)], np.float32)


def _fits_at(value: Any) -> Array:
    """Return the largest gradient that does not overflow, for each possible exponent of the loss scale.

    The last element is the largest subnormal float32, because gradients up to this number show no ceiling.
    """
    largest = float(value.args[2].extra)
    fits = [min(largest * 2.0**-exponent, LARGEST_FLOAT32) for exponent in possible_exponents(largest)]
    return np.array([*fits, np.nextafter(_TINY, ZERO)], np.float32)


def _exponents(value: Any) -> Array:
    return np.array([UNSHOWN, *possible_exponents(float(value.args[2].extra)), UNSHOWN], np.int32)


class Operation(NamedTuple):
    """The NumPy and MindSpore expressions of an operation, with ``{0}``, ``{1}``, ... for its arguments.

    Attributes:
        numpy (str): the NumPy expression; it may use the functions of this module.
        mindspore (str): the MindSpore expression; it may use ``ops``, ``mstype`` and names of ``cells/graph_form.py``.
        guard (Callable, optional): returns whether the row applies to a value. Default: None, to all values.
        constants (Mapping[str, Callable]): functions that compute, from a value, other constants of ``mindspore``.
    """

    numpy: str
    mindspore: str
    guard: Callable[[Any], bool] | None = None
    constants: Mapping[str, Callable[[Any], Any]] = {}


def _both(text: str, guard: Callable[[Any], bool] | None = None) -> Operation:
    return Operation(text, text, guard)


_MINUS = {"minus": lambda value: -value.args[1].extra}
_NAN_PRODUCT = {
    "is_nan": lambda value: np.isnan(value.args[1].extra),
    "minus": lambda value: -np.where(np.isnan(value.args[1].extra), np.float32(2), value.args[1].extra),
}

# The NumPy and MindSpore expressions of each operation. Rows whose names begin with the same word are variants of one
# operation; the first variant whose guard returns True for the values of the step is used.
OPERATIONS = {
    # MindSpore's compiler removes the addition of a constant near 0, so -0.0 + 0.0 would stay -0.0. To get 0.0,
    # subtract the negated constant instead.
    "add nearly zero": Operation("{0} + {1}", "{0} - {minus}", _has_nearly_zero, _MINUS),
    "add": _both("{0} + {1}"),
    "sub": _both("{0} - {1}"),
    # MindSpore's compiler treats a constant NaN, which can result from other constants, as 1.
    "mul by NaN": Operation("{0} * {1}", "ops.select({is_nan}, NAN, -{0} * {minus})", _has_nan, _NAN_PRODUCT),
    # MindSpore's compiler turns (x * c1) * c2 into x * (c1 * c2), which can change the last bit. Negating both factors
    # prevents this change.
    "mul again": Operation("{0} * {1}", "-{0} * {minus}", _is_product_of_product, _MINUS),
    "mul": _both("{0} * {1}"),
    "div by a constant": _both("{0} / {1}", _is_known_divisor),
    "div": Operation("{0} / or_nan({1})", "{0} / ops.select(ops.equal({1}, ZERO), NAN, {1})"),
    "floordiv by a constant": _both("{0} // {1}", _is_known_divisor),
    "floordiv": Operation("{0} // {1}", "ops.select(ops.equal({1}, NONE), NONE, {0} // {1})"),
    "neg": _both("-{0}"),
    "abs": Operation("np.absolute({0})", "ops.abs({0})"),
    # MindSpore's compiler removes minimum(x, c) if the constant c is 2^127 or more. An x of inf would then stay inf.
    "minimum with an end": Operation(
        "np.where({0} < {1}, {0}, {1})",
        "ops.select(ops.less({0}, {1}), {0}, {1})",
        lambda value: _is_of_float32(value) and _has_nearly_largest(value),
    ),
    "maximum with an end": Operation(
        "np.where({1} < {0}, {0}, {1})",
        "ops.select(ops.less({1}, {0}), {0}, {1})",
        lambda value: _is_of_float32(value) and _has_nearly_largest(value),
    ),
    "minimum float32": Operation("np.where({0} < {1}, {0}, {1})", "ops.minimum({0}, {1})", _is_of_float32),
    "maximum float32": Operation("np.where({1} < {0}, {0}, {1})", "ops.maximum({0}, {1})", _is_of_float32),
    "minimum": Operation("np.minimum({0}, {1})", "ops.minimum({0}, {1})"),
    "maximum": Operation("np.maximum({0}, {1})", "ops.maximum({0}, {1})"),
    "floor": Operation("np.floor({0})", "ops.floor({0})"),
    "ceil": Operation("np.ceil({0})", "ops.ceil({0})"),
    "less": Operation("{0} < {1}", "ops.less({0}, {1})"),
    "less_equal": Operation("{0} <= {1}", "ops.less_equal({0}, {1})"),
    "equal": Operation("{0} == {1}", "ops.equal({0}, {1})"),
    "and": Operation("{0} & {1}", "ops.logical_and({0}, {1})"),
    "or": Operation("{0} | {1}", "ops.logical_or({0}, {1})"),
    "not": Operation("~{0}", "ops.logical_not({0})"),
    "where": Operation("np.where({0}, {1}, {2})", "ops.select({0}, {1}, {2})"),
    "int32 float32": Operation(
        "np.fmin(np.fmax({0}, SMALLEST_AS_INT32), LARGEST_AS_INT32).astype(np.int32)",
        "ops.cast(ops.minimum(ops.maximum({0}, SMALLEST_AS_INT32), LARGEST_AS_INT32), mstype.int32)",
        _is_of_float32,
    ),
    "int32": Operation("{0}.astype(np.int32)", "ops.cast({0}, mstype.int32)"),
    "float32": Operation("{0}.astype(np.float32)", "ops.cast({0}, mstype.float32)"),
    "stack": Operation("stacked({all})", "ops.stack(({all},))"),
    "element": Operation("{0}[{extra}]", "ops.unstack({0})[{extra}]"),
    "take": Operation(
        "taken({0}, {1})",
        "ops.gather({0}, ops.minimum(ops.maximum({1}, NONE), {last}), 0)",
        constants={"last": lambda value: np.int32(value.args[0].shape[0] - 1)},
    ),
    # Count the true flags as a sum in float32, because Ascend devices sum float32, not bool. The sum is exact up to
    # 2**24 flags.
    "count": Operation(
        "np.count_nonzero({0}, axis=0).astype(np.int32)",
        "ops.cast(reduce_sum(ops.cast({0}, mstype.float32)), mstype.int32)",
    ),
    "argmin": Operation(
        "np.argmin(np.where({0} == {0}, {0}, INF), axis=0).astype(np.int32)",
        "argmin(ops.select(ops.equal({0}, {0}), {0}, INF))",
    ),
    "lookup": Operation(
        "{table}({0})",
        "ops.gather_nd({rows}, ops.minimum(ops.maximum({0}, {lowest}), {highest}) - {lowest})",
        constants={
            "rows": lambda value: value.extra[0],
            "lowest": lambda value: value.extra[1],
            "highest": lambda value: value.extra[1] + np.array(value.extra[0].shape[:-1], np.int32) - 1,
        },
    ),
    # Operations that a user's rule cannot call: log2 of a power of two, the power of two for an exponent, and the
    # exponent of the largest power-of-two loss scale without overflow.
    "exponent": Operation(
        "np.frexp({0})[1].astype(np.int32) - np.int32(1)",
        "{below} + ops.cast(reduce_sum(ops.cast(ops.less_equal({powers}, {0}), mstype.float32)), mstype.int32)",
        constants={"powers": _powers, "below": lambda value: value.args[1].extra - np.int32(1)},
    ),
    "power": Operation(
        "np.ldexp(np.float32(1), {0})", "ops.gather({powers}, {0} - {1}, 0)", constants={"powers": _powers}
    ),
    "max_safe_exponent": Operation(
        "shown({0}, {1}, {2})",
        "ops.gather({exponents}, ops.select({1}, NONE, ops.cast(reduce_sum("
        "ops.cast(ops.less_equal({0}, {fits_at}), mstype.float32)), mstype.int32)), 0)",
        constants={"exponents": _exponents, "fits_at": _fits_at},
    ),
}

_ROWS: dict[str, list[str]] = {}
for _name in OPERATIONS:
    _ROWS.setdefault(_name.partition(" ")[0], []).append(_name)

# Values that fold() does not compute in advance: inputs, values that are constants already, and operations whose
# structure, such as the size of a table, can differ from rule to rule.
_UNFOLDED = ("input", "constant", "lookup", "exponent", "power", "max_safe_exponent")


def operation_of(values: Sequence[Any]) -> Operation:
    """Return the first row of OPERATIONS that fits ``values``: its guard accepts each value, or it has no guard.

    The values are the results of the same operation in the traced steps of several rules.
    """
    rows = [OPERATIONS[name] for name in _ROWS[values[0].op]]
    return next(row for row in rows if row.guard is None or all(map(row.guard, values)))


def fold(value: Any) -> Array | None:
    """Return the result of an operation on constants, computed in NumPy; None for any other operation.

    The guards of OPERATIONS can then examine the result, and MindSpore's compiler cannot compute a different result.
    """
    if value.op in _UNFOLDED or any(argument.op != "constant" for argument in value.args):
        return None
    names = [f"v{position}" for position in range(len(value.args))]
    arrays = [argument.extra[..., np.newaxis] for argument in value.args]
    expression = operation_of([value]).numpy.format(*names, all=", ".join(names), extra=value.extra)
    with np.errstate(all="ignore"):
        lanes: Array = eval(expression, globals(), dict(zip(names, arrays, strict=True)))
    return lanes[..., 0]


def or_nan(divisor: Array) -> Array:
    """Return a divisor in which NaN replaces 0."""
    return np.where(divisor == 0, np.float32(np.nan), divisor)


def stacked(*parts: Array) -> Array:
    """Return the parts of a vector, stacked. Each part has one number per lane (run), or one number for all lanes."""
    joined, lanes = np.concatenate(parts), parts[0].shape[-1]
    if joined.size != len(parts) * lanes:
        return np.stack(np.broadcast_arrays(*parts))
    return joined.reshape(len(parts), lanes)


def taken(vector: Array, index: Array) -> Array:
    """Return the element at ``index`` of each lane's (run's) vector; an index out of range means the first or last."""
    places = np.clip(index, 0, len(vector) - 1)[np.newaxis]
    lanes = max(vector.shape[-1], places.shape[-1])
    vector = np.broadcast_to(vector, (len(vector), lanes))
    elements: Array = np.take_along_axis(vector, np.broadcast_to(places, (1, lanes)), 0)[0]
    return elements


def safe_exponents(largest_gradient: Any, largest: Any) -> tuple[Any, Any]:
    """Return whether each gradient is a normal float32 number, and log2 of its largest safe power-of-two loss scale.

    Args:
        largest_gradient (ArrayLike): absolute values, unscaled.
        largest (ArrayLike): the largest finite number of the gradients' format, or of each gradient's format.

    Returns:
        tuple[NDArray, NDArray], bool and int32; the second array is valid where the first is True.

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
    """Return the exponents that :func:`safe_exponents` can give for normal float32 numbers, in increasing order.

    For every exponent n except the first, ``largest * 2**-n`` is a normal float32 number.

    Args:
        largest (float): the largest number of the format.
    """
    exponent = int(np.frexp(largest)[1])
    return range(exponent - 129, exponent + 126)


def shown(largest_gradient: Array, overflow: Array, largest: Array) -> Array:
    """Return log2 of each step's safe loss scale, or ``UNSHOWN`` if it overflowed or has no usable largest gradient."""
    known, exponents = safe_exponents(largest_gradient, largest)
    return np.where(known & ~overflow, exponents, np.int32(UNSHOWN))


class Table:
    """The tables of all lanes (runs) for one call of ``tabulate``, joined end to end. Lanes can share a table.

    Args:
        tables (Sequence[tuple[NDArray, NDArray]]): the table of each lane, or one for all lanes: the rows, with an axis
            for each argument, and the lowest value of each argument.
    """

    def __init__(self, tables: Sequence[tuple[Array, Array]]) -> None:
        each = {id(rows): rows.reshape(-1, rows.shape[-1]) for rows, _ in tables}
        self._rows = np.concatenate(list(each.values()))
        starts = dict(zip(each, np.cumsum([0, *map(len, each.values())]).tolist(), strict=False))
        lowest = np.array([lowest for _, lowest in tables])
        sizes = np.array([rows.shape[:-1] for rows, _ in tables])
        ones = np.ones((len(tables), 1), np.int64)
        strides = np.concatenate([np.cumprod(sizes[:, :0:-1], axis=1)[:, ::-1], ones], axis=1)
        first = np.array([starts[id(rows)] for rows, _ in tables])
        bounds = (lowest, lowest + sizes - 1, strides, first)
        self._lowest, self._highest, self._strides, self._first = (merged(bound.astype(np.int32)) for bound in bounds)

    def __call__(self, index: Array) -> Array:
        """Return the results of the tabulated function, as an array of shape (results, lanes).

        Args:
            index (NDArray): the values of the function's arguments, of shape (arguments, lanes). If a value is out of
                the bounds of its argument, the nearer bound is used.
        """
        places = (np.minimum(np.maximum(index, self._lowest), self._highest) - self._lowest) * self._strides
        rows: Array = self._rows.take(np.add.reduce(places, axis=0) + self._first, axis=0).T
        return rows


def merged(each: Array) -> Array:
    """Stack a constant of several rules along a new last axis, of length 1 if the constant is equal in all rules."""
    # Compare the bits of the constants, because -0.0 is equal to 0.0.
    is_one = len({array.tobytes() for array in each}) == 1
    return np.ascontiguousarray(np.moveaxis(each[:1] if is_one else each, 0, -1))


def in_all_lanes(array: Array, lanes: int) -> Array:
    """Return an array whose last axis has ``lanes`` elements; repeat the array if it has one element for all lanes."""
    return array if array.shape[-1] == lanes else np.broadcast_to(array, (*array.shape[:-1], lanes))


def notice_subnormal(*computed: Array) -> None:
    """Signal an underflow in NumPy if a computed float32 number is subnormal: below 2^-126, but not 0."""
    bits = np.concatenate([array.ravel() for array in computed]).view(np.uint32) << 1
    # Compare the magnitudes of the numbers by their bits. Subtracting 1 wraps 0 around to the largest unsigned number,
    # so that 0 does not count as subnormal.
    if (bits - np.uint32(1)).min() < _SMALLEST_BITS:
        np.multiply(_TINY, _TINY)
