"""Looks at the cells of a network while it runs in graph mode: cells around them keep how large values are."""

import contextlib

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

from mindformers_adaptive.gradients.backward import replaced_in
from mindformers_adaptive.overflow.readings import Call, Gradient, Operand, Reading
from mindformers_adaptive.overflow.watch import read_tensor

__all__ = ["GraphWatch"]

_DTYPES = (mstype.float16, mstype.bfloat16, mstype.float32)
# Times count down from here, so that the largest is the first.
_TIMES = 2.0**24
# What is kept of each cell.
_KEPT = ("given", "made", "received", "returned")


class GraphWatch:
    """Records each pass of a network within ``watching()``, as ``Watch`` does, but of cells only.

    For a network that does not run op by op. Each cell is called by another that keeps what it saw in Parameters on the
    device. Operators are not seen: where values overflow between cells, the cell around them is named.

    Args:
        network (Cell): without a train-step cell around it.
        names (Mapping[str, Cell]): the cells to record, by name.
    """

    def __init__(self, network, names):
        self._network = network
        clocks = [Parameter(Tensor(0.0, mstype.float32), f"clock_of_watch_{n}", requires_grad=False) for n in range(2)]
        called = {name: cell for name, cell in names.items() if not isinstance(cell, nn.CellList | nn.CellDict)}
        self._watched = {name: _Watched(name, cell, *clocks) for name, cell in called.items()}
        self._by_cell = {id(watched.layer): watched for watched in self._watched.values()}
        self._owners = (network, *names.values())

    @contextlib.contextmanager
    def watching(self):
        """Record passes, as many as are made."""
        with contextlib.ExitStack() as stack:
            # Some cells keep lists of those that they call, too.
            for values in (values for owner in self._owners for values in (owner._cells, vars(owner))):
                for name, value in list(values.items()):
                    watched = self._watched_for(value)
                    if watched is not value:
                        stack.enter_context(replaced_in(values, name, watched))
            yield

    def take(self, loss):
        """Return what was recorded of the pass that was made last, and forget it; as in ``Watch``."""
        whole = Call(0, "", type(self._network).__name__, outputs=[read_tensor(loss)])
        calls, places, backward = [whole], {"": 0}, []
        began = {name: float(watched.began.asnumpy()) for name, watched in self._watched.items()}
        for name in sorted((name for name, time in began.items() if time), key=began.get):
            watched = self._watched[name]
            parent = name
            while parent not in places:
                parent = parent.rpartition(".")[0]
            made = Call(len(calls), name, type(watched.layer).__name__, parent=places[parent])
            places[name] = made.index
            calls.append(made)
            made.inputs = [Operand(reading) for reading, _ in watched.seen("given")]
            made.inputs += [Operand(read_tensor(weight), None, weight.name) for weight in _own(watched.layer)]
            made.outputs = [reading for reading, _ in watched.seen("made")]
            for of_output, which in ((True, "received"), (False, "returned")):
                for reading, time in watched.seen(which):
                    gradient = Gradient(of_output, 0, reading)
                    made.gradients.append(gradient)
                    backward.append((time, made.index, gradient))
            watched.forget()
        return calls, [(index, gradient) for _, index, gradient in sorted(backward, key=lambda one: one[0])], None

    def _watched_for(self, value):
        if type(value) in (tuple, list):
            found = [self._by_cell.get(id(each), each) for each in value]
            changed = any(new is not old for new, old in zip(found, value, strict=True))
            return type(value)(found) if changed else value
        return self._by_cell.get(id(value), value)


def _own(cell):
    return [weight for weight in cell._params.values() if weight is not None and weight.is_floating_point()]


