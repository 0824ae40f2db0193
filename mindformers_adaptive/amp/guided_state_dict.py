"""The state of what has a gradient-guided update cell, which is that of the cell."""

__all__ = ["GuidedStateDict"]


class GuidedStateDict:
    """Mixin of manager and scaler: they have ``update_cell``, and its state is theirs."""

    @property
    def inv_scale(self):
        """float: the reciprocal of the loss scale, by which gradients are multiplied."""
        return self.update_cell.inv_scale

    def state_dict(self):
        """Return the state as numbers, as ``GradientGuidedLossScaleUpdateCell.state_dict()`` does."""
        return self.update_cell.state_dict()

    def load_state_dict(self, state_dict):
        """Go on from a state, as ``GradientGuidedLossScaleUpdateCell.load_state_dict()`` does, with its errors."""
        self.update_cell.load_state_dict(state_dict)
