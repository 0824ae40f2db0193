"""Say of a run whether a loss scale held, between which scales it settled, and how many steps were skipped."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.record.run import RecordedRun, bound_shares
from mindformers_adaptive.record.thresholds import HELD, STUCK
from mindformers_adaptive.record.trace import Trace, consecutive_runs

__all__ = ["bounded_share", "bounds_in_words", "held_at", "path_in_words", "settled"]

# The loss scale of a run with at least 40 steps has settled if some scale held and two conditions hold in the second
# half of the run: 95 % of the loss scales lie within a factor of 4, and the loss scale either both rises and falls or
# stays constant. Even a settled loss scale rises to the next power of two now and then, overflows, and falls back.
_SETTLED_WITHIN, _SETTLED_SHARE, _SETTLED_FROM = 4.0, 0.95, 40


def held_at(run: RecordedRun) -> list[tuple[int, int]]:
    """Return the first and last index of each series of at least ``HELD`` steps that surely did not overflow."""
    clean = ~run.overflow & (run.position_known | _in_roomy_line(run))
    return [
        (first, last) for first, last in consecutive_runs(np.flatnonzero(clean)).tolist() if last - first + 1 >= HELD
    ]


def bounded_share(trace: Trace) -> float:
    """Return the share of a trace's steps with a bound on the loss scale; no replay can have more decided steps."""
    return 1.0 - bound_shares(trace)["neither"]


def settled(run: RecordedRun, known: NDArray[np.float64]) -> tuple[float, float] | None:
    """Return the lowest and the highest scale between which the loss scale settled; None if it did not settle.

    Args:
        run (RecordedRun): the run.
        known (NDArray): its known loss scales in the order of the steps.
    """
    half = known[len(known) // 2 :]
    if len(known) < _SETTLED_FROM or (np.diff(half) > 0).any() != (np.diff(half) < 0).any() or not held_at(run):
        return None
    recent, outside = np.sort(half), int(len(half) * (1 - _SETTLED_SHARE) / 2)
    low, high = float(recent[outside]), float(recent[-1 - outside])
    return (low, high) if high <= _SETTLED_WITHIN * low else None


def path_in_words(run: RecordedRun, named: Callable[[float], str]) -> str:
    """Return a phrase that says where the loss scale of a run went, such as "fell from 2^16 to 2^9".

    Args:
        run (RecordedRun): the run.
        named (Callable): returns a loss scale as text.

    Returns:
        str, which is empty if no loss scale is known.
    """
    scales = np.append(run.loss_scale, run.final_loss_scale)
    known = scales[(scales > 0) & np.isfinite(scales)]
    if not len(known):
        return ""
    not_skipped = np.flatnonzero(~(run.overflow & run.position_known))
    skipped_at_end = len(run) - (int(not_skipped[-1]) + 1 if len(not_skipped) else 0)
    at_end = f": the last {skipped_at_end:,} steps were all skipped" * (skipped_at_end >= STUCK)
    first, last, within = float(known[0]), float(known[-1]), settled(run, known)
    # A scale that no overflow moves is a fixed scale: it has not collapsed.
    if known.min() == known.max():
        # Where most steps have no line, the scale may have moved between the lines.
        stayed = "stayed at {}" if run.position_known.mean() >= 0.5 else "was {} on each line of the log"
        return f"{stayed.format(named(last))}{at_end}"
    if at_end and (known[-STUCK:] == known.min()).all():
        return f"collapsed to {named(last)}{at_end}"
    low, high = (float(known.min()), float(known.max())) if within is None else within
    if within is not None:
        return f"settled at {named(low)}" if low == high else f"settled between {named(low)} and {named(high)}"
    bits = np.log2(known)
    # If the scale went up and down, and still moves that far, its first and its last value do not say where it went.
    net, late = abs(bits[-1] - bits[0]), np.ptp(bits[len(bits) // 2 :])
    if net <= late and 2 * net < np.abs(np.diff(bits)).sum():
        return f"moved between {named(low)} and {named(high)}"
    return f"{'rose' if last > first else 'fell'} from {named(first)} to {named(last)}"


def bounds_in_words(fewest: int, most: int | None) -> str:
    """Return bounds on a number of skipped steps as text; without an upper bound if ``most`` is None.

    Examples:
        >>> bounds_in_words(6, 6), bounds_in_words(2, 17), bounds_in_words(23, None)
        ('6', '2 to 17', 'at least 23')
    """
    if most is None:
        return f"at least {fewest:,}"
    return f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}"


def _in_roomy_line(run: RecordedRun) -> NDArray[np.bool_]:
    """Return for each step whether its log line surely covers 20 (``HELD``) consecutive steps without overflow."""
    ends, _, most = np.asarray(run.lines, np.int64).T
    steps, skipped = np.diff(ends, prepend=0), np.diff(most, prepend=0)
    return np.repeat(steps - skipped >= HELD * (skipped + 1), steps)
