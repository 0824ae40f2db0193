"""Turn the lines of a log into a run that has values for each step, even where a line is about several steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.record.bounds import LogRows
from mindformers_adaptive.record.log_formats import LogFormat
from mindformers_adaptive.record.log_lines import LogLines
from mindformers_adaptive.record.run import RecordedRun
from mindformers_adaptive.record.step import COLUMNS, LogLine
from mindformers_adaptive.rules.formats import FLOAT16, Format, find_format

__all__ = ["run_of_lines"]

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

# Relative tolerance for comparing loss scales, because logs print rounded scales.
_NEAR = 1e-4


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
    rows = LogRows(lines, log_format, name_of)
    loss_scale, overflow, known = _expand(rows)
    gradient_format = _format_of(lines, rows.notes, name_of)
    ends, without_line = np.cumsum(rows.steps), np.zeros(len(overflow), bool)
    for row in np.flatnonzero(rows.gap).tolist():
        without_line[ends[row] - rows.steps[row] : ends[row] - rows.steps[row] + rows.gap[row]] = True
    return RecordedRun(
        name="",
        files=(),
        log_format=log_format.name,
        step=np.arange(len(overflow)) + np.repeat(rows.step - ends + 1, rows.steps),
        loss_scale=loss_scale,
        overflow=overflow,
        position_known=known,
        columns=_columns(rows),
        scale_factor=rows.factor,
        notes=tuple(rows.notes),
        lines=rows.prefix_bounds(),
        final_loss_scale=float(rows.after[-1]),
        lines_superseded=lines.superseded,
        gradient_format=gradient_format,
        without_line=without_line if without_line.any() else None,
        is_numbered=not rows.has_tail,
    )


def _columns(rows: LogRows) -> dict[str, Floats]:
    """Return the columns of the run: the values that each line states, at the last step of the line."""
    stated, ends = {name: rows.columns[name] for name in COLUMNS}, np.cumsum(rows.steps)
    window, seconds = stated["scale_window"], stated["seconds"]
    stated["scale_window"] = np.where((window >= 1) & (window < math.inf), window, np.nan)
    stated["seconds"] = np.where((seconds >= 0) & (seconds < math.inf), seconds, np.nan)
    stated["next_loss_scale"] = rows.stated_after
    # A record marks the first step after a resume. In other logs, the step number goes back there.
    stated["resumed"] = np.where(rows.restarts, 1, stated["resumed"])
    columns = {}
    for name, values in stated.items():
        # An unknown number is nan, an unknown flag is -1.
        is_known = ~np.isnan(values) if values.dtype.kind == "f" else values >= 0
        if is_known.any():
            columns[name] = np.full(int(rows.steps.sum()), np.nan)
            columns[name][ends - 1] = np.where(is_known, values, np.nan)
    if "seconds" in columns:
        # The time that a line states is the mean time of all its steps.
        columns["seconds"] = np.repeat(stated["seconds"], rows.steps)
    return columns


def _expand(rows: LogRows) -> tuple[Floats, Flags, Flags]:
    """Return for each step the loss scale, the overflow flag, and whether this flag is known."""
    ends, total = np.cumsum(rows.steps), int(rows.steps.sum())
    loss_scale, overflow, known = np.full(total, np.nan), np.zeros(total, bool), np.zeros(total, bool)
    _carry_scales(rows)
    before = _scales_before(rows)
    flag = np.where(rows.flag >= 0, rows.flag, rows.guess > 0).astype(bool)
    # The scale before an overflow is unknown if no line states it: the overflow may have been tolerated (hysteresis).
    used = np.where(np.isnan(before) & ~flag, rows.after, before)
    used = np.where(np.isnan(rows.used), used, rows.used)
    is_known = (rows.fewest == rows.most) & ((rows.fewest == 0) | (rows.fewest == rows.steps))
    overflow[ends - 1], loss_scale[ends - 1], known[ends - 1] = flag, used, is_known | (rows.flag >= 0)
    is_listed = np.isin(np.arange(len(ends)), list(rows.overflows)) & np.isnan(rows.used)
    for row in np.flatnonzero((rows.steps > 1) | is_listed).tolist():
        steps, end, last = int(rows.steps[row]), int(ends[row]), bool(rows.is_whole[row])
        part = slice(end - steps, end - last)
        overflowed, after = int(rows.flag[row] == 1), float(rows.used[row] if last else rows.after[row])
        skips, length = int(rows.guess[row]) - overflowed, steps - last
        flags = np.arange(length) < skips
        if not last and overflowed:
            flags[-1] = True
        if row in rows.overflows:
            loss_scale[part] = _listed_path(rows.factor, rows.overflows[row], flags, float(before[row]), after)
        else:
            loss_scale[part] = _path(rows.factor, flags, float(before[row]), after)
        overflow[part] = flags
        counts = int(rows.fewest[row]) - overflowed, int(rows.most[row]) - overflowed
        known[part] |= counts in ((0, 0), (length, length)) if last else bool(is_known[row])
    if rows.has_tail:
        known[int(ends[-1] - rows.steps[-1]) :] = False
    return loss_scale, overflow, known


def _carry_scales(rows: LogRows) -> None:
    """Set the loss scale after each row that lacks it, if the row's overflows are all listed, or if it has none."""
    for row in np.flatnonzero(np.isnan(rows.after)).tolist():
        listed = rows.overflows.get(row, [])
        is_tail = rows.has_tail and row == len(rows.after) - 1
        if listed and (is_tail or rows.most[row] == len(listed)):
            rows.after[row] = listed[-1].next_loss_scale or math.nan
        elif rows.most[row] == 0 and rows.follows[row]:
            rows.after[row] = rows.after[row - 1] if row else rows.scale_at_start


