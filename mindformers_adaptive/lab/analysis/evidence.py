"""What a recorded run shows: its figures, and the ceilings that its clean steps speak for."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from mindformers_adaptive.lab.traces.recorded_run import RecordedRun
from mindformers_adaptive.lab.traces.trace import Trace, consecutive_runs

__all__ = ["facts_of", "lifted"]

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
        "start_up": {
            "before_first_applied": len(run) if run.overflow.all() else int(np.argmin(run.overflow)),
            "first_steps": min(_START_UP, len(run)),
            "skipped_in_first_steps": int(run.overflow[:_START_UP].sum()),
        },
        "loss_scale": _scales(run),
    }


def _skipped(run: RecordedRun) -> dict[str, Any]:
    runs = consecutive_runs(np.flatnonzero(run.overflow))
    longest = runs[np.argmax(runs[:, 1] - runs[:, 0])] if len(runs) else None
    return {
        "count": run.skipped_steps,
        "known": int((run.overflow & run.position_known).sum()),
        "inferred": int((run.overflow & ~run.position_known).sum()),
        "ranges": list(map(tuple, consecutive_runs(run.step[run.overflow]).tolist())),
        "longest_run": 0 if longest is None else int(longest[1] - longest[0] + 1),
        "longest_run_steps": None if longest is None else tuple(run.step[longest].tolist()),
        **_seconds(run),
    }


def _seconds(run: RecordedRun) -> dict[str, Any]:
    """The time of the skipped steps, and for how many of them the log states it."""
    if run.seconds is None:
        return {"seconds_lost": None, "steps_with_seconds": 0}
    lost = run.seconds[run.overflow]
    known = lost[~np.isnan(lost)]
    return {"seconds_lost": float(known.sum()) if len(known) else None, "steps_with_seconds": len(known)}


def _scales(run: RecordedRun) -> dict[str, Any]:
    known = run.loss_scale[~np.isnan(run.loss_scale)].tolist()
    named = {"first": known[0], "final": known[-1], "smallest": min(known), "largest": max(known)}
    return {name: None if math.isinf(scale) else scale for name, scale in named.items()}


def lifted(trace: Trace) -> Trace:
    """Return the trace with each clean step's ceiling raised to the largest scale that a later clean step used.

    Only the clean steps before the next overflow count. Without this, each scale that a run used would seem to be the
    highest possible.

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
    for first, last in consecutive_runs(np.flatnonzero(~trace.overflow)).tolist():
        row = slice(first, last + 1)
        ceiling[row] = np.maximum(ceiling[row], np.maximum.accumulate(scale[row][::-1])[::-1])
    return replace(trace, ceiling=ceiling)
