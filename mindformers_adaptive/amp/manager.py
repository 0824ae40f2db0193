"""``AdaptiveLossScaleManager``: adaptive loss scaling for ``mindspore.train.Model``."""

from mindspore import amp, context

from mindformers_adaptive.amp.stock_caller import is_called_by_stock_amp
from mindformers_adaptive.cells.update_cell import AdaptiveLossScaleUpdateCell
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.rules.ladder import DEFAULT_MAX_SCALE_WINDOW, DEFAULT_MIN_SCALE_WINDOW
from mindformers_adaptive.rules.restored_state import from_rule_state, to_rule_state
from mindformers_adaptive.rules.state_dict import LossScaleStateDict

__all__ = ["AdaptiveLossScaleManager"]


class AdaptiveLossScaleManager(LossScaleStateDict, amp.LossScaleManager):
    """Loss-scale manager of adaptive loss scaling, for ``Model(..., loss_scale_manager=manager)``.

    ``Model`` puts the manager's update cell into its train-step cell, which owns the loss scale. Without data sinking
    the manager follows each step by the same rule. Load a state before the manager is given to ``Model``.

    Args:
        init_loss_scale (float): the initial loss scale. Default: 2**24, as ``amp.DynamicLossScaleManager``.
        scale_factor (float): what the scale is multiplied or divided by, above 1. Default: 2, as
            ``amp.DynamicLossScaleManager``.
        scale_window (int, optional): the window to start with, in steps. Default: None, ``min_scale_window``.
        max_scale_window, min_scale_window, min_loss_scale, max_loss_scale, hysteresis, shrink_from_min_window: as in
            :class:`~mindformers_adaptive.cells.update_cell.AdaptiveLossScaleUpdateCell`, with its defaults.

    Raises:
        TypeError: if an argument is not of its type.
        ValueError: if an argument is out of its range.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``; on CPU ``Model`` needs
        :func:`~mindformers_adaptive.amp.train_network.enable_loss_scale_on_cpu`.

    Examples:
        >>> from mindspore import nn
        >>> from mindspore.train import Model
        >>> from mindformers_adaptive import AdaptiveLossScaleManager, enable_loss_scale_on_cpu
        >>> enable_loss_scale_on_cpu()
        >>> net = nn.Dense(3, 2)
        >>> optimizer = nn.Momentum(net.trainable_params(), learning_rate=0.1, momentum=0.9)
        >>> manager = AdaptiveLossScaleManager(init_loss_scale=2**16)
        >>> model = Model(net, nn.MSELoss(), optimizer, amp_level="O2", loss_scale_manager=manager)
        >>> manager.get_loss_scale()
        65536.0
    """

    def __init__(
        self,
        init_loss_scale=2**24,
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
        self._state = self.rule.start(init_loss_scale, scale_window, argument="init_loss_scale")
        self._steps = 0

    def get_loss_scale(self):
        """Return the loss scale for the next step, as a float."""
        return self._state.loss_scale

    def get_drop_overflow_update(self):
        """Return True: a step that overflows does not change the weights."""
        return True

    def update_loss_scale(self, overflow):
        """Follow one step; ``Model`` calls this after each step that the host sees.

        Args:
            overflow (bool): whether the step overflowed.

        Examples:
            >>> manager = AdaptiveLossScaleManager(init_loss_scale=2**16)
            >>> manager.update_loss_scale(overflow=True)
            >>> manager.get_loss_scale()
            32768.0
        """
        self._state = self.rule.step(self._state, bool(overflow))
        self._steps += 1

    def get_update_cell(self):
        """Return a new update cell that goes on from where this manager is.

        Returns:
            AdaptiveLossScaleUpdateCell, also for ``TrainOneStepWithLossScaleCell(..., scale_sense=cell)``.
        """
        # MindSpore's own function asks for the cell, and on CPU refuses it with a message that has no remedy.
        if is_called_by_stock_amp() and context.get_context("device_target") == "CPU":
            raise ValueError(
                "'loss_scale_manager' must be None on CPU, as MindSpore is, but got AdaptiveLossScaleManager. Call "
                "mindformers_adaptive.enable_loss_scale_on_cpu() before the Model is made."
            )
        return AdaptiveLossScaleUpdateCell.from_rule(self.rule, self._state, self._steps)

    def _read_state(self):
        return self._state.loss_scale, from_rule_state(self.rule, self._state, self._steps)

    def _write_state(self, loss_scale, counters):
        self._state = to_rule_state(self.rule, loss_scale, counters)
        self._steps = counters["cur_iter"] - 1
