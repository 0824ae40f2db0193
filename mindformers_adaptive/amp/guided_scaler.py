"""``GradientGuidedLossScaler``: gradient-guided loss scaling for functional training."""

from mindspore import Parameter, Tensor, jit, nn, ops
from mindspore import dtype as mstype

from mindformers_adaptive.amp.guided_state_dict import GuidedStateDict
from mindformers_adaptive.amp.scaling import ParameterScaler
from mindformers_adaptive.cells.guided_update_cell import GradientGuidedLossScaleUpdateCell
from mindformers_adaptive.cells.largest_gradient import LargestGradient
from mindformers_adaptive.rules.guided import GuidedRule

__all__ = ["GradientGuidedLossScaler"]


class GradientGuidedLossScaler(GuidedStateDict, ParameterScaler):
    """Loss scaler of gradient-guided loss scaling, for training with ``mindspore.value_and_grad``.

    It works within ``@mindspore.jit`` and without. Its state is kept in Parameters: the loss scale ``scale_value``, and
    those of its ``update_cell``, which applies the rule. In data parallel, reduce the gradients first, so that every
    process sees the same ones.

    Args:
        scale_value (float): the initial loss scale. Named as in ``amp.DynamicLossScaler``.
        scale_factor, exchange_rate, min_loss_scale, max_loss_scale: as in
            :class:`~mindformers_adaptive.cells.guided_update_cell.GradientGuidedLossScaleUpdateCell`.

    Raises:
        TypeError: if an argument is not of its type.
        ValueError: if an argument is out of its range.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import mindspore
        >>> import numpy as np
        >>> from mindspore import Tensor, amp, nn, ops
        >>> from mindformers_adaptive import GradientGuidedLossScaler
        >>> net, loss_fn = nn.Dense(3, 2), nn.MSELoss()
        >>> optimizer = nn.SGD(net.trainable_params(), learning_rate=0.1)
        >>> scaler = GradientGuidedLossScaler(scale_value=2**16)
        >>> def scaled_loss(x, y):
        ...     return scaler.scale(loss_fn(net(x), y))
        >>> value_and_grad = mindspore.value_and_grad(scaled_loss, None, optimizer.parameters)
        >>> def train_step(x, y):  # in a program of your own: with @mindspore.jit
        ...     loss, grads = value_and_grad(x, y)
        ...     grads = scaler.unscale(grads)
        ...     grads_finite = amp.all_finite(grads)
        ...     if grads_finite:
        ...         optimizer(grads)
        ...     scaler.adjust(grads_finite, grads)
        ...     return scaler.unscale(loss), grads_finite
        >>> loss, grads_finite = train_step(Tensor(np.full((4, 3), np.inf, np.float32)), ops.zeros((4, 2)))
        >>> bool(grads_finite), scaler.state()["loss_scale"]
        (False, 32768.0)
    """

    def __init__(self, scale_value, scale_factor=2, *, exchange_rate=1.0, min_loss_scale=1.0, max_loss_scale=None):
        rule = GuidedRule(
            exchange_rate, scale_factor=scale_factor, min_loss_scale=min_loss_scale, max_loss_scale=max_loss_scale
        )
        start = rule.start(scale_value, argument="scale_value")
        self.update_cell = GradientGuidedLossScaleUpdateCell(
            start.loss_scale,
            exchange_rate=rule.exchange_rate,
            min_loss_scale=rule.min_loss_scale,
            max_loss_scale=rule.max_loss_scale,
        )
        self.scale_value = Parameter(Tensor(start.loss_scale, mstype.float32), name="scale_value", requires_grad=False)
        self.update_cell.bind_loss_scale(self.scale_value)
        self.update_cell.declare_signal(())
        # Compiled, because launched one by one its small operations can take longer than a whole training step.
        self._update = jit(_MeasureAndUpdate(self.update_cell).construct)

    def adjust(self, grads_finite, grads):
        """Set the loss scale and the state for the next step.

        Args:
            grads_finite (Tensor): bool of shape (), False where the step overflowed.
            grads (Union[Tensor, tuple[Tensor]]): the gradients as :meth:`unscale` returned them, before any clipping;
                of any shapes and floating-point dtypes.

        Returns:
            bool, True: the scale is not fixed.
        """
        grads = (grads,) if isinstance(grads, Tensor) else tuple(grads)
        self._update(self.scale_value, ops.logical_not(grads_finite), grads)
        return True

    def state(self):
        """Return all Parameters as Python numbers by attribute name, the loss scale as ``loss_scale``."""
        return {"loss_scale": float(self.scale_value.asnumpy()), **self.update_cell.state()}


class _MeasureAndUpdate(nn.Cell):
    """Measures the gradients of a step, then steps the update cell."""

    def __init__(self, update_cell):
        super().__init__(auto_prefix=False)
        self.update_cell = update_cell
        self.measure = LargestGradient(update_cell)

    def construct(self, loss_scale, overflow, gradients):
        self.measure(gradients)
        return self.update_cell(loss_scale, overflow)
