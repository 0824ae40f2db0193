"""The typed values that the step of a rule is made of, and what it may do with them.

When a rule is made, its step is called once with values that record what is done to them, as JAX traces a function. A
value has a dtype, which is bool, int32 or float32, and a shape, which is () or (n,). Python's numbers take the dtype of
the value that they meet. What cannot be computed in the same way everywhere is refused, with the line that has it.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.rules.checks import LARGEST_FLOAT32, LARGEST_INT32, SMALLEST_FLOAT32

__all__ = ["RuleError", "State", "Trace", "Value", "argmin", "ceil", "constant", "count", "float32", "floor", "int32"]
__all__ += ["maximum", "minimum", "stack", "tabulate", "take", "where"]

# The rows of a table that tabulate() may have.
_LARGEST_TABLE = 2**16

# Calls from here are no lines of a rule.
_OWN_FILES = {__file__, str(Path(__file__).with_name("tracing.py"))}


class RuleError(ValueError):
    """What is wrong with a rule, with the line of the rule that has it."""

    def __init__(self, problem: str) -> None:
        name = _traces[-1].rule if _traces else ""
        super().__init__(f"The step of the rule {name!r} {problem}" + _place())


class Trace:
    """What a step does: its values, in the order in which they were computed.

    Args:
        rule (str): the name of the rule, for messages.
    """

    def __init__(self, rule: str) -> None:
        self.rule = rule
        self.values: list[Value] = []

    def __enter__(self) -> Trace:
        _traces.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _traces.pop()


_traces: list[Trace] = []


class Value:
    """A value of a step: the operation that computes it, and the values that this takes.

    Attributes:
        op (str): a key of :data:`~mindformers_adaptive.rules.operations.OPERATIONS`, "input" or "constant".
        args (tuple[Value, ...]): what the operation takes.
        dtype (str): "bool", "int32" or "float32".
        shape (tuple[int, ...]): () or (n,).
        extra (Any): the name of an input, the array of a constant, the place of an element, the rows of a table.
    """

    __slots__ = ("args", "dtype", "extra", "op", "place", "shape", "trace")

    def __init__(self, op: str, args: tuple[Value, ...], dtype: str, shape: tuple[int, ...], extra: Any = None) -> None:
        if not _traces:
            raise RuleError("is not being called: this works within next_state only")
        self.op, self.args, self.dtype, self.shape, self.extra = op, args, dtype, shape, extra
        self.trace = _traces[-1]
        self.place = len(self.trace.values)
        self.trace.values.append(self)

    def __add__(self, other: Any) -> Value:
        return _arithmetic("add", self, other)

    def __radd__(self, other: Any) -> Value:
        return _arithmetic("add", other, self)

    def __sub__(self, other: Any) -> Value:
        return _arithmetic("sub", self, other)

    def __rsub__(self, other: Any) -> Value:
        return _arithmetic("sub", other, self)

    def __mul__(self, other: Any) -> Value:
        return _arithmetic("mul", self, other)

    def __rmul__(self, other: Any) -> Value:
        return _arithmetic("mul", other, self)

    def __truediv__(self, other: Any) -> Value:
        return _arithmetic("div", self, other)

    def __rtruediv__(self, other: Any) -> Value:
        return _arithmetic("div", other, self)

    def __floordiv__(self, other: Any) -> Value:
        return _arithmetic("floordiv", self, other)

    def __rfloordiv__(self, other: Any) -> Value:
        return _arithmetic("floordiv", other, self)

    def __and__(self, other: Any) -> Value:
        return _arithmetic("and", self, other)

    def __or__(self, other: Any) -> Value:
        return _arithmetic("or", self, other)

    __rand__, __ror__ = __and__, __or__

    def __invert__(self) -> Value:
        return _unary("not", self)

    def __neg__(self) -> Value:
        return _unary("neg", self)

    def __abs__(self) -> Value:
        return _unary("abs", self)

    def __pos__(self) -> Value:
        return self

    def __lt__(self, other: Any) -> Value:
        return _arithmetic("less", self, other)

    def __le__(self, other: Any) -> Value:
        return _arithmetic("less_equal", self, other)

    def __gt__(self, other: Any) -> Value:
        return _arithmetic("less", other, self)

    def __ge__(self, other: Any) -> Value:
        return _arithmetic("less_equal", other, self)

    def __eq__(self, other: Any) -> Value:  # type: ignore[override]
        return _arithmetic("equal", self, other)

    def __ne__(self, other: Any) -> Value:  # type: ignore[override]
        return _unary("not", _arithmetic("equal", self, other))

    __hash__ = object.__hash__

    def __getitem__(self, place: Any) -> Value:
        if not self.shape:
            raise RuleError("takes an element of what is a number")
        if isinstance(place, bool) or not isinstance(place, int):
            raise RuleError("has an index that is no int of Python. Use take(vector, index) for one that is computed")
        if not -self.shape[0] <= place < self.shape[0]:
            raise RuleError(f"takes the element {place} of {self.shape[0]}")
        return Value("element", (self,), self.dtype, (), place % self.shape[0])

    def __iter__(self) -> Iterator[Value]:
        if not self.shape:
            raise RuleError("takes apart what is a number")
        return (self[place] for place in range(self.shape[0]))

    def __len__(self) -> int:
        if not self.shape:
            raise RuleError("asks for the length of what is a number")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<{self.dtype} of shape {self.shape}, by {self.op}>"

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **_: Any) -> Value:
        if method != "__call__" or ufunc.__name__ not in _UFUNCS:
            raise RuleError(f"calls numpy.{ufunc.__name__}. {_INSTEAD}")
        # As Python's numbers and lists, which leave the operation to the value.
        given = (one if isinstance(one, Value) else np.asarray(one).tolist() for one in inputs)
        return _UFUNCS[ufunc.__name__](*given)  # type: ignore[no-any-return]

    def __array_function__(self, function: Any, *_: Any) -> Value:
        raise RuleError(f"calls numpy.{function.__name__}. {_INSTEAD}")


_INSTEAD = (
    "Use + - * / //, comparisons, & | ~, abs, and where, minimum, maximum, floor, ceil, int32, float32, stack, count, "
    "argmin, take and tabulate of mindformers_adaptive.rules"
)


def _refuses(problem: str) -> Callable[..., Any]:
    def refuse(*_: object) -> Any:
        raise RuleError(problem)

    return refuse


for _name, _problem in {
    "bool": "has an 'if', 'and', 'or', 'not' or 'while' on a value, or compares three at once. Use "
    "where(condition, a, b), & | and ~, or minimum and maximum",
    "xor": "has '^'. Compare flags by != in its place",
    "mod": "has '%', whose last bit depends on the device. Use a - a // b * b of integers",
    "pow": "has '**' with a value, whose last bit depends on the device. Use products",
    "matmul": "has '@'. Use products",
    "lshift": "shifts bits. Multiply in its place",
    "rshift": "shifts bits. Divide by // in its place",
    "divmod": f"calls divmod. {_INSTEAD}",
    "float": f"needs the number of a value, which is known in training only. {_INSTEAD}",
    "round": f"calls round. {_INSTEAD}",
}.items():
    for _form in (_name, f"r{_name}"):
        setattr(Value, f"__{_form}__", _refuses(_problem))
for _name in ("int", "index", "complex", "trunc", "floor", "ceil", "array"):
    setattr(Value, f"__{_name}__", Value.__float__)  # type: ignore[attr-defined]


class _DType:
    """A dtype: of a field of a rule, ``float32`` or ``float32[16]``; as a function it converts a value."""

    def __init__(self, name: str, shape: tuple[int, ...] = ()) -> None:
        self.name, self.shape = name, shape

    def __getitem__(self, length: Any) -> _DType:
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise ValueError(f"The length of a vector must be an integer of at least 1, but got {length!r}.")
        return _DType(self.name, (length,))

    def __call__(self, value: Any) -> Any:
        """Return a value, or a number, in this dtype.

        A float32 value becomes an int32 one without what stands after its point; beyond the range it becomes the
        nearest integer that a float32 number in the range has, and NaN the smallest int32.
        """
        if not isinstance(value, Value):
            number = int(_number(value)) if self.name == "int32" else float(_number(value))
            return constant(number, self.name) if _traces else number
        return value if value.dtype == self.name else Value(self.name, (_own(value),), self.name, value.shape)

    def __repr__(self) -> str:
        return f"{self.name}{list(self.shape) or ''}"


int32, float32 = _DType("int32"), _DType("float32")


class State:
    """The state of a rule in its step: the loss scale, the fields of the rule by the names of their parts, and counts.

    ``state.replace(name=value)`` returns another one; ``where`` picks one of two.
    """

    def __init__(self, values: Mapping[str, Value], dtypes: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        vars(self).update(_values=dict(values), _dtypes=dtypes)

    def __getattr__(self, name: str) -> Value:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in self._values:
            raise RuleError(f"takes {name!r} of the state, which has {', '.join(self._values)}")
        found: Value = self._values[name]
        return found

    def __setattr__(self, name: str, value: object) -> None:
        raise RuleError(f"assigns {name!r} to the state. Return state.replace({name}=...)")

    def replace(self, **values: Any) -> State:
        """Return the state with other values of some of its parts."""
        checked = {}
        for name, value in values.items():
            if name not in self._dtypes:
                raise RuleError(f"replaces {name!r} of the state. What it may replace is {', '.join(self._dtypes)}")
            dtype, shape = self._dtypes[name]
            if not isinstance(value, Value):
                value = constant(value, dtype)
            if (_own(value).dtype, value.shape) != (dtype, shape):
                raise RuleError(
                    f"returns {name!r} as {value.dtype} of shape {value.shape}, and it is {dtype} of shape {shape}. "
                    f"Put {dtype}(...) around it, or correct the field"
                )
            checked[name] = value
        return State({**self._values, **checked}, self._dtypes)


def where(condition: Any, x: Any, y: Any) -> Any:
    """Return x where a condition holds, and y elsewhere; both are computed.

    Args:
        condition (Value): bool.
        x, y (Union[Value, State, int, float, bool]): of one dtype, or two states.
    """
    if isinstance(condition, (bool, np.bool_)):
        return x if condition else y
    if not isinstance(condition, Value) or condition.dtype != "bool":
        raise RuleError("has a condition of where() that is no flag. Compare it with something")
    if isinstance(x, State) and isinstance(y, State):
        pairs = {name: (x._values[name], y._values[name]) for name in x._values}
        picked = {name: a if a is b else where(condition, a, b) for name, (a, b) in pairs.items()}
        return State(picked, x._dtypes)
    x, y = _of_one_dtype("where", x, y)
    return Value("where", (_own(condition), x, y), x.dtype, _shape(condition, x, y))


def minimum(x: Any, y: Any) -> Any:
    """Return the smaller of two numbers: x where ``x < y``, else y."""
    return _arithmetic("minimum", x, y)


def maximum(x: Any, y: Any) -> Any:
    """Return the larger of two numbers: x where ``y < x``, else y."""
    return _arithmetic("maximum", x, y)


def floor(x: Any) -> Any:
    """Return the largest integer that is not above a float32 value, in float32."""
    return _unary("floor", x) if isinstance(x, Value) else float(math.floor(_number(x)))


def ceil(x: Any) -> Any:
    """Return the smallest integer that is not below a float32 value, in float32."""
    return _unary("ceil", x) if isinstance(x, Value) else float(math.ceil(_number(x)))


def stack(values: Sequence[Any]) -> Value:
    """Return numbers of one dtype as a vector."""
    parts = _of_one_dtype("stack", *values)
    if any(part.shape for part in parts):
        raise RuleError("stacks a vector. A vector is made of numbers")
    return Value("stack", parts, parts[0].dtype, (len(parts),))


def count(flags: Any) -> Value:
    """Return how many flags of a vector are true, int32."""
    return _reduce("count", flags, "bool")


def argmin(x: Any) -> Value:
    """Return the place of the smallest element of a vector, of equals the first, int32; NaN counts as inf."""
    return _reduce("argmin", x, "float32")


def take(vector: Any, index: Any) -> Value:
    """Return the element of a vector at a computed index; one beyond the ends means the nearest end."""
    if not isinstance(vector, Value):
        vector = constant(vector, None)
    if not isinstance(index, Value):
        return vector[index]
    if not vector.shape or _own(index).dtype != "int32" or index.shape:
        raise RuleError("needs take(vector, index) with a vector and an int32 index")
    return Value("take", (_own(vector), index), vector.dtype, ())


def tabulate(function: Callable[..., Any], **arguments: Any) -> tuple[Value, ...]:
    """Return what a function of small integers returns, looked up in a table that is filled when the rule is made.

    The function gets Python's numbers and may branch on them. It is called once for each combination.

    Args:
        function (Callable): takes the arguments by name, and returns a tuple of int.
        **arguments: ``name=flag``, or ``name=(value, lowest, highest)`` of an int32 value; beyond these bounds it
            counts as the nearer one.
    """
    values, spans = [], []
    for name, given in arguments.items():
        value, *bounds = given if isinstance(given, tuple) else (given,)
        is_flag = isinstance(value, Value) and value.dtype == "bool"
        if not isinstance(value, Value) or value.shape or (value.dtype, len(bounds)) not in (("bool", 0), ("int32", 2)):
            raise RuleError(f"needs tabulate(..., {name}=flag) or {name}=(value of int32, lowest, highest)")
        values.append(int32(value))
        spans.append((False, True) if is_flag else range(bounds[0], bounds[1] + 1))
    shape = [len(span) for span in spans]
    if not 0 < math.prod(shape) <= _LARGEST_TABLE:
        raise RuleError(f"fills a table of {math.prod(shape)} rows, and it must have 1 to {_LARGEST_TABLE}")
    grid = np.stack(np.meshgrid(*(np.arange(len(span)) for span in spans), indexing="ij"), axis=-1)
    rows = []
    for places in grid.reshape(-1, len(spans)).tolist():
        given = {name: span[place] for name, span, place in zip(arguments, spans, places, strict=True)}
        row = function(**given)
        if not isinstance(row, tuple) or not all(isinstance(one, (int, np.integer)) for one in row):
            raise RuleError(f"tabulates {function.__name__}, which must return a tuple of int, but returns {row!r}")
        rows.append([constant(int(one), "int32").extra for one in row] if not rows else row)
    if len({len(row) for row in rows}) > 1 or not np.all(np.abs(np.array(rows, np.float64)) <= LARGEST_INT32):
        raise RuleError(f"tabulates {function.__name__}, which must return as many int32 numbers each time")
    table = np.array(rows, np.int32).reshape(*shape, -1)
    lowest = np.array([int(span[0]) for span in spans], np.int32)
    return tuple(Value("lookup", tuple(values), "int32", table.shape[-1:], (table, lowest)))


def constant(number: Any, dtype: str | None) -> Value:
    """Return a number, or a vector of numbers, of Python or NumPy as a value; None for the dtype that it has itself."""
    if isinstance(number, np.ndarray) and number.ndim <= 1:
        number = number.tolist()
    if isinstance(number, (list, tuple)):
        numbers = [_number(one) for one in number]
        if not numbers:
            raise RuleError("has an empty vector")
    else:
        numbers = [_number(number)]
    if dtype is None:
        kinds = {type(one) for one in numbers}
        dtype = "bool" if kinds == {bool} else "float32" if float in kinds else "int32"
    for one in numbers:
        _check_constant(one, dtype)
    array: NDArray[Any] = np.array(numbers, dtype)
    if not isinstance(number, (list, tuple)):
        array = array[0]
    return Value("constant", (), dtype, np.shape(array), array)


def _check_constant(number: bool | int | float, dtype: str) -> None:
    if dtype == "int32" and isinstance(number, float):
        raise RuleError(f"has {number!r} beside an int32. Write an integer, or float32(...) around the int32")
    if isinstance(number, bool) != (dtype == "bool"):
        raise RuleError(f"has {number!r} beside a value of {dtype}. Write int32(...) or float32(...) around the flag")
    if dtype == "int32" and not -LARGEST_INT32 - 1 <= number <= LARGEST_INT32:
        raise RuleError(f"has {number}, which does not fit into int32. Use float32 values")
    if dtype == "float32" and math.isfinite(number):
        if abs(number) > LARGEST_FLOAT32:
            raise RuleError(f"has {number!r}, which does not fit into float32")
        if 0 < abs(number) < SMALLEST_FLOAT32:
            raise RuleError(f"has {number!r}, and devices flush numbers below 2^-126 to 0. Use a larger one")


def _number(value: Any) -> bool | int | float:
    if isinstance(value, (np.bool_, np.integer, np.floating)):
        value = value.item()
    if not isinstance(value, (bool, int, float)):
        raise RuleError(f"has {value!r} of type {type(value).__name__}, which is no int, float or bool. Convert it")
    return value


def _own(value: Value) -> Value:
    if value.trace is not _traces[-1]:
        raise RuleError("uses a value of another call. Keep in the state what the next step needs")
    return value


def _of_one_dtype(op: str, *given: Any) -> tuple[Value, ...]:
    """Return Python's numbers as constants of the dtype of the values beside them."""
    values = [_own(one) for one in given if isinstance(one, Value)]
    if not values:
        dtypes = [constant(one, None).dtype for one in given]
        dtype = "float32" if "float32" in dtypes and "bool" not in dtypes else dtypes[0]
    else:
        dtype = values[0].dtype
    for value in values:
        if value.dtype != dtype:
            raise RuleError(
                f"mixes {dtype} and {value.dtype} in {op}. Write int32(...) or float32(...) around one of them"
            )
    return tuple(one if isinstance(one, Value) else constant(one, dtype) for one in given)


