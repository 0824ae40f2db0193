"""The loss scale to start from: the largest power of two that does not overflow, less a margin."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mindformers_adaptive.gradients.report import GradientRanges
from mindformers_adaptive.rule.checks import require_integer
from mindformers_adaptive.text.power_of_two import as_power_of_two

__all__ = ["DEFAULT_MARGIN", "LossScaleRecommendation", "check_margin", "recommend_loss_scale"]

# Measured on configs/tiny_llama_cpu_fp16.yaml, whose window of 20 steps raises the scale 16-fold within 100 steps: a
# start at the ceiling itself skips 1 or 2 of the first 100 steps, one power of two below it 0 or 1, two below it none.
DEFAULT_MARGIN = 2


@dataclass(frozen=True)
class LossScaleRecommendation:
    """What the finder recommends, and why.

    Attributes:
        loss_scale_value (float, optional): the scale to start from; None where even the lowest scale overflows.
        ceiling (float, optional): the largest scale at which no batch overflows, nor at any lower one; None likewise.
        margin (int): by how many powers of two ``loss_scale_value`` lies below the ceiling, where there is room.
        ceiling_is_highest (bool): whether the sweep went no higher, so that the true ceiling may lie above.
        needs_scaling (bool, optional): whether any gradient underflows at any scale below the ceiling; None where
            there is no ceiling, or no underflow and no scale of 1 or less in the sweep.
        loss_is_finite (bool): whether the loss itself is finite in every batch.
        ranges (GradientRanges): the sweep.
    """

    loss_scale_value: float | None
    ceiling: float | None
    margin: int
    ceiling_is_highest: bool
    needs_scaling: bool | None
    loss_is_finite: bool
    ranges: GradientRanges

    @property
    def yaml(self) -> str:
        """The section of a MindFormers YAML file to paste, or "" where there is no recommendation."""
        if self.loss_scale_value is None:
            return ""
        value = f"{self.loss_scale_value:.0f}" if self.loss_scale_value >= 1 else f"{self.loss_scale_value!r}"
        return (
            "runner_wrapper:\n"
            "  type: MFTrainOneStepCell\n"
            "  scale_sense:\n"
            "    type: AdaptiveLossScaleUpdateCell\n"
            f"    loss_scale_value: {value}     # {as_power_of_two(self.loss_scale_value)}\n"
            "    scale_factor: 2\n"
            "    scale_window: 20\n"
        )

    def __str__(self) -> str:
        lowest, highest = (as_power_of_two(end) for end in (self.ranges.loss_scales[0], self.ranges.loss_scales[-1]))
        if self.ceiling is None or self.loss_scale_value is None:
            if not self.loss_is_finite:
                return (
                    "The loss itself is inf or NaN: no loss scale can help. Look at the data, the weights and what is "
                    "computed in FP16 on the way to the loss."
                )
            return (
                f"The gradients overflow even at loss scale {lowest}: no loss scale from {lowest} can help. Look for "
                "what is too large for FP16 in the backward pass and compute it in float32, or divide the loss."
            )
        lines = [f"No overflow up to {as_power_of_two(self.ceiling)}, in {len(self.ranges.batches)} batches."]
        if self.ceiling_is_highest:
            lines = [f"No overflow at any loss scale up to {highest}, the highest that was tried."]
        if self.needs_scaling:
            tried = [scale for scale in self.ranges.loss_scales if scale <= self.loss_scale_value]
            ends = {scale: self.ranges.overall(scale) for scale in (tried[0], tried[-1])}
            shares = [f"{it.share(it.underflowed):.3%} at {as_power_of_two(scale)}" for scale, it in ends.items()]
            lines.append(f"Gradients that underflow: {', '.join(shares)}.")
        if self.needs_scaling is False:
            lines.append("Nothing underflows at any scale: FP16 needs no loss scaling here, 1 would do as well.")
        below = round(math.log2(self.ceiling / self.loss_scale_value))
        lines.append(f"Start from {as_power_of_two(self.loss_scale_value)}, which leaves a margin of 2^{below}:")
        return "\n".join([*lines, "", self.yaml])

    def to_dict(self) -> dict[str, object]:
        """Return everything but the sweep as JSON can hold it, with the YAML as ``yaml``."""
        return {
            "loss_scale_value": self.loss_scale_value,
            "ceiling": self.ceiling,
            "margin": self.margin,
            "ceiling_is_highest": self.ceiling_is_highest,
            "needs_scaling": self.needs_scaling,
            "loss_is_finite": self.loss_is_finite,
            "yaml": self.yaml,
        }


def recommend_loss_scale(ranges: GradientRanges, margin: int = DEFAULT_MARGIN) -> LossScaleRecommendation:
    """Recommend a loss scale from a sweep.

    Args:
        ranges (GradientRanges): a sweep over powers of two, of several batches.
        margin (int): how many powers of two to stay below the largest scale that does not overflow, but not below
            the lowest of the sweep. Default: see ``DEFAULT_MARGIN``.

    Raises:
        TypeError: if ``margin`` is not an integer.
        ValueError: if ``margin`` is below 0.
    """
    check_margin(margin)
    scales = ranges.loss_scales
    overflowing = [scale for scale in scales if ranges.overflowed_batches(scale)]
    safe = [scale for scale in scales if not overflowing or scale < overflowing[0]]
    loss_is_finite = all(math.isfinite(found.loss) for batch in ranges.batches for found in batch)
    if not safe:
        return LossScaleRecommendation(None, None, margin, False, None, loss_is_finite, ranges)
    ceiling = safe[-1]
    return LossScaleRecommendation(
        loss_scale_value=max(ceiling / 2.0**margin, scales[0]),
        ceiling=ceiling,
        margin=margin,
        ceiling_is_highest=not overflowing,
        needs_scaling=_needs_scaling(ranges, safe),
        loss_is_finite=loss_is_finite,
        ranges=ranges,
    )


def _needs_scaling(ranges: GradientRanges, safe: list[float]) -> bool | None:
    underflows = [ranges.overall(scale).underflowed for scale in safe]
    if any(underflows):
        return True
    return False if safe[0] <= 1 and None not in underflows else None


def check_margin(margin: object) -> None:
    """Refuse a margin that is none.

    Args:
        margin (int): what users gave.

    Raises:
        TypeError: if it is not an integer.
        ValueError: if it is below 0.
    """
    require_integer("margin", margin, 0, f"The default is {DEFAULT_MARGIN}.", unit="number of powers of two")
