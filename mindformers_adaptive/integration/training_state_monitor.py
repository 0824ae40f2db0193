"""MindFormers' ``TrainingStateMonitor``, for which an overflow that loss scaling deals with is no anomaly."""

import numpy as np
from mindformers.core.callback import callback
from mindspore import Tensor

__all__ = ["TrainingStateMonitor"]


class TrainingStateMonitor(callback.TrainingStateMonitor):
    """``mindformers.core.callback.TrainingStateMonitor`` that knows of skipped steps.

    Arguments are those of the stock class. In a step that overflowed, the norm of the gradients is inf or NaN because
    the loss scale was too large; the step is skipped, and the scale falls. So in such a step

    - ``check_for_nan_in_loss_and_grad`` checks the loss only. No loss scale makes a loss inf or NaN, because only the
      gradients are multiplied by it: then training ends, as with the stock class.
    - ``use_skip_data_by_global_norm`` and ``check_for_global_norm`` take the norm for no spike. The spikes in a row
      before it still count.

    All other steps are checked as by the stock class.

    Raises:
        ValueError: in training, for a loss that is inf or NaN, with ``check_for_nan_in_loss_and_grad``.

    Examples:
        >>> import numpy as np
        >>> from mindformers.tools.register import MindFormerConfig
        >>> monitor = TrainingStateMonitor(10, check_for_nan_in_loss_and_grad=True)
        >>> inf = Tensor(np.float32(np.inf))
        >>> loss, overflow, loss_scale, rate = Tensor(2.5), Tensor(True), Tensor(65536.0), Tensor(0.001)
        >>> outputs = (loss, overflow, loss_scale, rate, inf)
        >>> monitor._boundary_check(MindFormerConfig(net_outputs=outputs, cur_step_num=1))
        >>> monitor._boundary_check(MindFormerConfig(net_outputs=(inf, *outputs[1:]), cur_step_num=1))
        Traceback (most recent call last):
            ...
        ValueError: The loss of step 1 is inf. No loss scale causes that, so training ends here: look at the data of ...
    """

    def abnormal_global_norm_check(self, cb_params):
        """As in the stock class, where the step did not overflow."""
        if not _overflowed(cb_params.net_outputs):
            super().abnormal_global_norm_check(cb_params)

    def _boundary_check(self, cb_params):
        if not _overflowed(cb_params.net_outputs):
            super()._boundary_check(cb_params)
            return
        loss = float(np.mean(cb_params.net_outputs[0].asnumpy()))
        if not np.isfinite(loss):
            raise ValueError(
                f"The loss of step {cb_params.cur_step_num} is {loss}. No loss scale causes that, so training ends "
                "here: look at the data of this step and at the weights. 'check_for_nan_in_loss_and_grad: False' "
                "skips such a step and goes on."
            )


def _overflowed(outputs):
    if not isinstance(outputs, tuple | list) or len(outputs) < 3:
        return False
    overflow = outputs[1]
    return bool(np.any(overflow.asnumpy() if isinstance(overflow, Tensor) else overflow))