def _shape(*values: Value) -> tuple[int, ...]:
    shapes = {value.shape for value in values if value.shape}
    if len(shapes) > 1:
        raise RuleError(f"combines vectors of lengths {' and '.join(str(length) for (length,) in sorted(shapes))}")
    return shapes.pop() if shapes else ()


# The dtypes that an operation takes, and what to write instead.
_INT_OR_FLOAT = ("int32", "float32"), "Write int32(...) or float32(...) around a flag"
_TAKES = {
    **dict.fromkeys(("add", "sub", "mul", "less", "less_equal", "minimum", "maximum", "neg", "abs"), _INT_OR_FLOAT),
    **dict.fromkeys(("div", "floor", "ceil"), (("float32",), "Write float32(...), or // for integers")),
    "floordiv": (("int32",), "Write floor(a / b) of float32 values"),
    **dict.fromkeys(("and", "or", "not"), (("bool",), "Compare numbers first")),
    "equal": (("bool", "int32", "float32"), ""),
}


def _checked(op: str, dtype: str) -> None:
    dtypes, instead = _TAKES[op]
    if dtype not in dtypes:
        raise RuleError(f"has {op} of {dtype}. {instead}")


def _arithmetic(op: str, x: Any, y: Any) -> Value:
    x, y = _of_one_dtype(op, x, y)
    _checked(op, x.dtype)
    result = "bool" if op in ("less", "less_equal", "equal") else x.dtype
    return Value(op, (x, y), result, _shape(x, y))


