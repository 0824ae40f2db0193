"""What the log says of a run: overflows, a collapsed scale, and a window that is too long."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mindformers_adaptive.rules.checks import require_integer

__all__ = ["BadLossDetector", "CollapseDetector", "none_applied", "too_short_for_window"]

_WHY = "'adaptive-loss-scale why --config FILE'"


class CollapseDetector:
    """Watches the number of consecutive overflows of a run.

    Args:
        max_consecutive_overflows (int, optional): how many are a collapse, at least 1. None: any number is fine.

    Examples:
        >>> detector = CollapseDetector(max_consecutive_overflows=2)
        >>> step = {"step": 1, "overflow": True, "loss_scale": 2.0, "next_loss_scale": 1.0, "loss": 3.5}
        >>> detector.check(step | {"consecutive_overflows": 1})
        >>> message = detector.check(step | {"step": 2, "consecutive_overflows": 2})
        >>> message.partition(":")[0]
        'Loss scaling has collapsed'
    """

    def __init__(self, max_consecutive_overflows: int | None) -> None:
        if max_consecutive_overflows is not None:
            remedy, unit = "Give 1 or more; null, in Python None, allows any number.", "number of steps"
            require_integer("max_consecutive_overflows", max_consecutive_overflows, 1, remedy, unit=unit)
        self._limit = max_consecutive_overflows or math.inf
        self._reported = 0.0

    def check(self, entry: Mapping[str, Any]) -> str | None:
        """Return a message if a step reaches the limit or a multiple of it, else None.

        Args:
            entry (Mapping): a step, with ``step``, ``loss``, ``loss_scale``, ``next_loss_scale`` and
                ``consecutive_overflows``.
        """
        before, self._reported = self._reported, entry["consecutive_overflows"] // self._limit
        return _collapse_message(entry) if self._reported > before else None


def _collapse_message(entry: Mapping[str, Any]) -> str:
    scale, next_scale, loss = entry["loss_scale"], entry["next_loss_scale"], entry["loss"]
    if loss is not None and not math.isfinite(loss):
        cause = (
            f"The loss itself is {loss}, which no loss scale can help: look for NaN or inf in the data and in the "
            "weights, such as those of the checkpoint that was loaded."
        )
    elif scale == next_scale and scale > 1:
        cause = (
            "The loss scale stays where it is, although a lower one may fit: lower what holds it there, "
            "min_loss_scale, hysteresis or a fixed scale."
        )
    elif scale == next_scale:
        cause = (
            "The loss scale falls no further (min_loss_scale), so the gradients overflow as they are: look for NaN or "
            "inf in the data and in the weights."
        )
    else:
        cause = "The loss scale is still falling: a lower loss_scale_value would have skipped fewer steps."
    return (
        f"Loss scaling has collapsed: {entry['consecutive_overflows']} steps in a row have overflowed up to step "
        f"{entry['step']}, the last of them at loss scale {next_scale if scale is None else scale}. None of them has "
        f"changed a weight. {cause} {_WHY} names the layer that overflows, and tries what could help. That usually is: "
        "a lower learning rate or a longer warm-up, gradient clipping, softmax and normalization layers in float32 "
        "(softmax_compute_type, layernorm_compute_type), a min_loss_scale below 1, and going on from a checkpoint "
        "before the overflows began."
    )


class BadLossDetector:
    """Makes one message of the first loss of a run that is inf or NaN.

    Examples:
        >>> detector = BadLossDetector()
        >>> detector.check({"step": 1, "loss": 2.5})
        >>> detector.check({"step": 2, "loss": math.nan}).partition(",")[0]
        'The loss of step 2 is nan'
        >>> detector.check({"step": 3, "loss": math.nan})
    """

    def __init__(self) -> None:
        self._reported = False

    def check(self, entry: Mapping[str, Any]) -> str | None:
        """Return the message for a step, or None.

        Args:
            entry (Mapping): a step, with ``step`` and ``loss``, which is None where it is not known.
        """
        loss = entry["loss"]
        if self._reported or loss is None or math.isfinite(loss):
            return None
        self._reported = True
        return (
            f"The loss of step {entry['step']} is {loss}, and no loss scale can help: it is so before it is scaled. "
            f"{_WHY} names the layer that overflows, and tries what could help."
        )


def none_applied(steps: int) -> str:
    """Return a warning for a training that ends after so many steps, all of which were skipped."""
    return (
        f"Loss scaling: all {steps} steps of this training overflowed and were skipped. No weight has changed. {_WHY} "
        "names the layer that overflows, and tries what could help."
    )


def too_short_for_window(params: Mapping[str, Any], scale_window: int | None, steps_before: int) -> str | None:
    """Return a warning for a training that ends before its loss scale can rise, else None.

    Args:
        params (Mapping): what MindSpore gives to a callback; ``epoch_num`` and ``batch_num`` tell the number of steps.
        scale_window (int, optional): steps without overflow before the scale rises; None if unknown.
        steps_before (int): steps taken before; after a resume nothing is said, because the window began earlier.

    Examples:
        >>> too_short_for_window({"epoch_num": 1, "batch_num": 25}, 1000, 0).partition(":")[0]
        'The loss scale cannot rise in this training'
        >>> too_short_for_window({"epoch_num": 40, "batch_num": 25}, 1000, 0) is None
        True
    """
    steps = (params.get("epoch_num") or 0) * (params.get("batch_num") or 0)
    if scale_window is None or steps_before or not 0 < steps < scale_window:
        return None
    return (
        f"The loss scale cannot rise in this training: it has {steps} steps, and the scale rises after {scale_window} "
        "steps without an overflow. It trains on from where it starts, and can only fall. Start at the scale that "
        f"'adaptive-loss-scale find' says, or set 'scale_window' and 'min_scale_window' below {steps}."
    )
