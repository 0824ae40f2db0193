"""LogMax, after NVIDIA's OpenSeq2Seq: set the loss scale from mean and spread of log2 of the largest safe scales."""

import math

from mindformers_adaptive.rules import Rule, float32


class LogMaxRule(Rule):
    """LogMax with mean deviations in place of variances. After an overflow, it assumes that half the scale is safe."""

    name = "log_max"
    title = "LogMax loss scaling"
    state = {"mean": float32, "spreads": {"quick_spread": float32, "slow_spread": float32}}
    needs_gradients = True

    def __init__(self, margin=3.0, share=0.1, **bounds):
        super().__init__(**bounds)
        self.margin, self.share = float(margin), float(share)

    def first_state(self, loss_scale):
        """Return the state before the first step."""
        return {"mean": math.log2(loss_scale), "quick_spread": 1.0, "slow_spread": 1.0}

    def make_step(self, xp):
        """Return the step. ``max_safe_exponent`` is log2 of the largest loss scale without overflow."""
        one = xp.ints(1)
        margin, share, slow_share = xp.floats(self.margin, self.share, self.share**2)

        def step(exponent, overflow, gradient_known, max_safe_exponent, mean, quick_spread, slow_spread):
            lower = exponent - one
            allowed = xp.float32(xp.where(overflow, lower, max_safe_exponent))
            distance = abs(allowed - mean)
            quick = quick_spread + (distance - quick_spread) * share
            slow = slow_spread + (distance - slow_spread) * slow_share
            next_mean = mean + (allowed - mean) * share
            wanted = xp.int32(xp.floor(next_mean - margin * xp.maximum(quick, slow)))
            wanted = xp.where(overflow, xp.minimum(wanted, lower), wanted)
            moves = xp.logical_or(overflow, gradient_known)
            return {
                "exponent": xp.where(moves, wanted, exponent),
                "mean": xp.where(moves, next_mean, mean),
                "quick_spread": xp.where(moves, quick, quick_spread),
                "slow_spread": xp.where(moves, slow, slow_spread),
            }

        return step
