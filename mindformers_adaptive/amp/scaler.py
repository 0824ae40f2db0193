"""``AdaptiveLossScaler``: adaptive loss scaling for functional training."""

from mindspore import Parameter, Tensor, jit, ops
from mindspore import dtype as mstype

from mindformers_adaptive.amp.scaling import ParameterScaler
from mindformers_adaptive.cells.update_cell import AdaptiveLossScaleUpdateCell
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.rules.ladder import DEFAULT_MAX_SCALE_WINDOW, DEFAULT_MIN_SCALE_WINDOW
from mindformers_adaptive.rules.state_dict import LossScaleStateDict

__all__ = ["AdaptiveLossScaler"]


class AdaptiveLossScaler(LossScaleStateDict, ParameterScaler):
    """Loss scaler of adaptive loss scaling, for training with ``mindspore.value_and_grad``.

    It works within ``@mindspore.jit`` and without. Its state is kept in Parameters: the loss scale ``scale_value``, and
    those of :class:`~mindformers_adaptive.cells.update_cell.AdaptiveLossScaleUpdateCell`, which applies the rule. In
    data parallel, reduce the gradients before ``amp.all_finite``, so that every process sees an inf or NaN of any.

    Args:
        scale_value (float): the initial loss scale. Named as in ``amp.DynamicLossScaler``.
        scale_factor (float): what the scale is multiplied or divided by, above 1. Default: 2, as
            ``amp.DynamicLossScaleManager``.
        scale_window (int, optional): the window to start with, in steps. Default: None, ``min_scale_window``.
        max_scale_window, min_scale_window, min_loss_scale, max_loss_scale, hysteresis, shrink_from_min_window: as in
            :class:`~mindformers_adaptive.cells.update_cell.AdaptiveLossScaleUpdateCell`, with its defaults.

    Raises:
        TypeError: if an argument is not of its type.
        ValueError: if an argument is out of its range.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import mindspore
        >>> import numpy as np
        >>> from mindspore import Tensor, amp, nn, ops
        >>> from mindformers_adaptive import AdaptiveLossScaler
        >>> net, loss_fn = nn.Dense(3, 2), nn.MSELoss()
        >>> optimizer = nn.SGD(net.trainable_params(), learning_rate=0.1)
        >>> scaler = AdaptiveLossScaler(scale_value=2**16)
        >>> def scaled_loss(x, y):
        ...     return scaler.scale(loss_fn(net(x), y))
        >>> value_and_grad = mindspore.value_and_grad(scaled_loss, None, optimizer.parameters)
        >>> def train_step(x, y):  # in a program of your own: with @mindspore.jit
        ...     loss, grads = value_and_grad(x, y)
        ...     grads = scaler.unscale(grads)
        ...     grads_finite = amp.all_finite(grads)
        ...     if grads_finite:
        ...         optimizer(grads)
        ...     scaler.adjust(grads_finite)
        ...     return scaler.unscale(loss), grads_finite
        >>> loss, grads_finite = train_step(Tensor(np.full((4, 3), np.inf, np.float32)), ops.zeros((4, 2)))
        >>> bool(grads_finite), scaler.state()["loss_scale"]
        (False, 32768.0)
    """

    def __init__(
        self,
        scale_value,
        scale_factor=2,
        scale_window=None,
        max_scale_window=DEFAULT_MAX_SCALE_WINDOW,
        min_scale_window=DEFAULT_MIN_SCALE_WINDOW,
        *,
        min_loss_scale=1.0,
        max_loss_scale=None,
        hysteresis=1,
        shrink_from_min_window=False,
    ):
        self.rule = AdaptiveRule(
            scale_factor,
            max_scale_window,
            min_scale_window,
            min_loss_scale=min_loss_scale,
            max_loss_scale=max_loss_scale,
            hysteresis=hysteresis,
            shrink_from_min_window=shrink_from_min_window,
        )
        start = self.rule.start(scale_value, scale_window, argument="scale_value")
        self.update_cell = AdaptiveLossScaleUpdateCell.from_rule(self.rule, start)
        self.scale_value = Parameter(Tensor(start.loss_scale, mstype.float32), name="scale_value", requires_grad=False)
        self.update_cell.bind_loss_scale(self.scale_value)
        # Compiled, because launched one by one its small operations can take longer than a whole training step.
        self._update = jit(self.update_cell.construct)

    def adjust(self, grads_finite):
        """Set the loss scale, its window and the counters for the next step.

        Args:
            grads_finite (Tensor): bool of shape (), False where the step overflowed.

        Returns:
            bool, True: the scale is not fixed.
        """
        self._update(self.scale_value, ops.logical_not(grads_finite))
        return True

    def state(self):
        """Return all Parameters as Python numbers by attribute name, the loss scale as ``loss_scale``."""
        return {"loss_scale": float(self.scale_value.asnumpy()), **self.update_cell.state()}

    def _read_state(self):
        return self.update_cell._read_state()

    def _write_state(self, loss_scale, counters):
        self.update_cell._write_state(loss_scale, counters)
