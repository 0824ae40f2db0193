"""Turn the lines of a log into a run: the steps that each line covers, and how many of them the log calls skipped.

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

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.record.log_formats import LogFormat
from mindformers_adaptive.record.log_lines import LogLines
from mindformers_adaptive.record.overflow_lines import merge_ranks
from mindformers_adaptive.record.run import Move, RecordedRun
from mindformers_adaptive.record.step import COLUMNS, LARGEST_STEP, LogLine
from mindformers_adaptive.record.thresholds import JUMP
from mindformers_adaptive.rules.formats import FLOAT16, Format, find_format
from mindformers_adaptive.text.table import counted

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

# A log line that does not state how many steps it covers, covers at most _LONGEST_INTERVAL. If the line before is
# further away, there is a gap in the log. A longer gap is filled only if the log counts its steps or its skipped steps.
# A run with filled gaps has at most _MOST_STEPS steps.
_LONGEST_INTERVAL, _MOST_STEPS = 10_000, 10**7
# A log whose first line names an overflow at most this late began with the first step.
_START = 1000

# Tolerances in bits for comparing loss scales. The first allows for float32 rounding and eight printed digits. If the
# bounds on a scale are further apart than the second tolerance, the log prints the scale coarsely, such as 9.5.
_NEAR_BITS, _WIDE_BITS = 1e-4, 1e-2
_NEAR = 1e-4

# Limits of a valid loss scale: just above the largest float32, and just below the smallest positive float32.
_LARGEST_SCALE, _SMALLEST_SCALE = 3.5e38, 1e-45

# Numbers of skipped steps "since the line before" that never fall over this many lines are totals.
_SEEMS_TOTAL = 5

_NOTES_OF_A_KIND = 3
# Try only the commonest distances between lines as the length of an interval.
_COMMON = 5
_UNKNOWN: dict[str, Any] = {"f": math.nan, "i": -1}


class _Rows(NamedTuple):
    """The data of a log: a row for each line that names a step, and a last row for overflows after these lines.

    Attributes:
        columns (dict[str, NDArray]): the fields of :class:`LogLine`; -1 and nan stand for None.
        listed (dict[int, list[LogLine]]): for each row, the moves of the scale before it that have lines of their own.
        printed (dict[int, int]): the number of these lines on all ranks.
        restarted (NDArray), unread (NDArray): bool, whether the run was restarted before the row, and whether a line
            before the row cannot be read.
        has_tail (bool): whether the last row is for overflows without a step.
        start_scale (float), start_total (int): of a line of step 0, the scale and the skipped steps before the first
            step; nan and -1 without such a line.
        notes (list[str]): takes notes on the log.
        where (Callable): returns the name of the log line of a row, as ``file:number``.
    """

    columns: dict[str, NDArray[Any]]
    listed: dict[int, list[LogLine]]
    printed: dict[int, int]
    restarted: Flags
    unread: Flags
    has_tail: bool
    start_scale: float
    start_total: int
    notes: list[str]
    where: Callable[[int], str]

    def note(self, texts: Sequence[str], all_of_them: str) -> None:
        """Add the first three of ``texts`` to the notes on the log. If there are more, add a note with their number."""
        self.notes.extend(texts[:_NOTES_OF_A_KIND])
        if len(texts) > _NOTES_OF_A_KIND:
            self.notes.append(all_of_them.format(len(texts)))


class _Spans(NamedTuple):
    """The steps that each row covers.

    Attributes:
        steps (NDArray): int64, how many steps the row is about, including a filled gap before its line.
        gap (NDArray): int64, how many of these steps have no line.
        follows (NDArray): bool, whether the row begins at the step after the row before.
        stated (NDArray): int64, the skipped steps that the line counts since the line before; -1 if it counts none.
        group (NDArray), of_group (NDArray): int64, the group of each row between two totals of skipped steps, and the
            number of skipped steps of each group; -1 if it is not stated.
    """

    steps: Integers
    gap: Integers
    follows: Flags
    stated: Integers
    group: Integers
    of_group: Integers


class _Scales(NamedTuple):
    """The loss scale after each row, nan if it is not stated exactly; and its bounds in bits, nan if not stated."""

    after: Floats
    low: Floats
    high: Floats


def run_of_lines(lines: LogLines, log_format: LogFormat, name_of: Callable[[int], str]) -> RecordedRun:
    """Return the training run that the lines of a log describe.

    Args:
        lines (LogLines): at least one row or overflow.
        log_format (LogFormat): the format.
        name_of (Callable): returns the name of the line with a given number, for notes.

    Returns:
        RecordedRun without a name and files. Its notes say where lines are missing or contradict each other.

    Raises:
        ValueError: if a line names an unknown gradient format.
    """
    rows = _rows(lines, log_format, name_of)
    spans = _spans(rows, log_format)
    scales = _scales(rows, spans, log_format)
    fewest, most, so_far, is_believed = _skipped(rows, spans, scales, log_format)
    used, after = _scales_of_steps(rows, spans, scales, fewest, most)
    gradient_format = _format_of(lines, rows.notes, name_of)
    moves = [_move(row, line) for row, listed in sorted(rows.listed.items()) for line in listed]
    run = RecordedRun(
        name="",
        files=(),
        log_format=log_format.name,
        first=rows.columns["step"] - spans.steps + 1,
        last=rows.columns["step"],
        fewest=fewest,
        most=most,
        used=used,
        after=after,
        columns=_columns(rows, after),
        so_far=so_far,
        restarted=rows.restarted,
        start=rows.start_scale,
        moves=tuple(moves),
        halvings=_halvings(spans, scales, moves),
        notes=tuple(rows.notes),
        lines_superseded=lines.superseded,
        gradient_format=gradient_format,
        is_numbered=not rows.has_tail,
        is_rounded=bool((np.isnan(scales.after) & ~np.isnan(scales.low)).any()),
    )
    flag = rows.columns["overflow"]
    return run if (spans.steps == 1).all() else _split(run, (flag >= 0) & (spans.steps > 1) & is_believed, flag == 1)


def _move(row: int, line: LogLine) -> Move:
    before, after = (math.nan if scale is None else scale for scale in (line.loss_scale, line.next_loss_scale))
    return Move(row, bool(line.overflow), before, after, line.steps or 0)


def _rows(lines: LogLines, log_format: LogFormat, name_of: Callable[[int], str]) -> _Rows:
    notes: list[str] = []
    columns = {name: lines.array(name) for name in lines.columns}
    columns |= {name: _valid(columns[name]) for name in ("loss_scale", "next_loss_scale")}
    # A log line for step 0 states the loss scale and the number of skipped steps before the first step. In the log of
    # another program, which a pattern describes, step 0 is a step.
    first = int(len(lines) > 0 and columns["step"][0] == 0 and log_format.name != "pattern")
    start_total = int(columns["skipped_steps"][0]) if first else -1
    start_scale = float(columns["next_loss_scale"][0]) if first else math.nan
    columns = {name: column[first:] for name, column in columns.items()}
    listed = {max(row - first, 0): group for row, group in merge_ranks(lines.overflows, notes).items()}
    printed = Counter(max(row - first, 0) for row, line in lines.overflows if line.overflow)
    if has_tail := len(columns["step"]) in listed:
        tail = listed[len(columns["step"])]
        # Between two raises, or overflows at one scale, there are more steps, but nothing says how many.
        steps = sum(bool(line.overflow) or (line.steps or 1) * (not len(lines)) for line in tail)
        last = int(columns["step"][-1]) if len(columns["step"]) else 0
        if steps:
            unknown = {name: np.append(column, _UNKNOWN[column.dtype.kind]) for name, column in columns.items()}
            columns = unknown | {"step": np.append(columns["step"], last + steps)}
            columns["steps"][-1] = steps
            notes.append(f"The log ends with {counted(len(tail), 'overflow')} on lines that name no step.")
        else:
            # The raises after the last line that names a step are in a step that has no line.
            has_tail = False
            del listed[len(columns["step"])]
    index = np.arange(len(columns["step"]))
    restarted, unread = (
        np.isin(index, [row - first for row in rows]) for rows in (lines.after_restart, lines.after_damage)
    )

    def where(row: int) -> str:
        return name_of(lines.where[min(row + first, len(lines) - 1)])

    return _Rows(columns, listed, printed, restarted, unread, has_tail, start_scale, start_total, notes, where)


def _spans(rows: _Rows, log_format: LogFormat) -> _Spans:
    """Find how many steps each row of the log covers, and whether the row follows the row before without a gap."""
    columns, step = rows.columns, rows.columns["step"]
    before = np.append(min(int(step[0]) - 1, 0), step[:-1])
    length, apart, stated = columns["steps"], step - before, columns["skipped_since"].copy()
    covered = np.where(length > 0, length, int(log_format.every_step))
    is_silent = np.isnan(columns["next_loss_scale"]) & (stated < 0) & (columns["overflow"] < 0)
    has_only_total = (columns["skipped_steps"] >= 0) & is_silent
    for kind in (has_only_total & (covered == 0), ~has_only_total & (covered == 0)):
        covered[kind] = _strides(np.flatnonzero(kind), step, stated, log_format)
    if log_format.names_overflows:
        # Between two lines that each name the step of an overflow, nothing is stated.
        is_near = apart <= np.where(np.arange(len(step)) > 0, _LONGEST_INTERVAL, _START)
        covered = np.where((columns["overflow"] == 1) & is_near, apart, covered)
    covered[np.cumsum(covered) > _MOST_STEPS] = int(log_format.every_step)
    stated[covered > apart] = -1
    steps = np.minimum(covered, apart)
    gap, index = apart - steps, np.arange(len(step))
    fill = (
        (rows.unread | np.isin(index, list(rows.listed))) & (gap <= _LONGEST_INTERVAL) & ~rows.restarted & (index > 0)
    )
    group, count = _group_by_totals(rows, gap, steps)
    fill |= count[group] >= 0
    texts = [
        f"{rows.where(row)}: the log lacks {counted(gap[row], 'step')} before this line, {before[row] + 1} to "
        f"{before[row] + gap[row]}."
        for row in np.flatnonzero((gap > 0) & ~fill & (index > 0)).tolist()
    ]
    rows.note(texts, "In {} places, steps are missing in the log.")
    gap = np.where(fill, gap, 0)
    steps = steps + gap
    follows = (step - steps == before) & ~rows.restarted
    if log_format.every_step:
        gap = np.where(length > 0, steps, gap)
    return _Spans(steps, gap, follows, stated, group, count)


def _strides(rows: Integers, all_steps: Integers, stated: Integers, log_format: LogFormat) -> Integers:
    """Return how many steps each of the given log rows covers: usually the commonest distance between two rows."""
    step = all_steps[rows]
    if len(step) < 2:
        return np.clip(step, 1, _LONGEST_INTERVAL)
    between = np.diff(step)
    lengths, counts = np.unique(between[between <= _LONGEST_INTERVAL], return_counts=True)
    stride = int(lengths[np.argmax(counts)]) if len(lengths) else 1
    if not log_format.repeats_first_line:
        return np.minimum(stride, np.append(max(step[0], 1), between))
    common = lengths[np.argsort(-counts, kind="stable")[:_COMMON]]
    stride = max({*common.tolist(), *(common + 1).tolist()}, key=partial(_fit, step, stated[rows]), default=1)
    steps, off = np.minimum(stride, np.append(max(step[0], 1), between)), step % stride > 0
    # The first step of a process has a log line of its own. The next line counts this step again among its steps.
    first = np.flatnonzero(off[:-1] & ~off[1:] & (between < stride))
    steps[first] = 1
    again, once = stated[rows[first + 1]], stated[rows[first]]
    stated[rows[first + 1]] = np.where((once >= 0) & (again >= once), again - once, -1)
    return steps


def _fit(step: Integers, stated: Integers, stride: int) -> tuple[int, int]:
    """Return how many lines are the lines of an interval, and how many are that or a process's first line.

    Each interval ends at a multiple of its length. A process's first line is one step after a multiple.
    """
    before = np.append(0, step[:-1])
    ends_interval = (step % stride == 0) & (step - before <= stride) & (before % stride <= 1)
    ends_interval &= stated <= stride
    return int(ends_interval.sum()), int((ends_interval | (step % stride == 1)).sum())


def _group_by_totals(rows: _Rows, gap: Integers, steps: Integers) -> tuple[Integers, Integers]:
    """Group the rows between two totals of skipped steps: the difference of the totals counts their skipped steps.

    Return the group of each row, and for each group the number of skipped steps, -1 if it is not stated. The difference
    covers the gaps before these rows too.
    """
    total, step = rows.columns["skipped_steps"], rows.columns["step"]
    ends = np.flatnonzero(total >= 0)
    group = np.searchsorted(ends, np.arange(len(gap)))
    begins = rows.start_total >= 0 or (math.isnan(rows.start_scale) and bool(len(gap) and gap[0] == 0))
    lasts = np.append(np.append(min(int(step[0]) - 1, 0), step[ends]), LARGEST_STEP)
    totals = np.append(np.append(max(rows.start_total, 0), total[ends]), 0)
    count, length = np.diff(totals), np.diff(lasts)
    missing = np.bincount(group, gap, len(count))
    # A restarted run goes on with the total of its checkpoint.
    is_right = (count >= 0) & (count <= length)
    is_right[0] &= begins
    is_right[-1] = False
    is_right &= np.cumsum(np.where(is_right, missing, 0)) <= _MOST_STEPS - steps.sum()
    return group, np.where(is_right, count, -1)


def _scales(rows: _Rows, spans: _Spans, log_format: LogFormat) -> _Scales:
    """Find the loss scale after each row."""
    after, rounding = rows.columns["next_loss_scale"].copy(), rows.columns["rounding"]
    if log_format.every_step:
        # If a line does not name the loss scale after its step, take the scale that the step of the next line used.
        is_next = spans.follows[1:] & (spans.steps[1:] == 1)
        following = np.append(np.where(is_next, rows.columns["loss_scale"][1:], np.nan), np.nan)
        after = np.where(np.isnan(after), following, after)
    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = np.log2(np.maximum(after - rounding, _SMALLEST_SCALE)), np.log2(after + rounding)
    is_known = np.isfinite(low) & np.isfinite(high)
    low, high = np.where(is_known, low, np.nan), np.where(is_known, high, np.nan)
    is_wide = high - low > _WIDE_BITS
    exact = (low + high)[is_known & ~is_wide] / 2
    if is_wide.any() and (np.abs(exact - np.round(exact)) < _NEAR_BITS).all():
        # Where all exact scales are powers of two, the rounded ones are too. Often only one power of two is printed so.
        lowest, highest = np.ceil(low - _NEAR_BITS), np.floor(high + _NEAR_BITS)
        fits = lowest <= highest
        low, high = np.where(fits, lowest, low), np.where(fits, highest, high)
    after = np.where(is_wide, np.where(low == high, 2.0**high, np.nan), after)
    return _Scales(after, low, high)


def _halvings(spans: _Spans, scales: _Scales, moves: Sequence[Move]) -> float:
    """Return how many bits the scale fell at least: from line to line, or in the overflows with lines of their own."""
    falls = np.where(spans.follows[1:], scales.low[:-1] - scales.high[1:], 0.0)
    listed = sum(math.log2(move.before / move.after) for move in moves if move.before > move.after > 0)
    return max(float(np.nansum(np.maximum(falls, 0.0))), listed)


def _skipped(
    rows: _Rows, spans: _Spans, scales: _Scales, log_format: LogFormat
) -> tuple[Integers, Integers, Integers, Flags]:
    """Return for each row how many of its steps were skipped at least and at most, and these bounds up to its end.

    Return also whether the flag of the row is believed. A total that contradicts named overflows outweighs them: some
    of them may be of an attempt before a restart.
    """
    flag, steps, count = rows.columns["overflow"].astype(np.int64), spans.steps, spans.of_group
    flagged, room = (flag == 1).astype(np.int64), steps - (flag == 0)
    listed = _listed(rows, len(steps))
    if 0 < rows.columns["step"][0] - steps[0] <= steps[0]:
        # If only the first line was lost, the overflows before the second one may be in the steps of the first.
        listed[0] = 0
    if log_format.lists_overflows and rows.listed and not rows.unread.any():
        # Each overflow has a line of its own, so the other steps were applied.
        at = np.minimum(list(rows.printed), len(steps) - 1)
        printed = np.bincount(at, [*rows.printed.values()], len(steps))
        # The first lines of a log that begins late may be cut off.
        is_late = int(rows.columns["step"][0] > steps[0])
        room[is_late:] = np.minimum(np.maximum(printed.astype(np.int64), flagged), room)[is_late:]
    listed = np.minimum(np.maximum(flagged, listed), room)
    is_right, is_lone = _counts_are_right(rows, spans, scales, log_format)
    fits = (spans.stated >= listed) & (spans.stated <= room) & is_right
    fewest = np.where(fits, spans.stated, listed)
    # A lone line may count the skipped steps of only some of the steps up to it.
    most = np.minimum(np.where(fits & ~is_lone, spans.stated + spans.gap, room), room)
    # If the lines of a group contradict its count, believe fewer of the statements about single lines.
    count, is_open = count[spans.group], count[spans.group] >= 0
    for low, high in ((fewest, most), (listed, room), (flagged, room)):
        chosen = is_open & (_sums(low, spans) <= count) & (count <= _sums(high, spans))
        fewest, most = np.where(chosen, low, fewest), np.where(chosen, high, most)
        is_open &= ~chosen
    is_believed = ~is_open | (not log_format.names_overflows)
    fewest, most = np.where(is_believed, fewest, 0), np.where(is_believed, most, steps)
    in_group = (spans.of_group[spans.group] >= 0) & (~is_open | ~is_believed)
    spare, short = count - _sums(fewest, spans), count - _sums(most, spans)
    begins = np.append(True, spans.group[1:] != spans.group[:-1])
    first_of_group = np.searchsorted(spans.group, spans.group)
    paths = []
    for bounds, opposite, limit, choose in ((fewest, most, short, np.maximum), (most, fewest, spare, np.minimum)):
        path = choose(_running(bounds, first_of_group), limit + _running(opposite, first_of_group))
        paths.append(np.cumsum(np.where(in_group, np.where(begins, path, np.diff(path, prepend=0)), bounds)))
    so_far = np.column_stack(paths)
    if rows.has_tail:
        so_far[-1, 1] = LARGEST_STEP
    lowest, highest = np.maximum(fewest, short + most), np.minimum(most, spare + fewest)
    return np.where(in_group, lowest, fewest), np.where(in_group, highest, most), so_far, is_believed


def _sums(values: Integers, spans: _Spans) -> Integers:
    """Return for each row the sum of ``values`` in its group."""
    sums: Integers = np.bincount(spans.group, values, len(spans.of_group)).astype(np.int64)[spans.group]
    return sums


def _running(values: Integers, first_of_group: Integers) -> Integers:
    """Return for each row the sum of ``values`` in its group up to this row."""
    total = np.cumsum(values)
    running: Integers = total - np.append(0, total)[first_of_group]
    return running


def _listed(rows: _Rows, count: int) -> Integers:
    """Return for each row how many overflows before it have lines of their own."""
    listed = np.zeros(count, np.int64)
    for row, lines in rows.listed.items():
        overflows = [line for line in lines if line.overflow]
        if (row == 0 and not rows.has_tail) or rows.restarted[row]:
            # Where the scale jumps back up, the run was restarted before its first line that names a step. Overflows
            # of the attempts before that restart are not among the steps of this row.
            starts = [
                index + 1
                for index, (line, following) in enumerate(pairwise(overflows))
                if (following.loss_scale or 0.0)
                > 2 * (line.next_loss_scale or line.loss_scale or math.inf) * (1 + _NEAR)
            ]
            overflows = overflows[starts[-1] if starts else 0 :]
        listed[row] = len(overflows)
    return listed


def _counts_are_right(rows: _Rows, spans: _Spans, scales: _Scales, log_format: LogFormat) -> tuple[bool, bool]:
    """Return whether the lines' counts of skipped steps are right, and whether the log has just one line with a step.

    If one count is certainly wrong, believe none.
    """
    fell = spans.follows[1:] & (scales.high[1:] < scales.low[:-1] - _NEAR_BITS) & (spans.gap[1:] == 0)
    wrong = np.flatnonzero(fell & (spans.stated[1:] == 0)) + 1
    # Where the lines count the skipped steps at most falls, a restart with a lower scale explains the others.
    are_wrong = len(wrong) > int((fell & (spans.stated[1:] > 0)).sum())
    if are_wrong:
        rows.notes.append(
            f"{rows.where(int(wrong[0]))}: the scale fell although the line counts no skipped step. This is so on "
            f"{counted(len(wrong), 'line')} in all, so the printed numbers of skipped steps are ignored."
        )
    is_lone = len(spans.steps) == 1 and spans.steps[0] > 1 and not log_format.every_step and spans.of_group[0] < 0
    is_lone &= not rows.has_tail
    if is_lone:
        rows.notes.append(
            f"{rows.where(0)}: this is the only line that names a step. It is taken to cover all steps up to "
            f"{rows.columns['step'][0]}, but may cover only the last of these steps."
        )
    counts = spans.stated[spans.stated >= 0]
    moved = np.diff(counts[np.argmax(counts > 0) :]) if len(counts) else counts
    if log_format.name == "pattern" and len(moved) >= _SEEMS_TOTAL and (moved >= 0).all() and (moved > 0).sum() > 1:
        rows.notes.append(
            "The numbers of the group 'skipped' never fall: they seem to count from the start of the run, and are "
            "ignored. Name the group 'total_skipped'."
        )
        return False, is_lone
    return not are_wrong, is_lone


def _scales_of_steps(
    rows: _Rows, spans: _Spans, scales: _Scales, fewest: Integers, most: Integers
) -> tuple[Floats, Floats]:
    """Return the loss scale that the last step of each row used, and the scale after it; nan if it is not stated."""
    flag, after, used = rows.columns["overflow"], scales.after, rows.columns["loss_scale"]
    lists_all = any(not line.overflow for lines in rows.listed.values() for line in lines)
    for row, lines in rows.listed.items():
        overflows = [line for line in lines if line.overflow]
        if fewest[row] == spans.steps[row] == len(overflows) or (lists_all and most[row] == len(overflows)):
            # No step after the last move can have moved the scale again.
            stated = lines[-1].next_loss_scale
            after[row] = after[row] if stated is None or not math.isnan(after[row]) else stated
            if spans.steps[row] == 1 and np.isnan(used[row]) and overflows and overflows[0].loss_scale is not None:
                used[row] = overflows[0].loss_scale
    before = np.append(rows.start_scale, after[:-1])
    rises, falls = after > before * (1 + _NEAR), after < before * (1 - _NEAR)
    is_applied, is_skipped = (most == 0) & (spans.steps == 1), (fewest == 1) & (spans.steps == 1)
    # Where a line states the scale of its step, as in a record, the rule may move it in any way.
    is_jump = np.isnan(used) & ((is_skipped & rises) | (is_applied & (falls | (after > before * JUMP))))
    texts = [
        f"{rows.where(row)}: an {'overflow' if is_skipped[row] else 'applied step'} cannot lead from the scale "
        f"{before[row]:g} of the line before to {after[row]:g}. The run may have restarted with another scale."
        for row in np.flatnonzero(is_jump & spans.follows).tolist()
    ]
    rows.note(texts, "On {} lines, the scale does not follow from the line before.")
    before = np.where(spans.follows & ~is_jump, before, np.nan)
    if len(flag) > 2 and rows.columns["step"][0] == 1 and is_applied[:3].all() and len(set(after[:3])) == 1:
        # The first step did not raise the scale: then the next two would have done so too.
        before[0] = after[0] if np.isnan(before[0]) else before[0]
    stays = (most == 0) & (before == after)
    return np.where(np.isnan(used) & ((spans.steps == 1) | stays), before, used), after


def _split(run: RecordedRun, is_flagged: Flags, overflowed: Flags) -> RecordedRun:
    """Return the run with the last step of each flagged stretch as a stretch of its own.

    Args:
        run (RecordedRun): a run with stretches of several steps.
        is_flagged (NDArray): bool, whether the log states the outcome of the stretch's last step.
        overflowed (NDArray): bool, whether this last step was skipped.
    """
    count, index = 1 + is_flagged, np.repeat(np.arange(len(is_flagged)), 1 + is_flagged)
    ends = np.cumsum(count) - 1
    is_rest = np.ones(len(index), bool)
    is_rest[ends] = False
    is_last = np.zeros(len(index), bool)
    is_last[ends[is_flagged]] = True
    flag = overflowed[index].astype(np.int64)
    so_far = np.asarray(run.so_far)[index]

    def pick(values: Floats) -> Floats:
        return np.where(is_rest, np.nan, values[index])

    return replace(
        run,
        first=np.where(is_last, run.last[index], run.first[index]),
        last=np.where(is_rest, run.last[index] - 1, run.last[index]),
        fewest=np.where(is_last, flag, run.fewest[index] - is_rest * flag),
        most=np.where(is_last, flag, run.most[index] - is_rest * flag),
        used=pick(run.used),
        after=pick(run.after),
        columns={name: pick(values) for name, values in run.columns.items()},
        so_far=so_far - (is_rest * flag)[:, np.newaxis],
        restarted=np.asarray(run.restarted)[index] & ~is_last,
        moves=tuple(move._replace(stretch=int(np.searchsorted(index, move.stretch))) for move in run.moves),
    )


def _columns(rows: _Rows, after: Floats) -> dict[str, Floats]:
    """Return the columns of the run: the values that each line states, at the last step of the line."""
    stated = {name: rows.columns[name] for name in COLUMNS}
    window = stated["scale_window"]
    stated["scale_window"] = np.where((window >= 1) & (window < math.inf), window, np.nan)
    stated["next_loss_scale"] = after
    # A record marks the first step after a resume. In other logs, the step number goes back there.
    stated["resumed"] = np.where(rows.restarted, 1, stated["resumed"])
    columns = {}
    for name, values in stated.items():
        # An unknown number is nan, an unknown flag is -1.
        is_known = ~np.isnan(values) if values.dtype.kind == "f" else values >= 0
        if is_known.any():
            columns[name] = np.where(is_known, values, np.nan)
    return columns


def _format_of(lines: LogLines, notes: list[str], name_of: Callable[[int], str]) -> Format:
    """Return the first gradient format that a log line names; raise ValueError if that format is unknown."""
    if not lines.formats:
        return FLOAT16
    row, named = lines.formats[0]
    if any(other != named for _, other in lines.formats):
        names = dict.fromkeys(other if isinstance(other, str) else repr(other)[:80] for _, other in lines.formats)
        notes.append(
            f"The lines name several formats of gradients, {', '.join(names)}: the first one is taken for all. Read "
            "each part from a file of its own."
        )
    try:
        return find_format(named)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name_of(lines.where[row])}: {error}") from error


def _valid(scale: Floats) -> Floats:
    """Return loss scales with nan in place of values that no loss scale can have."""
    can_be = ((scale > _SMALLEST_SCALE) & (scale < _LARGEST_SCALE)) | (scale == math.inf) | (scale == 0)
    return np.where(can_be, scale, np.nan)
