"""The rule of adaptive loss scaling in plain Python: an explicit state and one step function.

This is the definition. Every other form of the rule (the MindSpore cell, the vectorised sweep) is tested against it
bit for bit.
"""

import warnings
from typing import NamedTuple

from mindformers_adaptive.rules.checks import (
    LARGEST_FLOAT32,
    as_float32,
    require_flag,
    require_integer,
    require_number,
    require_positive,
    to_float32,
)
from mindformers_adaptive.rules.ladder import (
    DEFAULT_MAX_SCALE_WINDOW,
    DEFAULT_MIN_SCALE_WINDOW,
    HIDDEN_WINDOW,
    window_ladder,
)

__all__ = ["COUNTER_LIMIT", "HIDDEN_INDEX", "AdaptiveRule", "LossScaleState"]

# MindFormers' documentation: "every three raises the window moves up", "three drops in a row lead to window 1".
COUNTER_LIMIT = 3

# The window index while the hidden window is in force; the number MindFormers' own cell writes into checkpoints.
HIDDEN_INDEX = -1


class LossScaleState(NamedTuple):
    """The state of the rule between two steps.

    Attributes:
        loss_scale (float): the scale for the next step, a float32 value.
        scale_window (int): the window in force, in steps.
        window_index (int): its place on the ladder, -1 for the hidden window.
        growth_num (int): raises since the window last changed, 0 to 3.
        down_num (int): drops since the last raise or window change, 0 to 3.
        clean_steps (int): steps since the last overflow or raise.
        hysteresis_budget (int): overflows left until the scale drops.
        skipped_steps (int): overflowed steps so far.
        consecutive_overflows (int): overflowed steps in a row, up to the last step.
    """

    loss_scale: float
    scale_window: int
    window_index: int
    growth_num: int = 0
    down_num: int = 0
    clean_steps: int = 0
    hysteresis_budget: int = 1
    skipped_steps: int = 0
    consecutive_overflows: int = 0


