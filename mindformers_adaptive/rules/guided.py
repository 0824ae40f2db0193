"""Gradient-guided loss scaling: the loss scale stays a margin below the lowest ceiling that recent gradients show."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from mindformers_adaptive.rules.checks import require_integer, require_number
from mindformers_adaptive.rules.fields import STEP_LIMIT, Field, int32
from mindformers_adaptive.rules.formats import Format
from mindformers_adaptive.rules.rule import Rule

# An overflow lowers log2 of the loss scale by DROP bits, until the next applied step. That may be too much, but it is
# harmless: the applied step shows how high the loss scale can be. At the start, the margin is at most DROP bits larger
# than the argument ``margin``.
DROP = 10

# ``low`` rises by 1 / CLIMB of the way to the ceiling that a step shows. So it is a minimum over about 10 steps.
CLIMB = 10

# An overflow that the gradients do not explain lowers the loss scale to BELOW bits below the one that overflowed.
BELOW = 4

# Up to MOST bits, a margin costs nothing in most trainings. A larger margin is worth its bits only where overflows come
# OFTEN: at most so many clean steps apart.
MOST, OFTEN = 15, 400

# Overflows at most SAME_FALL clean steps apart belong to the same fall of the ceiling.
SAME_FALL = 4

# A larger margin is useless where overflows do not depend on the loss scale, as with an inf in the data: if they come
# often TOP bits below the ceiling. Then the margin goes back to BACK bits, because some overflows may depend on the
# scale. It grows again only if overflows become rare: HELPS times as many steps must have passed.
TOP, BACK, HELPS = 24, 8, 8

# After PATIENCE steps without an overflow, the margin shrinks by one bit. Dynamic loss scaling with the usual window
# raises the loss scale by one bit after as many steps.
PATIENCE = 1000

# ``low`` counts in parts of a bit, so that the rule needs only integers.
PARTS = 16

# The initial value of ``low``. It is above each ceiling that gradients can show, so ``low`` falls to the first ceiling.
UNSEEN = 1024 * PARTS

# The default of the argument ``margin``, in bits: where the ceiling moves, gradients are lost with every bit more, as
# scripts/studies/worth_it.py shows.
MARGIN = 2

# The largest margin that a user may choose, in bits.
_LARGEST_MARGIN = 100

# Exponents of loss scales in a checkpoint are invalid beyond this bound, which is far above log2 of any float32 number.
_LARGEST_EXPONENT = 512


def refuses_exchange_rate(constructor: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor that names ``margin`` in its error if it gets the former argument ``exchange_rate``."""

    @functools.wraps(constructor)
    def checked(*arguments: Any, **named: Any) -> None:
        if "exchange_rate" in named:
            raise TypeError(
                "'exchange_rate' is no longer an argument of gradient-guided scaling. Use 'margin' instead: how many "
                "bits the loss scale stays below the ceiling."
            )
        constructor(*arguments, **named)

    return checked


