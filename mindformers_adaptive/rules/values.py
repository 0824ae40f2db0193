"""The typed values with which a rule's next_state() computes. Some operations on these values are rejected.

When a rule is created, its step is called with values that record each operation on them, as JAX traces a function. A
value has a dtype (bool, int32 or float32) and a shape, () or (n,). A Python number takes the dtype of the value that it
is combined with. An operation that devices could compute differently is rejected; the error names the line of the rule.
"""

from __future__ import annotations

import math
import operator
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.rules.checks import LARGEST_FLOAT32, LARGEST_INT32, SMALLEST_FLOAT32
from mindformers_adaptive.rules.operations import fold

__all__ = ["RuleError", "Trace", "Value", "arithmetic", "computed", "constant", "number_of", "of_one_dtype", "own"]
__all__ += ["is_line_of_a_rule", "is_traced_now", "refused", "shape_of", "unary"]

# Files of this package's tracer. Their lines, and lines of the libraries below, are never reported as lines of a rule.
_OWN_FILES = {
    str(Path(__file__).with_name(f"{name}.py")) for name in ("values", "functions", "tracing", "rule", "lanes")
}
_INSTALLED = sysconfig.get_path("purelib") + os.sep
_LIBRARIES = (*(f"{_INSTALLED}{name}{os.sep}" for name in ("numpy", "mindspore", "mindformers")), "<frozen ")
_STANDARD = sysconfig.get_path("stdlib") + os.sep

# A rule's step has at most this many values. MindSpore compiles them in 20 seconds, but twice as many in 80 seconds.
_MOST_VALUES = 2**11


class RuleError(ValueError):
    """Error in the step of a rule; the message names the line of the rule."""


def refused(problem: str) -> RuleError:
    """Return the error that names the rule being traced, says what its step does (``problem``), and names the line."""
    trace = _present.trace
    if trace is None:
        return RuleError(f"Values of a rule's step work only inside next_state(), but this code {problem}{_place()}")
    error = RuleError(f"The step of the rule {trace.rule.name!r} {problem}{_place()}")
    # Keep the first error in the trace, because the rule may catch the error.
    trace.problem = trace.problem or error
    return error


class Trace:
    """The recording of one call of a rule's step: the values, in the order in which they were computed.

    Args:
        rule (Rule): the rule whose step is recorded.

    Attributes:
        values (list[Value]): the recorded values.
        numbers (list): the constants and tables that the step uses; they must be equal in every call.
        problem (RuleError, optional): the first error that :func:`refused` made for this call.
    """

    def __init__(self, rule: Any) -> None:
        self.rule = rule
        self.values: list[Value] = []
        self.numbers: list[Any] = []
        self.problem: RuleError | None = None

    def __enter__(self) -> Trace:
        if _present.trace is not None:
            raise refused(
                "creates a rule or calls step() of a rule. Create rules in the constructor, and call their next_state()"
            )
        _present.trace = self
        return self

    def __exit__(self, *_: object) -> None:
        _present.trace = None


class _Present(threading.local):
    trace: Trace | None = None


_present = _Present()


def is_traced_now(rule: Any) -> bool:
    """Return whether the step of the given rule is being traced at the moment."""
    return _present.trace is not None and _present.trace.rule is rule


