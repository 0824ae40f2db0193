"""The rule of adaptive loss scaling in plain Python: an explicit state and one step function.

This is the definition. The update cell and the sweep look its steps up in tables that it fills itself, and are tested
against it bit for bit.
"""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.rules.base import STEP_LIMIT, Field, Rule
from mindformers_adaptive.rules.checks import (
    SMALLEST_FLOAT32,
    require_flag,
    require_integer,
    require_number,
    to_float32,
)
from mindformers_adaptive.rules.ladder import DEFAULT_MAX_SCALE_WINDOW, DEFAULT_MIN_SCALE_WINDOW, window_ladder

__all__ = ["COUNTER_LIMIT", "EVENTS", "HIDDEN_INDEX", "AdaptiveLanes", "AdaptiveRule", "LossScaleState"]
__all__ += ["transition_tables"]

# MindFormers' documentation: "every three raises the window moves up", "three drops in a row lead to window 1".
COUNTER_LIMIT = 3

# The hidden window of one step is never on the ladder; its index is the number that MindFormers' own cell writes into
# checkpoints.
HIDDEN_WINDOW, HIDDEN_INDEX = 1, -1

# What can happen in a step: a clean step within the window, a full window, an overflow that drops the scale, and one
# that hysteresis tolerates.
EVENTS = ("wait", "raise", "drop", "tolerate")
_WAIT, _RAISE, _DROP, _TOLERATE = range(len(EVENTS))


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


class AdaptiveLanes:
    """Runs of adaptive rules side by side, which look up their windows and counters in tables.

    Args:
        rules (Sequence[AdaptiveRule]): of each lane.
        states (Sequence[LossScaleState]): of each lane, before the first step.

    Attributes:
        loss_scale (NDArray): float64 of shape (lanes,), for the next step.
        scale_window (NDArray): int64 of shape (lanes,), in steps.
    """

    def __init__(self, rules: Sequence[AdaptiveRule], states: Sequence[LossScaleState]) -> None:
        # Lanes with the same ladder share a table; the rows of one table follow those of the other.
        keys = [(rule.max_scale_window, rule.min_scale_window, rule.shrink_from_min_window) for rule in rules]
        tables = {key: _transitions(*key) for key in dict.fromkeys(keys)}
        first = dict(zip(tables, np.cumsum([0, *map(len, tables.values())]).tolist(), strict=False))
        self._transitions = np.concatenate([*tables.values()])
        self._first_row = np.array([first[key] - HIDDEN_INDEX for key in keys])
        self._places = np.array([len(rule.ladder) - HIDDEN_INDEX for rule in rules])
        self._counters = np.array([(state.window_index, state.growth_num, state.down_num) for state in states]).T
        self._factors = np.array([rule.factors for rule in rules]).T
        self._smallest = np.array([rule.min_loss_scale for rule in rules], np.float32)
        self._largest = np.array([rule.max_loss_scale for rule in rules], np.float32)
        self._hysteresis = np.array([rule.hysteresis for rule in rules])
        self._budget = np.array([state.hysteresis_budget for state in states])
        self._clean = np.array([state.clean_steps for state in states])
        self._skipped = np.array([state.skipped_steps for state in states])
        self._consecutive = np.array([state.consecutive_overflows for state in states])
        self.loss_scale = np.array([state.loss_scale for state in states], np.float64)
        self.scale_window = np.array([state.scale_window for state in states])

    def step(self, overflow: NDArray[np.bool_], largest_gradient: NDArray[np.float64]) -> None:
        """Take a step in every lane.

        Args:
            overflow (NDArray): bool of shape (lanes,).
            largest_gradient (NDArray): not used.
        """
        self._clean += 1
        self._skipped += overflow
        self._consecutive += 1
        self._consecutive *= overflow
        places = np.flatnonzero(overflow | (self._clean >= self.scale_window))
        if not len(places):
            return
        overflowed, (index, growth, down) = overflow[places], self._counters[:, places]
        budget = np.where(overflowed, np.maximum(self._budget[places] - 1, 0), self._hysteresis[places])
        event = np.where(overflowed, np.where(budget == 0, _DROP, _TOLERATE), _RAISE)
        row = self._first_row[places] + event * self._places[places] + index
        after = self._transitions[row, growth, down].T
        self.scale_window[places], self._counters[:, places] = after[0], after[1:4]
        scale = self.loss_scale[places].astype(np.float32)
        with np.errstate(over="ignore"):
            product = scale * self._factors[event, places]
        # A raise beyond the cap is left out; only a drop can pass the floor.
        moved = np.where(product <= self._largest[places], product, scale)
        self.loss_scale[places] = np.maximum(moved, self._smallest[places])
        self._budget[places], self._clean[places] = budget, 0

    def states(self) -> list[LossScaleState]:
        """Return the state of each lane as the rule has it."""
        steps = (self._clean, self._budget, self._skipped, self._consecutive)
        columns = (self.loss_scale, self.scale_window, *self._counters, *steps)
        return [LossScaleState(*lane) for lane in zip(*(column.tolist() for column in columns), strict=True)]


