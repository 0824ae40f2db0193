"""Checks of the policies' parameters: type before range, and messages that say what to do."""

from __future__ import annotations

from collections.abc import Callable

from mindformers_adaptive.rule.checks import require_integer, require_number

__all__ = ["Check", "at_least_one", "count", "factor_above_one", "not_negative", "optional", "positive"]
__all__ += ["ratio_below_one", "ratio_up_to_one", "steps"]

Check = Callable[[str, object], object]


def positive(name: str, value: object) -> float:
    """Return a number above 0 as a float."""
    return require_number(
        name, value, "a finite number above 0", lambda number: number > 0, "Loss scales are usually 1 to 2^32."
    )


def not_negative(name: str, value: object) -> float:
    """Return a number of at least 0 as a float."""
    return require_number(name, value, "a finite number of at least 0", lambda number: number >= 0, "0 means no limit.")


def factor_above_one(name: str, value: object) -> float:
    """Return a factor that makes the scale grow."""
    return require_number(name, value, "a finite number above 1", lambda number: number > 1, "The usual value is 2.")


def at_least_one(name: str, value: object) -> float:
    """Return a factor that does not make the scale fall."""
    return require_number(
        name, value, "a finite number of at least 1", lambda number: number >= 1, "The usual value is 2."
    )


def ratio_below_one(name: str, value: object) -> float:
    """Return a factor that makes the scale fall."""
    return require_number(
        name, value, "a number between 0 and 1", lambda number: 0 < number < 1, "The usual value is 0.5."
    )


def ratio_up_to_one(name: str, value: object) -> float:
    """Return a factor that does not make the scale grow."""
    return require_number(
        name, value, "a number above 0 and at most 1", lambda number: 0 < number <= 1, "The usual value is 0.5."
    )


def steps(name: str, value: object) -> int:
    """Return a number of steps, at least 1."""
    return require_integer(name, value, 1, "Give a positive number of steps.")


def count(name: str, value: object) -> int:
    """Return a counter, at least 0."""
    return require_integer(name, value, 0, "A fresh counter is 0.")


def optional(check: Check) -> Check:
    """Return a check that lets None pass, and what else ``check`` lets pass."""
    return lambda name, value: None if value is None else check(name, value)
