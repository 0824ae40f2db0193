"""The gradient-guided rule in plain Python with branches, as a reference for the rule's traced step."""

import math

import numpy as np

from mindformers_adaptive.rules.guided import GuidedRule
from mindformers_adaptive.rules.operations import safe_exponents

PLACES = np.arange(16, dtype=np.float32)
UNSEEN = np.float32(1024)
NEARLY_ZERO = np.float32(2.0**-100)


State = type(GuidedRule().start(1.0))


def max_safe_exponent(largest_gradient):
    """Return log2 of the largest loss scale that is safe for a gradient in FP16, or None for an unknown gradient."""
    known, exponent = safe_exponents(math.nan if largest_gradient is None else largest_gradient, 65504.0)
    return int(exponent) if known else None


# For each value of ``trial`` in the state: whether the rule tries a higher limit of the loss scale, and whether this
# limit has an anchor. An anchored limit does not move with the gradients.
TRIALS = {0: (False, False), 1: (True, False), -1: (True, True), -2: (False, True)}


class ReadableGuided:
    """The gradient-guided rule, with loss scales from ``2**lowest`` to ``2**highest``.

    The exchange rate says how many skipped steps in 1000 are worth a bit of headroom.
    """

    def __init__(self, exchange_rate=1.0, lowest=0, highest=127):
        self.patience = max(round(1000 / exchange_rate), 1)
        self.small = max(self.patience // 2, 1)
        self.lowest, self.highest = lowest, highest

    def start(self, exponent):
        rates = tuple(2.0 ** -(number + 1) for number in range(16))
        third = float(np.float32(1 / 3))
        counts = (self.small, exponent - 1, 0, 0, 0, 0, exponent)
        return State(2.0**exponent, *counts, third, 1024.0, -1024.0, rates, 0, 0)

    def step(self, state, overflow, largest_gradient=None):
        exponent = round(math.log2(state.loss_scale))
        if overflow:
            return state._replace(
                loss_scale=2.0 ** max(exponent - 10, self.lowest),
                skipped_steps=state.skipped_steps + 1,
                consecutive_overflows=state.consecutive_overflows + 1,
            )
        shown, contradictions = max_safe_exponent(largest_gradient), state.contradictions
        if shown is not None:
            shown += contradictions // 2
            if exponent > shown:
                contradictions = min(contradictions + 1, 6)
        after = state.consecutive_overflows > 0
        explained = shown is not None and shown < state.first_exponent
        fall = after and not explained and state.clean_steps < self.patience // 12
        base, limit, weight = state.base, state.limit, np.float32(state.weight)
        low, level, rates = np.float32(state.low), np.float32(state.level), np.array(state.overflow_rate, np.float32)
        unseen, is_new = low == UNSEEN, False
        if unseen and shown is not None:
            base, limit = shown, 0
        bound = exponent == base + 1 - limit
        trial, anchored = TRIALS[state.trial]
        if shown is not None:
            if not after:
                overflowed = (min(np.float32(base), low) - (PLACES - 1) > bits_of(shown)).astype(np.float32)
                rates = np.maximum(rates + (overflowed - rates) * weight, NEARLY_ZERO)
                weight = max(np.float32(1 / self.patience), weight / (np.float32(1) + weight))
            mean = level + (bits_of(shown) - level) * np.float32(9 / 256)
            climbed = min(bits_of(shown), low + (bits_of(shown) - low) * np.float32(1 / 4) + np.float32(3 / 16))
            lowest_level = climbed - np.float32(9 / 16)
            if after and explained:
                low = level = bits_of(shown) - np.float32(6)
            else:
                low, level = climbed, max(mean, lowest_level)
            moved = min(max(base, math.ceil(level - np.float32(1.25))), math.floor(level + np.float32(1.25)))
            is_new = lowest_level >= mean + np.float32(0.5) or bits_of(shown) - np.float32(state.level) <= -5
            if anchored and not is_new:
                limit += moved - base
            base = moved
        window = state.scale_window
        if fall:
            limit = base + 1 - state.first_exponent + state.consecutive_overflows
            contradictions = 0
            window = 32 * self.small if trial else self.small
            trial, anchored = False, anchored == trial
        elif bound and state.clean_steps + 1 >= window:
            limit, window = limit - 1, self.small
            trial, anchored = True, anchored and not trial
        else:
            limit -= after and explained
            if is_new:
                trial = anchored = False
        # Before the first known gradient, the rule cannot estimate how often a loss scale overflows. So only the limit,
        # which overflows lower and clean steps raise, decides the next loss scale.
        cheapest = -1024 if unseen and shown is None else int(np.argmin(rates * np.float32(self.patience) + PLACES))
        following = min(max(base + 1 - max(cheapest, limit), self.lowest), self.highest)
        clean = 0 if after or following > exponent else min(state.clean_steps + 1, 64 * self.small)
        mode = next(mode for mode, flags in TRIALS.items() if flags == (trial, anchored))
        counts = (window, base, limit, mode, clean, contradictions, following)
        seen = (float(weight), float(low), float(level), tuple(rates.tolist()))
        return State(2.0**following, *counts, *seen, state.skipped_steps, 0)


def bits_of(shown):
    """Return log2 of a safe loss scale as float32; 0 becomes 2^-100, so that running means cannot become subnormal."""
    return np.float32(shown) if shown else NEARLY_ZERO
