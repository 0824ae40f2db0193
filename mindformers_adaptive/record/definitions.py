"""What "held", "settled", "collapsed" and "decided" mean, for every command that says so of a run."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.record.run import RecordedRun
from mindformers_adaptive.record.trace import consecutive_runs
from mindformers_adaptive.rules.ladder import DEFAULT_MIN_SCALE_WINDOW

__all__ = ["COLLAPSED_FROM", "DECIDED_FROM", "HELD", "held_at", "settled"]

# A loss scale has held if this many consecutive steps with this scale did not overflow. The number is the smallest
# scale window that MindFormers uses by default.
HELD = DEFAULT_MIN_SCALE_WINDOW

# Recommend settings only if the log shows for at least this share of the replayed steps whether they overflow. This
# share is a judgement: with less, the recommendation could depend on assumed overflows.
DECIDED_FROM = 0.9

# The loss scale has collapsed if at least this many steps at the end of a run were all skipped at the lowest scale.
COLLAPSED_FROM = 10

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


def _in_roomy_line(run: RecordedRun) -> NDArray[np.bool_]:
    """Return for each step whether its log line surely covers 20 (``HELD``) consecutive steps without overflow."""
    ends, _, most = np.asarray(run.lines, np.int64).T
    steps, skipped = np.diff(ends, prepend=0), np.diff(most, prepend=0)
    return np.repeat(steps - skipped >= HELD * (skipped + 1), steps)
