"""Replay from event to event: between an overflow and the end of a window, most rules only count.

Where a loss scale overflows is found once for each scale; what a rule does at an overflow or at the end of a window is
asked of the rule once for each state, however often it comes there. The result is that of its steps, to the last bit.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.lab.dynamic_rule import DynamicRule
from mindformers_adaptive.lab.overflow_places import Overflows
from mindformers_adaptive.lab.policies import FixedRule
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.rules.lanes import Lanes
from mindformers_adaptive.rules.rule import Rule

__all__ = ["EventPath", "clean_steps_counted", "follow", "follow_each"]

# More states are not kept: a scale factor that is no power of two may lead to ever new ones.
_MOST_STATES = 20_000

# The lowest bits of a number say which run it is of; no run has events below 0.
_RUNS, _NOWHERE = 20, -1

# So many rules are followed at a time: fewer take longer, more take memory for the states that each comes to.
_TOGETHER = 32

_MORE = "this rule does more than count"

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


# A state, and whether the step from there overflows.
_Asked = tuple[Any, bool]


class _Event(NamedTuple):
    """A state that a rule comes to at an event.

    Attributes:
        number (int): the place of the event in its graph.
        state (NamedTuple): the state, without what is only counted.
        counted (int): how many more clean steps in a row the rule only counts.
        following (object): by a step in brackets, the first one from it on that overflows at the scale of the state.
    """

    number: int
    state: Any
    counted: int
    following: Any


class _Graph:
    """The events of a rule on a trace."""

    def __init__(self, rule: Any, overflows: Overflows) -> None:
        self.rule, self.overflows = rule, overflows
        self.events: list[_Event] = []
        self._by_state: dict[Any, _Event] = {}
        # By the number of an event, the clean steps after it, and whether an overflow follows them.
        self._next: dict[tuple[int, int, bool], _Event] = {}

    def event(self, state: Any) -> _Event:
        """Return the event at a state, one object for each."""
        state = _without_counters(state)
        if state not in self._by_state:
            counted = clean_steps_counted(self.rule, state)
            if counted is None:
                raise LookupError(_MORE)
            if len(self._by_state) >= _MOST_STATES:
                self._by_state.clear()
            event = _Event(len(self.events), state, counted, self.overflows.following(float(state.loss_scale)))
            self.events.append(event)
            self._by_state[state] = event
        return self._by_state[state]

    def follow(self, start: Any, seen: dict[int, int]) -> Generator[_Asked, Any, tuple[_Run, int | None, int]]:
        """Return what the rule does from a state on, up to where it comes to an event of another run.

        Args:
            start (NamedTuple): the state before the first step.
            seen (dict): by step the number of the event that another run comes to there, and which run it is, in one.

        Returns:
            tuple of the run; the other one, None for none; and the step from which on they are one. Yields a state and
            whether the step from there overflows, and is sent the state after that step.
        """
        steps, places, numbers, skipped = self.overflows.steps, list[int](), list[int](), list[int]()
        event, step, other = self.event(start), 0, None
        while True:
            if seen and seen.get(step, _NOWHERE) >> _RUNS == event.number:
                other = seen[step] & ~(-1 << _RUNS)
                break
            places.append(step)
            numbers.append(event.number)
            overflow, full = event.following[step], step + event.counted
            is_full = full < overflow
            end = full if is_full else overflow
            if end >= steps:
                break
            if not is_full:
                skipped.append(end)
            # How many clean steps come before an overflow makes no difference, only whether one does.
            way = event.number, event.counted if is_full else int(end > step), not is_full
            if way not in self._next:
                asked = _after_clean(self.rule, event.state, way[1]), not is_full
                self._next[way] = self.event((yield asked))
            event, step = self._next[way], end + 1
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
    return state._replace(**{name: 0 for name in _COUNTERS if name in state._fields})


def follow(rule: Any, start: Any, overflows: Overflows) -> EventPath | None:
    """Return what a rule does on a trace; None for a rule that has to be taken step by step.

    Args:
        rule (AdaptiveRule, DynamicRule or FixedRule): others are taken step by step.
        start (NamedTuple): its state before the first step.
        overflows (Overflows): of the trace's ceilings, at least one step.
    """
    try:
        [(_, _, path)] = follow_each([rule], [[start]], overflows)
    except LookupError:
        return None
    return path


def follow_each(
    rules: Sequence[Any], starts: Sequence[Sequence[Any]], overflows: Overflows
) -> Iterator[tuple[int, int, EventPath]]:
    """Find what rules do on a trace; what they do at events is asked of all of them together.

    Args:
        rules (Sequence): AdaptiveRule, DynamicRule or FixedRule.
        starts (Sequence[Sequence[NamedTuple]]): of each rule states before the first step; where they come together is
            found once.
        overflows (Overflows): of the trace's ceilings, at least one step.

    Yields:
        tuple of the place of a rule, that of a start of it, and its EventPath, as soon as it is found.

    Raises:
        LookupError: if a rule has to be taken step by step.
    """
    groups: defaultdict[Any, list[int]] = defaultdict(list)
    for place, rule in enumerate(rules):
        groups[rule.traced.shape if isinstance(rule, Rule) else place].append(place)
    for alike in groups.values():
        for at in range(0, len(alike), _TOGETHER):
            group, found = alike[at : at + _TOGETHER], list[tuple[int, int, EventPath]]()
            take = _Taker([rules[place] for place in group], [starts[place][0] for place in group])
            ways = [_follow_starts(place, rules[place], starts[place], overflows, found) for place in group]
            states: dict[int, Any] = dict.fromkeys(range(len(group)))
            while states:
                asked = {}
                for lane, state in states.items():
                    with contextlib.suppress(StopIteration):
                        asked[lane] = ways[lane].send(state)
                yield from found
                found.clear()
                states = take(asked) if asked else {}


def _follow_starts(
    place: int, rule: Any, starts: Sequence[Any], overflows: Overflows, found: list[tuple[int, int, EventPath]]
) -> Generator[_Asked, Any, None]:
    """Follow a rule from each of its starts, and add the paths to what is found; yields as ``_Graph.follow`` does."""
    graph, runs, seen = _Graph(rule, overflows), list[_Run](), dict[int, int]()
    for number, start in enumerate(starts):
        run, other, step = yield from graph.follow(start, seen)
        if len(starts) > 1:
            seen.update(zip(run.places.tolist(), (run.numbers << _RUNS | number).tolist(), strict=True))
        run = run if other is None else run.joined(runs[other], step)
        runs.append(run)
        found.append((place, number, _path_of(graph, run, start)))


class _Taker:
    """Takes steps of rules: of traced rules, which compute the same, all in one call."""

    def __init__(self, rules: Sequence[Any], starts: Sequence[Any]) -> None:
        self._rules = rules
        self._lanes = Lanes(rules, starts) if isinstance(rules[0], Rule) else None
        self._overflow, self._unknown = np.full(len(rules), False), np.full(len(rules), np.nan)

    def __call__(self, asked: Mapping[int, _Asked]) -> dict[int, Any]:
        """Return the states after the steps, by the place of the rule."""
        if self._lanes is None:
            return {place: self._rules[place].step(*one) for place, one in asked.items()}
        places, (states, flags) = np.array([*asked]), zip(*asked.values(), strict=True)
        self._overflow[places] = flags
        self._lanes.put(states, places)
        self._lanes.step(self._overflow, self._unknown)
        return dict(zip(asked, self._lanes.states(places), strict=True))


def _after_clean(rule: Any, state: Any, clean_steps: int) -> Any:
    """The state after clean steps that a rule only counts."""
    if clean_steps == 0 or type(rule) is FixedRule:
        return state
    if type(rule) is DynamicRule:
        # A first clean step may forgive overflows too.
        state, clean_steps = rule.step(state, False), clean_steps - 1
    return state._replace(clean_steps=state.clean_steps + clean_steps)


def _path_of(graph: _Graph, run: _Run, start: Any) -> EventPath:
    def column(name: str) -> NDArray[np.float64]:
        return np.array([getattr(event.state, name) for event in graph.events], np.float64)[run.numbers]

    scale, window, steps = column("loss_scale"), None, graph.overflows.steps
    changed = np.append(True, scale[1:] != scale[:-1])
    if getattr(start, "scale_window", None) is not None:
        window = column("scale_window")
        changed[1:] |= window[1:] != window[:-1]
        window = window[changed]
    last = _after_clean(graph.rule, graph.events[run.numbers[-1]].state, steps - int(run.places[-1]))
    final = _with_counters(last, start, run.skipped, steps)
    return EventPath(run.skipped, run.places[changed], scale[changed], window, final)


def _with_counters(state: Any, start: Any, skipped: NDArray[np.int64], steps: int) -> Any:
    in_a_row = int(np.count_nonzero(skipped == np.arange(steps - len(skipped), steps)))
    if in_a_row == steps:
        in_a_row += getattr(start, "consecutive_overflows", 0)
    counts = {"skipped_steps": getattr(start, "skipped_steps", 0) + len(skipped), "consecutive_overflows": in_a_row}
    return state._replace(**{name: count for name, count in counts.items() if name in state._fields})