class AdaptiveRule(Rule):
    r"""Adaptive loss scaling: what one step, overflowed or clean, does to the scale and to its window.

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
        max_loss_scale (float, optional): the cap of the scale; a raise that would pass it leaves the scale as it is.
            Default: None, the largest finite float32.
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
    # Not the name of the class, which MindFormers has too: where this package is missing, training has to fail.
    cell = "AdaptiveLossScale"
    # The names in checkpoints are those of MindFormers' own cell. The budget is kept only with a hysteresis above 1.
    fields: tuple[Field, ...] = (
        Field("scale_window", parameter="scale_window"),
        Field("window_index", parameter="list_index"),
        Field("growth_num", parameter="scale_window_up_count"),
        Field("down_num", parameter="scale_window_down_count"),
        Field("hysteresis_budget", parameter="hysteresis_budget"),
    )
    recorded = ("scale_window", "window_index", "growth_num", "down_num")
    start_arguments = ("scale_window",)
    usual_arguments = ("loss_scale_value", "scale_factor", "scale_window", "max_scale_window", "min_scale_window")
    # From a quarter of MindFormers' smallest window to 2000, the default of MindSpore's DynamicLossScaleManager and of
    # PyTorch's GradScaler; equal windows are dynamic loss scaling.
    grid: ClassVar[Mapping[str, Sequence[Any]]] = {
        "min_scale_window": (5, 10, 20, 50, 100, 200, 500, 1000, 2000),
        "max_scale_window": (5, 10, 20, 50, 100, 200, 500, 1000, 2000),
        "scale_factor": (2, 4),
        "hysteresis": (1, 2),
    }
    lanes = AdaptiveLanes

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
        wanted, remedy = "a finite number above 1", "The usual value is 2."
        factor = require_number("scale_factor", scale_factor, wanted, lambda number: number > 1, remedy)
        self.scale_factor = to_float32(factor)
        self.backoff_factor = None if backoff_factor is None else _checked_backoff(backoff_factor)
        self._drop_factor = self.backoff_factor or to_float32(1.0 / self.scale_factor)
        undoes = math.isclose(self._drop_factor * self.scale_factor, 1.0, rel_tol=2.0**-23)
        self.moves_by_one_factor = self.backoff_factor is None or undoes
        # What each of the EVENTS does to the scale.
        self.factors = np.array([1.0, self.scale_factor, self._drop_factor, 1.0], np.float32)
        super().__init__(min_loss_scale, max_loss_scale)
        remedy = "1 drops the scale at every overflow; Megatron-LM uses 2."
        self.hysteresis = require_integer("hysteresis", hysteresis, 1, remedy, unit="number of overflows")
        self.shrink_from_min_window = require_flag("shrink_from_min_window", shrink_from_min_window)
        if self.hysteresis == 1:
            self.fields = tuple(field for field in type(self).fields if field.name != "hysteresis_budget")

    @classmethod
    def values_fit(cls, **arguments: Any) -> bool:
        given = {**cls.all_arguments(), **arguments}
        first, largest, smallest = given["scale_window"], given["max_scale_window"], given["min_scale_window"]
        return bool(largest >= smallest and (not isinstance(first, int) or first in window_ladder(largest, smallest)))

    def short_label(self, arguments: Mapping[str, Any]) -> tuple[str, set[str]]:
        smallest, largest = self.min_scale_window, self.max_scale_window
        told = {"min_scale_window", "max_scale_window"}
        if arguments["scale_window"] == smallest:
            told.add("scale_window")
        return f"dynamic {smallest}" if smallest == largest else f"{self.name} {smallest}-{largest}", told

    def start(
        self, loss_scale_value: float, scale_window: int | None = None, *, argument: str = "loss_scale_value"
    ) -> LossScaleState:
        """Return the state before the first step.

        Args:
            loss_scale_value (float): the initial scale, within ``[min_loss_scale, max_loss_scale]``.
            scale_window (int, optional): the initial window in steps. One that is not on the ladder gives a warning,
                and the smallest window is used. Default: None, the smallest window.
            argument (str): the name of ``loss_scale_value`` in messages. Default: "loss_scale_value".

        Returns:
            LossScaleState, with all counters at 0 and the hysteresis budget full.

        Raises:
            TypeError: if an argument is not a number of its kind.
            ValueError: if ``loss_scale_value`` is not finite, not positive or out of its bounds.
        """
        loss_scale = self.checked_start(loss_scale_value, argument)
        index = 0 if scale_window is None else self._index_of(scale_window)
        return LossScaleState(loss_scale, self.ladder[index], index, hysteresis_budget=self.hysteresis)

    def step(self, state: LossScaleState, overflow: bool, largest_gradient: float | None = None) -> LossScaleState:
        return self._after_overflow(state) if overflow else self._after_clean(state)

    def window_at(self, window_index: int) -> int:
        """Return a window of the ladder, or the hidden window.

        Args:
            window_index (int): its place on the ladder, from 0, or -1 for the hidden window.

        Returns:
            int, in steps.
        """
        return HIDDEN_WINDOW if window_index == HIDDEN_INDEX else self.ladder[window_index]

    def _after_overflow(self, state: LossScaleState) -> LossScaleState:
        loss_scale, _, index, growth_num, down_num, _, budget, skipped, consecutive = state
        budget = max(budget - 1, 0)
        if budget == 0:
            loss_scale = max(to_float32(loss_scale * self._drop_factor), self.min_loss_scale)
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

    def to_values(self, state: LossScaleState, steps: int, last_event: int | None = None) -> dict[str, Any]:
        return super().to_values(state, steps, min(steps, STEP_LIMIT - 1) - state.clean_steps)

    def from_values(self, loss_scale: float, values: Mapping[str, Any]) -> LossScaleState:
        known = {name: values[name] for name in LossScaleState._fields if name in values}
        clean_steps = values["cur_iter"] - 1 - values["last_overflow_iter"]
        return LossScaleState(loss_scale, **{"hysteresis_budget": self.hysteresis, **known}, clean_steps=clean_steps)

    def _repair_own(self, values: dict[str, Any], loss_scale: float, restored: Collection[str] | None) -> list[str]:
        # A window that is not on the ladder becomes the nearest one that is; a counter that no run can reach is set to
        # the nearest possible value.
        index, problem = self._place_on_the_ladder(values["scale_window"], values["window_index"])
        values["scale_window"], values["window_index"] = self.window_at(index), index
        problems = [problem] if problem else []
        limits = {"growth_num": COUNTER_LIMIT, "down_num": COUNTER_LIMIT, "hysteresis_budget": self.hysteresis}
        for key, limit in limits.items():
            if key in values:
                problems += self._keep_within(values, key, 0, limit, min(max(values[key], 0), limit))
        if not problems and self._lacks_window(values, restored):
            values["last_overflow_iter"] = values["cur_iter"] - 1
            problems = [
                "The checkpoint has steps but no window, as one of dynamic or gradient-guided loss scaling: the ladder "
                f"starts afresh at window {values['scale_window']}."
            ]
        return problems

    def _lacks_window(self, values: Mapping[str, Any], restored: Collection[str] | None) -> bool:
        """Whether a checkpoint had step counters of another cell, which do not fit the window at the start.

        While nothing has happened but clean steps within that window, they fit.
        """
        if restored is None or "window_index" in restored or "cur_iter" not in restored:
            return False
        clean_steps = values["cur_iter"] - 1 - values["last_overflow_iter"]
        happened = values["skipped_steps"] or values["last_overflow_iter"] or clean_steps >= values["scale_window"]
        return bool(happened)

    def describe_fresh_start(self, values: Mapping[str, Any]) -> str:
        return f"with a fresh ladder, at window {values['scale_window']}"

    def _place_on_the_ladder(self, window: int, index: int) -> tuple[int, str | None]:
        """Return the index to go on with and, where it is not simply the one restored, a sentence about it."""
        ladder = self.ladder
        on_the_ladder = HIDDEN_INDEX <= index < len(ladder)
        if on_the_ladder and self.window_at(index) == window:
            return index, None
        restored = f"The checkpoint has 'scale_window' {window} with 'list_index' {index}, but the ladder is {ladder}"
        if window > HIDDEN_WINDOW or window in ladder:
            nearest = min(range(len(ladder)), key=lambda place: abs(ladder[place] - window))
            return nearest, f"{restored}: training goes on at its nearest window, {ladder[nearest]} (index {nearest})."
        if window == HIDDEN_WINDOW:
            return HIDDEN_INDEX, f"{restored}: training goes on in the hidden window 1 (index -1)."
        if on_the_ladder:
            return index, f"{restored}, and a window is at least 1: the index is kept, with its window."
        smallest = f"training goes on at the smallest window, {ladder[0]} (index 0)."
        return 0, f"{restored}, and neither can be used: {smallest}"


def _checked_backoff(backoff_factor: float) -> float:
    wanted, remedy = "a number between 0 and 1", "The usual value is 0.5; leave it out for 1 / 'scale_factor'."
    ratio = require_number("backoff_factor", backoff_factor, wanted, lambda n: SMALLEST_FLOAT32 <= n < 1, remedy)
    return to_float32(ratio)


def transition_tables(rule: AdaptiveRule) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Tabulate the rule over every event and every (window_index, growth_num, down_num).

    Comparisons in the graph would take twice as many kernels. The first index counts the places of the ladder, from the
    hidden window, for one event after the other; the other two are the counters.

    Returns:
        tuple of numpy.ndarray: the multiplier of the loss scale, float32 of shape (events * places, 4, 4), and
        (scale_window, window_index, growth_num, down_num) after the step, with 1 if it overflowed and 1 if a new window
        starts, int32 of shape (events * places, 4, 4, 6).
    """
    places, counter_values = range(HIDDEN_INDEX, len(rule.ladder)), range(COUNTER_LIMIT + 1)
    shape = len(EVENTS) * len(places), len(counter_values), len(counter_values)
    transitions = [
        (*_after(rule, event, *counters), event in ("drop", "tolerate"), event != "wait")
        for event, *counters in itertools.product(EVENTS, places, counter_values, counter_values)
    ]
    table = np.broadcast_to(np.repeat(rule.factors, len(places))[:, None, None], shape)
    return np.ascontiguousarray(table), np.array(transitions, np.int32).reshape(*shape, -1)


def _after(rule: AdaptiveRule, event: str, index: int, growth_num: int, down_num: int) -> tuple[int, int, int, int]:
    window = rule.window_at(index)
    state = LossScaleState(rule.min_loss_scale, window, index, growth_num, down_num)
    if event == "raise":
        state = rule.step(state._replace(clean_steps=window - 1), overflow=False)
    elif event == "drop":
        state = rule.step(state, overflow=True)
    return state.scale_window, state.window_index, state.growth_num, state.down_num


@functools.lru_cache(maxsize=256)
def _transitions(largest: int, smallest: int, shrink_from_min_window: bool) -> NDArray[np.int32]:
    return transition_tables(AdaptiveRule(2.0, largest, smallest, shrink_from_min_window=shrink_from_min_window))[1]
