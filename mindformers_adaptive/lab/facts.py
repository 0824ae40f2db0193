"""Facts about a recorded run, as far as its log shows them: skipped steps, start-up, loss scales, room to rise."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.record.run import RecordedRun
from mindformers_adaptive.record.scale_summary import ScaleSummary
from mindformers_adaptive.record.step import LARGEST_STEP
from mindformers_adaptive.record.trace import implied_ceilings
from mindformers_adaptive.text.table import as_power_of_two, counted

# The loss scale could have been higher if the gradients allow at least this many times the scale. The number is 2^3: a
# factor of 2^2 is the margin that the command 'find' leaves, and a factor of 2 is left on top.
_ROOM = 2.0**3


def facts_of(run: RecordedRun, summary: ScaleSummary) -> dict[str, Any]:
    """Return the facts about a run, ready for JSON; see :meth:`mindformers_adaptive.lab.analysis.Analysis.to_dict`."""
    start, unknown = summary.held, np.full(len(run.first), np.nan)
    loss, dropped = run.columns.get("loss", unknown), run.columns.get("dropped_by_norm", unknown) == 1
    finite, bad = loss[np.isfinite(loss)], np.flatnonzero(np.isinf(loss))
    (fewest, most), (least, greatest) = run.skipped_bounds, start.skipped_before
    return {
        "steps": {"count": len(run), "first": int(run.first[0]), "last": int(run.last[-1])},
        "skipped": {
            "count": fewest if fewest == most else None,
            "at_least": fewest,
            "at_most": most if run.is_numbered else None,
            "ranges": _ranges(run.skipped, run, run.first),
        },
        "dropped_by_norm": {"count": int(dropped.sum()), "ranges": _ranges(dropped, run, run.last)},
        "start_up": {
            "a_scale_held": start.answer,
            "held_scale": _for_json(start.scale),
            "held_from_step": start.from_step,
            "highest_held": _for_json(start.highest),
            "before_scale_held": least if least == greatest else None,
            "before_scale_held_at_least": least,
            # Where steps of the log have no number, there is no greatest number.
            "before_scale_held_at_most": greatest if greatest < LARGEST_STEP else None,
        },
        "loss": {
            "first": float(finite[0]) if len(finite) else None,
            "last": float(finite[-1]) if len(finite) else None,
            "stated": int((~np.isnan(loss)).sum()),
            "bad_steps": len(bad),
            "first_bad_step": int(run.last[bad[0]]) if len(bad) else None,
        },
        "loss_scale": _scales(run, summary),
        "shown_by_gradients": shown_by_gradients(run),
    }


def verdict(run: RecordedRun, facts: dict[str, Any], summary: ScaleSummary) -> list[str]:
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
        if at_start and at_start < fewest and start["a_scale_held"] and run.skipped[0] and isinstance(first, float):
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
    if bad["bad_steps"] and bad["stated"] == steps:
        sentences.append(
            f"The loss was inf or NaN in {counted(bad['bad_steps'], 'step')}, first in step {bad['first_bad_step']}."
        )
    elif bad["bad_steps"]:
        lines = "only line" if bad["stated"] == 1 else f"{bad['stated']:,} lines"
        stated = f"the {lines}" if bad["stated"] == 1 else f"{bad['bad_steps']:,} of the {lines}"
        sentences.append(f"The loss was inf or NaN on {stated} with a loss, first for step {bad['first_bad_step']}.")
    room = [] if bad["bad_steps"] else _room(run, facts["shown_by_gradients"], summary.stayed)
    # Where no line counts the overflows, only the falls of the scale show how many there may have been.
    halvings = facts["loss_scale"]["halvings_at_least"]
    fell = f"Its falls add up to at least {counted(halvings, 'halving')}."
    went = summary.path
    return [*sentences, *[f"{went}."] * bool(went), *[fell] * (fewest != most and halvings > fewest), *room]


def _room(run: RecordedRun, shown: dict[str, Any] | None, stayed: bool | None) -> list[str]:
    """Return a list with a sentence if the loss scale could have been higher, else an empty list.

    A rise without overflow shows this, or the size of the gradients.
    """
    first = run.first_loss_scales
    if first is None or first[0] != first[1] or not 0 < first[0] < math.inf:
        return []
    ends_of_climb = np.flatnonzero(~(run.applied & np.append(True, run.follows[1:])))
    climbed = run.scale_ranges[0][: int(ends_of_climb[0]) if len(ends_of_climb) else len(run.after)]
    highest = float(np.max(climbed, initial=0.0, where=np.isfinite(climbed)))
    if highest >= _ROOM * first[0]:
        return [
            f"There was room at the start: the scale rose from {as_power_of_two(first[0])} to "
            f"{as_power_of_two(highest)} before any overflow."
        ]
    # Ignore a constant scale of 1: the run may be in BF16, which needs no loss scaling.
    is_fixed = run.skipped_bounds[1] == 0 and stayed and first[0] != 1
    if shown is None or not is_fixed or shown["steps"] < len(run) or shown["lowest"] < _ROOM * first[0]:
        return []
    bits = math.floor(math.log2(shown["lowest"] / first[0]))
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
        >>> norms = {"gradient_norm": np.array([0.5, 2.0])}
        >>> shown_by_gradients(RecordedRun.of_steps([1, 2], [64.0, 64.0], [False, False], columns=norms))
        {'by': 'norms', 'steps': 2, 'lowest': 32752.0, 'median': 81880.0}
    """
    for name, field in (("largest gradients", "largest_gradient"), ("norms", "gradient_norm")):
        if (gradients := run.columns.get(field)) is None:
            continue
        is_shown = run.applied & (run.lengths == 1) & ~np.isinf(gradients)
        ceilings = implied_ceilings(np.where(is_shown, gradients, np.nan), run.gradient_format)
        known = ceilings[np.isfinite(ceilings)]
        if len(known):
            extremes = {"lowest": float(known.min()), "median": float(np.median(known))}
            return {"by": name, "steps": len(known), **extremes}
    return None


def _ranges(flags: NDArray[np.bool_], run: RecordedRun, first: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return the first and the last step of each series of flagged stretches, which begin at the steps ``first``."""
    goes_on = np.append(run.follows[1:] & flags[:-1] & flags[1:], False)
    begins, ends = flags & ~np.append(False, goes_on[:-1]), flags & ~goes_on
    return list(zip(first[begins].tolist(), run.last[ends].tolist(), strict=True))


def _scales(run: RecordedRun, summary: ScaleSummary) -> dict[str, Any]:
    """Return what the log states of the loss scale: at the start, at the end, and in between."""
    scales, within = run.stated_scales, summary.settled
    low, high = run.first_loss_scales or (math.nan, math.nan)
    ends = (scales.min(), scales.max(), scales[-1]) if len(scales) else (math.nan,) * 3
    final = run.after[-1] if run.is_numbered else math.nan
    named = {"first": low if low == high else math.nan, "first_at_least": low, "first_at_most": high, "final": final}
    named |= dict(zip(("smallest", "largest", "last_stated"), ends, strict=True))
    return {
        **{name: _for_json(scale) for name, scale in named.items()},
        "stayed": summary.stayed,
        "settled": None if within is None else list(within),
        "halvings_at_least": math.floor((run.halvings or 0.0) + 1e-3),
    }


def _for_json(scale: float | None) -> float | str | None:
    """Return a loss scale as JSON has it: None where it is not stated, and inf as text."""
    if scale is None or math.isnan(scale):
        return None
    return float(scale) if math.isfinite(scale) else "inf"
