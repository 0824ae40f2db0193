"""Read from a train-step cell what loss scaling did in the last steps."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from mindformers.wrapper import MFPipelineWithLossScaleCell, MFTrainOneStepCell
from mindspore import Parameter, Tensor, nn

from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.rules.fields import STEP_FIELDS, Field
from mindformers_adaptive.rules.saved_state import all_fields

_OF_WINDOW = ("scale_window", "window_index")
# Recorded fields that some update cells lack. The value of a missing field is None.
_UNKNOWN = dict.fromkeys((*AdaptiveRule.recorded, "largest_gradient"))

# Positions in the outputs of MindFormers' train-step cells: the position of the norm of all gradients, and the position
# of the squared norm of each Parameter's gradient.
_PLACE_OF_NORM, _PLACE_OF_SQUARES = 4, 5

# The packages whose update cells increase the step count in each step, if they have a step count. A user's update cell
# may inherit a step count and never increase it.
_COUNTING = ("mindspore", "mindformers", "mindformers_adaptive")
_LARGEST_COUNT = 2**31 - 1


def last_step_before(params: Any, update_cell: Any, last_step: int) -> int:
    """Return the number of the last step that was taken before a training starts or resumes.

    Args:
        params (dict): what MindSpore gives to a callback.
        update_cell (Cell, optional): the update cell, whose step count is restored with its state.
        last_step (int): the last step of an earlier training with the same callback, or 0.
    """
    # After a resume, MindFormers counts steps from 0 again. The MindFormers callback that prints the loss has stored
    # how many steps were taken before, so add this number.
    counts = [params.get("initial_step"), *(getattr(callback, "initial_step", 0) for callback in params.list_callback)]
    by_model = params.cur_step_num + max((count for count in counts if isinstance(count, int)), default=0)
    by_cell = steps_taken(update_cell)
    return int(max(by_model, last_step if by_cell is None else by_cell))


def steps_taken(update_cell: Any) -> int | None:
    """Return how many steps an update cell has counted, or None if it does not count. Waits for the device."""
    count = _count({field.name: parameter for field, parameter in _state_fields(update_cell)})
    # A user's update cell may inherit a step count and never increase it, so do not trust such a count while it is 1.
    counts = count != 1 or type(update_cell).construct.__module__.partition(".")[0] in _COUNTING
    return count - 1 if counts and 1 <= count < _LARGEST_COUNT else None


def _count(parameters: dict[str, Any]) -> int:
    return int(parameters["cur_iter"].asnumpy()) if "cur_iter" in parameters else 0


def read_loss(outputs: Any) -> float | None:
    """Return the mean loss in a train-step cell's outputs, or None if there is no loss. Waits for the device."""
    loss = outputs[0] if isinstance(outputs, tuple | list) else outputs
    if not isinstance(loss, Tensor):
        return float(loss) if isinstance(loss, int | float) else None
    return float(np.mean(loss.float().asnumpy()))


def read_overflow(outputs: Any) -> bool | None:
    """Return the overflow flag in a train-step cell's outputs, or None if they have no flag. Waits for the device.

    Examples:
        >>> read_overflow((Tensor(2.5), Tensor([True]), Tensor(1024.0))), read_overflow(Tensor(2.5))
        (True, None)
    """
    if not isinstance(outputs, tuple | list) or len(outputs) < 2:
        return None
    overflow = outputs[1]
    return bool(np.any(overflow.asnumpy() if isinstance(overflow, Tensor) else overflow))


