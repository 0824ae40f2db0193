"""The changes of the loss scale in a run, and phases: consecutive changes of one kind, such as raises."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.record.run import RecordedRun
from mindformers_adaptive.text.table import as_power_of_two

__all__ = ["Change", "Phase", "as_range", "changes_of", "path_line", "path_lines", "phases"]

_HEADING = "   steps      what the loss scale did      loss scale"

_IN_WORDS = {
    "fall": "fell over {} line",
    "rise": "rose over {} line",
    "applied fall": "fell at {} applied step",
    "overflow rise": "rose at {} overflow",
}

# Relative tolerance for comparing loss scales, because logs print rounded scales.
_NEAR = 1e-3


class Change(NamedTuple):
    """A change of the loss scale, after one step or somewhere within several steps.

    Attributes:
        step (int): the number of the step.
        kind (str): "drop" (after an overflow); "raise" (after an applied step); "applied fall" or "overflow rise" (only
            some rules make these); "fall" or "rise" (the total change in a log line that stands for several steps);
            "jump" (no known step of the rule explains the change: a restart, or a gap in the log).
        before (tuple[float, int or None]): the scale and the window that the step used; None for an unknown window.
        after (tuple[float, int or None]): the scale and the window for the next step; None for an unknown window.
        first_step (int, optional): the first of the steps within which the scale changed, if there are several.
            Default: None, the scale changed after ``step``.
        clean_steps (int, optional): for a raise, the number of clean steps since the overflow or raise before it, if
            the log shows each of these steps. Default: None.
    """

    step: int
    kind: str
    before: tuple[float, int | None]
    after: tuple[float, int | None]
    first_step: int | None = None
    clean_steps: int | None = None


class Phase(NamedTuple):
    """Consecutive changes of the loss scale that are of one kind, such as raises.

    Attributes:
        kind (str): as in :class:`Change`.
        changes (int): the number of changes.
        first_step (int): the step of the first change.
        last_step (int): the step of the last change.
        scale_before (float): the loss scale before the first change.
        scale_after (float): the loss scale after the last change.
        windows (tuple[int, ...]): the windows during the phase, in steps, without repetition; empty if unknown.
    """

    kind: str
    changes: int
    first_step: int
    last_step: int
    scale_before: float
    scale_after: float
    windows: tuple[int, ...]


def phases(changes: Iterable[Change]) -> list[Phase]:
    """Group consecutive changes of the loss scale into phases. A phase has changes of only one kind, such as raises.

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


def path_lines(path: Sequence[Phase]) -> list[str]:
    """Return phases of the loss scale as lines of a table, with a heading. Scale windows are shown if any are known."""
    return [_HEADING + "        window" * any(phase.windows for phase in path), *map(path_line, path)]


def path_line(phase: Phase) -> str:
    """Return a phase of the loss scale as one line of the table that :func:`path_lines` returns."""
    steps = as_range(phase.first_step, phase.last_step)
    plural = "s" if phase.changes > 1 else ""
    what = f"{_IN_WORDS.get(phase.kind, '{} ' + phase.kind).format(phase.changes)}{plural}"
    scales = f"{as_power_of_two(phase.scale_before)} -> {as_power_of_two(phase.scale_after)}"
    return f"   {steps:<10} {what:<28} {scales:<17} {' -> '.join(map(str, phase.windows))}".rstrip()


