"""Check the step of a user's rule when the rule is created: run it once in NumPy, with arrays that refuse mistakes.

An error names the line of the rule. Each value is an array of two lanes (runs), so Python cannot decide by it.
"""

import sysconfig
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mindformers_adaptive.rules.lanes import GRADIENT, arguments_of_step
from mindformers_adaptive.rules.operations import NUMPY, OPERATIONS, UNSHOWN, Namespace, lookup

_LANES = 2
_INT32, _FLOAT32, _FLAGS = (frozenset({name}) for name in ("int32", "float32", "bool"))
_NUMBERS = _INT32 | _FLOAT32

# The dtypes that operators of Python, and operations of the namespace, take in NumPy and MindSpore with equal results.
_DTYPES: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("add", "subtract", "multiply", "negative", "absolute"), _NUMBERS),
    **dict.fromkeys(("less", "less_equal", "greater", "greater_equal", "equal", "not_equal"), _NUMBERS),
    **{"divide": _FLOAT32, "floor_divide": _INT32, "invert": _FLAGS},
    **dict.fromkeys(("minimum", "maximum", "stack", "unstack"), _NUMBERS),
    **{"floor": _FLOAT32, "argmin": _FLOAT32, "count": _FLAGS, "tabulate": _INT32},
    **{"logical_and": _FLAGS, "logical_or": _FLAGS},
}


class StepError(ValueError):
    """A step of a rule does something that NumPy and MindSpore could compute differently."""


class _Checked(np.ndarray[Any, Any]):
    """A value in the checked run: Python's operators work on equal dtypes, and everything else is refused."""

    def __array_ufunc__(self, ufunc: Any, method: str, *values: Any, **options: Any) -> Any:
        name = ufunc.__name__
        if name in ("bitwise_and", "bitwise_or"):
            raise StepError("uses & or | on values. Use xp.logical_and(a, b, ...) or xp.logical_or(a, b, ...)")
        if method != "__call__" or name not in _DTYPES or name in OPERATIONS:
            raise StepError(f"calls numpy.{name}. Use operators of Python, and functions of xp")
        if options:
            raise StepError("changes a value in place, as by x += y. Write x = x + y")
        return _computed(name, ufunc, values)

    def __array_function__(self, function: Any, *_: Any) -> Any:
        raise StepError(f"calls numpy.{function.__name__}. Use operators of Python, and functions of xp")

    def __bool__(self) -> bool:
        raise StepError(
            "has an 'if', 'and', 'or', 'not' or 'while' on a value, or a comparison such as a < b < c. Use "
            "xp.where(condition, a, b), xp.logical_and, xp.logical_or and ~"
        )

    def __repr__(self) -> str:
        return f"<a value of {self.dtype}>"

    def _refuse_index(self, *_: Any) -> Any:
        raise StepError("uses elements of a value. Use xp.unstack(vector), or xp.take(vector, index)")

    __getitem__ = __setitem__ = __iter__ = _refuse_index


def _check(name: str, values: Any, dtypes: frozenset[str]) -> None:
    """Refuse a bare Python number, several dtypes, and a dtype not in ``dtypes``."""
    for value in values:
        if not isinstance(value, _Checked):
            maker = "floats" if isinstance(value, float) else "ints"
            raise StepError(f"uses {value!r} in {name!r}. Make a constant outside of the step: xp.{maker}({value!r})")
    present = sorted({value.dtype.name for value in values})
    if len(present) > 1:
        raise StepError(f"mixes {' and '.join(present)} in {name!r}. Use xp.int32(...) or xp.float32(...) around one")
    if not dtypes.issuperset(present):
        raise StepError(
            f"uses {name!r} with {present[0]}, but it takes {' or '.join(sorted(dtypes))}. Use xp.int32(...) or "
            "xp.float32(...), or another operation"
        )


def _computed(name: str, function: Callable[..., Any], values: Any) -> Any:
    """Check the values of an operation, and return its result."""
    if name == "where":
        _check(name, values[:1], _FLAGS)
        _check(name, values[1:], _NUMBERS | _FLAGS)
    elif name == "take":
        _check(name, values[:1], _NUMBERS)
        _check(name, values[1:], _INT32)
    else:
        _check(name, values, _DTYPES.get(name, _NUMBERS | _FLAGS))
    return _checked(function(*map(np.asarray, values)))


def _checked(value: Any) -> Any:
    return list(map(_checked, value)) if isinstance(value, list) else np.asarray(value).view(_Checked)


