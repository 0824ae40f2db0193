"""Gradient-guided loss scaling: the largest gradient shows how high the loss scale can be without overflow."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from mindformers_adaptive.rules.checks import require_number, to_float32
from mindformers_adaptive.rules.fields import STEP_LIMIT
from mindformers_adaptive.rules.formats import Format
from mindformers_adaptive.rules.functions import argmin, ceil, float32, floor, int32, maximum, minimum, where
from mindformers_adaptive.rules.rule import Rule

__all__ = ["NUM_BINS", "GuidedRule"]

# The number of bins of the overflow histogram. Each bin stands for a loss scale, a power of two.
NUM_BINS = 16

# An overflow lowers log2 of the loss scale by this much. Dropping the scale too far costs headroom for one step only,
# because the gradients of the next applied step show the ceiling, the largest scale without overflow.
DROP = 10

# The overflow histogram starts as if it had counted this many steps, with an overflow rate that halves from bin to bin.
PRIOR_STEPS = 2

# ``low`` is the recent minimum of log2 of the ceiling, the largest loss scale without overflow. If the gradients of a
# step show a lower ceiling, ``low`` falls to it at once. If they show a higher ceiling, ``low`` rises towards it by
# LOW_SHARE of the difference plus LOW_STEP bits.
LOW_SHARE = 2.0**-2
LOW_STEP = 0.1875

# Each step moves ``level`` by this share of the distance to log2 of the ceiling that the gradients show. So ``level``
# is a mean over about 28 steps.
LEVEL_SHARE = 9 / 256

# ``level``, the mean of log2 of the ceiling, is never more than this much below ``low``, the recent minimum of log2 of
# the ceiling. So the loss scale recovers quickly after a stretch of large gradients.
CLIMB = 0.5625

# The largest difference between ``base`` and ``level``, in bits. The bins of the overflow histogram are counted from
# ``base``, an exponent of the loss scale. ``level`` is the mean of log2 of the ceiling, the largest loss scale without
# overflow.
REACH = 1.25

# An overflow is explained if the gradients of the next applied step show a ceiling below the loss scale that
# overflowed. Explained overflows come in groups, so the loss scale should then stay low for a while. For this purpose,
# the rule sets ``low`` and ``level``, the recent minimum and the mean of log2 of the ceiling. Both become log2 of the
# ceiling of that applied step, minus this many bits.
CAREFUL = 6.0

# The ceiling that the gradients show can be too low: where the largest gradient is summed in float32, the real ceiling
# has been measured up to 2.8 bits higher. An applied step with a loss scale above the shown ceiling contradicts it. For
# every CONTRADICTIONS_PER_BIT such steps, the shown ceiling is raised by a bit, at most by three bits.
CONTRADICTIONS_PER_BIT = 2
MOST_CONTRADICTIONS = 6

# An overflow that the gradients do not explain usually is a single spike, which sets no limit on later loss scales. But
# it sets a limit if there was another overflow, or a raise of the loss scale, in the last patience / TROUBLE_SHARE
# steps. The patience of the guided rule is 1000 / exchange_rate steps.
TROUBLE_SHARE = 12

# After a failed trial of a higher limit, the scale window is WINDOW_FACTOR times the smallest window. Checkpoints of
# earlier versions may have a window of LARGEST_WINDOWS times the smallest window, after two failed trials.
WINDOW_FACTOR = 32
LARGEST_WINDOWS = 64

# The limit is the upper bound that unexplained overflows set on the loss scale. A limit with an anchor stays at the
# same loss scale. A limit without an anchor moves with ``base``, the exponent that follows the gradients. In a trial,
# the rule raises the limit by one bit, to see whether the loss scale overflows there. The field ``trial`` of the state
# has one of these values:
# MOVING: no anchor, no trial. TRIAL: no anchor, a trial.
# ANCHORED: an anchor, no trial. ANCHORED_TRIAL: an anchor, a trial.
MOVING, TRIAL, ANCHORED_TRIAL, ANCHORED = 0, 1, -1, -2

# Unexplained overflows set an upper bound on the loss scale (the limit), which moves with the gradients when these
# become much smaller or larger than usual. The gradients are much smaller than usual if ``low``, the recent minimum of
# log2 of the ceiling, pulls its mean ``level`` up by PULLED bits or more in one step. They are much larger than usual
# if log2 of the ceiling of one step is BELOW bits or more under ``level``.
PULLED, BELOW = 0.5, 5.0

# After an applied step, the exponent of the next loss scale is base + 1 - max(cheapest, limit). ``cheapest`` is the
# index of the bin with the lowest cost in the overflow histogram. ``limit`` follows from overflows that the gradients
# do not explain. Until the largest gradient of a step is known, ``cheapest`` is this very low number, so that only
# ``limit`` counts.
NOTHING_SHOWN = -1024

# The initial value of ``low``, the recent minimum of log2 of the ceiling. log2 of every real ceiling is below UNSEEN.
# So ``low`` == UNSEEN means that no step so far had a known largest gradient. The initial value of ``level``, the mean
# of log2 of the ceiling, is -UNSEEN.
UNSEEN = 1024.0

# The rule's running means must not become subnormal when they approach 0, because some devices flush subnormal numbers
# to 0. So this number is the lower limit of the overflow rates, and is added to log2 of each ceiling before ``low`` and
# ``level`` are computed from it.
NEARLY_ZERO = 2.0**-100

# The smallest and the largest exchange rate of the guided rule. The exchange rate says how many skipped steps in 1000 a
# bit of headroom is worth. The scale windows grow with the patience of the rule, which is 1000 / exchange rate, in
# steps. Between these limits, the patience is 1 to 1,000,000 steps, so all scale windows fit into int32.
_EXCHANGE_RATES = (0.001, 1000.0)
_LONGEST_PATIENCE = 1_000_000

# The overflow rate with which each bin of the overflow histogram starts.
_PRIOR_RATES = tuple(2.0 ** -(index + 1) for index in range(NUM_BINS))

# Exponents of loss scales in a checkpoint are invalid beyond this bound, which is far above log2 of any float32 number.
_LARGEST_EXPONENT = 512


class GuidedRule(Rule):
    r"""The guided rule: the largest gradient of each step shows how high the loss scale can be without overflow.

    The *ceiling* of a step is the largest scale at which nothing in it overflows. A step that was applied shows it:
    its largest gradient, unscaled, times the scale must not pass the largest number of the gradients' format, in FP16
    65504. Two things decide the next scale, and the lower one wins:

    - the *cheapest scale*, from what the gradients showed. An overflow histogram keeps, for 16 powers of two around
      their usual level, the share of recent steps that would have overflowed there. The cheapest scale is the one
      that costs least: skipped steps in 1000, and ``exchange_rate`` more for each bit of headroom given away.
    - the *limit*, from overflows that the gradients do not explain: the scale overflowed, and the next applied step
      shows that the same scale would have been fine. A single unexplained overflow may be a spike: it costs its step
      and changes nothing else. An unexplained overflow within a twelfth of the patience after another overflow or a
      raise sets a limit, as where activation gradients overflow first. A new limit has an *anchor*: it stays where it
      is, whatever the gradients show. Such an overflow outside of a trial removes the anchor, so that the limit moves
      with the gradients; the next such overflow sets the anchor again. The limit is tried one bit higher after a window
      of clean steps, a longer one after a trial that failed; where that holds, or the gradients become much larger or
      smaller, the anchor goes too.

    With :math:`e = \log_2 s` of the scale :math:`s`, the patience :math:`P = 1000 / exchange\_rate` steps, and
    float32 arithmetic throughout:

    .. code-block:: text

        overflow:  e -= 10; first = e before the first of a row
        applied:   shown = the largest integer with largest_gradient * 2^shown <= largest number
          shown += contradictions // 2
          e > shown:  contradictions += 1, at most 6                                   (the gradients show too little)
          explained = shown < first
          fall = overflows just before, not explained, and clean_steps < P / 12
          the first step that shows something: base = shown, limit = 0
          bound = the limit decided the scale: e == base + 1 - limit
          not after overflows, for each bin k, with the scale 2^(base + 1 - k):
            overflow_rate[k] += ([min(base, low) + 1 - k > shown] - overflow_rate[k]) * weight
            weight = max(1 / P, weight / (1 + weight))
          after overflows that are explained: low = level = shown - 6; limit -= 1
          else: low = min(shown, low + (shown - low) / 4 + 0.1875)
                mean = level + (shown - level) * 9 / 256
                level = max(mean, low - 0.5625)
          base: moved, by whole bits and no more than it takes, to level - 1.25 ... level + 1.25; histogram and limit
                keep their places and so move along, but not a limit with an anchor in the usual regime
          usual = low - 0.5625 < mean + 0.5 and shown > level - 5                 (of level before this step)
          fall:                                    limit = base + 1 - first + overflows in the row; contradictions = 0;
                                                   window = 16 P if trial, else P / 2; anchor = (anchor == trial);
                                                   trial = False
          else if bound and clean_steps + 1 >= window:  limit -= 1; window = P / 2     (one bit up)
                                                   no anchor if trial already; trial = True
          else if not usual:  trial = anchor = False
          cheapest = the smallest k with the least P * overflow_rate[k] + k
          e = base + 1 - max(cheapest, limit), within the bounds
          clean_steps = 0 after overflows or where e rises, else clean_steps + 1
        start:     overflow_rate[k] = 2^-(k + 1), weight = 1 / 3, window = P / 2, base + 1 = e

    A largest gradient that is 0, not finite, below the normal float32 numbers or None shows nothing: that step counts
    as clean and explains no overflow, and only the limit can change. Until a gradient shows something there is no
    cheapest scale.

    Args:
        exchange_rate (float): skipped steps in 1000 that a bit of headroom is worth, 0.001 to 1000; the larger, the
            nearer the scale is to the ceiling. Default: 1.0, what a fixed window of 1000 pays; see
            :func:`~mindformers_adaptive.lab.measures.cost`.
        scale_factor (float): 2, and nothing else: the scale moves by whole bits. It is here because the other cells
            take it. Default: 2.
        min_loss_scale (float): the floor of the scale, above 0. Default: 1.0, MindSpore's.
        max_loss_scale (float, optional): the upper bound of the scale. Default: None, the largest power of two
            in float32.
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
    # An earlier version of this rule kept other values in Parameters named guided_counters and guided_level. The names
    # of the fields below differ, so that no Parameter has one of those names.
    state: Mapping[str, Any] = {
        "counts": dict.fromkeys(
            ("scale_window", "base", "limit", "trial", "clean_steps", "contradictions", "first_exponent"), int32
        ),
        "levels": dict.fromkeys(("weight", "low", "level"), float32),
        "overflow_rate": float32[NUM_BINS],
    }
    needs_gradients = True
    recorded = ("scale_window",)
    usual_arguments = ("loss_scale_value", "exchange_rate")
    # The exchange rates that ``tune`` tries, in skipped steps per 1000 steps for a bit of headroom. The patience is
    # 1000 / exchange rate, so from 10,000 steps down to 20 steps.
    tried: ClassVar[dict[str, Any]] = {"exchange_rate": (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)}
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
            "Give 1 if a bit of headroom is worth one skipped step in 1000.",
        )
        remedy = "Leave it out, or use AdaptiveLossScaleUpdateCell for other factors."
        self.scale_factor = require_number("scale_factor", scale_factor, "2", lambda factor: factor == 2, remedy)
        super().__init__(min_loss_scale, max_loss_scale, gradient_format)
        self.patience = max(round(1000 / self.exchange_rate), 1)
        self.smallest_window = max(self.patience // 2, 1)
        self.largest_window = LARGEST_WINDOWS * self.smallest_window

    def first_state(self, loss_scale: float) -> dict[str, Any]:
        exponent = int(math.log2(loss_scale))
        return {
            "scale_window": self.smallest_window,
            "base": exponent - 1,
            "first_exponent": exponent,
            "weight": 1 / (PRIOR_STEPS + 1),
            "low": UNSEEN,
            "level": -UNSEEN,
            "overflow_rate": list(_PRIOR_RATES),
        }

    def next_state(self, state: Any, seen: Any) -> Any:
        exponent, clean = state.exponent, state.clean_steps + 1
        after_overflow = state.consecutive_overflows > 0

        # Find log2 of the ceiling, the largest loss scale at which the gradients of this step do not overflow. Find
        # also whether the gradients explain the overflows just before this step: whether the ceiling is below the loss
        # scale of the first of these overflows.
        shown = seen.max_safe_exponent + state.contradictions // CONTRADICTIONS_PER_BIT
        too_little = seen.gradient_known & (exponent > shown)
        contradictions = minimum(state.contradictions + int32(too_little), MOST_CONTRADICTIONS)
        explained = seen.gradient_known & (shown < state.first_exponent)
        fall = where(explained, False, after_overflow & (state.clean_steps < self.patience // TROUBLE_SHARE))
        unseen = state.low == UNSEEN
        fresh = seen.gradient_known & unseen
        base = where(fresh, shown, state.base)
        limit = where(fresh, 0, state.limit)
        limited = base + 1 - limit
        bound = exponent == limited

        # Compute the next overflow histogram, ``low`` and ``level``. The results are used below only if the largest
        # gradient is known.
        bits = float32(shown) + NEARLY_ZERO
        middle = float32(base)
        # Find the bins of the overflow histogram whose loss scale is above the ceiling of this step. Bin k has the
        # exponent base + 1 - k. If ``low``, the recent minimum of log2 of the ceiling, is below ``base``, use ``low``
        # instead of ``base``, so that a steadily falling ceiling does not raise the overflow rates of many bins.
        below_base = [float(index - 1) for index in range(NUM_BINS)]
        overflowed = float32(minimum(middle, state.low) - below_base > bits)
        rate, weight = state.overflow_rate, state.weight
        moved_rate = maximum(rate + (overflowed - rate) * weight, NEARLY_ZERO)
        moved_weight = maximum(weight / (1 + weight), 1 / self.patience)
        careful = after_overflow & explained
        low = minimum(bits, state.low + (bits - state.low) * LOW_SHARE + LOW_STEP)
        mean, lowest_level = state.level + (bits - state.level) * LEVEL_SHARE, low - CLIMB
        level = maximum(mean, lowest_level)
        low, level = where(careful, bits - CAREFUL, low), where(careful, bits - CAREFUL, level)
        # Leave each step just after an overflow out of the overflow histogram: the ceiling of such a step is often
        # low, so the step would make the overflow rates too high.
        moved = state.replace(
            overflow_rate=where(after_overflow, rate, moved_rate),
            weight=where(after_overflow, weight, moved_weight),
            low=low,
            level=level,
        )
        base = where(
            seen.gradient_known, int32(minimum(maximum(middle, ceil(level - REACH)), floor(level + REACH))), base
        )

        # Overflows that the gradients do not explain set an upper bound on the loss scale. Compute ``limit``, which
        # stands for this bound: the exponent of the bound is base + 1 - limit. A bound without an anchor moves with
        # ``base``, and ``base`` follows the gradients. A bound with an anchor stays at the same loss scale, so its
        # ``limit`` must change with ``base``.
        # - An unexplained overflow (``fall``) sets the bound below the loss scale that overflowed.
        # - A trial raises the bound by one bit, to see whether the loss scale overflows there.
        # - An explained overflow delays the next trial. So it raises the bound by one bit, too.
        is_tried, anchored = abs(state.trial) == 1, state.trial < 0
        unusual = seen.gradient_known & ((lowest_level >= mean + PULLED) | (bits - state.level <= -BELOW))
        unchanged = where(unusual, MOVING, state.trial)
        limit = where(unchanged < 0, base + 1 - limited, limit)
        window = state.scale_window
        higher = bound & (clean >= window)
        after_fall = where(is_tried, WINDOW_FACTOR * self.smallest_window, self.smallest_window)
        window = where(fall, after_fall, where(higher, self.smallest_window, window))
        first_below = base + 1 - state.first_exponent + state.consecutive_overflows
        limit = where(fall, first_below, limit - int32(higher | careful))
        contradictions = where(fall, 0, contradictions)

        # If an unexplained overflow occurs, and the rule was not trying a higher loss scale, the upper bound on the
        # loss scale behaved wrongly. So change its behaviour. If the bound moved with the gradients, it now stays at
        # one loss scale (the anchor). If the bound stayed there, it now moves with the gradients.
        tried = where(state.trial == ANCHORED, ANCHORED_TRIAL, TRIAL)
        trial = where(fall, where(anchored == is_tried, ANCHORED, MOVING), where(higher, tried, unchanged))

        # Find the next loss scale. An overflow lowers it by DROP bits. After another step, it is the scale of the
        # cheapest bin of the overflow histogram, but at most the bound that ``limit`` sets. It stays within
        # min_loss_scale and max_loss_scale.
        state = where(seen.gradient_known, moved, state)
        cheapest = argmin(state.overflow_rate * self.patience + [float(index) for index in range(NUM_BINS)])
        cheapest = where(unseen, where(seen.gradient_known, cheapest, NOTHING_SHOWN), cheapest)
        following = where(seen.overflow, exponent - DROP, base + 1 - maximum(cheapest, limit))
        following = minimum(maximum(following, self.min_exponent), self.max_exponent)
        starts_anew = after_overflow | (following > exponent)
        applied = state.replace(
            scale_window=window,
            base=base,
            limit=limit,
            trial=trial,
            clean_steps=where(starts_anew, 0, clean),
            contradictions=contradictions,
            # After a step without overflow, this is the exponent of the next step's loss scale. Overflows do not change
            # this field, so in a series of overflows it is the exponent at which the series began.
            first_exponent=following,
        )
        return where(seen.overflow, state, applied).replace(exponent=following)

    def find_state_problem(self, values: Mapping[str, Any]) -> str | None:
        sound = (
            # Until the largest gradient of a step is known, every bin of the overflow histogram keeps the overflow
            # rate with which it started.
            (values["low"] != UNSEEN or tuple(values["overflow_rate"]) == _PRIOR_RATES)
            and all(0.0 <= rate <= 1.0 for rate in values["overflow_rate"])
            and to_float32(1 / _LONGEST_PATIENCE) <= values["weight"] <= 1.0
            and all(abs(values[name]) <= UNSEEN for name in ("low", "level"))
            and 1 <= values["scale_window"] <= LARGEST_WINDOWS * _LONGEST_PATIENCE // 2
            and 0 <= values["clean_steps"] <= STEP_LIMIT
            and 0 <= values["contradictions"] <= MOST_CONTRADICTIONS
            and all(abs(values[name]) <= _LARGEST_EXPONENT for name in ("base", "first_exponent"))
            and -STEP_LIMIT <= values["limit"] <= _LARGEST_EXPONENT
            and values["trial"] in (MOVING, TRIAL, ANCHORED_TRIAL, ANCHORED)
        )
        return None if sound else f"The checkpoint has a state of {self.title} that the rule cannot reach"

    def fit_state(self, values: dict[str, Any], restored: Collection[str] | None) -> list[str]:
        # The limits of the scale window, and of a new step's weight in the overflow histogram, depend on
        # ``exchange_rate``. The checkpoint may come from a guided rule with another ``exchange_rate``. So move the
        # restored scale window and weight into the limits of the present rule.
        limits: dict[str, tuple[float, float]] = {
            "scale_window": (self.smallest_window, self.largest_window),
            "weight": (min(to_float32(1 / self.patience), to_float32(1 / (PRIOR_STEPS + 1))), 1.0),
        }
        fitting = {name: min(max(values[name], least), most) for name, (least, most) in limits.items()}
        changes = [f"{name} {values[name]:g} becomes {fit:g}" for name, fit in fitting.items() if fit != values[name]]
        values |= fitting
        if not changes:
            return []
        return [
            f"The checkpoint has a state of {self.title} with another 'exchange_rate' than {self.exchange_rate:g}: "
            f"{', '.join(changes)}, and the overflow histogram is kept."
        ]
