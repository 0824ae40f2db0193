"""Refusals of arguments that train-step cells cannot use, each with a remedy."""

from __future__ import annotations

from mindspore import amp

__all__ = ["refuse_dividing_optimizer", "require_update_cell"]


def refuse_dividing_optimizer(optimizer: object) -> None:
    """Raise ValueError if an optimizer divides gradients by a loss scale: the train-step cell already divides them."""
    divided_by = getattr(optimizer, "loss_scale", 1.0)
    if divided_by != 1.0:
        raise ValueError(
            "'optimizer' must not divide the gradients, because the train-step cell divides them, but got "
            f"{type(optimizer).__name__} with loss_scale={divided_by}. Create the optimizer without 'loss_scale'."
        )


def require_update_cell(scale_sense: object) -> None:
    """Raise TypeError if ``scale_sense`` is something that is often given instead of an update cell or a Tensor."""
    if isinstance(scale_sense, amp.LossScaleManager):
        remedy = "Give manager.get_update_cell(), or give the manager to Model(..., loss_scale_manager=manager)."
    elif isinstance(scale_sense, amp.LossScaler):
        own_cell = getattr(scale_sense, "update_cell", None)
        name = "AdaptiveLossScaleUpdateCell" if own_cell is None else type(own_cell).__name__
        remedy = f"A loss scaler is for functional training; give {name} with the same arguments."
    elif scale_sense is None:
        remedy = (
            "FixedLossScaleManager(..., drop_overflow_update=False) has no update cell; for a fixed scale without "
            "skipped steps use FixedScaleTrainOneStepCell."
        )
    elif isinstance(scale_sense, type):
        remedy = f"Give an instance: {scale_sense.__name__}(...)."
    elif isinstance(scale_sense, dict):
        remedy = (
            "In a YAML file, the section 'scale_sense' needs a 'type', such as AdaptiveLossScaleUpdateCell. In Python, "
            "give an instance of that class with the other keys as arguments."
        )
    elif isinstance(scale_sense, (str, bool)):
        remedy = "Give AdaptiveLossScaleUpdateCell(...), or a fixed scale as a Tensor, such as Tensor(1024.0)."
    else:
        return
    raise TypeError(
        f"'scale_sense' must be an update cell or a Tensor, but got {scale_sense!r} of type "
        f"{type(scale_sense).__name__}. {remedy}"
    )