def _operation(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    if name == "stack":
        return lambda parts: _computed(name, lambda *parts: function(parts), parts)
    return lambda *values: _computed(name, function, values)


def _table(rows: Any, lowest: Any) -> Callable[..., Any]:
    look_up = lookup(rows, lowest)

    def checked(*values: Any) -> Any:
        if len(values) != len(lowest):
            raise StepError(f"gives {len(values)} values to a table of {len(lowest)} arguments")
        return _computed("tabulate", lambda *values: list(look_up(*values)), values)

    return checked


_NAMESPACE = Namespace(
    {name: _operation(name, function) for name, function in OPERATIONS.items()},
    lambda array: _checked(NUMPY.constant(array)),
    _table,
)


def check_step(rule: Any) -> None:
    """Raise ValueError if a rule's step does not take and return what it must, or computes with anything else.

    Args:
        rule (Rule): a user's rule, after its constructor.
    """
    try:
        step = rule.make_step(_NAMESPACE)
        arguments = arguments_of_step(step)
    except Exception as error:
        raise ValueError(f"make_step() of the rule {rule.name!r} raises {_describe(error, rule)}.") from error
    if hasattr(step, "__wrapped__"):
        raise ValueError(
            f"The step of the rule {rule.name!r} is made by functools.wraps, so MindSpore would compile the wrapped "
            "function instead. Set step.__signature__ = inspect.signature(...) of that function."
        )
    values = _values(rule)
    if wrong := [name for name in arguments if name not in values]:
        needs = wrong[0] in GRADIENT
        remedy = "Set needs_gradients = True" if needs else f"Use some of {', '.join(values)}"
        raise ValueError(f"The step of the rule {rule.name!r} takes {wrong[0]!r}, which it does not get. {remedy}.")
    try:
        with np.errstate(all="ignore"):
            after = step(*(values[name] for name in arguments))
    except StepError as error:
        raise ValueError(f"The step of the rule {rule.name!r} {error}{_place_of(error, rule)}.") from error
    except Exception as error:
        raise ValueError(f"The step of the rule {rule.name!r} raises {_describe(error, rule)}.") from error
    _check_results(rule, after, values)


def _values(rule: Any) -> dict[str, Any]:
    def value(dtype: str, *shape: int) -> Any:
        return np.ones((*shape, _LANES), dtype).view(_Checked)

    values = {"exponent" if rule.moves_by_bits else "loss_scale": value("int32" if rule.moves_by_bits else "float32")}
    values["overflow"] = np.array([True, False]).view(_Checked)
    if rule.needs_gradients:
        values |= {"largest_gradient": value("float32"), "gradient_known": ~values["overflow"]}
        values["max_safe_exponent"] = np.array([UNSHOWN, 1], np.int32).view(_Checked)
    for field in rule.fields:
        shape = () if field.parts else field.shape
        values |= {key: value(field.dtype, *shape) for key in field.keys}
    counts = ("skipped_steps", "consecutive_overflows", *(["clean_steps"] if rule.counts_clean_steps else []))
    return values | {name: value("int32") for name in counts}


def _check_results(rule: Any, after: Any, values: Mapping[str, Any]) -> None:
    # The package itself counts the skipped steps, the last two values of a state.
    wanted = ("exponent" if rule.moves_by_bits else "loss_scale", *rule.State._fields[1:-2])
    problem = None
    if not isinstance(after, dict):
        problem = f"must return a dict, but returns {after!r}"
    elif missing := [name for name in wanted if name not in after]:
        problem = f"does not return {missing[0]!r}. Return the next value of each of {', '.join(wanted)}"
    elif unknown := [name for name in after if name not in wanted]:
        problem = f"returns {unknown[0]!r}, but must return {', '.join(wanted)}"
    else:
        for name in wanted:
            result, like = after[name], values[name]
            is_same = isinstance(result, _Checked) and result.dtype == like.dtype and result.ndim == like.ndim
            if not is_same or result.shape[:-1] != like.shape[:-1]:
                got = f"{result.dtype} of shape {result.shape[:-1]}" if isinstance(result, _Checked) else repr(result)
                problem = f"returns {name!r} as {got}, but it must be {like.dtype} of shape {like.shape[:-1]}"
    if problem:
        code = getattr(rule.make_step, "__code__", None)
        line = "" if code is None else f", in line {code.co_firstlineno} of {code.co_filename}"
        raise ValueError(f"The step of the rule {rule.name!r} {problem}{line}.")


def _describe(error: BaseException, rule: Any) -> str:
    """Return an error as one line: the type, the first line of the message, and the line of the rule that raised it."""
    text = next(iter(str(error).strip().splitlines()), "").rstrip(".")
    return f"{type(error).__name__}{text and f': {text}'}{_place_of(error, rule)}"


def _place_of(error: BaseException, rule: Any) -> str:
    """Return the line of an error, as ", in line 3 of rule.py": the innermost one that is no line of a library."""
    code = getattr(rule.make_step, "__code__", None)
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    in_rule = [(file, line) for file, line in lines if code is not None and file == code.co_filename]
    libraries = (str(Path(__file__).parents[1]), *sysconfig.get_paths().values())
    outside = [(file, line) for file, line in lines if not file.startswith(libraries)]
    return "".join(f", in line {line} of {file}" for file, line in (in_rule or outside)[-1:])
