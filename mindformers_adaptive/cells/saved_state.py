"""What the update cells of this package do beside their graphs: know their loss scale, check a restored state."""

from mindspore import Tensor
from mindspore import dtype as mstype

__all__ = ["SavedState", "read_restored_scale"]


class SavedState:
    """Mixin of the update cells, first in the list of bases.

    A class has ``rule``; ``state()``, its state as a dict of numbers; and ``check_state()``, which repairs a restored
    state.
    """

    keeps_history = False
    bound_loss_scale = None

    def bind_loss_scale(self, parameter):
        """Tell the cell which Parameter is its first input, for ``state_dict()`` and ``load_state_dict()``.

        The train-step cells of this package do it.
        """
        # Not through nn.Cell, which would make it a child of this cell too.
        object.__setattr__(self, "bound_loss_scale", parameter)

    def add_flags_recursive(self, **flags):
        """As in ``nn.Cell``; the start of training also checks a restored state.

        ``set_train()`` of this cell or of one that contains it calls this, and so does ``Model.train``.
        """
        super().add_flags_recursive(**flags)
        if flags.get("training"):
            self.check_state()
        return self

    def recent_steps(self, since=0):
        """Return the steps after ``since``, oldest first, at most the last ``history_size``.

        Args:
            since (int): the number of a step, counted from 1 as ``cur_iter`` is. Default: 0.

        Returns:
            list[dict], one for each step, without gaps up to the last step: ``step`` (int), ``overflow`` (bool),
            ``loss_scale`` (float) that the step used, ``next_loss_scale`` (float), the values after the step of the
            cell's counters (int) and, if the cell follows the gradients, ``largest_gradient`` (float) of the step.
            Steps from before a checkpoint was loaded are missing. Reading waits for the device.

        Examples:
            >>> from mindspore import Parameter
            >>> from mindformers_adaptive import AdaptiveLossScaleUpdateCell
            >>> cell = AdaptiveLossScaleUpdateCell(2**16, 2, 20, history_size=2)
            >>> loss_scale = Parameter(Tensor(cell.get_loss_scale()), name="loss_scale")
            >>> for overflow in (True, True, False):
            ...     _ = cell(loss_scale, Tensor(overflow))
            >>> [(step["step"], step["overflow"], step["loss_scale"]) for step in cell.recent_steps()]
            [(2, True, 32768.0), (3, False, 16384.0)]
        """
        if not self.keeps_history:
            return []
        return self.history.steps(since, last=int(self.cur_iter.asnumpy()) - 1)

    @property
    def present_loss_scale(self):
        """float: that of the next step, or the initial one where no train-step cell has bound its own."""
        return self.loss_scale_value if self.bound_loss_scale is None else float(self.bound_loss_scale.asnumpy())

    def _write_scale(self, loss_scale):
        self.loss_scale_value = loss_scale
        if self.bound_loss_scale is not None:
            self.bound_loss_scale.set_data(Tensor(loss_scale, mstype.float32))


def read_restored_scale(loss_scale_value):
    """Return a ``loss_scale_value`` that is a Tensor of one element as a float, and any other as it is.

    MindFormers gives a Parameter on resume, which would become a trainable child of the cell.
    """
    if not isinstance(loss_scale_value, Tensor):
        return loss_scale_value
    if loss_scale_value.size != 1:
        raise ValueError(
            f"'loss_scale_value' must hold one number, but got a Tensor of shape {loss_scale_value.shape}. Give a "
            "number, or a Tensor of shape () or (1,)."
        )
    return float(loss_scale_value.asnumpy().item())
