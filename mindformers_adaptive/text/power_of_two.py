"""Loss scales as people read them."""

import math

__all__ = ["as_power_of_two"]


def as_power_of_two(loss_scale: float) -> str:
    """Return a loss scale as 2^n where it is one, else as a plain number.

    Logs print eight digits of a scale, so that one that is so near counts as a power of two.

    Examples:
        >>> as_power_of_two(65536.0), as_power_of_two(3.0), as_power_of_two(float("inf"))
        ('2^16', '3', 'inf')
    """
    if not 0.0 < loss_scale < math.inf:
        return f"{loss_scale:g}"
    exponent = round(math.log2(loss_scale))
    return f"2^{exponent}" if math.isclose(loss_scale, 2.0**exponent, rel_tol=1e-6) else f"{loss_scale:g}"
