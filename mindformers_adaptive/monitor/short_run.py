"""A warning for a training that is shorter than its scale window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["too_short_for_window"]


def too_short_for_window(
    params: Mapping[str, Any], scale_window: int | None, steps_before: int, update_cell: object
) -> str | None:
    """Return a warning for a training that ends before its loss scale can rise, else None.

    Args:
        params (Mapping): what MindSpore gives to a callback; ``epoch_num`` and ``batch_num`` tell the number of steps.
        scale_window (int, optional): steps without overflow before the scale rises; None if unknown.
        steps_before (int): steps taken before; after a resume nothing is said, because the window began earlier.
        update_cell (Cell): one that is given the largest gradient raises its scale without a window.

    Examples:
        >>> too_short_for_window({"epoch_num": 1, "batch_num": 25}, 1000, 0, None).partition(":")[0]
        'The loss scale cannot rise in this training'
        >>> too_short_for_window({"epoch_num": 40, "batch_num": 25}, 1000, 0, None) is None
        True
    """
    steps = (params.get("epoch_num") or 0) * (params.get("batch_num") or 0)
    if scale_window is None or steps_before or hasattr(update_cell, "largest_gradient"):
        return None
    if not 0 < steps < scale_window:
        return None
    return (
        f"The loss scale cannot rise in this training: it has {steps} steps, and the scale rises after {scale_window} "
        "steps without an overflow. It trains on from where it starts, and can only fall. Start at the scale that "
        f"'adaptive-loss-scale find' says, or set 'scale_window' and 'min_scale_window' below {steps}."
    )
