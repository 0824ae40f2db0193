"""A train-step cell that carries the state of its loss scaling through checkpoints, and says what was restored."""

import functools
import warnings

from mindformers.tools.logger import logger
from mindspore import Parameter, Tensor, nn
from mindspore import dtype as mstype

from mindformers_adaptive.cells.update_cell import AdaptiveLossScaleUpdateCell
from mindformers_adaptive.rule.restored_state import repair_loss_scale

__all__ = ["carries_loss_scale_state"]


def carries_loss_scale_state(train_step_class):
    """Class decorator for a train-step cell whose update cell is to survive every kind of checkpoint.

    MindFormers restores only network and optimizer from most of its formats. So the update cell becomes a part of the
    optimizer too: its Parameters keep their names, and go where the optimizer's go.

    When training starts, the restored loss scale is checked, and one line of the log says from where loss scaling
    goes on.

    Args:
        train_step_class (type): a subclass of ``nn.TrainOneStepWithLossScaleCell``; changed in place. Its arguments
            stay those of the class it is derived from.

    Returns:
        type, the same class.

    Examples:
        >>> @carries_loss_scale_state
        ... class TrainStep(nn.TrainOneStepWithLossScaleCell):
        ...     pass
        >>> net = nn.Dense(3, 2)
        >>> optimizer = nn.Momentum(net.trainable_params(), learning_rate=0.1, momentum=0.9)
        >>> update_cell = AdaptiveLossScaleUpdateCell(loss_scale_value=2**12, scale_factor=2, scale_window=20)
        >>> train_step = TrainStep(nn.WithLossCell(net, nn.MSELoss()), optimizer, update_cell)
        >>> "list_index" in optimizer.parameters_dict()
        True
    """
    stock_init = train_step_class.__init__
    stock_call = train_step_class.__call__

    @functools.wraps(stock_init)
    def __init__(self, *args, **kwargs):  # noqa: N807
        stock_init(self, *args, **kwargs)
        self._is_running = False
        self._start_reported = None
        if _is_adaptive(self) and isinstance(self.optimizer, nn.Cell):
            self.optimizer.loss_scaling_manager = self.loss_scaling_manager
        _give_learning_rate_a_name_of_its_own(self)

    def __call__(self, *args, **kwargs):  # noqa: N807
        # Who loads a checkpoint may do so after set_train(), or without it.
        if not self._is_running and _is_adaptive(self):
            self.loss_scaling_manager.check_state()
            _check_and_report(self)
        self._is_running = True
        return stock_call(self, *args, **kwargs)

    def add_flags_recursive(self, **flags):
        super(train_step_class, self).add_flags_recursive(**flags)
        if flags.get("training") and _is_adaptive(self):
            self._is_running = False
            _check_and_report(self)
        return self

    train_step_class.__init__ = __init__
    train_step_class.__call__ = __call__
    train_step_class.add_flags_recursive = add_flags_recursive
    return train_step_class


def _is_adaptive(train_step):
    return isinstance(train_step.loss_scaling_manager, AdaptiveLossScaleUpdateCell)


def _give_learning_rate_a_name_of_its_own(train_step):
    # MindFormers' cell keeps a copy of a constant learning rate, to return it. Where two Parameters have one name,
    # MindSpore renames all of them when training starts, and a checkpoint does not fit the next training.
    learning_rate = getattr(train_step, "learning_rate", None)
    if isinstance(learning_rate, Parameter):
        learning_rate.name = "returned_learning_rate"


def _check_and_report(train_step):
    loss_scale = _checked_loss_scale(train_step)
    state = train_step.loss_scaling_manager.state()
    if train_step._start_reported == (loss_scale, state):
        return
    train_step._start_reported = (loss_scale, state)
    applied_steps = _applied_steps(train_step.optimizer)
    if state["cur_iter"] > 1:
        listed = ", ".join(f"{name} {value}" for name, value in state.items())
        logger.info(f"Loss scaling goes on from: loss_scale {loss_scale}, {listed}")
    elif applied_steps > 0:
        warnings.warn(
            f"The checkpoint has {applied_steps} applied steps but no state of adaptive loss scaling: training goes on "
            f"at loss scale {loss_scale} with a fresh ladder, at window {state['scale_window']}.",
            stacklevel=3,
        )


def _checked_loss_scale(train_step):
    """Refuse a loss scale that no training can have had, and move one that is out of its bounds to the nearer."""
    restored = float(train_step.scale_sense.asnumpy())
    loss_scale, problem = repair_loss_scale(train_step.loss_scaling_manager.rule, restored, "scale_sense")
    if problem:
        warnings.warn(problem, stacklevel=4)
        train_step.scale_sense.set_data(Tensor(loss_scale, mstype.float32))
    return loss_scale


def _applied_steps(optimizer):
    global_step = getattr(optimizer, "global_step", None)
    return 0 if global_step is None else int(global_step.asnumpy().max())
