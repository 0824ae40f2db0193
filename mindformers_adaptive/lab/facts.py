"""Facts about a recorded run: skipped steps, start-up, loss scales, and the loss scales that gradients allowed."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mindformers_adaptive.record.run import RecordedRun
from mindformers_adaptive.record.scale_summary import held_at, path_in_words
from mindformers_adaptive.record.thresholds import HELD
from mindformers_adaptive.record.trace import consecutive_runs, implied_ceilings
from mindformers_adaptive.text.table import as_power_of_two, counted

__all__ = ["StartUp", "facts_of", "shown_by_gradients", "start_up_of", "verdict"]

# The number of first steps that count as a run's start-up. In published logs, 16 to 19 of the first 30 to 100 steps
# were skipped.
_START_UP = 100

# The loss scale could have been higher if the gradients allow at least this many times the scale. The number is 2^3: a
# factor of 2^2 is the margin that the command 'find' leaves, and a factor of 2 is left on top.
_ROOM = 2.0**3


class StartUp(NamedTuple):
    """The start-up of a run: the steps before the first loss scale that held (20 steps without overflow).

    Attributes:
        steps (int): the number of these steps: 0 if the first scale held, all steps of the run if no scale held.
        scale (float, optional): the highest scale that held and is below all scales that overflowed earlier; None if
            there is no such scale.
        first_step (int, optional): the number of the first step at which that scale held.
        fewest (int), most (int): bounds on how many of the start-up's steps were skipped.
        highest (float, optional): the highest scale that ever held, even after it had overflowed; None if none held.
    """

    steps: int
    scale: float | None
    first_step: int | None
    fewest: int
    most: int
    highest: float | None


def start_up_of(run: RecordedRun) -> StartUp:
    """Return the start-up of a run: the steps before the first loss scale that held (20 steps without overflow).

    The run must have at least one step.

    Examples:
        >>> flags = np.arange(100) < 16
        >>> scale = 2.0 ** np.maximum(32 - np.arange(100), 16)
        >>> start_up_of(RecordedRun("run", (), "jsonl", np.arange(1, 101), scale, flags, np.full(100, True)))
        StartUp(steps=16, scale=65536.0, first_step=17, fewest=16, most=16, highest=65536.0)
    """
    scale, steps = run.filled_loss_scale, None
    lowest_overflow = np.minimum.accumulate(np.where(run.overflow & ~np.isnan(run.loss_scale), scale, np.inf))
    best, highest, first_step = 0.0, 0.0, None
    for first, last in held_at(run):
        steps = first if steps is None else steps
        held = np.lib.stride_tricks.sliding_window_view(scale[first : last + 1], HELD).min(axis=1)
        highest = max(highest, float(held.max()))
        held = np.where(held < lowest_overflow[first], held, 0.0)
        if held.max() > best:
            best, first_step = float(held.max()), int(run.step[first + int(np.argmax(held))])
    steps, ends = len(run) if steps is None else steps, run.line_ends()
    # If a log line stands for several steps, the number of skipped steps is known only after the last of these steps.
    end = steps if steps == 0 or steps in ends else int(ends[np.searchsorted(ends, steps)])
    return StartUp(steps, best or None, first_step, *run.skipped_bounds(end), highest or None)


def facts_of(run: RecordedRun) -> dict[str, Any]:
    """Return the facts about a run, ready for JSON; see :meth:`mindformers_adaptive.lab.analysis.Analysis.to_dict`."""
    start_up, dropped, loss = start_up_of(run), run.steps_where("dropped_by_norm"), run.column("loss")
    loss = np.empty(0) if loss is None else loss
    finite, bad = loss[np.isfinite(loss)], np.flatnonzero(np.isinf(loss))
    first_steps = min(_START_UP, len(run))
    return {
        "steps": {"count": len(run), "first": int(run.step[0]), "last": int(run.step[-1])},
        "skipped": _skipped(run),
        "dropped_by_norm": {"count": len(dropped), "ranges": _ranges(dropped)},
        "start_up": {
            "a_scale_held": start_up.highest is not None,
            **_bounded("before_first_applied", *_before_first_applied(run)),
            **_bounded("before_scale_held", start_up.fewest, min(start_up.most, len(run))),
            "first_steps": first_steps,
            **_bounded("skipped_in_first_steps", *np.minimum(run.skipped_bounds(first_steps), first_steps).tolist()),
        },
        "loss": {
            "first": float(finite[0]) if len(finite) else None,
            "last": float(finite[-1]) if len(finite) else None,
            "bad_steps": len(bad),
            "first_bad_step": int(run.step[bad[0]]) if len(bad) else None,
        },
        "loss_scale": _scales(run),
        "shown_by_gradients": shown_by_gradients(run),
    }


def verdict(run: RecordedRun, facts: dict[str, Any]) -> list[str]:
    """Return in a few sentences how many steps were skipped, where the loss scale went, and if it has room to rise."""
    steps, skipped, start, bad = facts["steps"]["count"], facts["skipped"], facts["start_up"], facts["loss"]
    fewest, most = skipped["at_least"], skipped["at_most"]
    were = "was" if fewest == 1 else "were"
    if most is None:
        said = f"At least {counted(fewest, 'step')} {were} skipped. The log does not number all of its steps, so it is "
        said += "not known how many there were."
    elif most == 0:
        said = f"No step of {steps:,} was skipped."
    elif fewest == most:
        at_start, first = start["before_scale_held"], facts["loss_scale"]["first"]
        where = ""
        if at_start and run.overflow[0] and at_start < fewest and isinstance(first, float):
            where = f": {at_start} at the start, because {as_power_of_two(first)} was too high, and "
            where += f"{fewest - at_start} later"
        said = f"{fewest:,} of {counted(steps, 'step')} {were} skipped ({fewest / steps:.1%}){where}."
    elif fewest == 0 and most == steps:
        said = f"The log does not show how many of its {counted(steps, 'step')} were skipped."
    else:
        least = f"At least {fewest:,} and at most" if fewest else "At most"
        said = f"{least} {most:,} of {counted(steps, 'step')} were skipped "
        said += f"({fewest / steps:.1%} to {most / steps:.1%})."
    sentences = [said]
    if bad["bad_steps"]:
        sentences.append(
            f"The loss was inf or NaN in {counted(bad['bad_steps'], 'step')}, first in step {bad['first_bad_step']}."
        )
    room = [] if bad["bad_steps"] else _room(run, facts["shown_by_gradients"])
    # Where no line counts the overflows, only the falls of the scale show how many there may have been.
    falls = [phase for phase in facts["loss_scale"].get("phases", ()) if phase["kind"] in ("drop", "fall")]
    halvings = math.floor(sum(math.log2(phase["scale_before"] / phase["scale_after"]) for phase in falls) + 1e-3)
    fell = f"Its falls add up to at least {counted(halvings, 'halving')}."
    went = path_in_words(run, as_power_of_two)
    path = [f"The loss scale {went}."] if went else []
    return [*sentences, *path, *[fell] * (fewest != most and halvings > fewest), *room]


def _room(run: RecordedRun, shown: dict[str, Any] | None) -> list[str]:
    """Return a list with a sentence if the loss scale could have been higher, else an empty list.

    A rise without overflow shows this, or the size of the gradients.
    """
    scale = run.filled_loss_scale
    overflows = np.flatnonzero(run.overflow)
    climbed = scale[: int(overflows[0]) if len(overflows) else len(scale)]
    if len(climbed) and climbed.max() >= _ROOM * scale[0]:
        return [
            f"There was room at the start: the scale rose from {as_power_of_two(float(scale[0]))} to "
            f"{as_power_of_two(float(climbed.max()))} before any overflow."
        ]
    # Ignore a constant scale of 1: the run may be in BF16, which needs no loss scaling.
    is_fixed = not len(overflows) and scale.min() == scale.max() != 1
    if shown is None or not is_fixed or shown["lowest"] < _ROOM * scale[0]:
        return []
    bits = math.floor(math.log2(shown["lowest"] / scale[0]))
    return [f"By the {shown['by']}, there is room for {bits} bits more; values between the layers may leave less."]


def shown_by_gradients(run: RecordedRun) -> dict[str, Any] | None:
    """Return the loss scales that the gradients of the applied steps allowed, ready for JSON; None if none is known.

    If the largest gradients are not known, the gradient norm is used as an upper bound on them.

    Args:
        run (RecordedRun): any run.

    Returns:
        dict with ``by``, "largest gradients" or "norms"; ``steps``, the number of applied steps with known gradients;
        ``lowest`` and ``median`` of the scales that they allow (for norms, lower bounds).

    Examples:
        >>> flags = np.array([False, False])
        >>> arrays = np.array([1, 2]), np.array([64.0, 64.0]), flags, ~flags
        >>> run = RecordedRun("run", (), "jsonl", *arrays, {"gradient_norm": np.array([0.5, 2.0])})
        >>> shown_by_gradients(run)
        {'by': 'norms', 'steps': 2, 'lowest': 32752.0, 'median': 81880.0}
    """
    for name, field in (("largest gradients", "largest_gradient"), ("norms", "gradient_norm")):
        if (gradients := run.column(field)) is None:
            continue
        ceilings = implied_ceilings(
            np.where(run.overflow | np.isinf(gradients), np.nan, gradients), run.gradient_format
        )
        known = ceilings[np.isfinite(ceilings)]
        if len(known):
            extremes = {"lowest": float(known.min()), "median": float(np.median(known))}
            return {"by": name, "steps": len(known), **extremes}
    return None


def _ranges(steps: ArrayLike) -> list[tuple[int, int]]:
    """Return the first and the last step of each group of consecutive steps."""
    return [(first, last) for first, last in consecutive_runs(steps).tolist()]


def _skipped(run: RecordedRun) -> dict[str, Any]:
    fewest, most = run.skipped_bounds()
    known = run.overflow & run.position_known
    runs = consecutive_runs(np.flatnonzero(known))
    longest = runs[np.argmax(runs[:, 1] - runs[:, 0])] if len(runs) else None
    seconds = run.column("seconds")
    seconds = np.empty(0) if seconds is None else seconds[run.overflow if fewest == most else known]
    stated = seconds[~np.isnan(seconds)]
    return {
        "count": fewest if fewest == most else None,
        "at_least": fewest,
        "at_most": most if run.is_numbered else None,
        "known": int(known.sum()),
        "inferred": fewest - int(known.sum()),
        "ranges": _ranges(run.step[known]),
        "longest_run": 0 if longest is None else int(longest[1] - longest[0] + 1),
        "longest_run_steps": None if longest is None else tuple(run.step[longest].tolist()),
        "seconds_lost": float(stated.sum()) if len(stated) else None,
        "steps_with_seconds": len(stated),
    }


def _bounded(name: str, fewest: int, most: int) -> dict[str, int | None]:
    return {name: fewest if fewest == most else None, f"{name}_at_least": fewest, f"{name}_at_most": most}


def _before_first_applied(run: RecordedRun) -> tuple[int, int]:
    """Return the fewest and the most steps that may have been skipped before the first applied step."""
    surely_skipped, surely_applied = run.overflow & run.position_known, ~run.overflow & run.position_known
    least = len(run) if surely_skipped.all() else int(np.argmin(surely_skipped))
    most = int(np.argmax(surely_applied)) if surely_applied.any() else len(run)
    while run.skipped_bounds(most)[1] < most:
        most = run.skipped_bounds(most)[1]
    return least, most


def _scales(run: RecordedRun) -> dict[str, Any]:
    """Return the first, final, smallest and largest of the loss scales at the start and after each log line."""
    starts = np.append(0, run.line_ends()[:-1])
    scales = np.append(run.loss_scale[starts], run.final_loss_scale)
    known: NDArray[np.float64] = scales[~np.isnan(scales)]
    if math.isnan(run.final_loss_scale):
        known = np.append(known, run.filled_loss_scale[-1])
    named = {"first": scales[0], "final": known[-1], "smallest": known.min(), "largest": known.max()}
    low, high = run.first_loss_scales() or (math.nan, math.nan)
    return {
        name: None if math.isnan(scale) else float(scale) if math.isfinite(scale) else "inf"
        for name, scale in {**named, "first_at_least": low, "first_at_most": high}.items()
    }
