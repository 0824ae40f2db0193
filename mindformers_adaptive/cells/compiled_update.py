"""``CompiledUpdateCell`` keeps the state of any loss-scaling rule in Parameters; a compiled function updates them.

``CellWithLossScale`` also knows its loss scale, wherever the loss scale is kept. ``ScaleHistory`` keeps the last steps
on the device, for a host that does not see every step.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, jit, nn, ops
from mindspore import dtype as mstype

from mindformers_adaptive.cells.graph_form import GraphStep
from mindformers_adaptive.cells.loads import SeesLoads, keeps_compiled_graphs
from mindformers_adaptive.rules.checks import require_integer, to_float32
from mindformers_adaptive.rules.fields import LARGEST_GRADIENT, STEP_FIELDS, Field
from mindformers_adaptive.rules.rule import Rule
from mindformers_adaptive.rules.saved_state import all_fields, to_values

# This tuple is annotated at module level, because MindSpore cannot compile a function with an annotated variable.
_NO_TENSORS: tuple[Any, ...] = ()

# Numbers for the names of Parameters: in a graph, Parameters that belong to no cell need distinct names.
_numbers = itertools.count()


class CompiledUpdateCell(nn.DynamicLossScaleUpdateCell):
    """Update cell that keeps the state of a loss-scaling rule in Parameters; the rule's compiled step updates them.

    Args:
        rule (Rule): the rule.
        start (NamedTuple): its state before the first step.
        history_size (int): how many of the last steps the device keeps, for :meth:`recent_steps`. Default: 0.

    Attributes:
        rule (Rule): the rule.
        needs_gradients (bool): whether a train-step cell has to assign ``largest_gradient`` in each step.
    """

    def __init__(self, rule: Rule, start: Any, history_size: int = 0) -> None:
        history_size = checked_history_size(history_size)
        factor = getattr(rule, "scale_factor", 2)
        # The scale_factor of a user's rule may have any type, so use 2 if it is not a number.
        factor = factor if isinstance(factor, (int, float)) else 2
        super().__init__(start.loss_scale, factor, getattr(start, "scale_window", 1))
        self.rule = rule
        self.needs_gradients = rule.needs_gradients
        self.has_signal = not self.needs_gradients
        step = GraphStep(rule)
        self.step_function = step.function
        # For each input of the rule's step: its name, and the attribute of this cell that holds its value. The
        # attribute is None if the update computes the value before the step.
        computed = {"loss_scale", "overflow"} | ({"clean_steps"} if rule.counts_clean_steps else set())
        self.inputs = tuple((name, None if name in computed else name) for name in step.inputs)
        places = {name: index for index, name in enumerate(step.outputs)}
        field_names = {field.name for field in rule.fields}
        self.assigned = tuple((name, index) for name, index in places.items() if name in field_names)
        self.place_of_scale, self.place_of_clean = places.get("loss_scale"), places.get("clean_steps")
        self.counts_clean_steps = rule.counts_clean_steps
        # The number 1 is a Tensor, because in a graph a Python number needs a different primitive (Muls) or a cast.
        self.one = Tensor(1, mstype.int32)
        self.keeps_history = history_size > 0
        if self.keeps_history:
            self.recorded = tuple(_place_of(rule, key, places) for key in rule.recorded)
            counts = [key for key, record in zip(rule.recorded, self.recorded, strict=True) if record[-1]]
            floats = [key for key in rule.recorded if key not in counts]
            counts = ["overflow", *counts, "skipped_steps", "consecutive_overflows"]
            floats += [LARGEST_GRADIENT.name] if self.needs_gradients else []
            self.history = ScaleHistory(history_size, counts, measures=floats)
        # Create the Parameters for the rule's fields after all other attributes of this cell. Only then are all
        # names in use known, so that a field with one of these names is refused.
        self._make_parameters(start)

    def _make_parameters(self, start: Any) -> None:
        values = {**to_values(self.rule, start, steps=0), LARGEST_GRADIENT.name: 0.0}
        self._fields = all_fields(self.rule)
        for field in self._fields:
            # A field of the rule may replace scale_window and the step counters of MindSpore's update cell, but nothing
            # else.
            if field.name != "scale_window" and field not in STEP_FIELDS and hasattr(self, field.name):
                raise ValueError(
                    f"A field of the rule {self.rule.name!r} must not be called {field.name!r}, because "
                    "MindSpore's update cell has an attribute of this name. Choose another name."
                )
            parameter = Parameter(tensor_of(field, values), name=field.parameter, requires_grad=False)
            setattr(self, field.name, parameter)

    def construct(self, loss_scale: Any, overflow: Any) -> Any:
        return self._compiled_update(loss_scale, overflow)

    # Compile the update in PyNative mode too, as MindSpore's optimizers do. Do not decorate construct itself: if a
    # subclass called this construct, MindSpore would compile the construct of the subclass instead.
    @jit(backend="ms_backend")
    def _compiled_update(self, loss_scale: Any, overflow: Any) -> Any:
        clean_steps = self.cur_iter - self.last_overflow_iter - self.one
        computed = {"loss_scale": loss_scale, "overflow": overflow, "clean_steps": clean_steps}
        tensors = _NO_TENSORS
        for name, attribute in self.inputs:
            tensors = (*tensors, computed[name] if attribute is None else getattr(self, attribute))
        after = self.step_function(*tensors)
        next_loss_scale = loss_scale if self.place_of_scale is None else after[self.place_of_scale]

        overflowed = ops.cast(overflow, mstype.int32)
        in_a_row = (self.consecutive_overflows + self.one) * overflowed
        if self.keeps_history:
            # Write the step to the history before the assignments below, which overwrite the loss scale and the number
            # of this step with the values for the next step.
            self._remember(loss_scale, next_loss_scale, overflowed, in_a_row, after)
        if self.counts_clean_steps:
            last_event = self.cur_iter - (clean_steps if self.place_of_clean is None else after[self.place_of_clean])
        else:
            is_event = self.logic_or(overflow, ops.less(loss_scale, next_loss_scale))
            last_event = self.select(is_event, self.cur_iter, self.last_overflow_iter)
        if self.place_of_scale is not None:
            ops.assign(loss_scale, next_loss_scale)
        for name, index in self.assigned:
            ops.assign(getattr(self, name), after[index])
        ops.assign(self.last_overflow_iter, last_event)
        ops.assign(self.consecutive_overflows, in_a_row)
        ops.assign_add(self.cur_iter, self.one)
        ops.assign_add(self.skipped_steps, overflowed)
        return overflow

    def _remember(self, loss_scale: Any, next_loss_scale: Any, overflowed: Any, in_a_row: Any, after: Any) -> None:
        counts, floats = (*_NO_TENSORS, overflowed), _NO_TENSORS
        for name, index, part, is_count in self.recorded:
            value = getattr(self, name) if index is None else after[index]
            value = value if part is None else ops.gather(value, part, 0)
            if is_count:
                counts = (*counts, value)
            else:
                floats = (*floats, value)
        counts = (*counts, self.skipped_steps + overflowed, in_a_row)
        if self.needs_gradients:
            floats = (*floats, self.largest_gradient)
        self.history(loss_scale, next_loss_scale, self.cur_iter, counts, floats)

    def declare_signal(self) -> None:
        """Declare that the train-step cell assigns ``largest_gradient`` before each call of this update cell."""
        self.has_signal = True

    def recent_steps(self, since: int = 0) -> list[dict[str, Any]]:
        """Return the recorded steps after step ``since``, oldest first, at most the last ``history_size`` steps.

        Args:
            since (int): the number of a step, counted from 1 as ``cur_iter`` is. Default: 0.

        Returns:
            list[dict], one for each step, without gaps up to the last step: ``step`` (int), ``overflow`` (bool),
            ``loss_scale`` (float) that the step used, ``next_loss_scale`` (float), what the rule records of its state
            after the step, and ``largest_gradient`` (float) where the rule needs it. Steps from before a
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


