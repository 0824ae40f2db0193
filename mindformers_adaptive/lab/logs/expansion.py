"""From the lines of a log to its steps: which scale each used, whether it overflowed, and what of that is known.

Which of the steps were skipped is a guess that agrees with this. Skipped steps come first, at the scale that the one
before left; more skips than drops were tolerated at the scale before; where the scale did not fall, it was raised once
before them; other raises come last. The scale before the first line, and after a gap or a restart, is unknown. Where
the number of skips is exact, it is computed back from the scale after the line, by a factor for each skip but never
beyond 2^32, the largest scale that Megatron-LM, DeepSpeed and MindFormers start from by default.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mindformers_adaptive.lab.logs.intervals import Interval, bounds_by_rule, infer_scale_factor, intervals_of
from mindformers_adaptive.lab.logs.reader import LogEntry
from mindformers_adaptive.lab.policies import Policy

__all__ = ["expand"]

_LARGEST_START = 2.0**32
_NEAR = 1e-3  # printed scales are rounded
_NAN = math.nan


def expand(entries: Sequence[LogEntry], rule: Policy | None, notes: list[str]) -> dict[str, Any]:
    """Return what the lines of a log tell of its steps.

    Args:
        entries (Sequence[LogEntry]): steps strictly increasing, at least one.
        rule (Policy, optional): the rule that the run followed, with the state before step 1.
        notes (list[str]): gets a sentence for what had to be inferred, is missing or contradicts itself.

    Returns:
        dict of arguments for :class:`~mindformers_adaptive.lab.traces.recorded_run.RecordedRun`: all that are about
        steps.

    Raises:
        ValueError: if the lines do not follow the rule.
    """
    factor, factor_bound = infer_scale_factor(entries)
    first_scale = _NAN if rule is None else rule.loss_scale
    intervals = intervals_of(entries, factor, factor_bound, first_scale, notes)
    if rule is not None and not rule.moves_by_one_factor:
        # What the scale does tells nothing of skipped steps: only flags count.
        factor_bound, intervals, rule = math.inf, list(map(_by_flag, intervals)), None
    counts = np.array([interval.steps for interval in intervals])
    ends = np.cumsum(counts)
    bounds = np.cumsum([(interval.fewest, interval.most) for interval in intervals], axis=0)
    if rule is not None:
        bounds = np.array(bounds_by_rule(rule, intervals, notes))
    overflow: list[bool] = []
    loss_scale: list[float] = []
    position_known: list[bool] = []
    after = _NAN
    for interval in intervals:
        entry = interval.entry
        if math.isnan(interval.before) and math.isnan(entry.next_loss_scale):
            # A line that names no scale leaves the one that the lines before had led to.
            interval = interval._replace(before=after)
        after = _scale_after(interval, factor)
        flags, scales = _guessed_path(interval, after, factor, notes)
        overflow += flags
        loss_scale += scales
        known = entry.placed and interval.fewest == interval.most and interval.fewest in (0, interval.steps)
        position_known += [known] * (interval.steps - 1) + [known or entry.overflow is not None]

    def at_last_steps(values: ArrayLike) -> NDArray[np.float64] | None:
        array = np.full(len(overflow), _NAN)
        array[ends - 1] = values
        return _or_none(array)

    return {
        "step": np.arange(len(overflow)) + np.repeat([entry.step for entry in entries] - ends + 1, counts),
        "loss_scale": np.array(loss_scale, dtype=np.float64),
        "overflow": np.array(overflow),
        "position_known": np.array(position_known),
        "loss": at_last_steps([entry.loss for entry in entries]),
        "seconds": _or_none(np.repeat([entry.seconds for entry in entries], counts)),
        "largest_gradient": at_last_steps([entry.largest_gradient for entry in entries]),
        "overflowed_parameters": tuple(
            entry.overflowed_parameters for entry in entries if entry.overflowed_parameters is not None
        ),
        "dropped_by_norm": tuple(entry.step for entry in entries if entry.dropped_by_norm),
        "smallest_window": min((entry.scale_window for entry in entries if entry.scale_window >= 1), default=_NAN),
        "lines": np.column_stack([ends, bounds]),
        "final_loss_scale": after,
        "scale_factor": factor,
        "factor_bound": factor_bound,
    }


def _or_none(array: NDArray[np.float64]) -> NDArray[np.float64] | None:
    return None if np.isnan(array).all() else array


def _by_flag(interval: Interval) -> Interval:
    if interval.steps == 1:
        return interval
    overflowed, clean = interval.entry.overflow is True, interval.entry.overflow is False
    return interval._replace(fewest=int(overflowed), most=interval.steps - clean, guess=int(overflowed))


def _scale_after(interval: Interval, factor: float) -> float:
    entry = interval.entry
    if not math.isnan(entry.next_loss_scale):
        return entry.next_loss_scale
    if not entry.overflows:
        return interval.before
    unlisted = max(interval.guess - len(entry.overflows), 0)
    return entry.overflows[-1].next_loss_scale / factor**unlisted


def _guessed_path(interval: Interval, after: float, factor: float, notes: list[str]) -> tuple[list[bool], list[float]]:
    """Which steps of an interval overflowed, and the scale that each used, as far as that is a guess."""
    entry, steps, before, count = interval.entry, interval.steps, interval.before, interval.guess
    last_overflowed = entry.overflow is True
    first = count - last_overflowed
    overflow = [True] * first + [False] * (steps - count) + [True] * last_overflowed
    if not math.isnan(entry.loss_scale):
        return overflow, [entry.loss_scale] * steps
    if entry.overflows:
        return overflow, _listed_scales(interval, after, factor, notes)
    low, high = (before / factor, before) if count else (before, before * factor)
    jumps = steps == 1 and not math.isnan(before) and not low * (1 - _NEAR) <= after <= high * (1 + _NEAR)
    if jumps or (math.isnan(before) and not math.isnan(after)):
        why = f"the scale {after:g} does not follow from {before:g} on the line before; " if jumps else ""
        which = f"step {entry.step}" if steps == 1 else f"steps {entry.step - steps + 1} to {entry.step}"
        notes.append(f"{entry.where}: {why}the scale used in {which} is inferred from the one after.")
        if steps > 1 and interval.fewest != interval.most:
            at_last = after * factor if last_overflowed else after
            return overflow, [_NAN] * (steps - 1) + [at_last if entry.overflow is not None else _NAN]
        highest = max(_LARGEST_START, after)
        left = accumulate(
            reversed(overflow), lambda scale, over: min(scale * factor, highest) if over else scale, initial=after
        )
        return overflow, list(left)[:0:-1]
    if not (0 < before < math.inf and 0 < after < math.inf):
        return overflow, [before] * steps
    fall = round(math.log2(before / after) / math.log2(factor)) if before != after else 0
    raised_before = int(fall <= 0 < count and count + 1 - fall <= steps)
    drops = max(fall, raised_before)
    tolerated = count - min(drops, count)
    changes = [0] * tolerated + [-1] * (count - tolerated)
    at_end = [changes.pop()] if last_overflowed else []
    raises = min(drops - fall, steps - count)
    front = min(raised_before, raises) if changes else 0
    overflow = [False] * front + [True] * len(changes) + [False] * (steps - count - front) + [True] * len(at_end)
    changes = [1] * front + changes + [0] * (steps - count - raises) + [1] * (raises - front) + at_end
    return overflow, [before * factor**exponent for exponent in accumulate(changes[:-1], initial=0)]


def _listed_scales(interval: Interval, after: float, factor: float, notes: list[str]) -> list[float]:
    """The scales where the skipped steps have lines of their own, and the applied ones follow."""
    entry, count = interval.entry, interval.guess
    listed = [overflow.loss_scale for overflow in entry.overflows[:count]]
    unlisted = count - len(listed)
    if unlisted:
        notes.append(
            f"{entry.where}: {unlisted} of {count} skipped steps have no line of their own; the scale is taken to have "
            "gone on falling."
        )
    falling = [entry.overflows[-1].next_loss_scale / factor**place for place in range(unlisted)]
    return [*listed, *falling, *[after] * (interval.steps - count)]
