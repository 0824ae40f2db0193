"""The measures of replays from event to event, without a number for each step of each replay."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.lab.configuration import Configuration
from mindformers_adaptive.lab.events import EventPath, follow_each
from mindformers_adaptive.lab.measures import LARGEST_LOSS_SCALE, SMALLEST_LOSS_SCALE, Measures, require_steps
from mindformers_adaptive.lab.overflow_places import Overflows
from mindformers_adaptive.record.trace import Trace, consecutive_runs
from mindformers_adaptive.rules.adaptive import AdaptiveRule

__all__ = ["EventMeasures", "pays_for", "replay_by_events"]

# Bits of headroom are summed as integers, so that equal paths have equal sums however they are divided into events:
# 2^7 bits in each of 2^24 steps fit, with an error of 2^-33 bits in a step.
_PARTS_OF_A_BIT = 2.0**32

# Below so many steps for each configuration, a few NumPy operations for each step of them all are quicker.
_STEPS_FOR_EACH = 20


def pays_for(configurations: Sequence[Configuration], trace: Trace) -> bool:
    """Return whether replaying configurations from event to event is possible, and quicker than side by side."""
    return len(trace) > _STEPS_FOR_EACH * len(configurations) > 0 and all(
        type(one.rule) is AdaptiveRule for one in configurations
    )


def replay_by_events(configurations: Sequence[Configuration], trace: Trace) -> list[tuple[Measures, Any]]:
    """Replay configurations of the adaptive rule on a long trace.

    States, counts and ``known_share`` are exactly those of stepping each rule by itself. ``headroom_lost`` and
    ``seconds_lost`` are summed in another way, so their last digits may differ.

    Args:
        configurations (Sequence[Configuration]): of the adaptive rule.
        trace (Trace): at least one step.

    Returns:
        list[tuple[Measures, NamedTuple]], the measures and the state after the last step of each configuration.

    Raises:
        ValueError: if the trace has no steps.
    """
    measures, overflows = EventMeasures(trace), Overflows(trace.ceiling)
    # From different initial scales the same rule soon comes to the same states.
    of_rule: defaultdict[Any, list[int]] = defaultdict(list)
    for place, one in enumerate(configurations):
        settings = {name: value for name, value in one.arguments.items() if name != "loss_scale_value"}
        of_rule[tuple(settings.items())].append(place)
    groups = [*of_rule.values()]
    found: list[Any] = [None] * len(configurations)
    rules = [configurations[places[0]].rule for places in groups]
    starts = [[configurations[place].start for place in places] for places in groups]
    for group, at, path in follow_each(rules, starts, overflows):
        found[groups[group][at]] = measures.of(path), path.final_state
    return found


class EventMeasures:
    """The measures of paths on a trace.

    Args:
        trace (Trace): at least one step.

    Raises:
        ValueError: if the trace has no steps.
    """

    def __init__(self, trace: Trace) -> None:
        require_steps(trace)
        self._trace, ceiling = trace, trace.ceiling
        # At a ceiling of 0 no step is applied.
        self._has_headroom = (ceiling > 0.0) & (ceiling <= LARGEST_LOSS_SCALE)
        bits = np.log2(ceiling, out=np.zeros(len(trace)), where=self._has_headroom)
        self._bits = np.rint(bits * _PARTS_OF_A_BIT).astype(np.int64)
        self._all_bits = int(self._bits.sum())
        self._counted = np.append(0, np.cumsum(self._has_headroom))
        self._avoidable = ceiling >= SMALLEST_LOSS_SCALE
        self._unavoidable = int(np.count_nonzero(ceiling < SMALLEST_LOSS_SCALE))
        self._unbounded = int(np.count_nonzero(ceiling > LARGEST_LOSS_SCALE))
        self._bounds = [np.unique(bound) for bound in (trace.lower_bound, trace.upper_bound)]
        self._has_unknown = bool((np.nextafter(trace.lower_bound, np.inf) < trace.upper_bound).any())
        self._unknown: dict[tuple[int, int], NDArray[np.int32]] = {}

    def of(self, path: EventPath) -> Measures:
        """Return the measures of what a rule did."""
        steps, skipped, scale = len(self._trace), path.skipped, path.loss_scale
        runs = consecutive_runs(skipped)
        lengths = runs[:, 1] - runs[:, 0] + 1
        begins_skipped = len(runs) > 0 and int(runs[0, 0]) == 0
        seconds = self._trace.seconds
        headroom = self._headroom(path)
        return Measures(
            steps=steps,
            skipped=len(skipped),
            unavoidable=self._unavoidable,
            skipped_regret=int(np.count_nonzero(self._avoidable[skipped])),
            seconds_lost=None if seconds is None else float(seconds[skipped].sum()),
            headroom_lost=headroom,
            headroom_regret=headroom,
            unbounded=self._unbounded,
            longest_skip_run=int(lengths.max(initial=0)),
            steps_to_first_applied=int(lengths[0]) if begins_skipped else 0,
            scale_changes=int(np.count_nonzero(scale[1:] != scale[:-1])),
            window_changes=0
            if path.scale_window is None
            else int(np.count_nonzero(path.scale_window[1:] != path.scale_window[:-1])),
            known_share=(steps - self._count_unknown(path)) / steps if self._has_unknown else 1.0,
        )

    def _headroom(self, path: EventPath) -> float:
        """The mean of the bits of headroom over the applied steps."""
        ends = np.append(path.changes[1:], len(self._trace))
        scale_bits = np.rint(np.log2(path.loss_scale) * _PARTS_OF_A_BIT).astype(np.int64)
        used = int((scale_bits * (self._counted[ends] - self._counted[path.changes])).sum())
        skipped = path.skipped[self._has_headroom[path.skipped]]
        at = np.searchsorted(path.changes, skipped, side="right") - 1
        bits = self._all_bits - used - int((self._bits[skipped] - scale_bits[at]).sum())
        count = int(self._counted[-1]) - len(skipped)
        return bits / _PARTS_OF_A_BIT / count if count else math.nan

    def _count_unknown(self, path: EventPath) -> int:
        """For how many steps it is not known what happens at the scale that they used."""
        count, ends = 0, np.append(path.changes[1:], len(self._trace))
        order = np.argsort(path.loss_scale, kind="stable")
        scales, firsts = np.unique(path.loss_scale[order], return_index=True)
        for scale, rows in zip(scales.tolist(), np.split(order, firsts[1:]), strict=True):
            before = self._unknown_before(scale)
            count += int((before[ends[rows]] - before[path.changes[rows]]).sum())
        return count

    def _unknown_before(self, scale: float) -> NDArray[np.int32]:
        """How many steps before each one are unknown at a scale: the same where no step has a bound in between."""
        lower, upper = self._bounds
        key = int(np.searchsorted(lower, scale)), int(np.searchsorted(upper, scale, side="right"))
        if key not in self._unknown:
            unknown = (scale > self._trace.lower_bound) & (scale < self._trace.upper_bound)
            self._unknown[key] = np.append(False, unknown).cumsum(dtype=np.int32)
        return self._unknown[key]
