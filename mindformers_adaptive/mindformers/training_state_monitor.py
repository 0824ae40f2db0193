"""MindFormers' ``TrainingStateMonitor``, changed so that it does not report skipped steps as anomalies."""

from __future__ import annotations

import math
from typing import Any

from mindformers.core.callback import callback

from mindformers_adaptive.monitor.step_reader import read_loss, read_overflow

__all__ = ["TrainingStateMonitor"]


class TrainingStateMonitor(callback.TrainingStateMonitor):
    """``mindformers.core.callback.TrainingStateMonitor`` that does not report skipped steps as anomalies.

    The arguments are those in the stock class. In a step that overflowed, the norm of the gradients is inf or NaN
    because the loss scale was too large; the step is skipped, and the loss scale falls. So in such a step

    - ``check_for_nan_in_loss_and_grad`` checks the loss only. A loss that is inf or NaN ends the training, as with the
      stock class: the loss scale cannot cause it, because it multiplies only the gradients.
    - ``use_skip_data_by_global_norm`` and ``check_for_global_norm`` do not count the norm as a spike. Consecutive
      spikes before this step still count.

    All other steps are checked as in MindFormers' own class.

    Raises:
        ValueError: in training, for a loss that is inf or NaN, with ``check_for_nan_in_loss_and_grad``.

    Examples:
        >>> from mindformers.tools.register import MindFormerRegister
        >>> from mindformers_adaptive import register
        >>> register()
        >>> MindFormerRegister.get_cls("callback", "TrainingStateMonitor") is TrainingStateMonitor
        True
    """

    # Set by the stock class.
    check_for_nan_in_loss_and_grad: bool

    def abnormal_global_norm_check(self, cb_params: Any) -> None:
        """Check the gradient norm of a step as MindFormers' own class does, unless the step overflowed."""
        if not _overflowed(cb_params.net_outputs):
            super().abnormal_global_norm_check(cb_params)

    def on_train_step_end(self, run_context: Any) -> None:
        """Check a step as MindFormers' own class does. If the step overflowed, check only its loss for inf and NaN."""
        checks = self.check_for_nan_in_loss_and_grad
        params = run_context.original_args()
        overflowed = _overflowed(params.net_outputs)
        self.check_for_nan_in_loss_and_grad = checks and not overflowed
        try:
            super().on_train_step_end(run_context)
        finally:
            self.check_for_nan_in_loss_and_grad = checks
        loss = read_loss(params.net_outputs[0]) if checks and overflowed else None
        if loss is not None and not math.isfinite(loss):
            raise ValueError(
                f"The loss of step {params.cur_step_num} is {loss}. No loss scale causes this, so training ends here. "
                "Check the data of this step and the weights. To skip such a step and go on, set "
                "'check_for_nan_in_loss_and_grad' to False."
            )


def _overflowed(outputs: Any) -> bool:
    # With three or more outputs, the second output is the overflow flag. A user's network with only two outputs may
    # return something else beside its loss, so do not take its second output for the flag.
    return isinstance(outputs, tuple | list) and len(outputs) > 2 and bool(read_overflow(outputs))
