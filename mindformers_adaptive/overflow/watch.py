"""Records the values at every cell and operator of a network that runs in PyNative mode, forward and backward."""

import contextlib
import dataclasses
import itertools
import types
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from unittest import mock

from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore._c_expression import TensorPy
from mindspore.ops import Primitive, functional_overload
from mindspore.ops.auto_generate import pyboost_inner_prim as inner
from mindspore.ops.operations import comm_ops

from mindformers_adaptive.gradients.backward import to_numpy
from mindformers_adaptive.gradients.reading import Reading, read_values
from mindformers_adaptive.gradients.temporary_changes import replaced_in, without_recomputation
from mindformers_adaptive.overflow.passes import BATCH, Call, Gradient, Operand

# Methods of Tensors that are implemented in C++, including Python's operators. Other methods of Tensors are Python
# functions that call these methods. Names with a leading underscore are internal to MindSpore.
_METHODS = [name for name, value in vars(TensorPy).items() if isinstance(value, types.MethodDescriptorType)]
_DUNDERS = "add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv matmul rmatmul pow rpow neg abs"
_DUNDERS += " floordiv rfloordiv ifloordiv mod rmod imod getitem"
# Tensor methods whose names begin with one of these prefixes compute nothing, so they are not recorded.
_QUERIES = "_ is_ get_ set_ data_ init convert register remove_hook storage offload assign_value value untyped"
_QUERIES += " pin_memory wait flush move_to getitem setitem from_ asnumpy numpy item tolist dim numel nelement"
_QUERIES += " ndimension stride hooks"
_COMPUTING = [name for name in _METHODS if not (name.endswith("_") or name.startswith(tuple(_QUERIES.split())))]
_TENSOR_METHODS = [*(f"__{name}__" for name in _DUNDERS.split()), *_COMPUTING]
# Methods that write to their Tensor. Do not put a hook on that Tensor, because a hook returns another Tensor.
_IN_PLACE = ["__setitem__", *(name for name in _METHODS if name.endswith("_") and not name.startswith("_"))]
# The functions of mindspore.mint are defined in the module functional_overload, so their calls are recorded there.
_OF_MINT = [name for name, value in vars(functional_overload).items() if name.endswith("_instance") and callable(value)]
# Classes of operators that do not inherit from Primitive. Functions such as ops.softmax call these operators, so they
# are recorded too.
_INNER = [kind for kind in vars(inner).values() if isinstance(kind, type) and kind.__module__ == inner.__name__]
# Operators that communicate between processes, or print. Some of these operators write to their inputs.
_COMMUNICATES = {name for name, kind in vars(comm_ops).items() if isinstance(kind, type)} | {"Print"}

# Operators that only move values, forward and backward, without computing new values.
_MOVES = {"Reshape", "Transpose", "ExpandDims", "Squeeze", "Depend", "Identity", "Load", "Shape", "StopGradient"}
_MOVES |= {"View", "ViewAs", "Permute", "Unsqueeze", "Swapaxes", "Swapdims", "T", "Flatten", "Contiguous", "ReshapeAs"}
_MOVES |= {"Movedim", "Moveaxis", "TransposeView", "TransposeExt", "FlattenExt", "Detach", "TensorShape"}

# The original Tensor.is_floating_point, which the recording of Tensor methods does not replace.
_is_floating_point = Tensor.is_floating_point


def read_tensor(tensor: Any) -> Reading:
    """Return a Reading of a floating-point Tensor: its largest magnitude, and its number of inf and NaN."""
    return read_values(to_numpy(tensor), str(tensor.dtype).lower())


