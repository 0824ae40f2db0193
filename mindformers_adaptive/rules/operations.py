"""The operations in NumPy that a rule's step may use, beside Python's operators. The last axis of arrays are the runs.

``cells/graph_form.py`` has the same operations for MindSpore. A step gets one of the two as its namespace ``xp``.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.rules.checks import LARGEST_FLOAT32, LARGEST_INT32, SMALLEST_FLOAT32, fits

Array = NDArray[Any]

# The value of max_safe_exponent for a step that overflowed or has no usable largest gradient.
UNSHOWN = -1024

# The smallest and the largest float32 number that fit into int32.
SMALLEST_AS_INT32, LARGEST_AS_INT32 = np.float32(-(2.0**31)), np.float32(2.0**31 - 2.0**7)

_SMALLEST, _LARGEST = np.float32(SMALLEST_FLOAT32), np.float32(LARGEST_FLOAT32)

# The most combinations of arguments in a table.
_LARGEST_TABLE = 2**16


def constants(dtype: str, numbers: Sequence[Any]) -> list[Array]:
    """Return the constants of a rule as arrays of shape (), or (n,) for a sequence of numbers.

    Args:
        dtype (str): "int32" or "float32".
        numbers (Sequence): what the rule gave to ``xp.ints`` or ``xp.floats``.

    Raises:
        ValueError: if a number does not fit the dtype.
    """
    for number in itertools.chain.from_iterable(np.ravel(np.array(each, object)) for each in numbers):
        if not fits(number, dtype):
            raise ValueError(f"{number!r} is not a valid {dtype} constant")
    return [np.array(each, dtype) for each in numbers]


def filled_table(function: Callable[..., Any], ranges: Sequence[Any]) -> tuple[Array, Array]:
    """Return the results of a function for all combinations of its arguments, and the lowest value of each argument.

    Args:
        function (Callable): takes integers, and returns a tuple of integers.
        ranges (Sequence[tuple[int, int]]): the lowest and the highest value of each argument.

    Raises:
        ValueError: if there are too many combinations, or a result is no tuple of int32.
    """
    spans = [range(lowest, highest + 1) for lowest, highest in ranges]
    if not 0 < math.prod(map(len, spans)) <= _LARGEST_TABLE:
        raise ValueError(
            f"tabulate() takes ranges (lowest, highest) of 1 to {_LARGEST_TABLE} combinations, not {ranges}"
        )
    rows = np.array([function(*point) for point in itertools.product(*spans)], object)
    if rows.ndim != 2 or any(type(number) is not int or abs(number) > LARGEST_INT32 for number in rows.flat):
        name = getattr(function, "__name__", function)
        raise ValueError(f"tabulate() needs a function that returns a tuple of int32 numbers, but got {name}")
    return rows.astype(np.int32).reshape(*map(len, spans), -1), np.array([span[0] for span in spans], np.int32)


def safe_exponents(gradient: Array, largest_fraction: Any, largest_exponent: Any) -> tuple[Any, Any]:
    """Return whether each gradient is a normal float32 number, and log2 of its largest safe power-of-two loss scale.

    Args:
        gradient (NDArray): absolute values, unscaled, float32.
        largest_fraction, largest_exponent (ArrayLike): ``np.frexp`` of the largest finite number of the gradients'
            format.

    Returns:
        tuple[NDArray, NDArray], bool and int32; the second array is valid where the first is True.

    Examples:
        >>> known, exponents = safe_exponents(np.float32([1.0, 0.0]), *np.frexp(65504.0))
        >>> known.tolist(), int(exponents[0])
        ([True, False], 15)
    """
    known = (gradient >= _SMALLEST) & (gradient <= _LARGEST)
    fraction, exponent = np.frexp(gradient)
    return known, (largest_exponent - exponent - (fraction > largest_fraction)).astype(np.int32)


def possible_exponents(largest: float) -> range:
    """Return the exponents that :func:`safe_exponents` can give for normal float32 numbers, in increasing order.

    For every exponent n except the first, ``largest * 2**-n`` is a normal float32 number.

    Args:
        largest (float): the largest number of the format.
    """
    exponent = int(np.frexp(largest)[1])
    return range(exponent - 129, exponent + 126)


def lookup(rows: Array, lowest: Array) -> Callable[..., Array]:
    """Return the function that ``tabulate`` gives to a step.

    Args:
        rows (NDArray): the results of the tabulated function, with an axis for each argument before the last axis.
        lowest (NDArray): the lowest value of each argument.

    Returns:
        Callable, which takes the values of the function's arguments, of shape (lanes,), and returns the results, of
        shape (results, lanes). Where a value is out of the bounds of its argument, the nearer bound is used.
    """
    sizes, flat = np.array(rows.shape[:-1], np.int32), rows.reshape(-1, rows.shape[-1])
    strides = np.append(np.cumprod(sizes[:0:-1])[::-1], 1)
    bounds = (lowest, lowest + sizes - 1, strides)
    low, high, stride = (bound.astype(np.int32)[:, np.newaxis] for bound in bounds)

    def look_up(*arguments: Array) -> Array:
        places = (np.minimum(np.maximum(stack(arguments), low), high) - low) * stride
        results: Array = flat.take(np.add.reduce(places, axis=0), axis=0).T
        return results

    return look_up


def _minimum(x: Array, y: Array) -> Any:
    return np.where(x < y, x, y) if x.dtype.kind == "f" else np.minimum(x, y)


def _maximum(x: Array, y: Array) -> Any:
    return np.where(y < x, x, y) if x.dtype.kind == "f" else np.maximum(x, y)


def _logical_and(first: Array, *flags: Array) -> Any:
    for flag in flags:
        first = first & flag
    return first


def _logical_or(first: Array, *flags: Array) -> Any:
    for flag in flags:
        first = first | flag
    return first


def _int32(x: Array) -> Any:
    if x.dtype.kind == "f":
        x = np.fmin(np.fmax(x, SMALLEST_AS_INT32), LARGEST_AS_INT32)
    return x.astype(np.int32)


def _float32(x: Array) -> Any:
    return x.astype(np.float32)


def stack(parts: Sequence[Array]) -> Array:
    """Return a vector of numbers, in each lane. A part may be one number for all lanes."""
    joined, lanes = np.concatenate(parts), parts[0].shape[-1]
    if joined.size != len(parts) * lanes:
        return np.stack(np.broadcast_arrays(*parts))
    return joined.reshape(len(parts), lanes)


def _take(vector: Array, index: Array) -> Any:
    index = np.minimum(np.maximum(index, 0), len(vector) - 1)
    vector, index = np.broadcast_arrays(vector, index)
    return np.take_along_axis(vector, index[:1], axis=0)[0]


def _argmin(vector: Array) -> Any:
    return np.argmin(np.where(vector == vector, vector, np.float32(np.inf)), axis=0).astype(np.int32)


def _count(flags: Array) -> Any:
    return np.count_nonzero(flags, axis=0).astype(np.int32)


# Operations on values. Constants and tables are made by functions of Namespace instead.
OPERATIONS: dict[str, Callable[..., Any]] = {
    **{"where": np.where, "logical_and": _logical_and, "logical_or": _logical_or},
    **{"minimum": _minimum, "maximum": _maximum, "floor": np.floor, "int32": _int32},
    **{"float32": _float32, "stack": stack, "unstack": list, "take": _take, "argmin": _argmin, "count": _count},
}


class Namespace:
    """The argument ``xp`` of a rule's ``make_step``: operations, and functions that make constants and tables.

    Args:
        operations (Mapping[str, Callable]): operations by name.
        constant (Callable): makes a constant of an array of shape () or (n,).
        table (Callable): makes a function of integers of the rows of a table and the lowest arguments.
    """

    def __init__(self, operations: Any, constant: Callable[[Array], Any], table: Callable[..., Any]) -> None:
        vars(self).update(operations)
        self.constant, self.table = constant, table

    def ints(self, *numbers: Any) -> Any:
        """Return int32 constants, one for each number or sequence of numbers."""
        return self._constants("int32", numbers)

    def floats(self, *numbers: Any) -> Any:
        """Return float32 constants, one for each number or sequence of numbers."""
        return self._constants("float32", numbers)

    def tabulate(self, function: Callable[..., Any], *ranges: tuple[int, int]) -> Any:
        """Return a function of values that looks up the results of a function of small integers.

        Args:
            function (Callable): takes integers, and returns a tuple of integers. It may use ``if``.
            *ranges (tuple[int, int]): the lowest and the highest value of each argument. Beyond these bounds, the
                nearer bound is used.
        """
        return self.table(*filled_table(function, ranges))

    def _constants(self, dtype: str, numbers: tuple[Any, ...]) -> Any:
        values = tuple(map(self.constant, constants(dtype, numbers)))
        return values if len(values) > 1 else values[0]


NUMPY = Namespace(OPERATIONS, lambda array: array[..., np.newaxis], lookup)
