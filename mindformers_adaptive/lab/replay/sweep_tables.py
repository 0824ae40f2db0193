"""The tables of the vectorised sweep: what an event does to a state, and where the next event of a trace is.

The rule itself fills the first kind, so the sweep has no second definition of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.lab.replay.measures import LARGEST_LOSS_SCALE
from mindformers_adaptive.lab.traces.trace import Trace
from mindformers_adaptive.rules.adaptive import HIDDEN_INDEX, AdaptiveRule, LossScaleState

__all__ = ["OVERFLOW", "RAISE", "WAIT", "TraceChunk", "Transitions", "scale_transitions", "window_transitions"]

# The events that can end a chunk of clean steps: nothing (the trace ends), a full window, an overflow.
WAIT, RAISE, OVERFLOW = range(3)

_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]

# Rows are made for at most this many places at once, to bound the memory of the steps in between.
_BLOCK = 1 << 20


class Transitions:
    """The part of the rule's state that events change, numbered, and where each event leads from each number.

    A number is a multiple of 3; added to an event it is the place in a table. States come into the tables when a
    sweep first reaches them: of the scales there are too many to list them all beforehand.

    Args:
        part (Callable): takes a ``LossScaleState`` and returns it with everything that this table does not follow set
            to a constant.
        value_of (Callable): takes a ``LossScaleState`` and returns what stands in :attr:`values` for it.
    """

    def __init__(
        self, part: Callable[[LossScaleState], LossScaleState], value_of: Callable[[LossScaleState], float]
    ) -> None:
        self._part = part
        self._value_of = value_of
        self._numbers: dict[tuple[object, LossScaleState], int] = {}
        self._owners: list[tuple[object, AdaptiveRule]] = []
        self._next = np.empty(0, np.int64)
        self.states: list[LossScaleState] = []
        #: What ``value_of`` returned, float64, by number.
        self.values = np.empty(0, np.float64)

    def number(self, family: object, rule: AdaptiveRule, state: LossScaleState) -> int:
        """Return the number of a state; rules of one family do the same to it."""
        key = (family, self._part(state))
        number = self._numbers.setdefault(key, 3 * len(self.states))
        if number == 3 * len(self.states):
            self.states.append(key[1])
            self._owners.append((family, rule))
            if number == len(self.values):
                self._grow()
            self._next[number + WAIT] = number
            self.values[number] = self._value_of(key[1])
        return number

    def after(self, numbers: _Ints, events: _Ints) -> _Ints:
        """Return the numbers of the states after one event each, int64 of the same shape."""
        places = numbers + events
        successors = self._next.take(places)
        if successors.min() < 0:
            for place in np.unique(places[successors < 0]).tolist():
                successor = self._follow(place)
                self._next[place] = successor
            successors = self._next.take(places)
        return successors

    def _follow(self, place: int) -> int:
        number, event = divmod(place, 3)
        family, rule = self._owners[number]
        state = self.states[number]
        if event == RAISE:
            return self.number(
                family, rule, rule.step(state._replace(clean_steps=state.scale_window - 1), overflow=False)
            )
        return self.number(family, rule, rule.step(state, overflow=True))

    def _grow(self) -> None:
        more = max(192, len(self.values))
        self.values = np.concatenate([self.values, np.zeros(more)])
        self._next = np.concatenate([self._next, np.full(more, -1)])


def window_transitions(rules: Sequence[AdaptiveRule], starts: Sequence[LossScaleState]) -> tuple[Transitions, _Ints]:
    """Return what events do to the window, its counters and the hysteresis budget; :attr:`values` is the window.

    Returns:
        tuple of the transitions and of the numbers of the start states, int64 of shape (rules,).
    """

    def part(state: LossScaleState) -> LossScaleState:
        return state._replace(loss_scale=1.0, clean_steps=0, skipped_steps=0, consecutive_overflows=0)

    transitions = Transitions(part, lambda state: state.scale_window)
    families = [(rule.ladder, rule.shrink_from_min_window, rule.hysteresis) for rule in rules]
    return transitions, _numbers(transitions, families, rules, starts)


def scale_transitions(rules: Sequence[AdaptiveRule], starts: Sequence[LossScaleState]) -> tuple[Transitions, _Ints]:
    """Return what events do to the loss scale and the hysteresis budget; :attr:`values` is the loss scale.

    Returns:
        tuple of the transitions and of the numbers of the start states, int64 of shape (rules,).
    """

    def part(state: LossScaleState) -> LossScaleState:
        return LossScaleState(state.loss_scale, 1, HIDDEN_INDEX, hysteresis_budget=state.hysteresis_budget)

    transitions = Transitions(part, lambda state: state.loss_scale)
    families = [
        (rule.scale_factor, rule.backoff_factor, rule.min_loss_scale, rule.max_loss_scale, rule.hysteresis)
        for rule in rules
    ]
    return transitions, _numbers(transitions, families, rules, starts)


def _numbers(
    transitions: Transitions,
    families: Sequence[object],
    rules: Sequence[AdaptiveRule],
    starts: Sequence[LossScaleState],
) -> _Ints:
    numbers = [transitions.number(*owner) for owner in zip(families, rules, starts, strict=True)]
    return np.array(numbers, np.int64)


class TraceChunk:
    """Some consecutive steps of a trace, and for the loss scales that come up rows of tables over them.

    Loss scales with no bound of any step between them have the same outcomes and share a row: with a factor that
    float32 cannot undo, a long sweep meets ever new scales, and most of them differ from another in the last bit only.
    So there are at most about three rows for each step.

    The tables are flat. A row starts at a *base* and has one place for each step and one for the end; ``base + step``
    is a place in all of them, with the steps counted from the start of the chunk.

    Attributes:
        steps (int): the length of the chunk.
        next_overflow (NDArray): int32, the first step from here on that overflows; ``steps`` if none does.
        next_clean (NDArray): int32, likewise the first that does not.
        measured (NDArray): int32, the applied steps before here that have a ceiling to measure headroom by.
        log2_ceiling (NDArray): float64, the sum of log2(ceiling) over these.
        known (NDArray): int32, the steps before here whose outcome is known.
        seconds (NDArray, optional): float64 of shape (steps + 1,), the time before here, skipped or not.
    """

    def __init__(self, trace: Trace, start: int, stop: int) -> None:
        self.start = start
        self.steps = stop - start
        self._ceiling = trace.ceiling[start:stop]
        self._lower_bound = trace.lower_bound[start:stop]
        self._upper_bound = trace.upper_bound[start:stop]
        self._measured = self._ceiling <= LARGEST_LOSS_SCALE
        # Where the ceiling is 0 no step is applied, so that any finite number will do.
        self._log2_of_steps = np.log2(np.where(self._measured & (self._ceiling > 0), self._ceiling, 1.0))
        self._sorted_bounds = [np.sort(bound) for bound in (self._ceiling, self._lower_bound, self._upper_bound)]
        self.seconds = None if trace.seconds is None else _sums_before(trace.seconds[start:stop][np.newaxis])[0]
        self._base_of_ranks: dict[tuple[int, ...], int] = {}
        self._base_of_number = np.empty(0, np.int64)
        self._used = 0
        self.next_overflow = np.empty(0, np.int32)
        self.next_clean = np.empty(0, np.int32)
        self.known = np.empty(0, np.int32)
        self.measured = np.empty(0, np.int32)
        self.log2_ceiling = np.empty(0, np.float64)

    def bases(self, scales: Transitions, numbers: _Ints) -> _Ints:
        """Return where the rows of loss scales start, int64 of the same shape; rows that are missing are made.

        Args:
            scales (Transitions): as from :func:`scale_transitions`.
            numbers (NDArray): int64, the numbers of the loss scales in it.
        """
        if len(self._base_of_number) < len(scales.values):
            new = np.full(len(scales.values) - len(self._base_of_number), -1)
            self._base_of_number = np.concatenate([self._base_of_number, new])
        bases = self._base_of_number.take(numbers)
        if bases.min() < 0:
            missing = np.unique(numbers[bases < 0])
            ranks = self._ranks(scales.values[missing])
            unseen = {
                rank: scale
                for rank, scale in zip(ranks, scales.values[missing].tolist(), strict=True)
                if rank not in self._base_of_ranks
            }
            rows = max(1, _BLOCK // (self.steps + 1))
            for first in range(0, len(unseen), rows):
                part = slice(first, first + rows)
                self._add_rows(list(unseen)[part], list(unseen.values())[part])
            self._base_of_number[missing] = [self._base_of_ranks[rank] for rank in ranks]
            bases = self._base_of_number.take(numbers)
        return bases

    def _ranks(self, loss_scales: _Floats) -> list[tuple[int, ...]]:
        """Return for each loss scale how many ceilings and bounds it is above; equal ones have equal rows."""
        ceiling, lower_bound, upper_bound = self._sorted_bounds
        ranks = (
            np.searchsorted(ceiling, loss_scales, side="left"),
            np.searchsorted(lower_bound, loss_scales, side="left"),
            np.searchsorted(upper_bound, loss_scales, side="right"),
        )
        return list(zip(*(rank.tolist() for rank in ranks), strict=True))

    def _add_rows(self, ranks: list[tuple[int, ...]], loss_scales: list[float]) -> None:
        self._reserve(len(loss_scales) * (self.steps + 1))
        scales = np.array(loss_scales)[:, np.newaxis]
        overflow = scales > self._ceiling
        measured = ~overflow & self._measured
        known = (scales <= self._lower_bound) | (scales >= self._upper_bound)
        end = self._used + len(loss_scales) * (self.steps + 1)
        rows = slice(self._used, end)
        self.next_overflow[rows] = _next_true(overflow).ravel()
        self.next_clean[rows] = _next_true(~overflow).ravel()
        self.known[rows] = _sums_before(known).ravel()
        self.measured[rows] = _sums_before(measured).ravel()
        self.log2_ceiling[rows] = _sums_before(np.where(measured, self._log2_of_steps, 0.0)).ravel()
        self._base_of_ranks.update(zip(ranks, range(self._used, end, self.steps + 1), strict=True))
        self._used = end

    def _reserve(self, places: int) -> None:
        needed = self._used + places
        if needed <= len(self.known):
            return
        capacity = max(needed, 2 * len(self.known))
        for name in ("next_overflow", "next_clean", "known", "measured", "log2_ceiling"):
            before = getattr(self, name)
            after = np.empty(capacity, before.dtype)
            after[: self._used] = before[: self._used]
            setattr(self, name, after)


def _next_true(flags: NDArray[np.bool_]) -> NDArray[np.int32]:
    """For each place of each row the first true flag from there on, and the row's length where there is none."""
    rows, steps = flags.shape
    places = np.full((rows, steps + 1), steps, np.int32)
    places[:, :steps][flags] = np.broadcast_to(np.arange(steps, dtype=np.int32), flags.shape)[flags]
    backwards = places[:, ::-1]
    np.minimum.accumulate(backwards, axis=1, out=backwards)
    return places


def _sums_before(values: NDArray[np.bool_] | _Floats) -> _Floats:
    """For each place of each row the sum of all before it, and at its end the sum of all."""
    rows, steps = values.shape
    sums = np.zeros((rows, steps + 1))
    np.cumsum(values, axis=1, out=sums[:, 1:])
    return sums
