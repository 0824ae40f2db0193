"""The rule of gradient-guided loss scaling in plain Python: an explicit state and one step function.

This is the readable definition. Every other form of the rule is tested against it, bit for bit.
"""

import math
import warnings
from typing import NamedTuple

import numpy as np

from mindformers_adaptive.rules.checks import LARGEST_FLOAT32, require_number, require_positive, to_float32
from mindformers_adaptive.rules.guided_names import PLACES
from mindformers_adaptive.rules.safe_exponent import max_safe_exponent

__all__ = ["PLACES", "GuidedRule", "GuidedState"]

# By how much the n-th overflow in a row lowers log2 of the scale; the last number holds from there on. A drop too far
# costs one step of headroom, because the next applied step shows where the ceiling is.
DROPS = (1, 2, 4, 8)

# The record starts as if so many steps had been seen, with an overflow rate that halves from place to place. So a place
# where nothing has overflowed yet is not taken before some hundred steps, whose rare low ceilings it has to bear.
PRIOR_STEPS = 8

# The part of the way that ``level`` goes to what a step shows: a mean over about 32 steps. A power of two is exact.
LEVEL_SHARE = 2.0**-5

# How far, in bits, ``base`` may be from ``level``, and how far above it after several overflows in a row.
REACH = 1.25
REACH_AFTER_SEVERAL = 0.5

# Gradients that showed too little twice are taken to show a bit too little, up to three: where the largest of them is
# summed in float32, ceilings of up to 2.8 bits above what it shows have been measured.
CONTRADICTIONS_PER_BIT = 2
MOST_CONTRADICTIONS = 6

# A trial of the limit that failed makes its window so many times larger, at most twice.
WINDOW_FACTOR = 8
LARGEST_WINDOWS = WINDOW_FACTOR**2

# In place of the cheapest place while no gradient has shown anything: only the limit counts.
NO_CAP = -1024

# A patience of 1 to 1,000,000 steps, which keeps all windows within int32.
_EXCHANGE_RATES = (0.001, 1000.0)

_PLACE = np.arange(PLACES, dtype=np.float32)


class GuidedState(NamedTuple):
    """All that the rule remembers between two steps. Scales are powers of two, so their log2 are integers.

    Attributes:
        loss_scale (float): the scale for the next step, a power of two.
        scale_window (int): clean steps before the limit rises by one bit.
        level (float): mean of what the gradients of recent applied steps showed, in bits; a float32 value.
        base (int): ``level`` as a whole number that seldom moves; place k of the record is the scale 2^(base + 1 - k).
        overflow_rate (tuple[float, ...]): for each of the 16 places, the share of recent steps that would have
            overflowed at that scale; float32 values from 0 to 1.
        observed_steps (int): applied steps that showed something, counted up to the patience.
        limit (int): the highest scale that unexplained overflows allow, as a place of the record; 0 or less allows all
            that the record looks at.
        bound (bool): whether the limit, and not the gradients, decided the scale for the next step.
        trial (bool): whether the limit has risen since it was last set.
        clean_steps (int): applied steps since the last overflow or rise of the scale, counted up to the largest window.
        contradictions (int): how often a step was applied at a scale above what its gradients showed, up to 6; less
            two for each fall of the limit.
        first_exponent (int): log2 of the scale at the first overflow of the last row of overflows.
        skipped_steps (int): overflowed steps so far.
        consecutive_overflows (int): overflowed steps in a row, up to the last step.
    """

    loss_scale: float
    scale_window: int
    level: float
    base: int
    overflow_rate: tuple[float, ...]
    observed_steps: int = 0
    limit: int = 0
    bound: bool = False
    trial: bool = False
    clean_steps: int = 0
    contradictions: int = 0
    first_exponent: int = 0
    skipped_steps: int = 0
    consecutive_overflows: int = 0


