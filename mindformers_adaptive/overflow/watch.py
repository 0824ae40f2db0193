"""Looks at every cell and operator of a network while it runs in PyNative mode, forward and backward."""

import contextlib
import functools
from collections.abc import Mapping

from mindspore import Parameter, Tensor, nn, ops
from mindspore.ops import Primitive, functional_overload
from mindspore.ops.auto_generate import pyboost_inner_prim as inner
from mindspore.ops.signature import sig_rw

from mindformers_adaptive.gradients.backward import replaced_in, to_numpy
from mindformers_adaptive.overflow.readings import Call, Gradient, Operand, read_values

__all__ = ["Watch", "read_tensor"]

# Operators of Tensors that Python never sees as a Primitive.
_METHODS = "add sub mul div matmul pow exp log sqrt rsqrt square reciprocal sum mean prod cumsum var std"
_METHODS += " abs neg sigmoid tanh softmax logsumexp maximum minimum clamp clip masked_fill where addmm baddbmm mm bmm"
_METHODS += " astype to tile broadcast_to gather index_select"
_DUNDERS = "add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv matmul rmatmul pow rpow neg"
_TENSOR_METHODS = (*_METHODS.split(), *(f"__{name}__" for name in _DUNDERS.split()))
# Functions of mint are these of another module.
_OF_MINT = [name for name, value in vars(functional_overload).items() if name.endswith("_instance") and callable(value)]
# Operators that are no Primitive to Python, of which functions such as ops.softmax are made.
_INNER = [kind for kind in vars(inner).values() if isinstance(kind, type) and kind.__module__ == inner.__name__]
# They write to the Tensor that they belong to, of which a hook would make another.
_IN_PLACE = "__setitem__ add_ sub_ mul_ div_ addmm_ exp_ log_ copy_ fill_ masked_fill_ clamp_ index_add_ index_put_"
_IN_PLACE += " index_copy_ index_fill_ scatter_ scatter_add_"

# They move numbers and make none, forward or backward.
_MOVES = {"Reshape", "Transpose", "ExpandDims", "Squeeze", "Depend", "Identity", "Load", "Shape", "StopGradient"}
# They write to what they are given, which then must be what it was.
_WRITES = ("Assign", "Inplace", "Scatter", "Print", "Send", "Receive", "AllReduce", "AllGather", "Reduce", "Broadcast")

_BATCH = -1


def read_tensor(tensor):
    """Return the magnitudes of a Tensor of floating point."""
    return read_values(to_numpy(tensor), str(tensor.dtype).lower())