class _Watched(nn.Cell):
    """A cell in the place of another that it calls."""

    def __init__(self, name, layer, forward_clock, backward_clock):
        super().__init__(auto_prefix=False)
        self.layer = layer
        self.forward_clock, self.backward_clock = forward_clock, backward_clock
        self.began = Parameter(Tensor(0.0, mstype.float32), f"watch_of_{name}.began", requires_grad=False)
        for which in _KEPT:
            kept = Parameter(Tensor(np.zeros(5, np.float32)), f"watch_of_{name}.{which}", requires_grad=False)
            setattr(self, which, kept)
        self.note_returned = ops.InsertGradientOf(self._note_returned)
        self.note_received = ops.InsertGradientOf(self._note_received)
        self.one = Tensor(1.0, mstype.float32)
        # A graph is compiled from functions many times slower than from these.
        self.abs, self.cast, self.depend = ops.Abs(), ops.Cast(), ops.Depend()
        self.is_finite, self.logical_not, self.select = ops.IsFinite(), ops.LogicalNot(), ops.Select()
        self.reduce_max, self.reduce_sum, self.stack = ops.ReduceMax(), ops.ReduceSum(), ops.Stack()
        self.minimum, self.maximum, self.zeros_like = ops.Minimum(), ops.Maximum(), ops.ZerosLike()
        self.assign, self.assign_add = ops.Assign(), ops.AssignAdd()

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            layer = vars(self)["_cells"].get("layer")
            # The flags of a cell, such as fp16, are its own.
            if layer is None or name.startswith("_") or name in layer.get_flags():
                raise
            return getattr(layer, name)

    def construct(self, *args, **kwargs):
        self.assign(self.began, self.assign_add(self.forward_clock, self.one))
        given = []
        for value in args:
            seen = value
            if self._is_seen(value):
                self._note(self.given, value, self.forward_clock)
                seen = self.note_returned(value)
            given.append(seen)
        output = self.layer(*given, **kwargs)
        if isinstance(output, tuple):
            outputs = []
            for value in output:
                outputs.append(self._noted(value))
            return tuple(outputs)
        return self._noted(output)

    def _noted(self, value):
        if self._is_seen(value):
            self._note(self.made, value, self.forward_clock)
            return self.note_received(value)
        return value

    def _is_seen(self, value):
        return isinstance(value, Tensor) and value.dtype in _DTYPES

    def _note_returned(self, gradient):
        # Without this the assignment would be left out of the graph.
        return self.depend(gradient, self._note(self.returned, gradient, self.backward_clock))

    def _note_received(self, gradient):
        return self.depend(gradient, self._note(self.received, gradient, self.backward_clock))

    def _note(self, record, tensor, clock):
        """Keep the largest of each: of finite magnitudes, of inf and NaN how many, and the first time of these."""
        size = self.abs(self.cast(tensor, mstype.float32))
        is_finite = self.is_finite(size)
        largest = self.reduce_max(self.select(is_finite, size, self.zeros_like(size)))
        bad = self.reduce_sum(self.cast(self.logical_not(is_finite), mstype.float32))
        time = (_TIMES - self.assign_add(clock, self.one)) * self.minimum(bad, self.one)
        dtype = 0.0 if tensor.dtype == mstype.float16 else 1.0 if tensor.dtype == mstype.bfloat16 else 2.0
        size, dtype = self.cast(float(tensor.size), mstype.float32), self.cast(dtype, mstype.float32)
        return self.assign(record, self.maximum(record, self.stack((largest, bad, time, size, dtype))))

    def seen(self, which):
        """Return what was kept as a list of one reading and its time, which is empty if nothing was."""
        largest, bad, time, size, dtype = getattr(self, which).asnumpy().tolist()
        reading = Reading(str(_DTYPES[int(dtype)]).lower(), int(size), largest, int(bad))
        return [(reading, _TIMES - time)] if size else []

    def forget(self):
        """Start anew."""
        for which in _KEPT:
            getattr(self, which).set_data(Tensor(np.zeros(5, np.float32)))
        self.began.set_data(Tensor(0.0, mstype.float32))
