"""``RuleUpdateCell``: the update cell that works with any rule, and the base class of the public update cells."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from mindspore import Parameter, Tensor
from mindspore import dtype as mstype

from mindformers_adaptive.cells.compiled_update import CellWithLossScale, tensor_of
from mindformers_adaptive.cells.graph_form import can_try, try_rule
from mindformers_adaptive.cells.loads import write
from mindformers_adaptive.rules.fields import LARGEST_GRADIENT, form_of, is_of_this_package
from mindformers_adaptive.rules.rule import Rule
from mindformers_adaptive.rules.saved_state import (
    from_values,
    repair,
    repair_loss_scale,
    restored_fields,
    to_values,
)
from mindformers_adaptive.rules.state_dict import (
    FORM,
    FORMER_NAMES,
    RUN,
    counters_of_megatron,
    grad_scaler_in,
    read_state,
    to_state_dict,
)

# The class and the arguments of each user's rule that was tried in this process.
_TRIED: set[tuple[type, str]] = set()


class RuleUpdateCell(CellWithLossScale):
    """Update cell of any loss-scaling rule, with methods to read, save, restore and repair the state of the rule.

    Args:
        rule, start, history_size: as of :class:`~mindformers_adaptive.cells.compiled_update.CompiledUpdateCell`.
    """

    # The class of this update cell's rule, or None if the cell takes any rule.
    rule_class: type[Rule] | None = None

    def __init__(self, rule: Rule, start: Any, history_size: int = 0) -> None:
        super().__init__(rule, start, history_size)
        self.form = form_of(rule)
        # Store the run number and the checksum of the state's layout as Parameters, because checkpoints restore only
        # Parameters. Until training begins, both numbers are negative, unlike saved numbers.
        self.loss_scaling_run = _new_parameter(RUN, -1)
        self.loss_scaling_form = _new_parameter(FORM, -self.form)
        # The number of the next training step when the host last wrote or checked the state.
        self._written_step = 1
        self._is_tried = is_of_this_package(type(rule))
        self._observe_loads()

    def _observed_parameters(self) -> dict[str, Any]:
        """Return the Parameters whose loads this cell notes, by the names of the fields."""
        parameters = {field.name: getattr(self, field.name) for field in self._fields}
        parameters |= {RUN: self.loss_scaling_run, FORM: self.loss_scaling_form}
        return parameters if self.bound_loss_scale is None else {**parameters, "loss_scale": self.bound_loss_scale}

    def _note_load(self, name: str) -> None:
        if not self.loaded:
            self._warn_of_late_load()
        super()._note_load(name)

    def _warn_of_late_load(self) -> None:
        if self.is_in_observed_step or int(self.cur_iter.asnumpy()) == self._written_step:
            return
        warnings.warn(
            f"A state is loaded into {type(self).__name__} after it has taken steps, and its training step is not a "
            "cell of mindformers_adaptive.wrapper. If weights or optimizer state were loaded too, the compiled step "
            "may go on with their old values. Load these by parameter.copy_(value), or build a new training step.",
            stacklevel=4,
        )

    @classmethod
    def _for_rule(cls, rule: Rule, state: Any) -> RuleUpdateCell:
        """Return an update cell of this class that follows the rule and starts at the loss scale of ``state``."""
        return cls(state.loss_scale, **rule.arguments)

    def state(self) -> dict[str, Any]:
        """Return the state of the loss scaling. Reading the state waits for the device.

        Returns:
            dict[str, Union[int, float, tuple[float, ...]]], a tuple for a vector without named parts. It begins with
            ``loss_scale``, the scale of the next step, unless a train-step cell of another package keeps it.
        """
        values = self._values()
        return {"loss_scale": self.loss_scale_value, **values} if self._knows_loss_scale else values

    def _values(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for field in self._fields:
            values |= field.by_key(getattr(self, field.name).asnumpy().tolist())
        return values

    def rule_state(self) -> Any:
        """Return the state of this cell's rule as a NamedTuple, with the loss scale for the next step.

        Returns:
            NamedTuple, as ``rule.step()`` returns it.

        Raises:
            RuntimeError: as of :meth:`known_loss_scale`.
        """
        return from_values(self.rule, self.known_loss_scale(), self._values())

    def write_rule_state(self, state: Any, steps: int, last_event: int | None = None) -> None:
        """Continue from the given state of this cell's rule.

        Args:
            state (NamedTuple): the state, with the loss scale for the next step.
            steps (int): how many steps led to it.
            last_event (int, optional): the step of the last overflow or raise. Default: None, the last step.
        """
        self._write(state.loss_scale, {**self._values(), **to_values(self.rule, state, steps, last_event)})

    @property
    def run_number(self) -> int:
        """int: the number of the run, by which a resumed run finds its records; 0 until a callback sets the number."""
        return max(int(self.loss_scaling_run.asnumpy()), 0)

    @run_number.setter
    def run_number(self, number: int) -> None:
        write(self.loss_scaling_run, Tensor(number, mstype.int32))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state as a dict of numbers for ``mindspore.save_checkpoint(..., append_dict=)`` or for JSON.

        Megatron-LM's ``DynamicGradScaler`` loads it too, once ``scale`` is a tensor of one element.

        Args:
            *args (Any): with any argument, as from a parent cell, this is ``nn.Cell.state_dict``.
            **kwargs (Any): as ``args``.

        Returns:
            dict[str, Union[int, float]], with the loss scale as ``scale``; the clean steps since the last overflow or
            raise as ``growth_tracker``; the overflows left until a drop as ``hysteresis_tracker``; the numbers of run
            and form; and the state, vectors as ``name_0``, ``name_1``, ....

        Raises:
            RuntimeError: as of :meth:`known_loss_scale`.
        """
        if args or kwargs:
            return super().state_dict(*args, **kwargs)
        return to_state_dict(self.rule, self.known_loss_scale(), self._values(), self.run_number)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a saved state. Do this before another package's train-step cell is created and copies the loss scale.

        Args:
            state_dict (dict): what ``state_dict()`` or ``mindspore.load_checkpoint`` returned, Megatron-LM's
                ``grad_scaler``, or its optimizer state; one without ``grad_scaler`` gives a warning and changes
                nothing. Values are numbers or tensors of one element; other keys are ignored. Without the rule's own
                state, as from Megatron-LM, the present state stays. A warning names each value that is replaced.

        Raises:
            KeyError: if the loss scale is missing, or both the counters and Megatron-LM's trackers.
            TypeError: if a counter is not an integer, the loss scale no number, or the state no dict.
            ValueError: if the loss scale is not finite and above 0, a counter does not fit into 32 bits, or
                Megatron-LM's trackers do not fit the rule.
        """
        state = grad_scaler_in(state_dict)
        if state is None:
            warnings.warn("The checkpoint has no 'grad_scaler': the loss scaling stays as it is.", stacklevel=2)
            return
        present = self._values()
        restored = read_state(self.rule, state)
        if not restored.restored:
            state = {**state, **present, **counters_of_megatron(self.rule, state)}
            restored = read_state(self.rule, state)
        if restored.loss_scale is None:
            raise KeyError("The state has no 'scale'. Give a dict that state_dict() returned.")
        missing = [key for key in present if key not in restored.values and key != LARGEST_GRADIENT.name]
        if not self.load_state(state) and missing:
            warnings.warn(f"The state has no {', '.join(missing)}: these values stay as they are.", stacklevel=2)

    def load_state(self, state: Mapping[str, Any]) -> list[str]:
        """Continue from a restored state, of this rule or of another rule.

        Without the state of this rule, the rule's own state starts afresh at the loss scale.

        Args:
            state (Mapping[str, Any]): numbers, tensors and lists of numbers, as ``state()`` or ``state_dict()`` of an
                update cell returned them. Without a loss scale, the present one stays; other keys are ignored.

        Returns:
            list[str], a sentence for each thing that had to be changed; each was a warning too.

        Raises:
            TypeError: if a value is not a number of its kind.
            ValueError: if a counter does not fit into 32 bits, or the loss scale is not finite and above 0.

        Examples:
            >>> from mindformers_adaptive import AdaptiveLossScaleUpdateCell
            >>> cell = AdaptiveLossScaleUpdateCell(loss_scale_value=2**16, scale_factor=2, scale_window=20)
            >>> cell.load_state({"loss_scale": 2.0**10, "scale_window": 50, "window_index": 3, "cur_iter": 400})
            []
            >>> cell.state()["loss_scale"], cell.state()["window_index"]
            (1024.0, 3)
        """
        restored = read_state(self.rule, state)
        self._warn_of_late_load()
        loss_scale = self.loss_scale_value
        if restored.loss_scale is not None:
            loss_scale = repair_loss_scale(self.rule, restored.loss_scale, restored.scale_name)
        values, problems = repair(self.rule, {**self._values(), **restored.values}, loss_scale, restored.restored)
        if restored.run is not None:
            self.run_number = max(restored.run, 0)
        self._write(loss_scale, values)
        return _warned(problems)

    def accept_former_names(self) -> None:
        """Until training starts, also load counters that are named like attributes of MindFormers' own update cell.

        With a constant learning rate, checkpoints of MindFormers' train steps have the counters under those names.
        """
        if self.rule.counts_clean_steps:
            for name in FORMER_NAMES:
                setattr(self, f"former_{name}", _new_parameter(name, -1))

    def check_state(self) -> None:
        """Replace restored values that do not fit the rule of this update cell; keep values that training computed.

        A checkpoint may come from another cell, or from this one with other arguments. Each change gives a warning
        that names the Parameter, its value and the value used instead. The start of training calls this; call it
        yourself if you load a checkpoint without calling ``set_train()`` afterwards. The first call also tries a user's
        rule: random steps in MindSpore are compared with NumPy.

        Raises:
            ValueError: if the restored loss scale is not finite and above 0, or a user's rule computes other values in
                MindSpore than in NumPy.

        Examples:
            >>> import mindspore
            >>> from mindspore import Parameter
            >>> from mindformers_adaptive import AdaptiveLossScaleUpdateCell
            >>> cell = AdaptiveLossScaleUpdateCell(loss_scale_value=2**16, scale_factor=2, scale_window=20)
            >>> _ = mindspore.load_param_into_net(cell, {"list_index": Parameter(Tensor(99, mstype.int32))})
            >>> with warnings.catch_warnings(record=True) as caught:
            ...     warnings.simplefilter("always")
            ...     cell.check_state()
            >>> cell.state()["window_index"], len(caught)
            (0, 1)
        """
        self.try_own_rule()
        values = self._values()
        former = self._take_former_counters()
        values.update(former)
        form = int(self.loss_scaling_form.asnumpy())
        restored = restored_fields(self.rule, form, self.loaded | former.keys(), values)
        loss_scale = repair_loss_scale(self.rule, self.loss_scale_value, "scale_sense")
        values, problems = repair(self.rule, values, loss_scale, restored)
        self._write(loss_scale if self._knows_loss_scale else None, values)
        _warned(problems)

    def try_own_rule(self) -> None:
        """Compare a user's rule in NumPy with its compiled form, once; the rules of this package need no trial.

        A rule with the same class and arguments is not tried again, because a trial compiles a graph.

        Raises:
            ValueError: if the two compute different values.
        """
        if not self._is_tried and can_try():
            self._is_tried = True
            described = type(self.rule), repr(self.rule)
            if described not in _TRIED:
                try_rule(self.rule)
                _TRIED.add(described)

    def add_flags_recursive(self, **flags: bool) -> RuleUpdateCell:
        """Set flags as ``nn.Cell`` does. If ``training`` is True, also check a state restored from a checkpoint.

        ``set_train()`` of this cell or of one that contains it calls this, and so does ``Model.train``.

        Args:
            **flags (bool): as in ``nn.Cell``; ``training`` is True where training starts.

        Returns:
            Cell, this one.

        Raises:
            TypeError: if training starts with a train-step cell that does not assign the largest gradient, and the rule
                needs it.
            ValueError: as of :meth:`check_state`.
        """
        if flags.get("training") and not self.has_signal:
            raise TypeError(
                f"{type(self).__name__} needs a train-step cell that measures the largest gradient of each step. Use a "
                "cell of mindformers_adaptive.wrapper, such as TrainOneStepWithLossScaleCell. For Model, call "
                "mindformers_adaptive.enable_loss_scale_in_model() before you create it, on every device, and use no "
                "boost_level, pipeline stages or gradient accumulation. In your own cell, assign "
                "update_cell.largest_gradient in each step, and call update_cell.declare_signal()."
            )
        super().add_flags_recursive(**flags)
        if flags.get("training"):
            self.check_state()
        return self

    def _take_former_counters(self) -> dict[str, int]:
        counters = {}
        for name, key in FORMER_NAMES.items():
            if hasattr(self, attribute := f"former_{name}"):
                if (count := int(getattr(self, attribute).asnumpy())) >= 0:
                    counters[key] = count
                # Delete the Parameter with the former name, so that checkpoints of this training do not contain it.
                delattr(self, attribute)
        return counters

    def _write(self, loss_scale: float | None, values: dict[str, Any]) -> None:
        """Store the rule's state and the next loss scale in Parameters; a ``loss_scale`` of None keeps the scale."""
        if loss_scale is not None:
            if self.bound_loss_scale is not None and loss_scale != self.loss_scale_value:
                write(self.bound_loss_scale, Tensor(loss_scale, mstype.float32))
            self.loss_scale_value, self._known_step = loss_scale, values["cur_iter"]
        present = self._values()
        for field in self._fields:
            if any(repr(values[key]) != repr(present[key]) for key in field.keys):
                write(getattr(self, field.name), tensor_of(field, values))
        if int(self.loss_scaling_form.asnumpy()) != self.form:
            write(self.loss_scaling_form, Tensor(self.form, mstype.int32))
        if int(self.loss_scaling_run.asnumpy()) < 0:
            self.run_number = 0
        self._written_step = values["cur_iter"]
        self.loaded.clear()


def _warned(problems: list[str]) -> list[str]:
    for problem in problems:
        warnings.warn(problem, stacklevel=4)
    return problems


class StateOfUpdateCell:
    """Mixin of managers and scalers, whose state is the state of their present update cell."""

    _present_cell: Any

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loss scaling as a dict of numbers.

        Returns:
            dict[str, Union[int, float]], as ``state_dict()`` of the update cell returns it.
        """
        return dict(self._present_cell.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue loss scaling from a saved state.

        Args:
            state_dict (dict): as ``load_state_dict()`` of the update cell takes it.

        Raises:
            KeyError, TypeError, ValueError: if the update cell refuses the state.
        """
        self._present_cell.load_state_dict(state_dict)

    @property
    def inv_scale(self) -> float:
        """float: the reciprocal of the loss scale, by which gradients are multiplied."""
        return float(self._present_cell.inv_scale)


def _new_parameter(name: str, number: int) -> Any:
    return Parameter(Tensor(number, mstype.int32), name=name, requires_grad=False)
