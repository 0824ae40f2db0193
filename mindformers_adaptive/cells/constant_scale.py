"""Training without loss scaling, and update cells with a constant loss scale: they ignore a gradient scaler's state."""

from __future__ import annotations

import functools
import warnings
from typing import Any

from mindspore import Tensor, nn

__all__ = ["NoLossScaleUpdateCell", "ignore_scaler_state", "load_into_constant_scale"]


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


class NoLossScaleUpdateCell(nn.FixedLossScaleUpdateCell):
    """Update cell for training without loss scaling: no step is skipped, as in Megatron-LM without a gradient scaler.

    The train-step cells of MindSpore and MindFormers skip a step whose gradients are not finite, also at a fixed scale
    of 1, unless the update cell returns False. This cell always returns False, so inf and NaN reach the optimizer.

    Args:
        loss_scale_value (float): not used; MindFormers passes the restored loss scale when a training resumes. Default:
            1.0.

    Inputs:
        - **loss_scale** (Parameter) - not used.
        - **overflow** (Tensor) - not used.

    Outputs:
        Tensor, False, bool of shape ().

    Supported Platforms:
        ``Ascend`` ``CPU``

    Examples:
        >>> from mindspore import Tensor
        >>> from mindformers_adaptive.wrapper import NoLossScaleUpdateCell
        >>> bool(NoLossScaleUpdateCell()(Tensor(1.0), Tensor(True)))
        False
    """

    # The module from which users import the cell.
    __module__ = "mindformers_adaptive.wrapper"
    has_fixed_scale = True

    def __init__(self, loss_scale_value: float = 1.0) -> None:
        super().__init__(1.0)
        self.no_overflow = Tensor(False)

    def construct(self, loss_scale: Any, overflow: Any) -> Any:
        return self.no_overflow

    @property
    def inv_scale(self) -> float:
        """float: the reciprocal of the loss scale, 1.0."""
        return 1.0

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Warn and ignore the saved state of a gradient scaler, as Megatron-LM does when it runs without a scaler.

        Args:
            state_dict (dict): the state of a scaler or of the optimizer around it, as ``load_state_dict`` of
                :class:`AdaptiveLossScaleUpdateCell` takes it; any other is left to ``nn.Cell``.
            *args (Any): as in ``nn.Cell``.
            **kwargs (Any): as in ``nn.Cell``.

        Returns:
            None, or what ``nn.Cell`` returns.
        """
        return load_into_constant_scale(self, state_dict, *args, **kwargs)
