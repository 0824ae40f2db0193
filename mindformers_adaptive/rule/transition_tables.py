"""The rule as tables, for a device that looks a step up instead of comparing its way through it."""

import numpy as np
import numpy.typing as npt

from mindformers_adaptive.rule.adaptive_rule import COUNTER_LIMIT, HIDDEN_INDEX, AdaptiveRule, LossScaleState

__all__ = ["COUNTER_VALUES", "transition_tables"]

# growth_num and down_num run from 0 to the limit.
COUNTER_VALUES = COUNTER_LIMIT + 1


def transition_tables(rule: AdaptiveRule) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """Tabulate the rule over every event and every (window_index, growth_num, down_num).

    A chain of comparisons would cost the device twice as many kernels as one look-up.

    Returns:
        tuple of numpy.ndarray: the multiplier of the loss scale, float32 of shape (rows,), and the next
        (scale_window, window_index, growth_num, down_num), int32 of shape (rows, 4).
    """
    multipliers, transitions = [], []
    for event, multiplier in (("wait", 1.0), ("raise", rule.scale_factor), ("drop", rule.backoff_factor)):
        for index in range(HIDDEN_INDEX, len(rule.ladder)):
            for growth_num in range(COUNTER_VALUES):
                for down_num in range(COUNTER_VALUES):
                    window = rule.window_at(index)
                    state = LossScaleState(rule.min_loss_scale, window, index, growth_num, down_num)
                    if event == "raise":
                        state = rule.step(state._replace(clean_steps=window - 1), overflow=False)
                    elif event == "drop":
                        state = rule.step(state, overflow=True)
                    multipliers.append(multiplier)
                    transitions.append((state.scale_window, state.window_index, state.growth_num, state.down_num))
    return np.array(multipliers, np.float32), np.array(transitions, np.int32)
