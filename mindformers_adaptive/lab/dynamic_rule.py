"""One general rule of dynamic loss scaling, of which the policies of other systems are settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from mindformers_adaptive.rules.checks import SMALLEST_FLOAT32, to_float32

__all__ = ["FLOAT32", "FLOAT32_FLOAT64_FACTORS", "FLOAT32_FLUSHED_FLOAT64_FACTORS", "FLOAT64", "Arithmetic"]
__all__ += ["DynamicRule", "DynamicState"]


class Arithmetic(NamedTuple):
    """How a system computes: functions that round to the type of its scale, and to that of its factors.

    Products and quotients of float32 numbers, computed in float64 and then rounded, are those of float32 arithmetic.
    Beyond the largest number of its type a scale is inf.
    """

    scale: Callable[[float], float]
    factor: Callable[[float], float]


def _flushed_float32(value: float) -> float:
    """Round to float32 without subnormal numbers."""
    rounded = to_float32(value)
    return 0.0 if rounded < SMALLEST_FLOAT32 else rounded


# Tensors of the scale and of the factors; a float32 tensor and C++ doubles; the same in a CUDA kernel that is compiled
# for fast mathematics; Python numbers.
FLOAT32 = Arithmetic(to_float32, to_float32)
FLOAT32_FLOAT64_FACTORS = Arithmetic(to_float32, float)
FLOAT32_FLUSHED_FLOAT64_FACTORS = Arithmetic(_flushed_float32, float)
FLOAT64 = Arithmetic(float, float)


class DynamicState(NamedTuple):
    """All that :class:`DynamicRule` remembers between two steps.

    Attributes:
        loss_scale (float): the scale for the next step.
        scale_window (float): clean steps before a raise; the same at all steps, unless it follows the scale: then a
            raise multiplies it by the growth factor, which need not be an integer.
        clean_steps (int): steps since the last overflow or raise; -1 where the first of them does not count. Where the
            window follows the scale, a raise does not set it back.
        overflows (int): overflows that were tolerated since the count began again.
        steps_since_change (int): steps since the last drop or raise, where overflows are judged by their share; else 0.
        stopped (bool): whether the system itself would have ended the training with an error.
    """

    loss_scale: float
    scale_window: float
    clean_steps: int
    overflows: int = 0
    steps_since_change: int = 0
    stopped: bool = False


@dataclass(frozen=True, kw_only=True)
class DynamicRule:
    r"""Dynamic loss scaling: grow after an interval of clean steps, back off once overflows are no longer tolerated.

    .. code-block:: text

        overflow:  clean_steps = 0, overflows += 1
                   if overflows >= tolerance, or overflows / steps_since_change >= tolerated_share:
                       loss_scale = max(loss_scale * backoff_factor, floor)                         (a drop)
        clean:     clean_steps += 1
                   if clean_steps == scale_window:
                       clean_steps = 0, loss_scale = min(loss_scale * growth_factor, upper_bound)   (a raise)

    With a window that follows the scale, a drop also divides it: scale_window = int(scale_window / growth_factor), at
    least 1. A raise multiplies it, comes after each multiple of scale_window, and leaves the count of clean steps.

    Attributes:
        arithmetic (Arithmetic): the types of the numbers.
        growth_factor (float): what a raise multiplies the scale by.
        backoff_factor (float, optional): what a drop multiplies the scale by. None: a drop divides the scale by
            ``growth_factor``, which rounds differently.
        reciprocal (bool): with no ``backoff_factor``, a drop multiplies by the rounded 1 / ``growth_factor``.
        floor (float): the smallest scale of a drop.
        upper_bound (float): the largest scale of a raise.
        stays_finite (bool): whether a raise that would leave the finite float32 numbers is left out.
        clean_steps_before (int): the count of clean steps at the start and after an overflow; -1 where the first one
            is none of the ``scale_window``.
        tolerance (int): the overflow of this number drops the scale; 1, every overflow.
        clean_step_forgives (bool): whether a clean step sets the count of overflows back to 0.
        drop_forgives (bool): whether a drop sets it back to 0; otherwise every further overflow drops too.
        tolerated_share (float, optional): instead of ``tolerance``, the share of overflowed steps since the last drop
            or raise from which on the scale drops. A raise then does not set the count of overflows back.
        window_follows (bool): whether the window follows the scale.
        keeps_below (float): a drop below it leaves the scale where it is.
        stops_at_floor (bool): whether the system ends the training when a scale at the floor would drop.
        stops_at_or_below (float, optional): the system ends the training when an overflow leaves the scale there; the
            scale keeps its value.
    """

    arithmetic: Arithmetic
    growth_factor: float
    backoff_factor: float | None = None
    reciprocal: bool = False
    floor: float = 0.0
    upper_bound: float = math.inf
    stays_finite: bool = False
    clean_steps_before: int = 0
    tolerance: int = 1
    clean_step_forgives: bool = False
    drop_forgives: bool = False
    tolerated_share: float | None = None
    window_follows: bool = False
    keeps_below: float = 0.0
    stops_at_floor: bool = False
    stops_at_or_below: float | None = None

    @property
    def moves_by_one_factor(self) -> bool:
        """bool: whether a drop undoes a raise."""
        return self.backoff_factor is None or math.isclose(self.backoff_factor * self.growth_factor, 1.0)

    def start(
        self, loss_scale: float, scale_window: int, clean_steps: int | None = None, overflows: int = 0
    ) -> DynamicState:
        """Return the state before the first step."""
        before = self.clean_steps_before if clean_steps is None else clean_steps
        return DynamicState(min(self.arithmetic.scale(loss_scale), self.upper_bound), scale_window, before, overflows)

    def step(self, state: DynamicState, overflow: bool, largest_gradient: float | None = None) -> DynamicState:
        """Return the state after a step that overflowed or was clean; ``state`` itself is not changed."""
        steps = state.steps_since_change if self.tolerated_share is None else state.steps_since_change + 1
        state = state._replace(steps_since_change=steps)
        return self._after_overflow(state) if overflow else self._after_clean(state)

    def _after_overflow(self, state: DynamicState) -> DynamicState:
        loss_scale, window, _, overflows, steps, stopped = state
        overflows += 1
        share = self.tolerated_share
        if overflows < self.tolerance if share is None else overflows / steps < share:
            dropped = loss_scale
        else:
            dropped = self._drop(loss_scale)
            stopped = stopped or (self.stops_at_floor and loss_scale == self.floor)
            overflows, steps = (0 if self.drop_forgives else self.tolerance), 0
            if self.window_follows:
                window = max(int(window / self.growth_factor), 1)
        dropped = loss_scale if dropped < self.keeps_below else dropped
        if self.stops_at_or_below is not None and dropped <= self.stops_at_or_below:
            dropped, stopped = loss_scale, True
        return DynamicState(dropped, window, self.clean_steps_before, overflows, steps, stopped)

    def _after_clean(self, state: DynamicState) -> DynamicState:
        loss_scale, window, clean_steps, overflows, steps, stopped = state
        clean_steps += 1
        if self.clean_step_forgives:
            overflows = 0
        if clean_steps % window == 0 if self.window_follows else clean_steps == window:
            raised = self.arithmetic.scale(loss_scale * self.arithmetic.factor(self.growth_factor))
            if not self.stays_finite or math.isfinite(to_float32(raised)):
                loss_scale = min(raised, self.upper_bound)
            steps, overflows = 0, overflows if self.tolerated_share is not None else 0
            if self.window_follows:
                window *= self.growth_factor
            else:
                clean_steps = 0
        return DynamicState(loss_scale, window, clean_steps, overflows, steps, stopped)

    def _drop(self, loss_scale: float) -> float:
        numbers = self.arithmetic
        if self.backoff_factor is not None:
            dropped = loss_scale * numbers.factor(self.backoff_factor)
        elif self.reciprocal:
            dropped = loss_scale * numbers.factor(1.0 / numbers.factor(self.growth_factor))
        else:
            dropped = loss_scale / numbers.factor(self.growth_factor)
        return max(numbers.scale(dropped), numbers.scale(self.floor))
