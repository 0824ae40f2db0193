"""The ladder of windows: the increasing list of scale windows that the adaptive rule uses."""

import warnings

from mindformers_adaptive.rules.checks import require_integer

# MindFormers' documentation of adaptive loss scaling gives scale windows of 20 to 1000 steps.
DEFAULT_MAX_SCALE_WINDOW = 1000
DEFAULT_MIN_SCALE_WINDOW = 20

# On the way down the ladder of scale windows, each window above 100 is followed by a multiple of 100. The window 100 is
# followed by 50. Windows below 100 fall in steps of half the smallest window.
_COARSE_STEP = 100
_FIRST_FINE_WINDOW = 50


def window_ladder(max_scale_window: int, min_scale_window: int = DEFAULT_MIN_SCALE_WINDOW) -> tuple[int, ...]:
    """Return the ladder: the strictly increasing scale windows from ``min_scale_window`` to ``max_scale_window``.

    Going down from the maximum, a window above 100 is halved and rounded down to a multiple of 100 (from 101 to 199
    that is 100), after 100 comes 50, and below 100 the windows fall in steps of half the minimum. The recipe is
    MindFormers'; where its list is strictly increasing and ends at both bounds, this one is the same.

    Args:
        max_scale_window (int): the largest window, in steps. Where it is below ``min_scale_window`` or not positive,
            1000 is used instead, with a warning.
        min_scale_window (int): the smallest window, in steps, at least 1. Default: 20.

    Returns:
        tuple[int, ...], the windows in steps, first ``min_scale_window``, last ``max_scale_window``.

    Raises:
        TypeError: if a window is not an integer (``True`` and ``False`` are not).
        ValueError: if ``min_scale_window`` is below 1, or above 1000 where 1000 replaces ``max_scale_window``.

    Examples:
        >>> window_ladder(1000, 20)
        (20, 30, 40, 50, 100, 200, 500, 1000)
        >>> window_ladder(1000, 1000)
        (1000,)
    """
    smallest = _require_window("min_scale_window", min_scale_window, least=1)
    largest = _largest_window(_require_window("max_scale_window", max_scale_window), smallest)

    descending = [largest]
    window = float(largest)
    while window > smallest:
        window = max(_next_below(window, smallest), smallest)
        if int(window) < descending[-1]:
            descending.append(int(window))
    return tuple(reversed(descending))


def _next_below(window: float, smallest: int) -> float:
    """Return the next smaller scale window after ``window`` on the ladder; the result may be below ``smallest``."""
    if window > _COARSE_STEP:
        return max(int(window / 2) // _COARSE_STEP * _COARSE_STEP, _COARSE_STEP)
    if window == _COARSE_STEP:
        return _FIRST_FINE_WINDOW
    return window - smallest / 2


def _largest_window(max_scale_window: int, smallest: int) -> int:
    if max_scale_window >= smallest:
        return max_scale_window
    if smallest > DEFAULT_MAX_SCALE_WINDOW:
        raise ValueError(
            f"'max_scale_window' must be at least 'min_scale_window' ({smallest}), but got {max_scale_window}, and "
            f"the default {DEFAULT_MAX_SCALE_WINDOW} is below it as well. Raise 'max_scale_window' to {smallest} or "
            "more, or lower 'min_scale_window'."
        )
    warnings.warn(
        f"'max_scale_window' must be at least 'min_scale_window' ({smallest}), but got {max_scale_window}: "
        f"{DEFAULT_MAX_SCALE_WINDOW} is used instead.",
        stacklevel=3,
    )
    return DEFAULT_MAX_SCALE_WINDOW


def _require_window(name: str, window: object, least: int | None = None) -> int:
    remedy = "Write it without quotes and without a decimal point, for example 1000."
    return require_integer(name, window, least, remedy, unit="number of steps")
