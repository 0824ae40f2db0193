"""Gradient-guided loss scaling: the loss scale follows what the largest gradient shows of its ceiling."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from mindformers_adaptive.rules.backend import (
    argmin,
    ceil,
    float32,
    floor,
    int32,
    logical_and,
    logical_not,
    logical_or,
    maximum,
    minimum,
    stack,
    unstack,
    where,
)
from mindformers_adaptive.rules.base import STEP_LIMIT, Field
from mindformers_adaptive.rules.checks import require_number, to_float32
from mindformers_adaptive.rules.formats import Format
from mindformers_adaptive.rules.text_rule import TextRule

__all__ = ["NUM_BINS", "GuidedRule"]

# How many powers of two the record of overflow rates looks at.
NUM_BINS = 16

# By how much an overflow lowers log2 of the scale. A drop too far costs one step of headroom, because the next applied
# step shows where the ceiling is.
DROP = 10

# The record starts as if so many steps had been seen, with an overflow rate that halves from bin to bin.
PRIOR_STEPS = 2

# ``low`` goes down at once to what a step shows, and up by this part of the way and so many bits more.
LOW_SHARE = 2.0**-2
LOW_STEP = 0.1875

# The part of the way that ``level`` goes to what a step shows: a mean over about 28 steps.
LEVEL_SHARE = 9 / 256

# ``level`` stays within so many bits below ``low``: the quick way back from a regime of large gradients.
CLIMB = 0.5625

# How far, in bits, ``base`` may be from ``level``.
REACH = 1.25

# How many bits below what it shows the step after an explained overflow puts ``low`` and ``level``: overflows come in
# groups.
CAREFUL = 6.0

# Gradients that showed too little twice are taken to show a bit too little, up to three: where the largest of them is
# summed in float32, ceilings of up to 2.8 bits above what it shows have been measured.
CONTRADICTIONS_PER_BIT = 2
MOST_CONTRADICTIONS = 6

# A trial of the limit that failed makes its window so many times larger, at most twice.
WINDOW_FACTOR = 8
LARGEST_WINDOWS = WINDOW_FACTOR**2

# In place of the cheapest bin while no gradient has shown anything: only the limit counts.
NO_CAP = -1024

# ``low`` before a gradient has shown anything, in bits; ``level`` is as far on the other side.
UNSEEN = 1024.0

# Rates are kept above this, and numbers that go towards 0 end at it: some devices flush subnormal numbers to 0.
NEARLY_ZERO = 2.0**-100

ZERO, ONE, FLOAT_ONE = 0, 1, 1.0

# A patience of 1 to 1,000,000 steps, which keeps all windows within int32.
_EXCHANGE_RATES = (0.001, 1000.0)
_LONGEST_PATIENCE = 1_000_000

# Far beyond log2 of any float32 number.
_LARGEST_EXPONENT = 512

_COUNTS = ("scale_window", "base", "limit", "trial", "clean_steps", "contradictions", "first_exponent")


def step(
    exponent,
    counts,
    levels,
    overflow_rate,
    overflow,
    consecutive_overflows,
    gradient_known,
    max_safe_exponent,
    bins,
    below_base,
    patience,
    memory,
    recent,
    smallest_window,
    largest_window,
    min_exponent,
    max_exponent,
):
    """Take a step; the names are those of :class:`GuidedRule`.

    In NumPy each array has one more dimension, with an element for each run.

    Args:
        exponent, consecutive_overflows, max_safe_exponent, min_exponent, max_exponent (Union[NDArray, Tensor]): as
            :class:`~mindformers_adaptive.rules.text_rule.TextRule` describes it, int32 of shape ().
        overflow, gradient_known (Union[NDArray, Tensor]): as there, bool of shape ().
        counts (Union[NDArray, Tensor]): a field of the rule, int32 of shape (7,).
        levels (Union[NDArray, Tensor]): a field of the rule, float32 of shape (3,).
        overflow_rate (Union[NDArray, Tensor]): a field of the rule, float32 of shape (16,).
        bins, below_base (Union[NDArray, Tensor]): a constant, float32 of shape (16,).
        patience, memory (Union[NDArray, Tensor]): a constant, float32 of shape ().
        recent, smallest_window, largest_window (Union[NDArray, Tensor]): a constant, int32 of shape ().

    Returns:
        dict, ``exponent``, ``counts``, ``levels`` and ``overflow_rate`` after the step.
    """
    window, base, limit, trial, clean, contradictions, first = unstack(counts)
    weight, low, level = unstack(levels)
    after_overflow = consecutive_overflows > ZERO

    # What the gradients show.
    too_high = exponent > max_safe_exponent + contradictions // CONTRADICTIONS_PER_BIT
    contradicted = int32(logical_and(gradient_known, too_high))
    contradictions = minimum(contradictions + contradicted, MOST_CONTRADICTIONS)
    shown = max_safe_exponent + contradictions // CONTRADICTIONS_PER_BIT
    explained = logical_and(gradient_known, shown < first)
    fall = logical_and(logical_and(after_overflow, clean < recent), logical_not(explained))
    no_fall = logical_not(fall)
    was_unseen = low == UNSEEN
    fresh = logical_and(gradient_known, was_unseen)
    not_fresh = logical_not(fresh)
    base = where(fresh, shown, base)
    limit = where(fresh, ZERO, limit)
    bound = exponent == base + ONE - limit

    # Record, low and level; all of them stay as they are where nothing is shown.
    bits = where(shown == ZERO, NEARLY_ZERO, float32(shown))
    counted = logical_and(gradient_known, logical_not(after_overflow))
    middle = float32(base)
    # Counted from ``low`` where that is below ``base``: a step that goes on with a fall is no surprise.
    overflowed_at = float32(minimum(middle, low) - below_base > bits)
    moved_rate = maximum(overflow_rate + (overflowed_at - overflow_rate) * weight, NEARLY_ZERO)
    overflow_rate = where(counted, moved_rate, overflow_rate)
    weight = where(counted, maximum(memory, weight / (FLOAT_ONE + weight)), weight)
    careful = logical_and(after_overflow, explained)
    moved_low = minimum(bits, low + (bits - low) * LOW_SHARE + LOW_STEP)
    moved_level = maximum(level + (bits - level) * LEVEL_SHARE, moved_low - CLIMB)
    low = where(careful, bits - CAREFUL, moved_low)
    level = where(careful, bits - CAREFUL, moved_level)
    moved_base = minimum(maximum(middle, ceil(level - REACH)), floor(level + REACH))
    base = where(gradient_known, int32(moved_base), base)
    levels = where(gradient_known, stack((weight, low, level)), levels)

    # The limit falls, is tried one bit higher, or eased.
    longer_clean = clean + ONE
    higher = logical_and(logical_and(bound, longer_clean >= window), no_fall)
    # Overflows that the gradients explain ease it: without them it would have been tried. At 0 and below it is none.
    eased = limit - int32(logical_or(higher, careful))
    limit = where(fall, base + ONE - first + consecutive_overflows, eased)
    contradictions = where(fall, maximum(contradictions - CONTRADICTIONS_PER_BIT, ZERO), contradictions)
    was_trial = trial > ZERO
    after_fall = where(was_trial, minimum(window * WINDOW_FACTOR, largest_window), smallest_window)
    after_rise = where(logical_and(higher, was_trial), smallest_window, window)
    window = where(fall, after_fall, after_rise)
    trial = int32(logical_and(logical_or(was_trial, higher), no_fall))

    # The cheapest bin, within the limit and the bounds.
    cheapest = argmin(overflow_rate * patience + bins)
    cap = where(logical_and(was_unseen, not_fresh), NO_CAP, cheapest)
    following = base + ONE - maximum(cap, limit)
    following = where(overflow, exponent - DROP, following)
    following = minimum(maximum(following, min_exponent), max_exponent)
    starts_anew = logical_or(after_overflow, following > exponent)
    clean = where(starts_anew, ZERO, minimum(longer_clean, largest_window))
    # The scale of the next step is that of the first overflow, if it overflows.
    applied = stack((window, base, limit, trial, clean, contradictions, following))
    return {
        "exponent": following,
        "counts": where(overflow, counts, applied),
        "levels": levels,
        "overflow_rate": overflow_rate,
    }


class GuidedRule(TextRule):
    r"""Gradient-guided loss scaling: the scale follows what the largest gradient shows of its ceiling.

    The *ceiling* of a step is the largest scale at which nothing in it overflows. A step that was applied shows it:
    its largest gradient, unscaled, times the scale must not pass the largest number of the gradients' format, in FP16
    65504. Two things decide the next scale, and the lower one wins:

    - the *cap*, from what the gradients showed. A record keeps, for 16 powers of two around their usual level, the
      share of recent steps that would have overflowed there. The cap is the scale that costs least: skipped steps in
      1000, and ``exchange_rate`` more for each bit of headroom given away.
    - the *limit*, from overflows that the gradients do not explain: the scale overflowed, and the next applied step
      shows that the same scale would have been fine. Once may be a spike: it costs its step, and nothing else changes.
      Within a tenth of the patience after other trouble or a rise it is a limit, as where activation gradients overflow
      first. The limit is tried again after a window of clean steps, which grows where trials fail: there the rule is
      adaptive scaling.

    With :math:`e = \log_2 s` of the scale :math:`s`, the patience :math:`P = 1000 / exchange\_rate` steps, and
    float32 arithmetic throughout:

    .. code-block:: text

        overflow:  e -= 10; first = e before the first of a row
        applied:   shown = the largest integer with largest_gradient * 2^shown <= largest number
          e > shown + contradictions // 2:  contradictions += 1, at most 6             (the gradients show too little)
          shown += contradictions // 2
          explained = shown < first
          fall = overflows just before, not explained, and clean_steps < P / 10
          the first step that shows something: base = shown, limit = 0
          bound = the limit decided the scale: e == base + 1 - limit
          not after overflows, for each bin k, with the scale 2^(base + 1 - k):
            overflow_rate[k] += ([min(base, low) + 1 - k > shown] - overflow_rate[k]) * weight
            weight = max(1 / P, weight / (1 + weight))
          after overflows that are explained: low = level = shown - 6; limit -= 1
          else: low = min(shown, low + (shown - low) / 4 + 0.1875)
                level = max(level + (shown - level) * 9 / 256, low - 0.5625)
          base: moved, by whole bits and no more than it takes, to level - 1.25 ... level + 1.25; record and limit keep
                their places and so move along
          fall:                                    limit = base + 1 - first + overflows in the row; contradictions -= 2,
                                                   at least 0; window = 8 * window, at most 32 P, if trial, else P / 2;
                                                   trial = False
          else if bound and clean_steps + 1 >= window:  limit -= 1; trial = True       (one bit up)
                                                   window = P / 2 if it was a trial already
          cap = the smallest k with the least P * overflow_rate[k] + k
          e = base + 1 - max(cap, limit), within the bounds
          clean_steps = 0 after overflows or where e rises, else clean_steps + 1
        start:     overflow_rate[k] = 2^-(k + 1), weight = 1 / 3, window = P / 2, base + 1 = e

    A largest gradient that is 0, not finite, below the normal float32 numbers or None shows nothing: that step counts
    as clean and explains no overflow, and only the limit can change. Until a gradient shows something there is no cap.

    Args:
        exchange_rate (float): skipped steps in 1000 that a bit of headroom is worth, 0.001 to 1000; the larger, the
            nearer the scale is to the ceiling. Default: 1.0, what a fixed window of 1000 pays; see
            :func:`~mindformers_adaptive.lab.replay.measures.cost`.
        scale_factor (float): 2, and nothing else: the scale moves by whole bits. It is here because the other cells
            take it. Default: 2.
        min_loss_scale (float): the floor of the scale, above 0. Default: 1.0, MindSpore's.
        max_loss_scale (float, optional): the cap of the scale. Default: None, the largest power of two in float32.
        gradient_format (Union[str, Mapping, Format]): the format of the gradients: "float16", "bfloat16",
            "float8_e5m2", "float8_e4m3fn", "hifloat8", or the numbers of another, see
            :class:`~mindformers_adaptive.rules.formats.Format`. Default: "float16".

    Raises:
        TypeError: if an argument is not a number; ``True`` and ``False`` are not numbers here.
        ValueError: if an argument is out of its range, or there is no power of two between the bounds.

    Examples:
        >>> rule = GuidedRule()
        >>> state = rule.start(loss_scale_value=2.0**32)
        >>> for _ in range(2):
        ...     state = rule.step(state, overflow=True)
        >>> state.loss_scale == 2.0**12
        True
        >>> state = rule.step(state, overflow=False, largest_gradient=0.25)
        >>> state.base, state.limit, state.skipped_steps
        (12, -1, 2)
    """

    name = "guided"
    title = "gradient-guided scaling"
    cell = "GradientGuidedLossScaleUpdateCell"
    # The first form of this rule had other counters and levels, in Parameters called guided_counters and guided_level.
    fields: tuple[Field, ...] = (
        Field("counts", "int32", (7,), _COUNTS),
        Field("levels", "float32", (3,), ("weight", "low", "level")),
        Field("overflow_rate", "float32", (NUM_BINS,)),
    )
    signals = ("largest_gradient",)
    recorded = ("scale_window",)
    usual_arguments = ("loss_scale_value", "exchange_rate")
    # From 0.1 to 50 the patience goes from 10,000 steps down to 20.
    grid: ClassVar[Mapping[str, Sequence[Any]]] = {"exchange_rate": (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)}
    text = step
    keeps_bounds = True

    def __init__(
        self,
        exchange_rate: float = 1.0,
        *,
        scale_factor: float = 2,
        min_loss_scale: float = 1.0,
        max_loss_scale: float | None = None,
        gradient_format: str | Mapping[str, Any] | Format = "float16",
    ) -> None:
        lowest, highest = _EXCHANGE_RATES
        self.exchange_rate = require_number(
            "exchange_rate",
            exchange_rate,
            f"a number from {lowest:g} to {highest:g}",
            lambda rate: to_float32(lowest) <= rate <= highest,
            "1 gives a skipped step in 1000 for a bit of headroom.",
        )
        remedy = "Leave it out, or take AdaptiveLossScaleUpdateCell for other factors."
        self.scale_factor = require_number("scale_factor", scale_factor, "2", lambda factor: factor == 2, remedy)
        super().__init__(min_loss_scale, max_loss_scale, gradient_format)
        self.patience = max(round(1000 / self.exchange_rate), 1)
        self.smallest_window = max(self.patience // 2, 1)
        self.largest_window = LARGEST_WINDOWS * self.smallest_window
        self.constants = {
            "bins": np.arange(NUM_BINS, dtype=np.float32),
            # How many bits the scale of each bin is below that of ``base``.
            "below_base": np.arange(NUM_BINS, dtype=np.float32) - 1,
            "patience": float(self.patience),
            "memory": 1.0 / self.patience,
            "recent": self.patience // 10,
            "smallest_window": self.smallest_window,
            "largest_window": self.largest_window,
        }

    def start_values(self, loss_scale: float) -> dict[str, Any]:
        exponent = int(np.log2(loss_scale))
        return {
            "scale_window": self.smallest_window,
            "base": exponent - 1,
            "first_exponent": exponent,
            "weight": to_float32(1 / (PRIOR_STEPS + 1)),
            "low": UNSEEN,
            "level": -UNSEEN,
            "overflow_rate": tuple(2.0 ** -(place + 1) for place in range(NUM_BINS)),
        }

    def find_state_problem(self, values: Mapping[str, Any]) -> str | None:
        sound = (
            super().find_state_problem(values) is None
            and len(values["overflow_rate"]) == NUM_BINS
            and all(0.0 <= rate <= 1.0 for rate in values["overflow_rate"])
            and to_float32(1 / _LONGEST_PATIENCE) <= values["weight"] <= 1.0
            and all(abs(values[name]) <= UNSEEN for name in ("low", "level"))
            and 1 <= values["scale_window"] <= LARGEST_WINDOWS * _LONGEST_PATIENCE // 2
            and 0 <= values["clean_steps"] <= LARGEST_WINDOWS * _LONGEST_PATIENCE // 2
            and 0 <= values["contradictions"] <= MOST_CONTRADICTIONS
            and all(abs(values[name]) <= _LARGEST_EXPONENT for name in ("base", "first_exponent"))
            and -STEP_LIMIT <= values["limit"] <= _LARGEST_EXPONENT
            and values["trial"] in (0, 1)
        )
        return None if sound else f"The checkpoint has a state of {self.title} that this cell cannot have"

    def _repair_own(self, values: dict[str, Any], loss_scale: float, restored: Collection[str] | None) -> list[str]:
        return super()._repair_own(values, loss_scale, restored) or self._fit_exchange_rate(values)

    def _fit_exchange_rate(self, values: dict[str, Any]) -> list[str]:
        """Bring what another exchange rate has left within the limits of this one."""
        limits: dict[str, tuple[float, float]] = {
            "scale_window": (self.smallest_window, self.largest_window),
            "clean_steps": (0, self.largest_window),
            "weight": (min(to_float32(1 / self.patience), to_float32(1 / (PRIOR_STEPS + 1))), 1.0),
        }
        fitting = {name: min(max(values[name], least), most) for name, (least, most) in limits.items()}
        changes = [f"{name} {values[name]:g} becomes {fit:g}" for name, fit in fitting.items() if fit != values[name]]
        values |= fitting
        if not changes:
            return []
        return [
            f"The checkpoint has a state of {self.title} with another 'exchange_rate' than {self.exchange_rate:g}: "
            f"{', '.join(changes)}, and the record of overflow rates is kept."
        ]
