"""``FixedScaleTrainOneStepCell``: a fixed loss scale for any optimizer."""

from mindspore import Tensor, amp, nn, ops
from mindspore import dtype as mstype

from mindformers_adaptive.amp.scaler import multiply_in_float32
from mindformers_adaptive.cells.train_step import refuse_dividing_optimizer
from mindformers_adaptive.rules.checks import require_positive

__all__ = ["FixedScaleTrainOneStepCell"]

_map = ops.HyperMap()


class FixedScaleTrainOneStepCell(nn.TrainOneStepCell):
    """Train-step cell with a fixed loss scale that divides the gradients itself.

    ``FixedLossScaleManager(loss_scale, drop_overflow_update=False)`` leaves that division to the optimizer, and some
    optimizers, such as ``nn.AdamWeightDecay``, do not divide. No step is skipped: an overflow reaches the optimizer.
    To skip them use ``TrainOneStepWithLossScaleCell(..., scale_sense=nn.FixedLossScaleUpdateCell(loss_scale))``.

    Args:
        network (nn.Cell): the network that returns the loss.
        optimizer (nn.Optimizer): made without a ``loss_scale``, or with 1.
        loss_scale (float): what the loss is multiplied and the gradients are divided by. Default: 128.0, as
            ``amp.FixedLossScaleManager``.

    Inputs:
        - **inputs** (Tensor) - those of `network`.

    Outputs:
        Tensor, the loss, not scaled.

    Raises:
        TypeError: if ``loss_scale`` is not a number.
        ValueError: if ``loss_scale`` is not finite and above 0, or the optimizer divides by a loss scale too.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from mindformers_adaptive import FixedScaleTrainOneStepCell
        >>> net = nn.Dense(3, 2, weight_init="ones", bias_init="zeros")
        >>> optimizer = nn.AdamWeightDecay(net.trainable_params(), learning_rate=0.01)
        >>> train_step = FixedScaleTrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer, loss_scale=1024)
        >>> float(train_step(Tensor(np.ones((4, 3), np.float32)), Tensor(np.zeros((4, 2), np.float32))))
        9.0
    """

    def __init__(self, network, optimizer, loss_scale=128.0):
        if isinstance(loss_scale, amp.LossScaleManager):
            raise TypeError(
                f"'loss_scale' must be a number, but got the loss-scale manager {type(loss_scale).__name__}. Give "
                "manager.get_loss_scale()."
            )
        loss_scale = require_positive("loss_scale", loss_scale)
        refuse_dividing_optimizer(optimizer)
        super().__init__(network, optimizer, loss_scale)
        self.reciprocal = Tensor(1.0 / loss_scale, mstype.float32)

    def construct(self, *inputs):
        loss = self.network(*inputs)
        sens = ops.fill(loss.dtype, loss.shape, self.sens)
        grads = self.grad(self.network, self.weights)(*inputs, sens)
        grads = _map(ops.partial(multiply_in_float32, self.reciprocal), grads)
        grads = self.grad_reducer(grads)
        return ops.depend(loss, self.optimizer(grads))
