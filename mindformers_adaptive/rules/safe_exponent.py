"""What the largest gradient of a step shows: the largest loss scale, a power of two, at which it stays within FP16."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from mindformers_adaptive.rules.checks import LARGEST_FLOAT32, SMALLEST_FLOAT32

__all__ = ["LARGEST_FLOAT16", "SAFE_EXPONENTS", "max_safe_exponent", "safe_exponents"]

LARGEST_FLOAT16 = 65504.0
_FRACTION, _EXPONENT = math.frexp(LARGEST_FLOAT16)

# What a largest gradient can show: up to -112, 65504 * 2**-n is a normal float32 number, and at -113 it is beyond them.
SAFE_EXPONENTS = range(-113, 142)


def max_safe_exponent(largest_gradient: float | None) -> int | None:
    """Return log2 of the largest power of two at which a gradient stays within FP16, or None if it shows nothing.

    It is the largest integer n with ``largest_gradient * 2**n <= 65504``. That needs comparisons only and no
    logarithm, whose last bit differs from device to device; so a device finds the same n, by counting how many of the
    numbers 65504 * 2**-n are at least as large as the gradient.

    Args:
        largest_gradient (float, optional): an absolute value, unscaled. 0, a number that is not finite or below the
            normal float32 numbers, which devices flush to 0, and None show nothing.

    Examples:
        >>> max_safe_exponent(1.0), max_safe_exponent(65504 / 2.0**18), max_safe_exponent(float("inf"))
        (15, 18, None)
    """
    known, exponents = safe_exponents(math.nan if largest_gradient is None else largest_gradient)
    return int(exponents) if known else None


def safe_exponents(largest_gradient: ArrayLike) -> tuple[Any, Any]:
    """Return for each gradient whether it shows something, and :func:`max_safe_exponent`, bool and int32.

    Examples:
        >>> known, exponents = safe_exponents([1.0, 0.0])
        >>> known.tolist(), int(exponents[0])
        ([True, False], 15)
    """
    with np.errstate(over="ignore"):
        gradient = np.asarray(largest_gradient, np.float64).astype(np.float32)
    known = (gradient >= SMALLEST_FLOAT32) & (gradient <= LARGEST_FLOAT32)
    fraction, exponent = np.frexp(np.where(known, gradient, np.float32(1.0)))
    return known, (_EXPONENT - exponent - (fraction > _FRACTION)).astype(np.int32)
