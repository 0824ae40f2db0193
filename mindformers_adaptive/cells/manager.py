"""Loss-scale managers for ``mindspore.train.Model``: one for any rule, and one for each rule of this package."""

from typing import Any

from mindspore import amp

from mindformers_adaptive.cells import update_cells
from mindformers_adaptive.cells.refusals import warn_of_large_factor
from mindformers_adaptive.cells.update_cell import StateOfUpdateCell
from mindformers_adaptive.rules import make_rule
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.rules.guided import GuidedRule


class RuleLossScaleManager(StateOfUpdateCell, amp.LossScaleManager):
    """Loss-scale manager for your own loss-scaling rule, for ``Model(..., loss_scale_manager=manager)``.

    ``Model`` puts the manager's update cell into its train-step cell, which owns the loss scale. The manager has the
    state of the update cell that it gave away last. In a train-step cell of MindSpore itself, the update cell does not
    know its loss scale; then the manager follows each step that the host sees by the same rule. Load a state before the
    manager is given to ``Model``.

    Args:
        rule (Union[str, type, Rule]): ``module.Class``, the class, or the rule itself.
        init_loss_scale (float): the initial loss scale. Default: 2**24, as ``amp.DynamicLossScaleManager``.
        **arguments: arguments of the rule, by name; leave them out if ``rule`` is an instance.

    Raises:
        TypeError: if an argument is not of its type.
        ValueError: if an argument is out of its range.

    Supported Platforms:
        ``Ascend`` ``CPU``; on CPU ``Model`` needs
        :func:`~mindformers_adaptive.cells.train_network.enable_loss_scale_in_model`, and a rule that needs the largest
        gradient needs it on every device.

    Examples:
        >>> manager = RuleLossScaleManager("guided", init_loss_scale=2**10)
        >>> manager.get_loss_scale()
        1024.0
    """

    cell_class: Any = update_cells.RuleLossScaleUpdateCell

    def __init__(self, rule: Any, init_loss_scale: float = 2**24, **arguments: Any) -> None:
        rule = make_rule(rule, **arguments)
        self._follow(rule, rule.start(init_loss_scale, argument="init_loss_scale"))

    def _follow(self, rule: Any, start: Any) -> None:
        self.rule = rule
        # _own_cell is the manager's own update cell, which repeats each step on the host; update_cell is the update
        # cell that get_update_cell() returned last, which runs in the train-step cell.
        self._own_cell = self.cell_class._for_rule(rule, start)
        self.update_cell: Any = None

    @property
    def _present_cell(self) -> Any:
        cell = self.update_cell
        return self._own_cell if cell is None or cell.bound_loss_scale is None else cell

    def get_loss_scale(self) -> float:
        """Return the loss scale for the next step. Reading it may wait for the device.

        Returns:
            float.
        """
        return float(self._present_cell.loss_scale_value)

    def get_drop_overflow_update(self) -> bool:
        """Return True, because a training step that overflows does not update the weights.

        Returns:
            bool, True.
        """
        return True

    def update_loss_scale(self, overflow: bool) -> None:
        """Update the loss scale after one training step. ``Model`` calls this after each step that the host sees.

        If the update cell in the train-step cell knows its loss scale, it has processed the step already, and this
        method does nothing.

        Args:
            overflow (bool): whether the step overflowed.

        Raises:
            RuntimeError: if the rule needs more than the overflow flag, and its update cell is in no train-step cell.

        Examples:
            >>> manager = AdaptiveLossScaleManager(init_loss_scale=2**16)
            >>> manager.update_loss_scale(overflow=True)
            >>> manager.get_loss_scale()
            32768.0
        """
        cell = self._present_cell
        if cell is not self._own_cell:
            return
        if self.rule.needs_gradients:
            raise RuntimeError(
                f"{type(self).__name__} needs the largest gradient of each step, but update_loss_scale() gets only the "
                "overflow flag. Give the manager to Model(..., loss_scale_manager=manager). In your own training loop, "
                "use a loss scaler of this package, or AdaptiveLossScaleManager, which needs only the overflow flag."
            )
        before, counted = cell.rule_state(), cell.state()
        after = self.rule.step(before, bool(overflow))
        step = counted["cur_iter"]
        is_event = overflow or after.loss_scale > before.loss_scale
        cell.write_rule_state(after, step, step if is_event else counted["last_overflow_iter"])

    def get_update_cell(self) -> Any:
        """Return a new update cell that starts from this manager's state.

        Once a train-step cell uses the new update cell, the manager reads and loads the state of this update cell.

        Returns:
            Cell, also for ``TrainOneStepWithLossScaleCell(..., scale_sense=cell)``.
        """
        present = self._present_cell
        cell = self.cell_class._for_rule(self.rule, present.rule_state())
        cell.load_state_dict(present.state_dict())
        self.update_cell = cell
        return cell


