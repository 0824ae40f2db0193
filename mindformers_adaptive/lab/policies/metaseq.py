"""metaseq's dynamic loss scaling, whose window grows and shrinks with the scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mindformers_adaptive.lab.policies import presets
from mindformers_adaptive.lab.policies.presets import Parameter, Preset

__all__ = ["METASEQ", "MetaseqRule", "MetaseqState"]

METASEQ = Preset(
    "facebookresearch/metaseq optim.dynamic_loss_scaler.DynamicLossScaler",
    {
        "init_scale": Parameter("loss_scale", 4.0, presets.positive),
        "scale_factor": Parameter("scale_factor", 2.0, presets.factor_above_one),
        "scale_window": Parameter("scale_window", 256, presets.steps),
        "tolerance": Parameter("tolerated_share", 0.0, presets.not_negative),
        "threshold": Parameter("floor", None, presets.optional(presets.not_negative)),
        "min_loss_scale": Parameter("min_loss_scale", 2.0**-5, presets.not_negative),
    },
    {},
)


class MetaseqState(NamedTuple):
    """All that :class:`MetaseqRule` remembers between two steps.

    Attributes:
        loss_scale (float): the scale for the next step.
        scale_window (float): the window in force, in steps; a raise multiplies it by the scale factor, which need not
            be an integer.
        clean_steps (int): steps since the last overflow. A raise does not set it back.
        overflows (int): overflows since the last drop.
        steps_since_change (int): steps since the last drop or raise.
    """

    loss_scale: float
    scale_window: float
    clean_steps: int = 0
    overflows: int = 0
    steps_since_change: int = 0


@dataclass(frozen=True)
class MetaseqRule:
    """Dynamic loss scaling with a window that follows the scale, in float64.

    .. code-block:: text

        overflow:  the share of overflows since the last drop in the steps since the last change >= tolerated_share:
                   loss_scale /= scale_factor, at least the floor; scale_window = int(scale_window / scale_factor), at
                   least 1; but a scale below min_loss_scale is taken back
        clean:     after a multiple of scale_window steps since the last overflow:
                   loss_scale *= scale_factor, scale_window *= scale_factor

    Attributes:
        scale_factor (float): what a raise multiplies by, and a drop divides by.
        tolerated_share (float): the share of overflows from which on the scale drops.
        floor (float, optional): the smallest scale of a drop.
        min_loss_scale (float): a drop below it leaves the scale where it is.
    """

    scale_factor: float = 2.0
    tolerated_share: float = 0.0
    floor: float | None = None
    min_loss_scale: float = 2.0**-5

    def step(self, state: MetaseqState, overflow: bool, largest_gradient: float | None = None) -> MetaseqState:
        """Return the state after a step that overflowed or was clean; ``state`` itself is not changed."""
        loss_scale, window, clean_steps, overflows, steps_since_change = state
        steps_since_change += 1
        if overflow:
            overflows += 1
            if overflows / steps_since_change >= self.tolerated_share:
                dropped = max(loss_scale / self.scale_factor, self.floor or 0.0)
                loss_scale = loss_scale if dropped < self.min_loss_scale else dropped
                window = max(int(window / self.scale_factor), 1)
                overflows, steps_since_change = 0, 0
            return MetaseqState(loss_scale, window, 0, overflows, steps_since_change)
        clean_steps += 1
        if clean_steps % window == 0:
            loss_scale, window, steps_since_change = loss_scale * self.scale_factor, window * self.scale_factor, 0
        return MetaseqState(loss_scale, window, clean_steps, overflows, steps_since_change)
