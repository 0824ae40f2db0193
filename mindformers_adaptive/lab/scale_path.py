"""The changes of the loss scale in a run, and phases: consecutive changes of one kind, such as raises."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mindformers_adaptive.record.run import Move, RecordedRun
from mindformers_adaptive.record.thresholds import JUMP
from mindformers_adaptive.text.table import as_power_of_two

_HEADING = "   steps      what the loss scale did      loss scale"

_IN_WORDS = {
    "fall": "fell over {} line",
    "rise": "rose over {} line",
    "applied fall": "fell at {} applied step",
    "overflow rise": "rose at {} overflow",
}

# Relative tolerance for comparing loss scales, because logs print rounded scales.
_NEAR = 1e-3


class Phase(NamedTuple):
    """Consecutive changes of the loss scale that are of one kind, such as raises.

    Attributes:
        kind (str): "drop" (after an overflow); "raise" (after an applied step); "applied fall" or "overflow rise" (only
            some rules make these); "fall" or "rise" (where the log does not state which step did it, or whether that
            step was skipped); "jump" (no step explains the change: a restart, or a gap in the log).
        changes (int): the number of changes.
        first_step (int): the step of the first change, or the first step within which that change was.
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
    windows: tuple[int, ...] = ()


def phases(changes: Iterable[Phase]) -> list[Phase]:
    """Join single changes of the loss scale that are of one kind and of which each leads on from the last.

    Examples:
        >>> drops = [Phase("drop", 1, step, step, 2.0**k, 2.0 ** (k - 1), (20,)) for step, k in ((1, 18), (2, 17))]
        >>> print(path_line(phases(drops)[0]))
           1-2        2 drops                      2^18 -> 2^16      20
    """
    result: list[Phase] = []
    for change in changes:
        last = result[-1] if result else change
        if not result or last.kind != change.kind or not _are_near(last.scale_after, change.scale_before):
            result.append(change)
            continue
        result[-1] = last._replace(
            changes=last.changes + 1,
            last_step=change.last_step,
            scale_after=change.scale_after,
            windows=tuple(dict.fromkeys(last.windows + change.windows)),
        )
    return result


def _are_near(first: float, second: float) -> bool:
    # Logs print rounded scales.
    return math.isclose(first, second, rel_tol=_NEAR)


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


def changes_of(run: RecordedRun) -> list[Phase]:
    """Return each change of the loss scale in a recorded run, between the scales that its log states.

    Examples:
        >>> run = RecordedRun.of_steps(range(1, 5), [4.0, 2.0, 2.0, 4.0], [True, False, False, False])
        >>> [(change.last_step, change.kind, change.scale_after) for change in changes_of(run)]
        [(1, 'drop', 2.0), (3, 'raise', 4.0)]
    """
    moves = [
        (move.stretch, _change_of_move(run, move))
        for move in run.moves
        if move.before == move.before != move.after == move.after
    ]
    moved = {stretch for stretch, _ in moves}
    # Between lines, a change that has lines of its own is not counted again.
    between = [(end, change) for end, change in _between_lines(run) if end not in moved]
    return [change for _, change in sorted([*moves, *between], key=lambda pair: pair[0])]


def _change_of_move(run: RecordedRun, move: Move) -> Phase:
    kind = ("drop" if move.after < move.before else "overflow rise") if move.is_overflow else "raise"
    return Phase(kind, 1, int(run.first[move.stretch]), int(run.last[move.stretch]), move.before, move.after)


def _between_lines(run: RecordedRun) -> Iterator[tuple[int, Phase]]:
    """Yield each change between two scales that the lines of steps state, and the index of the stretch that ends it."""
    # The stated scales in order: the scale before the run, then for each stretch the scale it used and the scale after.
    scales = np.append(run.start, np.column_stack([np.where(run.lengths == 1, run.used, np.nan), run.after]).ravel())
    known = np.flatnonzero(~np.isnan(scales))
    # Look only at the few places where the loss scale changes.
    at = np.flatnonzero(scales[known[1:]] != scales[known[:-1]])
    breaks = np.cumsum(np.append(False, ~run.follows[1:]))
    windows = run.columns.get("scale_window", np.full(len(run.last), np.nan))
    for here, there in zip(known[at].tolist(), known[at + 1].tolist(), strict=True):
        stretch, before, after = (here - 1) // 2, float(scales[here]), float(scales[there])
        # The scale changed within the stretches from ``begin`` to ``end``; between two of them if ``end`` is smaller.
        begin, end = stretch + (here % 2 == 0), (there - 1) // 2 - there % 2
        is_gap = breaks[(there - 1) // 2] > breaks[max(stretch, 0)]
        if here % 2 and there == here + 1:
            kind = _kind_of_step(before, after, run, end)
        elif end < begin or is_gap:
            kind = "jump"
        else:
            kind = _kind_of_steps(before, after, run, begin, end)
        step, first = int(run.last[max(end, 0)]), int(run.first[begin])
        at_ends = windows[[max(begin - 1, 0), max(end, 0)]]
        stated = at_ends[~np.isnan(at_ends)].astype(int).tolist()
        yield end, Phase(kind, 1, min(first, step), step, before, after, tuple(dict.fromkeys(stated)))


def _kind_of_step(before: float, after: float, run: RecordedRun, index: int) -> str:
    # Only a record names the rule's own next scale. In other logs, a rule moves the scale by a factor of two or so.
    if math.isinf(before + after) or (run.log_format != "jsonl" and not 1 / JUMP <= after / before <= JUMP):
        return "jump"
    if run.skipped[index]:
        return "drop" if after < before else "overflow rise"
    if run.applied[index]:
        return "applied fall" if after < before else "raise"
    return "fall" if after < before else "rise"


def _kind_of_steps(before: float, after: float, run: RecordedRun, begin: int, end: int) -> str:
    """Return the kind of a change within several steps, each of which may change the scale by a factor of two."""
    steps = int(run.last[end] - run.first[begin]) + 1
    if steps == 1 or min(before, after) <= 0 or math.isinf(max(before, after)):
        return "jump"
    if abs(math.log2(after / before)) > steps * (1 + _NEAR):
        return "jump"
    return "fall" if after < before else "rise"


def as_range(first: int, last: int) -> str:
    """Return the steps from ``first`` to ``last`` as text."""
    return f"{first}" if first == last else f"{first}-{last}"