def changes_of(run: RecordedRun) -> list[Change]:
    """Return the changes of the loss scale in a recorded run.

    The scale windows are taken from the log. Changes within a log line that stands for several steps are a fall or a
    rise. If a line states one scale for the next step, but the next step used another scale, the difference is a jump.

    Examples:
        >>> flags = np.array([True, False, False, False])
        >>> run = RecordedRun("run", (), "jsonl", np.arange(1, 5), np.array([4.0, 2.0, 2.0, 4.0]), flags, ~flags | True)
        >>> [(change.step, change.kind, change.after, change.clean_steps) for change in changes_of(run)]
        [(1, 'drop', (2.0, None), None), (3, 'raise', (4.0, None), 2)]
    """
    first, last = _units(run)
    scale = np.append(run.loss_scale, run.final_loss_scale)
    stated = run.column("next_loss_scale")
    stated = np.full(len(run), math.nan) if stated is None else stated
    follows = np.append(np.diff(run.step) == 1, True)
    known, skipped = np.flatnonzero(~np.isnan(scale)), np.flatnonzero(run.overflow)
    # Look only at the few steps where the loss scale changes.
    at_end, used = stated[known[1:] - 1], scale[known[:-1]]
    differs = (scale[known[1:]] != used) | (~np.isnan(at_end) & (at_end != used))
    changes: list[Change] = []
    started = -1
    for position, following in zip(known[:-1][differs].tolist(), known[1:][differs].tolist(), strict=True):
        start, here = int(first[position]), int(last[following - 1])
        before, after = float(scale[position]), float(scale[following])
        reached, kind = after, "jump"
        is_stated = here == following - 1 and not math.isnan(stated[here])
        if is_stated:
            reached = float(stated[here])
        if is_stated or (follows[position:following].all() and _can_move(before, after, following - position, run)):
            kind = _kind_of_step(before, reached, run, here) if start == here else _direction(before, reached)
        windows = _window(run, max(start - 1, 0)), _window(run, here)
        first_step = int(run.step[start]) if here > start else None
        for name, old, new in ((kind, before, reached), ("jump", reached, after)):
            if old == new:
                continue
            clean_steps = _clean_steps(run, skipped, started, here) if name == "raise" else None
            # For a "jump", "fall" or "rise" of the loss scale, the log does not show at which step the new loss scale
            # began. So do not count the clean steps at the new loss scale.
            started = len(run) if name in ("jump", "fall", "rise") else here
            change = Change(int(run.step[here]), name, (old, windows[0]), (new, windows[1]), first_step, clean_steps)
            if first_step and changes and changes[-1][:2] == change[:2] and name in ("fall", "rise"):
                change = change._replace(before=changes.pop().before)
            changes.append(change)
    return changes


def _units(run: RecordedRun) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return two arrays: for each step, the index of the first and of the last step that its log line covers.

    If the log shows for every step of the line whether it was skipped, both are the index of the step itself.
    """
    ends = run.line_ends()
    lengths = np.diff(ends, prepend=0)
    line = np.repeat(np.arange(len(ends)), lengths)
    all_known = np.bincount(line, run.position_known) == lengths
    index = np.arange(len(run))
    return np.where(all_known[line], index, (ends - lengths)[line]), np.where(all_known[line], index, (ends - 1)[line])


def _can_move(before: float, after: float, steps: int, run: RecordedRun) -> bool:
    """Return whether a scale can become ``after`` in ``steps`` steps that each change it by up to one scale factor."""
    if min(before, after) <= 0 or math.isinf(max(before, after)):
        return False
    return abs(math.log2(after / before)) <= steps * math.log2(max(2.0, run.scale_factor) * (1 + _NEAR))


def _direction(before: float, after: float) -> str:
    return "fall" if after < before else "rise"


def _kind_of_step(before: float, after: float, run: RecordedRun, index: int) -> str:
    if run.overflow[index]:
        return "drop" if after < before else "overflow rise"
    return "applied fall" if after < before else "raise"


def _window(run: RecordedRun, index: int) -> int | None:
    windows = run.column("scale_window")
    return None if windows is None or math.isnan(windows[index]) else int(windows[index])


def _clean_steps(run: RecordedRun, skipped: NDArray[np.int64], started: int, here: int) -> int | None:
    """Return the number of clean steps up to the index ``here``, or None if this number is unknown.

    The count begins after the last overflow or after the index ``started``, whichever is later.
    """
    earlier = np.searchsorted(skipped, here)
    last = max(started, int(skipped[earlier - 1]) if earlier else -1)
    steps, first = here - last, max(last, 0)
    begins_in_the_log = last >= 0 or run.step[0] == 1
    if steps < 1 or not begins_in_the_log or run.step[here] - run.step[first] != here - first:
        return None
    return steps if run.position_known[first : here + 1].all() else None


def as_range(first: int, last: int) -> str:
    """Return the steps from ``first`` to ``last`` as text."""
    return f"{first}" if first == last else f"{first}-{last}"
