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

from mindformers_adaptive.lab.logs.marks import LONGEST_INTERVAL, Mark

__all__ = ["Expansion"]

_LARGEST_START = 2.0**32
_USUAL_FACTOR = 2.0  # MindSpore's, Megatron-LM's and DeepSpeed's
_NEAR = 1e-3  # printed scales are rounded
_NAN = math.nan


class Expansion:
    """The steps of a list of marks.

    Args:
        marks (Sequence[Mark]): steps strictly increasing, at least one.

    Attributes:
        step, loss_scale, overflow, position_known, loss, seconds (list): one entry a step.
        scale_factor (float): the commonest factor between the scales of neighbouring steps; 2 where there is none.
        notes (list[str]): what had to be inferred, and where lines are missing or contradict each other.
    """

    def __init__(self, marks: Sequence[Mark]) -> None:
        self.step: list[int] = []
        self.loss_scale: list[float] = []
        self.overflow: list[bool] = []
        self.position_known: list[bool] = []
        self.loss: list[float] = []
        self.seconds: list[float] = []
        self.notes: list[str] = []
        self.scale_factor = _commonest_factor(marks)
        self._overflows_have_lines = any(mark.overflows for mark in marks)
        self._counts_are_right = True
        self._read(marks)

    def _read(self, marks: Sequence[Mark]) -> None:
        usual = _usual_stride(marks)
        spans = [self._span(earlier, mark, usual) for earlier, mark in zip([None, *marks[:-1]], marks, strict=True)]
        pairs = list(zip(marks, spans, strict=True))
        wrong = [mark.where for mark, (_, before) in pairs if self._count_is_short(mark, before)]
        if wrong:
            self._counts_are_right = False
            self.notes.append(
                f"{wrong[0]}: the scale fell although no skipped step is counted, here and on {len(wrong)} line(s) in "
                "all: the printed numbers of skipped steps are not relied on."
            )
        after = _NAN
        for mark, (steps, before) in pairs:
            # A line that names no scale leaves the one that the lines before had led to.
            before = after if math.isnan(before) and math.isnan(mark.next_loss_scale) else before
            after = self._one(mark, before) if steps == 1 else self._several(mark, steps, before)
            self.loss.extend([_NAN] * (steps - 1) + [mark.loss])
            self.seconds.extend([mark.seconds] * steps)
            self.step.extend(range(mark.step - steps + 1, mark.step + 1))

    def _span(self, earlier: Mark | None, mark: Mark, usual: int) -> tuple[int, float]:
        """For how many steps a mark speaks, and the scale before them, nan if that is unknown."""
        steps = mark.steps or usual
        if earlier is None:
            return max(1, min(steps, mark.step, LONGEST_INTERVAL)), _NAN
        apart = mark.step - earlier.step
        steps = min(steps, apart, LONGEST_INTERVAL)
        if apart > steps:
            self.notes.append(
                f"{mark.where}: {apart - steps} step(s) before this line, {earlier.step + 1} to {mark.step - steps}, "
                "are not in the log."
            )
        same = earlier.next_loss_scale == mark.next_loss_scale
        known = same or (apart == steps and not mark.after_restart)
        return steps, earlier.next_loss_scale if known else _NAN

    def _drops(self, before: float, after: float) -> int | None:
        """By how many factors the scale fell (below 0: rose); None if a scale is not known."""
        if before == after:
            return 0
        if not (0 < before < math.inf and 0 < after < math.inf):
            return None
        return round(math.log(before / after) / math.log(self.scale_factor))

    def _told(self, mark: Mark) -> int | None:
        """How many skipped steps the log tells of; None if it would not tell."""
        if self._overflows_have_lines:
            return max(len(mark.overflows), mark.skips or 0)
        return mark.skips

    def _count_is_short(self, mark: Mark, before: float) -> bool:
        told = self._told(mark)
        return told is not None and (self._drops(before, mark.next_loss_scale) or 0) > told

    def _one(self, mark: Mark, before: float) -> float:
        """Add the single step of a mark; return the scale after it."""
        drops, told = self._drops(before, mark.next_loss_scale), self._told(mark)
        overflow = mark.overflow if mark.overflow is not None else max(told or 0, drops or 0) > 0
        known = mark.overflow is not None or overflow or (told is not None and self._counts_are_right)
        used = mark.loss_scale
        if math.isnan(used):
            used = mark.overflows[-1].loss_scale if mark.overflows else self._scale_used(mark, before, overflow)
        self._add(used, overflow, known and mark.placed)
        return self._after(mark, before, int(overflow))

    def _scale_used(self, mark: Mark, before: float, overflow: bool) -> float:
        after = mark.next_loss_scale
        if math.isnan(after):
            return before
        if not math.isnan(before):
            low, high = (before / self.scale_factor, before) if overflow else (before, before * self.scale_factor)
            if low * (1 - _NEAR) <= after <= high * (1 + _NEAR):
                return before
            self.notes.append(
                f"{mark.where}: the scale {after:g} does not follow from {before:g} on the line before; the scale "
                "used in this step is inferred."
            )
        else:
            self.notes.append(f"{mark.where}: the scale used in step {mark.step} is inferred from the one after it.")
        return min(after * self.scale_factor, max(_LARGEST_START, after)) if overflow else after

    def _several(self, mark: Mark, steps: int, before: float) -> float:
        """Add the steps of a mark that stands for several; return the scale after them."""
        drops, told = self._drops(before, mark.next_loss_scale), self._told(mark)
        if drops is not None and drops > steps:
            self.notes.append(
                f"{mark.where}: {steps} steps cannot lower the scale from {before:g} to {mark.next_loss_scale:g}; the "
                "scale before them is inferred."
            )
            before, drops = _NAN, None
        proven = max(told or 0, drops or 0, 1 if mark.overflow else 0)
        count = min(proven, steps - 1 if mark.overflow is False else steps)
        self._note_several(mark, steps, count, before)
        scales, after = self._skipped_scales(mark, count, before, drops), self._after(mark, before, count)
        applied = min((scale for scale in (before, after) if not math.isnan(scale)), default=_NAN)
        at = set(range(count - 1)) | {steps - 1} if mark.overflow else set(range(count))
        all_told = told is not None and self._counts_are_right and count in (0, steps)
        all_known = mark.placed and (all_told or drops == steps) and not (mark.overflow is None and count < proven)
        in_order = iter(scales)
        for place in range(steps):
            known = all_known or (mark.overflow is not None and place == steps - 1)
            self._add(next(in_order) if place in at else applied, place in at, known)
        return after

    def _skipped_scales(self, mark: Mark, count: int, before: float, drops: int | None) -> list[float]:
        after, factor = mark.next_loss_scale, self.scale_factor
        if mark.overflows:
            given = [overflow.loss_scale for overflow in mark.overflows[:count]]
            return given + _falling(mark.overflows[-1].next_loss_scale, count - len(given), factor)
        if drops is not None and drops > 0:
            return [before] * (count - drops) + _falling(before, min(drops, count), factor)
        if not math.isnan(before):
            return [before * factor] * count
        scales: list[float] = []
        for _ in range(count):
            after = min(after * factor, max(_LARGEST_START, after))
            scales.insert(0, after)
        return scales

    def _after(self, mark: Mark, before: float, count: int) -> float:
        if not math.isnan(mark.next_loss_scale):
            return mark.next_loss_scale
        if not mark.overflows:
            return before
        unlisted = max(count - len(mark.overflows), 0)
        return _falling(mark.overflows[-1].next_loss_scale, unlisted + 1, self.scale_factor)[-1]

    def _note_several(self, mark: Mark, steps: int, count: int, before: float) -> None:
        if mark.overflows and count > len(mark.overflows):
            self.notes.append(
                f"{mark.where}: {count - len(mark.overflows)} of {count} skipped steps have no line of their own; "
                "the scale is taken to have gone on falling."
            )
        elif math.isnan(before) and not mark.overflows:
            self.notes.append(
                f"{mark.where}: the scales used in steps {mark.step - steps + 1} to {mark.step} are inferred from the "
                "one after them."
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


def _usual_stride(marks: Sequence[Mark]) -> int:
    """The commonest number of steps from one mark to the next, the smaller of two as common."""
    strides = Counter(later.step - earlier.step for earlier, later in pairwise(marks))
    strides = Counter({stride: count for stride, count in strides.items() if stride <= LONGEST_INTERVAL})
    if not strides:
        return max(1, min(marks[0].skips or 1, LONGEST_INTERVAL))
    return min(strides, key=lambda stride: (-strides[stride], stride))


def _commonest_factor(marks: Sequence[Mark]) -> float:
    factors: Counter[float] = Counter()
    for earlier, later in pairwise(marks):
        before, after = earlier.next_loss_scale, later.next_loss_scale
        if later.step - earlier.step == 1 and before != after and 0 < before < math.inf and 0 < after < math.inf:
            factors[round(max(before, after) / min(before, after), 3)] += 1
    factor = factors.most_common(1)[0][0] if factors else _USUAL_FACTOR
    return factor if factor > 1 else _USUAL_FACTOR