class Value:
    """A value in the step of a rule, recorded as an operation and the arguments of the operation.

    Attributes:
        op (str): a key of ``OPERATIONS`` in :mod:`mindformers_adaptive.rules.operations`, "input" or "constant".
        args (tuple[Value, ...]): the arguments of the operation.
        dtype (str): "bool", "int32" or "float32".
        shape (tuple[int, ...]): () or (n,).
        extra (Any): the name of an input, the array of a constant, the index of an element, or the table of a lookup.
        position (int): the position of the value in ``trace.values``.
    """

    __slots__ = ("args", "dtype", "extra", "op", "position", "shape", "trace")

    args: tuple[Value, ...]
    dtype: str
    extra: Any
    op: str
    position: int
    shape: tuple[int, ...]
    trace: Trace

    def __init__(self, op: str, args: tuple[Value, ...], dtype: str, shape: tuple[int, ...], extra: Any = None) -> None:
        trace = _present.trace
        if trace is None:
            raise refused(f"creates a value ({op!r}). Write a plain number, or, in 'state', a dtype such as float32[8]")
        if len(trace.values) >= _MOST_VALUES:
            raise refused(
                f"records more than {_MOST_VALUES} operations, and MindSpore would compile them for minutes. Compute "
                "with whole vectors, and use take, count, argmin and tabulate"
            )
        for name, value in zip(Value.__slots__, (args, dtype, extra, op, len(trace.values), shape, trace), strict=True):
            object.__setattr__(self, name, value)
        trace.values.append(self)

    def __setattr__(self, name: str, value: object) -> None:
        raise refused(f"sets the attribute {name!r} of a value, which cannot change. Compute a new value instead")

    def __getattr__(self, name: str) -> Any:
        # Python, NumPy and MindSpore probe objects for names with underscores and expect an AttributeError.
        if name.startswith("_"):
            raise AttributeError(name)
        raise refused(f"uses the attribute {name!r}, but values in a rule's step have no such attribute. {_INSTEAD}")

    def __copy__(self) -> Value:
        return self

    def __deepcopy__(self, _: object) -> Value:
        return self

    def __getitem__(self, index: Any) -> Value:
        if not self.shape:
            raise refused("indexes a number. Only a vector has elements")
        if isinstance(index, Value):
            raise refused("indexes a vector by a computed value. Use take(vector, index) instead")
        if isinstance(index, (bool, np.bool_)) or not isinstance(index, (int, np.integer)):
            raise refused(f"uses the index {index!r}, which is no integer. For more elements use stack([v[0], v[1]])")
        index = int(index)
        if not -self.shape[0] <= index < self.shape[0]:
            raise refused(f"uses index {index} of a vector of length {self.shape[0]}. Use 0 to {self.shape[0] - 1}")
        if self.op == "stack":
            # If MindSpore's compiler simplified stack()[i] instead, it would return an input itself, not a copy.
            element: Value = own(self).args[index % self.shape[0]]
            return element
        return computed("element", (own(self),), self.dtype, (), index % self.shape[0])

    def __iter__(self) -> Iterator[Value]:
        return (self[index] for index in range(len(self)))

    def __len__(self) -> int:
        if not self.shape:
            raise refused("uses a number as a vector. Only a vector, such as a field of float32[3], has elements")
        return self.shape[0]

    def __ne__(self, other: object) -> Value:  # type: ignore[override]
        return unary("not", arithmetic("equal", self, other))

    def __pos__(self) -> Value:
        return self

    def __repr__(self) -> str:
        return f"<{self.dtype} of shape {self.shape}, by {self.op}>"

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Value:
        if method != "__call__" or ufunc.__name__ not in _UFUNCS or options:
            raise refused(f"calls numpy.{ufunc.__name__}. {_INSTEAD}")
        # Convert NumPy operands to Python numbers and lists, so that Python calls the operator of Value, not NumPy's.
        operands = (operand if isinstance(operand, Value) else np.asarray(operand).tolist() for operand in inputs)
        value: Value = _UFUNCS[ufunc.__name__](*operands)
        return value

    def __array_function__(self, function: Any, *_: Any) -> Value:
        raise refused(f"calls numpy.{function.__name__}. {_INSTEAD}")


def computed(op: str, args: tuple[Value, ...], dtype: str, shape: tuple[int, ...], extra: Any = None) -> Value:
    """Return the value of an operation; if all its arguments are constants, compute it and return a constant."""
    value = Value(op, args, dtype, shape, extra)
    numbers = fold(value)
    return value if numbers is None else Value("constant", (), dtype, numbers.shape, numbers)


_INSTEAD = (
    "Use + - * / //, comparisons, & | ~, abs, and where, minimum, maximum, floor, ceil, int32, float32, stack, count, "
    "argmin, take and tabulate of mindformers_adaptive.rules"
)


def _computes(op: str, swapped: bool = False) -> Callable[[Value, Any], Value]:
    return lambda self, other: arithmetic(op, other, self) if swapped else arithmetic(op, self, other)


def _refuses(problem: str) -> Callable[..., Any]:
    def refuse(*_: object) -> Any:
        raise refused(problem)

    return refuse


