"""Count overflows that have log lines of their own: several ranks and source files may print the same overflow."""

import math
from collections.abc import Iterable
from datetime import datetime

from mindformers_adaptive.record.step import LogLine
from mindformers_adaptive.text.table import counted

# Ranks print the same overflow within this many seconds, including the difference between their clocks, and within this
# many rows of steps. Equal lines further apart are about different overflows.
_SECONDS_APART, _ROWS_APART = 10.0, 8


def merge_ranks(overflows: Iterable[tuple[int, LogLine]], notes: list[str]) -> dict[int, list[LogLine]]:
    """Return a log's overflow lines with each overflow once, in groups by the row before which they stand.

    Each rank and source file prints an overflow once. So take the lines of the rank and source file that has most of
    them. Lines that name no rank may be of several ranks: count equal lines of the same moment once.

    Args:
        overflows (Iterable[tuple[int, LogLine]]): the overflow lines, each with the number of rows before it.
        notes (list[str]): takes a note on the number of merged lines.
    """
    lines_of: dict[tuple[str, str], list[tuple[int, LogLine]]] = {}
    for row, line in overflows:
        lines_of.setdefault((line.source, line.rank), []).append((row, line))
    each_once = [lines if rank else _without_repeats(lines) for (_, rank), lines in lines_of.items()]
    chosen = max(each_once, key=len, default=[])
    if merged := sum(map(len, lines_of.values())) - len(chosen):
        lines = counted(merged, "overflow line")
        notes.append(f"Merged: {lines} of other ranks or source files about the same overflows.")
    grouped: dict[int, list[LogLine]] = {}
    for row, line in chosen:
        grouped.setdefault(row, []).append(line)
    return grouped


def _without_repeats(lines: Iterable[tuple[int, LogLine]]) -> list[tuple[int, LogLine]]:
    """Return the lines without those that several ranks may have printed about one overflow."""
    result: list[tuple[int, LogLine]] = []
    # For each kind of overflow, the row and the time of its last line.
    last: dict[tuple[float | bool | None, ...], tuple[int, float]] = {}
    for row, line in lines:
        moment, scales = _seconds(line.moment), (line.overflow, line.loss_scale, line.next_loss_scale)
        repeats = [
            earlier
            for earlier, (earlier_row, earlier_moment) in last.items()
            if all(None in pair or pair[0] == pair[1] for pair in zip(scales, earlier, strict=True))
            # Without a time, the comparison with nan is False.
            and not abs(moment - earlier_moment) > _SECONDS_APART
            and (not math.isnan(moment - earlier_moment) or row - earlier_row <= _ROWS_APART)
            # Between two raises to the same scale there is an overflow, whose line may name its step.
            and (line.overflow or row == earlier_row)
        ]
        if not repeats:
            result.append((row, line))
        for kind in repeats or [scales]:
            last[kind] = (row, moment)
    return result


def _seconds(moment: str) -> float:
    try:
        return datetime.fromisoformat(moment.replace(",", ".")).timestamp()
    except ValueError:
        return math.nan
