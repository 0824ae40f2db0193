"""``AdaptiveLossScaler``: adaptive loss scaling for functional training."""

import warnings

from mindspore import Parameter, Tensor, amp, jit, ops
from mindspore import dtype as mstype

from mindformers_adaptive.amp.scaling import multiply_in_float32
from mindformers_adaptive.cells.update_cell import AdaptiveLossScaleUpdateCell
from mindformers_adaptive.rule.adaptive_rule import AdaptiveRule
from mindformers_adaptive.rule.ladder import DEFAULT_MAX_SCALE_WINDOW, DEFAULT_MIN_SCALE_WINDOW
from mindformers_adaptive.rule.restored_state import repair_loss_scale

__all__ = ["AdaptiveLossScaler"]

_map = ops.HyperMap()


class AdaptiveLossScaler(amp.LossScaler):
    """Loss scaler of adaptive loss scaling, for training with ``mindspore.value_and_grad``.

    It works within ``@mindspore.jit`` and without. Its state is kept in Parameters: the loss scale ``scale_value``, and
    those of :class:`~mindformers_adaptive.cells.update_cell.AdaptiveLossScaleUpdateCell`, which applies the rule. In
    data parallel, reduce the gradients before ``amp.all_finite``, so that every process sees an inf or NaN of any.

    Args:
        scale_value (float): the initial loss scale. Named as in ``amp.DynamicLossScaler``.
        scale_factor (float): what the scale is multiplied or divided by, above 1. Default: 2, as
            ``amp.DynamicLossScaleManager``.
        scale_window (int, optional): the window to start with, in steps. Default: None, ``min_scale_window``.
        max_scale_window (int): the largest window, in steps. Default: 1000, MindFormers'.
        min_scale_window (int): the smallest window, in steps. Default: 20, MindFormers'.
        min_loss_scale, max_loss_scale, hysteresis, shrink_from_min_window: as in
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
        rule = AdaptiveRule(
            scale_factor,
            max_scale_window,
            min_scale_window,
            min_loss_scale=min_loss_scale,
            max_loss_scale=max_loss_scale,
            hysteresis=hysteresis,
            shrink_from_min_window=shrink_from_min_window,
        )
        start = rule.start(scale_value, scale_window, argument="scale_value")
        self.update_cell = AdaptiveLossScaleUpdateCell.from_rule(rule, start)
        self.scale_value = Parameter(Tensor(start.loss_scale, mstype.float32), name="scale_value", requires_grad=False)
        # Compiled, because launched one by one its small operations can take longer than a whole training step.
        self._update = jit(self.update_cell.construct)

    def scale(self, inputs):
        """Multiply a loss, or gradients, by the loss scale.

        Args:
            inputs (Union[Tensor, tuple[Tensor]]): of any shapes and floating-point dtypes.

        Returns:
            Union[Tensor, tuple[Tensor]], shapes and dtypes of `inputs`. A float16 loss can be scaled to 65504 only.
        """
        return _map(ops.partial(multiply_in_float32, self.scale_value), inputs)

    def unscale(self, inputs):
        """Divide gradients, or a loss, by the loss scale.

        Args:
            inputs (Union[Tensor, tuple[Tensor]]): of any shapes and floating-point dtypes.

        Returns:
            Union[Tensor, tuple[Tensor]], shapes and dtypes of `inputs`.
        """
        return _map(ops.partial(multiply_in_float32, ops.reciprocal(self.scale_value)), inputs)

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

    def parameters_dict(self):
        """Return all Parameters by the names that they have in a checkpoint.

        Returns:
            dict[str, Parameter], for ``mindspore.save_checkpoint``, as ``save_obj`` or ``append_dict``.
        """
        counters = [getattr(self.update_cell, name) for name in self.update_cell.state()]
        return {parameter.name: parameter for parameter in (self.scale_value, *counters)}

    def load_parameters(self, parameters):
        """Go on from what a checkpoint holds.

        Args:
            parameters (dict[str, Parameter]): as ``mindspore.load_checkpoint`` returns it. Names of other things are
                left alone. What this scaler cannot go on with is changed, with a warning.

        Raises:
            ValueError: if the loss scale in it is not finite or not above 0.

        Examples:
            >>> import os, tempfile
            >>> import mindspore
            >>> scaler, resumed = AdaptiveLossScaler(2**16), AdaptiveLossScaler(2**16)
            >>> _ = scaler.adjust(Tensor(False))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     mindspore.save_checkpoint(scaler.parameters_dict(), os.path.join(folder, "scaler.ckpt"))
            ...     resumed.load_parameters(mindspore.load_checkpoint(os.path.join(folder, "scaler.ckpt")))
            >>> resumed.state() == scaler.state(), resumed.state()["loss_scale"]
            (True, 32768.0)
        """
        own = self.parameters_dict()
        missing = [name for name in own if name not in parameters]
        if missing:
            warnings.warn(
                f"The checkpoint has no {', '.join(missing)} for the loss scaler: what it lacks stays as it is.",
                stacklevel=2,
            )
        if self.scale_value.name in parameters:
            restored = float(parameters[self.scale_value.name].asnumpy().reshape(()))
            loss_scale = repair_loss_scale(self.update_cell.rule, restored, self.scale_value.name)
            self.scale_value.set_data(Tensor(loss_scale, mstype.float32))
        for name in self.update_cell.state():
            counter = getattr(self.update_cell, name)
            if counter.name in parameters:
                counter.set_data(Tensor(int(parameters[counter.name].asnumpy().reshape(())), mstype.int32))
        self.update_cell.check_state()
