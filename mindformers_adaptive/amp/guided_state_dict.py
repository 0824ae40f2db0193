"""The state of what has a gradient-guided update cell, which is that of the cell."""

from collections.abc import Mapping
from typing import Any

__all__ = ["GuidedStateDict"]


class GuidedStateDict:
    """Mixin of manager and scaler: they have ``update_cell``, and its state is theirs."""

    update_cell: Any

    @property
    def inv_scale(self) -> float:
        """float: the reciprocal of the loss scale, by which gradients are multiplied."""
        return float(self.update_cell.inv_scale)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as numbers, as ``GradientGuidedLossScaleUpdateCell.state_dict()`` does."""
        return dict(self.update_cell.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state, as ``GradientGuidedLossScaleUpdateCell.load_state_dict()`` does, with its errors."""
        self.update_cell.load_state_dict(state_dict)
