"""The state of a gradient scaler means nothing to an update cell whose loss scale is constant, and is ignored by it."""

from __future__ import annotations

import functools
import warnings
from typing import Any

from mindspore import nn

__all__ = ["ignore_scaler_state", "load_into_constant_scale"]


def load_into_constant_scale(cell: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
    """Warn and ignore the state of a gradient scaler; leave any other ``state_dict`` to ``nn.Cell``.

    Args:
        cell (Cell): an update cell with a constant loss scale.
        state_dict (dict): the state of a scaler or of the optimizer around it, as ``load_state_dict`` of
            ``AdaptiveLossScaleUpdateCell`` takes it; or the Parameters of the cell.
        *args (Any): as of ``nn.Cell.load_state_dict``.
        **kwargs (Any): as ``args``.

    Returns:
        None, or what ``nn.Cell`` returns.
    """
    keys = {"grad_scaler", "optimizer", "scale", "loss_scale"}
    if not isinstance(state_dict, dict) or keys.isdisjoint(state_dict):
        return nn.Cell.load_state_dict(cell, state_dict, *args, **kwargs)
    if state_dict.get("grad_scaler") is not None or not {"scale", "loss_scale"}.isdisjoint(state_dict):
        warnings.warn(
            f"The checkpoint has the state of a gradient scaler, but {type(cell).__name__} keeps the loss scale at "
            f"{cell.get_loss_scale():g}, so it ignores this state. To continue with the saved loss scale, use "
            "AdaptiveLossScaleUpdateCell.",
            stacklevel=3,
        )
    return None


def ignore_scaler_state(update_cell: Any) -> None:
    """Let MindSpore's own cell for a fixed loss scale ignore the state of a gradient scaler."""
    if type(update_cell) is nn.FixedLossScaleUpdateCell:
        # MindSpore's class stays as it is: only this cell, which a train step of this package holds, gets the method.
        object.__setattr__(update_cell, "load_state_dict", functools.partial(load_into_constant_scale, update_cell))
