"""``CellWithLossScale``: an update cell that knows its loss scale, wherever this is kept."""

from __future__ import annotations

from typing import Any

from mindformers_adaptive.cells.compiled_update import CompiledUpdateCell
from mindformers_adaptive.cells.loads import SeesLoads
from mindformers_adaptive.rules.checks import to_float32

__all__ = ["CellWithLossScale"]


class CellWithLossScale(SeesLoads, CompiledUpdateCell):
    """Update cell that reads the loss scale from the Parameter of the train-step cell or scaler that it is bound to."""

    bound_loss_scale: Any = None
    # The id of this update cell when it was bound to a loss scale. A copy has another id, and can be bound again.
    _bound_id: int | None = None
    # The number of the training step whose loss scale this cell has itself.
    _known_step = 1

    def get_loss_scale(self) -> float:
        """Return the loss scale for the next step. Reading it may wait for the device.

        Returns:
            float.

        Raises:
            RuntimeError: as of :meth:`known_loss_scale`.
        """
        return self.present_loss_scale if self.loaded else self.known_loss_scale()

    def known_loss_scale(self) -> float:
        """Return the loss scale for the next step.

        Returns:
            float.

        Raises:
            RuntimeError: if this cell took steps in a train-step cell of another package, and so does not know it.
        """
        if not self._knows_loss_scale:
            raise RuntimeError(
                "The update cell does not know its loss scale, because its train-step cell is not from "
                "mindformers_adaptive.wrapper. Call update_cell.bind_loss_scale(train_step.scale_sense) first."
            )
        return self.present_loss_scale

    @property
    def _knows_loss_scale(self) -> bool:
        return self.bound_loss_scale is not None or int(self.cur_iter.asnumpy()) == self._known_step

    @property
    def loss_scale_value(self) -> float:
        """float: the loss scale for the next step, as far as this cell knows it."""
        return self.present_loss_scale

    @loss_scale_value.setter
    def loss_scale_value(self, loss_scale: float) -> None:
        object.__setattr__(self, "_own_loss_scale", loss_scale)

    @property
    def present_loss_scale(self) -> float:
        """float: the loss scale of the next step, or the initial one until a train-step cell is bound."""
        if self.bound_loss_scale is None:
            return float(self._own_loss_scale)
        return float(self.bound_loss_scale.asnumpy())

    @property
    def inv_scale(self) -> float:
        """float: the reciprocal of the loss scale, by which gradients are multiplied."""
        return to_float32(1.0 / self.known_loss_scale())

    def bind_loss_scale(self, parameter: Any) -> None:
        """Tell this update cell which Parameter holds the loss scale, for ``state_dict()`` and ``load_state_dict()``.

        The train-step cells of this package call this.

        Args:
            parameter (Parameter): the loss scale, float32 of shape ().

        Raises:
            ValueError: if another train step already uses the cell. A copy of the cell is not bound to any.
        """
        if self._bound_id == id(self) and parameter is not self.bound_loss_scale:
            raise ValueError(
                f"This {type(self).__name__} already scales the loss of another train step, and an update cell can "
                "serve only one train step. Make an update cell for each train step. To continue from the state of the "
                "old cell, call new_cell.load_state_dict(old_cell.state_dict())."
            )
        self._bound_id = id(self)
        # Bypass nn.Cell.__setattr__, which would make the Parameter of the loss scale a child of this cell too.
        object.__setattr__(self, "bound_loss_scale", parameter)
        self._observe_loads()
