"""From the lines of a log to its steps: which scale each used, whether it overflowed, and what of that is known.

A line stands for one step or, in sink mode and where only every k-th step is printed, for several. It states the scale
after its last step and, in MindFormers' logs, the flag of that step. From two such lines, N steps apart, follows:

- Where the scale fell by d factors, at least d steps were skipped. A last step that overflowed is at least one.
- Where it rose by r factors, at least r steps were clean, for a raise follows a clean step. A last step that did not
  overflow is at least one. Any other step may have been skipped without a trace: a raise may follow each drop where the
  window is 1, a tolerated overflow (hysteresis) leaves the scale as it is, and so does one at the floor.

This holds for every rule that changes the scale by one factor and at most once a step: this package's, MindSpore's and
MindFormers' cells, Megatron-LM's, with any window, hysteresis, floor and cap. The factor is the one between lines that
are one step apart. Where no lines are, the bounds are those of the largest factor of which all scales are powers, times
a constant; one change that does not fit may have led by way of a floor of up to 2^14. The guess is 2, where it fits. A
printed number of skipped steps is exact, unless a fall of the scale shows that the log does not count them.

Which of the steps were skipped is a guess that agrees with this. Skipped steps come first, at the scale that the one
before left; more skips than drops were tolerated at the scale before; where the scale did not fall, it was raised once
before them; other raises come last. The scale before the first line, and after a gap or a restart, is that after it,
taken back by a factor for each skip but never above 2^32, the largest scale that Megatron-LM, DeepSpeed and MindFormers
start from by default.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from mindformers_adaptive.lab.logs.entries import LONGEST_INTERVAL, LogEntry

__all__ = ["Interval", "Steps", "expand"]

_LARGEST_START = 2.0**32
_NEAR = 1e-3  # printed scales are rounded
_SAME_BITS = 1e-4  # the same in bits: eight digits are printed, and float32 rounds at each change
_FEWEST_BITS = 0.05  # no scale factor is this near to 1
_LARGEST_FLOOR_BITS = 14.0  # no floor is above 2^14
_NAN = math.nan


class Interval(NamedTuple):
    """The steps that one line speaks for.

    Attributes:
        entry (LogEntry): the line.
        steps (int): how many there are.
        before (float): the scale before them, nan where it is unknown.
        fewest (int), most (int): how many of them were skipped.
        guess (int): the number of skips to assume.
    """

    entry: LogEntry
    steps: int
    before: float
    fewest: int
    most: int
    guess: int


class Steps(NamedTuple):
    """The steps of a log.

    Attributes:
        step, loss_scale, overflow, position_known, loss, seconds (list): an element for each step.
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
    lines: list[tuple[int, int, int]]
    final_loss_scale: float
    scale_factor: float
    factor_bound: float
    notes: list[str]


def expand(entries: Sequence[LogEntry]) -> Steps:
    """Return the steps of lines, whose step numbers increase; at least one line."""
    notes: list[str] = []
    factor, largest_factor = _factors(entries)
    intervals = _intervals(entries, factor, largest_factor, notes)
    steps = Steps([], [], [], [], [], [], [], _NAN, factor, largest_factor, notes)
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
        fewest, most = fewest + interval.fewest, most + interval.most
        steps.lines.append((len(steps.step), fewest, most))
    return steps._replace(final_loss_scale=after)


def _intervals(entries: Sequence[LogEntry], factor: float, largest_factor: float, notes: list[str]) -> list[Interval]:
    usual = _usual_stride(entries)
    spans = [_span(earlier, entry, usual, notes) for earlier, entry in zip([None, *entries[:-1]], entries, strict=True)]
    have_lines = any(entry.overflows for entry in entries)
    stated = [max(len(entry.overflows), entry.skips or 0) if have_lines else entry.skips for entry in entries]
    rows = list(zip(entries, spans, stated, strict=True))
    wrong = [
        entry.where
        for entry, (_, before), skips in rows
        if skips is not None and _changes(before, entry.next_loss_scale, largest_factor) > skips
    ]
    if wrong:
        notes.append(
            f"{wrong[0]}: the scale fell although no skipped step is counted, here and on {len(wrong)} line(s) in "
            "all: the printed numbers of skipped steps are not relied on."
        )
    intervals = []
    for entry, (steps, before), skips in rows:
        after = entry.next_loss_scale
        if steps > 1 and _changes(before, after, factor) > steps:
            notes.append(
                f"{entry.where}: {steps} steps cannot lower the scale from {before:g} to {after:g}; the scale before "
                "them is inferred."
            )
            before = _NAN
        overflowed, clean = entry.overflow is True, entry.overflow is False
        drops, raises = (_changes(*scales, largest_factor) for scales in ((before, after), (after, before)))
        if steps == 1 and entry.overflow is not None:
            fewest = most = guess = int(entry.overflow)
        else:
            at_most = steps - clean
            fewest = min(max(skips or 0, drops, overflowed), at_most)
            guess = min(max(skips or 0, _changes(before, after, factor), overflowed), at_most)
            is_exact = skips is not None and not wrong and skips == fewest
            most = fewest if is_exact else steps - max(raises, clean)
            guess = min(max(guess, fewest), max(most, fewest))
        intervals.append(Interval(entry, steps, before, fewest, max(most, fewest), guess))
    return intervals