class Watch:
    """Records each pass of a network within ``watching()``, without changing what the network computes.

    Only code that runs op by op is recorded, so nothing is recorded in graph mode or within compiled functions.
    Operators are recorded if they are Primitives, methods of Tensors or functions of ``mint``. For other code, only the
    inputs and outputs of the cell around it are recorded. Parameters that a pass overwrites are restored after the
    pass.

    Args:
        network (Cell): the network, without a train-step cell around it.
        names (Mapping[str, Cell]): the cells to record, by name.
        widened (tuple[str, str], optional): the name of a cell, and the name of an operator that shall compute in
            float32 where this cell calls it. Default: None.
    """

    def __init__(self, network: Any, names: Mapping[str, Any], widened: tuple[str, str] | None = None) -> None:
        names = {"": network, **names}
        hidden = (_cells_in(name, vars(cell)) for name, cell in list(names.items()))
        names |= itertools.chain.from_iterable(hidden)
        self._network, self._cells, self._widened = network, list(names.values()), widened
        self._names = {id(cell): name for name, cell in reversed(names.items())}
        self._buffers: dict[int, str] = {}
        self._attributes: dict[tuple[int, int], str] = {}
        for name, cell in names.items():
            for key, value in (*vars(cell).items(), *cell._buffers.items(), *cell._primitives.items()):
                if isinstance(value, Primitive):
                    self._attributes[id(cell), id(value)] = key
                elif isinstance(value, Tensor) and not isinstance(value, Parameter):
                    self._buffers[id(value)] = f"{name}.{key}".removeprefix(".")
        self._written: dict[int, tuple[Any, Any]] = {}
        self._start()

    @contextlib.contextmanager
    def watching(self, *_: object) -> Iterator[None]:
        """Record every forward and backward pass of the network that runs within the block."""
        with contextlib.ExitStack() as self._patches:
            # Remember which Parameters have inf or NaN from the start. Otherwise the checkpoint would be blamed for inf
            # or NaN that the forward pass writes to a Parameter.
            parameters = filter(_is_floating_point, self._network.get_parameters())
            self._bad_from_start = {id(each) for each in parameters if not read_tensor(each).finite}
            self._patch(Parameter, "set_data", self._set_data)
            self._patch(nn.Cell, "__call__", self._call_cell)
            for kind in {Primitive, *_subclasses(Primitive)}:
                if "__call__" in vars(kind):
                    self._patch(kind, "__call__", self._call_primitive)
            functions = [(kind, "__call__", kind.__name__) for kind in _INNER]
            functions += [(functional_overload, name, name) for name in _OF_MINT]
            functions += [(Tensor, name, name) for name in (*_TENSOR_METHODS, *_IN_PLACE) if hasattr(Tensor, name)]
            for owner, attribute, name in functions:
                call = partial(self._call_operator, _operator_name(name), None, name in _IN_PLACE)
                self._patch(owner, attribute, call)
            self._patches.enter_context(without_recomputation(self._cells))
            yield

    def take(self, *_: object) -> tuple[list[Call], list[tuple[int, Gradient]], int | None]:
        """Return the ``Pass`` fields calls, backward and loss_source of the last pass, and delete its record."""
        recorded = self._calls, self._backward, self._loss_source
        self._start()
        return recorded

    def _start(self) -> None:
        for parameter, value in self._written.values():
            parameter.set_data(Tensor(value, parameter.dtype))
        self._calls: list[Call] = []
        self._backward: list[tuple[int, Gradient]] = []
        self._stack: list[tuple[Call, Any]] = []
        self._sources: dict[int, Operand] = {}
        self._kept: list[Any] = []
        self._loss_source: int | None = None
        self._written.clear()
        self._going_back = self._in_operator = False

    def _patch(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Replace an attribute of a class or module by a function whose first argument is the original attribute."""
        before = getattr(owner, name)
        patch = mock.patch.object(owner, name, lambda *args, **kwargs: function(before, *args, **kwargs))
        self._patches.enter_context(patch)

    def _call_cell(self, call: Callable[..., Any], cell: Any, *args: Any, **kwargs: Any) -> Any:
        name = self._names.get(id(cell))
        is_whole = cell is self._network and not self._stack
        # Recomputation calls cells again in the backward pass. Do not record these calls.
        if name is None or not (is_whole or self._stack) or (self._going_back and not is_whole) or self._in_operator:
            return call(cell, *args, **kwargs)
        if is_whole:
            self._start()
        begun = self._begin(name, type(cell).__name__)
        args, kwargs = self._take_in(begun, (args, kwargs), BATCH if is_whole else None, hooked=not is_whole)
        self._stack.append((begun, cell))
        try:
            output = call(cell, *args, **kwargs)
        finally:
            self._stack.pop()
        output = self._give_out(begun, output, keeps_source=True)
        if is_whole:
            first = next(iter(_tensors(output)), None)
            loss = self._sources.get(id(first))
            self._loss_source = None if loss is None else loss.source
        return output

    def _call_primitive(self, call: Callable[..., Any], primitive: Any, *args: Any, **kwargs: Any) -> Any:
        if hasattr(primitive, "__morph_fn__"):
            # MindFormers' mcore layers put functions into graphs by a Primitive with the attribute __morph_fn__. In
            # PyNative mode, just call the function.
            return primitive.__morph_fn__(*args, **kwargs)
        return self._call_operator(primitive.name, primitive, False, partial(call, primitive), *args, **kwargs)

    def _call_operator(
        self, kind: str, primitive: Any, in_place: bool, call: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        if not self._stack or self._going_back or self._in_operator:
            return call(*args, **kwargs)
        if kind in _MOVES:
            output = call(*args, **kwargs)
            for moved in _tensors(args)[:1]:
                for tensor in _tensors(output):
                    self._remember(tensor, self._look_up(moved))
            return output
        parent, cell = self._stack[-1]
        if (parent.layer, kind) == self._widened:
            args, kwargs = _replaced((args, kwargs), self._in_float32)
        begun = self._begin(parent.layer, kind, True, self._attributes.get((id(cell), id(primitive)), ""))
        # Only floats are values: integers may be axes, shapes or indexes.
        begun.largest_constant = max((abs(value) for value in args if isinstance(value, float)), default=0.0)
        # Do not put a hook on a Tensor that the operator writes to: the operator must get the caller's Tensor, not the
        # output of a hook.
        target = args[0] if args and (in_place or _writes(primitive, args[0])) else None
        hooked = target is None and kind not in _COMMUNICATES
        args, kwargs = self._take_in(begun, (args, kwargs), None, hooked)
        if isinstance(target, Parameter):
            self._save(target)
        with replaced_in(vars(self), "_in_operator", True):
            output = call(*args, **kwargs)
        if target is not None:
            self._give_out(begun, target, hooked=False)
        if kind == "BatchNorm":
            # A CPU leaves random memory in the other outputs, which are scratch space of the operator.
            return (*self._give_out(begun, output[:1]), *output[1:])
        return self._give_out(begun, output, hooked=hooked)

    def _in_float32(self, tensor: Any) -> Any:
        known = self._look_up(tensor)
        with replaced_in(vars(self), "_in_operator", True):
            tensor = tensor.astype(mstype.float32)
        self._remember(tensor, known)
        return tensor

    def _set_data(self, set_data: Callable[..., Any], parameter: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        if self._stack and isinstance(data, Tensor):
            self._save(parameter)
            self._remember(parameter, self._look_up(data))
        return set_data(parameter, data, *args, **kwargs)

    def _save(self, parameter: Any) -> None:
        if id(parameter) not in self._written:
            with replaced_in(vars(self), "_in_operator", True):
                self._written[id(parameter)] = parameter, to_numpy(parameter).copy()

    def _begin(self, layer: str, kind: str, operator: bool = False, attribute: str = "") -> Call:
        parent = self._stack[-1][0].index if self._stack else None
        begun = Call(len(self._calls), layer, kind, operator, parent, attribute)
        self._calls.append(begun)
        return begun

    def _take_in(self, begun: Call, values: Any, unknown: int | None, hooked: bool) -> Any:
        def take(tensor: Any) -> Any:
            operand = self._look_up(tensor, unknown)
            begun.inputs.append(operand)
            # Do not put a hook on a Parameter that is not trained, because the call may write to the Parameter.
            if hooked and not (isinstance(tensor, Parameter) and not tensor.requires_grad):
                tensor = self._hook(tensor, begun, False)
            if not isinstance(tensor, Parameter):
                self._remember(tensor, operand)
            return tensor

        return _replaced(values, take)

    def _look_up(self, tensor: Any, unknown: int | None = None) -> Operand:
        """Return the Operand of a Tensor: its magnitudes, and its source if the source is known."""
        with replaced_in(vars(self), "_in_operator", True):
            reading = read_tensor(tensor)
        known = self._sources.get(id(tensor))
        if known is not None:
            return dataclasses.replace(known, reading=reading)
        if isinstance(tensor, Parameter) and (reading.finite or id(tensor) in self._bad_from_start):
            return Operand(reading, weight=tensor.name)
        return Operand(reading, unknown, buffer=self._buffers.get(id(tensor)))

    def _give_out(self, begun: Call, output: Any, keeps_source: bool = False, hooked: bool = True) -> Any:
        def give(tensor: Any) -> Any:
            known = self._look_up(tensor)
            begun.outputs.append(known.reading)
            tensor = self._hook(tensor, begun, True) if hooked else tensor
            # If the output of a cell was computed by a recorded operator inside the cell, keep this operator as the
            # source of the output. The cell is the source only if no such operator is known.
            known = known if keeps_source and known.source is not None else Operand(known.reading, begun.index)
            self._remember(tensor, known)
            return tensor

        return _replaced(output, give)

    def _remember(self, tensor: Any, operand: Operand) -> None:
        self._sources[id(tensor)] = operand
        # Keep a reference to the tensor. Otherwise another tensor could reuse its memory, and with it the id.
        self._kept.append(tensor)

    def _hook(self, tensor: Any, begun: Call, of_output: bool) -> Any:
        """Return a copy of the newest recorded input or output of a call, with a hook that records its gradient."""
        backward, index = self._backward, len(begun.outputs if of_output else begun.inputs) - 1

        def record(gradients: Any) -> None:
            # The first call of this hook shows that the backward pass has begun. Do not record the operators of the
            # backward pass as calls of the network.
            self._going_back = True
            gradient = Gradient(of_output, index, read_tensor(gradients[0]))
            begun.gradients.append(gradient)
            backward.append((begun.index, gradient))

        with replaced_in(vars(self), "_in_operator", True):
            return ops.HookBackward(record)(tensor)


def _tensors(values: Any) -> list[Any]:
    tensors: list[Any] = []

    def append(tensor: Any) -> Any:
        tensors.append(tensor)
        return tensor

    _replaced(values, append)
    return tensors


def _replaced(values: Any, function: Callable[[Any], Any]) -> Any:
    """Return the values with a function applied to each floating-point tensor, also in nested tuples, lists, dicts."""
    if isinstance(values, Tensor):
        return function(values) if _is_floating_point(values) else values
    if type(values) in (tuple, list):
        return type(values)([_replaced(value, function) for value in values])
    if type(values) is dict:
        return {key: _replaced(value, function) for key, value in values.items()}
    return values


def _writes(primitive: Any, target: Any) -> bool:
    """Return whether an operator writes to its first input."""
    has_effect = (getattr(primitive, "attrs", None) or {}).get("side_effect_mem")
    return bool(has_effect) and (isinstance(target, Parameter) or primitive.name.startswith("Inplace"))


def _cells_in(name: str, values: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and cell of each cell in lists and dicts, which MindSpore does not register as subcells."""
    for key, value in values.items() if isinstance(values, dict) else enumerate(values):
        path = f"{name}.{key}".removeprefix(".")
        if str(key).startswith("_"):
            continue
        if isinstance(value, nn.Cell):
            yield from ((inside or path, cell) for inside, cell in value.cells_and_names(name_prefix=path))
        elif type(value) in (list, tuple, dict):
            yield from _cells_in(path, value)


def _subclasses(kind: Any) -> Iterator[Any]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


def _operator_name(name: str) -> str:
    """Return the name of an operator, such as ``RealDiv``, from the name of the function or class that calls it."""
    name = name.removeprefix("_Pyboost").removesuffix("Prim").removesuffix("_instance")
    return "".join(word[:1].upper() + word[1:] for word in name.strip("_").split("_"))
