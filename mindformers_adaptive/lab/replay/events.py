"""Replay from event to event: between an overflow and the end of a window, most rules only count.

Where a loss scale overflows is found once for each scale; what a rule does at an overflow or at the end of a window is
asked of the rule once for each state, however often it comes there. The result is that of its steps, to the last bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.lab.policies.dynamic_rule import DynamicRule
from mindformers_adaptive.lab.policies.factory import FixedRule
from mindformers_adaptive.lab.replay.overflow_places import Overflows
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.rules.lanes import Lanes
from mindformers_adaptive.rules.rule import Rule

__all__ = ["EventPath", "Overflows", "Walk", "clean_steps_counted", "follow", "follow_each"]

# More states are not kept: a scale factor that is no power of two may lead to ever new ones.
_MOST_STATES = 20_000

# The lowest bits of a number say which run it is of; no run has events below 0.
_RUNS, _NOWHERE = 20, -1

# So many rules are followed at a time: fewer take longer, more take memory for the states that each comes to.
_TOGETHER = 32

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


class _Event:
    """A state that a rule comes to at an event, and where it goes from there."""

    __slots__ = (
        "after_clean",
        "after_full",
        "at_once",
        "counted",
        "following",
        "number",
        "one_more",
        "state",
        "states",
    )

    def __init__(self, state: Any, counted: int, following: Any, number: int) -> None:
        self.state, self.counted, self.following, self.number = state, counted, following, number
        # The events after an overflow at once, after one that follows clean steps, and after a full window; found when
        # they are needed.
        self.at_once = self.after_clean = self.after_full = None
        # Their states, by name.
        self.states = dict[str, Any]()
        # A first clean step may do more than the others, but hardly ever does.
        counts = counted > 0 and hasattr(state, "clean_steps")
        self.one_more = state._replace(clean_steps=state.clean_steps + 1) if counts else state

    def after(self, clean_steps: int) -> Any:
        """Return the state after so many clean steps that are only counted."""
        if clean_steps == 0 or not hasattr(self.state, "clean_steps"):
            return self.state
        return self.one_more._replace(clean_steps=self.one_more.clean_steps + clean_steps - 1)

    def asked(self) -> list[Any]:
        """Return the states of which ``_OVERFLOWS`` says what the next step does, for :meth:`settle`."""
        last = self.counted
        return [self.state, *map(self.after, (0, min(1, last), last))]

    def settle(self, after: Sequence[Any]) -> bool:
        """Take the states after these steps; False if they have to be asked for again."""
        one_more, at_once, after_clean, after_full = after
        if self.counted > 0 and one_more != self.one_more:
            self.one_more = one_more
            return False
        self.states = {"at_once": at_once, "after_clean": after_clean, "after_full": after_full}
        return True


# What each of the states of an event is asked for: whether the step from there overflows.
_OVERFLOWS = (False, True, True, False)
_MORE = "this rule does more than count"


class _Graph:
    """The events of a rule on a trace."""

    def __init__(self, rule: Any, overflows: Overflows) -> None:
        self.rule, self.overflows = rule, overflows
        self.events: list[_Event] = []
        self._by_state: dict[Any, _Event] = {}
        self._columns: dict[str, NDArray[np.float64]] = {}

    def event(self, state: Any) -> Generator[_Event, None, _Event]:
        """Return the event at a state, one object for each; yields one that has to be settled."""
        state = _without_counters(state)
        if state not in self._by_state:
            counted = clean_steps_counted(self.rule, state)
            if counted is None:
                raise LookupError(_MORE)
            if len(self._by_state) >= _MOST_STATES:
                self._by_state.clear()
            event = _Event(state, counted, self.overflows.following(float(state.loss_scale)), len(self.events))
            yield event
            self.events.append(event)
            self._by_state[state] = event
        return self._by_state[state]

    def column(self, name: str) -> NDArray[np.float64]:
        """Return a number of the states of all events."""
        known = self._columns.get(name, np.empty(0))
        new = [getattr(event.state, name) for event in self.events[len(known) :]]
        self._columns[name] = np.append(known, new) if new else known
        return self._columns[name]

    def next_event(self, event: _Event, name: str) -> Generator[_Event, None, _Event]:
        """Return the event that follows one, and keep it there."""
        found = yield from self.event(event.states.pop(name))
        setattr(event, name, found)
        return found

    def close(self) -> None:
        """Forget what follows events: they lead to each other in circles, which Python would keep for long."""
        for event in self.events:
            event.at_once = event.after_clean = event.after_full = None

    def follow(self, start: Any, seen: dict[int, int]) -> Generator[_Event, None, tuple[_Run, int | None, int]]:
        """Return what the rule does from a state on, up to where it comes to an event of another run.

        Args:
            start (NamedTuple): the state before the first step.
            seen (dict): by step the number of the event that another run comes to there, and which run it is, in one.

        Returns:
            tuple of the run; the other one, None for none; and the step from which on they are one. Yields events that
            have to be settled.
        """
        steps, places, numbers, skipped = self.overflows.steps, list[int](), list[int](), list[int]()
        event, step, other = (yield from self.event(start)), 0, None
        while True:
            if seen and seen.get(step, _NOWHERE) >> _RUNS == event.number:
                other = seen[step] & ~(-1 << _RUNS)
                break
            places.append(step)
            numbers.append(event.number)
            overflow, full = event.following[step], step + event.counted
            if overflow > full:
                if full >= steps:
                    break
                event = event.after_full or (yield from self.next_event(event, "after_full"))
                step = full + 1
                continue
            if overflow >= steps:
                break
            skipped.append(overflow)
            if overflow == step:
                event = event.at_once or (yield from self.next_event(event, "at_once"))
            else:
                event = event.after_clean or (yield from self.next_event(event, "after_clean"))
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
    found: list[EventPath] = []
    try:
        follow_each([Walk(rule, [start], lambda _, path: found.append(path))], overflows)
    except LookupError:
        return None
    return found[0]


class Walk(NamedTuple):
    """What :func:`follow_each` is to do with a rule.

    Attributes:
        rule (AdaptiveRule, DynamicRule or FixedRule): the rule.
        starts (Sequence[NamedTuple]): its states before the first step; where they come together is found once.
        done (Callable): gets the place of a start and its EventPath, as soon as it is found.
    """

    rule: Any
    starts: Sequence[Any]
    done: Callable[[int, EventPath], object]


def follow_each(walks: Sequence[Walk], overflows: Overflows) -> None:
    """Find what rules do on a trace; what they do at events is asked of all of them together.

    Args:
        walks (Sequence[Walk]): for each rule its starts.
        overflows (Overflows): of the trace's ceilings, at least one step.

    Raises:
        LookupError: if a rule has to be taken step by step.
    """
    groups: defaultdict[Any, list[Walk]] = defaultdict(list)
    for walk in walks:
        groups[walk.rule.traced.shape if isinstance(walk.rule, Rule) else id(walk)].append(walk)
    for group in (walks[at : at + _TOGETHER] for walks in groups.values() for at in range(0, len(walks), _TOGETHER)):
        take_steps = _Steps(group)
        ways = [_follow_starts(walk, overflows) for walk in group]
        waiting = {place: event for place, way in enumerate(ways) if (event := next(way, None))}
        while waiting:
            after = take_steps({place: event.asked() for place, event in waiting.items()})
            for place, event in list(waiting.items()):
                if event.settle(after[place]):
                    following = next(ways[place], None)
                    waiting |= {place: following} if following else {}
                    if following is None:
                        del waiting[place]


def _follow_starts(walk: Walk, overflows: Overflows) -> Iterator[_Event]:
    """Follow a rule from each of its starts; yields events that have to be settled."""
    graph, runs, seen = _Graph(walk.rule, overflows), list[_Run](), dict[int, int]()
    for place, start in enumerate(walk.starts):
        run, other, step = yield from graph.follow(start, seen)
        if len(walk.starts) > 1:
            seen.update(zip(run.places.tolist(), (run.numbers << _RUNS | len(runs)).tolist(), strict=True))
        run = run if other is None else run.joined(runs[other], step)
        runs.append(run)
        walk.done(place, _path_of(graph, run, start))
    graph.close()


class _Steps:
    """Takes the steps that events ask for: of traced rules, which compute the same, all in one call."""

    def __init__(self, walks: Sequence[Walk]) -> None:
        self._rules, self._lanes = [walk.rule for walk in walks], None
        if isinstance(self._rules[0], Rule):
            rules = [rule for rule in self._rules for _ in _OVERFLOWS]
            self._lanes = Lanes(rules, [walk.starts[0] for walk in walks for _ in _OVERFLOWS])
            self._overflow = np.tile(_OVERFLOWS, len(walks))
            self._unknown = np.full(len(rules), np.nan)

    def __call__(self, asked: Mapping[int, Sequence[Any]]) -> dict[int, list[Any]]:
        """Return the states after the steps, by the place of the rule."""
        if self._lanes is None:
            return {
                place: [self._rules[place].step(*one) for one in zip(states, _OVERFLOWS, strict=True)]
                for place, states in asked.items()
            }
        width = len(_OVERFLOWS)
        places = np.concatenate([np.arange(width) + width * place for place in asked])
        self._lanes.put([state for states in asked.values() for state in states], places)
        self._lanes.step(self._overflow, self._unknown)
        after = self._lanes.states(places)
        return {place: after[at * width : (at + 1) * width] for at, place in enumerate(asked)}


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
