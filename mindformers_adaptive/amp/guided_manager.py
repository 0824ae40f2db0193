"""``GradientGuidedLossScaleManager``: gradient-guided loss scaling for ``mindspore.train.Model``."""

from mindspore import amp

from mindformers_adaptive.amp.guided_state_dict import GuidedStateDict
from mindformers_adaptive.amp.stock_caller import is_called_by_stock_amp
from mindformers_adaptive.cells.guided_update_cell import GradientGuidedLossScaleUpdateCell
from mindformers_adaptive.rules.checks import require_flag
from mindformers_adaptive.rules.guided import GuidedRule

__all__ = ["GradientGuidedLossScaleManager"]


class GradientGuidedLossScaleManager(GuidedStateDict, amp.LossScaleManager):
    """Loss-scale manager of gradient-guided loss scaling, for ``Model(..., loss_scale_manager=manager)``.

    Its update cell needs a train-step cell of this package, which ``Model`` builds after
    :func:`~mindformers_adaptive.amp.train_network.enable_loss_scale_on_cpu`, on every device. The manager has no state
    of its own: it reads that of the update cell it gave away last.

    Args:
        init_loss_scale (float): the initial loss scale. Default: 2**24, as ``amp.DynamicLossScaleManager``.
        scale_factor, exchange_rate, min_loss_scale, max_loss_scale, track_per_parameter: as in
            :class:`~mindformers_adaptive.cells.guided_update_cell.GradientGuidedLossScaleUpdateCell`.

    Raises:
        TypeError: if an argument is not of its type.
        ValueError: if an argument is out of its range.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from mindspore import nn
        >>> from mindspore.train import Model
        >>> from mindformers_adaptive import GradientGuidedLossScaleManager, enable_loss_scale_on_cpu
        >>> enable_loss_scale_on_cpu()
        >>> net = nn.Dense(3, 2)
        >>> optimizer = nn.Momentum(net.trainable_params(), learning_rate=0.1, momentum=0.9)
        >>> manager = GradientGuidedLossScaleManager(init_loss_scale=2**16)
        >>> model = Model(net, nn.MSELoss(), optimizer, amp_level="O2", loss_scale_manager=manager)
        >>> manager.get_loss_scale()
        65536.0
    """

    def __init__(
        self,
        init_loss_scale=2**24,
        scale_factor=2,
        *,
        exchange_rate=1.0,
        min_loss_scale=1.0,
        max_loss_scale=None,
        track_per_parameter=False,
    ):
        rule = GuidedRule(
            exchange_rate, scale_factor=scale_factor, min_loss_scale=min_loss_scale, max_loss_scale=max_loss_scale
        )
        start = rule.start(init_loss_scale, argument="init_loss_scale")
        self._arguments = {
            "exchange_rate": rule.exchange_rate,
            "min_loss_scale": rule.min_loss_scale,
            "max_loss_scale": rule.max_loss_scale,
            "track_per_parameter": require_flag("track_per_parameter", track_per_parameter),
        }
        self.update_cell = GradientGuidedLossScaleUpdateCell(start.loss_scale, **self._arguments)

    def get_loss_scale(self):
        """Return the loss scale for the next step, as a float. Reading it waits for the device."""
        return self.update_cell.present_loss_scale

    def get_drop_overflow_update(self):
        """Return True: a step that overflows does not change the weights."""
        return True

    def update_loss_scale(self, overflow):
        """Do nothing, because the update cell has taken the step already; ``Model`` calls this after each step.

        Args:
            overflow (bool): whether the step overflowed.

        Raises:
            RuntimeError: if the update cell is in no train-step cell. The overflow flag alone is not enough.
        """
        if self.update_cell.bound_loss_scale is None:
            raise RuntimeError(
                "GradientGuidedLossScaleManager cannot follow a step by its overflow flag alone, because it needs the "
                "largest gradient too. Give the manager to Model(..., loss_scale_manager=manager), use "
                "GradientGuidedLossScaler in a training loop of your own, or AdaptiveLossScaleManager."
            )

    def get_update_cell(self):
        """Return a new update cell that goes on from where this manager is, and follow it from then on.

        Returns:
            GradientGuidedLossScaleUpdateCell, also for ``TrainOneStepWithLossScaleCell(..., scale_sense=cell)``.

        Raises:
            ValueError: if MindSpore's own function asks for it, to put it into a train-step cell of its own.
        """
        if is_called_by_stock_amp():
            raise ValueError(
                "'loss_scale_manager' GradientGuidedLossScaleManager needs a train-step cell that measures the largest "
                "gradient, but MindSpore is building one of its own. Call "
                "mindformers_adaptive.enable_loss_scale_on_cpu() before the Model is made, on every device, and use "
                "neither boost_level nor pipeline stages nor gradient accumulation with this manager."
            )
        cell = GradientGuidedLossScaleUpdateCell(self.get_loss_scale(), **self._arguments)
        cell.load_state_dict(self.update_cell.state_dict())
        self.update_cell = cell
        return cell
