"""The rule as tables: the device looks up a step instead of computing it."""

from typing import Any

import numpy as np

from mindformers_adaptive.rules.adaptive import COUNTER_LIMIT, HIDDEN_INDEX, AdaptiveRule, LossScaleState

__all__ = ["EVENTS", "transition_tables"]

# What can happen in a step: a clean step within the window, a full window, an overflow that drops the scale, and one
# that hysteresis tolerates.
EVENTS = ("wait", "raise", "drop", "tolerate")

_COUNTER_VALUES = range(COUNTER_LIMIT + 1)


def transition_tables(rule: AdaptiveRule) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Tabulate the rule over every event and every (window_index, growth_num, down_num).

    Comparisons in the graph would take twice as many kernels. The first index counts the places of the ladder, from the
    hidden window, for one event after the other; the other two are the counters.

    Returns:
        tuple of numpy.ndarray: the multiplier of the loss scale, float32 of shape (events * places, 4, 4), and
        (scale_window, window_index, growth_num, down_num) after the step, with 1 if it overflowed and 1 if a new window
        starts, int32 of shape (events * places, 4, 4, 6).
    """
    multipliers = {"wait": 1.0, "raise": rule.scale_factor, "drop": rule.backoff_factor, "tolerate": 1.0}
    places = range(HIDDEN_INDEX, len(rule.ladder))
    shape = len(EVENTS) * len(places), len(_COUNTER_VALUES), len(_COUNTER_VALUES)
    transitions = [
        (*_after(rule, event, index, growth_num, down_num), event in ("drop", "tolerate"), event != "wait")
        for event in EVENTS
        for index in places
        for growth_num in _COUNTER_VALUES
        for down_num in _COUNTER_VALUES
    ]
    factors = np.array([multipliers[event] for event in EVENTS], np.float32)
    table = np.broadcast_to(np.repeat(factors, len(places))[:, None, None], shape)
    return np.ascontiguousarray(table), np.array(transitions, np.int32).reshape(*shape, -1)


def _after(rule: AdaptiveRule, event: str, index: int, growth_num: int, down_num: int) -> tuple[int, int, int, int]:
    window = rule.window_at(index)
    state = LossScaleState(rule.min_loss_scale, window, index, growth_num, down_num)
    if event == "raise":
        state = rule.step(state._replace(clean_steps=window - 1), overflow=False)
    elif event == "drop":
        state = rule.step(state, overflow=True)
    return state.scale_window, state.window_index, state.growth_num, state.down_num
