"""The state of the update cell: its names in a checkpoint, its place in the rule, and repair of what was restored."""

import math
import warnings
from collections.abc import Mapping

from mindformers_adaptive.rules.adaptive import COUNTER_LIMIT, HIDDEN_INDEX, AdaptiveRule, LossScaleState
from mindformers_adaptive.rules.ladder import HIDDEN_WINDOW

__all__ = [
    "PARAMETER_NAMES",
    "STEP_LIMIT",
    "from_rule_state",
    "is_foreign_state",
    "repair_loss_scale",
    "repair_state",
    "to_rule_state",
]

# The Parameters of the update cell by attribute, and their names in a checkpoint. The first six are MindFormers' own.
PARAMETER_NAMES = {
    "scale_window": "scale_window",
    "window_index": "list_index",
    "growth_num": "scale_window_up_count",
    "down_num": "scale_window_down_count",
    "cur_iter": "current_iterator_step",
    "last_overflow_iter": "last_overflow_iterator_step",
    "skipped_steps": "skipped_steps",
    "consecutive_overflows": "consecutive_overflows",
    "hysteresis_budget": "hysteresis_budget",
}

# Steps are counted up to here: about 34 years at a step a second, and far from where int32 would wrap.
STEP_LIMIT = 2**30


def from_rule_state(rule: AdaptiveRule, state: LossScaleState, steps: int) -> dict[str, int]:
    """Return what the update cell holds after so many steps that led the rule to this state.

    Args:
        rule (AdaptiveRule): the rule that took the steps.
        state (LossScaleState): its state after them.
        steps (int): how many steps were taken, 0 for the start.

    Returns:
        dict[str, int], as ``AdaptiveLossScaleUpdateCell.state()`` returns it; ``hysteresis_budget`` only where the
        rule's hysteresis is above 1. Without the loss scale. ``PARAMETER_NAMES`` has the names in a checkpoint.

    Examples:
        >>> from mindformers_adaptive.rules.adaptive import AdaptiveRule
        >>> rule = AdaptiveRule()
        >>> counters = from_rule_state(rule, rule.step(rule.start(2.0**16), overflow=False), steps=1)
        >>> counters["cur_iter"], counters["last_overflow_iter"]
        (2, 0)
        >>> to_rule_state(rule, 2.0**16, counters).clean_steps
        1
    """
    steps = min(steps, STEP_LIMIT - 1)
    values = {**state._asdict(), "cur_iter": steps + 1, "last_overflow_iter": steps - state.clean_steps}
    names = [name for name in PARAMETER_NAMES if name != "hysteresis_budget" or rule.hysteresis > 1]
    return {name: min(values[name], STEP_LIMIT) for name in names}


def to_rule_state(rule: AdaptiveRule, loss_scale: float, counters: Mapping[str, int]) -> LossScaleState:
    """Return the state of the rule that :func:`from_rule_state` would turn into these counters."""
    known = {name: counters[name] for name in LossScaleState._fields if name in counters}
    clean_steps = counters["cur_iter"] - 1 - counters["last_overflow_iter"]
    return LossScaleState(loss_scale, **{"hysteresis_budget": rule.hysteresis, **known}, clean_steps=clean_steps)


def is_foreign_state(state: Mapping[str, int], start_window: int) -> bool:
    """Return whether a restored state has step counters but no window, as that of MindSpore's dynamic cell.

    In a state of this package's cell every overflow and every raise shows in the other counters too. A state whose
    step counters say that one happened, and whose other counters are untouched, comes from another cell.

    Args:
        state (dict[str, int]): as ``AdaptiveLossScaleUpdateCell.state()`` returns it.
        start_window (int): the window that the cell was made with, in steps.
    """
    untouched = state["growth_num"] == state["down_num"] == state["skipped_steps"] == 0
    clean_steps = state["cur_iter"] - 1 - state["last_overflow_iter"]
    something_happened = state["last_overflow_iter"] != 0 or clean_steps >= start_window
    return untouched and state["scale_window"] == start_window and something_happened


