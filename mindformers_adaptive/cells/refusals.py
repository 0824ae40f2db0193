"""Refusals of arguments that cannot work, and warnings of arguments that are probably mistaken, with a remedy."""

import warnings
from typing import Any

from mindspore import amp

# A growth factor of at least this value is probably a scale window or a loss scale: no useful factor is so large.
_LIKE_NO_FACTOR = 100
# From this value on, it is rather a loss scale, if the loss scale in turn could be a growth factor.
_LIKE_A_LOSS_SCALE = 4096


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


def warn_of_large_factor(name: str, scale_factor: float, loss_scale: Any, argument: str) -> None:
    """Warn if ``scale_factor`` is so large that it was probably meant as another argument.

    Args:
        name (str): the class that takes the arguments.
        scale_factor (float): the growth factor.
        loss_scale (float): the initial loss scale.
        argument (str): the name of ``loss_scale``.
    """
    if scale_factor < _LIKE_NO_FACTOR:
        return
    is_factor = isinstance(loss_scale, (int, float)) and 1 < loss_scale < _LIKE_NO_FACTOR
    if is_factor and scale_factor >= _LIKE_A_LOSS_SCALE:
        remedy = f"If the two numbers are swapped, write {argument}={scale_factor:g}, scale_factor={loss_scale:g}."
    else:
        remedy = f"If you mean the window, write scale_window={scale_factor:g}."
    warnings.warn(
        f"'scale_factor' of {name} is {scale_factor:g}: each overflow divides the loss scale by this number. The usual "
        f"value is 2. {remedy}",
        stacklevel=3,
    )