class GuidedRule(Rule):
    r"""The guided rule: the loss scale stays ``margin`` bits below the lowest ceiling that recent gradients show.

    The *ceiling* of a step is the largest loss scale at which nothing in it overflows. A step that was applied shows
    its ceiling: its largest gradient, unscaled, times the loss scale must not exceed the largest number of the
    gradients' format, in FP16 65504. ``low`` falls at once to the ceiling that a step shows, and rises slowly.

    The gradients of the weights can show a ceiling that is too high, as where activation gradients overflow first. An
    overflow is *unexplained* if the next applied step shows that the same loss scale would have been fine. Unexplained
    overflows make the margin larger, as long as that helps. So does a ceiling that falls again and again. 1000 steps
    without an overflow make the margin a bit smaller.

    With :math:`e = \log_2 s` of the loss scale :math:`s`, in integers (``low`` counts in parts of 1/16 bit):

    .. code-block:: text

        start:     low = 1024, current_margin = 1024 - e, first = e, clean_steps = 0, wait = -1
        overflow:  e -= 10, so first is the exponent of the first overflow in a row
        applied:   shown = the largest integer with largest_gradient * 2^shown <= largest number
          before = low;  low = min(shown, low + (shown - low) / 10);  above = floor(low) - first
          first step that shows a ceiling:  current_margin = min(above, margin + 10)
          if overflows just before:
            often = clean_steps <= 400
            if not shown < first:                                                       (unexplained overflows)
              if often and clean_steps > 1 and wait <= 0 and (above >= 24 or first is the floor):     (useless)
                current_margin = max(margin, 8);  wait = 8 * clean_steps
              elif clean_steps <= 1 or clean_steps >= wait:
                current_margin = max(current_margin, above + 4 if often else min(above + 4, 15));  wait = 0
            elif often and clean_steps > 4 and wait >= 0:                            (the ceiling fell again)
              current_margin = max(current_margin, min(floor(before) - shown, 15))
            wait = max(wait, 0);  clean_steps = 0
          clean_steps += 1;  every 1000 clean steps:  current_margin -= 1
          if the gradients show something:  current_margin = max(current_margin, margin)
          e = first = floor(low) - current_margin, within the bounds

    Until a first ceiling is shown, no overflow is useless, no ceiling fell, and ``wait`` stays -1. A largest gradient
    that is 0, not finite, below the normal float32 numbers or None shows nothing. Then ``low`` stays, and overflows
    just before are unexplained. So without gradients the loss scale rises by a bit after 1000 steps, as in dynamic
    loss scaling.

    Args:
        margin (int, optional): the least number of bits that the loss scale stays below the ceiling that gradients
            show, 0 to 100. Default: None, which means 2.
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
        >>> state.loss_scale == 2.0**15, state.current_margin, state.skipped_steps
        (True, 2, 2)
    """

    name = "guided"
    title = "gradient-guided scaling"
    cell = "GradientGuidedLossScale"
    # Earlier versions had the Parameters guided_counters, guided_level, guided_counts and guided_levels, too. The field
    # below has another name, because its values mean something else.
    former_fields = (Field("overflow_rate", "float32", (16,), (), "guided_overflow_rate"),)
    state: Mapping[str, Any] = {
        "low_and_margin": dict.fromkeys(("low", "current_margin", "first_exponent", "clean_steps", "wait"), int32)
    }
    needs_gradients = True
    recorded = ("current_margin",)
    usual_arguments = ("loss_scale_value", "margin")
    keeps_bounds = True

    @refuses_exchange_rate
    def __init__(
        self,
        margin: int | None = None,
        *,
        scale_factor: float = 2,
        min_loss_scale: float = 1.0,
        max_loss_scale: float | None = None,
        gradient_format: str | Mapping[str, Any] | Format = "float16",
    ) -> None:
        remedy = "Leave it out, or use AdaptiveLossScaleUpdateCell for other factors."
        self.scale_factor = require_number("scale_factor", scale_factor, "2", lambda factor: factor == 2, remedy)
        super().__init__(min_loss_scale, max_loss_scale, gradient_format)
        bits = MARGIN if margin is None else margin
        self.margin = require_integer("margin", bits, 0, "Leave it out.", most=_LARGEST_MARGIN, unit="number of bits")

    def first_state(self, loss_scale: float) -> dict[str, Any]:
        exponent = int(math.log2(loss_scale))
        return {"low": UNSEEN, "current_margin": UNSEEN // PARTS - exponent, "first_exponent": exponent, "wait": -1}

    def make_step(self, xp: Any) -> Any:
        zero, one, parts, climb, drop, below = xp.ints(0, 1, PARTS, CLIMB, DROP, BELOW)
        patience, helps, often, same_fall, top, unseen = xp.ints(PATIENCE, HELPS, OFTEN, SAME_FALL, TOP, UNSEEN)
        most, without_limit, back = xp.ints(MOST, UNSEEN, max(self.margin, BACK))
        least, first_most = xp.ints(self.margin, self.margin + DROP)
        lowest, highest = xp.ints(self.min_exponent, self.max_exponent)

        def step(  # type: ignore[no-untyped-def]
            exponent,
            overflow,
            gradient_known,
            max_safe_exponent,
            consecutive_overflows,
            low,
            current_margin,
            first_exponent,
            clean_steps,
            wait,
        ):
            # A step that overflowed shows nothing, so it changes only the loss scale.
            applied = one - xp.int32(overflow)
            shown = xp.where(gradient_known, parts * max_safe_exponent, low)
            lower = xp.minimum(shown, low + (shown - low) // climb)
            ceiling = lower // parts
            above = ceiling - first_exponent

            # Begin with the margin that the present loss scale implies, but not too far below the ceiling.
            has_seen = low < unseen
            margin = xp.where(xp.logical_and(gradient_known, ~has_seen), xp.minimum(above, first_most), current_margin)

            after_overflow = consecutive_overflows * applied > zero
            is_explained = xp.logical_and(gradient_known, shown < parts * first_exponent)
            is_unexplained = xp.logical_and(after_overflow, ~is_explained)
            is_often = clean_steps <= often
            recurs = xp.logical_and(is_unexplained, is_often)
            counts = xp.logical_and(after_overflow, has_seen)
            fell_again = xp.logical_and(counts, is_explained, is_often, wait >= zero, clean_steps > same_fall)
            grows = xp.logical_and(is_unexplained, xp.logical_or(clean_steps <= one, clean_steps >= wait))
            wanted = xp.where(is_explained, low // parts - max_safe_exponent, above + below)
            limit = xp.where(recurs, without_limit, most)
            larger = xp.where(xp.logical_or(fell_again, grows), xp.maximum(margin, xp.minimum(wanted, limit)), margin)
            is_far = xp.logical_or(above >= top, first_exponent <= lowest)
            is_useless = xp.logical_and(recurs, has_seen, is_far, clean_steps > one, wait <= zero)

            next_wait = xp.where(is_useless, helps * clean_steps, xp.where(grows, zero, wait))
            next_wait = xp.where(counts, xp.maximum(next_wait, zero), next_wait)
            earlier = xp.where(after_overflow, zero, clean_steps)
            clean = earlier + applied
            # One bit less after each PATIENCE clean steps.
            next_margin = xp.where(is_useless, back, larger) - clean // patience + earlier // patience
            next_margin = xp.where(gradient_known, xp.maximum(next_margin, least), next_margin)
            following = xp.minimum(xp.maximum(ceiling - next_margin, lowest), highest)
            return {
                "exponent": xp.where(overflow, xp.maximum(exponent - drop, lowest), following),
                "low": lower,
                "current_margin": next_margin,
                "first_exponent": following,
                "clean_steps": clean,
                "wait": next_wait,
            }

        return step

    def find_state_problem(self, values: Mapping[str, Any]) -> str | None:
        sound = (
            -PARTS * _LARGEST_EXPONENT <= values["low"] <= UNSEEN
            and -STEP_LIMIT // PATIENCE <= values["current_margin"] <= 4 * _LARGEST_EXPONENT
            and abs(values["first_exponent"]) <= _LARGEST_EXPONENT
            and 0 <= values["clean_steps"] <= STEP_LIMIT
            and -1 <= values["wait"] < HELPS * PATIENCE
        )
        return None if sound else f"The checkpoint has a state of {self.title} that the rule cannot reach"
