"""What a loss scale did in a run, as phases: consecutive drops, consecutive raises."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.lab.traces.recorded_run import RecordedRun
from mindformers_adaptive.lab.traces.trace import consecutive_runs
from mindformers_adaptive.text.table import as_power_of_two

__all__ = ["PATH_HEADING", "Change", "Phase", "as_range", "changes_of", "path_line", "phases", "ranges"]

PATH_HEADING = "   steps      what the loss scale did      loss scale        window"

# What happened within lines that stand for several steps.
_WITHIN_LINES = {"fall": "fell over {} line", "rise": "rose over {} line"}

# Printed scales are rounded.
_NEAR = 1e-3


class Change(NamedTuple):
    """A step after which the loss scale or the window is another one.

    Attributes:
        step (int): the number of the step.
        kind (str): "drop", after an overflow; "raise", after clean steps; "fall" or "rise", all that happened in the
            several steps of a line of the log; "jump", which no step can have made: at a restart or a gap in the log.
        before (tuple[float, int or None]): the scale and the window that the step used; None for an unknown window.
        after (tuple[float, int or None]): those for the next step.
        first_step (int, optional): the first of several steps that the change lies in. Default: None, just ``step``.
    """

    step: int
    kind: str
    before: tuple[float, int | None]
    after: tuple[float, int | None]
    first_step: int | None = None


class Phase(NamedTuple):
    """Changes of one kind, one after another.

    Attributes:
        kind (str): as in :class:`Change`.
        changes (int): how many.
        first_step (int): the step of the first change.
        last_step (int): that of the last.
        scale_before (float): the loss scale before the first change.
        scale_after (float): the loss scale after the last.
        windows (tuple[int, ...]): the windows that were in force, in steps, each once; empty where unknown.
    """

    kind: str
    changes: int
    first_step: int
    last_step: int
    scale_before: float
    scale_after: float
    windows: tuple[int, ...]


def phases(changes: Iterable[Change]) -> list[Phase]:
    """Return the phases of changes, which come in the order of their steps.

    Examples:
        >>> drops = [Change(step, "drop", (2.0**k, 20), (2.0 ** (k - 1), 20)) for step, k in ((1, 18), (2, 17))]
        >>> print(path_line(phases(drops)[0]))
           1-2        2 drops                      2^18 -> 2^16      20
    """
    result = []
    for kind, group in itertools.groupby(changes, key=lambda change: change.kind):
        row = list(group)
        windows = [row[0].before[1], *(change.after[1] for change in row)]
        known = tuple(dict.fromkeys(window for window in windows if window is not None))
        first = row[0].step if row[0].first_step is None else row[0].first_step
        result.append(Phase(kind, len(row), first, row[-1].step, row[0].before[0], row[-1].after[0], known))
    return result


def path_line(phase: Phase) -> str:
    """Return a phase as a line below ``PATH_HEADING``."""
    steps = as_range(phase.first_step, phase.last_step)
    plural = "s" if phase.changes > 1 else ""
    what = f"{_WITHIN_LINES.get(phase.kind, '{} ' + phase.kind).format(phase.changes)}{plural}"
    scales = f"{as_power_of_two(phase.scale_before)} -> {as_power_of_two(phase.scale_after)}"
    return f"   {steps:<10} {what:<28} {scales:<17} {' -> '.join(map(str, phase.windows))}".rstrip()


def changes_of(run: RecordedRun) -> list[Change]:
    """Return the changes of the scale of a recorded run.

    No log is asked for windows. That of a raise is the number of clean steps since the overflow or raise before it, if
    the log knows each of them; else, and at a drop or jump, it is None.

    Examples:
        >>> flags = np.array([True, False, False, False])
        >>> run = RecordedRun("run", (), "jsonl", np.arange(1, 5), np.array([4.0, 2.0, 2.0, 4.0]), flags, ~flags | True)
        >>> [(change.step, change.kind, change.after) for change in changes_of(run)]
        [(1, 'drop', (2.0, None)), (3, 'raise', (4.0, 2))]
    """
    first, last = _units(run)
    scale = np.append(run.loss_scale[first], run.final_loss_scale)
    follows = np.append(run.step[first[1:]] == run.step[last[:-1]] + 1, True)
    known = np.flatnonzero(~np.isnan(scale))
    skipped = np.flatnonzero(run.overflow)
    changes, started = [], -1
    for unit, following in itertools.pairwise(known.tolist()):
        before, after = float(scale[unit]), float(scale[following])
        if before == after:
            continue
        start, here = int(first[unit]), int(last[following - 1])
        kind = _kind(before, after, run, start, here) if follows[unit:following].all() else "jump"
        window = None
        if kind == "raise":
            earlier = np.searchsorted(skipped, here)
            window = _clean_steps(run, max(started, int(skipped[earlier - 1]) if earlier else -1), here)
        # The scale of a jump, a fall or a rise began at an unknown step.
        started = here if kind in ("drop", "raise") else len(run)
        first_step = int(run.step[start]) if here > start else None
        changes.append(Change(int(run.step[here]), kind, (before, window), (after, window), first_step))
    return changes


def _units(run: RecordedRun) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first and the last place of each step that the log knows, and of each line with others."""
    ends = run.line_ends()
    lengths = np.diff(ends, prepend=0)
    line = np.repeat(np.arange(len(ends)), lengths)
    all_known = np.bincount(line, run.position_known) == lengths
    last = np.flatnonzero(all_known[line] | np.isin(np.arange(len(run)), ends - 1))
    return np.append(0, last[:-1] + 1), last


def _kind(before: float, after: float, run: RecordedRun, first: int, last: int) -> str:
    steps, factor, falls = last - first + 1, (run.factor_bound or run.scale_factor) * (1 + _NEAR), after < before
    is_possible = min(before, after) > 0 and not math.isinf(max(before, after))
    if not is_possible or abs(math.log2(after / before)) > steps * math.log2(factor):
        return "jump"
    if steps == 1 and run.overflow[first] != falls:
        return "jump"
    return [("raise", "drop"), ("rise", "fall")][steps > 1][falls]


def _clean_steps(run: RecordedRun, last: int, here: int) -> int | None:
    """How many clean steps lie after the place of the last overflow or raise, up to this one; None if unknown."""
    steps, first = here - last, max(last, 0)
    begins_in_the_log = last >= 0 or run.step[0] == 1
    if steps < 1 or not begins_in_the_log or run.step[here] - run.step[first] != here - first:
        return None
    return steps if run.position_known[first : here + 1].all() else None


def ranges(numbers: Sequence[int]) -> str:
    """Return increasing numbers as text, with a range for each run of consecutive ones.

    Examples:
        >>> ranges([1, 2, 3, 7]), ranges([])
        ('1-3, 7', 'none')
    """
    return ", ".join(as_range(*run) for run in consecutive_runs(numbers).tolist()) or "none"


def as_range(first: int, last: int) -> str:
    """Return the steps from one to another as text."""
    return f"{first}" if first == last else f"{first}-{last}"
