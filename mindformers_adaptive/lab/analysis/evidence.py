"""What a recorded run shows: its figures, and the ceilings that its clean steps speak for."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.lab.traces.recorded_run import RecordedRun
from mindformers_adaptive.lab.traces.trace import Trace, consecutive_runs

__all__ = ["facts_of", "raise_ceilings"]

# The start-up of a run, in steps: published logs lose 16 to 19 of their first 30 to 100.
_START_UP = 100


def facts_of(run: RecordedRun) -> dict[str, Any]:
    """Return what a run did in numbers, ready for JSON.

    Args:
        run (RecordedRun): at least one step, and a known loss scale.

    Returns:
        dict with ``steps``, ``skipped``, ``dropped_by_norm``, ``start_up``, ``loss_scale`` and
        ``overflowed_parameters``, each a dict.

    A number that the log does not give exactly is None, with its bounds in ``..._at_least`` and ``..._at_most``; those
    of ``skipped`` are ``at_least`` and ``at_most``.

    Examples:
        >>> flags = np.array([True, False])
        >>> run = RecordedRun("run", (), "jsonl", np.array([1, 2]), np.array([4.0, 2.0]), flags, np.full(2, True))
        >>> facts = facts_of(run)
        >>> facts["skipped"]["at_least"], facts["skipped"]["at_most"], facts["start_up"]["before_first_applied"]
        (1, 1, 1)
    """
    return {
        "steps": {"count": len(run), "first": int(run.step[0]), "last": int(run.step[-1])},
        "skipped": _skipped(run),
        "dropped_by_norm": {
            "count": len(run.dropped_by_norm),
            "ranges": list(map(tuple, consecutive_runs(np.array(run.dropped_by_norm, dtype=np.int64)).tolist())),
        },
        "start_up": {
            **_bounded("before_first_applied", *_before_first_applied(run)),
            "first_steps": min(_START_UP, len(run)),
            **_bounded("skipped_in_first_steps", *run.skipped_bounds(min(_START_UP, len(run)))),
        },
        "loss_scale": _scales(run),
        "overflowed_parameters": _overflowed_parameters(run),
    }


def _skipped(run: RecordedRun) -> dict[str, Any]:
    fewest, most = run.skipped_bounds()
    known = run.overflow & run.position_known
    runs = consecutive_runs(np.flatnonzero(known))
    longest = runs[np.argmax(runs[:, 1] - runs[:, 0])] if len(runs) else None
    return {
        "count": fewest if fewest == most else None,
        "at_least": fewest,
        "at_most": most,
        "known": int(known.sum()),
        "inferred": fewest - int(known.sum()),
        "ranges": list(map(tuple, consecutive_runs(run.step[known]).tolist())),
        "longest_run": 0 if longest is None else int(longest[1] - longest[0] + 1),
        "longest_run_steps": None if longest is None else tuple(run.step[longest].tolist()),
        **_seconds(run, run.overflow if fewest == most else known),
    }


def _overflowed_parameters(run: RecordedRun) -> dict[str, Any]:
    """Of how many skipped steps the Parameters are known whose gradients overflowed, and how often each did."""
    counts = Counter(name for names in run.overflowed_parameters for name in dict.fromkeys(names))
    return {
        "known_steps": len(run.overflowed_parameters),
        "steps_without": sum(not names for names in run.overflowed_parameters),
        "counts": dict(sorted(counts.items(), key=lambda item: -item[1])),
    }


def _bounded(name: str, fewest: int, most: int) -> dict[str, int | None]:
    return {name: fewest if fewest == most else None, f"{name}_at_least": fewest, f"{name}_at_most": most}


def _before_first_applied(run: RecordedRun) -> tuple[int, int]:
    """How many steps at least and at most were skipped before the first that was applied."""
    surely_skipped, surely_applied = run.overflow & run.position_known, ~run.overflow & run.position_known
    least = len(run) if surely_skipped.all() else int(np.argmin(surely_skipped))
    most = int(np.argmax(surely_applied)) if surely_applied.any() else len(run)
    while run.skipped_bounds(most)[1] < most:
        most = run.skipped_bounds(most)[1]
    return least, most


def _seconds(run: RecordedRun, skipped: NDArray[np.bool_]) -> dict[str, Any]:
    """The time of skipped steps, and for how many of them the log states it."""
    if run.seconds is None:
        return {"seconds_lost": None, "steps_with_seconds": 0}
    lost = run.seconds[skipped]
    known = lost[~np.isnan(lost)]
    return {"seconds_lost": float(known.sum()) if len(known) else None, "steps_with_seconds": len(known)}


def _scales(run: RecordedRun) -> dict[str, Any]:
    """The scales at the ends of lines; the first is that before the first step."""
    starts = np.append(0, run.line_ends()[:-1])
    scales = np.append(run.loss_scale[starts], run.final_loss_scale)
    known = scales[~np.isnan(scales)].tolist() or run.loss_scale[~np.isnan(run.loss_scale)].tolist()
    named = {"first": float(scales[0]), "final": known[-1], "smallest": min(known), "largest": max(known)}
    return {
        name: None if math.isnan(scale) else scale if math.isfinite(scale) else "inf" for name, scale in named.items()
    }


def raise_ceilings(trace: Trace) -> Trace:
    """Return the trace with each clean step's ceiling raised to the largest scale that a later clean step used.

    Only the clean steps before the next overflow count. Without this, each scale that a run used would seem to be the
    highest possible.

    Examples:
        >>> flags = np.array([True, False, False, True])
        >>> scale, known = np.array([8.0, 4.0, 8.0, 16.0]), np.full(4, True)
        >>> trace = RecordedRun("run", (), "jsonl", np.arange(1, 5), scale, flags, known).to_trace("lower_bound")
        >>> trace.ceiling.tolist(), raise_ceilings(trace).ceiling.tolist()
        ([4.0, 4.0, 8.0, 8.0], [4.0, 8.0, 8.0, 8.0])
    """
    if trace.loss_scale is None or trace.overflow is None:
        return trace
    ceiling, scale = trace.ceiling.copy(), np.nan_to_num(trace.loss_scale, nan=0.0)
    for first, last in consecutive_runs(np.flatnonzero(~trace.overflow)).tolist():
        row = slice(first, last + 1)
        ceiling[row] = np.maximum(ceiling[row], np.maximum.accumulate(scale[row][::-1])[::-1])
    return replace(trace, ceiling=ceiling)
