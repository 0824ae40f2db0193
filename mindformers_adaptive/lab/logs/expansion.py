"""From the lines of a log to its steps: which scale each used, whether it overflowed, and what of that is known.

Which of the steps were skipped is a guess that agrees with this. Skipped steps come first, at the scale that the one
before left; more skips than drops were tolerated at the scale before; where the scale did not fall, it was raised once
before them; other raises come last. The scale before the first line, and after a gap or a restart, is unknown. Where
the number of skips is exact, it is that after it, taken back by a factor for each skip but never above 2^32, the
largest scale that Megatron-LM, DeepSpeed and MindFormers start from by default.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from mindformers_adaptive.lab.logs.entries import LogEntry
from mindformers_adaptive.lab.logs.intervals import Interval, infer_scale_factor, intervals_of
from mindformers_adaptive.lab.logs.rule_bounds import bounds_by_rule
from mindformers_adaptive.lab.policies import Policy

__all__ = ["Steps", "expand"]

_LARGEST_START = 2.0**32
_NEAR = 1e-3  # printed scales are rounded
_NAN = math.nan


class Steps(NamedTuple):
    """The steps of a log.

    Attributes:
        step, loss_scale, overflow, position_known, loss, seconds, largest_gradient (list): an element for each step.
        overflowed_parameters (list[tuple[str, ...]]): for each step that names them.
        lines (list[tuple[int, int, int]]): for each line the number of steps up to its last one, and the fewest and the
            most that may have been skipped up to there.
        final_loss_scale (float): the scale after the last step.
        scale_factor (float): the commonest factor between the scales of neighbouring steps, or what the log allows.
        factor_bound (float): the largest that the log allows.
        notes (list[str]): what had to be inferred, and where lines are missing or contradict each other.
    """

    step: list[int]
    loss_scale: list[float]
    overflow: list[bool]
    position_known: list[bool]
    loss: list[float]
    seconds: list[float]
    largest_gradient: list[float]
    overflowed_parameters: list[tuple[str, ...]]
    lines: list[tuple[int, int, int]]
    final_loss_scale: float
    scale_factor: float
    factor_bound: float
    notes: list[str]


def expand(entries: Sequence[LogEntry], rule: Policy | None = None) -> Steps:
    """Return the steps of lines.

    Args:
        entries (Sequence[LogEntry]): steps strictly increasing, at least one.
        rule (Policy, optional): the rule that the run followed, with the state before step 1.

    Raises:
        ValueError: if the lines do not follow the rule.
    """
    notes: list[str] = []
    factor, factor_bound = infer_scale_factor(entries)
    first_scale = _NAN if rule is None else rule.loss_scale
    intervals = intervals_of(entries, factor, factor_bound, first_scale, notes)
    if rule is not None and not rule.moves_by_one_factor:
        # What the scale does tells nothing of skipped steps: only flags count.
        factor_bound, intervals = math.inf, list(map(_by_flag, intervals))
    lines = bounds_by_rule(rule, intervals, notes) if rule is not None and rule.moves_by_one_factor else None
    steps = Steps([], [], [], [], [], [], [], [], [], _NAN, factor, factor_bound, notes)
    after, fewest, most = _NAN, 0, 0
    for interval in intervals:
        entry, count = interval.entry, interval.steps
        # A line that names no scale leaves the one that the lines before had led to.
        before = after if math.isnan(interval.before) and math.isnan(entry.next_loss_scale) else interval.before
        interval = interval._replace(before=before)
        after = _scale_after(interval, factor)
        overflow, scales = _guessed_path(interval, after, factor, notes)
        known = entry.placed and interval.fewest == interval.most and interval.fewest in (0, count)
        steps.step.extend(range(entry.step - count + 1, entry.step + 1))
        steps.overflow.extend(overflow)
        steps.loss_scale.extend(scales)
        steps.position_known.extend([known] * (count - 1) + [known or entry.overflow is not None])
        steps.loss.extend([_NAN] * (count - 1) + [entry.loss])
        steps.seconds.extend([entry.seconds] * count)
        steps.largest_gradient.extend([_NAN] * (count - 1) + [entry.largest_gradient])
        if entry.overflowed_parameters is not None:
            steps.overflowed_parameters.append(entry.overflowed_parameters)
        fewest, most = fewest + interval.fewest, most + interval.most
        steps.lines.append((len(steps.step), fewest, most))
    return steps._replace(final_loss_scale=after, lines=lines or steps.lines)


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
    if steps == 1:
        return overflow, [_scale_used(entry, before, bool(count), factor, notes)]
    if math.isnan(before):
        notes.append(
            f"{entry.where}: the scales used in steps {entry.step - steps + 1} to {entry.step} are inferred from the "
            "one after them."
        )
        if interval.fewest != interval.most:
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
    at_end = [(True, changes.pop())] if last_overflowed else []
    raises = [(False, 1)] * min(drops - fall, steps - count)
    front = raises[:raised_before] if changes else []
    path = [*front, *((True, change) for change in changes)]
    back = [*raises[len(front) :], *at_end]
    path += [(False, 0)] * (steps - len(path) - len(back)) + back
    exponents = accumulate((change for _, change in path[:-1]), initial=0)
    return [flag for flag, _ in path], [before * factor**exponent for exponent in exponents]


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


def _scale_used(entry: LogEntry, before: float, overflow: bool, factor: float, notes: list[str]) -> float:
    """The scale of a single step."""
    after = entry.next_loss_scale
    if math.isnan(after):
        return before
    if not math.isnan(before):
        low, high = (before / factor, before) if overflow else (before, before * factor)
        if low * (1 - _NEAR) <= after <= high * (1 + _NEAR):
            return before
        notes.append(
            f"{entry.where}: the scale {after:g} does not follow from {before:g} on the line before; the scale used in "
            "this step is inferred."
        )
    else:
        notes.append(f"{entry.where}: the scale used in step {entry.step} is inferred from the one after it.")
    return min(after * factor, max(_LARGEST_START, after)) if overflow else after
