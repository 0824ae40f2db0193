"""What is wrong with a restored state of the gradient-guided update cell."""

import math
from collections.abc import Mapping
from typing import Any

from mindformers_adaptive.rules.guided import MOST_CONTRADICTIONS, GuidedRule
from mindformers_adaptive.rules.guided_names import PLACES
from mindformers_adaptive.rules.restored_state import STEP_LIMIT

__all__ = ["find_state_problem"]

# Far beyond log2 of any float32 number.
_LARGEST_EXPONENT = 512


def find_state_problem(rule: GuidedRule, state: Mapping[str, Any]) -> str | None:
    """Say why a rule cannot go on from a restored state, or return None.

    Args:
        rule (GuidedRule): the rule that goes on.
        state (dict): as ``GradientGuidedLossScaleUpdateCell.state()`` returns it.

    Examples:
        >>> rule = GuidedRule()
        >>> state = {**rule.start(2.0**16)._asdict(), "cur_iter": 8, "last_overflow_iter": 0}
        >>> find_state_problem(rule, state)
        'The checkpoint has 7 steps but no state of gradient-guided scaling'
        >>> find_state_problem(rule, {**state, "cur_iter": 1}) is None
        True
    """
    steps = state["cur_iter"] - 1
    if not 0 <= steps < STEP_LIMIT or not 0 <= state["consecutive_overflows"] <= state["skipped_steps"] <= steps:
        return "The checkpoint has step counters that no run can reach"
    own = ("observed_steps", "clean_steps", "first_exponent", "contradictions")
    if steps and not any(state[name] for name in own):
        return f"The checkpoint has {steps} steps but no state of gradient-guided scaling"
    sound = (
        math.isfinite(state["level"])
        and len(state["overflow_rate"]) == PLACES
        and all(0.0 <= rate <= 1.0 for rate in state["overflow_rate"])
        and 0 <= state["observed_steps"] <= rule.patience
        and rule.smallest_window <= state["scale_window"] <= rule.largest_window
        and 0 <= state["clean_steps"] <= rule.largest_window
        and 0 <= state["contradictions"] <= MOST_CONTRADICTIONS
        and all(abs(state[name]) <= _LARGEST_EXPONENT for name in ("base", "limit", "first_exponent"))
        and {state["bound"], state["trial"]} <= {0, 1}
    )
    return None if sound else "The checkpoint has a state of gradient-guided scaling that this cell cannot have"
