"""What the largest gradient of a step shows: the largest loss scale, a power of two, at which it stays within FP16."""

import math

from mindformers_adaptive.rules.checks import LARGEST_FLOAT32, SMALLEST_FLOAT32, as_float32

__all__ = ["LARGEST_FLOAT16", "max_safe_exponent"]

LARGEST_FLOAT16 = 65504.0
_FRACTION, _EXPONENT = math.frexp(LARGEST_FLOAT16)


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
    if largest_gradient is None:
        return None
    gradient = as_float32(largest_gradient)
    if not SMALLEST_FLOAT32 <= gradient <= LARGEST_FLOAT32:
        return None
    fraction, exponent = math.frexp(gradient)
    return _EXPONENT - exponent - (fraction > _FRACTION)
