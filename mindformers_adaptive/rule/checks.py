"""float32 as the device computes it, and checks of arguments that are numbers."""

import ctypes
import math
from numbers import Integral, Real

__all__ = ["LARGEST_FLOAT32", "as_float32", "require_integer", "require_positive", "to_float32"]

_SMALLEST_FLOAT32 = 2.0**-126
LARGEST_FLOAT32 = (2.0 - 2.0**-23) * 2.0**127


def to_float32(value: float) -> float:
    """Round to float32 as one float32 operation would; beyond the largest float32 that is inf."""
    return ctypes.c_float(value).value


def as_float32(value: Real) -> float:
    """Return any real number, however large, as the nearest float32."""
    try:
        return to_float32(float(value))
    except OverflowError:
        return math.inf


def require_integer(name: str, value: object, least: int, meaning: str, remedy: str) -> int:
    """Return an argument as an int, or raise.

    Args:
        name (str): what users call it.
        value (object): what they gave.
        least (int): the smallest value that it may have.
        meaning (str): what it is an integer of, "number of steps".
        remedy (str): a sentence on what to give.

    Raises:
        TypeError: if it is not an integer; ``True`` and ``False`` are none here.
        ValueError: if it is below ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(
            f"'{name}' must be an integer {meaning}, but got {value!r} of type {type(value).__name__}. {remedy}"
        )
    if value < least:
        raise ValueError(f"'{name}' must be at least {least}, but got {value}. {remedy}")
    return int(value)


def require_positive(name: str, value: object) -> float:
    """Return an argument as a float32 value, or raise.

    Args:
        name (str): what users call it.
        value (object): what they gave.

    Raises:
        TypeError: if it is not a number; ``True`` and ``False`` are none here.
        ValueError: if it is not finite and above 0 in float32.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(
            f"'{name}' must be a number, but got {value!r} of type {type(value).__name__}. Write it as a plain "
            "number: YAML reads 2e16 as text, and 65536 or 6.5536e+4 as numbers."
        )
    rounded = as_float32(value)
    if not _SMALLEST_FLOAT32 <= rounded <= LARGEST_FLOAT32:
        raise ValueError(
            f"'{name}' must be finite and above 0 in float32, but got {value!r}. Give a positive number; loss scales "
            "are usually powers of two from 1 to 4294967296."
        )
    return rounded
