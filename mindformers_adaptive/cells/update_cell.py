"""``RuleUpdateCell``: what all update cells of this package that follow a rule have in common."""

import math
import warnings

import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore import dtype as mstype

from mindformers_adaptive.cells.scale_history import ScaleHistory, refuse_kept_graphs
from mindformers_adaptive.rules.base import STEP_FIELDS, STEP_LIMIT, to_integer, to_real
from mindformers_adaptive.rules.checks import require_flag, require_integer, to_float32

__all__ = ["RUN", "RuleUpdateCell", "read_restored_scale"]

# What a checkpoint and a state_dict() call the number of the run.
RUN = "loss_scaling_run"

# The names of the loss scale in a state: Megatron-LM's, that of a checkpoint, and that of a loss scaler's state().
_SCALE_NAMES = ("scale", "scale_sense", "loss_scale")


class RuleUpdateCell(nn.DynamicLossScaleUpdateCell):
    """Base of the update cells: the rule's state in Parameters, restored, checked and read back.

    A subclass has ``_compiled_update``, which takes the loss scale and the overflow flag, assigns the Parameters and
    the loss scale of the next step, and returns the flag.

    Args:
        rule (Rule): the rule.
        start (NamedTuple): its state before the first step.
        history_size (int): how many of the last steps the device keeps, for :meth:`recent_steps`. Default: 0.
        track_per_parameter (bool): whether to keep the largest gradient of each Parameter, for a rule that needs the
            largest gradient. Default: False.

    Attributes:
        rule (Rule): the rule.
        signals (tuple[str, ...]): what a train-step cell has to assign in each step, Parameters by these names.
    """

    bound_loss_scale = None

    def __init__(self, rule, start, history_size=0, track_per_parameter=False):
        remedy = "Give the number of steps between two reads by the host, such as the sink_size; 0 keeps no history."
        history_size = require_integer("history_size", history_size, 0, remedy, most=10**6, unit="number of steps")
        super().__init__(start.loss_scale, getattr(rule, "scale_factor", 2), getattr(start, "scale_window", 1))
        self.rule = rule
        self.signals = rule.signals
        self.track_per_parameter = require_flag("track_per_parameter", track_per_parameter)
        for name, value in (("history_size", history_size), ("track_per_parameter", track_per_parameter)):
            if value:
                refuse_kept_graphs(name, value)
        self.each_largest = None
        self.has_signal = not self.signals
        self.written_state = self.checked_state = None
        self.restored = set()
        self._make_parameters(start)
        # Read by no graph. It is no part of the state, and comes back with it.
        self.loss_scaling_run = Parameter(Tensor(0, mstype.int32), name=RUN, requires_grad=False)
        # As a Tensor, because a Python number in the graph becomes a primitive of its own (Muls) or a cast.
        self.step_limit = Tensor(STEP_LIMIT, mstype.int32)
        self.keeps_history = history_size > 0
        if self.keeps_history:
            kinds = {key: field.dtype for field in rule.fields for key in field.keys}
            counts = [key for key in rule.recorded if kinds[key] == "int32"]
            floats = [key for key in rule.recorded if kinds[key] == "float32"]
            counts = ("overflow", *counts, "skipped_steps", "consecutive_overflows")
            self.history = ScaleHistory(history_size, counts, measures=(*floats, *self.signals))

    @classmethod
    def from_rule(cls, rule, state, steps=0):
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
    def _for_rule(cls, rule, state, **options):
        """Return a cell with this rule that starts at the loss scale of a state."""
        return cls(state.loss_scale, **rule.arguments, **options)

    def _make_parameters(self, start):
        values = {**self.rule.to_values(start, steps=0), **dict.fromkeys(self.signals, 0.0)}
        self._fields = tuple(field for field in type(self.rule).all_fields() if field.keys[0] in values)
        for field in self._fields:
            # The base class has a constant scale_window, and counts steps itself.
            if field.name != "scale_window" and field not in STEP_FIELDS and hasattr(self, field.name):
                raise ValueError(
                    f"A field of the rule {self.rule.name!r} must not be called {field.name!r}, which MindSpore's "
                    "update cell uses itself. Choose another name."
                )
            parameter = Parameter(_tensor_of(field, values), name=field.parameter, requires_grad=False)
            setattr(self, field.name, parameter)
            self._notice_when_restored(field.name, parameter)

    def _notice_when_restored(self, name, parameter):
        # By its values, a state can be that of another cell, which lacks what is special about this one.
        def set_data(*args, **kwargs):
            self.restored.add(name)
            return type(parameter).set_data(parameter, *args, **kwargs)

        parameter.set_data = set_data

    def construct(self, loss_scale, overflow):
        return self._compiled_update(loss_scale, overflow)

    def state(self):
        """Return the state. Reading waits for the device.

        Returns:
            dict[str, Union[int, float, tuple[float, ...]]], a tuple for a vector without named parts. It begins with
            ``loss_scale``, that of the next step, unless a train-step cell of another package keeps it.
        """
        values = self._values()
        return {"loss_scale": self.present_loss_scale, **values} if self._knows_loss_scale(values) else values

    def _values(self):
        values = {}
        for field in self._fields:
            values |= field.by_key(getattr(self, field.name).asnumpy().tolist())
        return values

    def rule_state(self):
        """Return the state as the rule has it.

        Returns:
            NamedTuple, with the loss scale for the next step.

        Raises:
            RuntimeError: as of :meth:`known_loss_scale`.
        """
        return self.rule.from_values(self.known_loss_scale(), self._values())

    def write_rule_state(self, state, steps, last_event=None):
        """Go on from a state of the rule.

        Args:
            state (NamedTuple): the state, with the loss scale for the next step.
            steps (int): how many steps led to it.
            last_event (int, optional): the step of the last overflow or raise. Default: None, the last step.
        """
        self._write(state.loss_scale, {**self._values(), **self.rule.to_values(state, steps, last_event)})
        self.written_state = self._values()

    def known_loss_scale(self):
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

    def _knows_loss_scale(self, values):
        return self.bound_loss_scale is not None or values["cur_iter"] == 1 or values == self.written_state

    @property
    def run_number(self):
        """int: the number of the run, by which it finds its records again; 0 until a callback sets it."""
        return int(self.loss_scaling_run.asnumpy())

    @run_number.setter
    def run_number(self, number):
        self.loss_scaling_run.set_data(Tensor(number, mstype.int32))

    @property
    def present_loss_scale(self):
        """float: that of the next step, or the initial one where no train-step cell has bound its own."""
        if self.bound_loss_scale is None:
            return float(self.loss_scale_value)
        return float(self.bound_loss_scale.asnumpy())

    @property
    def inv_scale(self):
        """float: the reciprocal of the loss scale, by which gradients are multiplied."""
        return to_float32(1.0 / self.known_loss_scale())

    def bind_loss_scale(self, parameter):
        """Tell the cell which Parameter is its first input, for ``state_dict()`` and ``load_state_dict()``.

        The train-step cells of this package do it.

        Args:
            parameter (Parameter): the loss scale, float32 of shape ().
        """
        # Not through nn.Cell, which would make it a child of this cell too.
        object.__setattr__(self, "bound_loss_scale", parameter)

    def state_dict(self, *args, **kwargs):
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
        loss_scale, state = self.known_loss_scale(), self._values()
        trackers = {
            "growth_tracker": state["cur_iter"] - 1 - state["last_overflow_iter"],
            "hysteresis_tracker": state.get("hysteresis_budget", getattr(self.rule, "hysteresis", 1)),
        }
        numbers = {"scale": loss_scale, **trackers, RUN: self.run_number}
        for name, value in state.items():
            is_vector = isinstance(value, tuple)
            numbers |= {f"{name}_{place}": one for place, one in enumerate(value)} if is_vector else {name: value}
        return numbers

    def load_state_dict(self, state_dict):
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
        _require_dict("state_dict", state_dict)
        if "grad_scaler" in state_dict or "optimizer" in state_dict:
            state_dict = state_dict.get("grad_scaler")
            if state_dict is None:
                warnings.warn("The checkpoint has no 'grad_scaler': the loss scaling stays as it is.", stacklevel=2)
                return
            _require_dict("grad_scaler", state_dict)
        present = self._values()
        given = self._values_in(state_dict) or self._counters_of_megatron(state_dict)
        scale_name = next((name for name in _SCALE_NAMES if name in state_dict), None)
        if scale_name is None:
            raise KeyError("The state has no 'scale'. Give what state_dict() returned.")
        loss_scale = self.rule.repair_loss_scale(to_real(scale_name, state_dict[scale_name]), scale_name)
        self.restore_run(state_dict)
        problems = self._repair_and_write(loss_scale, {**present, **given}, self._fields_of(given))
        self.written_state = self._values()
        missing = [key for key in present if key not in given and key not in self.signals]
        if missing and not problems:
            warnings.warn(f"The state has no {', '.join(missing)}: what it lacks stays as it is.", stacklevel=2)

    def restore(self, state):
        """Go on from what ``state()`` of an update cell returned, of this rule or of another, at the present scale.

        What another cell has that this one has not is left out, with a warning where a state of this rule is missing.

        Args:
            state (dict): numbers, and lists of numbers.

        Raises:
            TypeError: if a value is not a number of its kind.
            ValueError: if a counter does not fit into 32 bits.
        """
        given = self._values_in(state)
        restored = self._fields_of(given)
        if not restored.issuperset(field.name for field in self.rule.fields):
            # Another rule may have pieces of the same name.
            given = {key: value for key, value in given.items() if key not in self.rule.own_keys()}
        self.restore_run(state)
        self._repair_and_write(self.present_loss_scale, {**self._values(), **given}, restored)
        self.written_state = self._values()

    def restore_run(self, state):
        """Restore the number of the run, if a state has it.

        Args:
            state (dict): has it as ``loss_scaling_run``, an int or a Tensor of one element.

        Raises:
            TypeError: if it is not an integer.
            ValueError: if it does not fit into 32 bits.
        """
        if RUN in state:
            self.run_number = to_integer(RUN, state[RUN])

    def _repair_and_write(self, loss_scale, values, restored):
        repaired, problems = self.rule.repair(values, loss_scale, restored)
        for problem in problems:
            warnings.warn(problem, stacklevel=3)
        self._write(loss_scale, repaired)
        return problems

    def _values_in(self, given):
        """Return the part of a state that this cell has, by the names of ``state()``."""
        values = {}
        for field in self._fields:
            if field.shape and not field.parts:
                names = (f"{field.name}_{place}" for place in range(field.shape[0]))
                vector = given.get(field.name, [given[name] for name in names if name in given])
                if not hasattr(vector, "__len__"):
                    raise TypeError(f"{field.name!r} must be {field.shape[0]} numbers, but got {vector!r}.")
                if len(vector) == field.shape[0]:
                    values[field.name] = tuple(to_real(field.name, number) for number in vector)
                continue
            for key in field.keys:
                name, read = key if key in given else field.parameter, to_integer if field.dtype == "int32" else to_real
                if name in given:
                    values[key] = read(key, given[name])
        return values

    def _fields_of(self, values):
        """Return the names of the fields of which all parts are there."""
        return {field.name for field in self._fields if all(key in values for key in field.keys)}

    def _counters_of_megatron(self, state_dict):
        missing = [key for key in ("scale", "growth_tracker", "hysteresis_tracker") if key not in state_dict]
        if missing:
            raise KeyError(
                "The state must have the counters of the update cell, or those of Megatron-LM's dynamic scaler, of "
                f"which {', '.join(map(repr, missing))} is missing. Give what state_dict() returned, or the "
                "checkpoint's 'grad_scaler'; a constant scaler saves no state."
            )
        growth, tracker = (to_integer(name, state_dict[name]) for name in ("growth_tracker", "hysteresis_tracker"))
        hysteresis = getattr(self.rule, "hysteresis", 1)
        if growth < 0 or tracker > hysteresis:
            raise ValueError(
                f"'growth_tracker' must not be negative, nor 'hysteresis_tracker' above hysteresis={hysteresis}, but "
                f"got {growth} and {tracker}. Give the 'hysteresis' that Megatron-LM was started with."
            )
        # Below 0, where Megatron-LM counts on, all numbers mean the same.
        budget = {"hysteresis_budget": max(tracker, 0)} if hysteresis > 1 else {}
        return {**self._values(), "cur_iter": growth + 1, "last_overflow_iter": 0, **budget}

    def check_state(self):
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
        present, state = self.present_loss_scale, self._values()
        if (present, state) == self.checked_state:
            return
        # Only what a checkpoint had since the last check tells whose state this is.
        self._repair_and_write(self.rule.repair_loss_scale(present, "scale_sense"), state, self.restored or None)

    def add_flags_recursive(self, **flags):
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
                "in each step and call update_cell.declare_signal(names) once."
            )
        super().add_flags_recursive(**flags)
        if flags.get("training"):
            self.check_state()
        return self

    def declare_signal(self, names):
        """Declare that the train step assigns ``largest_gradient`` before each call, as those of this package do.

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

    def overflowed_parameters(self):
        """Return the names of the Parameters whose gradients had an inf or a NaN in the last step.

        Returns:
            list[str], in the order of the Parameters; empty without ``track_per_parameter=True``. Reading waits for
            the device.
        """
        if self.each_largest is None:
            return []
        largest = self.each_largest.asnumpy()
        return [name for name, value in zip(self.parameter_names, largest, strict=True) if not math.isfinite(value)]

    def recent_steps(self, since=0):
        """Return the steps after ``since``, oldest first, at most the last ``history_size``.

        Args:
            since (int): the number of a step, counted from 1 as ``cur_iter`` is. Default: 0.

        Returns:
            list[dict], one for each step, without gaps up to the last step: ``step`` (int), ``overflow`` (bool),
            ``loss_scale`` (float) that the step used, ``next_loss_scale`` (float), what the rule records of its state
            after the step, and the signals of the step, such as ``largest_gradient`` (float). Steps from before a
            checkpoint was loaded are missing. Reading waits for the device.

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

    def _write(self, loss_scale, values):
        if self.bound_loss_scale is not None and loss_scale != self.present_loss_scale:
            self.bound_loss_scale.set_data(Tensor(loss_scale, mstype.float32))
        self.loss_scale_value = loss_scale
        if values != self._values():
            for field in self._fields:
                getattr(self, field.name).set_data(_tensor_of(field, values))
        self.checked_state = loss_scale, self._values()
        self.restored.clear()


def read_restored_scale(rule, loss_scale_value):
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
    return rule.repair_loss_scale(float(loss_scale_value.asnumpy().item()), "loss_scale_value")


def _require_dict(name, value):
    if not isinstance(value, dict):
        raise TypeError(f"'{name}' must be a dict, but got {value!r}. Give what state_dict() returned.")


def _tensor_of(field, values):
    return Tensor(np.array(field.value_in(values), field.dtype))
