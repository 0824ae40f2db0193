"""Signs in the losses of a run that something is wrong: a bad loss in an applied step, or a sudden rise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["AGAINST_BAD_LOSS", "is_applied_bad_loss"]

AGAINST_BAD_LOSS = (
    "To end a training at such a step, set check_for_nan_in_loss_and_grad: True in the YAML file; in a program, raise "
    "an error in a callback."
)


def is_applied_bad_loss(step: Mapping[str, Any]) -> bool:
    """Return whether a step changed the weights although its loss was inf or NaN.

    This happens if the gradients are finite nevertheless, because a train step skips an update only for its gradients.

    Args:
        step (Mapping): ``loss``, ``overflow`` and ``dropped_by_norm`` of the step, None if unknown.

    Examples:
        >>> is_applied_bad_loss({"loss": math.nan, "overflow": False})
        True
        >>> is_applied_bad_loss({"loss": math.nan, "overflow": True})
        False
    """
    loss = step.get("loss")
    is_bad = loss is not None and not math.isfinite(loss)
    return is_bad and step.get("overflow") is False and not step.get("dropped_by_norm")
