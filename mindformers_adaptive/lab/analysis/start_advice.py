"""Advice on the loss scale that a run started from."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.lab.analysis.advice import TOLERABLE, Advice, lost
from mindformers_adaptive.lab.replay.measures import (
    DEFAULT_EXCHANGE_RATE,
    LARGEST_LOSS_SCALE,
    SMALLEST_LOSS_SCALE,
    measure,
)
from mindformers_adaptive.lab.traces.recorded_run import RecordedRun
from mindformers_adaptive.lab.traces.trace import Trace, consecutive_runs
from mindformers_adaptive.rules.ladder import DEFAULT_MIN_SCALE_WINDOW
from mindformers_adaptive.text.table import as_power_of_two

__all__ = ["start_advice", "unseen_start_advice"]

# Where Megatron-LM, DeepSpeed and MindFormers start by default.
_LARGEST_START = 2.0**32

# A scale held if it bore as many clean steps in a row as MindFormers' smallest window.
_HELD = DEFAULT_MIN_SCALE_WINDOW


def start_advice(run: RecordedRun, trace: Trace, scale: NDArray[np.float64]) -> Advice | None:
    """Judge the scale that the run first held, or climbed to before any overflow, as the scale to start from."""
    clean = consecutive_runs(np.flatnonzero(~run.overflow)).tolist()
    held = (
        first
        for first, last in clean
        if last - first + 1 >= _HELD or last == len(run) - 1 or scale[first : last + 2].max() > scale[first]
    )
    reached = next(held, 0)
    if reached == 0 and clean and clean[0][0] == 0:
        reached = int(np.argmax(scale[: clean[0][1] + 1]))
    shown = trace.largest_gradient is not None and not run.overflow[reached]
    # Gradients show what the first steps bear; a scale that follows them begins well below.
    lowest = float(trace.ceiling[reached : reached + _HELD].min()) if shown else 0.0
    better, first = 2.0 ** math.floor(math.log2(lowest)) if lowest > 0 else float(scale[reached]), float(scale[0])
    if better == first or not SMALLEST_LOSS_SCALE <= better <= LARGEST_LOSS_SCALE:
        return None
    from_there = np.append(np.full(reached, better), scale[reached:])
    as_recorded, instead = (measure(trace, np.append(scales, scale[-1])) for scales in (scale, from_there))
    saved = lost(as_recorded) - lost(instead)
    if saved <= TOLERABLE:
        return None
    change = _start_at(better, None if math.isnan(run.loss_scale[0]) else first)
    figures = {"scale": better, "reached_at": int(run.step[reached]), "saves": saved}
    if better < first:
        place = f"{as_power_of_two(better)}, from step {run.step[reached]} on"
        what = f"gradients allowed {place}" if shown else f"{place}, was the first scale that held"
        reason = _why_lower(run, reached, what, figures)
        return Advice("start lower", change, reason, figures, {"loss_scale_value": better})
    figures["raises"] = int((np.diff(scale[: reached + 1]) > 0).sum())
    figures["headroom_lost"] = float(np.log2(better / scale[:reached]).sum())
    reason = (
        f"{figures['raises']} raises without an overflow led to {as_power_of_two(better)}, at step "
        f"{run.step[reached]}. The headroom lost on the way is worth {saved:.0f} skipped steps, at "
        f"{1000 / DEFAULT_EXCHANGE_RATE:.0f} bits for a step."
    )
    return Advice("start higher", change, reason, figures, {"loss_scale_value": better})


def unseen_start_advice(run: RecordedRun, scale: float) -> Advice | None:
    """The advice for a log whose first line stands for several steps: what they started from is not in it."""
    steps = int(run.line_ends()[0])
    fewest, most = run.skipped_bounds(steps)
    drops = math.log(_LARGEST_START / scale, run.scale_factor) if 0 < scale < _LARGEST_START else 0
    if run.step[0] != 1 or not math.isnan(run.loss_scale[0]) or min(most, drops) <= TOLERABLE:
        return None
    return Advice(
        "start lower",
        f"If the run started above {as_power_of_two(scale)}: {_start_at(scale, None)}",
        f"The first line of the log stands for steps 1 to {steps}. It does not show the scale that they started from, "
        f"nor which of them were skipped: at least {fewest} and at most {most}.",
        {"scale": scale, "reached_at": int(run.step[steps - 1]), "saves_skipped_steps": fewest, "saves_at_most": most},
        {"loss_scale_value": scale},
    )


def _why_lower(run: RecordedRun, reached: int, what: str, figures: dict[str, Any]) -> str:
    """The reason for a lower start; adds its figures."""
    ends = run.line_ends()
    # Where a line stands for several steps, what is known of them is known at its end.
    end = reached if reached in ends else int(ends[np.searchsorted(ends, reached)])
    fewest, most = run.skipped_bounds(end)
    known = int((run.overflow & run.position_known)[:end].sum())
    figures |= {"saves_skipped_steps": fewest, "saves_at_most": most, "known": known}
    inferred = "" if known == fewest else f" ({fewest - known} of them inferred)"
    count = f"{fewest}{inferred}" if fewest == most else f"At least {fewest}{inferred} and at most {most}"
    reason = f"{count} steps were skipped before {what}. If they could have used it too, starting there avoids them."
    if run.step[0] == 1:
        return reason
    return (
        f"{reason} The log begins at step {run.step[0]}: if the run was resumed there without its loss scale, resume "
        "the loss scale too."
    )


def _start_at(scale: float, instead_of: float | None) -> str:
    value = int(scale) if scale.is_integer() else scale
    instead = "" if instead_of is None else f" instead of {as_power_of_two(instead_of)}"
    return f"Start at {as_power_of_two(scale)} (loss_scale_value: {value}){instead}."