def _place_of(rule: Rule, key: str, places: Mapping[str, int]) -> tuple[str, int | None, Any, bool]:
    """Return where the step history finds the value ``key``: in a result of the rule's step, or in a state field.

    Returns: the name of the value's field; the index of the field in the results of the rule's step, or None if the
    step does not change the field; the index of the value in the field's vector, or None; and whether the value is an
    integer.
    """
    field = next(field for field in rule.fields if key in field.keys)
    part = Tensor(field.parts.index(key), mstype.int32) if field.parts else None
    return field.name, places.get(field.name), part, field.dtype == "int32"


def tensor_of(field: Field, values: Mapping[str, Any]) -> Any:
    """Return a Tensor with the value of a state field, for its Parameter; ``values`` holds the state by name."""
    return Tensor(np.array(field.value_in(values), field.dtype))


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
        return self.loss_scale_value if self.loaded else self.known_loss_scale()

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
        return self.loss_scale_value

    @property
    def _knows_loss_scale(self) -> bool:
        return self.bound_loss_scale is not None or int(self.cur_iter.asnumpy()) == self._known_step

    @property
    def loss_scale_value(self) -> float:
        """float: the loss scale of the next step, or the initial one until a train-step cell is bound."""
        if self.bound_loss_scale is None:
            return float(self._own_loss_scale)
        return float(self.bound_loss_scale.asnumpy())

    @loss_scale_value.setter
    def loss_scale_value(self, loss_scale: float) -> None:
        object.__setattr__(self, "_own_loss_scale", loss_scale)

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