class AdaptiveLossScaleManager(RuleLossScaleManager):
    """Loss-scale manager of adaptive loss scaling, for ``Model(..., loss_scale_manager=manager)``.

    ``Model`` puts the manager's update cell into its train-step cell, which owns the loss scale. Load a state before
    the manager is given to ``Model``.

    Args:
        init_loss_scale (float): the initial loss scale. Default: 2**24, as ``amp.DynamicLossScaleManager``.
        scale_factor (float): as in :class:`~mindformers_adaptive.rules.adaptive.AdaptiveRule`. Default: 2.
        scale_window (int, optional): the window to start with, in steps. Default: None, ``min_scale_window``.
        *windows: ``max_scale_window`` and ``min_scale_window`` of that rule.
        **arguments: its other arguments, by name.

    Raises:
        TypeError: if an argument is not of its type.
        ValueError: if an argument is out of its range.

    Supported Platforms:
        ``Ascend`` ``CPU``; on CPU ``Model`` needs
        :func:`~mindformers_adaptive.cells.train_network.enable_loss_scale_in_model`.

    Examples:
        >>> from mindspore import nn
        >>> from mindspore.train import Model
        >>> from mindformers_adaptive import AdaptiveLossScaleManager, enable_loss_scale_in_model
        >>> enable_loss_scale_in_model()
        >>> net = nn.Dense(3, 2)
        >>> optimizer = nn.Momentum(net.trainable_params(), learning_rate=0.1, momentum=0.9)
        >>> manager = AdaptiveLossScaleManager(init_loss_scale=2**16)
        >>> model = Model(net, nn.MSELoss(), optimizer, amp_level="O2", loss_scale_manager=manager)
        >>> manager.get_loss_scale()
        65536.0
    """

    cell_class = update_cells.AdaptiveLossScaleUpdateCell

    def __init__(
        self,
        init_loss_scale: float = 2**24,
        scale_factor: float = 2,
        scale_window: int | None = None,
        *windows: int,
        **arguments: Any,
    ) -> None:
        rule = AdaptiveRule(scale_factor, *windows, **arguments)
        warn_of_large_factor(type(self).__name__, rule.scale_factor, init_loss_scale, "init_loss_scale")
        self._follow(rule, rule.start(init_loss_scale, scale_window, argument="init_loss_scale"))


class GradientGuidedLossScaleManager(RuleLossScaleManager):
    """Loss-scale manager of gradient-guided loss scaling, for ``Model(..., loss_scale_manager=manager)``.

    Its update cell needs a train-step cell of this package, which ``Model`` builds after
    :func:`~mindformers_adaptive.cells.train_network.enable_loss_scale_in_model`, on every device.

    Args:
        init_loss_scale (float): the initial loss scale. Default: 2**24, as ``amp.DynamicLossScaleManager``.
        scale_factor (float): 2, and nothing else. Default: 2.
        **arguments: the other arguments of :class:`~mindformers_adaptive.rules.guided.GuidedRule`, by name.

    Raises:
        TypeError: if an argument is not of its type.
        ValueError: if an argument is out of its range.

    Supported Platforms:
        ``Ascend`` ``CPU``

    Examples:
        >>> from mindspore import nn
        >>> from mindspore.train import Model
        >>> from mindformers_adaptive import GradientGuidedLossScaleManager, enable_loss_scale_in_model
        >>> enable_loss_scale_in_model()
        >>> net = nn.Dense(3, 2)
        >>> optimizer = nn.Momentum(net.trainable_params(), learning_rate=0.1, momentum=0.9)
        >>> manager = GradientGuidedLossScaleManager(init_loss_scale=2**16)
        >>> model = Model(net, nn.MSELoss(), optimizer, amp_level="O2", loss_scale_manager=manager)
        >>> manager.get_loss_scale()
        65536.0
    """

    cell_class = update_cells.GradientGuidedLossScaleUpdateCell

    def __init__(self, init_loss_scale: float = 2**24, scale_factor: float = 2, **arguments: Any) -> None:
        super().__init__(GuidedRule(scale_factor=scale_factor, **arguments), init_loss_scale)
