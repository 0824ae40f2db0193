"""Replay from event to event: between an overflow and the end of a window, most rules only count.

Where a loss scale overflows is found once for each scale; what a rule does at an overflow or at the end of a window is
asked of the rule once for each state, however often it comes there. The result is that of its steps, to the last bit.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.lab.policies.dynamic_rule import DynamicRule
from mindformers_adaptive.lab.policies.factory import FixedRule
from mindformers_adaptive.lab.replay.measures import overflow_flags
from mindformers_adaptive.rules.adaptive import AdaptiveRule

__all__ = ["EventPath", "Overflows", "clean_steps_counted", "follow", "follow_each"]

# More states, and places of the overflows of more scales, are not kept: a scale factor that is no power of two may lead
# to ever new ones.
_MOST_STATES, _MOST_BYTES = 20_000, 64_000_000
_BLOCK = 1024

# So many states of a rule are checked before it is taken at its word.
_CHECKED = 50

# The lowest bits of a number say which run it is of; no run has events below 0.
_RUNS, _NOWHERE = 20, -1

# What a rule counts without using it.
_COUNTERS = ("skipped_steps", "consecutive_overflows")


class EventPath(NamedTuple):
    """What a rule did on a trace.

    Attributes:
        skipped (NDArray): int64 of shape (skipped,), the steps that overflowed, counted from 0.
        changes (NDArray): int64 of shape (changes,), the steps from which on the scale or the window is another one;
            the first is 0, and the last may be the number of steps.
        loss_scale (NDArray): float64 of shape (changes,), the scale from there on.
        scale_window (NDArray, optional): float64 of shape (changes,), the window; None for a rule without one.
        final_state (NamedTuple): the state after the last step.
    """

    skipped: NDArray[np.int64]
    changes: NDArray[np.int64]
    loss_scale: NDArray[np.float64]
    scale_window: NDArray[np.float64] | None
    final_state: Any

    def each_step(self, values: NDArray[Any], steps: int) -> NDArray[Any]:
        """Return values of the changes for each step, and after the last one: shape (steps + 1,)."""
        return np.repeat(values, np.diff(self.changes, append=steps + 1))


def clean_steps_counted(rule: Any, state: Any) -> int | None:
    """Return how many more clean steps in a row a rule only counts.

    Args:
        rule (AdaptiveRule, DynamicRule or FixedRule): whose ``step`` it is about.
        state (NamedTuple): the state before these steps.

    Returns:
        int, optional: so many clean steps change nothing but the counts of the state, the first one perhaps more; None
        for a rule of which that cannot be said, such as one that looks at the gradients.

    Examples:
        >>> rule = AdaptiveRule(max_scale_window=20, min_scale_window=20)
        >>> clean_steps_counted(rule, rule.start(2.0**16)._replace(clean_steps=5))
        14
    """
    if type(rule) is FixedRule:
        return 2**62
    has_window = type(rule) is AdaptiveRule or (
        type(rule) is DynamicRule and rule.tolerated_share is None and not rule.window_follows
    )
    left = state.scale_window - state.clean_steps - 1 if has_window else -1
    return int(left) if left >= 0 else None


class Overflows:
    """Where loss scales overflow on a trace.

    Args:
        ceiling (NDArray): float64 of shape (steps,).
    """

    def __init__(self, ceiling: NDArray[np.float64]) -> None:
        self.steps = len(ceiling)
        self._ceiling = ceiling
        self._tables: dict[float, Any] = {}
        self._room, self._room_for_runs = _MOST_BYTES, _MOST_BYTES
        starts = np.arange(0, self.steps, _BLOCK)
        # A NaN overflows at each scale, as it is nowhere above it.
        self._lowest = np.minimum.reduceat(np.nan_to_num(ceiling, nan=0.0), starts) if self.steps else ceiling
        self._never: Any = None

    def following(self, loss_scale: float) -> Any:
        """Return what tells for each step, by its place in brackets, the first one from it on that overflows.

        Of the number of steps itself, and where none follows, it is that number.
        """
        if loss_scale not in self._tables:
            self._tables[loss_scale] = self._made(loss_scale)
        return self._tables[loss_scale]

    def _made(self, loss_scale: float) -> Any:
        flags = overflow_flags(np.asarray(loss_scale), self._ceiling)
        if flags.all():
            return range(self.steps + 1)
        if not flags.any() and self._never is not None:
            return self._never
        size = 4 * self.steps
        if self._room >= size:
            self._room -= size
            table = _next(flags)
            self._never = self._never if flags.any() else table
            return table
        runs = _Runs(flags)
        if self._room_for_runs >= (size := 8 * len(runs.starts)):
            self._room_for_runs -= size
            return runs
        return _Search(self._ceiling, self._lowest, loss_scale)


def _next(flags: NDArray[np.bool_]) -> array[int]:
    steps = len(flags)
    places = np.full(steps + 1, steps, np.int32)
    places[:-1][flags] = np.flatnonzero(flags)
    result = array("i")
    result.frombytes(np.minimum.accumulate(places[::-1])[::-1].tobytes())
    return result


class _Runs:
    """Finds the next overflow among the rows of steps that overflow."""

    def __init__(self, flags: NDArray[np.bool_]) -> None:
        edges = np.flatnonzero(np.diff(flags, prepend=False, append=False)).astype(np.int32)
        self.starts, self._ends, self._steps = array("i", edges[::2]), array("i", edges[1::2]), len(flags)

    def __getitem__(self, step: int) -> int:
        row = bisect_right(self._ends, step)
        return max(step, self.starts[row]) if row < len(self.starts) else self._steps


class _Search:
    """Looks for the next overflow each time, by the lowest ceiling of each block of steps."""

    def __init__(self, ceiling: NDArray[np.float64], lowest: NDArray[np.float64], loss_scale: float) -> None:
        self._ceiling, self._lowest, self._scale = ceiling, lowest, np.asarray(loss_scale)

    def __getitem__(self, step: int) -> int:
        block = step // _BLOCK
        for start, stop in ((step, (block + 1) * _BLOCK), self._block_after(block)):
            flags = overflow_flags(self._scale, self._ceiling[start:stop])
            if flags.any():
                return start + int(flags.argmax())
        return len(self._ceiling)

    def _block_after(self, block: int) -> tuple[int, int]:
        flags = overflow_flags(self._scale, self._lowest[block + 1 :])
        first = (block + 1 + int(flags.argmax())) * _BLOCK if flags.any() else len(self._ceiling)
        return first, first + _BLOCK


class _Event:
    """A state that a rule comes to at an event, and where it goes from there."""

    __slots__ = ("after_clean", "after_full", "at_once", "counted", "following", "number", "one_more", "state")

    def __init__(self, rule: Any, state: Any, counted: int, following: Any, number: int) -> None:
        self.state, self.counted, self.following, self.number = state, counted, following, number
        # The events after an overflow at once, after one that follows clean steps, and after a full window; found when
        # they are needed.
        self.at_once = self.after_clean = self.after_full = None
        self.one_more = rule.step(state, False) if counted > 0 else state

    def after(self, clean_steps: int) -> Any:
        """Return the state after so many clean steps that are only counted."""
        if clean_steps == 0 or not hasattr(self.state, "clean_steps"):
            return self.state
        return self.one_more._replace(clean_steps=self.one_more.clean_steps + clean_steps - 1)


class _Graph:
    """The events of a rule on a trace."""

    def __init__(self, rule: Any, overflows: Overflows) -> None:
        self.rule, self.overflows = rule, overflows
        self.events: list[_Event] = []
        self._by_state: dict[Any, _Event] = {}
        self._columns: dict[str, NDArray[np.float64]] = {}

    def event(self, state: Any) -> _Event:
        """Return the event at a state, one object for each; LookupError if the rule does more than count there."""
        state = _without_counters(state)
        if state not in self._by_state:
            counted = clean_steps_counted(self.rule, state)
            if counted is None:
                raise LookupError("this rule does more than count")
            if len(self._by_state) >= _MOST_STATES:
                self._by_state.clear()
            following = self.overflows.following(float(state.loss_scale))
            event = _Event(self.rule, state, counted, following, len(self.events))
            if len(self.events) < _CHECKED:
                self._check(event)
            self.events.append(event)
            self._by_state[state] = event
        return self._by_state[state]

    def column(self, name: str) -> NDArray[np.float64]:
        """Return a number of the states of all events."""
        known = self._columns.get(name, np.empty(0))
        new = [getattr(event.state, name) for event in self.events[len(known) :]]
        self._columns[name] = np.append(known, new) if new else known
        return self._columns[name]

    def _check(self, event: _Event) -> None:
        """See that a rule does what was foretold of it; others are taken step by step."""
        last = event.counted
        if not 0 < last < self.overflows.steps:
            return
        counts = _without_counters(self.rule.step(event.after(last - 1), False)) == _without_counters(event.after(last))
        if not counts or self.rule.step(event.after(1), True) != self.rule.step(event.after(last), True):
            raise LookupError("this rule does more than count")

    def next_event(self, event: _Event, name: str) -> _Event:
        """Return the event that follows one, and keep it there."""
        clean = {"at_once": 0, "after_clean": 1, "after_full": event.counted}[name]
        found = self.event(self.rule.step(event.after(clean), name != "after_full"))
        setattr(event, name, found)
        return found

    def follow(self, start: Any, seen: dict[int, int]) -> tuple[_Run, int | None, int]:
        """Return what the rule does from a state on, up to where it comes to an event of another run.

        Args:
            start (NamedTuple): the state before the first step.
            seen (dict): by step the number of the event that another run comes to there, and which run it is, in one.

        Returns:
            tuple of the run; the other one, None for none; and the step from which on they are one.
        """
        steps, places, numbers, skipped = self.overflows.steps, list[int](), list[int](), list[int]()
        event, step, other = self.event(start), 0, None
        while True:
            if seen.get(step, _NOWHERE) >> _RUNS == event.number:
                other = seen[step] & ~(-1 << _RUNS)
                break
            places.append(step)
            numbers.append(event.number)
            overflow, full = event.following[step], step + event.counted
            if overflow > full:
                if full >= steps:
                    break
                event = event.after_full or self.next_event(event, "after_full")
                step = full + 1
                continue
            if overflow >= steps:
                break
            skipped.append(overflow)
            if overflow == step:
                event = event.at_once or self.next_event(event, "at_once")
            else:
                event = event.after_clean or self.next_event(event, "after_clean")
            step = overflow + 1
        return _Run(*(np.array(row, np.int64) for row in (places, numbers, skipped))), other, step


class _Run(NamedTuple):
    """The steps of the events of a replay, the numbers of the events, and the steps that were skipped."""

    places: NDArray[np.int64]
    numbers: NDArray[np.int64]
    skipped: NDArray[np.int64]

    def joined(self, other: _Run, step: int) -> _Run:
        """Return this run, which from a step on is another one."""
        at, skipped = (int(np.searchsorted(row, step)) for row in (other.places, other.skipped))
        rows = zip(self, (other.places[at:], other.numbers[at:], other.skipped[skipped:]), strict=True)
        return _Run(*map(np.concatenate, rows))


def _without_counters(state: Any) -> Any:
    fields = getattr(state, "_fields", ())
    return state._replace(**{name: 0 for name in _COUNTERS if name in fields})


def follow(rule: Any, start: Any, overflows: Overflows) -> EventPath | None:
    """Return what a rule does on a trace; None for a rule that has to be taken step by step.

    Args:
        rule (AdaptiveRule, DynamicRule or FixedRule): others are taken step by step.
        start (NamedTuple): its state before the first step.
        overflows (Overflows): of the trace's ceilings, at least one step.
    """
    try:
        [path] = follow_each(rule, [start], overflows)
    except LookupError:
        return None
    return path


def follow_each(rule: Any, starts: Sequence[Any], overflows: Overflows) -> Iterator[EventPath]:
    """Yield what a rule does on a trace from each of several states; where they come together, that is found once.

    Raises:
        LookupError: if the rule has to be taken step by step.
    """
    if clean_steps_counted(rule, starts[0]) is None:
        raise LookupError("this rule does more than count")
    graph, runs, seen = _Graph(rule, overflows), list[_Run](), dict[int, int]()
    for start in starts:
        run, other, step = graph.follow(start, seen)
        if len(starts) > 1:
            seen.update(zip(run.places.tolist(), (run.numbers << _RUNS | len(runs)).tolist(), strict=True))
        run = run if other is None else run.joined(runs[other], step)
        runs.append(run)
        yield _path_of(graph, run, start)


def _path_of(graph: _Graph, run: _Run, start: Any) -> EventPath:
    steps, scale, window = graph.overflows.steps, graph.column("loss_scale")[run.numbers], None
    changed = np.append(True, scale[1:] != scale[:-1])
    if getattr(start, "scale_window", None) is not None:
        window = graph.column("scale_window")[run.numbers]
        changed[1:] |= window[1:] != window[:-1]
        window = window[changed]
    final = graph.events[run.numbers[-1]].after(steps - int(run.places[-1]))
    return EventPath(
        run.skipped, run.places[changed], scale[changed], window, _with_counters(final, start, run.skipped, steps)
    )


def _with_counters(state: Any, start: Any, skipped: NDArray[np.int64], steps: int) -> Any:
    fields = getattr(state, "_fields", ())
    in_a_row = len(skipped) and int(skipped[-1]) == steps - 1
    row = 0
    if in_a_row:
        breaks = np.flatnonzero(np.diff(skipped) != 1)
        row = len(skipped) - (int(breaks[-1]) + 1 if len(breaks) else 0)
    if row == steps:
        row += getattr(start, "consecutive_overflows", 0)
    counts = {"skipped_steps": getattr(start, "skipped_steps", 0) + len(skipped), "consecutive_overflows": row}
    return state._replace(**{name: count for name, count in counts.items() if name in fields})