for _name, _op in {"add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "floordiv": "floordiv"}.items():
    setattr(Value, f"__{_name}__", _computes(_op))
    setattr(Value, f"__r{_name}__", _computes(_op, swapped=True))
for _name in ("and", "or"):
    setattr(Value, f"__{_name}__", _computes(_name))
    setattr(Value, f"__r{_name}__", _computes(_name))
for _name, _op in {"lt": "less", "le": "less_equal", "eq": "equal"}.items():
    setattr(Value, f"__{_name}__", _computes(_op))
for _name, _op in {"gt": "less", "ge": "less_equal"}.items():
    setattr(Value, f"__{_name}__", _computes(_op, swapped=True))
for _name, _op in {"invert": "not", "neg": "neg", "abs": "abs"}.items():
    setattr(Value, f"__{_name}__", lambda self, _op=_op: unary(_op, self))
for _name, _problem in {
    "bool": "has an 'if', 'and', 'or', 'not' or 'while' on a value, or a comparison such as a < b < c. "
    "Use where(condition, a, b), & | and ~, or minimum and maximum",
    "xor": "has '^'. Compare flags by != instead",
    "mod": "has '%', whose result depends on the device. Use a - a // b * b of integers",
    "pow": "has '**' with a value. The last bit of the power depends on the device. Use products",
    "matmul": "has '@'. Use products",
    "lshift": "shifts bits. Multiply instead",
    "rshift": "shifts bits. Divide by // instead",
    "divmod": f"calls divmod. {_INSTEAD}",
    "float": f"needs a value as a Python number, which is known only in training. {_INSTEAD}",
    "round": f"calls round. {_INSTEAD}",
    "hash": "looks a value up in a set or a dict. Compare it by ==, or use tabulate",
    "setitem": "assigns an element of a vector. Make another vector by stack([...])",
}.items():
    for _form in (_name, f"r{_name}"):
        setattr(Value, f"__{_form}__", _refuses(_problem))
for _name in ("int", "index", "complex", "trunc", "floor", "ceil", "array"):
    setattr(Value, f"__{_name}__", Value.__float__)  # type: ignore[attr-defined]

# Allowed NumPy ufuncs, mapped to operations on traced values. Even np.float32(2) * value makes NumPy call a ufunc.
_UFUNCS: dict[str, Callable[..., Any]] = {
    **{"add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "divide": operator.truediv},
    **{"floor_divide": operator.floordiv, "negative": operator.neg, "absolute": abs},
    **{"less": operator.lt, "less_equal": operator.le, "greater": operator.gt, "greater_equal": operator.ge},
    **{"equal": operator.eq, "not_equal": operator.ne, "invert": operator.invert, "logical_not": operator.invert},
    **dict.fromkeys(("logical_and", "bitwise_and"), operator.and_),
    **dict.fromkeys(("logical_or", "bitwise_or"), operator.or_),
    **{name: lambda x, y, name=name: arithmetic(name, x, y) for name in ("minimum", "maximum")},
    **{name: lambda x, name=name: unary(name, x) for name in ("floor", "ceil")},
}


def constant(number: Any, dtype: str | None) -> Value:
    """Return a Python or NumPy number or vector as a constant. Without ``dtype``, the elements decide the dtype."""
    if isinstance(number, np.ndarray) and number.ndim == 1:
        number = number.tolist()
    is_vector = isinstance(number, (list, tuple))
    numbers = [number_of(element) for element in (number if is_vector else [number])]
    if not numbers:
        raise refused("has an empty vector. Give at least one element")
    dtype = _dtype_of(numbers) if dtype is None else dtype
    for element in numbers:
        _check_constant(element, dtype)
    array: NDArray[Any] = np.array(numbers if is_vector else numbers[0], dtype)
    value = Value("constant", (), dtype, array.shape, array)
    value.trace.numbers.append(numbers)
    return value


def _dtype_of(numbers: Iterable[bool | int | float]) -> str:
    kinds = {type(number) for number in numbers}
    return "bool" if kinds == {bool} else "float32" if float in kinds else "int32"


def _check_constant(number: bool | int | float, dtype: str) -> None:
    if isinstance(number, bool) != (dtype == "bool"):
        raise refused(f"uses {number!r} with a value of {dtype}. Write int32(...) or float32(...) around the bool")
    if dtype == "int32":
        if isinstance(number, float):
            raise refused(f"uses {number!r} with an int32. Write an integer, or float32(...) around the int32")
        if not -LARGEST_INT32 - 1 <= number <= LARGEST_INT32:
            raise refused(f"uses {_short(number)}, which int32 cannot hold. Compute with float32 values")
    elif dtype == "float32":
        if number != number:
            raise refused("has a constant that is NaN. Mark a missing value by a number that cannot occur, such as -1")
        if abs(number) > LARGEST_FLOAT32 and abs(number) != math.inf:
            raise refused(f"uses {_short(number)}, which float32 cannot hold. Use a smaller number, or math.inf")
        if 0 < abs(number) < SMALLEST_FLOAT32:
            raise refused(f"uses {number!r}, but devices flush numbers below 2^-126 to 0. Use a larger number")


def _short(number: int | float) -> str:
    bits = number.bit_length() if isinstance(number, int) else 0
    return f"an integer of {bits} bits" if bits > 64 else repr(number)


def number_of(value: Any) -> bool | int | float:
    """Return a Python or NumPy number as a Python number; reject anything else."""
    if isinstance(value, (np.bool_, np.integer, np.floating)):
        value = value.item()
    if isinstance(value, (list, tuple)):
        raise refused(f"has the {type(value).__name__} {value!r} in place of a number. For a vector use stack([...])")
    if isinstance(value, Value):
        raise refused("uses a list or tuple of values. Use stack([...]) for a vector, or use only one of the values")
    if type(value) not in (bool, int, float):
        raise refused(f"uses {value!r} of type {type(value).__name__} as a number. Convert it to int, float or bool")
    number: bool | int | float = value
    return number


def own(value: Value) -> Value:
    """Return the given value; reject a value that does not belong to the call of next_state() that is being traced."""
    if value.trace is not _present.trace:
        raise refused("uses a value computed in another call of next_state. Keep in the state what the next step needs")
    return value


def of_one_dtype(op: str, *operands: Any) -> tuple[Value, ...]:
    """Return the operands as values of one dtype: Python numbers become constants of the other operands' dtype."""
    values = [own(operand) for operand in operands if isinstance(operand, Value)]
    if not operands:
        raise refused(f"calls {op} without values. Give at least one number")
    dtype = values[0].dtype if values else _dtype_of(map(number_of, operands))
    remedy = _COMPARE if op in ("and", "or") else "Write int32(...) or float32(...) around one of them"
    for value in values:
        if value.dtype != dtype:
            raise refused(f"mixes {dtype} and {value.dtype} in {op!r}. {remedy}")
    return tuple(operand if isinstance(operand, Value) else constant(operand, dtype) for operand in operands)


def shape_of(*values: Value) -> tuple[int, ...]:
    """Return the shape of an operation's result: () if all operands are numbers; reject vectors of unequal lengths."""
    shapes = {value.shape for value in values if value.shape}
    if len(shapes) > 1:
        lengths = " and ".join(str(length) for (length,) in sorted(shapes))
        raise refused(f"combines vectors of lengths {lengths}. Use vectors of equal length")
    return shapes.pop() if shapes else ()


# For each operation, the dtypes that it accepts, and what to write for operands of another dtype.
_COMPARE = "Compare numbers first, in parentheses, as in (a > b) & c"
_INT_OR_FLOAT = ("int32", "float32"), "Write int32(...) or float32(...) around a flag"
_TAKES = {
    **dict.fromkeys(("add", "sub", "mul", "less", "less_equal", "minimum", "maximum", "neg", "abs"), _INT_OR_FLOAT),
    **dict.fromkeys(("div", "floor", "ceil"), (("float32",), "Write float32(...), or // for integers")),
    "floordiv": (("int32",), "Write floor(a / b) of float32 values"),
    **dict.fromkeys(("and", "or", "not"), (("bool",), _COMPARE)),
    "equal": (("bool", "int32", "float32"), ""),
}

# Operations whose arguments can be swapped. A constant is made the second argument, where OPERATIONS looks for it.
_COMMUTATIVE = frozenset({"add", "mul", "and", "or", "equal"})


def _check_dtype(op: str, dtype: str) -> None:
    dtypes, instead = _TAKES[op]
    if dtype not in dtypes:
        raise refused(f"uses {op!r} on {dtype}. {instead}")


def arithmetic(op: str, x: Any, y: Any) -> Value:
    """Return the traced value of an operation on two values, or on a value and a number."""
    if op in ("and", "or") and not {type(x), type(y)}.isdisjoint((int, float)):
        raise refused(f"uses {op!r} on a number. {_COMPARE}")
    x, y = of_one_dtype(op, x, y)
    _check_dtype(op, x.dtype)
    result = "bool" if op in ("less", "less_equal", "equal") else x.dtype
    if op in _COMMUTATIVE and x.op == "constant":
        x, y = y, x
    return computed(op, (x, y), result, shape_of(x, y))


def unary(op: str, x: Value) -> Value:
    """Return the traced value of an operation on one value."""
    _check_dtype(op, own(x).dtype)
    return computed(op, (x,), x.dtype, x.shape)


def _place() -> str:
    """Return the end of an error message that names the line of the rule that is running now."""
    frame: Any = sys._getframe(1)
    while frame is not None and not is_line_of_a_rule(frame.f_code.co_filename):
        frame = frame.f_back
    return "." if frame is None else f", in line {frame.f_lineno} of {frame.f_code.co_filename}."


def is_line_of_a_rule(file: str) -> bool:
    """Return whether a file can contain a rule's code: it belongs neither to this package's tracer nor to a library."""
    is_standard = file.startswith(_STANDARD) and not file.startswith(_INSTALLED)
    return file not in _OWN_FILES and not is_standard and not file.startswith(_LIBRARIES)
