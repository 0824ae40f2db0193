"""LogMax, after NVIDIA's OpenSeq2Seq: set the loss scale from mean and spread of log2 of the largest safe scales."""

import math

from mindformers_adaptive.rules import Rule, float32, floor, int32, maximum, minimum, where


class LogMaxRule(Rule):
    """LogMax with mean deviations in place of variances. After an overflow, it assumes that half the scale is safe."""

    name = "log_max"
    title = "LogMax loss scaling"
    state = {"mean": float32, "spreads": {"quick_spread": float32, "slow_spread": float32}}
    needs_gradients = True
    tried = {"margin": (2.0, 3.0, 4.0)}

    def __init__(self, margin=3.0, share=0.1, **bounds):
        super().__init__(**bounds)
        self.margin, self.share = float(margin), float(share)

    def first_state(self, loss_scale):
        """Return the state before the first step."""
        return {"mean": math.log2(loss_scale), "quick_spread": 1.0, "slow_spread": 1.0}

    def next_state(self, state, seen):
        """Return the state after a step. ``max_safe_exponent`` is log2 of the largest loss scale without overflow."""
        lower = state.exponent - 1
        allowed = float32(where(seen.overflow, lower, seen.max_safe_exponent))
        distance = abs(allowed - state.mean)
        quick = state.quick_spread + (distance - state.quick_spread) * self.share
        slow = state.slow_spread + (distance - state.slow_spread) * self.share**2
        mean = state.mean + (allowed - state.mean) * self.share
        wanted = int32(floor(mean - self.margin * maximum(quick, slow)))
        wanted = where(seen.overflow, minimum(wanted, lower), wanted)
        moved = state.replace(exponent=wanted, mean=mean, quick_spread=quick, slow_spread=slow)
        return where(seen.overflow | seen.gradient_known, moved, state)