def _scales_before(rows: LogRows) -> Floats:
    """Return the loss scale before the steps of each row, nan if unknown or if it cannot lead to the scale after it."""
    before = np.append(rows.scale_at_start, rows.after[:-1])
    rises, falls = rows.after > before * (1 + _NEAR), rows.after < before * (1 - _NEAR)
    is_jump = (rows.steps == 1) & (((rows.flag == 1) & rises) | ((rows.flag == 0) & falls))
    texts = [
        f"{rows.where(row)}: an {'overflow' if rows.flag[row] else 'applied step'} cannot lead from the scale "
        f"{before[row]:g} of the line before to {rows.after[row]:g}. The run may have restarted with another scale."
        for row in np.flatnonzero(is_jump & rows.follows).tolist()
    ]
    rows.note(texts, "On {} lines, the scale does not follow from the line before.")
    return np.where(rows.follows & ~is_jump, before, np.nan)


def _path(factor: float, flags: Flags, before: float, after: float) -> Floats:
    """Guess the loss scales of steps without log lines: each of the first overflows lowers the scale.

    If the scale rose, the raise is assumed to follow the last of the steps.
    """
    drops_so_far: Floats = np.cumsum(flags) - flags.astype(np.float64)
    if math.isnan(before):
        return np.full(len(flags), math.nan if flags.any() else after)
    guess: Floats = np.maximum(before * factor**-drops_so_far, min(before, after))
    return guess


def _listed_path(factor: float, listed: Sequence[LogLine], flags: Flags, before: float, after: float) -> Floats:
    """Return the loss scales of the steps between two step lines of a log, using the overflow lines between the two.

    Where the loss scale of an overflow line is higher than the scale before it, applied steps in between are assumed to
    have raised the scale. The scale of skipped steps without an overflow line is unknown. The overflow flags in
    ``flags`` are set to match.
    """
    count = int(flags.sum())
    room, last, path = len(flags) - count, before, list[tuple[bool, float]]()
    for line in listed[:count]:
        scale = last if line.loss_scale is None else line.loss_scale
        while room and last < scale * (1 - _NEAR):
            path.append((False, last))
            last, room = last * factor, room - 1
        path.append((True, scale))
        last = math.nan if line.next_loss_scale is None else line.next_loss_scale
    path += [(True, math.nan)] * (count - min(count, len(listed)))
    if room and math.isnan(after) and count <= len(listed):
        # No line states the scale at the end, but the step after an overflow uses the scale that the overflow set.
        path, room = [*path, (False, last)], room - 1
    path += [(False, after)] * room
    flags[:], scales = map(np.array, zip(*path, strict=True))
    return np.asarray(scales, np.float64)


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
