"""``NoLossScaleUpdateCell``: neither a loss scale nor skipped steps."""

from mindspore import Tensor, nn

__all__ = ["NoLossScaleUpdateCell"]


class NoLossScaleUpdateCell(nn.FixedLossScaleUpdateCell):
    """Update cell of a training that is not scaled and skips no step, as Megatron-LM's without a gradient scaler.

    The train-step cells of MindSpore and MindFormers skip a step whose gradients are not finite, also at a fixed scale
    of 1, unless the update cell returns False. This one always does: inf and NaN reach the optimizer.

    Args:
        loss_scale_value (float): not used; MindFormers gives the restored one on resume. Default: 1.0.

    Inputs:
        - **loss_scale** (Parameter) - not used.
        - **overflow** (Tensor) - not used.

    Outputs:
        Tensor, False, bool of shape ().

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> bool(NoLossScaleUpdateCell()(Tensor(1.0), Tensor(True)))
        False
    """

    def __init__(self, loss_scale_value=1.0):
        super().__init__(1.0)
        self.no_overflow = Tensor(False)

    def construct(self, loss_scale, overflow):
        return self.no_overflow
