"""What may be given to a train-step cell as ``scale_sense``; what is often given in its place is named in the error."""

import functools
import inspect

from mindspore import amp, nn

__all__ = ["checks_scale_sense", "refuse_cell_as_manager"]


def checks_scale_sense(train_step_class):
    """Class decorator for a train-step cell that says what to do where ``scale_sense`` is no update cell.

    Args:
        train_step_class (type): a subclass of ``nn.TrainOneStepWithLossScaleCell``; changed in place. Its arguments
            stay those of the class it is derived from.

    Returns:
        type, the same class. Its construction raises TypeError for a ``scale_sense`` that is a loss-scale manager, a
        loss scaler or None; all else is left to the stock class.

    Examples:
        >>> @checks_scale_sense
        ... class TrainStep(nn.TrainOneStepWithLossScaleCell):
        ...     pass
    """
    stock_init = train_step_class.__init__
    signature = inspect.signature(stock_init)

    @functools.wraps(stock_init)
    def __init__(self, *args, **kwargs):  # noqa: N807
        given = signature.bind_partial(self, *args, **kwargs).arguments
        if "scale_sense" in given:
            _refuse_other_than_cell(given["scale_sense"])
        stock_init(self, *args, **kwargs)

    train_step_class.__init__ = __init__
    return train_step_class


def refuse_cell_as_manager(manager):
    """Raise TypeError where a loss-scale manager is needed and an update cell or a loss scaler was given.

    Args:
        manager (object): what was given as ``loss_scale_manager``.
    """
    if isinstance(manager, nn.Cell):
        raise TypeError(
            f"'loss_scale_manager' must be a loss-scale manager, but got the update cell {type(manager).__name__}. "
            "Give AdaptiveLossScaleManager with the same arguments, or give the cell to "
            "TrainOneStepWithLossScaleCell(..., scale_sense=cell) and that to Model."
        )
    if isinstance(manager, amp.LossScaler):
        raise TypeError(
            f"'loss_scale_manager' must be a loss-scale manager, but got the loss scaler {type(manager).__name__}, "
            "which is for functional training. Give AdaptiveLossScaleManager with the same arguments."
        )


def _refuse_other_than_cell(scale_sense):
    if isinstance(scale_sense, amp.LossScaleManager):
        remedy = "Give manager.get_update_cell(), or give the manager to Model(..., loss_scale_manager=manager)."
    elif isinstance(scale_sense, amp.LossScaler):
        remedy = "A loss scaler is for functional training; give AdaptiveLossScaleUpdateCell with the same arguments."
    elif scale_sense is None:
        remedy = (
            "FixedLossScaleManager(..., drop_overflow_update=False) has no update cell; for a fixed scale without "
            "skipped steps use FixedScaleTrainOneStepCell."
        )
    else:
        return
    raise TypeError(
        f"'scale_sense' must be an update cell or a Tensor, but got {scale_sense!r} of type "
        f"{type(scale_sense).__name__}. {remedy}"
    )
