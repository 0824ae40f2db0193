"""Find the steps that each line of a training log covers, and how many of them were skipped at least and at most.

A log line is about one step, or about all steps since the line before. It states the loss scale after the last of these
steps, and often whether that step overflowed or how many steps were skipped. If no line counts the skipped steps, the
changes of the loss scale bound their number. The scale is assumed to move by a factor of two, at most once per step:

- Where the scale fell by d such factors, at least d steps were skipped.
- Where the scale rose by r such factors, at least r steps were applied, because a raise follows an applied step.
- Any other step may have been skipped: a tolerated overflow (hysteresis) leaves the scale as it is, and so does an
  overflow at the smallest scale.

A printed scale stands for all scales that are printed alike: 0.1 is anything from 0.05 to 0.15. Nothing is known about
the steps of a line that cannot be read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.record.log_formats import LogFormat
from mindformers_adaptive.record.log_lines import LogLines
from mindformers_adaptive.record.step import LARGEST_STEP, LogLine
from mindformers_adaptive.text.table import counted

__all__ = ["LogRows"]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

# A log line covers at most _LONGEST_INTERVAL steps; if the line before is further away, there is a gap in the log. A
# longer gap is filled only if the log counts its skipped steps. A run with filled gaps has at most _MOST_STEPS steps.
_LONGEST_INTERVAL, _MOST_STEPS = 10_000, 10**7

# Tolerances in bits for comparing loss scales. The first allows for float32 rounding and eight printed digits. If the
# bounds on a scale are further apart than the second tolerance, the log prints the scale coarsely, such as 9.5.
_NEAR_BITS, _WIDE_BITS = 1e-4, 1e-2

# Limits of a valid loss scale: just above the largest float32, and just below the smallest positive float32.
_LARGEST_SCALE, _SMALLEST_SCALE = 3.5e38, 1e-45

_NOTES_OF_A_KIND = 3


class LogRows:
    """The data of a log: a row for each line that names a step, and a last row for overflows after these lines.

    Attributes:
        step (NDArray): int64 of shape (rows,), as for all arrays here: the last step of each row, increasing.
        steps (NDArray): int64, how many steps the row is about, including a filled gap before its line.
        gap (NDArray): int64, how many of these steps have no line.
        follows (NDArray): bool, whether the row begins at the step after the row before.
        flag (NDArray): int64, whether the last step of the row overflowed; -1 if unknown.
        used (NDArray), after (NDArray): float64, the scale that the last step used, and the scale after it.
        low (NDArray), high (NDArray): float64, bounds on the binary logarithm of ``after``, if it is printed rounded.
        stated (NDArray), total (NDArray): int64, the skipped steps that the line counts since the line before, and
            since the start of the run; -1 if the line does not count them.
        overflows (dict[int, list[LogLine]]): for each row, the overflows that have lines of their own.
        fewest (NDArray), most (NDArray), guess (NDArray): int64, how many steps of the row were skipped.
        counted (list[tuple[int, int, int]]): first row, last row, and the known number of skipped steps in these rows.
        factor (float): the factor by which the scale usually moves.
    """

    def __init__(self, lines: LogLines, log_format: LogFormat, name_of: Callable[[int], str]) -> None:
        self.notes: list[str] = []
        self._lines, self._format, self._name_of = lines, log_format, name_of
        columns, overflows = {name: lines.array(name) for name in lines.columns}, self._count_once(lines.overflows)
        # A log line for step 0 states the loss scale and the number of skipped steps before the first step.
        self._first = int(len(lines) > 0 and columns["step"][0] == 0)
        start = columns["skipped_steps"][: self._first], _valid(columns["next_loss_scale"][: self._first])
        self._total_at_start = int(start[0][0]) if self._first else -1
        self.scale_at_start = float(start[1][0]) if self._first else math.nan
        columns = {name: column[self._first :] for name, column in columns.items()}
        self.overflows = {max(row - self._first, 0): group for row, group in overflows.items()}
        self.has_tail = len(columns["step"]) in self.overflows
        if self.has_tail:
            tail = self.overflows[len(columns["step"])]
            steps = len(tail) + sum(map(sum, _links(tail, (math.nan, math.nan), (math.nan, math.nan), 1.0)))
            last = int(columns["step"][-1]) if len(columns["step"]) else 0
            unknown = {name: np.append(column, _UNKNOWN[column.dtype.kind]) for name, column in columns.items()}
            columns = unknown | {"step": np.append(columns["step"], last + steps)}
            columns["steps"][-1] = steps
            self.notes.append(f"The log ends with {counted(len(tail), 'overflow')} on lines that name no step.")
        self.columns, self.step = columns, columns["step"]
        self.flag = np.where(columns["overflow"] < 0, -1, columns["overflow"]).astype(np.int64)
        self.used, self.stated_after = _valid(columns["loss_scale"]), _valid(columns["next_loss_scale"])
        self.stated, self.total = columns["skipped_since"].copy(), columns["skipped_steps"]
        self.after, rounding = self.stated_after.copy(), columns["rounding"]
        with np.errstate(divide="ignore", invalid="ignore"):
            printed = columns["next_loss_scale"]
            self.low, self.high = np.log2(np.maximum(printed - rounding, _SMALLEST_SCALE)), np.log2(printed + rounding)
        unknown = ~np.isfinite(self.low) | ~np.isfinite(self.high) | (np.isnan(self.after) & (rounding == 0))
        self.low[unknown] = self.high[unknown] = np.nan

    def _count_once(self, overflows: Sequence[tuple[int, LogLine]]) -> dict[int, list[LogLine]]:
        """Return a log's overflow lines in groups, by the index of the next step line.

        Several ranks or source files may print the same overflow. Keep the lines of the rank and file with most lines.
        """
        counts = Counter(line.printer for _, line in overflows)
        named = [printer for printer, _ in counts.most_common() if printer]
        chosen = {"", *named} if len(named) < 2 else {named[0]}
        grouped: dict[int, list[LogLine]] = {}
        for row, line in overflows:
            if line.printer in chosen:
                grouped.setdefault(row, []).append(line)
        if len(named) > 1:
            count = sum(counts.values()) - counts[named[0]]
            self.notes.append(
                f"Merged: {counted(count, 'overflow line')} of other ranks or source files about the same overflows."
            )
        return grouped

    def _where(self, row: int) -> str:
        return self._name_of(self._lines.where[min(row + self._first, len(self._lines) - 1)])

    def _note(self, texts: Sequence[str], all_of_them: str) -> None:
        """Add the first three of ``texts`` to the notes on the log. If there are more, add a note with their number."""
        self.notes += texts[:_NOTES_OF_A_KIND]
        if len(texts) > _NOTES_OF_A_KIND:
            self.notes.append(all_of_them.format(len(texts)))

    def find_gaps(self) -> None:
        """Find how many steps each row of the log covers, and whether the row follows the row before without a gap."""
        before, restarts = np.append(0, self.step[:-1]), np.zeros(len(self.step), bool)
        restarts[[row - self._first for row in self._lines.after_restart if row >= self._first]] = True
        stated, apart = self.columns["steps"], self.step - before
        if self._format.every_step:
            covered = np.where(stated > 0, stated, 1)
        else:
            covered = np.where(stated > 0, stated, 0)
            only_total = (self.total >= 0) & np.isnan(self.after) & (self.stated < 0) & (self.flag < 0)
            for kind in (only_total & (covered == 0), ~only_total & (covered == 0)):
                covered[kind] = self._strides(np.flatnonzero(kind))
        covered = np.minimum(covered, _LONGEST_INTERVAL)
        self.stated[covered > apart] = -1
        self.steps = np.minimum(covered, apart)
        gap = apart - self.steps
        unread = np.isin(np.arange(len(gap)), [row - self._first for row in self._lines.after_damage])
        unread |= np.isin(np.arange(len(gap)), list(self.overflows))
        fill = unread & (gap <= _LONGEST_INTERVAL) & ~restarts
        fill[:1] = False
        self.counted = list(self._counted_by_totals(gap, restarts, fill))
        self.gap = np.where(fill, gap, 0)
        self.steps = self.steps + self.gap
        self.follows = (self.step - self.steps == before) & ~restarts
        if self._format.every_step:
            self.gap = np.where(stated > 0, self.steps, self.gap)
        left_out = np.flatnonzero((gap > 0) & ~fill)
        texts = [
            f"{self._where(row)}: the log lacks {counted(gap[row], 'step')} before this line, {before[row] + 1} to "
            f"{before[row] + gap[row]}."
            for row in left_out[left_out > 0].tolist()
        ]
        self._note(texts, "In {} places, steps are missing in the log.")

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

    def _counted_by_totals(self, gap: Integers, restarts: Flags, fill: Flags) -> Iterator[tuple[int, int, int]]:
        """Yield (first row, last row, skipped steps) for each range of log rows with a known number of skipped steps.

        The number of skipped steps is the difference of two totals in the log. It covers the gaps within the range
        too, so set ``fill`` to True for the rows after these gaps.
        """
        at = np.flatnonzero(self.total >= 0)
        begins = self._first > 0 or (len(gap) > 0 and gap[0] == 0)
        anchors = (
            [(-1, max(self._total_at_start, 0))] if begins and (self._total_at_start >= 0 or not self._first) else []
        )
        decided = (self.steps == 1) & (gap == 0) & (self.flag >= 0)
        is_needed = ~(decided & np.append(False, self.total[:-1] >= 0))
        room = _MOST_STEPS - int(self.steps.sum())
        earlier = np.append(anchors[0][0] if anchors else -2, at[:-1])
        needed = np.flatnonzero(is_needed[at])
        for last, before in zip(at[needed].tolist(), earlier[needed].tolist(), strict=True):
            if before == -2 or restarts[max(before, 0) + (before >= 0) : last + 1].any():
                continue
            count = int(self.total[last]) - (int(self.total[before]) if before >= 0 else anchors[0][1])
            missing = int(gap[before + 1 : last + 1].sum())
            if 0 <= count <= self.step[last] - (self.step[before] if before >= 0 else 0) and missing <= room:
                room -= missing
                fill[before + 1 : last + 1] |= gap[before + 1 : last + 1] > 0
                yield before + 1, last, count

    def find_bounds(self) -> None:
        """Find bounds on the number of skipped steps in each log row, and the factor by which the loss scale moves."""
        if self._format.every_step:
            # If a line does not name the loss scale after its step, take the scale that the step of the next line used.
            is_next = self.follows[1:] & (self.steps[1:] == 1)
            following = np.append(np.where(is_next, self.used[1:], np.nan), np.nan)
            self.after = np.where(np.isnan(self.after), following, self.after)
            with np.errstate(divide="ignore", invalid="ignore"):
                self.low = self.high = np.where(np.isfinite(self.after), np.log2(self.after), np.nan)
        self._narrow()
        self.factor = self._usual_factor()
        bits = max(1.0, math.log2(self.factor))
        self.is_whole = (self.flag >= 0) & ~np.isnan(self.used)
        drops, raises, listed = self._moves(bits)
        overflowed, applied = self.flag == 1, self.flag == 0
        # A line of a record always states the overflow of its own step, even if the lines before it are missing.
        alone = np.where(self.is_whole, overflowed, 0), np.where(self.is_whole, applied, 0)
        least, room = np.maximum(overflowed, listed), self.steps - applied
        fewest = np.maximum(np.where(self.is_whole, drops + alone[0], drops), least)
        most = self.steps - np.where(self.is_whole, raises + alone[1], np.maximum(raises, applied))
        is_one = (self.steps == 1) & (self.flag >= 0)
        fewest, most = (np.where(is_one, overflowed, bound) for bound in (fewest, most))
        self.jumps = ~is_one & (fewest > most) | (np.maximum(drops, raises) > self.steps)
        self.jumps |= is_one & overflowed & (raises > 0)
        fewest, most = np.where(self.jumps, np.minimum(least, room), fewest), np.where(self.jumps, room, most)
        fewest = np.minimum(fewest, most)
        by_moves = ~is_one & ((fewest > least) | (most < room))
        wrong = np.flatnonzero((self.stated >= 0) & (fewest > self.stated + self.gap) & ~self.jumps)
        if len(wrong):
            self.notes.append(
                f"{self._where(int(wrong[0]))}: the scale fell although the line counts no skipped step. This is so on "
                f"{counted(len(wrong), 'line')} in all, so the printed numbers of skipped steps are ignored."
            )
        is_lone = (
            len(self.step) == 1 and self.steps[0] > 1 and not (self._format.every_step or self.counted or self.has_tail)
        )
        if is_lone:
            self.notes.append(
                f"{self._where(0)}: this is the only line that names a step. It is taken to cover all steps up to "
                f"{self.step[0]}, but may cover only the last of these steps."
            )
        fits = (self.stated >= 0) & (self.stated <= most)
        fewest = np.where(fits, np.maximum(fewest, self.stated), fewest)
        if not len(wrong) and not is_lone:
            most = np.where(fits, np.maximum(np.minimum(most, self.stated + self.gap), fewest), most)
            by_moves &= ~(fits & (self.gap == 0))
        self.fewest, self.most = fewest.astype(np.int64), most.astype(np.int64)
        self._flagged, self._least, self._room = overflowed.astype(np.int64), least, room
        self._before, self.guess = (self.fewest.copy(), self.most.copy()), self.fewest.copy()
        for first, last, count in self.counted:
            by_moves[first : last + 1] &= ~self._tighten(slice(first, last + 1), count)
        self.rests_on_moves = bool(by_moves.any())
        jumps = np.flatnonzero(self.jumps & self.follows)
        texts = [
            f"{self._where(row)}: {counted(self.steps[row], 'step')} cannot lead from the scale of the line before to "
            f"{self.after[row]:g}. The run may have been restarted with another scale."
            for row in jumps[jumps > 0].tolist()
        ]
        self._note(texts, "On {} lines, the scale does not follow from the line before.")

    def _tighten(self, rows: slice, count: int) -> Flags:
        """Tighten the bounds on the number of skipped steps in each row; the ``rows`` have ``count`` of them in all.

        Return for each row whether its number of skipped steps is known even without the moves of the loss scale.
        """
        by_lines = self._least[rows].copy(), self._room[rows].copy()
        bounds = self.fewest[rows].copy(), self.most[rows].copy()
        for fewest, most in (bounds, by_lines, (self._flagged[rows].copy(), by_lines[1])):
            if fewest.sum() <= count <= most.sum():
                break
        else:
            return np.zeros(len(bounds[0]), bool)
        self.fewest[rows], self.most[rows] = least, greatest = _with_sum(fewest, most, count)
        left_over = count - int(least.sum()) - np.cumsum(greatest - least) + greatest - least
        self.guess[rows] = least + np.clip(left_over, 0, greatest - least)
        for bound, path in zip(self._before, _with_sum(fewest, most, count, partial=True), strict=True):
            bound[rows] = np.diff(path, prepend=0)
        least, greatest = _with_sum(*by_lines, count)
        decided: Flags = least == greatest
        return decided

    def _usual_factor(self) -> float:
        """Return the most frequent factor between the scales after two consecutive steps; 2 if no factor is known."""
        exact = self.high - self.low < _WIDE_BITS
        change = np.diff(self.low)
        is_move = np.where(self.flag[1:] < 0, True, (change < 0) == (self.flag[1:] == 1))
        change = np.abs(change)
        is_seen = is_move & self.follows[1:] & (self.steps[1:] == 1) & exact[1:] & exact[:-1] & (change > _NEAR_BITS)
        factors, counts = np.unique(np.round(2.0 ** change[is_seen & (change < 1000)], 3), return_counts=True)
        return float(factors[np.argmax(counts)]) if len(factors) else 2.0

    def _narrow(self) -> None:
        """Narrow the bounds on loss scales that the log prints rounded, by the loss scales in the lines around them."""
        wide = self.high - self.low > _WIDE_BITS
        exact = (self.low + self.high)[~wide & ~np.isnan(self.low)] / 2
        if not wide.any():
            return
        if (np.abs(exact - np.round(exact)) < _NEAR_BITS).all():
            low, high = np.ceil(self.low - _NEAR_BITS), np.floor(self.high + _NEAR_BITS)
            fits = low <= high
            self.low, self.high = np.where(fits, low, self.low), np.where(fits, high, self.high)
        down = np.where(self.stated >= 0, self.stated, self.steps)
        up = self.steps - np.where(self.stated >= 0, self.stated, 0)
        rows = np.flatnonzero(self.follows)[int(self.follows[0]) :].tolist()
        for order, back in ((rows, False), (rows[::-1], True)):
            for row in order:
                here, there = (row - 1, row) if back else (row, row - 1)
                fall, rise = (up[row], down[row]) if back else (down[row], up[row])
                low = max(self.low[here], self.low[there] - fall)
                high = min(self.high[here], self.high[there] + rise)
                if low <= high:
                    self.low[here], self.high[here] = low, high
        self.after = np.where(wide, 2.0**self.high, self.after)
        self.stated_after = np.where(wide, self.after, self.stated_after)

    def _moves(self, bits: float) -> tuple[Integers, Integers, Integers]:
        """Return for each log row the least number of loss-scale drops and raises, and the number of overflow lines."""
        at_start = math.log2(self.scale_at_start)
        low, high = (np.append(at_start, bound[:-1]) for bound in (self.low, self.high))
        low, high = (np.where(self.follows, bound, np.nan) for bound in (low, high))
        with np.errstate(divide="ignore", invalid="ignore"):
            used = np.log2(self.used)
        end = [np.where(self.is_whole, used, bound) for bound in (self.low, self.high)]
        drops, raises = _factors(low - end[1], bits), _factors(end[0] - high, bits)
        listed = np.zeros(len(self.step), np.int64)
        for row, overflows in self.overflows.items():
            links = _links(overflows, (low[row], high[row]), (end[0][row], end[1][row]), bits)
            listed[row] = len(overflows)
            raises[row], drops[row] = (sum(counts) for counts in zip(*links, strict=True))
            drops[row] += listed[row]
        return drops, raises, listed

    def prefix_bounds(self) -> Integers:
        """Return for each log line the number of steps up to its end, and bounds on how many of them were skipped."""
        ends, (fewest, most) = np.cumsum(self.steps), map(np.cumsum, self._before)
        bounds = np.column_stack([ends, fewest, most])
        if self.has_tail:
            bounds[-1, 2] = LARGEST_STEP
        whole = self.is_whole & (self.steps > 1)
        before = bounds[whole] - np.column_stack([np.ones_like(ends), self.flag, self.flag])[whole]
        every = np.concatenate([bounds, before])
        ordered: Integers = every[np.argsort(every[:, 0], kind="stable")]
        return ordered


_UNKNOWN: dict[str, Any] = {"f": math.nan, "i": -1}


def _with_sum(fewest: Integers, most: Integers, count: int, partial: bool = False) -> tuple[Integers, Integers]:
    """Tighten bounds on numbers whose sum is ``count``; with ``partial``, return bounds on their partial sums."""
    more_than, less_than = count - int(most.sum()), count - int(fewest.sum())
    if partial:
        fewest, most = np.cumsum(fewest), np.cumsum(most)
    return np.maximum(fewest, more_than + most), np.minimum(most, less_than + fewest)


def _valid(scale: Floats) -> Floats:
    """Return loss scales with nan in place of values that no loss scale can have."""
    can_be = ((scale > _SMALLEST_SCALE) & (scale < _LARGEST_SCALE)) | (scale == math.inf)
    return np.where(can_be, scale, np.nan)


def _factors(difference: Any, bits: float) -> Any:
    """Return how often log2 of the loss scale must rise by ``bits`` to rise by ``difference``; 0 if that is nan."""
    return np.maximum(np.ceil(np.nan_to_num(difference) / bits - _NEAR_BITS), 0).astype(np.int64)


def _links(
    overflows: Sequence[LogLine], before: tuple[float, float], after: tuple[float, float], bits: float
) -> list[tuple[int, int]]:
    """Return the least number of raises and drops of the loss scale before, between and after the given overflows.

    ``before`` and ``after`` bound the binary logarithm of the scale before and after all of the overflows.
    """
    links, (low, high) = [], before
    for line in overflows:
        start = _bits_of(line.loss_scale)
        links.append((int(_factors(start - high, bits)), int(_factors(low - start, bits))))
        end = _bits_of(line.next_loss_scale)
        low, high = (start - bits, start) if math.isnan(end) else (end, end)
    links.append((int(_factors(after[0] - high, bits)), int(_factors(low - after[1], bits))))
    return links


def _bits_of(scale: float | None) -> float:
    return math.log2(scale) if scale is not None and _SMALLEST_SCALE < scale < _LARGEST_SCALE else math.nan
