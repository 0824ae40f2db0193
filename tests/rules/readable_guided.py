"""The gradient-guided rule in plain Python with branches, as a reference for the rule's step."""

import math

import numpy as np

from mindformers_adaptive.rules.guided import GuidedRule
from mindformers_adaptive.rules.operations import safe_exponents

State = type(GuidedRule().start(1.0))


def shown_by(gradient, largest=65504.0):
    """Return whether a gradient shows a ceiling in a format, by its largest number, and log2 of this ceiling."""
    with np.errstate(over="ignore", invalid="ignore"):
        return safe_exponents(np.float64(gradient).astype(np.float32), *np.frexp(largest))


class ReadableGuided:
    """The gradient-guided rule, with loss scales from ``2**lowest`` to ``2**highest``."""

    def __init__(self, margin=2, lowest=0, highest=127):
        self.margin, self.lowest, self.highest = margin, lowest, highest

    def start(self, exponent):
        return State(2.0**exponent, 16 * 1024, 1024 - exponent, exponent, 0, -1, 0, 0)

    def step(self, state, overflow, largest_gradient=math.nan):
        if overflow:
            return state._replace(
                loss_scale=2.0 ** max(math.log2(state.loss_scale) - 10, self.lowest),
                skipped_steps=state.skipped_steps + 1,
                consecutive_overflows=state.consecutive_overflows + 1,
            )
        before, margin, first, clean, wait = state[1:6]
        known, shown = shown_by(largest_gradient)
        shown = 16 * int(shown) if known else before
        has_seen = before < 16 * 1024
        low = min(shown, before + (shown - before) // 10)
        above = low // 16 - first
        if known and not has_seen:
            margin = min(above, self.margin + 10)
        if state.consecutive_overflows:
            often = clean <= 400
            if not known or shown >= 16 * first:
                is_far = above >= 24 or first <= self.lowest
                if has_seen and often and clean > 1 and wait <= 0 and is_far:
                    margin, wait = max(self.margin, 8), 8 * clean
                elif clean <= 1 or clean >= wait:
                    margin, wait = max(margin, above + 4 if often else min(above + 4, 15)), 0
            elif has_seen and often and clean > 4 and wait >= 0:
                margin = max(margin, min(before // 16 - shown // 16, 15))
            wait = max(wait, 0) if has_seen else wait
            clean = 0
        clean += 1
        margin -= clean % 1000 == 0
        margin = max(margin, self.margin) if known else margin
        first = min(max(low // 16 - margin, self.lowest), self.highest)
        return State(2.0**first, low, margin, first, clean, wait, state.skipped_steps, 0)
