"""Find the steps that each line of a training log covers, and how many of them were skipped at least and at most.

A log line is about one step, or about all steps since the line before. It states the loss scale after the last of these
steps, and often whether that step overflowed or how many steps were skipped. Only such statements bound the number of
skipped steps:

- A step that a line calls overflowed or applied is one or the other. An overflow with a line of its own is one skip.
- A line may count the skipped steps since the line before, or since the start of the run.
- Any other step may have been skipped: the loss scale does not tell, because a tolerated overflow (hysteresis) leaves
  the scale as it is, and so does an overflow at the smallest scale.

A printed scale stands for all scales that are printed alike: 0.1 is anything from 0.05 to 0.15. Nothing is known about
the steps of a line that cannot be read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.record.log_formats import LogFormat
from mindformers_adaptive.record.log_lines import LogLines
from mindformers_adaptive.record.overflow_lines import merge_ranks, steps_between
from mindformers_adaptive.record.step import LARGEST_STEP
from mindformers_adaptive.text.table import counted

__all__ = ["LogRows"]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

# A log line that does not state how many steps it covers, covers at most _LONGEST_INTERVAL. If the line before is
# further away, there is a gap in the log. A longer gap is filled only if the log counts its steps or its skipped steps.
# A run with filled gaps has at most _MOST_STEPS steps.
_LONGEST_INTERVAL, _MOST_STEPS = 10_000, 10**7

# Tolerances in bits for comparing loss scales. The first allows for float32 rounding and eight printed digits. If the
# bounds on a scale are further apart than the second tolerance, the log prints the scale coarsely, such as 9.5.
_NEAR_BITS, _WIDE_BITS = 1e-4, 1e-2

# Limits of a valid loss scale: just above the largest float32, and just below the smallest positive float32.
_LARGEST_SCALE, _SMALLEST_SCALE = 3.5e38, 1e-45

_NOTES_OF_A_KIND = 3
_UNKNOWN: dict[str, Any] = {"f": math.nan, "i": -1}


class LogRows:
    """The data of a log: a row for each line that names a step, and a last row for overflows after these lines.

    Attributes:
        step (NDArray): int64 of shape (rows,), as for all arrays here: the last step of each row, increasing.
        steps (NDArray): int64, how many steps the row is about, including a filled gap before its line.
        gap (NDArray): int64, how many of these steps have no line.
        restarts (NDArray): bool, whether the run was restarted before the row.
        follows (NDArray): bool, whether the row begins at the step after the row before.
        flag (NDArray): int64, whether the last step of the row overflowed; -1 if unknown.
        used (NDArray), after (NDArray): float64, the scale that the last step used, and the scale after it.
        stated (NDArray), total (NDArray): int64, the skipped steps that the line counts since the line before, and
            since the start of the run; -1 if the line does not count them.
        overflows (dict[int, list[LogLine]]): for each row, the overflows that have lines of their own.
        fewest (NDArray), most (NDArray), guess (NDArray): int64, how many steps of the row were skipped.
        factor (float): the factor by which the scale usually moves.
    """

    def __init__(self, lines: LogLines, log_format: LogFormat, name_of: Callable[[int], str]) -> None:
        self.notes: list[str] = []
        self._lines, self._format, self._name_of = lines, log_format, name_of
        self._read_columns()
        self._find_steps()
        self._find_scales()
        self._find_bounds()

    def _read_columns(self) -> None:
        columns = {name: self._lines.array(name) for name in self._lines.columns}
        overflows = merge_ranks(self._lines.overflows, self.notes)
        # A log line for step 0 states the loss scale and the number of skipped steps before the first step.
        self._first = int(len(self._lines) > 0 and columns["step"][0] == 0)
        self._total_at_start = int(columns["skipped_steps"][0]) if self._first else 0
        self.scale_at_start = float(_valid(columns["next_loss_scale"])[0]) if self._first else math.nan
        columns = {name: column[self._first :] for name, column in columns.items()}
        self.overflows = {max(row - self._first, 0): group for row, group in overflows.items()}
        self.has_tail = len(columns["step"]) in self.overflows
        if self.has_tail:
            tail = self.overflows[len(columns["step"])]
            last = int(columns["step"][-1]) if len(columns["step"]) else 0
            unknown = {name: np.append(column, _UNKNOWN[column.dtype.kind]) for name, column in columns.items()}
            columns = unknown | {"step": np.append(columns["step"], last + len(tail) + steps_between(tail))}
            columns["steps"][-1] = len(tail) + steps_between(tail)
            self.notes.append(f"The log ends with {counted(len(tail), 'overflow')} on lines that name no step.")
        self.columns, self.step = columns, columns["step"]
        self.flag = np.where(columns["overflow"] < 0, -1, columns["overflow"]).astype(np.int64)
        self.stated, self.total = columns["skipped_since"].copy(), columns["skipped_steps"]
        self.used, self.stated_after = _valid(columns["loss_scale"]), _valid(columns["next_loss_scale"])
        self.is_whole = (self.flag >= 0) & ~np.isnan(self.used)

    def _find_steps(self) -> None:
        """Find how many steps each row of the log covers, and whether the row follows the row before without a gap."""
        rows, before = np.arange(len(self.step)), np.append(0, self.step[:-1])
        self.restarts = np.isin(rows, [row - self._first for row in self._lines.after_restart])
        stated, apart = self.columns["steps"], self.step - before
        covered = np.where(stated > 0, stated, int(self._format.every_step))
        has_only_total = (self.total >= 0) & np.isnan(self.stated_after) & (self.stated < 0) & (self.flag < 0)
        for kind in (has_only_total & (covered == 0), ~has_only_total & (covered == 0)):
            covered[kind] = self._strides(np.flatnonzero(kind))
        covered[np.cumsum(covered) > _MOST_STEPS] = int(self._format.every_step)
        self.stated[covered > apart] = -1
        self.steps = np.minimum(covered, apart)
        gap = apart - self.steps
        is_unread = np.isin(rows, [row - self._first for row in self._lines.after_damage] + list(self.overflows))
        fill = is_unread & (gap <= _LONGEST_INTERVAL) & ~self.restarts & (rows > 0)
        fill |= self._group_by_totals(gap)
        self.gap = np.where(fill, gap, 0)
        self.steps = self.steps + self.gap
        self.follows = (self.step - self.steps == before) & ~self.restarts
        if self._format.every_step:
            self.gap = np.where(stated > 0, self.steps, self.gap)
        texts = [
            f"{self.where(row)}: the log lacks {counted(gap[row], 'step')} before this line, {before[row] + 1} to "
            f"{before[row] + gap[row]}."
            for row in np.flatnonzero((gap > 0) & ~fill & (rows > 0)).tolist()
        ]
        self.note(texts, "In {} places, steps are missing in the log.")

    def _strides(self, rows: Integers) -> Integers:
        """Return how many steps each of the given log rows covers: usually the commonest distance between two rows."""
        step = self.step[rows]
        if len(step) < 2:
            return np.minimum(step, _LONGEST_INTERVAL)
        between = np.diff(step)
        lengths, counts = np.unique(between[between <= _LONGEST_INTERVAL], return_counts=True)
        stride = int(lengths[np.argmax(counts)]) if len(lengths) else 1
        if not self._format.repeats_first_line:
            return np.minimum(stride, np.append(step[0], between))
        if len(step) == 2 and stride > 1 and step[0] % stride and not step[1] % (stride + 1):
            stride += 1
        steps, off = np.minimum(stride, np.append(step[0], between)), step % stride > 0
        # The first step of a process has a log line of its own. The next line counts this step again among its steps.
        first = np.flatnonzero(off[:-1] & ~off[1:] & (between < stride))
        steps[first] = 1
        again, once = self.stated[rows[first + 1]], self.stated[rows[first]]
        self.stated[rows[first + 1]] = np.where((once >= 0) & (again >= once), again - once, -1)
        return steps

    def _group_by_totals(self, gap: Integers) -> Flags:
        """Group the rows between two totals of skipped steps: the difference of the totals counts their skipped steps.

        Return for each row whether it is in such a group. The difference covers the gaps before these rows too.
        """
        ends = np.flatnonzero(self.total >= 0)
        group = np.searchsorted(ends, np.arange(len(gap)))
        begins = self._total_at_start >= 0 and (self._first > 0 or bool(len(gap) and gap[0] == 0))
        lasts = np.append(np.append(0, self.step[ends]), LARGEST_STEP)
        totals = np.append(np.append(max(self._total_at_start, 0), self.total[ends]), 0)
        count, length = np.diff(totals), np.diff(lasts)
        missing, restarted = (np.bincount(group, weights, len(count)) for weights in (gap, self.restarts))
        is_right = (count >= 0) & (count <= length) & (restarted == 0)
        is_right[0] &= begins
        is_right[-1] = False
        is_right &= np.cumsum(np.where(is_right, missing, 0)) <= _MOST_STEPS - self.steps.sum()
        self._group, self._count = group, np.where(is_right, count, -1)
        in_group: Flags = is_right[group]
        return in_group

    def _find_scales(self) -> None:
        """Find the loss scale after each row, and the factor by which the loss scale moves."""
        self.after, rounding = self.stated_after.copy(), self.columns["rounding"]
        if self._format.every_step:
            # If a line does not name the loss scale after its step, take the scale that the step of the next line used.
            is_next = self.follows[1:] & (self.steps[1:] == 1)
            following = np.append(np.where(is_next, self.used[1:], np.nan), np.nan)
            self.after = np.where(np.isnan(self.after), following, self.after)
        printed = np.where(rounding > 0, self.columns["next_loss_scale"], self.after)
        with np.errstate(divide="ignore", invalid="ignore"):
            low, high = np.log2(np.maximum(printed - rounding, _SMALLEST_SCALE)), np.log2(printed + rounding)
        is_known = np.isfinite(low) & np.isfinite(high)
        self._low, self._high = np.where(is_known, low, np.nan), np.where(is_known, high, np.nan)
        is_wide = self._high - self._low > _WIDE_BITS
        if is_wide.any():
            self._narrow(is_wide)
            self.after = np.where(is_wide, 2.0**self._high, self.after)
            self.stated_after = np.where(is_wide, self.after, self.stated_after)
        self.factor = self._usual_factor(~is_wide)

    def _narrow(self, is_wide: Flags) -> None:
        """Narrow the bounds on loss scales that the log prints rounded, by the loss scales in the lines around them."""
        exact = (self._low + self._high)[~is_wide & ~np.isnan(self._low)] / 2
        if (np.abs(exact - np.round(exact)) < _NEAR_BITS).all():
            low, high = np.ceil(self._low - _NEAR_BITS), np.floor(self._high + _NEAR_BITS)
            fits = low <= high
            self._low, self._high = np.where(fits, low, self._low), np.where(fits, high, self._high)
        down = np.where(self.stated >= 0, self.stated, self.steps)
        up = self.steps - np.where(self.stated >= 0, self.stated, 0)
        rows = np.flatnonzero(self.follows)[int(self.follows[0]) :].tolist()
        for order, back in ((rows, False), (rows[::-1], True)):
            for row in order:
                here, there = (row - 1, row) if back else (row, row - 1)
                fall, rise = (up[row], down[row]) if back else (down[row], up[row])
                low = max(self._low[here], self._low[there] - fall)
                high = min(self._high[here], self._high[there] + rise)
                if low <= high:
                    self._low[here], self._high[here] = low, high

    def _usual_factor(self, is_exact: Flags) -> float:
        """Return the most frequent factor between the scales after two consecutive steps; 2 if no factor is known."""
        change = np.diff(self._low)
        is_move = np.where(self.flag[1:] < 0, True, (change < 0) == (self.flag[1:] == 1))
        size = np.abs(change)
        is_move &= self.follows[1:] & (self.steps[1:] == 1) & is_exact[1:] & is_exact[:-1]
        seen = size[is_move & (size > _NEAR_BITS) & (size < 1000)]
        factors, counts = np.unique(np.round(2.0**seen, 3), return_counts=True)
        return float(factors[np.argmax(counts)]) if len(factors) else 2.0

    def _find_bounds(self) -> None:
        """Find bounds on the number of skipped steps in each log row: by the lines' flags, then by their counts."""
        flagged, room = (self.flag == 1).astype(np.int64), self.steps - (self.flag == 0)
        listed = np.array([len(self.overflows.get(row, ())) for row in range(len(self.step))], np.int64)
        listed = np.minimum(np.maximum(flagged, listed), room)
        fits = (self.stated >= listed) & (self.stated <= room) & self._counts_are_right()
        fewest, most = np.where(fits, self.stated, listed), np.where(fits, self.stated + self.gap, room)
        most = np.minimum(most, room)
        # If the lines of a group contradict its count, believe fewer of the statements about single lines.
        count, is_open = self._count[self._group], self._count[self._group] >= 0
        for low, high in ((fewest, most), (listed, room), (flagged, room)):
            low_sums, high_sums = (self._sums(bounds) for bounds in (low, high))
            chosen = is_open & (low_sums <= count) & (count <= high_sums)
            fewest, most = np.where(chosen, low, fewest), np.where(chosen, high, most)
            is_open &= ~chosen
        in_group = (self._count[self._group] >= 0) & ~is_open
        spare, short = count - self._sums(fewest), count - self._sums(most)
        self.fewest = np.where(in_group, np.maximum(fewest, short + most), fewest)
        self.most = np.where(in_group, np.minimum(most, spare + fewest), most)
        width = self.most - self.fewest
        left = count - self._sums(self.fewest) - self._running(width) + width
        self.guess = self.fewest + np.where(in_group, np.clip(left, 0, width), 0)
        fewest_so_far, most_so_far = self._running(fewest), self._running(most)
        paths = np.maximum(fewest_so_far, short + most_so_far), np.minimum(most_so_far, spare + fewest_so_far)
        begins = np.append(True, self._group[1:] != self._group[:-1])
        self._paths = [
            np.cumsum(np.where(in_group, np.where(begins, path, np.diff(path, prepend=0)), bounds))
            for path, bounds in zip(paths, (fewest, most), strict=True)
        ]

    def _counts_are_right(self) -> bool:
        """Return whether the lines' counts of skipped steps are right. If one is certainly wrong, believe none."""
        fell = self.follows[1:] & (self._high[1:] < self._low[:-1] - _NEAR_BITS) & (self.gap[1:] == 0)
        wrong = np.flatnonzero(fell & (self.stated[1:] == 0)) + 1
        if len(wrong):
            self.notes.append(
                f"{self.where(int(wrong[0]))}: the scale fell although the line counts no skipped step. This is so on "
                f"{counted(len(wrong), 'line')} in all, so the printed numbers of skipped steps are ignored."
            )
        is_lone = len(self.step) == 1 and self.steps[0] > 1 and not self._format.every_step and self._count[0] < 0
        if is_lone and not self.has_tail:
            self.notes.append(
                f"{self.where(0)}: this is the only line that names a step. It is taken to cover all steps up to "
                f"{self.step[0]}, but may cover only the last of these steps."
            )
            return False
        return not len(wrong)

    def _sums(self, values: Integers) -> Integers:
        """Return for each row the sum of ``values`` in its group."""
        sums: Integers = np.bincount(self._group, values, len(self._count)).astype(np.int64)[self._group]
        return sums

    def _running(self, values: Integers) -> Integers:
        """Return for each row the sum of ``values`` in its group up to this row."""
        total = np.cumsum(values)
        first = np.searchsorted(self._group, self._group)
        running: Integers = total - np.append(0, total)[first]
        return running

    def prefix_bounds(self) -> Integers:
        """Return for each log line the number of steps up to its end, and bounds on how many of them were skipped."""
        ends = np.cumsum(self.steps)
        bounds = np.column_stack([ends, *self._paths])
        if self.has_tail:
            bounds[-1, 2] = LARGEST_STEP
        whole = self.is_whole & (self.steps > 1)
        before = bounds[whole] - np.column_stack([np.ones_like(ends), self.flag, self.flag])[whole]
        every = np.concatenate([bounds, before])
        ordered: Integers = every[np.argsort(every[:, 0], kind="stable")]
        return ordered

    def note(self, texts: Sequence[str], all_of_them: str) -> None:
        """Add the first three of ``texts`` to the notes on the log. If there are more, add a note with their number."""
        self.notes += texts[:_NOTES_OF_A_KIND]
        if len(texts) > _NOTES_OF_A_KIND:
            self.notes.append(all_of_them.format(len(texts)))

    def where(self, row: int) -> str:
        """Return the name of the log line of a row, as ``file:number``."""
        return self._name_of(self._lines.where[min(row + self._first, len(self._lines) - 1)])


def _valid(scale: Floats) -> Floats:
    """Return loss scales with nan in place of values that no loss scale can have."""
    can_be = ((scale > _SMALLEST_SCALE) & (scale < _LARGEST_SCALE)) | (scale == math.inf)
    return np.where(can_be, scale, np.nan)
