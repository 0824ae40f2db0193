"""Dtypes, functions and the class State, for use in next_state() of a loss-scaling rule."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.rules.checks import LARGEST_INT32
from mindformers_adaptive.rules.values import (
    Value,
    arithmetic,
    computed,
    constant,
    number_of,
    of_one_dtype,
    own,
    refused,
    shape_of,
    unary,
)

__all__ = ["DType", "State", "argmin", "ceil", "count", "float32", "floor", "int32", "maximum", "minimum", "stack"]
__all__ += ["tabulate", "take", "where"]

# The largest number of rows in a table that tabulate() fills, and the largest number of elements in a vector.
_LARGEST_TABLE, _LONGEST_VECTOR = 2**16, 2**16


class DType:
    """The dtype of a field in a rule's state, such as ``float32`` or ``float32[16]``. ``float32(x)`` converts x."""

    def __init__(self, name: str, shape: tuple[int, ...] = ()) -> None:
        self.name, self.shape = name, shape

    def __getitem__(self, length: Any) -> DType:
        if type(length) is not int or not 1 <= length <= _LONGEST_VECTOR or self.shape:
            raise ValueError(
                f"{self}[...] must have one length, an integer from 1 to {_LONGEST_VECTOR}, but got {length!r}. For a "
                f"vector of 8 numbers, write {self.name}[8]."
            )
        return DType(self.name, (length,))

    def __call__(self, value: Any) -> Any:
        """Convert a value of the rule's step, or a plain number, to this dtype.

        The conversion from float32 to int32 drops the fraction. A number beyond the range of int32 becomes the nearest
        integer in this range that float32 can represent, and NaN becomes the smallest int32.
        """
        if isinstance(value, Value):
            return value if own(value).dtype == self.name else computed(self.name, (value,), self.name, value.shape)
        number = number_of(value)
        if self.name == "int32" and not abs(number) < math.inf:
            raise refused(f"converts {number} to int32, which cannot represent it. Use a finite number")
        return constant(int(number) if self.name == "int32" else float(number), self.name)

    def __repr__(self) -> str:
        return f"{self.name}{list(self.shape) or ''}"


int32, float32 = DType("int32"), DType("float32")


