"""``RuleUpdateCell``: the update cell that works with any rule, and the base class of the public update cells."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from mindspore import Parameter, Tensor
from mindspore import dtype as mstype

from mindformers_adaptive.cells.compiled_update import CompiledUpdateCell, tensor_of
from mindformers_adaptive.rules.checks import to_float32
from mindformers_adaptive.rules.fields import LARGEST_GRADIENT, form_of
from mindformers_adaptive.rules.rule import Rule
from mindformers_adaptive.rules.saved_state import (
    Snapshot,
    fields_from_outside,
    from_values,
    repair,
    repair_loss_scale,
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

__all__ = ["RuleUpdateCell"]


class RuleUpdateCell(CompiledUpdateCell):
    """Update cell of any loss-scaling rule, with methods to read, save, restore and repair the state of the rule.

    Args:
        rule, start, history_size: as of :class:`~mindformers_adaptive.cells.compiled_update.CompiledUpdateCell`.
    """

    # The only rule class that this update cell accepts, or None if it accepts any rule.
    rule_class: type[Rule] | None = None
    bound_loss_scale: Any = None
    # The id of this update cell when it was bound to a loss scale. A copy has another id, and can be bound again.
    _bound_id: int | None = None

    def __init__(self, rule: Rule, start: Any, history_size: int = 0) -> None:
        super().__init__(rule, start, history_size)
        self.form = form_of(rule)
        # Store the run number and the checksum of the state's layout as Parameters, because checkpoints restore only
        # Parameters. Until training begins, both numbers are negative, unlike saved numbers.
        self.loss_scaling_run = _new_parameter(RUN, -1)
        self.loss_scaling_form = _new_parameter(FORM, -self.form)
        # The number of the training step whose loss scale is in loss_scale_value.
        self._known_step = 1
        # The cell's state when the host last set or checked it, and whether the cell has stepped since (None: unknown).
        self._last_seen = self._snapshot()
        self._has_stepped: bool | None = False

    @classmethod
    def from_rule(cls, rule: Rule, state: Any, steps: int = 0) -> RuleUpdateCell:
        """Return an update cell that applies the given rule, starting from the given state.

        Args:
            rule (Rule): the rule.
            state (NamedTuple): a state of the rule.
            steps (int): how many steps led to it. Default: 0, it is the start.

        Returns:
            Cell of this class with the loss scale and the values of ``state``.

        Raises:
            TypeError: if ``rule`` is not exactly of the rule of this class; a subclass of it may take other steps.

        Examples:
            >>> from mindformers_adaptive import AdaptiveLossScaleUpdateCell, AdaptiveRule
            >>> rule = AdaptiveRule(hysteresis=2)
            >>> state = rule.step(rule.start(2.0**16), overflow=True)
            >>> AdaptiveLossScaleUpdateCell.from_rule(rule, state, steps=1).state()["hysteresis_budget"]
            1
        """
        if cls.rule_class not in (None, type(rule)):
            raise TypeError(
                f"'rule' of {cls.__name__} must be exactly a {cls.rule_class.__name__}, but got a "
                f"{type(rule).__name__}. Use RuleLossScaleUpdateCell.from_rule(), which takes any rule."
            )
        cell = cls._for_rule(rule, state)
        if steps > 0:
            cell.write_rule_state(state, steps)
        return cell

    @classmethod
    def _for_rule(cls, rule: Rule, state: Any, **options: Any) -> RuleUpdateCell:
        """Return an update cell of this class that follows the rule and starts at the loss scale of ``state``."""
        return cls(state.loss_scale, **rule.arguments, **options)

    def state(self) -> dict[str, Any]:
        """Return the state of the loss scaling. Reading the state waits for the device.

        Returns:
            dict[str, Union[int, float, tuple[float, ...]]], a tuple for a vector without named parts. It begins with
            ``loss_scale``, the scale of the next step, unless a train-step cell of another package keeps it.
        """
        values = self._values()
        return {"loss_scale": self.present_loss_scale, **values} if self._knows_loss_scale else values

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
    def run_number(self) -> int:
        """int: the number of the run, by which a resumed run finds its records; 0 until a callback sets the number."""
        return max(int(self.loss_scaling_run.asnumpy()), 0)

    @run_number.setter
    def run_number(self, number: int) -> None:
        self.loss_scaling_run.set_data(Tensor(number, mstype.int32))
        self._last_seen = self._last_seen._replace(run=number)

    @property
    def present_loss_scale(self) -> float:
        """float: the loss scale of the next step, or the initial one until a train-step cell is bound."""
        if self.bound_loss_scale is None:
            return float(self.loss_scale_value)
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
        loss_scale = self.present_loss_scale
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

    def check_state(self, *, at_first_step: bool = False) -> None:
        """Replace restored values that do not fit the rule of this update cell; keep values that training computed.

        A checkpoint may come from another cell, or from this one with other arguments. Each change gives a warning
        that names the Parameter, its value and the value used instead. The start of training calls this; call it
        yourself if you load a checkpoint without calling ``set_train()`` afterwards.

        Args:
            at_first_step (bool): whether it is known that no step was taken since training started. Default: False.

        Raises:
            ValueError: if the restored loss scale is not finite and above 0.

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
        now = self._snapshot()
        now.values.update(self._take_former_counters())
        may_have_stepped = self._has_stepped is True or (self._has_stepped is None and not at_first_step)
        restored = fields_from_outside(self.rule, self._last_seen, now, may_have_stepped)
        loss_scale = repair_loss_scale(self.rule, self.present_loss_scale, "scale_sense")
        values, problems = repair(self.rule, now.values, loss_scale, restored)
        self._write(None if now.loss_scale is None else loss_scale, values)
        self._has_stepped = None
        _warned(problems)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._has_stepped = True
        return super().__call__(*args, **kwargs)

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
            ValueError: if the restored loss scale is not finite and above 0.
        """
        if flags.get("training") and not self.has_signal:
            raise TypeError(
                f"{type(self).__name__} needs a train-step cell that measures the largest gradient of each step. Use a "
                "cell of mindformers_adaptive.wrapper, such as TrainOneStepWithLossScaleCell. Or, in your own cell, "
                "assign update_cell.largest_gradient in each step, and call update_cell.declare_signal()."
            )
        super().add_flags_recursive(**flags)
        if flags.get("training"):
            self.check_state()
        return self

    def _snapshot(self) -> Snapshot:
        loss_scale = self.present_loss_scale if self._knows_loss_scale else None
        run, form = (int(parameter.asnumpy()) for parameter in (self.loss_scaling_run, self.loss_scaling_form))
        return Snapshot(loss_scale, run, form, self._values())

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
            if self.bound_loss_scale is not None and loss_scale != self.present_loss_scale:
                self.bound_loss_scale.set_data(Tensor(loss_scale, mstype.float32))
            self.loss_scale_value, self._known_step = loss_scale, values["cur_iter"]
        present = self._values()
        for field in self._fields:
            if any(repr(values[key]) != repr(present[key]) for key in field.keys):
                getattr(self, field.name).set_data(tensor_of(field, values))
        if int(self.loss_scaling_form.asnumpy()) != self.form:
            self.loss_scaling_form.set_data(Tensor(self.form, mstype.int32))
        if int(self.loss_scaling_run.asnumpy()) < 0:
            self.run_number = 0
        self._last_seen = self._snapshot()
        self._has_stepped = False


def _warned(problems: list[str]) -> list[str]:
    for problem in problems:
        warnings.warn(problem, stacklevel=4)
    return problems


def _new_parameter(name: str, number: int) -> Any:
    return Parameter(Tensor(number, mstype.int32), name=name, requires_grad=False)
