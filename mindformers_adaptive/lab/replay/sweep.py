"""Replay many configurations of the adaptive rule on one trace at once.

A configuration's scale stays what it is until the next overflow or full window, and where the next overflow at a scale
is can be tabulated. So all configurations go from event to event side by side, each at its own place in the trace;
what an event does, the rule itself has put into tables. A sweep costs one round of NumPy operations for each event
of the configuration that has the most of them, however many steps lie between.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.lab.replay.configuration import Configuration
from mindformers_adaptive.lab.replay.measures import LARGEST_LOSS_SCALE, SMALLEST_LOSS_SCALE, Measures, require_steps
from mindformers_adaptive.lab.replay.sweep_tables import (
    OVERFLOW,
    RAISE,
    WAIT,
    TraceChunk,
    Transitions,
    scale_transitions,
    window_transitions,
)
from mindformers_adaptive.lab.traces.trace import Trace
from mindformers_adaptive.rules.adaptive import LossScaleState

__all__ = ["SweepResult", "TraceMeasures", "sweep"]

# Steps of a trace that are tabulated at once: large enough that little is spent at the ends of chunks, small enough
# that the tables of hundreds of loss scales (48 KiB each, and at most some 6000) stay in tens of megabytes.
_CHUNK_STEPS = 2048

# Rounds between two looks for configurations that have reached the end of the chunk and can be set aside.
_ROUNDS_BETWEEN_LOOKS = 8

_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]


@dataclass(frozen=True)
class TraceMeasures:
    """The measures of several configurations on a trace.

    Attributes:
        trace (Trace): what they were replayed on.
        measures (tuple[Measures, ...]): of each configuration.
    """

    trace: Trace
    measures: tuple[Measures, ...]

    def column(self, name: str) -> _Floats:
        """Return one measure of all configurations, float64 of shape (configurations,); nan where there is none."""
        return np.array([getattr(one, name) for one in self.measures], np.float64)


@dataclass(frozen=True)
class SweepResult(TraceMeasures):
    """The measures of every configuration of a sweep.

    Attributes:
        trace (Trace), measures (tuple[Measures, ...]): as there.
        configurations (tuple[Configuration, ...]): what was replayed.
        final_states (tuple[LossScaleState, ...]): of each configuration after the last step.
    """

    configurations: tuple[Configuration, ...]
    final_states: tuple[LossScaleState, ...]


def sweep(configurations: Sequence[Configuration], trace: Trace) -> SweepResult:
    """Replay configurations on a trace.

    States, counts and ``known_share`` are exactly those of replaying
    :class:`~mindformers_adaptive.rules.adaptive.AdaptiveRule` step by step. ``headroom_lost`` and ``seconds_lost``
    are float64 sums in another order, so their last digits may differ.

    Args:
        configurations (Sequence[Configuration]): at least one.
        trace (Trace): at least one step.

    Returns:
        SweepResult, in the order of ``configurations``.

    Raises:
        ValueError: if there is no configuration or no step.

    Examples:
        >>> trace = Trace.exact("calm", [2.0**20] * 1000)
        >>> result = sweep([Configuration.dynamic(10), Configuration.dynamic(100)], trace)
        >>> [one.skipped for one in result.measures]
        [87, 5]
    """
    if len(configurations) == 0:
        raise ValueError("'configurations' must have at least 1 configuration, but got none. Make some with grid().")
    require_steps(trace)
    rules = [one.rule for one in configurations]
    starts = [one.start for one in configurations]
    windows, window = window_transitions(rules, starts)
    scales, scale = scale_transitions(rules, starts)
    lanes = _Lanes.at_start(window, scale, windows, scales)
    for start in range(0, len(trace), _CHUNK_STEPS):
        chunk = TraceChunk(trace, start, min(start + _CHUNK_STEPS, len(trace)))
        lanes.step[:] = 0
        _cross(lanes, chunk, windows, scales)
    measures, final_states = _measures(lanes, trace), _final_states(lanes, windows, scales)
    return SweepResult(trace, tuple(measures), tuple(configurations), tuple(final_states))


@dataclass
class _Lanes:
    """Where each configuration is in a chunk, and what it has gathered so far: arrays of shape (configurations,).

    ``window`` and ``scale`` are numbers in the transitions; ``scale_window`` and ``loss_scale`` what they stand for.
    """

    step: _Ints
    window: _Ints
    scale: _Ints
    scale_window: _Floats
    loss_scale: _Floats
    clean_steps: _Ints
    run: _Ints
    longest_run: _Ints
    skipped: _Ints
    skipped_before_first_applied: _Ints
    scale_changes: _Ints
    window_changes: _Ints
    known: _Ints
    headroom: _Floats
    seconds: _Floats

    @classmethod
    def at_start(cls, window: _Ints, scale: _Ints, windows: Transitions, scales: Transitions) -> _Lanes:
        arrays: dict[str, Any] = {field.name: np.zeros(len(window), np.int64) for field in dataclasses.fields(cls)}
        arrays.update(window=window, scale=scale, scale_window=windows.values[window], loss_scale=scales.values[scale])
        arrays.update(headroom=np.zeros(len(window)), seconds=np.zeros(len(window)))
        return cls(**arrays)

    def take(self, places: _Ints) -> _Lanes:
        return _Lanes(*(getattr(self, field.name)[places] for field in dataclasses.fields(self)))

    def put(self, places: _Ints, others: _Lanes) -> None:
        for field in dataclasses.fields(self):
            getattr(self, field.name)[places] = getattr(others, field.name)


def _cross(lanes: _Lanes, chunk: TraceChunk, windows: Transitions, scales: Transitions) -> None:
    """Take all lanes from the start to the end of a chunk."""
    places = np.arange(len(lanes.step))
    moving = lanes.take(places)
    while len(places):
        for _ in range(_ROUNDS_BETWEEN_LOOKS):
            _go_to_next_event(moving, chunk, windows, scales)
        remaining = moving.step < chunk.steps
        # Lanes at the end of the chunk do no harm, so they are set aside only when that saves something.
        if np.count_nonzero(remaining) <= 0.75 * len(places):
            lanes.put(places, moving)
            kept = np.flatnonzero(remaining)
            places, moving = places[kept], moving.take(kept)


def _go_to_next_event(lanes: _Lanes, chunk: TraceChunk, windows: Transitions, scales: Transitions) -> None:
    """Take each lane through its next overflow or full window, or to the end of the chunk; there it stays."""
    base = chunk.bases(scales, lanes.scale)
    place = base + lanes.step
    next_overflow = chunk.next_overflow.take(place)
    full: _Ints = (lanes.step + lanes.scale_window - lanes.clean_steps).astype(np.int64)
    last: _Ints = np.minimum(full, chunk.steps)
    stop: _Ints = np.minimum(next_overflow, last)
    overflowed = next_overflow < last
    applied = stop - lanes.step
    event = np.where(overflowed, OVERFLOW, np.where(stop == full, RAISE, WAIT))

    window, scale = windows.after(lanes.window, event), scales.after(lanes.scale, event)
    end: _Ints = stop + overflowed
    same = (window == lanes.window) & (scale == lanes.scale) & (event != WAIT)
    if same.any():
        _repeat(end, same, overflowed, base, next_overflow, lanes.scale_window, chunk)
    skipped = np.where(overflowed, end - stop, 0)

    lanes.skipped += skipped
    lanes.run = np.where(applied > 0, 0, lanes.run) + skipped
    np.maximum(lanes.longest_run, lanes.run, out=lanes.longest_run)
    # As long as all steps so far were skipped, the first applied one is still ahead.
    searching = lanes.skipped == chunk.start + end
    if searching.any():
        lanes.skipped_before_first_applied[searching] = lanes.skipped[searching]
    place_after = base + end
    measured = chunk.measured.take(place_after) - chunk.measured.take(place)
    log2_ceiling = chunk.log2_ceiling.take(place_after) - chunk.log2_ceiling.take(place)
    lanes.headroom += log2_ceiling - measured * np.log2(lanes.loss_scale)
    lanes.known += chunk.known.take(place_after) - chunk.known.take(place)
    if chunk.seconds is not None:
        lanes.seconds += np.where(overflowed, chunk.seconds.take(end) - chunk.seconds.take(stop), 0.0)

    lanes.clean_steps = np.where(event == WAIT, lanes.clean_steps + applied, 0)
    lanes.step, lanes.window, lanes.scale = end, window, scale
    scale_window, loss_scale = windows.values.take(window), scales.values.take(scale)
    lanes.window_changes += scale_window != lanes.scale_window
    lanes.scale_changes += loss_scale != lanes.loss_scale
    lanes.scale_window, lanes.loss_scale = scale_window, loss_scale


def _repeat(
    end: _Ints,
    same: NDArray[np.bool_],
    overflowed: NDArray[np.bool_],
    base: _Ints,
    next_overflow: NDArray[np.int32],
    scale_window: _Floats,
    chunk: TraceChunk,
) -> None:
    """Where an event changes nothing, move ``end`` over all events of its kind that follow it directly.

    At the floor that is a run of overflows, and at the cap one full window after the other; taken one by one, they
    would make the sweep as slow as the rule.
    """
    at_floor = np.flatnonzero(same & overflowed)
    end[at_floor] = chunk.next_clean.take(base[at_floor] + end[at_floor])
    at_cap = np.flatnonzero(same & ~overflowed)
    windows = scale_window[at_cap].astype(np.int64)
    end[at_cap] += (next_overflow[at_cap] - end[at_cap]) // windows * windows


def _measures(lanes: _Lanes, trace: Trace) -> list[Measures]:
    steps = len(trace)
    # No configuration has a scale below the smallest, so all of them skip these steps.
    unavoidable = int((trace.ceiling < SMALLEST_LOSS_SCALE).sum())
    unbounded = int((trace.ceiling > LARGEST_LOSS_SCALE).sum())
    bounded = steps - lanes.skipped - unbounded
    # No headroom is below 0; differences of sums may be, in their last digits.
    total = np.maximum(lanes.headroom, 0.0)
    headroom = np.divide(total, bounded, out=np.full(len(bounded), math.nan), where=bounded > 0)
    return [
        Measures(
            steps=steps,
            skipped=int(lanes.skipped[lane]),
            unavoidable=unavoidable,
            skipped_regret=int(lanes.skipped[lane]) - unavoidable,
            seconds_lost=None if trace.seconds is None else float(lanes.seconds[lane]),
            headroom_lost=float(headroom[lane]),
            headroom_regret=float(headroom[lane]),
            unbounded=unbounded,
            longest_skip_run=int(lanes.longest_run[lane]),
            steps_to_first_applied=int(lanes.skipped_before_first_applied[lane]),
            scale_changes=int(lanes.scale_changes[lane]),
            window_changes=int(lanes.window_changes[lane]),
            known_share=float(lanes.known[lane] / steps),
        )
        for lane in range(len(lanes.step))
    ]


def _final_states(lanes: _Lanes, windows: Transitions, scales: Transitions) -> list[LossScaleState]:
    return [
        windows.states[int(lanes.window[lane]) // 3]._replace(
            loss_scale=scales.states[int(lanes.scale[lane]) // 3].loss_scale,
            clean_steps=int(lanes.clean_steps[lane]),
            skipped_steps=int(lanes.skipped[lane]),
            consecutive_overflows=int(lanes.run[lane]),
        )
        for lane in range(len(lanes.step))
    ]
