"""The gradient-guided rule in plain Python with branches, as a reference for the rule's traced step."""

import math

from mindformers_adaptive.rules.guided import GuidedRule
from mindformers_adaptive.rules.operations import safe_exponents

State = type(GuidedRule().start(1.0))


class ReadableGuided:
    """The gradient-guided rule, with loss scales from ``2**lowest`` to ``2**highest``."""

    def __init__(self, margin=6, lowest=0, highest=127):
        self.margin, self.lowest, self.highest = margin, lowest, highest

    def start(self, exponent):
        return State(2.0**exponent, 16 * 1024, 1024 - exponent, exponent, 0, 0, 0, 0)

    def step(self, state, overflow, largest_gradient=math.nan):
        if overflow:
            return state._replace(
                loss_scale=2.0 ** max(math.log2(state.loss_scale) - 10, self.lowest),
                skipped_steps=state.skipped_steps + 1,
                consecutive_overflows=state.consecutive_overflows + 1,
            )
        low, margin, first, clean, wait = state[1:6]
        known, shown = safe_exponents(largest_gradient, 65504.0)
        shown = 16 * int(shown) if known else low
        is_first = known and low == 16 * 1024
        low = min(shown, low + (shown - low) // 10)
        margin = min(low // 16 - first, self.margin + 10) if is_first else margin
        if state.consecutive_overflows and shown >= 16 * first:
            if clean <= 1 or clean >= wait:
                margin = max(margin, low // 16 - first + (1 if wait < 0 else 4))
                wait = 8 * clean
            clean = 0
        clean += 1
        if clean == 1000:
            margin, clean, wait = margin - 1, 0, -1
        margin = max(margin, self.margin)
        first = min(max(low // 16 - margin, self.lowest), self.highest)
        return State(2.0**first, low, margin, first, clean, wait, state.skipped_steps, 0)
