"""What a checkpoint may hold for the update cell, and how a state that cannot be used as it is becomes one that can."""

import math
from collections.abc import Mapping

from mindformers_adaptive.rule.adaptive_rule import COUNTER_LIMIT, HIDDEN_INDEX, AdaptiveRule
from mindformers_adaptive.rule.ladder import HIDDEN_WINDOW

__all__ = ["PARAMETER_NAMES", "holds_no_window", "repair_loss_scale", "repair_state"]

# The attributes of the update cell, and their names in a checkpoint. The first six are MindFormers' own.
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


def holds_no_window(state: Mapping[str, int], start_window: int) -> bool:
    """Tell whether a restored state has step counters but no window, as that of MindSpore's dynamic cell.

    An overflow or a raise leaves a trace in the counters of this package's cell; a state in which one happened, to
    judge by its steps, and left no trace was counted by another.

    Args:
        state (dict[str, int]): as ``AdaptiveLossScaleUpdateCell.state()`` returns it.
        start_window (int): the window that the cell was made with, in steps.

    Returns:
        bool.

    Examples:
        >>> from mindformers_adaptive.rule.adaptive_rule import AdaptiveRule
        >>> fresh = {"scale_window": 20, "growth_num": 0, "down_num": 0, "skipped_steps": 0}
        >>> holds_no_window({**fresh, "cur_iter": 31, "last_overflow_iter": 16}, start_window=20)
        True
        >>> holds_no_window({**fresh, "cur_iter": 11, "last_overflow_iter": 0}, start_window=20)
        False
    """
    untouched = state["growth_num"] == state["down_num"] == state["skipped_steps"] == 0
    clean_steps = state["cur_iter"] - 1 - state["last_overflow_iter"]
    something_happened = state["last_overflow_iter"] != 0 or clean_steps >= start_window
    return untouched and state["scale_window"] == start_window and something_happened


def repair_loss_scale(rule: AdaptiveRule, loss_scale: float, name: str) -> tuple[float, str | None]:
    """Return a loss scale that the rule can go on with, and a sentence if it is not the restored one.

    Args:
        rule (AdaptiveRule): the rule that goes on.
        loss_scale (float): the restored loss scale.
        name (str): that of the Parameter that holds it.

    Raises:
        ValueError: if no training can have had this scale.

    Examples:
        >>> from mindformers_adaptive.rule.adaptive_rule import AdaptiveRule
        >>> repair_loss_scale(AdaptiveRule(min_loss_scale=8.0), 2.0, "scale_sense")[0]
        8.0
    """
    if not (math.isfinite(loss_scale) and loss_scale > 0):
        raise ValueError(
            f"The checkpoint has '{name}' {loss_scale}; a loss scale must be finite and above 0. Resume from another "
            f"checkpoint, or set the Parameter '{name}'."
        )
    bounded = min(max(loss_scale, rule.min_loss_scale), rule.max_loss_scale)
    if bounded == loss_scale:
        return loss_scale, None
    return bounded, (
        f"The checkpoint has '{name}' {loss_scale}, which is not between 'min_loss_scale' and 'max_loss_scale': "
        f"{bounded} is used."
    )


def repair_state(rule: AdaptiveRule, state: Mapping[str, int]) -> tuple[dict[str, int], list[str]]:
    """Return a state that the rule can go on with, and a sentence for each thing that had to be changed.

    A window that the ladder does not have becomes the nearest that it has; a window or a counter that no run can have
    reached is put where it does least harm.

    Args:
        rule (AdaptiveRule): the rule that goes on.
        state (dict[str, int]): as ``AdaptiveLossScaleUpdateCell.state()`` returns it.

    Returns:
        tuple[dict[str, int], list[str]]; the list is empty where nothing had to be changed.

    Examples:
        >>> from mindformers_adaptive.rule.adaptive_rule import AdaptiveRule
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

    limits = {"growth_num": COUNTER_LIMIT, "down_num": COUNTER_LIMIT}
    if "hysteresis_budget" in state:
        limits["hysteresis_budget"] = rule.hysteresis
    for name, limit in limits.items():
        if not 0 <= state[name] <= limit:
            repaired[name] = min(max(state[name], 0), limit)
            problems.append(_replaced(name, state, f"must lie between 0 and {limit}", repaired[name]))

    if state["cur_iter"] < 1:
        repaired["cur_iter"] = 1
        problems.append(_replaced("cur_iter", state, "must be at least 1", 1))
    if not 0 <= state["last_overflow_iter"] < repaired["cur_iter"]:
        repaired["last_overflow_iter"] = repaired["cur_iter"] - 1
        reason = f"must lie between 0 and {repaired['cur_iter'] - 1}, the last step"
        problems.append(_replaced("last_overflow_iter", state, reason, repaired["last_overflow_iter"]))
    if state["skipped_steps"] < 0:
        repaired["skipped_steps"] = 0
        problems.append(_replaced("skipped_steps", state, "must not be negative", 0))
    if not 0 <= state["consecutive_overflows"] <= repaired["skipped_steps"]:
        repaired["consecutive_overflows"] = 0
        reason = f"must lie between 0 and {repaired['skipped_steps']}, the number of skipped steps"
        problems.append(_replaced("consecutive_overflows", state, reason, 0))
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


def _replaced(name: str, state: Mapping[str, int], reason: str, value: int) -> str:
    return f"The checkpoint has '{PARAMETER_NAMES[name]}' {state[name]}, which {reason}: {value} is used."
