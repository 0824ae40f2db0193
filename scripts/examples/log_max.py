"""LogMax, after NVIDIA's OpenSeq2Seq: the loss scale follows the mean and the spread of what the gradients allow."""

import math

from mindformers_adaptive.rules import Field, TextRule
from mindformers_adaptive.rules.backend import (
    absolute,
    float32,
    floor,
    int32,
    logical_or,
    maximum,
    minimum,
    stack,
    unstack,
    where,
)

ONE = 1


def step(exponent, mean, spreads, overflow, gradient_known, max_safe_exponent, share, margin):
    """Take a step: a scale of 2^max_safe_exponent is the largest that the gradients of an applied step allow."""
    quick, slow = unstack(spreads)
    lower = exponent - ONE
    allowed = float32(where(overflow, lower, max_safe_exponent))
    distance = absolute(allowed - mean)
    moved = stack((quick + (distance - quick) * share, slow + (distance - slow) * (share * share)))
    observed = logical_or(overflow, gradient_known)
    mean = where(observed, mean + (allowed - mean) * share, mean)
    wanted = int32(floor(mean - margin * maximum(quick, slow)))
    wanted = where(overflow, minimum(wanted, lower), where(gradient_known, wanted, exponent))
    return {"exponent": wanted, "mean": mean, "spreads": where(observed, moved, spreads)}


class LogMaxRule(TextRule):
    """LogMax with mean distances in place of a variance; an overflow counts as one bit less than its scale."""

    name = "log_max"
    title = "LogMax loss scaling"
    fields = (Field("mean", "float32"), Field("spreads", "float32", (2,), parts=("quick_spread", "slow_spread")))
    signals = ("largest_gradient",)
    grid = {"margin": (2.0, 3.0, 4.0)}
    text = step

    def __init__(self, margin=3.0, share=0.1, min_loss_scale=1.0, max_loss_scale=None):
        super().__init__(min_loss_scale, max_loss_scale)
        self.margin, self.share = margin, share
        self.constants = {"margin": float(margin), "share": float(share)}

    def start_values(self, loss_scale):
        """Return the state before the first step."""
        return {"mean": math.log2(loss_scale), "quick_spread": 1.0, "slow_spread": 1.0}