class GuidedRule:
    r"""Gradient-guided loss scaling: the scale follows what the largest gradient shows of its ceiling.

    The *ceiling* of a step is the largest scale at which nothing in it overflows. A step that was applied shows it:
    its largest gradient, unscaled, times the scale must not pass 65504, the largest FP16 number. Two things decide
    the next scale, and the lower one wins:

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

        overflow:  the n-th in a row lowers e by 1, 2, 4, 8, 8, ...; first = e before the first of them
        applied:   shown = the largest integer with largest_gradient * 2^shown <= 65504
          e > shown + contradictions // 2:  contradictions += 1, at most 6             (the gradients show too little)
          shown += contradictions // 2
          unexplained = overflows just before, and shown >= first
          fall = unexplained and clean_steps < P / 10
          the first step that shows something: level = base = shown, limit = 0
          for each place k, with the scale 2^(base + 1 - k):
            overflow_rate[k] += ([base + 1 - k > shown] - overflow_rate[k]) * max(1 / P, 1 / (observed_steps + 9))
          after overflows: level = min(level, shown)
          level += (shown - level) / 32
          base: moved, by whole bits and no more than it takes, to level - 1.25 ... level + 1.25
                (... level + 0.5 after several overflows in a row); record and limit keep their places and so move along
          clean_steps = 1 after an overflow, else clean_steps + 1
          fall:                                limit = base + 1 - e; contradictions -= 2, at least 0
                                               window = 8 * window, at most 32 P, if trial, else P / 2; trial = False
          else if bound and clean_steps >= window:     limit -= 1; trial = True         (one bit up)
                                                       window = P / 2 if it was a trial already
          cap = the smallest k with the least P * overflow_rate[k] + k;  bound = limit > cap
          e = base + 1 - max(cap, limit), within the bounds;  clean_steps = 0 where e rises
        start:     overflow_rate[k] = 2^-(k + 1), window = P / 2, base + 1 = e

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

    Raises:
        TypeError: if an argument is not a number; ``True`` and ``False`` are not numbers here.
        ValueError: if an argument is out of its range, or there is no power of two between the bounds.

    Examples:
        >>> rule = GuidedRule()
        >>> state = rule.start(loss_scale_value=2.0**32)
        >>> for _ in range(4):
        ...     state = rule.step(state, overflow=True)
        >>> state.loss_scale == 2.0**17
        True
        >>> state = rule.step(state, overflow=False, largest_gradient=0.25)
        >>> state.base, state.limit, state.skipped_steps
        (17, 0, 4)
    """

    def __init__(
        self,
        exchange_rate: float = 1.0,
        *,
        scale_factor: float = 2,
        min_loss_scale: float = 1.0,
        max_loss_scale: float | None = None,
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
        require_number("scale_factor", scale_factor, "2", lambda factor: factor == 2, remedy)
        self.min_loss_scale = require_positive("min_loss_scale", min_loss_scale)
        self.max_loss_scale = (
            LARGEST_FLOAT32 if max_loss_scale is None else require_positive("max_loss_scale", max_loss_scale)
        )
        self.min_exponent = math.ceil(math.log2(self.min_loss_scale))
        self.max_exponent = _exponent(self.max_loss_scale)
        if self.min_exponent > self.max_exponent:
            raise ValueError(
                "There must be a power of two from 'min_loss_scale' to 'max_loss_scale', but got "
                f"{self.min_loss_scale} and {self.max_loss_scale}. Lower the first or raise the second."
            )
        self.patience = max(round(1000 / self.exchange_rate), 1)
        self.memory = to_float32(1 / self.patience)
        self.recent = self.patience // 10
        self.smallest_window = max(self.patience // 2, 1)
        self.largest_window = LARGEST_WINDOWS * self.smallest_window

    def start(self, loss_scale_value: float, *, argument: str = "loss_scale_value") -> GuidedState:
        """Return the state before the first step.

        Args:
            loss_scale_value (float): the initial scale, within ``[min_loss_scale, max_loss_scale]``. One that is no
                power of two gives a warning, and the nearest one below is used that lies within the bounds.
            argument (str): the name of ``loss_scale_value`` in messages.

        Returns:
            GuidedState, with all counters at 0.

        Raises:
            TypeError: if ``loss_scale_value`` is not a number.
            ValueError: if it is not finite, not positive or out of its bounds.
        """
        loss_scale = require_positive(argument, loss_scale_value)
        if not self.min_loss_scale <= loss_scale <= self.max_loss_scale:
            raise ValueError(
                f"'{argument}' must lie between 'min_loss_scale' ({self.min_loss_scale}) and 'max_loss_scale' "
                f"({self.max_loss_scale}), but got {loss_scale}. Change the value or that bound."
            )
        exponent = max(_exponent(loss_scale), self.min_exponent)
        if 2.0**exponent != loss_scale:
            warnings.warn(
                f"'{argument}' must be a power of two here, but got {loss_scale}: training starts at {2.0**exponent}.",
                stacklevel=2,
            )
        rates = tuple(2.0 ** -(place + 1) for place in range(PLACES))
        return GuidedState(2.0**exponent, self.smallest_window, float(exponent - 1), exponent - 1, rates)

    def step(self, state: GuidedState, overflow: bool, largest_gradient: float | None = None) -> GuidedState:
        """Return the state after a step; ``state`` itself is not changed.

        Args:
            state (GuidedState): before the step.
            overflow (bool): whether the step overflowed and was skipped.
            largest_gradient (float, optional): the largest absolute value of its gradients, unscaled and before
                clipping, if it was applied; ignored if it overflowed. Default: None, not known.
        """
        return (
            self._after_overflow(state) if overflow else self._after_applied(state, max_safe_exponent(largest_gradient))
        )

    def _after_overflow(self, state: GuidedState) -> GuidedState:
        exponent, earlier = _exponent(state.loss_scale), state.consecutive_overflows
        dropped = max(exponent - DROPS[min(earlier, len(DROPS) - 1)], self.min_exponent)
        return state._replace(
            loss_scale=2.0**dropped,
            first_exponent=exponent if earlier == 0 else state.first_exponent,
            skipped_steps=state.skipped_steps + 1,
            consecutive_overflows=earlier + 1,
        )

    def _after_applied(self, state: GuidedState, shown: int | None) -> GuidedState:
        exponent, after_overflow = _exponent(state.loss_scale), state.consecutive_overflows > 0
        if shown is not None:
            contradicted = exponent > shown + state.contradictions // CONTRADICTIONS_PER_BIT
            contradictions = min(state.contradictions + contradicted, MOST_CONTRADICTIONS)
            shown += contradictions // CONTRADICTIONS_PER_BIT
            state = state._replace(contradictions=contradictions)
        unexplained = after_overflow and (shown is None or shown >= state.first_exponent)
        fall = unexplained and state.clean_steps < self.recent
        if shown is not None:
            state = self._observe(state, shown)
        state = state._replace(clean_steps=1 if after_overflow else min(state.clean_steps + 1, self.largest_window))
        state = self._move_limit(state, exponent, fall)

        cap = NO_CAP if state.observed_steps == 0 else self._cheapest_place(state.overflow_rate)
        wanted = state.base + 1 - max(cap, state.limit)
        following = min(max(wanted, self.min_exponent), self.max_exponent)
        return state._replace(
            loss_scale=2.0**following,
            bound=state.limit > cap and following < self.max_exponent,
            clean_steps=0 if following > exponent else state.clean_steps,
            consecutive_overflows=0,
        )

    def _observe(self, state: GuidedState, shown: int) -> GuidedState:
        """Put what a step showed into the record, and move level and base."""
        if state.observed_steps == 0:
            state = state._replace(level=float(shown), base=shown, limit=0)
        exponents = np.float32(state.base + 1) - _PLACE
        rates = np.array(state.overflow_rate, np.float32)
        weight = max(self.memory, to_float32(1 / (state.observed_steps + PRIOR_STEPS + 1)))
        rates = rates + ((exponents > shown).astype(np.float32) - rates) * np.float32(weight)

        level = min(state.level, float(shown)) if state.consecutive_overflows > 0 else state.level
        level = to_float32(level + to_float32(to_float32(shown - level) * LEVEL_SHARE))
        above = REACH_AFTER_SEVERAL if state.consecutive_overflows > 1 else REACH
        highest = math.floor(to_float32(level + above))
        lowest = math.ceil(to_float32(level - REACH))
        return state._replace(
            level=level,
            base=min(max(state.base, lowest), highest),
            overflow_rate=tuple(rates.tolist()),
            observed_steps=min(state.observed_steps + 1, self.patience),
        )

    def _move_limit(self, state: GuidedState, exponent: int, fall: bool) -> GuidedState:
        """Set the limit at a fall, and try it one bit higher after a window of clean steps."""
        if fall:
            return state._replace(
                limit=state.base + 1 - exponent,
                contradictions=max(state.contradictions - CONTRADICTIONS_PER_BIT, 0),
                scale_window=min(WINDOW_FACTOR * state.scale_window, self.largest_window)
                if state.trial
                else self.smallest_window,
                trial=False,
            )
        if state.bound and state.clean_steps >= state.scale_window:
            window = self.smallest_window if state.trial else state.scale_window
            return state._replace(limit=state.limit - 1, scale_window=window, trial=True)
        return state

    def _cheapest_place(self, overflow_rate: tuple[float, ...]) -> int:
        costs = np.array(overflow_rate, np.float32) * np.float32(self.patience) + _PLACE
        return int(np.argmin(costs))


def _exponent(value: float) -> int:
    """Return the integer part of log2 of a positive number."""
    return math.frexp(value)[1] - 1