class ScaleHistory(nn.Cell):
    """A ring buffer of the last training steps, one row for each step, written by the graph of the update cell.

    Its Parameters belong to no cell, so no checkpoint contains them: a checkpoint can be loaded with any history size,
    and never brings back the steps of an earlier run.

    Args:
        size (int): how many steps are kept, at least 1.
        counts (Sequence[str]): the names of the counts, which are int32; ``overflow`` comes back as a bool.
        measures (Sequence[str]): the names of further values, which are float32. Default: none.

    Inputs:
        - **loss_scale** (Parameter) - the loss scale that the step used, float32 of shape ().
        - **next_loss_scale** (Tensor) - the loss scale for the next step, float32 of shape ().
        - **step** (Parameter) - the number of the step, int32 of shape ().
        - **counts** (tuple[Tensor]) - the counts after the step, int32 of shape ().
        - **measures** (tuple[Parameter]) - the further values of the step, float32 of shape (). Default: none.

    Outputs:
        Tensor, `next_loss_scale`.
    """

    def __init__(self, size: int, counts: Sequence[str], measures: Sequence[str] = ()) -> None:
        super().__init__(auto_prefix=False)
        self.size = size
        self.names_of_counts, self.names_of_floats = ("step", *counts), ("loss_scale", "next_loss_scale", *measures)
        self.number = next(_numbers)
        self._own("scales", np.zeros((size, len(self.names_of_floats)), np.float32))
        self._own("counts", np.zeros((size, len(self.names_of_counts)), np.int32))
        self._own("place", np.zeros(1, np.int32))
        self.place_after = Tensor(np.roll(np.arange(size), -1), mstype.int32)

    def construct(self, loss_scale: Any, next_loss_scale: Any, step: Any, counts: Any, measures: Any = ()) -> Any:
        scales = ops.stack((loss_scale, next_loss_scale, *measures))
        counts = ops.stack((step, *counts))
        ops.scatter_update(self.scales, self.place, ops.expand_dims(scales, 0))
        ops.scatter_update(self.counts, self.place, ops.expand_dims(counts, 0))
        # Look up the index of the ring buffer's next row in a table. Do not calculate it by Mod, which Ascend documents
        # as inexact for large integers.
        ops.assign(self.place, ops.gather(self.place_after, self.place, 0))
        return next_loss_scale

    def steps(self, since: int, last: int) -> list[dict[str, Any]]:
        """Return the steps after ``since`` that the ring buffer holds, up to ``last``, in order and without gaps."""
        scales, counts, index = self.scales.asnumpy(), self.counts.asnumpy(), int(self.place.asnumpy()[0])
        newest_first = []
        # Read the ring buffer backwards as long as the step number falls by 1 from row to row. Stop at another number:
        # the older rows hold steps that were undone when an earlier state was restored.
        for step in range(last, max(since, last - self.size), -1):
            index = (index - 1) % self.size
            row = dict(zip(self.names_of_counts, counts[index].tolist(), strict=True))
            if row["step"] != step:
                break
            row["overflow"] = bool(row["overflow"])
            newest_first.append(row | dict(zip(self.names_of_floats, scales[index].tolist(), strict=True)))
        return newest_first[::-1]

    def _own(self, name: str, values: Any) -> None:
        parameter = Parameter(Tensor(values), name=f"loss_scale_history_{self.number}_{name}", requires_grad=False)
        # Bypass nn.Cell.__setattr__, which would add the Parameter to the network and to every checkpoint.
        object.__setattr__(self, name, parameter)


def checked_history_size(history_size: Any) -> int:
    """Return a ``history_size`` that an update cell can have.

    Raises:
        TypeError: if it is not an integer.
        ValueError: if it is below 0 or above 1,000,000, or if MindSpore caches compiled graphs: a graph from the cache
            writes no history of the steps.
    """
    remedy = "Give the number of steps between two reads by the host, such as the sink_size; 0 keeps no history."
    size = require_integer("history_size", history_size, 0, remedy, most=10**6, unit="number of steps")
    if size and keeps_compiled_graphs():
        raise ValueError(
            "'history_size' must be 0 while MindSpore keeps compiled graphs (MS_COMPILER_CACHE_ENABLE or "
            f"enable_compile_cache), but got {size}: a graph from the cache does not write the history. Set "
            "'history_size' to 0, or switch the cache off."
        )
    return size
