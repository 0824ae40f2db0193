"""The state of the gradient-guided update cell in Parameters: made, read, written, and checked when training starts."""

import math
import warnings
from collections.abc import Mapping

import numpy as np
from mindspore import Parameter, Tensor
from mindspore import dtype as mstype

from mindformers_adaptive.cells.saved_state import SavedState
from mindformers_adaptive.rules.checks import to_float32
from mindformers_adaptive.rules.guided import GuidedState
from mindformers_adaptive.rules.guided_names import COUNTERS, PARAMETER_NAMES, PLACES
from mindformers_adaptive.rules.restored_guided_state import find_state_problem
from mindformers_adaptive.rules.restored_state import STEP_LIMIT, repair_loss_scale
from mindformers_adaptive.rules.state_dict import to_integer, to_number

__all__ = ["GuidedCellState"]

# The overflow rates in a state dict.
_RATES = tuple(f"overflow_rate_{place}" for place in range(PLACES))


class GuidedCellState(SavedState):
    """Mixin of the gradient-guided update cell: all that does not belong into its graph."""

    def _make_state(self, start):
        self.checked_state = None
        self.each_largest = None
        self.has_signal = False
        values = {"largest_gradient": 0.0, "cur_iter": 1, "last_overflow_iter": 0, **_values(start)}
        for name, value in values.items():
            dtype = mstype.float32 if name in ("level", "overflow_rate", "largest_gradient") else mstype.int32
            parameter = Parameter(Tensor(value, dtype), name=PARAMETER_NAMES[name], requires_grad=False)
            setattr(self, name, parameter)

    def state(self):
        """Return the state as numbers by the names of ``GuidedState``, ``overflow_rate`` as a tuple.

        Also ``cur_iter``, ``last_overflow_iter`` and ``largest_gradient``. Reading waits for the device.
        """
        values = {name: getattr(self, name).asnumpy().tolist() for name in PARAMETER_NAMES}
        counters = dict(zip(COUNTERS, values.pop("counters"), strict=True))
        rates = tuple(values.pop("overflow_rate"))
        return {**counters, "overflow_rate": rates, **values}

    def rule_state(self):
        """Return the state as the rule has it, :class:`~mindformers_adaptive.rules.guided.GuidedState`."""
        state = self.state()
        known = {name: state[name] for name in GuidedState._fields if name in state}
        flags = {name: bool(state[name]) for name in ("bound", "trial")}
        return GuidedState(loss_scale=self.present_loss_scale, **{**known, **flags})

    def state_dict(self, *args, **kwargs):
        """Return the state as numbers, which ``mindspore.save_checkpoint(..., append_dict=)`` and JSON take.

        With arguments, which a parent cell gives, it is ``nn.Cell.state_dict``.

        Returns:
            dict[str, Union[int, float]], with ``scale``, the loss scale; what ``state()`` returns; and the overflow
            rates one by one, ``overflow_rate_0`` to ``overflow_rate_15``.
        """
        if args or kwargs:
            return super().state_dict(*args, **kwargs)
        state = self.state()
        rates = state.pop("overflow_rate")
        return {"scale": self.present_loss_scale, **state, **dict(zip(_RATES, rates, strict=True))}

    def load_state_dict(self, state_dict):
        """Go on from a state. One that no run can reach gives a warning, and only its loss scale is kept.

        Args:
            state_dict (dict): what ``state_dict()`` returned, or what ``mindspore.load_checkpoint`` returned of it; or
                ``scale`` and what ``state()`` returned. Values are numbers or tensors of one element; other keys are
                ignored.

        Raises:
            KeyError: if something is missing.
            TypeError: if a counter is not an integer.
            ValueError: if the loss scale is not finite and above 0.
        """
        if "overflow_rate" in state_dict:
            state_dict = {**state_dict, **dict(zip(_RATES, state_dict["overflow_rate"], strict=True))}
        missing = [name for name in self.state_dict() if name not in state_dict]
        if missing:
            raise KeyError(
                f"The state has no {', '.join(missing)}. Give what state_dict() of a gradient-guided cell, manager or "
                "scaler returned."
            )
        state = {name: float(to_number(state_dict[name])) for name in ("level", "largest_gradient", *_RATES)}
        state["overflow_rate"] = [state.pop(name) for name in _RATES]
        state |= {name: to_integer(name, state_dict[name]) for name in self.state() if name not in state}
        self._write_scale(self._power_of_two(float(to_number(state_dict["scale"])), "scale"))
        self._write(state)
        self.check_state()

    @property
    def inv_scale(self):
        """float: the reciprocal of the loss scale, by which gradients are multiplied."""
        return to_float32(1.0 / self.present_loss_scale)

    def check_state(self):
        """Repair a restored state that this cell cannot go on with, with a warning.

        A checkpoint may come from another cell. The start of training calls this; call it yourself if you load a
        checkpoint without calling ``set_train()`` afterwards.
        """
        state = self.state()
        if state == self.checked_state:
            return
        scale = self._power_of_two(self.present_loss_scale, "scale_sense")
        self._write_scale(scale)
        problem = find_state_problem(self.rule, state)
        if problem:
            warnings.warn(f"{problem}: gradient-guided scaling starts afresh at loss scale {scale:g}.", stacklevel=3)
            steps = min(max(state["cur_iter"], 1), STEP_LIMIT)
            start = self.rule.start(scale)._replace(skipped_steps=min(max(state["skipped_steps"], 0), steps - 1))
            kept = {"cur_iter": steps, "last_overflow_iter": steps - 1, "largest_gradient": 0.0}
            self._write({**start._asdict(), **kept})
        self.checked_state = self.state()

    def add_flags_recursive(self, **flags):
        """As in ``nn.Cell``; training with a train-step cell that does not feed this cell is refused."""
        if flags.get("training") and not self.has_signal:
            raise TypeError(
                "GradientGuidedLossScaleUpdateCell needs a train-step cell that gives it the largest gradient of each "
                "step. Use TrainOneStepWithLossScaleCell, MFTrainOneStepCell or MFPipelineWithLossScaleCell of "
                "mindformers_adaptive.wrapper; for a train-step cell of your own, assign update_cell.largest_gradient "
                "in each step and call update_cell.declare_signal(names) once."
            )
        return super().add_flags_recursive(**flags)

    def overflowed_parameters(self):
        """Return the names of the Parameters whose gradients had an inf or a NaN in the last step, in their order.

        Needs ``track_per_parameter=True``; without it the list is empty. Reading waits for the device.
        """
        if self.each_largest is None:
            return []
        largest = self.each_largest.asnumpy()
        return [name for name, value in zip(self.parameter_names, largest, strict=True) if not math.isfinite(value)]

    def declare_signal(self, names):
        """Take note that somebody assigns ``largest_gradient`` before each call, as the train-step cells here do.

        Args:
            names (Sequence[str]): those of the Parameters, in the order of their gradients.
        """
        self.has_signal = True
        if not self.track_per_parameter:
            return
        self.parameter_names = tuple(names)
        largest = Parameter(Tensor(np.zeros(len(names)), mstype.float32), name="each_largest", requires_grad=False)
        # Not through nn.Cell, which would put it into every checkpoint.
        object.__setattr__(self, "each_largest", largest)

    def _power_of_two(self, loss_scale, name):
        bounded = repair_loss_scale(self.rule, loss_scale, name)
        exponent = max(math.frexp(bounded)[1] - 1, self.rule.min_exponent)
        if 2.0**exponent != bounded:
            warnings.warn(
                f"The checkpoint has '{name}' {bounded}, and this cell needs a power of two: {2.0**exponent} is used.",
                stacklevel=4,
            )
        return 2.0**exponent

    def _write(self, state: Mapping):
        values = {**state, **_values(GuidedState(**{name: state.get(name) for name in GuidedState._fields}))}
        for name in PARAMETER_NAMES:
            parameter = getattr(self, name)
            parameter.set_data(Tensor(values[name], parameter.dtype))


def _values(state):
    """The Parameters that a state of the rule fills, by attribute."""
    return {
        "counters": [int(getattr(state, name)) for name in COUNTERS],
        "level": state.level,
        "overflow_rate": state.overflow_rate,
        "skipped_steps": state.skipped_steps,
        "consecutive_overflows": state.consecutive_overflows,
    }
