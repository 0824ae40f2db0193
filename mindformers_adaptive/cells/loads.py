"""Sees each value that is loaded into a Parameter, and writes it into the memory that compiled graphs read.

MindSpore and MindFormers load a checkpoint by ``Parameter.set_data``, which gives the Parameter other memory. A graph
that has run keeps the old memory of some Parameters: in graph mode, of those that only the branch of a condition uses,
such as the optimizer's state in ``if not overflow: optimizer(gradients)``; in PyNative mode, of all Parameters of the
compiled optimizer. After such a load, training would read and write the old memory, and the weights would stand still.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from typing import Any

from mindspore import Tensor
from mindspore.common.api import _pynative_executor

__all__ = ["SeesLoads", "observe_loads", "write"]

# For type checkers, the base class of the mixin is Any, so that they accept attributes that MindSpore's cell defines.
_Base: Any = object


class SeesLoads(_Base):
    """Mixin for a cell that learns which Parameters were loaded, and keeps their memory while it trains.

    Attributes:
        loaded (set[str]): the names of the Parameters that were loaded, until the cell clears the set.
        keeps_memory (bool): whether a compiled graph may use the Parameters, so that a load writes into their memory.
    """

    keeps_memory = False
    loaded: set[str]

    def __setstate__(self, state: Any) -> None:
        # A copied or unpickled cell has new Parameters, which no cell observes, and its graphs are not compiled yet.
        super().__setstate__(state)
        self.keeps_memory = False
        self._observe_loads()

    def add_flags_recursive(self, **flags: bool) -> Any:
        super().add_flags_recursive(**flags)
        if flags.get("training"):
            # With data sink, the graph around this cell runs without calling the cell from Python.
            self._start_keeping()
        return self

    def _start_keeping(self) -> None:
        """From now on, let a load write into the memory that the Parameters have."""
        if not self.keeps_memory:
            self._observe_loads()
            self.keeps_memory = True

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


class _SetData:
    """Stands in for ``set_data`` of one Parameter. Copies of the Parameter have MindSpore's own method again."""

    def __init__(self, parameter: Any) -> None:
        # Do not keep cells and Parameters alive: they hold memory of the device.
        self.parameter = weakref.ref(parameter)
        self.names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def __call__(self, data: Any, slice_shape: bool = False) -> Any:
        parameter: Any = self.parameter()
        # In PyNative mode, a forward pass may write by set_data() too, as to the moving averages of a layer.
        if _pynative_executor.grad_flag():
            return type(parameter).set_data(parameter, data, slice_shape)
        for cell, name in list(self.names.items()):
            if isinstance(cell, SeesLoads):
                cell._note_load(name)
        return self.write(data, slice_shape)

    def write(self, data: Any, slice_shape: bool = False) -> Any:
        """Set the data of the Parameter, in the memory that the Parameter has if a graph may use this memory."""
        parameter: Any = self.parameter()
        if isinstance(data, int) or (isinstance(data, float) and parameter.is_floating_point()):
            data = Tensor(data, parameter.dtype)
        keeping = [type(cell).__name__ for cell in self.names if cell.keeps_memory]
        # A Parameter that is not initialized has no memory that a graph could use.
        if keeping and isinstance(data, Tensor) and not parameter.has_init:
            if _copy_into(parameter, data):
                return parameter
            warnings.warn(
                f"The Parameter {parameter.name!r} of {keeping[0]} was loaded, but not into its memory, because its "
                f"shape is {parameter.shape} and not {data.shape}. The compiled training step may go on with the old "
                "values. Make a new train-step cell, and load the checkpoint into it.",
                stacklevel=3,
            )
        return type(parameter).set_data(parameter, data, slice_shape)


def observe_loads(cell: Any, parameters: Mapping[str, Any] | None = None) -> None:
    """Let a cell observe Parameters.

    Args:
        cell (Cell): a :class:`SeesLoads`, or any cell with an attribute ``keeps_memory``.
        parameters (Mapping[str, Parameter], optional): the Parameters, by the names that the cell has for them.
            Default: None, all Parameters of the cell.
    """
    for name, parameter in (_parameters_of(cell) if parameters is None else parameters).items():
        hook = vars(parameter).get("set_data")
        if not isinstance(hook, _SetData):
            hook = _SetData(parameter)
            object.__setattr__(parameter, "set_data", hook)
        hook.names[cell] = name


def _parameters_of(cell: Any) -> dict[str, Any]:
    return {parameter.name: parameter for parameter in cell.get_parameters()}


def write(parameter: Any, data: Any) -> None:
    """Give a Parameter a value that is not loaded, so that no cell takes note of it.

    Args:
        parameter (Parameter): of any shape and dtype.
        data (Tensor): of the same shape.
    """
    hook = vars(parameter).get("set_data")
    if isinstance(hook, _SetData):
        hook.write(data)
    else:
        parameter.set_data(data)


def _copy_into(parameter: Any, data: Any) -> bool:
    """Write a Tensor into the memory of a Parameter. Return False if the memory has another shape."""
    data = data.init_data() if data.has_init else data
    if data.shape != parameter.shape:
        return False
    # Unlike ops.assign, this method also casts to the dtype of the Parameter, and supports BF16 on a CPU.
    parameter.copy_(data)
    return True
