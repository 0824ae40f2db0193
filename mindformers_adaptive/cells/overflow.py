"""Overflow detection where MindSpore's own train-step cells have none: on CPU."""

import functools

from mindspore import amp, context, ops
from mindspore import dtype as mstype

__all__ = ["detects_overflow_on_cpu"]


def detects_overflow_on_cpu(train_step_class):
    """Class decorator that makes the overflow detection of a stock train-step cell work on CPU.

    There the gradients are checked for inf and NaN, and where several processes train together, an overflow of one is
    an overflow of all. On any other device an instance is left exactly as the stock class makes it.

    Args:
        train_step_class (type): a subclass of ``nn.TrainOneStepWithLossScaleCell``; changed in place. Its arguments
            stay those of the class it is derived from.

    Returns:
        type, the same class.

    Examples:
        >>> from mindspore import nn
        >>> @detects_overflow_on_cpu
        ... class TrainStep(nn.TrainOneStepWithLossScaleCell):
        ...     pass
    """
    stock_init = train_step_class.__init__

    @functools.wraps(stock_init)
    def __init__(self, *args, **kwargs):  # noqa: N807
        stock_init(self, *args, **kwargs)
        # Chosen here and not in the method: a graph that reaches the stock method through super() resolves it to the
        # overriding method again, without end.
        if _runs_on_cpu():
            self.get_overflow_status = self.get_overflow_status_on_cpu

    train_step_class.__init__ = __init__
    train_step_class.get_overflow_status_on_cpu = _get_overflow_status_on_cpu
    return train_step_class


def _runs_on_cpu():
    return context.get_context("device_target") == "CPU"


def _get_overflow_status_on_cpu(self, status, compute_output):
    """Return whether the gradients hold an inf or a NaN.

    Args:
        status (Tensor): for the stock detection only; not used.
        compute_output (tuple[Tensor]): the gradients, of any shapes and floating-point dtypes.

    Returns:
        Tensor, bool of shape ().
    """
    overflow = self.logic_not(amp.all_finite(compute_output))
    if self.is_distributed:
        # float32, because processes on a CPU cannot add up booleans or integers.
        overflow = self.less_equal(self.base, self.allreduce(ops.cast(overflow, mstype.float32)))
    return overflow
