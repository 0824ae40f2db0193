"""Checks of the policies' parameters: type before range, and messages that say what to do."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral, Real

from mindformers_adaptive.rule.checks import as_float32

__all__ = ["Check", "at_least_one", "count", "factor_above_one", "flag", "not_negative", "optional", "positive"]
__all__ += ["ratio_below_one", "ratio_up_to_one", "steps"]

Check = Callable[[str, object], object]


def positive(name: str, value: object) -> float:
    """Return a number above 0 as a float."""
    return _number(
        name, value, "a finite number above 0", lambda number: number > 0, "Loss scales are usually 1 to 2^32."
    )


def not_negative(name: str, value: object) -> float:
    """Return a number of at least 0 as a float."""
    return _number(name, value, "a finite number of at least 0", lambda number: number >= 0, "0 means no limit.")


def factor_above_one(name: str, value: object) -> float:
    """Return a factor that makes the scale grow."""
    return _number(name, value, "a finite number above 1", lambda number: number > 1, "The usual value is 2.")


def at_least_one(name: str, value: object) -> float:
    """Return a factor that does not make the scale fall."""
    return _number(name, value, "a finite number of at least 1", lambda number: number >= 1, "The usual value is 2.")


def ratio_below_one(name: str, value: object) -> float:
    """Return a factor that makes the scale fall."""
    return _number(name, value, "a number between 0 and 1", lambda number: 0 < number < 1, "The usual value is 0.5.")


def ratio_up_to_one(name: str, value: object) -> float:
    """Return a factor that does not make the scale grow."""
    return _number(
        name, value, "a number above 0 and at most 1", lambda number: 0 < number <= 1, "The usual value is 0.5."
    )


def steps(name: str, value: object) -> int:
    """Return a number of steps, at least 1."""
    return _integer(name, value, 1, "Give a positive number of steps.")


def count(name: str, value: object) -> int:
    """Return a counter, at least 0."""
    return _integer(name, value, 0, "A fresh counter is 0.")


def flag(name: str, value: object) -> bool:
    """Return True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"'{name}' must be True or False, but got {_described(value)}. Give one of the two.")
    return value


def optional(check: Check) -> Check:
    """Return a check that lets None pass, and what else ``check`` lets pass."""
    return lambda name, value: None if value is None else check(name, value)


def _number(name: str, value: object, wanted: str, accepts: Callable[[float], bool], advice: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"'{name}' must be {wanted}, but got {_described(value)}. {advice}")
    rounded = as_float32(value)
    if not math.isfinite(rounded) or not accepts(rounded):
        raise ValueError(f"'{name}' must be {wanted} in float32, but got {value!r}. {advice}")
    return float(value)


def _integer(name: str, value: object, smallest: int, advice: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"'{name}' must be an integer, but got {_described(value)}. {advice}")
    if value < smallest:
        raise ValueError(f"'{name}' must be at least {smallest}, but got {value}. {advice}")
    return int(value)


def _described(value: object) -> str:
    return f"{value!r} of type {type(value).__name__}"
