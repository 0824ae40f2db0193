"""What a recorded run shows: its skipped steps and scales, its start, its raises and its climbs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.lab.analysis.scale_path import Change, rows_of_numbers
from mindformers_adaptive.lab.traces.recorded_run import RecordedRun
from mindformers_adaptive.lab.traces.trace import Trace
from mindformers_adaptive.rule.ladder import DEFAULT_MIN_SCALE_WINDOW

__all__ = [
    "HELD",
    "RaiseOutcome",
    "Start",
    "climb",
    "facts_of",
    "lifted",
    "raise_outcomes",
    "rows_of_flags",
    "start_of_run",
]

# A scale held if it bore as many clean steps in a row as MindFormers' smallest window.
HELD = DEFAULT_MIN_SCALE_WINDOW

# The start-up of a run, in steps: published logs lose 16 to 19 of their first 30 to 100.
_START_UP = 100


def facts_of(run: RecordedRun) -> dict[str, Any]:
    """Return what a run did in numbers, ready for JSON.

    Args:
        run (RecordedRun): at least one step, and a known loss scale.

    Returns:
        dict with ``steps``, ``skipped``, ``start_up`` and ``loss_scale``, each a dict.

    Examples:
        >>> flags = np.array([True, False])
        >>> run = RecordedRun("run", (), "jsonl", np.array([1, 2]), np.array([4.0, 2.0]), flags, np.full(2, True))
        >>> facts_of(run)["start_up"]
        {'before_first_applied': 1, 'first_steps': 2, 'skipped_in_first_steps': 1}
    """
    return {
        "steps": {"count": len(run), "first": int(run.step[0]), "last": int(run.step[-1])},
        "skipped": _skipped(run),
        "start_up": _start_up(run),
        "loss_scale": _scales(run),
    }


def _skipped(run: RecordedRun) -> dict[str, Any]:
    numbers = run.step[run.overflow].tolist()
    rows = rows_of_numbers(np.flatnonzero(run.overflow).tolist())
    first, last = max(rows, key=lambda row: row[1] - row[0], default=(0, -1))
    return {
        "count": run.skipped_steps,
        "known": int((run.overflow & run.position_known).sum()),
        "inferred": int((run.overflow & ~run.position_known).sum()),
        "ranges": rows_of_numbers(numbers),
        "longest_run": last - first + 1,
        "longest_run_steps": (int(run.step[first]), int(run.step[last])) if rows else None,
        **_seconds(run),
    }


def _seconds(run: RecordedRun) -> dict[str, Any]:
    """The time of the skipped steps, and of how many of them the log has it."""
    if run.seconds is None:
        return {"seconds_lost": None, "steps_with_seconds": 0}
    lost = run.seconds[run.overflow]
    known = lost[~np.isnan(lost)]
    return {"seconds_lost": float(known.sum()) if len(known) else None, "steps_with_seconds": len(known)}


def _start_up(run: RecordedRun) -> dict[str, Any]:
    return {
        "before_first_applied": len(run) if run.overflow.all() else int(np.argmin(run.overflow)),
        "first_steps": min(_START_UP, len(run)),
        "skipped_in_first_steps": int(run.overflow[:_START_UP].sum()),
    }


def _scales(run: RecordedRun) -> dict[str, Any]:
    known = run.loss_scale[~np.isnan(run.loss_scale)].tolist()
    named = {"first": known[0], "final": known[-1], "smallest": min(known), "largest": max(known)}
    return {name: None if math.isinf(scale) else scale for name, scale in named.items()}


class Start(NamedTuple):
    """How a run came down from its first scale.

    Attributes:
        skipped (int): steps skipped before the first scale that held.
        known (int): those of them whose place the log knows.
        scale (float, optional): that scale; None if none held.
        step (int): the first step at it.
        bore (int): how many clean steps in a row are in the log until it was raised, at most 20.
    """

    skipped: int
    known: int
    scale: float | None
    step: int
    bore: int


def start_of_run(run: RecordedRun) -> Start:
    """Return how the run came down: to the scale before its first raise, or the first to bear 20 clean steps.

    Where the log ends before either, that is the scale of its last clean steps.

    Examples:
        >>> flags = np.array([True, True, False, False])
        >>> run = RecordedRun("run", (), "jsonl", np.arange(1, 5), np.array([8.0, 4.0, 2.0, 2.0]), flags, flags)
        >>> start_of_run(run)
        Start(skipped=2, known=2, scale=2.0, step=3, bore=2)
    """
    scale, clean = run.loss_scale, 0
    for place, overflow in enumerate(run.overflow.tolist()):
        clean = 0 if overflow else clean + 1
        rises = place + 1 < len(run) and scale[place + 1] > scale[place]
        if clean and (clean == HELD or rises or place == len(run) - 1):
            first = place - clean + 1
            skipped = run.overflow[:first]
            known = int((skipped & run.position_known[:first]).sum())
            held = None if math.isnan(scale[place]) else float(scale[place])
            return Start(int(skipped.sum()), known, held, int(run.step[first]), clean)
    return Start(run.skipped_steps, int((run.overflow & run.position_known).sum()), None, int(run.step[-1]), 0)


class RaiseOutcome(NamedTuple):
    """What came of a raise.

    Attributes:
        step (int): the last step before it.
        window (int): the clean steps that led to it.
        overflow_after (int, optional): the overflow that came before as many clean steps had, counted in steps; None if
            the raised scale bore them.
    """

    step: int
    window: int
    overflow_after: int | None


def raise_outcomes(run: RecordedRun, changes: Sequence[Change]) -> list[RaiseOutcome]:
    """Return the raises whose window and outcome the log knows.

    Args:
        run (RecordedRun): at least one step.
        changes (Sequence[Change]): its :func:`~mindformers_adaptive.lab.analysis.scale_path.changes_of`.
    """
    skipped, found = np.flatnonzero(run.overflow), []
    for change, following in itertools.zip_longest(changes, changes[1:]):
        window = change.before[1]
        if change.kind != "raise" or window is None:
            continue
        place = int(np.searchsorted(run.step, change.step))
        later = skipped[np.searchsorted(skipped, place + 1) :][:1]
        until = int(later[0]) if len(later) else len(run)
        raised_again = following is not None and following.kind == "raise"
        after = until - place
        ends = place + window if raised_again or after > window else until
        if (
            ends >= len(run)
            or not run.position_known[place : ends + 1].all()
            or run.step[ends] - run.step[place] != ends - place
        ):
            continue
        found.append(RaiseOutcome(change.step, window, None if raised_again or after > window else after))
    return found


def climb(scale: NDArray[np.float64], known: NDArray[np.bool_]) -> tuple[int, float, float]:
    """Return what a row of clean steps climbed.

    Args:
        scale (NDArray): float64 of shape (steps,), the scales that the steps used.
        known (NDArray): bool of shape (steps,), whether it is known of each that it was applied.

    Returns:
        tuple of the number of raises, the headroom lost below the largest scale (the sum over all steps, in bits), and
        that scale; 0, 0.0 and nan where a step or a scale is not known.

    Examples:
        >>> climb(np.array([2.0, 2.0, 8.0]), np.array([True, True, True]))
        (1, 4.0, 8.0)
    """
    usable = known & (scale > 0) & np.isfinite(scale)
    if not usable.all() or len(scale) == 0:
        return 0, 0.0, math.nan
    top = float(scale.max())
    return int((np.diff(scale) > 0).sum()), float(np.log2(top / scale).sum()), top


def lifted(trace: Trace) -> Trace:
    """Return a trace of a recorded run in which steps bear what they are taken to have borne.

    Between two overflows the scale only rises. Where a later clean step bore more, so would have the clean steps before
    it, as far as their bounds allow: without that, each scale that a run used would seem to be the highest possible.

    Examples:
        >>> flags = np.array([True, False, False, True])
        >>> scale, known = np.array([8.0, 4.0, 8.0, 16.0]), np.full(4, True)
        >>> trace = RecordedRun("run", (), "jsonl", np.arange(1, 5), scale, flags, known).to_trace("lower_bound")
        >>> trace.ceiling.tolist(), lifted(trace).ceiling.tolist()
        ([4.0, 4.0, 8.0, 8.0], [4.0, 8.0, 8.0, 8.0])
    """
    if trace.loss_scale is None or trace.overflow is None:
        return trace
    ceiling, scale = trace.ceiling.copy(), np.nan_to_num(trace.loss_scale, nan=0.0)
    for first, last in rows_of_flags(~trace.overflow):
        row = slice(first, last + 1)
        ceiling[row] = np.maximum(ceiling[row], np.maximum.accumulate(scale[row][::-1])[::-1])
    return replace(trace, ceiling=ceiling)


def rows_of_flags(flags: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return the first and the last place of each row of flags."""
    return rows_of_numbers(np.flatnonzero(flags).tolist())
