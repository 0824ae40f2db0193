"""From the lines of a log to its steps: which scale each used, whether it overflowed, and whether that is known.

A line stands for one step or, in sink mode and where only every k-th step is printed, for several. Of those the log
tells the scale before and after, and how many were skipped at least. The rest is inferred:

- A falling scale proves as many skipped steps as there are drops, whatever number of skips is printed.
- The skipped steps come first, one after another, each at the scale that the one before left. More skips than drops
  were tolerated (hysteresis), at the scale before. Where the scale did not fall, it was raised once before the skips.
- Applied steps used the smaller of the scales before and after.
- The scale before the first line, and after a gap or a restart, is that after it, taken back by a factor for each skip
  but never above 2^32, the largest scale that Megatron-LM, DeepSpeed and MindFormers start from by default.

Where this errs, it puts skipped steps at too high and applied steps at too low a scale, so that bounds stay true.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from mindformers_adaptive.lab.logs.entries import LONGEST_INTERVAL, LogEntry

__all__ = ["Expansion"]

_LARGEST_START = 2.0**32
_USUAL_FACTOR = 2.0  # MindSpore's, Megatron-LM's and DeepSpeed's
_NEAR = 1e-3  # printed scales are rounded
_NAN = math.nan


class Expansion:
    """The steps of a list of entries.

    Args:
        entries (Sequence[LogEntry]): steps strictly increasing, at least one.

    Attributes:
        step, loss_scale, overflow, position_known, loss, seconds (list): one entry a step.
        scale_factor (float): the commonest factor between the scales of neighbouring steps; 2 where there is none.
        notes (list[str]): what had to be inferred, and where lines are missing or contradict each other.
    """

    def __init__(self, entries: Sequence[LogEntry]) -> None:
        self.step: list[int] = []
        self.loss_scale: list[float] = []
        self.overflow: list[bool] = []
        self.position_known: list[bool] = []
        self.loss: list[float] = []
        self.seconds: list[float] = []
        self.notes: list[str] = []
        self.scale_factor = _commonest_factor(entries)
        self._overflows_have_lines = any(entry.overflows for entry in entries)
        self._counts_are_right = True
        self._read(entries)

    def _read(self, entries: Sequence[LogEntry]) -> None:
        usual = _usual_stride(entries)
        spans = [
            self._span(earlier, entry, usual) for earlier, entry in zip([None, *entries[:-1]], entries, strict=True)
        ]
        pairs = list(zip(entries, spans, strict=True))
        wrong = [entry.where for entry, (_, before) in pairs if self._count_is_short(entry, before)]
        if wrong:
            self._counts_are_right = False
            self.notes.append(
                f"{wrong[0]}: the scale fell although no skipped step is counted, here and on {len(wrong)} line(s) in "
                "all: the printed numbers of skipped steps are not relied on."
            )
        after = _NAN
        for entry, (steps, before) in pairs:
            # A line that names no scale leaves the one that the lines before had led to.
            before = after if math.isnan(before) and math.isnan(entry.next_loss_scale) else before
            after = self._one(entry, before) if steps == 1 else self._several(entry, steps, before)
            self.loss.extend([_NAN] * (steps - 1) + [entry.loss])
            self.seconds.extend([entry.seconds] * steps)
            self.step.extend(range(entry.step - steps + 1, entry.step + 1))

    def _span(self, earlier: LogEntry | None, entry: LogEntry, usual: int) -> tuple[int, float]:
        """For how many steps a entry speaks, and the scale before them, nan if that is unknown."""
        steps = entry.steps or usual
        if earlier is None:
            return max(1, min(steps, entry.step, LONGEST_INTERVAL)), _NAN
        apart = entry.step - earlier.step
        steps = min(steps, apart, LONGEST_INTERVAL)
        if apart > steps:
            self.notes.append(
                f"{entry.where}: {apart - steps} step(s) before this line, {earlier.step + 1} to {entry.step - steps}, "
                "are not in the log."
            )
        same = earlier.next_loss_scale == entry.next_loss_scale
        known = same or (apart == steps and not entry.after_restart)
        return steps, earlier.next_loss_scale if known else _NAN

    def _drops(self, before: float, after: float) -> int | None:
        """By how many factors the scale fell (below 0: rose); None if a scale is not known."""
        if before == after:
            return 0
        if not (0 < before < math.inf and 0 < after < math.inf):
            return None
        return round(math.log(before / after) / math.log(self.scale_factor))

    def _told(self, entry: LogEntry) -> int | None:
        """How many skipped steps the log tells of; None if it would not tell."""
        if self._overflows_have_lines:
            return max(len(entry.overflows), entry.skips or 0)
        return entry.skips

    def _count_is_short(self, entry: LogEntry, before: float) -> bool:
        told = self._told(entry)
        return told is not None and (self._drops(before, entry.next_loss_scale) or 0) > told

    def _one(self, entry: LogEntry, before: float) -> float:
        """Add the single step of a entry; return the scale after it."""
        drops, told = self._drops(before, entry.next_loss_scale), self._told(entry)
        overflow = entry.overflow if entry.overflow is not None else max(told or 0, drops or 0) > 0
        known = entry.overflow is not None or overflow or (told is not None and self._counts_are_right)
        used = entry.loss_scale
        if math.isnan(used):
            used = entry.overflows[-1].loss_scale if entry.overflows else self._scale_used(entry, before, overflow)
        self._add(used, overflow, known and entry.placed)
        return self._after(entry, before, int(overflow))

    def _scale_used(self, entry: LogEntry, before: float, overflow: bool) -> float:
        after = entry.next_loss_scale
        if math.isnan(after):
            return before
        if not math.isnan(before):
            low, high = (before / self.scale_factor, before) if overflow else (before, before * self.scale_factor)
            if low * (1 - _NEAR) <= after <= high * (1 + _NEAR):
                return before
            self.notes.append(
                f"{entry.where}: the scale {after:g} does not follow from {before:g} on the line before; the scale "
                "used in this step is inferred."
            )
        else:
            self.notes.append(f"{entry.where}: the scale used in step {entry.step} is inferred from the one after it.")
        return min(after * self.scale_factor, max(_LARGEST_START, after)) if overflow else after

    def _several(self, entry: LogEntry, steps: int, before: float) -> float:
        """Add the steps of a entry that stands for several; return the scale after them."""
        drops, told = self._drops(before, entry.next_loss_scale), self._told(entry)
        if drops is not None and drops > steps:
            self.notes.append(
                f"{entry.where}: {steps} steps cannot lower the scale from {before:g} to {entry.next_loss_scale:g}; "
                "the scale before them is inferred."
            )
            before, drops = _NAN, None
        proven = max(told or 0, drops or 0, 1 if entry.overflow else 0)
        count = min(proven, steps - 1 if entry.overflow is False else steps)
        self._note_several(entry, steps, count, before)
        scales, after = self._skipped_scales(entry, count, before, drops), self._after(entry, before, count)
        applied = min((scale for scale in (before, after) if not math.isnan(scale)), default=_NAN)
        at = set(range(count - 1)) | {steps - 1} if entry.overflow else set(range(count))
        all_told = told is not None and self._counts_are_right and count in (0, steps)
        all_known = entry.placed and (all_told or drops == steps) and not (entry.overflow is None and count < proven)
        in_order = iter(scales)
        for place in range(steps):
            known = all_known or (entry.overflow is not None and place == steps - 1)
            self._add(next(in_order) if place in at else applied, place in at, known)
        return after

    def _skipped_scales(self, entry: LogEntry, count: int, before: float, drops: int | None) -> list[float]:
        after, factor = entry.next_loss_scale, self.scale_factor
        if entry.overflows:
            given = [overflow.loss_scale for overflow in entry.overflows[:count]]
            return given + _falling(entry.overflows[-1].next_loss_scale, count - len(given), factor)
        if drops is not None and drops > 0:
            return [before] * (count - drops) + _falling(before, min(drops, count), factor)
        if not math.isnan(before):
            return [before * factor] * count
        scales: list[float] = []
        for _ in range(count):
            after = min(after * factor, max(_LARGEST_START, after))
            scales.insert(0, after)
        return scales

    def _after(self, entry: LogEntry, before: float, count: int) -> float:
        if not math.isnan(entry.next_loss_scale):
            return entry.next_loss_scale
        if not entry.overflows:
            return before
        unlisted = max(count - len(entry.overflows), 0)
        return _falling(entry.overflows[-1].next_loss_scale, unlisted + 1, self.scale_factor)[-1]

    def _note_several(self, entry: LogEntry, steps: int, count: int, before: float) -> None:
        if entry.overflows and count > len(entry.overflows):
            self.notes.append(
                f"{entry.where}: {count - len(entry.overflows)} of {count} skipped steps have no line of their own; "
                "the scale is taken to have gone on falling."
            )
        elif math.isnan(before) and not entry.overflows:
            self.notes.append(
                f"{entry.where}: the scales used in steps {entry.step - steps + 1} to {entry.step} are inferred from "
                "the one after them."
            )

    def _add(self, loss_scale: float, overflow: bool, known: bool) -> None:
        self.loss_scale.append(loss_scale)
        self.overflow.append(overflow)
        self.position_known.append(known)


def _falling(scale: float, count: int, factor: float) -> list[float]:
    scales = []
    for _ in range(count):
        scales.append(scale)
        scale /= factor
    return scales


def _usual_stride(entries: Sequence[LogEntry]) -> int:
    """The commonest number of steps from one entry to the next, the smaller of two as common."""
    strides = Counter(later.step - earlier.step for earlier, later in pairwise(entries))
    strides = Counter({stride: count for stride, count in strides.items() if stride <= LONGEST_INTERVAL})
    if not strides:
        return max(1, min(entries[0].skips or 1, LONGEST_INTERVAL))
    return min(strides, key=lambda stride: (-strides[stride], stride))


def _commonest_factor(entries: Sequence[LogEntry]) -> float:
    factors: Counter[float] = Counter()
    for earlier, later in pairwise(entries):
        before, after = earlier.next_loss_scale, later.next_loss_scale
        if later.step - earlier.step == 1 and before != after and 0 < before < math.inf and 0 < after < math.inf:
            factors[round(max(before, after) / min(before, after), 3)] += 1
    factor = factors.most_common(1)[0][0] if factors else _USUAL_FACTOR
    return factor if factor > 1 else _USUAL_FACTOR
