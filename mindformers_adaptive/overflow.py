"""Overflow detection where MindSpore's own train-step cells have none: on CPU."""

from mindspore import amp, context, ops
from mindspore import dtype as mstype
from mindspore.ops.primitive import constexpr

__all__ = ["DetectsOverflowOnCPU"]


@constexpr
def _runs_on_cpu():
    """Whether the device in force is the CPU; asked when a graph is compiled, because it may be set after import."""
    return context.get_context("device_target") == "CPU"


class DetectsOverflowOnCPU:
    """Mixin, put before a stock train-step cell, that makes its overflow detection work on CPU.

    There the gradients are checked for inf and NaN, and where several processes train together, an overflow of one is
    an overflow of all. On Ascend and GPU the stock detection stays in charge.
    """

    def get_overflow_status(self, status, compute_output):
        """Return whether the gradients hold an inf or a NaN.

        Args:
            status (Tensor): what ``start_overflow_check`` returned; only the stock detection uses it.
            compute_output (tuple[Tensor]): the gradients, of any shapes and floating-point dtypes.

        Returns:
            Tensor, bool of shape ().
        """
        if not _runs_on_cpu():
            return super().get_overflow_status(status, compute_output)
        overflow = self.logic_not(amp.all_finite(compute_output))
        if self.is_distributed:
            # float32, because processes on a CPU cannot add up booleans or integers.
            overflow = self.less_equal(self.base, self.allreduce(ops.cast(overflow, mstype.float32)))
        return overflow
