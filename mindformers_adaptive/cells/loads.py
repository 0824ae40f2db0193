"""Sees each value that is loaded into a Parameter, and lets compiled graphs read it.

MindSpore loads a value by giving the Parameter other memory. A graph that has run keeps the old memory of some
Parameters: in graph mode, of those that only the branch of a condition uses, such as the optimizer's state in
``if not overflow: optimizer(gradients)``; in PyNative mode, of all Parameters of the compiled optimizer. After such a
load, training would read and write the old memory, and the weights would stand still. There are two remedies:

- A train step that is called from Python gives each Parameter its old memory back before the next step, with the
  loaded value. Until then a load does what MindSpore does, so an array that shares the old memory keeps its values.
- With data sink, in a function under ``mindspore.jit`` and with a loss scaler, no train step is called from Python.
  There a load writes into the memory that the Parameter has.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import mindspore
from mindspore import Tensor
from mindspore.common.api import _pynative_executor

# For type checkers, the base class of the mixins is Any, so that they accept attributes that MindSpore's cell defines.
_Base: Any = object


def keeps_compiled_graphs() -> bool:
    """Return whether MindSpore keeps compiled graphs in files, and so may run a graph that it has not compiled."""
    return os.environ.get("MS_COMPILER_CACHE_ENABLE") == "1" or bool(mindspore.get_context("enable_compile_cache"))


class SeesLoads(_Base):
    """Mixin for a cell that learns which of its Parameters were loaded.

    Attributes:
        loaded (set[str]): the names of the Parameters that were loaded, until the cell clears the set.
        loads_in_place (bool): whether a load writes into the memory of the Parameters, because a graph uses this memory
            and no call from Python comes before its steps.
        is_in_observed_step (bool): whether a call of a :class:`GivesMemoryBack` runs this cell.
    """

    loads_in_place = False
    is_in_observed_step = False
    loaded: set[str]

    def __setstate__(self, state: Any) -> None:
        # A copied or unpickled cell has new Parameters, which no cell observes, and its graphs are not compiled yet.
        super().__setstate__(state)
        self.loads_in_place = self.is_in_observed_step = False
        self._observe_loads()

    def get_scope(self) -> Any:
        # MindSpore calls this method when it compiles the cell, also as a part of another cell or function.
        if not self.is_in_observed_step:
            self._observe_loads()
            self.loads_in_place = True
        return super().get_scope()

    def add_flags_recursive(self, **flags: bool) -> Any:
        super().add_flags_recursive(**flags)
        # A graph from the cache is not compiled, so MindSpore does not call get_scope().
        if flags.get("training") and keeps_compiled_graphs() and not self.is_in_observed_step:
            self._observe_loads()
            self.loads_in_place = True
        return self

    def _observe_loads(self) -> None:
        """Observe all Parameters of this cell, also those that it got since the last call."""
        if "loaded" not in vars(self):
            self.loaded = set()
        observe_loads(self, self._observed_parameters())

    def _observed_parameters(self) -> Mapping[str, Any]:
        """Return the Parameters that this cell observes, by the names that it has for them."""
        return _parameters_of(self)

    def _note_load(self, name: str) -> None:
        """Remember that the Parameter ``name`` is being loaded."""
        self.loaded.add(name)


class GivesMemoryBack(SeesLoads):
    """Mixin for a train-step cell: before each call, the Parameters get the memory back that its graphs use."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A pass outside of this train step, such as a call of the network, may have failed before.
        _close_failed_pass(self)
        hooks = self._give_memory_back()
        if self._check_loads():
            # The check may have replaced values.
            hooks = self._give_memory_back()
        self.is_in_observed_step = True
        try:
            return super().__call__(*args, **kwargs)
        except BaseException:
            _close_failed_pass(self)
            raise
        finally:
            self.is_in_observed_step = False
            for hook in hooks:
                hook.hold_memory()

    def _give_memory_back(self) -> list[_AssignValue]:
        hooks = [vars(parameter).get("assign_value") for parameter in self.get_parameters()]
        if None in hooks:
            self._observe_loads()
            hooks = [vars(parameter)["assign_value"] for parameter in self.get_parameters()]
        for hook in hooks:
            hook.give_memory_back()
        return hooks

    def _check_loads(self) -> bool:
        """Check what was loaded since the last step. Return whether anything was checked."""
        return False