def repair_loss_scale(rule: AdaptiveRule, loss_scale: float, name: str) -> float:
    """Return a restored loss scale, moved to the nearer bound with a warning if it is out of bounds.

    Args:
        rule (AdaptiveRule): the rule that goes on.
        loss_scale (float): the restored loss scale.
        name (str): the Parameter or argument that holds it.

    Raises:
        ValueError: if it is not finite and above 0.
    """
    if not (math.isfinite(loss_scale) and loss_scale > 0):
        raise ValueError(
            f"The checkpoint has '{name}' {loss_scale}; a loss scale must be finite and above 0. Resume from another "
            f"checkpoint, or set '{name}'."
        )
    bounded = min(max(loss_scale, rule.min_loss_scale), rule.max_loss_scale)
    if bounded != loss_scale:
        warnings.warn(
            f"The checkpoint has '{name}' {loss_scale}, which is not between 'min_loss_scale' and 'max_loss_scale': "
            f"{bounded} is used.",
            stacklevel=3,
        )
    return bounded


def repair_state(rule: AdaptiveRule, state: Mapping[str, int]) -> tuple[dict[str, int], list[str]]:
    """Return a state that the rule can go on with, and a sentence for each thing that had to be changed.

    A window that is not on the ladder becomes the nearest one that is. A window or a counter that no run can reach is
    set to the nearest possible value.

    Args:
        rule (AdaptiveRule): the rule that goes on.
        state (dict[str, int]): as ``AdaptiveLossScaleUpdateCell.state()`` returns it.

    Returns:
        tuple[dict[str, int], list[str]]; the list is empty where nothing had to be changed.

    Examples:
        >>> from mindformers_adaptive.rules.adaptive import AdaptiveRule
        >>> rule = AdaptiveRule(max_scale_window=100)
        >>> counters = {"growth_num": 1, "down_num": 0, "cur_iter": 700, "last_overflow_iter": 650}
        >>> counters |= {"skipped_steps": 9, "consecutive_overflows": 0}
        >>> repaired, problems = repair_state(rule, {"scale_window": 500, "window_index": 6, **counters})
        >>> repaired["scale_window"], repaired["window_index"], len(problems)
        (100, 4, 1)
    """
    repaired, problems = dict(state), []
    index, problem = _place_on_the_ladder(rule, state["scale_window"], state["window_index"])
    repaired["scale_window"], repaired["window_index"] = rule.window_at(index), index
    if problem:
        problems.append(problem)

    def require(name: str, least: int, most: int, otherwise: int, meaning: str = "") -> None:
        if not least <= state[name] <= most:
            repaired[name] = otherwise
            problems.append(
                f"The checkpoint has '{PARAMETER_NAMES[name]}' {state[name]}, which must lie between {least} and {most}"
                f"{meaning}: {otherwise} is used."
            )

    limits = {"growth_num": COUNTER_LIMIT, "down_num": COUNTER_LIMIT, "hysteresis_budget": rule.hysteresis}
    for name, limit in limits.items():
        if name in state:
            require(name, 0, limit, min(max(state[name], 0), limit))
    require("cur_iter", 1, STEP_LIMIT, 1)
    last_step = repaired["cur_iter"] - 1
    require("last_overflow_iter", 0, last_step, last_step, ", the last step")
    require("skipped_steps", 0, STEP_LIMIT, 0)
    require("consecutive_overflows", 0, repaired["skipped_steps"], 0, ", the number of skipped steps")
    return repaired, problems


def _place_on_the_ladder(rule: AdaptiveRule, window: int, index: int) -> tuple[int, str | None]:
    """Return the index to go on with and, where it is not simply the one restored, a sentence about it."""
    ladder = rule.ladder
    on_the_ladder = HIDDEN_INDEX <= index < len(ladder)
    if on_the_ladder and rule.window_at(index) == window:
        return index, None
    restored = f"The checkpoint has 'scale_window' {window} with 'list_index' {index}, but the ladder is {ladder}"
    if window > HIDDEN_WINDOW or window in ladder:
        nearest = min(range(len(ladder)), key=lambda place: abs(ladder[place] - window))
        return nearest, f"{restored}: training goes on at its nearest window, {ladder[nearest]} (index {nearest})."
    if window == HIDDEN_WINDOW:
        return HIDDEN_INDEX, f"{restored}: training goes on in the hidden window 1 (index -1)."
    if on_the_ladder:
        return index, f"{restored}, and a window is at least 1: the index is kept, with its window."
    return 0, f"{restored}, and neither can be used: training goes on at the smallest window, {ladder[0]} (index 0)."