class StepReader:
    """Reads what loss scaling did in the last steps of a train-step cell with any update cell.

    Args:
        train_step (Cell): a cell that scales its loss by the Parameter ``scale_sense``.

    Attributes:
        train_step (Cell): that cell.
        update_cell (Cell, optional): its update cell; None for a constant loss scale.
        window (tuple): the scale window in steps, and its index on the ladder of windows; None if unknown.
        recorded (tuple[str, ...]): fields that only the rule of the update cell records, beside the common fields.
        measures_gradients (bool): whether the update cell is told the largest gradient of each step.
        counts_overflows (bool): whether the update cell counts consecutive overflows, so that the host need not read
            every step.
    """

    def __init__(self, train_step: Any) -> None:
        self.train_step = train_step
        self.update_cell: Any = getattr(train_step, "loss_scaling_manager", None)
        self.recorded = tuple(name for name in _rule_of(self.update_cell).recorded if name not in _UNKNOWN)
        self._fields = _state_fields(self.update_cell)
        self._parameters = {field.name: parameter for field, parameter in self._fields}
        self.measures_gradients = "largest_gradient" in self._parameters
        self.counts_overflows = "consecutive_overflows" in self._state()
        self.window = tuple(map(self._state().get, _OF_WINDOW))
        self._loss_scale = self._read_loss_scale()
        self._skipped_steps: int | None = 0
        self._skipped_by_others = self._consecutive_overflows = 0

    def steps_taken(self) -> int | None:
        """Return how many steps the update cell has counted, or None if it does not count. Waits for the device."""
        # If the update cell's step count is damaged or has reached the int32 limit, ignore this count from now on.
        if not 1 <= _count(self._parameters) < _LARGEST_COUNT:
            self._parameters.pop("cur_iter", None)
        return steps_taken(self.update_cell) if "cur_iter" in self._parameters else None

    def count_from(self, skipped_steps: int | None) -> None:
        """Set how many steps were skipped before this training, or None if unknown.

        Counting continues from this number if the update cell does not count skipped steps, or did not see all of these
        steps because another update cell was used before.
        """
        self._skipped_steps = skipped_steps
        self._skipped_by_others = max((skipped_steps or 0) - self._state().get("skipped_steps", 0), 0)

    def read(self, step: int, count: int, outputs: Any) -> list[dict[str, Any]]:
        """Return what loss scaling did in the steps since the previous call of this method, as far as it is known.

        Args:
            step (int): the number of the last step.
            count (int): the number of steps since the previous call, at least 1.
            outputs (object): the outputs of the train-step cell in the last step.

        Returns:
            list[dict], oldest first and without gaps: the last step at least, and all ``count`` if the update cell
            has a history that is long enough. Unknown values are None.
        """
        last = self.steps_taken() if hasattr(self.update_cell, "recent_steps") else None
        history = [] if last is None else self.update_cell.recent_steps(since=last - count)
        entries = [{**_UNKNOWN, **entry, "step": entry["step"] - last + step} for entry in history]
        entries = entries or [self._read_last(step, count, outputs)]
        if self.measures_gradients:
            values = {"gradient_format": self.update_cell.rule.gradient_format.to_config()}
            entries = [entry | values for entry in entries]
        if "skipped_steps" in self._parameters:
            entries = [entry | {"skipped_steps": entry["skipped_steps"] + self._skipped_by_others} for entry in entries]
        self.window = tuple(map(entries[-1].get, _OF_WINDOW))
        self._loss_scale = entries[-1]["next_loss_scale"]
        return entries

    def gradient_norm(self, outputs: Any) -> float | None:
        """Return the norm of a step's unscaled gradients before clipping, or None if the train-step cell has no norm.

        Waits for the device.

        Args:
            outputs (object): the outputs of the train-step cell.
        """
        if not isinstance(self.train_step, MFTrainOneStepCell | MFPipelineWithLossScaleCell):
            return None
        outputs = outputs if isinstance(outputs, tuple | list) else ()
        norm, squares = (outputs[at] if len(outputs) > at else None for at in (_PLACE_OF_NORM, _PLACE_OF_SQUARES))
        if isinstance(norm, Tensor) and norm.size == 1:
            return float(norm.asnumpy().item())
        # In a distributed training, the squared norms need not cover the gradients of all processes, so the norm is
        # unknown.
        if isinstance(squares, Tensor) and not self.train_step.is_distributed:
            return math.sqrt(np.sum(squares.asnumpy(), dtype=np.float64))
        return None

    def dropped_by_norm(self, overflow: bool | None, norm: float | None) -> bool | None:
        """Return whether MindFormers dropped a step because its gradient norm was too large; None if unknown.

        Args:
            overflow (bool, optional): whether the step overflowed, and was skipped for that.
            norm (float, optional): the norm of the step's gradients.
        """
        if overflow or not getattr(self.train_step, "use_skip_data_by_global_norm", False):
            return False
        if overflow is None or norm is None:
            return None
        # Compare as MindFormers' graph does: a norm of NaN is not below the threshold, so the step was dropped.
        return not norm < self.train_step.global_norm_spike_threshold

    def _read_last(self, step: int, count: int, outputs: Any) -> dict[str, Any]:
        state = self._state()
        next_loss_scale = self._read_loss_scale()
        following = state.get("consecutive_overflows")
        overflow = read_overflow(outputs) if following is None else following > 0
        is_fixed = self.update_cell is None or isinstance(self.update_cell, nn.FixedLossScaleUpdateCell)
        if count > 1:
            self._skipped_steps, self._consecutive_overflows = None, 0
        if self._skipped_steps is not None and overflow is not None:
            self._skipped_steps += overflow
        self._consecutive_overflows = self._consecutive_overflows + 1 if overflow else 0
        return {
            "step": step,
            "overflow": overflow,
            # The step's loss scale is unknown if several steps were taken since the last call, unless the loss scale
            # never changes.
            "loss_scale": self._loss_scale if count == 1 else next_loss_scale if is_fixed else None,
            "next_loss_scale": next_loss_scale,
            **{name: state.get(name) for name in (*_UNKNOWN, *self.recorded)},
            "skipped_steps": state.get("skipped_steps", self._skipped_steps),
            "consecutive_overflows": self._consecutive_overflows if following is None else following,
        }

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for field, parameter in self._fields:
            state |= field.by_key(parameter.asnumpy().tolist())
        # MindSpore's own dynamic update cell keeps its scale window as a constant. An update cell with a rule does not
        # use this constant.
        window = getattr(self.update_cell, "scale_window", None)
        if "scale_window" not in state and isinstance(window, Tensor) and not hasattr(self.update_cell, "rule"):
            state["scale_window"] = int(window.asnumpy())
        return state

    def _read_loss_scale(self) -> float:
        return float(self.train_step.scale_sense.asnumpy().item())