class AdaptiveRule:
    r"""Adaptive loss scaling: what one step, overflowed or clean, does to the scale and to its window.

    With the scale :math:`s`, the window :math:`W = ladder[i]`, and float32 arithmetic throughout:

    .. code-block:: text

        overflow:  spend one of the hysteresis budget; once it is spent,
                   s = max(s * (1 / scale_factor), min_loss_scale)          (a drop)
                   and the third drop without a raise in between moves i > 0 to the hidden window W = 1
        clean:     after W clean steps
                   s = s * scale_factor, if that stays within max_loss_scale and finite   (a raise)
                   and the third raise moves the window one place up the ladder

    Args:
        scale_factor (float): what the scale is multiplied or divided by, a number above 1. Default: 2.0, MindSpore's.
        max_scale_window (int): the largest window in steps, see
            :func:`~mindformers_adaptive.rules.ladder.window_ladder`. Default: 1000, MindFormers'.
        min_scale_window (int): the smallest window in steps. Default: 20, MindFormers'.
        min_loss_scale (float): the floor of the scale, above 0. Default: 1.0, MindSpore's.
        max_loss_scale (float, optional): the cap of the scale; a raise that would pass it leaves the scale as it is.
            Default: None, the largest finite float32.
        hysteresis (int): how many overflows it takes to drop the scale; a raise starts the count anew, as in
            Megatron-LM. Default: 1, which tolerates none, as in MindSpore.
        shrink_from_min_window (bool): whether three drops lead to the hidden window from the smallest window too.
            Default: False, MindFormers' rule; its first description had True.

    Raises:
        TypeError: if an argument is not of its type; ``True`` and ``False`` are not numbers here.
        ValueError: if an argument is out of its range.

    Examples:
        >>> rule = AdaptiveRule(max_scale_window=50, min_scale_window=20)
        >>> rule.ladder
        (20, 30, 40, 50)
        >>> state = rule.start(loss_scale_value=2.0**16)
        >>> rule.step(state, overflow=True).loss_scale
        32768.0
    """

    def __init__(
        self,
        scale_factor: float = 2.0,
        max_scale_window: int = DEFAULT_MAX_SCALE_WINDOW,
        min_scale_window: int = DEFAULT_MIN_SCALE_WINDOW,
        *,
        min_loss_scale: float = 1.0,
        max_loss_scale: float | None = None,
        hysteresis: int = 1,
        shrink_from_min_window: bool = False,
    ) -> None:
        self.ladder = window_ladder(max_scale_window, min_scale_window)
        wanted, remedy = "a finite number above 1", "The usual value is 2."
        factor = require_number("scale_factor", scale_factor, wanted, lambda number: number > 1, remedy)
        self.scale_factor = as_float32(factor)
        self.backoff_factor = to_float32(1.0 / self.scale_factor)
        self.min_loss_scale = require_positive("min_loss_scale", min_loss_scale)
        self.max_loss_scale = (
            LARGEST_FLOAT32 if max_loss_scale is None else require_positive("max_loss_scale", max_loss_scale)
        )
        if self.min_loss_scale > self.max_loss_scale:
            raise ValueError(
                f"'min_loss_scale' must not be above 'max_loss_scale', but got {self.min_loss_scale} and "
                f"{self.max_loss_scale}. Lower the first or raise the second."
            )
        remedy = "1 drops the scale at every overflow; Megatron-LM uses 2."
        self.hysteresis = require_integer("hysteresis", hysteresis, 1, remedy, unit="number of overflows")
        self.shrink_from_min_window = require_flag("shrink_from_min_window", shrink_from_min_window)

    def start(
        self, loss_scale_value: float, scale_window: int | None = None, *, argument: str = "loss_scale_value"
    ) -> LossScaleState:
        """Return the state before the first step.

        Args:
            loss_scale_value (float): the initial scale, within ``[min_loss_scale, max_loss_scale]``.
            scale_window (int, optional): the initial window in steps. One that is not on the ladder gives a warning,
                and the smallest window is used. Default: None, the smallest window.
            argument (str): the name of ``loss_scale_value`` in messages.

        Returns:
            LossScaleState, with all counters at 0 and the hysteresis budget full.

        Raises:
            TypeError: if an argument is not a number of its kind.
            ValueError: if ``loss_scale_value`` is not finite, not positive or out of its bounds.
        """
        loss_scale = require_positive(argument, loss_scale_value)
        if not self.min_loss_scale <= loss_scale <= self.max_loss_scale:
            raise ValueError(
                f"'{argument}' must lie between 'min_loss_scale' ({self.min_loss_scale}) and 'max_loss_scale' "
                f"({self.max_loss_scale}), but got {loss_scale}. Change the value or that bound."
            )
        index = 0 if scale_window is None else self._index_of(scale_window)
        return LossScaleState(loss_scale, self.ladder[index], index, hysteresis_budget=self.hysteresis)

    def step(self, state: LossScaleState, overflow: bool) -> LossScaleState:
        """Return the state after a step that overflowed or was clean; ``state`` itself is not changed."""
        return self._after_overflow(state) if overflow else self._after_clean(state)

    def window_at(self, window_index: int) -> int:
        """Return the window, in steps, at a place on the ladder or, for -1, the hidden window."""
        return HIDDEN_WINDOW if window_index == HIDDEN_INDEX else self.ladder[window_index]

    def _after_overflow(self, state: LossScaleState) -> LossScaleState:
        loss_scale, _, index, growth_num, down_num, _, budget, skipped, consecutive = state
        budget = max(budget - 1, 0)
        if budget == 0:
            loss_scale = max(to_float32(loss_scale * self.backoff_factor), self.min_loss_scale)
            down_num = min(down_num + 1, COUNTER_LIMIT)
            lowest_to_shrink_from = 0 if self.shrink_from_min_window else 1
            if down_num == COUNTER_LIMIT and index >= lowest_to_shrink_from:
                index, growth_num, down_num = HIDDEN_INDEX, 0, 0
        window = self.window_at(index)
        return LossScaleState(loss_scale, window, index, growth_num, down_num, 0, budget, skipped + 1, consecutive + 1)

    def _after_clean(self, state: LossScaleState) -> LossScaleState:
        clean_steps = state.clean_steps + 1
        if clean_steps < state.scale_window:
            return state._replace(clean_steps=clean_steps, consecutive_overflows=0)
        raised = to_float32(state.loss_scale * self.scale_factor)
        loss_scale = raised if raised <= self.max_loss_scale else state.loss_scale
        index = state.window_index
        growth_num = min(state.growth_num + 1, COUNTER_LIMIT)
        if growth_num == COUNTER_LIMIT and index < len(self.ladder) - 1:
            index, growth_num = index + 1, 0
        window = self.window_at(index)
        return LossScaleState(loss_scale, window, index, growth_num, 0, 0, self.hysteresis, state.skipped_steps, 0)

    def _index_of(self, scale_window: int) -> int:
        remedy = f"Give one of the ladder: {self.ladder}."
        scale_window = require_integer("scale_window", scale_window, None, remedy, unit="number of steps")
        if scale_window in self.ladder:
            return self.ladder.index(scale_window)
        warnings.warn(
            f"'scale_window' must be one of the ladder {self.ladder}, but got {scale_window}: training starts at the "
            f"smallest window, {self.ladder[0]}.",
            stacklevel=3,
        )
        return 0
