"""What ceilings a recorded run is taken to have had where its log does not bound them from both sides."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.lab.traces.gradients import shown_ceilings
from mindformers_adaptive.lab.traces.trace import consecutive_runs

__all__ = ["ASSUMPTIONS", "BY_GRADIENTS", "assumed_ceiling", "just_below"]

Floats = NDArray[np.float64]

BY_GRADIENTS = "gradients"
ASSUMPTIONS = ("interpolated", "lower_bound", "upper_bound", BY_GRADIENTS)


def assumed_ceiling(
    assume: str, scale: Floats, overflow: NDArray[np.bool_], factor: float, largest_gradient: Floats | None = None
) -> Floats:
    """Return the ceilings that are assumed, before they are moved into the bounds of their steps.

    Args:
        assume (str): one of ``ASSUMPTIONS``; :meth:`RecordedRun.to_trace()
            <mindformers_adaptive.lab.traces.recorded_run.RecordedRun.to_trace>` defines them.
        scale (NDArray): float64 of shape (steps,), the scale of each step, above 0.
        overflow (NDArray): bool of shape (steps,), whether the step was skipped.
        factor (float): what the scale is divided by at an overflow.
        largest_gradient (NDArray, optional): float64 of shape (steps,), unscaled, nan where it is not known. Default:
            None, never known.

    Returns:
        NDArray, float64 of shape (steps,).

    Examples:
        >>> scale, overflow = np.array([8.0, 4.0, 4.0]), np.array([True, False, False])
        >>> assumed_ceiling("gradients", scale, overflow, 2.0, 65504.0 / np.array([np.nan, 8.0, 4.0])).tolist()
        [8.0, 8.0, 4.0]
    """
    if assume == BY_GRADIENTS and largest_gradient is not None:
        shown = shown_ceilings(largest_gradient)
        if not np.isnan(shown).all():
            return _by_gradients(scale, overflow, shown)
    assumed = {"lower_bound": _lower, "upper_bound": _upper}.get(assume, _interpolated)
    return assumed(scale, overflow, factor)


def just_below(scale: Floats) -> Floats:
    """Return the next smaller numbers; of inf itself."""
    return np.where(np.isinf(scale), np.inf, np.nextafter(scale, 0.0))


def _nearest(values: Floats, chosen: NDArray[np.bool_], missing: float) -> tuple[Floats, Floats]:
    """For each step the value at the nearest chosen step before, and after it; itself where it is chosen."""
    at = np.flatnonzero(chosen)
    padded = np.concatenate([[missing], values[at], [missing]])
    places = np.arange(len(values))
    return padded[np.searchsorted(at, places, side="right")], padded[np.searchsorted(at, places, side="left") + 1]


def _lower(scale: Floats, overflow: NDArray[np.bool_], factor: float) -> Floats:
    before, after = _nearest(scale, ~overflow, np.inf)
    return np.where(overflow, np.minimum(np.minimum(before, after), scale / factor), scale)


def _upper(scale: Floats, overflow: NDArray[np.bool_], factor: float) -> Floats:
    if not overflow.any():
        return np.full_like(scale, np.inf)
    before, after = _nearest(just_below(scale), overflow, 0.0)
    return np.maximum(before, after)


def _interpolated(scale: Floats, overflow: NDArray[np.bool_], factor: float) -> Floats:
    if not overflow.any():
        return np.full_like(scale, scale.max(initial=0.0))
    starts, last = consecutive_runs(np.flatnonzero(overflow)).T
    ends = last + 1
    padded = np.append(scale, np.inf)
    smallest, following = np.minimum.reduceat(padded, np.column_stack([starts, ends]).ravel())[::2], padded[ends]
    anchors = (np.log2(smallest) + np.log2(np.minimum(following, smallest / factor))) / 2
    # Each row of skipped steps has one value, from its first step to its last.
    places = np.column_stack([starts, last]).ravel()
    interpolated: Floats = np.exp2(np.interp(np.arange(len(scale)), places, np.repeat(anchors, 2)))
    return interpolated


def _by_gradients(scale: Floats, overflow: NDArray[np.bool_], shown: Floats) -> Floats:
    known = np.flatnonzero(~np.isnan(shown))
    exponents = np.interp(np.arange(len(scale)), known, np.log2(shown[known]))
    if overflow.any():
        starts, last = consecutive_runs(np.flatnonzero(overflow)).T
        smallest = np.minimum.reduceat(np.append(scale, np.inf), np.column_stack([starts, last + 1]).ravel())[::2]
        after = known[np.minimum(np.searchsorted(known, last), len(known) - 1)]
        exponents -= max(float(np.median(exponents[after] - np.log2(smallest))), 0.0)
    ceiling: Floats = np.exp2(exponents)
    return ceiling
