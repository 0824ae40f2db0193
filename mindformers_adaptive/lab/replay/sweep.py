"""Replay many configurations side by side: of one rule or several, all on one trace or each on a trace of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.lab.replay.configuration import Configuration
from mindformers_adaptive.lab.replay.measures import Measures, Tally, overflow_flags, require_steps, rows_of
from mindformers_adaptive.lab.traces.trace import Trace
from mindformers_adaptive.rules.base import Rule

__all__ = ["SweepResult", "replay_side_by_side", "sweep"]

# Scales that are kept until they are measured: enough that NumPy works on long arrays, and few enough for a cache.
_SCALES_AT_ONCE = 2**16


@dataclass(frozen=True)
class SweepResult:
    """What configurations did on traces.

    Attributes:
        configurations (tuple[Configuration, ...]): what was replayed.
        measures (tuple[Measures, ...]): of each configuration.
        final_states (tuple[NamedTuple, ...]): of each configuration's rule after the last step.
    """

    configurations: tuple[Configuration, ...]
    measures: tuple[Measures, ...]
    final_states: tuple[Any, ...]

    def column(self, name: str) -> NDArray[np.float64]:
        """Return one measure of all configurations, float64 of shape (configurations,); nan where there is none."""
        return np.array([getattr(one, name) for one in self.measures], np.float64)


def sweep(configurations: Sequence[Configuration], traces: Trace | Sequence[Trace]) -> SweepResult:
    """Replay configurations side by side, with a few NumPy operations for each step of them all.

    States, counts and ``known_share`` are exactly those of stepping each configuration's rule by itself.
    ``headroom_lost`` and ``seconds_lost`` are float64 sums in another order, so their last digits may differ.

    Args:
        configurations (Sequence[Configuration]): at least one, of any rules.
        traces (Union[Trace, Sequence[Trace]]): one trace for all configurations, or one for each of them, all of one
            length. At least one step.

    Returns:
        SweepResult, in the order of ``configurations``.

    Raises:
        ValueError: if there is no configuration or no step, or the traces do not fit.

    Examples:
        >>> trace = Trace.exact("calm", [2.0**20] * 1000)
        >>> result = sweep([Configuration.dynamic(10), Configuration.dynamic(100)], trace)
        >>> [one.skipped for one in result.measures]
        [87, 5]
    """
    if len(configurations) == 0:
        raise ValueError("'configurations' must have at least 1 configuration, but got none. Make some with grid().")
    common = isinstance(traces, Trace)
    on = [traces] if isinstance(traces, Trace) else list(traces)
    if not common and (len(on) != len(configurations) or len({len(trace) for trace in on}) != 1):
        raise ValueError(
            "'traces' must be one trace, or one for each configuration and all of one length, but got "
            f"{len(configurations)} configurations and traces of {[len(trace) for trace in on]} steps. Sweep others by "
            "themselves."
        )
    side_by_side: defaultdict[Any, list[int]] = defaultdict(list)
    for place, one in enumerate(configurations):
        side_by_side[type(one.rule), one.rule.lane_shapes].append(place)
    found: dict[int, tuple[Measures, Any]] = {}
    for places in side_by_side.values():
        group = [configurations[place] for place in places]
        rules, states = [one.rule for one in group], [one.start for one in group]
        of_group = replay_side_by_side(rules, states, on if common else [on[place] for place in places])
        found |= dict(zip(places, of_group, strict=True))
    measures, final_states = zip(*(found[place] for place in range(len(configurations))), strict=True)
    return SweepResult(tuple(configurations), measures, final_states)


def replay_side_by_side(
    rules: Sequence[Rule], states: Sequence[Any], traces: Sequence[Trace]
) -> list[tuple[Measures, Any]]:
    """Replay rules of one class, and with equal ``lane_shapes``, all at once.

    Args:
        rules (Sequence[Rule]): at least one.
        states (Sequence[NamedTuple]): of each rule, before the first step.
        traces (Sequence[Trace]): one for all, or one for each rule; of one length, at least one step.

    Returns:
        list[tuple[Measures, NamedTuple]], the measures and the state after the last step of each rule.

    Raises:
        ValueError: if the traces have no steps.
    """
    require_steps(traces[0])
    lanes, count = type(rules[0]).lanes(rules, states), len(rules)
    tally, steps = Tally(traces, count), max(_SCALES_AT_ONCE // count, 1)
    for start in range(0, len(traces[0]), steps):
        stop = min(start + steps, len(traces[0]))
        ceilings = rows_of(traces, "ceiling", start, stop)
        gradients = np.broadcast_to(rows_of(traces, "largest_gradient", start, stop), (stop - start, count))
        scales = np.empty((stop - start + 1, count))
        windows = None if lanes.scale_window is None else np.empty(scales.shape, np.int64)
        for place in range(stop - start + 1):
            if place:
                lanes.step(overflow_flags(scales[place - 1], ceilings[place - 1]), gradients[place - 1])
            scales[place] = lanes.loss_scale
            if windows is not None:
                windows[place] = lanes.scale_window
        tally.add(start, scales, windows)
    return list(zip(tally.measures(), lanes.states(), strict=True))