def _span(earlier: LogEntry | None, entry: LogEntry, usual: int, notes: list[str]) -> tuple[int, float]:
    """For how many steps a line speaks, and the scale before them, nan if that is unknown."""
    steps = entry.steps or usual
    if earlier is None:
        return max(1, min(steps, entry.step, LONGEST_INTERVAL)), _NAN
    apart = entry.step - earlier.step
    steps = min(steps, apart, LONGEST_INTERVAL)
    if apart > steps:
        notes.append(
            f"{entry.where}: {apart - steps} step(s) before this line, {earlier.step + 1} to {entry.step - steps}, "
            "are not in the log."
        )
    same = earlier.next_loss_scale == entry.next_loss_scale
    known = same or (apart == steps and not entry.after_restart)
    return steps, earlier.next_loss_scale if known else _NAN


def _changes(before: float, after: float, factor: float) -> int:
    """How many drops at least lead from one scale to another; 0 where it did not fall, or one is unknown."""
    if not 0 < after < before < math.inf:
        return 0
    return max(1, math.ceil(math.log2(before / after) / math.log2(factor) - _NEAR))


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
        highest = max(_LARGEST_START, after)
        left = accumulate(
            reversed(overflow), lambda scale, over: min(scale * factor, highest) if over else scale, initial=after
        )
        return overflow, list(left)[:0:-1]
    if math.isnan(after):
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


def _usual_stride(entries: Sequence[LogEntry]) -> int:
    """The commonest number of steps from one line to the next, the smaller of two as common."""
    strides = Counter(later.step - earlier.step for earlier, later in pairwise(entries))
    strides = Counter({stride: count for stride, count in strides.items() if stride <= LONGEST_INTERVAL})
    if not strides:
        return max(1, min(entries[0].skips or 1, LONGEST_INTERVAL))
    return min(strides, key=lambda stride: (-strides[stride], stride))


def _factors(entries: Sequence[LogEntry]) -> tuple[float, float]:
    """The usual factor of a change, and the largest that the scales of the log allow; inf where they allow none."""
    pairs = []
    for earlier, later in pairwise(entries):
        before, after = earlier.next_loss_scale, later.next_loss_scale
        if before != after and not later.after_restart and 0 < before < math.inf and 0 < after < math.inf:
            pairs.append((later.step - earlier.step, math.log2(before), math.log2(after)))
    neighbours = Counter(round(2 ** abs(before - after), 3) for steps, before, after in pairs if steps == 1)
    factor = neighbours.most_common(1)[0][0] if neighbours else 1.0
    if factor > 1:
        return factor, factor
    bits = [abs(before - after) for _, before, after in pairs]
    up_to, from_there = (list(accumulate(row, _common_divisor, initial=0.0)) for row in (bits, bits[::-1]))
    divisor = largest = up_to[-1]
    for (steps, before, after), *others in zip(pairs, up_to, from_there[-2::-1], strict=False):
        # A change by way of a floor that is no power of the factor away need not fit the others.
        without = _common_divisor(*others)
        by_way_of_floor = max(before - _LARGEST_FLOOR_BITS, 0.0) + max(after - _LARGEST_FLOOR_BITS, 0.0)
        if by_way_of_floor <= steps * without + _NEAR:
            largest = max(largest, without)
    powers_of_two = abs(divisor - round(divisor)) < _SAME_BITS
    if len(pairs) == 1 and not powers_of_two:
        largest = 0.0
    usual = [1.0] if powers_of_two else []
    fits = (one for one in (*usual, divisor, largest) if all(abs(a - b) <= n * one + _NEAR for n, a, b in pairs))
    return 2.0 ** next(fits, 1.0), 2.0**largest if largest >= _FEWEST_BITS else math.inf


def _common_divisor(first: float, second: float) -> float:
    """The largest number of which two are multiples, nearly."""
    larger, smaller = max(first, second), min(first, second)
    while smaller > _SAME_BITS:
        rest = larger % smaller
        larger, smaller = smaller, 0.0 if smaller - rest < _SAME_BITS else rest
    return larger