class _AssignValue:
    """Stands in for ``assign_value`` of one Parameter: MindSpore's ``set_data`` and ``load_state_dict`` call it.

    Copies of the Parameter have MindSpore's own method again.
    """

    def __init__(self, parameter: Any) -> None:
        # Do not keep cells and Parameters alive: they hold memory of the device.
        self.parameter = weakref.ref(parameter)
        self.names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        # The memory that graphs use, as a Tensor, and the addresses of this memory and of the Parameter's last value.
        self.memory: Any = None
        self.address = self.last_address = 0

    def __call__(self, value: Any) -> Any:
        self._note_load()
        return self.assign(value)

    def assign(self, value: Any) -> Any:
        """Give the Parameter a value, in the memory that the Parameter has if a graph needs it there."""
        parameter: Any = self.parameter()
        in_place = [cell for cell in self.names if cell.loads_in_place]
        # Without an address, the Parameter has no memory yet that a graph could use.
        if in_place and parameter.data_ptr():
            if _fits(parameter, value):
                parameter.copy_(value.contiguous())
                return parameter
            self._warn_of_other_form(in_place[0], value)
        type(parameter).assign_value(parameter, value)
        self.last_address = parameter.data_ptr()
        return parameter

    def give_memory_back(self) -> None:
        """Write the present value into the memory that graphs use, and give this memory to the Parameter."""
        parameter: Any = self.parameter()
        address = parameter.data_ptr()
        # A transposed view has the address of the memory that it shows.
        if self.memory is None or (address == self.address and parameter.is_contiguous()):
            return
        if address != self.last_address:
            # MindSpore does not tell of every load: ``parameter.data = value`` calls no method.
            self._note_load()
        if not _fits(parameter, self.memory):
            self._warn_of_other_form(next(iter(self.names)), self.memory)
            self.memory = None
            return
        self.memory.copy_(Tensor(parameter).contiguous())
        type(parameter).assign_value(parameter, self.memory)
        self.last_address = self.address

    def hold_memory(self) -> None:
        """Keep the memory of the Parameter for :meth:`give_memory_back`, unless it is kept already."""
        parameter: Any = self.parameter()
        if self.memory is None and parameter.data_ptr():
            # In MindSpore 2.7, parameter.data is the Parameter itself.
            self.memory = Tensor(parameter)
            self.address = self.last_address = parameter.data_ptr()

    def _note_load(self) -> None:
        for cell, name in list(self.names.items()):
            if isinstance(cell, SeesLoads):
                cell._note_load(name)

    def _warn_of_other_form(self, cell: Any, other: Any) -> None:
        parameter: Any = self.parameter()
        warnings.warn(
            f"The Parameter {parameter.name!r} of {type(cell).__name__} was loaded, but not into its memory, because "
            f"its shape and dtype have changed: {parameter.shape}, {parameter.dtype} and {other.shape}, {other.dtype}. "
            "The compiled training step may go on with the old values. Make a new train-step cell, and load the "
            "checkpoint into it.",
            stacklevel=4,
        )


def observe_loads(cell: Any, parameters: Mapping[str, Any] | None = None) -> None:
    """Let a cell observe Parameters.

    Args:
        cell (Cell): a :class:`SeesLoads`, or any cell with an attribute ``loads_in_place``.
        parameters (Mapping[str, Parameter], optional): the Parameters, by the names that the cell has for them.
            Default: None, all Parameters of the cell.
    """
    for name, parameter in (_parameters_of(cell) if parameters is None else parameters).items():
        hook = vars(parameter).get("assign_value")
        if hook is None:
            hook = _AssignValue(parameter)
            object.__setattr__(parameter, "assign_value", hook)
        hook.names[cell] = name


def _parameters_of(cell: Any) -> dict[str, Any]:
    return {parameter.name: parameter for parameter in cell.get_parameters()}


def write(parameter: Any, value: Tensor) -> None:
    """Give a Parameter a value that is not loaded, so that no cell takes note of it.

    Args:
        parameter (Parameter): of any shape and dtype.
        value (Tensor): of the same shape and dtype.
    """
    hook = vars(parameter).get("assign_value")
    (parameter.set_data if hook is None else hook.assign)(value)


def _fits(parameter: Any, value: Any) -> bool:
    return bool(parameter.shape == value.shape and parameter.dtype == value.dtype)


def _close_failed_pass(train_step: Any) -> None:
    """End a forward pass that raised an exception in PyNative mode, because MindSpore goes on recording such a pass.

    Otherwise the next pass would count as a part of the failed pass: gradients through dropout would be wrong, and
    training would apply no step.
    """
    if not _pynative_executor.grad_flag():
        return
    _pynative_executor.end_graph(train_step, Tensor(0.0))
    for _, cell in train_step.cells_and_names():
        cell.is_top_cell = False