class State:
    """The state that next_state() of a rule takes and returns: the loss scale, the rule's fields and step counters.

    ``state.replace(name=value)`` returns a new state; ``where`` picks one of two states.
    """

    def __init__(self, values: Mapping[str, Value], dtypes: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        vars(self).update(_values=dict(values), _dtypes=dtypes)

    def __getattr__(self, name: str) -> Any:
        # Python and NumPy look up names such as __array__ to find out what an object supports, and expect an
        # AttributeError.
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in self._values:
            raise refused(
                f"reads state.{name}, but a state has only {', '.join(self._values)} and the method "
                "replace(name=value). Use one of these"
            )
        return self._values[name]

    def __setattr__(self, name: str, value: object) -> None:
        raise refused(f"assigns state.{name}, but a state cannot be changed. Return state.replace({name}=...)")

    def __bool__(self, *_: object) -> bool:
        raise refused("compares states, or uses a state as a condition. Compare numbers, such as state.loss_scale")

    __eq__ = __ne__ = __bool__
    __hash__ = object.__hash__

    def __deepcopy__(self, _: object) -> State:
        return self

    def __copy__(self) -> State:
        return self

    def replace(self, **values: Any) -> State:
        """Return a copy of the rule's state in which the named fields have new values."""
        checked = {}
        for name, value in values.items():
            if name not in self._dtypes:
                raise refused(f"replaces {name!r} in the state, but may replace only {', '.join(self._dtypes)}")
            dtype, shape = self._dtypes[name]
            if not isinstance(value, Value):
                value = constant(value, dtype)
            if (own(value).dtype, value.shape) != (dtype, shape):
                remedy = f"Put {dtype}(...) around it" if value.shape == shape else f"Give it the shape {shape}"
                raise refused(
                    f"returns {name!r} as {value.dtype} of shape {value.shape}, but the state declares {dtype} of "
                    f"shape {shape}. {remedy}, or change the declaration of {name!r} in the rule's state"
                )
            checked[name] = value
        return State({**self._values, **checked}, self._dtypes)


def where(condition: Any, x: Any, y: Any) -> Any:
    """Return x where a condition holds, and y elsewhere. Both x and y are always computed.

    Args:
        condition (Value): a flag, or a vector of flags.
        x, y (Union[Value, State, int, float, bool]): two values of the same dtype, or two states.
    """
    if isinstance(condition, (bool, np.bool_)):
        return x if condition else y
    if not isinstance(condition, Value) or own(condition).dtype != "bool":
        raise refused(
            "calls where() with a condition that is not a bool. Write a comparison such as a > b, or stack([...]) of "
            "comparisons"
        )
    if isinstance(x, State) and isinstance(y, State):
        if condition.shape:
            raise refused(
                "calls where() with two states and a vector as the condition. Use one bool, such as count(vector) > 0"
            )
        pairs = {name: (x._values[name], y._values[name]) for name in x._values}
        return State({name: a if a is b else where(condition, a, b) for name, (a, b) in pairs.items()}, x._dtypes)
    if isinstance(x, State) or isinstance(y, State):
        raise refused("calls where() with only one state. Give where(condition, a, b) two states or two values")
    x, y = of_one_dtype("where", x, y)
    return computed("where", (condition, x, y), x.dtype, shape_of(condition, x, y))


def minimum(x: Any, y: Any) -> Any:
    """Return the smaller of two numbers: x where ``x < y``, else y."""
    return arithmetic("minimum", x, y)


def maximum(x: Any, y: Any) -> Any:
    """Return the larger of two numbers: x where ``y < x``, else y."""
    return arithmetic("maximum", x, y)


def floor(x: Any) -> Any:
    """Return the largest integer that is not above a float32 value, in float32."""
    return unary("floor", x if isinstance(x, Value) else constant(x, "float32"))


def ceil(x: Any) -> Any:
    """Return the smallest integer that is not below a float32 value, in float32."""
    return unary("ceil", x if isinstance(x, Value) else constant(x, "float32"))


def stack(values: Sequence[Any]) -> Any:
    """Return a vector of the given numbers, which must have the same dtype."""
    parts = of_one_dtype("stack", *values)
    if any(part.shape for part in parts):
        raise refused("calls stack() with a vector, but stack() takes numbers only. Unpack the vector: stack([*v, x])")
    first = parts[0]
    if _are_whole_vector(parts):
        return first.args[0]
    if all(part.op == "where" and part.args[0] is first.args[0] for part in parts):
        # One where() of two vectors takes fewer kernels than one where() for each element.
        return where(first.args[0], *(stack([part.args[side] for part in parts]) for side in (1, 2)))
    return computed("stack", parts, parts[0].dtype, (len(parts),))


def _are_whole_vector(parts: Sequence[Value]) -> bool:
    """Return whether the values are the elements of one vector, complete and in the order of the vector."""
    vector = parts[0].args[0] if parts[0].op == "element" else None
    elements = [part.extra for part in parts if part.op == "element" and part.args[0] is vector]
    return vector is not None and elements == list(range(*vector.shape)) and len(parts) == len(elements)


def count(flags: Any) -> Any:
    """Return how many elements of a bool vector are true, as int32."""
    return _reduce("count", flags, "bool")


def argmin(x: Any) -> Any:
    """Return the index of the smallest element of a vector, as int32: the first one among equals. NaN counts as inf."""
    return _reduce("argmin", x, "float32")


def _reduce(op: str, x: Any, dtype: str) -> Value:
    x = x if isinstance(x, Value) else constant(x, None)
    if not x.shape or own(x).dtype != dtype:
        raise refused(
            f"calls {op}() with a value of dtype {x.dtype} and shape {x.shape}. Give {op}() a vector of {dtype}"
        )
    return computed(op, (x,), "int32", ())


def take(vector: Any, index: Any) -> Any:
    """Return the element of a vector at a computed index. An index out of range means the first or last element."""
    vector = vector if isinstance(vector, Value) else constant(vector, None)
    if not isinstance(index, Value):
        return vector[index]
    if not vector.shape or own(index).dtype != "int32" or index.shape:
        raise refused("calls take(vector, index) without a vector or an int32 index. Write take(v, int32(i))")
    return computed("take", (own(vector), index), vector.dtype, ())


def tabulate(function: Callable[..., Any], **arguments: Any) -> Any:
    """Return the results of a function of small integers, from a table that is filled when the rule is created.

    The function gets plain Python numbers, so it may use ``if``. It is called once for each combination of arguments.

    Args:
        function (Callable): takes the arguments by name, and returns a tuple of int.
        **arguments: ``name=flag``, or ``name=(value, lowest, highest)`` with an int32 value. If the value is out of
            bounds, the nearer bound is used.
    """
    values: list[Any] = []
    spans: list[Any] = []
    for name, argument in arguments.items():
        value, *bounds = argument if isinstance(argument, tuple) and argument else (argument,)
        dtype = value.dtype if isinstance(value, Value) and not value.shape else None
        in_order = [type(bound) for bound in bounds] == [int, int] and bounds[0] <= bounds[1]
        if dtype == "bool" and not bounds:
            spans.append((False, True))
        elif dtype == "int32" and in_order and bounds[0] >= -LARGEST_INT32 and bounds[1] <= LARGEST_INT32:
            spans.append(range(bounds[0], bounds[1] + 1))
        else:
            raise refused(
                f"calls tabulate() with an argument {name!r} that is neither a flag nor an int32 value with bounds. "
                f"Write {name}=flag, or {name}=(value, lowest, highest) with an int32 value"
            )
        values.append(int32(value))
    if not callable(function) or not spans or math.prod(map(len, spans)) > _LARGEST_TABLE:
        raise refused(
            f"calls tabulate() without a function or arguments, or with more than {_LARGEST_TABLE} combinations of "
            "argument values. Give a function and arguments with smaller ranges"
        )
    # Cache the tables of tabulate() only for functions marked with is_cached. A function that is created anew for each
    # rule gains nothing from a cache. A function that uses random numbers must be called again for each table, so that
    # tracing notices the random numbers.
    is_cached = getattr(function, "is_cached", False)
    fill = _filled_table if is_cached else _filled_table.__wrapped__
    table = fill(function, tuple(arguments), tuple(spans))
    values[0].trace.numbers.append(table.tobytes())
    lowest = np.array([int(span[0]) for span in spans], np.int32)
    return tuple(Value("lookup", (stack(values),), "int32", table.shape[-1:], (table, lowest)))


@functools.lru_cache(maxsize=256)
def _filled_table(function: Callable[..., Any], names: tuple[str, ...], spans: tuple[Any, ...]) -> NDArray[np.int32]:
    rows = [function(**dict(zip(names, combination, strict=True))) for combination in itertools.product(*spans)]
    for row in rows:
        is_row = isinstance(row, tuple) and len(row) == len(rows[0]) > 0
        if not is_row or not all(type(number) is int and abs(number) <= LARGEST_INT32 for number in row):
            name = getattr(function, "__name__", function)
            raise refused(
                f"calls tabulate() with the function {name}, which returned {row!r}. Return a tuple of int, in the "
                "range of int32 and always of the same length"
            )
    return np.array(rows, np.int32).reshape(*map(len, spans), -1)
