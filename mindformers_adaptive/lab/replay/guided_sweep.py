"""Gradient-guided loss scaling on many traces at once: the rule with a select in place of every branch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mindformers_adaptive.lab.replay.measures import Measures, measure
from mindformers_adaptive.lab.traces.trace import Trace
from mindformers_adaptive.rules import guided as guided_rule
from mindformers_adaptive.rules.guided import PLACES, GuidedRule
from mindformers_adaptive.rules.safe_exponent import max_safe_exponent

__all__ = ["guided_sweep"]

Floats = NDArray[np.float32]
Integers = NDArray[np.int32]
Flags = NDArray[np.bool_]

_PLACE = np.arange(PLACES, dtype=np.float32)
_DROPS = np.array(guided_rule.DROPS, np.int32)


def guided_sweep(
    rules: Sequence[GuidedRule], traces: Sequence[Trace], loss_scale_value: float | Sequence[float]
) -> list[Measures]:
    """Replay rules on traces, the first on the first and so on, all at once.

    The loss scales are exactly those of replaying :class:`~mindformers_adaptive.rules.guided.GuidedRule` step by
    step, and with hundreds of traces a good deal faster.

    Args:
        rules (Sequence[GuidedRule]): one for each trace.
        traces (Sequence[Trace]): all of one length; without ``largest_gradient`` nothing is shown.
        loss_scale_value (float or Sequence[float]): the initial scale of all, or of each.

    Returns:
        list[Measures], one for each trace.

    Raises:
        ValueError: if the numbers of rules and traces differ, or the lengths of the traces.

    Examples:
        >>> from mindformers_adaptive.lab.traces.synthetic import synthetic_trace
        >>> traces = [synthetic_trace("stationary", 1000, seed) for seed in range(3)]
        >>> [one.skipped for one in guided_sweep([GuidedRule()] * 3, traces, 2.0**32)]
        [4, 4, 4]
    """
    if len(rules) != len(traces) or len({len(trace) for trace in traces}) != 1:
        raise ValueError(
            "'rules' and 'traces' must have one entry for each other, and all traces one length, but got "
            f"{len(rules)} rules and traces of {[len(trace) for trace in traces]} steps. Sweep others by themselves."
        )
    lanes = _Lanes(rules, loss_scale_value)
    ceilings = np.array([trace.ceiling for trace in traces]).T
    shown, informed = zip(*(_shown(trace) for trace in traces), strict=True)
    scales = [np.ldexp(1.0, lanes.exponent)]
    for ceiling, exponent, known in zip(ceilings, np.transpose(shown), np.transpose(informed), strict=True):
        lanes.step(scales[-1] > ceiling, exponent, known)
        scales.append(np.ldexp(1.0, lanes.exponent))
    return [measure(trace, scale) for trace, scale in zip(traces, np.transpose(scales), strict=True)]


def _shown(trace: Trace) -> tuple[Integers, Flags]:
    """What each step shows, and whether it shows something."""
    gradients = np.full(len(trace), np.nan) if trace.largest_gradient is None else trace.largest_gradient
    exponents = [max_safe_exponent(gradient) for gradient in gradients.tolist()]
    return np.array([exponent or 0 for exponent in exponents], np.int32), np.array([e is not None for e in exponents])


class _Lanes:
    """The state of every lane, arrays of shape (lanes,), none changed in place; named as in ``GuidedState``."""

    def __init__(self, rules: Sequence[GuidedRule], loss_scale_value: float | Sequence[float]) -> None:
        initial = np.broadcast_to(loss_scale_value, len(rules)).tolist()
        starts = [rule.start(scale) for rule, scale in zip(rules, initial, strict=True)]
        self.patience = _integers([rule.patience for rule in rules])
        self.lowest = _integers([rule.min_exponent for rule in rules])
        self.highest = _integers([rule.max_exponent for rule in rules])
        self.memory: Floats = np.array(1 / self.patience, np.float32)
        self.recent: Integers = self.patience // 10
        self.smallest_window = np.maximum(self.patience // 2, 1)
        self.exponent = _integers(np.log2([start.loss_scale for start in starts]))
        self.base = _integers([start.base for start in starts])
        self.level: Floats = np.array([start.level for start in starts], np.float32)
        self.rates: Floats = np.array([start.overflow_rate for start in starts], np.float32)  # (lanes, 16)
        self.window = _integers([start.scale_window for start in starts])
        self.observed = self.limit = self.clean = self.contradictions = np.zeros_like(self.base)
        self.first = self.consecutive = np.zeros_like(self.base)
        self.bound: Flags = self.base < self.base
        self.trial = self.bound

    def step(self, overflow: Flags, shown: Integers, informed: Flags) -> None:
        """Take a step in every lane; ``shown`` counts where a lane is informed and did not overflow."""
        informed = informed & ~overflow
        dropped = np.maximum(self.exponent - _DROPS[np.minimum(self.consecutive, len(_DROPS) - 1)], self.lowest)
        first = np.where(overflow & (self.consecutive == 0), self.exponent, self.first)
        after, several = self.consecutive > 0, self.consecutive > 1

        per_bit = guided_rule.CONTRADICTIONS_PER_BIT
        contradicted = informed & (self.exponent > shown + self.contradictions // per_bit)
        contradictions = np.minimum(self.contradictions + contradicted, guided_rule.MOST_CONTRADICTIONS)
        shown = shown + contradictions // per_bit
        unexplained = ~overflow & after & (~informed | (shown >= self.first))
        fall = unexplained & (self.clean < self.recent)
        self._observe(shown, informed, after, several)

        clean = np.where(after, 1, self.clean + 1)
        rise = ~overflow & ~fall & self.bound & (clean >= self.window)
        grown = np.minimum(guided_rule.WINDOW_FACTOR * self.window, guided_rule.LARGEST_WINDOWS * self.smallest_window)
        window = np.where((fall & ~self.trial) | (rise & self.trial), self.smallest_window, self.window)
        self.window = np.where(fall & self.trial, grown, window)
        self.limit = np.where(fall, self.base + 1 - self.exponent, self.limit - rise)
        self.trial = (self.trial & ~fall) | rise
        self.contradictions = np.where(fall, np.maximum(contradictions - per_bit, 0), contradictions)

        cheapest = np.argmin(self.rates * self.patience[:, None].astype(np.float32) + _PLACE, axis=1)
        cap = np.where(self.observed == 0, guided_rule.NO_CAP, cheapest)
        following = np.clip(self.base + 1 - np.maximum(cap, self.limit), self.lowest, self.highest)
        clean = np.where(following > self.exponent, 0, clean)
        self.bound = np.where(overflow, self.bound, (self.limit > cap) & (following < self.highest))
        self.clean = np.where(overflow, self.clean, clean)
        self.exponent = np.where(overflow, dropped, following)
        self.first = first
        self.consecutive = np.where(overflow, self.consecutive + 1, 0)

    def _observe(self, shown: Integers, informed: Flags, after: Flags, several: Flags) -> None:
        """Put what the informed lanes show into their records, and move their level and base."""
        initial = informed & (self.observed == 0)
        self.base = np.where(initial, shown, self.base)
        self.limit = np.where(initial, 0, self.limit)
        level = np.where(initial, shown, self.level).astype(np.float32)

        scales = (self.base[:, None] + 1).astype(np.float32) - _PLACE
        too_high = (scales > shown[:, None]).astype(np.float32)
        prior = np.float32(1) / (self.observed + guided_rule.PRIOR_STEPS + 1).astype(np.float32)
        weight = np.where(informed, np.maximum(self.memory, prior), np.float32(0))
        self.rates = self.rates + (too_high - self.rates) * weight[:, None]

        seen = shown.astype(np.float32)
        level = np.where(after, np.minimum(level, seen), level)
        level = level + (seen - level) * np.float32(guided_rule.LEVEL_SHARE)
        above = np.where(several, guided_rule.REACH_AFTER_SEVERAL, guided_rule.REACH).astype(np.float32)
        lowest, highest = np.ceil(level - np.float32(guided_rule.REACH)), np.floor(level + above)
        base = np.minimum(np.maximum(self.base, lowest), highest).astype(np.int32)
        self.base = np.where(informed, base, self.base)
        self.level = np.where(informed, level, self.level)
        self.observed = np.where(informed, np.minimum(self.observed + 1, self.patience), self.observed)


def _integers(values: ArrayLike) -> Integers:
    return np.asarray(values, dtype=np.int32)
