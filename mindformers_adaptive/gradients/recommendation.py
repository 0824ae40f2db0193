"""The loss scale to start from: the largest power of two that does not overflow, less a margin."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mindformers_adaptive.gradients.report import GradientRanges
from mindformers_adaptive.gradients.verdict import Verdict, judge, table_of_groups
from mindformers_adaptive.rules.checks import require_integer
from mindformers_adaptive.text.table import as_power_of_two

__all__ = ["DEFAULT_MARGIN", "LossScaleRecommendation", "check_margin", "recommend_loss_scale"]

# Measured on configs/tiny_llama_cpu_fp16.yaml, whose window of 20 steps raises the scale 16-fold within 100 steps: a
# start at the ceiling itself skips 1 or 2 of the first 100 steps, one power of two below it 0 or 1, two below it none.
DEFAULT_MARGIN = 2

# On top of it where a Parameter has no gradient yet. Measured on the task of scripts/worth_it.py whose last layer
# starts at 0: the other layers begin to train, and the ceiling falls. With the margin alone the start skips up to 2 of
# 100 steps.
UNKNOWN_MARGIN = 2


@dataclass(frozen=True)
class LossScaleRecommendation:
    """A recommended loss scale, and the reasons.

    Attributes:
        loss_scale_value (float, optional): the scale to start from; None if even the lowest scale overflows.
        ceiling (float, optional): the largest scale up to which no batch overflows; None likewise.
        margin (int): how many powers of two ``loss_scale_value`` was to stay below the ceiling; it does if there is
            room, and stays 2 more below it where the gradient of a Parameter is 0 at every scale.
        ceiling_is_highest (bool): whether the ceiling is the highest scale of the sweep; the true one may be higher.
        needs_scaling (bool, optional): whether too much of a Parameter's gradient is lost without loss scaling, see
            :class:`mindformers_adaptive.gradients.verdict.Verdict`; None if there is no ceiling, or no scale of 1 or
            less in the sweep that can be judged.
        loss_is_finite (bool): whether the loss itself is finite in every batch.
        ranges (GradientRanges): the sweep.
        verdicts (tuple[Verdict, ...]): on the lowest scale of the sweep and on ``loss_scale_value``, or the highest
            scale of the sweep below it; empty if there is no ceiling.
    """

    loss_scale_value: float | None
    ceiling: float | None
    margin: int
    ceiling_is_highest: bool
    needs_scaling: bool | None
    loss_is_finite: bool
    ranges: GradientRanges
    verdicts: tuple[Verdict, ...] = ()

    @property
    def yaml(self) -> str:
        """The section of a MindFormers YAML file to paste, or "" if there is no recommendation."""
        if self.loss_scale_value is None:
            return ""
        return (
            "runner_wrapper:\n"
            "  type: MFTrainOneStepCell\n"
            "  scale_sense:\n"
            "    type: AdaptiveLossScaleUpdateCell\n"
            f"    loss_scale_value: {self.loss_scale_value:.17g}     # {as_power_of_two(self.loss_scale_value)}\n"
            "    scale_factor: 2\n"
            "    scale_window: 20\n"
        )

    def __str__(self) -> str:
        if self.ceiling is None or self.loss_scale_value is None:
            return self._no_scale_helps()
        scales = self.ranges.loss_scales
        lines = [f"No overflow up to {as_power_of_two(self.ceiling)}, in {len(self.ranges.batches)} batches."]
        if self.ceiling_is_highest:
            lines = [f"No overflow at any loss scale up to {as_power_of_two(scales[-1])}, the highest that was tried."]
        lowest, start = self.verdicts[0], self.verdicts[-1]
        judged = [lowest.loss_scale] if start == lowest else [lowest.loss_scale, start.loss_scale]
        ends = {scale: self.ranges.overall(scale) for scale in judged}
        if all(it.underflowed is not None for it in ends.values()):
            shares = [f"{it.share(it.underflowed):.3%} at {as_power_of_two(scale)}" for scale, it in ends.items()]
            lines.append(f"Gradients that underflow: {', '.join(shares)}.")
        if lowest.groups:
            lines += ["", table_of_groups([lowest] if start == lowest else [lowest, start]), "", str(lowest)]
        if self.needs_scaling:
            lines.append("FP16 needs loss scaling here.")
        if self.needs_scaling is False:
            lines.append("FP16 needs no loss scaling here, 1 would do as well.")
        if start.is_harmful and start != lowest:
            lines.append(f"No scale holds them all: {start}")
        below = round(math.log2(self.ceiling / self.loss_scale_value))
        lines.append(f"Start from {as_power_of_two(self.loss_scale_value)}, which leaves a margin of 2^{below}:")
        return "\n".join([*lines, "", self.yaml])

    def _no_scale_helps(self) -> str:
        if not self.loss_is_finite:
            return (
                "The loss itself is inf or NaN: no loss scale can help. Check the data, the weights and the forward "
                "operations in FP16."
            )
        lowest = as_power_of_two(self.ranges.loss_scales[0])
        return (
            f"The gradients overflow even at loss scale {lowest}: no loss scale from {lowest} can help. Compute the "
            "part of the backward pass that is too large for FP16 in float32, or divide the loss."
        )

    def to_dict(self) -> dict[str, object]:
        """Return everything but the sweep, with the YAML as ``yaml``, as JSON can hold it."""
        plain = {name: value for name, value in vars(self).items() if name not in ("ranges", "verdicts")}
        return {**plain, "verdicts": [verdict.to_dict() for verdict in self.verdicts], "yaml": self.yaml}


def recommend_loss_scale(ranges: GradientRanges, margin: int = DEFAULT_MARGIN) -> LossScaleRecommendation:
    """Recommend a loss scale from a sweep.

    Args:
        ranges (GradientRanges): a sweep over powers of two, of several batches.
        margin (int): how many powers of two to stay below the ceiling, but never below the lowest scale of the sweep.
            Where the gradient of a Parameter is 0 at every scale, 2 more are left. Default: ``DEFAULT_MARGIN``.

    Raises:
        TypeError: if ``margin`` is not an integer.
        ValueError: if ``margin`` is below 0.
    """
    check_margin(margin)
    scales = ranges.loss_scales
    overflowing = [scale for scale in scales if ranges.overflowed_batches(scale)]
    safe = [scale for scale in scales if not overflowing or scale < overflowing[0]]
    loss_is_finite = all(math.isfinite(at_scale.loss) for batch in ranges.batches for at_scale in batch)
    if not safe:
        return LossScaleRecommendation(None, None, margin, False, None, loss_is_finite, ranges)
    ceiling, lowest = safe[-1], judge(ranges, scales[0])
    more = UNKNOWN_MARGIN if lowest.without_gradient else 0
    start = max(ceiling / 2.0 ** (margin + more), scales[0])
    return LossScaleRecommendation(
        loss_scale_value=start,
        ceiling=ceiling,
        margin=margin,
        ceiling_is_highest=not overflowing,
        needs_scaling=lowest.is_harmful if scales[0] <= 1 else None,
        loss_is_finite=loss_is_finite,
        ranges=ranges,
        verdicts=(lowest, judge(ranges, max(scale for scale in scales if scale <= start))),
    )


def check_margin(margin: object) -> None:
    """Raise unless margin is a non-negative integer."""
    require_integer("margin", margin, 0, f"The default is {DEFAULT_MARGIN}.", unit="number of powers of two")
