"""Signs in the steps of a run that something is wrong: bad losses, an update that was too large, a very low scale."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindformers_adaptive.record.run import RecordedRun
from mindformers_adaptive.text.table import as_power_of_two

__all__ = ["AGAINST_BAD_LOSS", "LossJump", "is_applied_bad_loss", "last_error", "low_scale", "low_scale_of", "signs_of"]

# A loss has jumped if it is at least this many times as large as every loss before, and at least this large.
_JUMP, _LEAST = 10.0, 10.0
# If the losses of this many steps in a row are inf or NaN, right after an update, that update is to blame. After a bad
# batch, which is skipped, the next loss is finite again.
_BROKEN = 3
# If every loss scale above this one overflows, the scale is unusually low. With a mean as the loss, 2^10 and more hold.
_LOW_SCALE = 2.0**7
# This many steps in a row without overflow show that a loss scale holds.
_HELD = 20
# Look for a traceback in this many bytes at the end of a log.
_END_OF_LOG = 2**14

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


class LossJump:
    """Finds the update that was too large: after it the loss is far above all losses before, or stays inf or NaN.

    Examples:
        >>> jump = LossJump()
        >>> jump.check(1, 4.2) is None
        True
        >>> jump.check(2, 10402.0).partition(",")[0]
        'The loss rose to 1.04e+04 in step 2'
    """

    def __init__(self) -> None:
        self._largest, self._is_over = 0.0, False
        # The last step with a finite loss, whether its update was applied, and the steps since with inf or NaN.
        self._last_finite, self._is_applied = 0, False
        self._bad: list[int] = []

    def check(self, step: int, loss: float | None, overflow: bool | None = None) -> str | None:
        """Return a message after the first update that was too large, once; else None.

        Args:
            step (int): the number of the step.
            loss (float, optional): the loss of the step, None if unknown.
            overflow (bool, optional): whether the step was skipped. Default: None, not known.
        """
        if self._is_over or loss is None:
            return None
        if not math.isfinite(loss):
            self._bad.append(step)
            if len(self._bad) < _BROKEN or not self._is_applied:
                return None
            self._is_over = True
            return (
                f"The loss was finite in step {self._last_finite}, and is inf or NaN from step {self._bad[0]} on. Most "
                "often the update before that step was too large: lower the learning rate, or warm it up over more "
                "steps. Go back to a checkpoint before that step. If the data changes there, look at the data."
            )
        self._last_finite, self._is_applied, self._bad = step, not overflow, []
        largest, self._largest = self._largest, max(self._largest, abs(loss))
        if not largest or loss < max(_JUMP * largest, _LEAST):
            return None
        self._is_over = True
        return (
            f"The loss rose to {loss:.3g} in step {step}, {loss / largest:.3g} times the largest loss before. Most "
            "often the update before that step was too large: lower the learning rate, or warm it up over more steps. "
            "If the loss falls back at once, look at the batch of that step."
        )


def low_scale(steps: Iterable[tuple[float, bool]]) -> str | None:
    """Return a sentence if a run fell to an unusually low loss scale and stayed there; else None.

    Args:
        steps (Iterable): loss scale and overflow of each step.

    Examples:
        >>> low_scale([(256.0, True), *[(128.0, True)] * 2, *[(64.0, False)] * 20]).partition(",")[0]
        'Every loss scale above 2^6 overflowed'
    """
    held, overflowed, clean = 0.0, math.inf, 0
    for scale, overflow in steps:
        clean = 0 if overflow else clean + 1
        if overflow:
            overflowed = min(overflowed, scale)
        elif clean >= _HELD:
            held = max(held, scale)
    if not 1.0 < overflowed <= 2 * _LOW_SCALE or not 0.0 < held <= _LOW_SCALE:
        return None
    return (
        f"Every loss scale above {as_power_of_two(held)} overflowed, which is unusually low: most trainings hold 2^10 "
        "and more. Look for a layer whose weights or values are large, or a loss that is a sum instead of a mean."
    )


def signs_of(run: RecordedRun) -> list[str]:
    """Return a sentence for each sign in a recorded run: a jump of the loss, and an unusually low loss scale."""
    jump = LossJump()
    said = []
    if (column := run.column("loss")) is not None:
        # In a run, an unknown loss is nan, and inf stands for NaN too.
        losses = (None if math.isnan(loss) else loss for loss in column.tolist())
        steps = zip(run.step.tolist(), losses, run.overflow.tolist(), strict=True)
        said = [message for step in steps if (message := jump.check(*step))]
    low = low_scale_of(run)
    return [*said, *([low] if low else [])]


def low_scale_of(run: RecordedRun) -> str | None:
    """Return the sentence of :func:`low_scale` for a recorded run, or None."""
    known = run.position_known
    return low_scale(zip(run.loss_scale[known].tolist(), run.overflow[known].tolist(), strict=True))


def last_error(files: Sequence[str]) -> str | None:
    """Return the last line of the traceback in which the last log file ends; None if it does not end in a traceback.

    Args:
        files (Sequence[str]): the files of a run, in order of writing. A file that cannot be read has no traceback.
    """
    path = Path(files[-1]) if files else None
    if path is None or not path.is_file():
        return None
    try:
        with path.open("rb") as log:
            log.seek(max(path.stat().st_size - _END_OF_LOG, 0))
            text = log.read(_END_OF_LOG).decode("utf-8", "replace")
    except OSError:
        return None
    _, traceback, after = text.rpartition("Traceback (most recent call last):")
    lines = [line for line in after.splitlines() if line.strip()]
    # After a traceback comes one line that is not indented: the error. More such lines show that the run went on.
    errors = [line for line in lines if not line[0].isspace()]
    return errors[0].rstrip(". ")[:200] if traceback and len(errors) == 1 else None
