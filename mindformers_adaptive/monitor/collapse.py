"""When consecutive overflows mean that the loss scale has collapsed, and the message for it."""

import math
from collections.abc import Mapping

from mindformers_adaptive.rules.checks import require_integer

__all__ = ["CollapseDetector"]


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
            remedy, unit = "Give 1 or more; None allows any number.", "number of steps"
            require_integer("max_consecutive_overflows", max_consecutive_overflows, 1, remedy, unit=unit)
        self._limit = max_consecutive_overflows
        self._reported = 0

    def check(self, entry: Mapping[str, object]) -> str | None:
        """Return a message if a step reaches the limit or a multiple of it, else None.

        Args:
            entry (Mapping): a step, with ``step``, ``loss``, ``loss_scale``, ``next_loss_scale`` and
                ``consecutive_overflows``.
        """
        consecutive = entry["consecutive_overflows"]
        if self._limit is None or not isinstance(consecutive, int):
            return None
        times = consecutive // self._limit
        is_new = times > self._reported
        self._reported = times
        return _message(entry, consecutive) if is_new else None


def _message(entry: Mapping[str, object], consecutive: int) -> str:
    scale, following, loss = (entry.get(name) for name in ("loss_scale", "next_loss_scale", "loss"))
    if isinstance(loss, float) and not math.isfinite(loss):
        cause = (
            f"The loss itself is {loss}, which no loss scale can help: look for NaN or inf in the data and in the "
            "weights, such as those of the checkpoint that was loaded."
        )
    elif scale == following:
        cause = (
            "The loss scale falls no further (min_loss_scale), so the gradients overflow as they are: look for NaN or "
            "inf in the data and in the weights."
        )
    else:
        cause = "The loss scale is still falling: a lower loss_scale_value would have skipped fewer steps."
    return (
        f"Loss scaling has collapsed: {consecutive} steps in a row have overflowed up to step {entry['step']}, the "
        f"last of them at loss scale {following if scale is None else scale}. None of them has changed a weight. "
        f"{cause} What else usually helps: a lower learning rate or a longer warm-up, gradient clipping, softmax and "
        "normalization layers in float32 (softmax_compute_type, layernorm_compute_type), a min_loss_scale below 1, and "
        "going on from a checkpoint before the overflows began."
    )
