"""The adaptive rule raises and drops the loss scale, and changes the scale window after three raises or three drops."""

import functools
import warnings
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, NamedTuple

from mindformers_adaptive.rules.checks import (
    SMALLEST_FLOAT32,
    require_flag,
    require_integer,
    require_number,
    to_float32,
)
from mindformers_adaptive.rules.fields import int32, kept_fields
from mindformers_adaptive.rules.ladder import DEFAULT_MAX_SCALE_WINDOW, DEFAULT_MIN_SCALE_WINDOW, window_ladder
from mindformers_adaptive.rules.rule import Rule
from mindformers_adaptive.rules.saved_state import keep_within

# The scale window changes after this many raises or drops of the loss scale, as in MindFormers' documentation: "every
# three raises the window moves up", "three drops in a row lead to window 1".
COUNTER_LIMIT = 3

# The adaptive rule can also use a scale window of 1 step, the hidden window, which is not in its list of windows (the
# ladder). The index of the hidden window is -1, as in checkpoints of MindFormers' own adaptive cell.
HIDDEN_WINDOW, HIDDEN_INDEX = 1, -1

# Kinds of training step: a clean step within a scale window, the clean step that completes the window (a raise), an
# overflow that drops the loss scale, an overflow that the hysteresis tolerates.
NOTHING, RAISE, DROP, TOLERATE = range(4)


