"""A general rule of dynamic loss scaling, with settings that reproduce the loss scalers of other systems."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from mindformers_adaptive.rules.checks import to_float32

__all__ = ["FLOAT32", "FLOAT32_FLOAT64_FACTORS", "FLOAT64", "Arithmetic", "DynamicRule", "DynamicState"]


class Arithmetic(NamedTuple):
    """How another system rounds: functions that round to the dtypes of the system's loss scale and of its factors.

    Products and quotients of float32 numbers, computed in float64 and then rounded to float32, equal float32
    arithmetic. A loss scale beyond the largest number of the dtype becomes inf.
    """

    scale: Callable[[float], float]
    factor: Callable[[float], float]


# In the original loss scalers, the loss scale and the factors are both float32 tensors (FLOAT32), a float32 tensor and
# C++ doubles (FLOAT32_FLOAT64_FACTORS), or both Python floats (FLOAT64).
FLOAT32 = Arithmetic(to_float32, to_float32)
FLOAT32_FLOAT64_FACTORS = Arithmetic(to_float32, float)
FLOAT64 = Arithmetic(float, float)


class DynamicState(NamedTuple):
    """Everything that :class:`DynamicRule` remembers between two steps.

    Attributes:
        loss_scale (float): the scale for the next step.
        scale_window (int, optional): number of clean steps before a raise; None if the scale never rises.
        clean_steps (int): steps since the last overflow or raise.
        overflows (int): number of overflows since this number was last reset to 0.
        stopped (bool): whether the original system would have ended the training with an error.
    """

    loss_scale: float
    scale_window: int | None = None
    clean_steps: int = 0
    overflows: int = 0
    stopped: bool = False


@dataclass(frozen=True, kw_only=True)
class DynamicRule:
    r"""Dynamic loss scaling: grow after an interval of clean steps, back off once overflows are no longer tolerated.

    .. code-block:: text

        overflow:  clean_steps = 0, overflows += 1
                   if overflows >= tolerance:
                       loss_scale = max(loss_scale * backoff_factor, floor)                         (a drop)
        clean:     clean_steps += 1
                   if clean_steps == scale_window:
                       clean_steps = 0, overflows = 0
                       loss_scale = loss_scale * growth_factor                                     (a raise)

    By default only a raise resets ``overflows``. Until a raise, each overflow from number ``tolerance`` on is a drop.

    Attributes:
        arithmetic (Arithmetic): how the scale and the factors are rounded.
        growth_factor (float): what a raise multiplies the scale by.
        backoff_factor (float, optional): what a drop multiplies the scale by. None: a drop divides the scale by
            ``growth_factor``, which rounds differently.
        reciprocal (bool): without ``backoff_factor``: whether a drop multiplies by the rounded 1 / ``growth_factor``
            instead of dividing.
        floor (float): the smallest scale that a drop can lead to.
        stays_finite (bool): whether a raise beyond the largest float32 number leaves the scale as it is.
        tolerance (int): how many overflows it takes to drop the scale.
        clean_step_forgives (bool): whether a clean step also resets the count of overflows to 0.
        stops_at_floor (bool): whether the original system ends the training when a scale at the floor would drop.
    """

    arithmetic: Arithmetic
    growth_factor: float = 2.0
    backoff_factor: float | None = None
    reciprocal: bool = False
    floor: float = 0.0
    stays_finite: bool = False
    tolerance: int = 1
    clean_step_forgives: bool = False
    stops_at_floor: bool = False

    def start(self, loss_scale: float, scale_window: int | None = None) -> DynamicState:
        """Return the state before the first step."""
        return DynamicState(self.arithmetic.scale(loss_scale), scale_window)

    def step(self, state: DynamicState, overflow: bool, largest_gradient: float | None = None) -> DynamicState:
        """Return the state after a step that overflowed or was clean; ``state`` itself is not changed."""
        loss_scale, window, clean_steps, overflows, stopped = state
        if overflow:
            if overflows + 1 < self.tolerance:
                return DynamicState(loss_scale, window, 0, overflows + 1, stopped)
            stopped = stopped or (self.stops_at_floor and loss_scale == self.floor)
            return DynamicState(self._drop(loss_scale), window, 0, self.tolerance, stopped)
        if clean_steps + 1 != window:
            return DynamicState(
                loss_scale, window, clean_steps + 1, 0 if self.clean_step_forgives else overflows, stopped
            )
        raised = self.arithmetic.scale(loss_scale * self.arithmetic.factor(self.growth_factor))
        if not self.stays_finite or math.isfinite(to_float32(raised)):
            loss_scale = raised
        return DynamicState(loss_scale, window, 0, 0, stopped)

    def _drop(self, loss_scale: float) -> float:
        numbers = self.arithmetic
        if self.backoff_factor is not None:
            dropped = loss_scale * numbers.factor(self.backoff_factor)
        elif self.reciprocal:
            dropped = loss_scale * numbers.factor(1.0 / numbers.factor(self.growth_factor))
        else:
            dropped = loss_scale / numbers.factor(self.growth_factor)
        return max(numbers.scale(dropped), numbers.scale(self.floor))