def _unary(op: str, x: Value) -> Value:
    _checked(op, _own(x).dtype)
    return Value(op, (x,), x.dtype, x.shape)


def _reduce(op: str, x: Any, dtype: str) -> Value:
    if not isinstance(x, Value):
        x = constant(x, None)
    if not x.shape or _own(x).dtype != dtype:
        raise RuleError(f"has {op} of {x.dtype} of shape {x.shape}. It is for a vector of {dtype}")
    return Value(op, (x,), "int32", ())


# What NumPy calls where one of its numbers or arrays meets a value.
_UFUNCS: dict[str, Callable[..., Any]] = {
    **{"add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "divide": operator.truediv},
    **{"floor_divide": operator.floordiv, "negative": operator.neg, "absolute": abs, "floor": floor, "ceil": ceil},
    **{"less": operator.lt, "less_equal": operator.le, "greater": operator.gt, "greater_equal": operator.ge},
    **{"equal": operator.eq, "not_equal": operator.ne, "minimum": minimum, "maximum": maximum},
    **dict.fromkeys(("logical_and", "bitwise_and"), operator.and_),
    **dict.fromkeys(("logical_or", "bitwise_or"), operator.or_),
    **dict.fromkeys(("logical_not", "invert"), operator.invert),
}


def _place() -> str:
    """Return the line of the rule that was being called, for the end of a message."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in _OWN_FILES:
        frame = frame.f_back
    return "." if frame is None or not _traces else f", in line {frame.f_lineno} of {frame.f_code.co_filename}."
