"""Checks of the policies' parameters: type before range, and messages that say what to do."""

from __future__ import annotations

from collections.abc import Callable

from mindformers_adaptive.rule.checks import require_integer, require_number

__all__ = ["Check", "at_least_one", "count", "factor_above_one", "not_negative", "optional", "positive"]
__all__ += ["ratio_below_one", "ratio_up_to_one", "steps"]

#: Takes the name of a parameter and a value; returns the value as its type, or raises.
Check = Callable[[str, object], object]


def _number(wanted: str, accepts: Callable[[float], bool], remedy: str) -> Check:
    return lambda name, value: require_number(name, value, wanted, accepts, remedy)


def _integer(least: int, remedy: str) -> Check:
    return lambda name, value: require_integer(name, value, least, remedy)


def optional(check: Check) -> Check:
    """Return a check that accepts None, and whatever ``check`` accepts."""
    return lambda name, value: None if value is None else check(name, value)


_FACTOR, _RATIO = "The usual value is 2.", "The usual value is 0.5."

positive = _number("a finite number above 0", lambda number: number > 0, "Loss scales are usually 1 to 2^32.")
not_negative = _number("a finite number of at least 0", lambda number: number >= 0, "0 means no limit.")
factor_above_one = _number("a finite number above 1", lambda number: number > 1, _FACTOR)
at_least_one = _number("a finite number of at least 1", lambda number: number >= 1, _FACTOR)
ratio_below_one = _number("a number between 0 and 1", lambda number: 0 < number < 1, _RATIO)
ratio_up_to_one = _number("a number above 0 and at most 1", lambda number: 0 < number <= 1, _RATIO)
steps = _integer(1, "Give a positive number of steps.")
count = _integer(0, "A fresh counter is 0.")