class Watch:
    """Records each pass of a network within ``watching()``, and changes nothing that the network computes.

    Python sees what runs op by op only: in graph mode, and within functions that are compiled, nothing is recorded.
    Operators are seen where they are Primitives, methods of Tensors or functions of ``mint``; what others do is seen
    from the cell around them.

    Args:
        network (Cell): without a train-step cell around it.
        names (Mapping[str, Cell]): the cells to record, by name.
    """

    def __init__(self, network, names: Mapping[str, nn.Cell]):
        self._network, self._cells = network, (network, *names.values())
        self._names = {id(cell): name for name, cell in names.items()} | {id(network): ""}
        self._attributes = {
            (id(cell), id(value)): key
            for cell in self._cells
            for key, value in (*vars(cell).items(), *vars(cell).get("_primitives", {}).items())
            if isinstance(value, Primitive)
        }
        self._start()

    @contextlib.contextmanager
    def watching(self):
        """Record passes, as many as are made."""
        with contextlib.ExitStack() as self._patches:
            self._patch(nn.Cell, "__call__", self._call_cell)
            for kind in {Primitive, *_subclasses(Primitive)}:
                if "__call__" in vars(kind):
                    self._patch(kind, "__call__", self._call_primitive)
            for kind in _INNER:
                name = kind.__name__.removeprefix("_Pyboost").removesuffix("Prim")
                self._patch(kind, "__call__", functools.partial(self._call_function, name))
            functions = [(functional_overload, name, self._call_function) for name in _OF_MINT]
            functions += [(Tensor, name, self._call_function) for name in _TENSOR_METHODS]
            functions += [(Tensor, name, self._call_in_place) for name in _IN_PLACE.split()]
            for owner, name, call in functions:
                if hasattr(owner, name):
                    self._patch(owner, name, functools.partial(call, _operator_name(name)))
            for cell in self._cells:
                if getattr(cell, "_recompute_cell", None) is not None:
                    # It would hide the cells inside, which are called again on the way back.
                    self._patches.enter_context(replaced_in(vars(cell), "_recompute_cell", None))
            yield

    def take(self, loss):
        """Return what was recorded of the pass that was made last, and forget it.

        Args:
            loss (Tensor): what it returned as the loss.

        Returns:
            tuple, ``calls``, ``backward`` and ``loss_source`` of a ``Pass``.
        """
        made = self._calls, self._backward, self._loss_source
        self._start()
        return made

    def _start(self):
        self._calls, self._backward, self._stack = [], [], []
        self._sources, self._kept, self._loss_source = {}, [], None
        self._going_back = self._in_operator = False

    def _patch(self, owner, name, function):
        """Put a function in the place of an attribute; it is given what was there first."""
        before, own = getattr(owner, name), vars(owner).get(name)
        setattr(owner, name, lambda *args, **kwargs: function(before, *args, **kwargs))
        self._patches.callback(*((delattr, owner, name) if own is None else (setattr, owner, name, own)))

    def _call_cell(self, call, cell, *args, **kwargs):
        name = self._names.get(id(cell))
        is_whole = cell is self._network and not self._stack
        # Recomputation in the backward pass calls cells again.
        if name is None or not (is_whole or self._stack) or (self._going_back and not is_whole) or self._in_operator:
            return call(cell, *args, **kwargs)
        if is_whole:
            self._start()
        made = self._begin(name, type(cell).__name__)
        args, kwargs = self._take_in(made, (args, kwargs), _BATCH if is_whole else None, hooked=not is_whole)
        self._stack.append((made, cell))
        try:
            output = call(cell, *args, **kwargs)
        finally:
            self._stack.pop()
        output = self._give_out(made, output, keeps_source=True)
        if is_whole:
            first = next(iter(_tensors(output)), None)
            self._loss_source = self._sources.get(id(first))
        return output

    def _call_primitive(self, call, primitive, *args, **kwargs):
        if hasattr(primitive, "__morph_fn__"):
            # MindFormers' mcore layers put functions into graphs by this one; op by op they are just called.
            return primitive.__morph_fn__(*args, **kwargs)
        return self._call_operator(primitive.name, primitive, functools.partial(call, primitive), args, kwargs)

    def _call_function(self, name, function, *args, **kwargs):
        return self._call_operator(name, None, function, args, kwargs)

    def _call_in_place(self, name, function, *args, **kwargs):
        return self._call_operator(name, None, function, args, kwargs, in_place=True)

    def _call_operator(self, kind, primitive, call, args, kwargs, in_place=False):
        if not self._stack or self._going_back or self._in_operator:
            return call(*args, **kwargs)
        if kind in _MOVES:
            output = call(*args, **kwargs)
            moved = next((self._sources[id(each)] for each in _tensors(args) if id(each) in self._sources), None)
            for tensor in _tensors(output) if moved is not None else ():
                self._remember(tensor, moved)
            return output
        parent, cell = self._stack[-1]
        made = self._begin(parent.layer, kind, True, self._attributes.get((id(cell), id(primitive)), ""))
        hooked = not in_place and not kind.startswith(_WRITES)
        args, kwargs = self._take_in(made, (args, kwargs), None, hooked, not _writes_to_parameters(primitive))
        with replaced_in(vars(self), "_in_operator", True):
            output = call(*args, **kwargs)
        if in_place:
            self._give_out(made, args[0], hooked=False)
        return self._give_out(made, output) if hooked else output

    def _begin(self, layer, kind, operator=False, attribute=""):
        parent = self._stack[-1][0].index if self._stack else None
        made = Call(len(self._calls), layer, kind, operator, parent, attribute)
        self._calls.append(made)
        return made

    def _take_in(self, made, given, unknown, hooked, parameters_too=True):
        def take(tensor):
            is_parameter = isinstance(tensor, Parameter)
            weight = tensor.name if is_parameter else None
            source = self._sources.get(id(tensor), unknown)
            place = len(made.inputs)
            made.inputs.append(Operand(read_tensor(tensor), source, weight))
            if hooked and not (is_parameter and not (parameters_too and tensor.requires_grad)):
                tensor = self._hook(tensor, made, False, place)
            if source is not None:
                self._remember(tensor, source)
            return tensor

        return _replaced(given, take)

    def _give_out(self, made, output, keeps_source=False, hooked=True):
        def give(tensor):
            place = len(made.outputs)
            made.outputs.append(read_tensor(tensor))
            source = self._sources.get(id(tensor)) if keeps_source else None
            tensor = self._hook(tensor, made, True, place) if hooked else tensor
            # What a cell hands on comes from the operator inside that made it, if that was seen.
            self._remember(tensor, made.index if source is None else source)
            return tensor

        return _replaced(output, give)

    def _remember(self, tensor, source):
        self._sources[id(tensor)] = source
        # Else another tensor might take its place in memory, and its id.
        self._kept.append(tensor)

    def _hook(self, tensor, made, of_output, place):
        backward = self._backward

        def record(gradients):
            # No operator of these is one of the network's.
            self._going_back = True
            gradient = Gradient(of_output, place, read_tensor(gradients[0]))
            made.gradients.append(gradient)
            backward.append((made.index, gradient))

        with replaced_in(vars(self), "_in_operator", True):
            return ops.HookBackward(record)(tensor)


def _tensors(values):
    found = []
    _replaced(values, lambda tensor: found.append(tensor) or tensor)
    return found


def _replaced(values, function):
    """Return values with each tensor of floating point replaced, however deep in tuples, lists and dicts it is."""
    if isinstance(values, Tensor):
        return function(values) if values.is_floating_point() else values
    if type(values) in (tuple, list):
        return type(values)([_replaced(value, function) for value in values])
    if type(values) is dict:
        return {key: _replaced(value, function) for key, value in values.items()}
    return values


def _writes_to_parameters(primitive):
    signature = getattr(primitive, "__mindspore_signature__", None) or ()
    return any(getattr(each, "rw", None) == sig_rw.RW_WRITE for each in signature)


def _subclasses(kind):
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


def _operator_name(name):
    return "".join(word.capitalize() for word in name.strip("_").removesuffix("_instance").split("_"))
