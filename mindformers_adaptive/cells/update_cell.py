"""``RuleUpdateCell``: the update cell of any rule, which the public cells are signatures of."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

from mindspore import Parameter, Tensor
from mindspore import dtype as mstype

from mindformers_adaptive.cells.compiled_update import CompiledUpdateCell, tensor_of
from mindformers_adaptive.rules.checks import to_float32
from mindformers_adaptive.rules.rule import Rule
from mindformers_adaptive.rules.saved_state import from_values, repair, repair_loss_scale, to_values
from mindformers_adaptive.rules.state_dict import (
    RUN,
    fields_in,
    grad_scaler_in,
    read_restored,
    read_state_dict,
    run_in,
    to_state_dict,
)

__all__ = ["RuleUpdateCell", "read_restored_scale"]


class RuleUpdateCell(CompiledUpdateCell):
    """Update cell of a rule whose state is read, saved, restored and repaired.

    Args:
        rule, start, history_size: as of :class:`~mindformers_adaptive.cells.compiled_update.CompiledUpdateCell`.
    """

    bound_loss_scale: Any = None

    def __init__(self, rule: Rule, start: Any, history_size: int = 0) -> None:
        super().__init__(rule, start, history_size)
        # Read by no graph. A Parameter, because a checkpoint that MindSpore loads brings back nothing else.
        self.loss_scaling_run = Parameter(Tensor(0, mstype.int32), name=RUN, requires_grad=False)
        # The loss scale and the state that this cell wrote or checked last; None if it did not know the scale then.
        self._settled: tuple[float, dict[str, Any]] | None = None
        # The fields that were set from outside since then.
        self.restored: set[str] = set()
        for field in self._fields:
            _notice_when_set(getattr(self, field.name), field.name, self.restored)

    @classmethod
    def from_rule(cls, rule: Rule, state: Any, steps: int = 0) -> RuleUpdateCell:
        """Return a cell that goes on by a rule from a state.

        Args:
            rule (Rule): the rule.
            state (NamedTuple): its state.
            steps (int): how many steps led to it. Default: 0, it is the start.

        Returns:
            Cell of this class, whose ``state()`` and loss scale are those of ``state``.

        Examples:
            >>> from mindformers_adaptive import AdaptiveLossScaleUpdateCell, AdaptiveRule
            >>> rule = AdaptiveRule(hysteresis=2)
            >>> state = rule.step(rule.start(2.0**16), overflow=True)
            >>> AdaptiveLossScaleUpdateCell.from_rule(rule, state, steps=1).state()["hysteresis_budget"]
            1
        """
        cell = cls._for_rule(rule, state)
        if steps > 0:
            cell.write_rule_state(state, steps)
        return cell

    @classmethod
    def _for_rule(cls, rule: Rule, state: Any, **options: Any) -> RuleUpdateCell:
        """Return a cell with this rule that starts at the loss scale of a state."""
        return cls(state.loss_scale, **rule.arguments, **options)

    def state(self) -> dict[str, Any]:
        """Return the state. Reading waits for the device.

        Returns:
            dict[str, Union[int, float, tuple[float, ...]]], a tuple for a vector without named parts. It begins with
            ``loss_scale``, that of the next step, unless a train-step cell of another package keeps it.
        """
        values = self._values()
        return {"loss_scale": self.present_loss_scale, **values} if self._knows_loss_scale(values) else values

    def _values(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for field in self._fields:
            values |= field.by_key(getattr(self, field.name).asnumpy().tolist())
        return values

    def rule_state(self) -> Any:
        """Return the state as the rule has it.

        Returns:
            NamedTuple, with the loss scale for the next step.

        Raises:
            RuntimeError: as of :meth:`known_loss_scale`.
        """
        return from_values(self.rule, self.known_loss_scale(), self._values())

    def write_rule_state(self, state: Any, steps: int, last_event: int | None = None) -> None:
        """Go on from a state of the rule.

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
        if not self._knows_loss_scale(self._values()):
            raise RuntimeError(
                "The update cell does not know its loss scale, because its train-step cell is not one of "
                "mindformers_adaptive.wrapper. Call update_cell.bind_loss_scale(train_step.scale_sense) first."
            )
        return self.present_loss_scale

    def _knows_loss_scale(self, values: Mapping[str, Any]) -> bool:
        is_own = values["cur_iter"] == 1 or (self.loss_scale_value, values) == self._settled
        return is_own or self.bound_loss_scale is not None

    @property
    def run_number(self) -> int:
        """int: the number of the run, by which it finds its records again; 0 until a callback sets it."""
        return int(self.loss_scaling_run.asnumpy())

    @run_number.setter
    def run_number(self, number: int) -> None:
        self.loss_scaling_run.set_data(Tensor(number, mstype.int32))

    @property
    def present_loss_scale(self) -> float:
        """float: that of the next step, or the initial one where no train-step cell has bound its own."""
        if self.bound_loss_scale is None:
            return float(self.loss_scale_value)
        return float(self.bound_loss_scale.asnumpy())

    @property
    def inv_scale(self) -> float:
        """float: the reciprocal of the loss scale, by which gradients are multiplied."""
        return to_float32(1.0 / self.known_loss_scale())

    def bind_loss_scale(self, parameter: Any) -> None:
        """Tell the cell which Parameter is its first input, for ``state_dict()`` and ``load_state_dict()``.

        The train-step cells of this package do it.

        Args:
            parameter (Parameter): the loss scale, float32 of shape ().
        """
        # Not through nn.Cell, which would make it a child of this cell too.
        object.__setattr__(self, "bound_loss_scale", parameter)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state as numbers, which ``mindspore.save_checkpoint(..., append_dict=)`` and JSON take.

        Megatron-LM's ``DynamicGradScaler`` loads it too, once ``scale`` is a tensor:
        ``state["scale"] = torch.tensor([state["scale"]])``.

        Args:
            *args (Any): those of ``nn.Cell.state_dict``, which a parent cell gives. Then it is that method.
            **kwargs (Any): likewise.

        Returns:
            dict[str, Union[int, float]], with ``scale``, the loss scale; ``growth_tracker``, the clean steps since the
            last overflow or raise; ``hysteresis_tracker``, the overflows left until a drop; ``loss_scaling_run``, the
            number of the run for its records; and the state, vectors element by element as ``name_0``, ``name_1``, ....

        Raises:
            RuntimeError: if this cell took steps in a train-step cell of another package, and so does not know its
                loss scale.
        """
        if args or kwargs:
            return super().state_dict(*args, **kwargs)
        return to_state_dict(self.rule, self.known_loss_scale(), self._values(), self.run_number)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state; in a train-step cell of another package, load it before the cell is given to that.

        Args:
            state_dict (dict): what ``state_dict()`` or ``mindspore.load_checkpoint`` returned, Megatron-LM's
                ``grad_scaler``, or the state of the optimizer around that; where such a one has no ``grad_scaler``, a
                warning says so and nothing changes. Values are numbers or tensors of one element; other keys are
                ignored. Where there is no state of the rule itself, as from Megatron-LM, the present one stays.
                Counters that no run can reach, and a state that the rule cannot have, are changed with a warning.

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
        name, loss_scale, given = read_state_dict(self.rule, state, present)
        loss_scale = repair_loss_scale(self.rule, loss_scale, name)
        self.run_number = run_in(state, self.run_number)
        values, is_changed = _repair(self.rule, {**present, **given}, loss_scale, fields_in(self.rule, given))
        self._write(loss_scale, values)
        missing = [key for key in present if key not in given and key not in self.signals]
        if missing and not is_changed:
            warnings.warn(f"The state has no {', '.join(missing)}: what it lacks stays as it is.", stacklevel=2)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state()`` of an update cell returned, of this rule or of another, at the present scale.

        What another cell has that this one has not is left out, with a warning where a state of this rule is missing.

        Args:
            state (dict): numbers, and lists of numbers.

        Raises:
            TypeError: if a value is not a number of its kind.
            ValueError: if a counter does not fit into 32 bits.
        """
        given, restored = read_restored(self.rule, state)
        self.run_number = run_in(state, self.run_number)
        loss_scale = self.present_loss_scale
        self._write(loss_scale, _repair(self.rule, {**self._values(), **given}, loss_scale, restored)[0])

    def check_state(self) -> None:
        """Repair a restored state that this cell cannot go on with.

        A checkpoint may come from another cell, or from this one with other arguments. Each change gives a warning
        that names the Parameter, its value and the value used instead. The start of training calls this; call it
        yourself if you load a checkpoint without calling ``set_train()`` afterwards.

        Raises:
            ValueError: if the restored loss scale is not finite and above 0.

        Examples:
            >>> from mindformers_adaptive import AdaptiveLossScaleUpdateCell
            >>> cell = AdaptiveLossScaleUpdateCell(loss_scale_value=2**16, scale_factor=2, scale_window=20)
            >>> _ = cell.window_index.set_data(Tensor(99, mstype.int32))
            >>> with warnings.catch_warnings(record=True) as caught:
            ...     warnings.simplefilter("always")
            ...     cell.check_state()
            >>> cell.state()["window_index"], len(caught)
            (0, 1)
        """
        loss_scale, values = self.present_loss_scale, self._values()
        if (loss_scale, values) == self._settled:
            return
        is_known = self._knows_loss_scale(values)
        loss_scale = repair_loss_scale(self.rule, loss_scale, "scale_sense")
        # Only what a checkpoint had since the last check tells whose state this is.
        self._write(loss_scale, _repair(self.rule, values, loss_scale, self.restored or None)[0])
        if not is_known:
            self._settled = None

    def add_flags_recursive(self, **flags: bool) -> RuleUpdateCell:
        """As in ``nn.Cell``; the start of training also checks a restored state.

        ``set_train()`` of this cell or of one that contains it calls this, and so does ``Model.train``.

        Args:
            **flags (bool): as in ``nn.Cell``; ``training`` is True where training starts.

        Returns:
            Cell, this one.

        Raises:
            TypeError: if training starts with a train-step cell that does not assign the signals.
            ValueError: if the restored loss scale is not finite and above 0.
        """
        if flags.get("training") and not self.has_signal:
            raise TypeError(
                f"{type(self).__name__} needs a train-step cell that gives it the largest gradient of each step. Use "
                "TrainOneStepWithLossScaleCell, MFTrainOneStepCell or MFPipelineWithLossScaleCell of "
                "mindformers_adaptive.wrapper; for a train-step cell of your own, assign update_cell.largest_gradient "
                "in each step and call update_cell.declare_signal() once."
            )
        super().add_flags_recursive(**flags)
        if flags.get("training"):
            self.check_state()
        return self

    def _write(self, loss_scale: float, values: dict[str, Any]) -> None:
        if self.bound_loss_scale is not None and loss_scale != self.present_loss_scale:
            self.bound_loss_scale.set_data(Tensor(loss_scale, mstype.float32))
        self.loss_scale_value = loss_scale
        if values != self._values():
            for field in self._fields:
                getattr(self, field.name).set_data(tensor_of(field, values))
        self._settled = loss_scale, self._values()
        self.restored.clear()


def read_restored_scale(rule: Rule, loss_scale_value: Any) -> Any:
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
    return repair_loss_scale(rule, float(loss_scale_value.asnumpy().item()), "loss_scale_value")


def _repair(
    rule: Rule, values: Mapping[str, Any], loss_scale: float, restored: Collection[str] | None
) -> tuple[dict[str, Any], bool]:
    """Return values that a rule can go on with, and whether they are others, of which it warns."""
    repaired, problems = repair(rule, values, loss_scale, restored)
    for problem in problems:
        warnings.warn(problem, stacklevel=3)
    return repaired, bool(problems)


def _notice_when_set(parameter: Any, name: str, names: set[str]) -> None:
    """Add a name to a set whenever a Parameter is set from outside, as a checkpoint does and no graph.

    By its values, a state can be that of another cell, which lacks what is special about this one. MindSpore makes the
    class of a Parameter itself, so that a subclass of it is not to be had.
    """

    def set_data(*args: Any, **kwargs: Any) -> Any:
        names.add(name)
        return type(parameter).set_data(parameter, *args, **kwargs)

    parameter.set_data = set_data