class LossScaleState(NamedTuple):
    """The state of the adaptive rule between two training steps: the loss scale, the scale window and counters.

    Attributes:
        loss_scale (float): the scale for the next step, a float32 value.
        scale_window (int): the present scale window, in steps.
        window_index (int): the window's position on the ladder, -1 for the hidden window.
        growth_num (int): raises since the window last changed, 0 to 3.
        down_num (int): drops since the last raise or window change, 0 to 3.
        clean_steps (int): steps since the last overflow or raise.
        hysteresis_budget (int): overflows left until the scale drops.
        skipped_steps (int): overflowed steps so far.
        consecutive_overflows (int): overflowed steps in a row, up to the last step.

    Examples:
        >>> rule = AdaptiveRule(scale_factor=2, max_scale_window=1000, min_scale_window=20)
        >>> state = rule.step(rule.start(2.0**16, 20), overflow=True)
        >>> state.loss_scale, state.down_num, state.skipped_steps
        (32768.0, 1, 1)
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


class AdaptiveRule(Rule):
    r"""The adaptive rule: how an overflow or a step without overflow changes the loss scale and the scale window.

    With the scale :math:`s`, the window :math:`W = ladder[i]`, and float32 arithmetic throughout:

    .. code-block:: text

        overflow:  spend one of the hysteresis budget; once it is spent,
                   s = max(s * backoff_factor, min_loss_scale)              (a drop)
                   and the third drop without a raise in between moves i > 0 to the hidden window W = 1
        clean:     after W clean steps
                   s = s * scale_factor, if that stays within max_loss_scale and finite   (a raise)
                   and the third raise moves the window one place up the ladder

    Args:
        scale_factor (float): what a raise multiplies the scale by, a number above 1. Default: 2.0, MindSpore's.
        max_scale_window (int): the largest window in steps, see
            :func:`~mindformers_adaptive.rules.ladder.window_ladder`. Default: 1000, MindFormers'.
        min_scale_window (int): the smallest window in steps. Default: 20, MindFormers'.
        min_loss_scale (float): the floor of the scale, above 0. Default: 1.0, MindSpore's.
        max_loss_scale (float, optional): the upper bound of the scale; a raise that would pass it leaves the scale as
            it is. Default: None, the largest finite float32.
        hysteresis (int): how many overflows it takes to drop the scale; a raise starts the count anew, as in
            Megatron-LM. Default: 1, which tolerates none, as in MindSpore.
        shrink_from_min_window (bool): whether three drops lead to the hidden window from the smallest window too.
            Default: False, MindFormers' rule; its first description had True.
        backoff_factor (float, optional): what a drop multiplies the scale by, between 0 and 1. Default: None,
            1 / ``scale_factor``, as in MindSpore, so that a drop undoes a raise.

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

    name = "adaptive"
    title = "adaptive loss scaling"
    # The alias of the update cell in YAML files. Without this package, training fails at the alias; the full class name
    # would select MindFormers' own cell without notice.
    cell = "AdaptiveLossScale"
    state: Mapping[str, Any] = dict.fromkeys(
        ("scale_window", "window_index", "growth_num", "down_num", "hysteresis_budget"), int32
    )
    # Parameter names of the rule's fields in checkpoints. MindFormers' own adaptive cell uses the first four names,
    # too.
    parameter_names: ClassVar[dict[str, str]] = {
        "scale_window": "scale_window",
        "window_index": "list_index",
        "growth_num": "scale_window_up_count",
        "down_num": "scale_window_down_count",
        "hysteresis_budget": "hysteresis_budget",
    }
    recorded = ("scale_window", "window_index", "growth_num", "down_num")
    start_arguments: ClassVar[tuple[str, ...]] = ("scale_window",)
    usual_arguments = ("loss_scale_value", "scale_factor", "scale_window", "max_scale_window", "min_scale_window")
    counts_clean_steps = True
    identifying_fields = ("window_index",)
    keeps_bounds = True

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
        backoff_factor: float | None = None,
    ) -> None:
        self.ladder = window_ladder(max_scale_window, min_scale_window)
        self.min_scale_window, self.max_scale_window = self.ladder[0], self.ladder[-1]
        wanted = "a finite number above 1"
        remedy = "The usual value is 2. For a loss scale that stays, use FixedLossScaleUpdateCell."
        factor = require_number("scale_factor", scale_factor, wanted, lambda number: number > 1, remedy)
        self.scale_factor = to_float32(factor)
        self.backoff_factor = None if backoff_factor is None else _checked_backoff(backoff_factor)
        self.drop_factor = self.backoff_factor or to_float32(1.0 / self.scale_factor)
        super().__init__(min_loss_scale, max_loss_scale)
        remedy = "1 drops the scale at every overflow; Megatron-LM uses 2."
        self.hysteresis = require_integer("hysteresis", hysteresis, 1, remedy, unit="number of overflows")
        self.shrink_from_min_window = require_flag("shrink_from_min_window", shrink_from_min_window)
        # A subclass with its own make_step() may change the budget all the same.
        is_own_step = type(self).make_step is AdaptiveRule.make_step
        self.fixed_state = {"hysteresis_budget": 1} if self.hysteresis == 1 and is_own_step else {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # The update cell of AdaptiveRule has an argument for the initial window; cells of subclasses have no such
        # argument.
        cls.start_arguments = ()

    @functools.cached_property
    def State(self) -> Any:  # noqa: N802
        """type: the NamedTuple class of the rule's states. A subclass of the rule may have more fields."""
        return LossScaleState if self.state == AdaptiveRule.state else super().State

    def first_state(self, loss_scale: float) -> dict[str, int]:
        return {"scale_window": self.ladder[0], "hysteresis_budget": self.hysteresis}

    def start(
        self, loss_scale_value: float, scale_window: int | None = None, *, argument: str = "loss_scale_value"
    ) -> LossScaleState:
        """Return the state of the rule before the first training step.

        Args:
            loss_scale_value (float): the initial scale, within ``[min_loss_scale, max_loss_scale]``.
            scale_window (int, optional): the initial window in steps. A window that is not on the ladder gives a
                warning, and the smallest window is used instead. Default: None, the smallest window.
            argument (str): the name of ``loss_scale_value`` in messages. Default: "loss_scale_value".

        Returns:
            LossScaleState, with all counters at 0 and the hysteresis budget full.

        Raises:
            TypeError: if an argument is not a number of its kind.
            ValueError: if ``loss_scale_value`` is not finite, not positive or out of its bounds.
        """
        state: LossScaleState = super().start(loss_scale_value, argument=argument)
        index = 0 if scale_window is None else self._index_of(scale_window)
        return state._replace(scale_window=self.ladder[index], window_index=index)

    def make_step(self, xp: Any) -> Any:
        zero, one, full = xp.ints(0, 1, self.hysteresis)
        nothing, a_raise, a_drop, a_tolerated = xp.ints(NOTHING, RAISE, DROP, TOLERATE)
        raised, dropped = xp.floats(self.scale_factor, self.drop_factor)
        lowest, highest = xp.floats(self.min_loss_scale, self.max_loss_scale)
        counters = xp.tabulate(
            self._counters_after,
            (NOTHING, TOLERATE),
            (HIDDEN_INDEX, len(self.ladder) - 1),
            (0, COUNTER_LIMIT),
            (0, COUNTER_LIMIT),
        )

        tolerates = "hysteresis_budget" not in self.fixed_state

        def step(  # type: ignore[no-untyped-def]
            loss_scale, overflow, scale_window, window_index, growth_num, down_num, hysteresis_budget, clean_steps
        ):
            clean = clean_steps + one
            is_full = scale_window <= clean
            is_event = xp.logical_or(overflow, is_full)
            event = xp.where(overflow, a_drop, xp.where(is_full, a_raise, nothing))
            # Skip a raise that would pass max_loss_scale. A drop below min_loss_scale stops at min_loss_scale.
            scaled = loss_scale * xp.where(overflow, dropped, raised)
            moves = xp.logical_and(is_event, scaled <= highest)
            budget = hysteresis_budget
            if tolerates:
                spent = xp.maximum(hysteresis_budget - one, zero)
                tolerated = xp.logical_and(overflow, zero < spent)
                event = xp.where(tolerated, a_tolerated, event)
                moves = xp.logical_and(moves, ~tolerated)
                budget = xp.where(is_event, xp.where(overflow, spent, full), hysteresis_budget)
            window, index, growth, down = counters(event, window_index, growth_num, down_num)
            return {
                "loss_scale": xp.where(moves, xp.maximum(scaled, lowest), loss_scale),
                "scale_window": window,
                "window_index": index,
                "growth_num": growth,
                "down_num": down,
                "hysteresis_budget": budget,
                "clean_steps": xp.where(is_event, zero, clean),
            }

        return step

    def _counters_after(self, event: int, window_index: int, growth_num: int, down_num: int) -> tuple[int, ...]:
        """Return the scale window, its index and the raise and drop counters after a step. The step tabulates this."""
        if event == DROP:
            down_num = min(down_num + 1, COUNTER_LIMIT)
            lowest_to_shrink_from = 0 if self.shrink_from_min_window else 1
            if down_num == COUNTER_LIMIT and window_index >= lowest_to_shrink_from:
                window_index, growth_num, down_num = HIDDEN_INDEX, 0, 0
        elif event == RAISE:
            growth_num, down_num = min(growth_num + 1, COUNTER_LIMIT), 0
            if growth_num == COUNTER_LIMIT and window_index < len(self.ladder) - 1:
                window_index, growth_num = window_index + 1, 0
        return self.window_at(window_index), window_index, growth_num, down_num

    def window_at(self, window_index: int) -> int:
        """Return the scale window at an index of the ladder; -1 is the hidden window (1 step), not on the ladder.

        Args:
            window_index (int): the window's position on the ladder, from 0, or -1 for the hidden window.

        Returns:
            int, in steps.
        """
        return HIDDEN_WINDOW if window_index == HIDDEN_INDEX else self.ladder[window_index]

    def fit_state(self, values: dict[str, Any], restored: Collection[str] | None) -> list[str]:
        # Replace a restored scale window that is not on the ladder of windows by the nearest window of the ladder, and
        # each invalid counter by the nearest valid value.
        index, problem = self._place_on_the_ladder(values["scale_window"], values["window_index"])
        problems = [problem] if problem else []
        if problem:
            values["scale_window"], values["window_index"] = self.window_at(index), index
        limits = {"growth_num": COUNTER_LIMIT, "down_num": COUNTER_LIMIT, "hysteresis_budget": self.hysteresis}
        for field in kept_fields(self):
            if (limit := limits.get(field.name)) is not None:
                nearest = min(max(values[field.name], 0), limit)
                problems += keep_within(values, field, 0, limit, nearest)
        if not problems and self._lacks_window(values, restored):
            values["last_overflow_iter"] = values["cur_iter"] - 1
            problems = [
                "The checkpoint has steps but no window, because another loss-scaling rule saved it: the ladder of "
                f"windows starts afresh at window {values['scale_window']}."
            ]
        return problems

    def _index_of(self, scale_window: int) -> int:
        remedy = f"Give a window of the ladder: {self.ladder}."
        scale_window = require_integer("scale_window", scale_window, None, remedy, unit="number of steps")
        if scale_window in self.ladder:
            return self.ladder.index(scale_window)
        warnings.warn(
            f"'scale_window' must be a window of the ladder {self.ladder}, but got {scale_window}: training starts at "
            f"the smallest window, {self.ladder[0]}.",
            stacklevel=3,
        )
        return 0

    def _lacks_window(self, values: Mapping[str, Any], restored: Collection[str] | None) -> bool:
        """Return whether a checkpoint lacks a scale window and has step counters that do not fit the initial window.

        The step counters fit the initial window if all steps so far were clean and fewer than this window.
        """
        if restored is None or "window_index" in restored or "cur_iter" not in restored:
            return False
        clean_steps = values["cur_iter"] - 1 - values["last_overflow_iter"]
        happened = values["skipped_steps"] or values["last_overflow_iter"] or clean_steps >= values["scale_window"]
        return bool(happened)

    def _place_on_the_ladder(self, window: int, index: int) -> tuple[int, str | None]:
        """Return the index of the scale window to use, and a sentence if the restored scale window was replaced."""
        ladder = self.ladder
        on_the_ladder = HIDDEN_INDEX <= index < len(ladder)
        # A subclass of AdaptiveRule with its own make_step() may use scale windows that are not on the ladder.
        is_own_step = type(self).make_step is AdaptiveRule.make_step
        if on_the_ladder and (self.window_at(index) == window or (window >= 1 and not is_own_step)):
            return index, None
        restored = f"The checkpoint has 'scale_window' {window} with 'list_index' {index}, but the ladder is {ladder}"
        if window > HIDDEN_WINDOW or window in ladder:
            nearest = min(range(len(ladder)), key=lambda index: abs(ladder[index] - window))
            return nearest, f"{restored}: training goes on at the nearest window, {ladder[nearest]} (index {nearest})."
        if window == HIDDEN_WINDOW:
            return HIDDEN_INDEX, f"{restored}: training goes on in the hidden window 1 (index -1)."
        if on_the_ladder:
            return index, f"{restored}, and a window is at least 1: training goes on at the window of this index."
        smallest = f"training goes on at the smallest window, {ladder[0]} (index 0)."
        return 0, f"{restored}, and neither can be used: {smallest}"


def _checked_backoff(backoff_factor: float) -> float:
    wanted, remedy = "a number between 0 and 1", "The usual value is 0.5; leave it out for 1 / 'scale_factor'."
    ratio = require_number("backoff_factor", backoff_factor, wanted, lambda n: SMALLEST_FLOAT32 <= n < 1, remedy)
    return to_float32(ratio)
