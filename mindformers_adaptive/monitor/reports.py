"""Messages in the log of a run: on a bad loss, on a collapsed loss scale, and on a scale window that is too long."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from mindformers_adaptive.record.run_folder import why_command
from mindformers_adaptive.record.symptoms import AGAINST_BAD_LOSS, is_applied_bad_loss
from mindformers_adaptive.rules.checks import require_integer

__all__ = [
    "BadLossDetector",
    "CollapseDetector",
    "collapse_headline",
    "none_applied",
    "too_short_for_window",
    "way_to_the_cause",
]


def way_to_the_cause(callbacks: Iterable[Any] = (), batch: str = "") -> str:
    """Return the sentence that says how to find the layer that overflows and a remedy, with a command to paste.

    Args:
        callbacks (Iterable[Callback]): the callbacks of the training. If the training can be repeated, one callback
            has its output folder as ``run_folder``.
        batch (str): the file of the batch, if the batch was saved. Default: "".
    """
    folder = next(filter(None, (getattr(callback, "run_folder", None) for callback in callbacks)), None)
    if folder is not None:
        return f"Find the layer and a remedy: {why_command(folder)}"
    in_program = f"print(explain_overflow(train_step, {repr(batch) if batch else 'batch'}))"
    return f"Find the layer and a remedy: in a program, {in_program}; with a YAML file, {why_command(None)}"


class CollapseDetector:
    """Reports when a run has too many consecutive overflows.

    Args:
        max_consecutive_overflows (int, optional): how many consecutive overflows are a collapse, at least 1; None for
            no limit.
        way (str): the advice at the end of the message, see :func:`way_to_the_cause`. Default: "".

    Examples:
        >>> detector = CollapseDetector(max_consecutive_overflows=2)
        >>> step = {"step": 1, "overflow": True, "loss_scale": 2.0, "next_loss_scale": 1.0, "loss": 3.5}
        >>> detector.check(step | {"consecutive_overflows": 1})
        >>> message = detector.check(step | {"step": 2, "consecutive_overflows": 2})
        >>> message.partition(":")[0]
        'Loss scaling has collapsed'
    """

    def __init__(self, max_consecutive_overflows: int | None, way: str = "") -> None:
        if max_consecutive_overflows is not None:
            remedy, unit = "Give 1 or more; null, in Python None, allows any number.", "number of steps"
            require_integer("max_consecutive_overflows", max_consecutive_overflows, 1, remedy, unit=unit)
        self._limit = max_consecutive_overflows or math.inf
        self._reported, self._has_said = 0.0, False
        self.way = way

    def check(self, entry: Mapping[str, Any]) -> str | None:
        """Return a message if a step reaches the limit of consecutive overflows or a multiple of the limit, else None.

        Args:
            entry (Mapping): a step, with ``step``, ``loss``, ``loss_scale``, ``next_loss_scale`` and
                ``consecutive_overflows``.
        """
        before, self._reported = self._reported, entry["consecutive_overflows"] // self._limit
        if self._reported <= before:
            return None
        # The whole message is long, so print it only once.
        has_said, self._has_said = self._has_said, True
        return collapse_headline(entry) if has_said else _collapse_message(entry, self.way)


def collapse_headline(entry: Mapping[str, Any]) -> str:
    """Return the line that says how many steps in a row have overflowed; see :meth:`CollapseDetector.check`."""
    scale = entry["next_loss_scale"] if entry["loss_scale"] is None else entry["loss_scale"]
    return (
        f"Loss scaling has collapsed: {entry['consecutive_overflows']} steps in a row have overflowed up to step "
        f"{entry['step']}, the last of them at loss scale {scale}. No weight has changed since."
    )


def _collapse_message(entry: Mapping[str, Any], way: str) -> str:
    scale, next_scale, loss = entry["loss_scale"], entry["next_loss_scale"], entry["loss"]
    if loss is not None and not math.isfinite(loss):
        cause = (
            f"The loss itself is {loss}, which no loss scale can help: look for NaN or inf in the data and in the "
            "weights, such as the weights of the checkpoint that was loaded."
        )
    elif scale == next_scale and scale > 1:
        # A rule that follows the gradients has no hysteresis.
        held = "min_loss_scale" if "gradient_format" in entry else "min_loss_scale, hysteresis"
        cause = (
            f"The loss scale stays where it is, although a lower one may fit: lower what holds it there, {held} or a "
            "fixed scale."
        )
    elif scale == next_scale:
        cause = (
            "The loss scale falls no further (min_loss_scale), so the gradients overflow as they are: look for NaN or "
            "inf in the data and in the weights."
        )
    else:
        cause = "The loss scale is still falling: a lower loss_scale_value would have skipped fewer steps."
    return (
        f"{collapse_headline(entry)} {cause} Usual remedies: a lower learning rate or a longer warm-up, gradient "
        "clipping, softmax and normalization layers in float32 (softmax_compute_type, layernorm_compute_type), a "
        f"min_loss_scale below 1, and going on from a checkpoint before the overflows began. {way}"
    )


class BadLossDetector:
    """Reports the first loss of a run that is inf or NaN, the first such step that was applied, and the end of them.

    Args:
        way (str): the advice in the message, see :func:`way_to_the_cause`.
        batch (str): the file with the batch of the first bad step, if that batch is saved. Default: "".

    Examples:
        >>> detector = BadLossDetector("...")
        >>> detector.check({"step": 1, "loss": 2.5})
        >>> detector.check({"step": 2, "loss": math.nan}).partition(",")[0]
        'The loss of step 2 is nan'
        >>> detector.check({"step": 3, "loss": 2.5}).partition(":")[0]
        'The loss was nan in step 2 only'
    """

    def __init__(self, way: str, batch: str = "") -> None:
        self._way, self._batch = way, batch or "LossScaleMonitor with explain: True saves it"
        self._first: Mapping[str, Any] | None = None
        self._is_over = self._has_changed = False

    def check(self, entry: Mapping[str, Any]) -> str | None:
        """Return the message about the loss of a step, or None if there is nothing to report.

        Args:
            entry (Mapping): a step, with ``step`` and ``loss``, and ``overflow`` if known; an unknown loss is None.
        """
        loss, first = entry["loss"], self._first
        changes = ""
        if not self._has_changed and is_applied_bad_loss(entry):
            self._has_changed = True
            changes = (
                f" Step {entry['step']} was not skipped, because its gradients did not overflow: the weights have "
                f"changed. Go back to a checkpoint before this step. {AGAINST_BAD_LOSS}"
            )
            if first is not None:
                return f"The loss of step {entry['step']} is {loss}.{changes}"
        if loss is None or self._is_over or math.isfinite(loss) is (first is None):
            return None
        if first is None:
            self._first = entry
            return (
                f"The loss of step {entry['step']} is {loss}, and no loss scale can help: the loss has this value "
                f"before it is scaled.{changes} {self._way}"
            )
        self._is_over = True
        steps = f"step {first['step']} only"
        if entry["step"] - first["step"] > 1:
            steps = f"steps {first['step']} to {entry['step'] - 1} only"
        return f"The loss was {first['loss']} in {steps}: look at that batch ({self._batch})."


def none_applied(steps: int, way: str) -> str:
    """Return a warning for a training that ends after ``steps`` steps, all of which were skipped."""
    return f"Loss scaling: all {steps} steps of this training overflowed and were skipped. No weight has changed. {way}"


def too_short_for_window(params: Mapping[str, Any], scale_window: int | None, steps_before: int) -> str | None:
    """Return a warning for a training that ends before its loss scale can rise, else None.

    Args:
        params (Mapping): what MindSpore gives to a callback; ``epoch_num`` and ``batch_num`` tell the number of steps.
        scale_window (int, optional): steps without overflow before the scale rises; None if unknown.
        steps_before (int): steps taken before; after a resume there is no warning, as the window began earlier.

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