def find_reader(params: Any) -> StepReader | None:
    """Return a reader of the first cell in a training that scales its loss by a Parameter; None without such a cell.

    Args:
        params (dict): what MindSpore gives to a callback.
    """
    networks = filter(None, (params.get("train_network"), params.get("network")))
    cells = (cell for network in networks for _, cell in network.cells_and_names())
    return next((StepReader(cell) for cell in cells if isinstance(getattr(cell, "scale_sense", None), Parameter)), None)


def _rule_of(update_cell: Any) -> Any:
    """Return the rule of an update cell. Cells without a rule, such as MindFormers' own, count as the adaptive rule."""
    return getattr(update_cell, "rule", AdaptiveRule)


def _state_fields(update_cell: Any) -> list[tuple[Field, Any]]:
    """Return the recorded state fields of an update cell, with their Parameters."""
    if not isinstance(update_cell, nn.Cell):
        return []
    # Parent cells may put a prefix in front of the names of Parameters.
    by_name = {parameter.name.rpartition(".")[2]: parameter for parameter in update_cell.get_parameters()}
    rule = _rule_of(update_cell)
    recorded = {*_UNKNOWN, *rule.recorded, *(field.name for field in STEP_FIELDS)}
    fields = [field for field in all_fields(rule) if field.parameter in by_name and recorded.intersection(field.keys)]
    return [(field, by_name[field.parameter]) for field in fields]
