"""Measures the cells of a network in graph mode. The measurements are returned as gradients of extra Parameters."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops.auto_generate import SumExt

from mindformers_adaptive.gradients.backward import to_numpy
from mindformers_adaptive.gradients.reading import Reading
from mindformers_adaptive.gradients.temporary_changes import replaced_in
from mindformers_adaptive.overflow.passes import BATCH, Call, Gradient, Operand
from mindformers_adaptive.overflow.watch import read_tensor

_DTYPES = (mstype.float16, mstype.bfloat16, mstype.float32)
# The quantities measured at each input and output of a cell: three of the value and of its gradient, in turns, and then
# three of both together. The kind of the gradient's inf and NaN is not used.
_MEASURED = ("largest", "gradient_largest", "bad", "gradient_bad", "of_bad", "unused", "size", "dtype", "calls")
# Of a cell, the first calls in a pass are measured one by one, and the mean of all others.
_MOST_CALLS = 8
# Of a cell with *args, at most _MOST_INPUTS inputs are measured. Of every cell, at most _MOST_OUTPUTS outputs are
# measured: at least 4, because flash attention returns its result as the fourth output.
_MOST_INPUTS, _MOST_OUTPUTS = 8, 4


class GraphWatch:
    """Records the calls of cells, but not of operators, in each pass of a network within ``watching()``.

    Use it for a network that runs only in graph mode. Each input and output of a cell passes through a measuring cell,
    which has a custom gradient and a second input: a Parameter, the *sink*. The gradient of the sink is the
    measurement. So nothing is written in the backward pass, where MindSpore could not keep writes in order. Operators
    are not seen: if values overflow between cells, the surrounding cell is named.

    Args:
        network (Cell): the network, without a train-step cell around it.
        names (Mapping[str, Cell]): the cells to record, by name.
    """

    def __init__(self, network: Any, names: Mapping[str, Any]) -> None:
        self._network = network
        clock = Parameter(Tensor(0.0, mstype.float32), "clock_of_watch", requires_grad=False)
        measure = _Measure()
        called = {name: cell for name, cell in names.items() if not isinstance(cell, nn.CellList | nn.CellDict)}
        # Use the paths of cells as keys: the path of a cell begins with the path of the surrounding cell. The name of a
        # cell need not, because it may omit cells that a trainer puts around the network.
        paths = {id(cell): path for path, cell in network.cells_and_names()}
        self._watched = {paths[id(cell)]: _Watched(name, cell, clock, measure) for name, cell in called.items()}
        self._by_cell = {id(watched.layer): watched for watched in self._watched.values()}
        self._owners = (network, *names.values())
        self.sinks = tuple(sink for watched in self._watched.values() for sink in watched.sinks)

    @contextlib.contextmanager
    def watching(self, *differentiating: Any) -> Iterator[None]:
        """Record every forward and backward pass of the network that runs within the block.

        Args:
            *differentiating (Cell): the cells that differentiate by their ``weights``. The sinks are appended to these
                weights, so the gradients of the sinks come last.
        """
        with contextlib.ExitStack() as stack:
            for cell in differentiating:
                if (weights := getattr(cell, "weights", None)) is not None:
                    stack.callback(setattr, cell, "weights", weights)
                    cell.weights = ParameterTuple((*weights, *self.sinks))
            # Some cells also keep lists of the cells that they call. Replace the cells in these lists too.
            for values in (values for owner in self._owners for values in (owner._cells, vars(owner))):
                for name, value in list(values.items()):
                    if (watched := self._watched_for(value)) is not value:
                        stack.enter_context(replaced_in(values, name, watched))
            yield

    def take(
        self, batch: Any, loss: Any, weights: Mapping[str, Reading], gradients_of_sinks: Sequence[Any]
    ) -> tuple[list[Call], list[tuple[int, Gradient]], None]:
        """Return what was recorded in the last pass of the network, and discard that record.

        Args:
            batch (Sequence[Tensor]): the inputs of the pass.
            loss (Tensor): the loss that the pass returned.
            weights (Mapping[str, Reading]): the gradients of the trained Parameters.
            gradients_of_sinks (Sequence[Tensor]): the gradients of ``sinks``, in the same order.

        Returns:
            tuple, ``calls``, ``backward`` and ``loss_source`` of a ``Pass``.
        """
        pairs = zip(self.sinks, gradients_of_sinks, strict=True)
        measured = {sink.name: to_numpy(gradient).tolist() for sink, gradient in pairs}
        values = [value for value in batch if isinstance(value, Tensor) and value.is_floating_point()]
        inputs = [*(Operand(read_tensor(value), BATCH) for value in values), *_own_weights(self._network)]
        whole = Call(0, "", type(self._network).__name__, inputs=inputs, outputs=[read_tensor(loss)])
        calls, indexes = [whole], {"": 0}
        # For each call, when it began, the path of its cell, and how many calls of this cell came before.
        began = [
            (when, path, number)
            for path, watched in self._watched.items()
            for number, when in enumerate(watched.take_beginnings())
            if when
        ]
        for _, path, number in sorted(began):
            around = path
            while (around := around.rpartition(".")[0]) not in indexes:
                pass
            indexes[path] = len(calls)
            calls.append(self._watched[path].read(measured, number, len(calls), indexes[around]))
        return calls, list(_backward_order(calls, dict(weights))), None

    def _watched_for(self, value: Any) -> Any:
        if type(value) in (tuple, list):
            replaced = [self._by_cell.get(id(each), each) for each in value]
            changed = any(new is not old for new, old in zip(replaced, value, strict=True))
            return type(value)(replaced) if changed else value
        return self._by_cell.get(id(value), value)


def _backward_order(calls: list[Call], weights: dict[str, Reading]) -> Iterator[tuple[int, Gradient]]:
    """Yield all gradients in the order of the backward pass, which visits the calls of the forward pass in reverse."""
    inside: dict[int | None, list[Call]] = {}
    for call in calls[1:]:
        inside.setdefault(call.parent, []).append(call)

    def go_back(call: Call) -> Iterator[tuple[int, Gradient]]:
        yield from ((call.index, gradient) for gradient in call.gradients if gradient.of_output)
        for child in reversed(inside.get(call.index, [])):
            yield from go_back(child)
        of_inputs = [gradient for gradient in call.gradients if not gradient.of_output]
        # Yield the gradients of a layer's weights before the gradients of the layer's inputs, because the backward pass
        # goes on from the inputs.
        for index, value in enumerate(call.inputs):
            if value.weight in weights:
                call.gradients.append(Gradient(False, index, weights.pop(value.weight)))
                yield call.index, call.gradients[-1]
        yield from ((call.index, gradient) for gradient in of_inputs)

    yield from go_back(calls[0])


class _Watched(nn.Cell):
    """Replaces a cell of the network: calls the cell, and measures its inputs and outputs."""

    def __init__(self, name: str, layer: Any, clock: Any, measure: Any) -> None:
        super().__init__(auto_prefix=False)
        self.layer, self.layer_name, self.clock, self.measure = layer, name, clock, measure
        parameters = list(inspect.signature(layer.construct).parameters.values())
        takes_any = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
        self.sinks_in = _sinks(f"{name}.in", _MOST_INPUTS if takes_any else len(parameters))
        self.sinks_out = _sinks(f"{name}.out", _MOST_OUTPUTS)
        shape = (_MOST_CALLS, len(_MEASURED))
        self.began = Parameter(Tensor(np.zeros(shape, np.float32)), f"watch_of_{name}.began", requires_grad=False)
        self.calls = Parameter(Tensor(0.0, mstype.float32), f"watch_of_{name}.calls", requires_grad=False)
        self.assign_add, self.equal, self.minimum = ops.AssignAdd(), ops.Equal(), ops.Minimum()
        self.select, self.zeros_like = ops.Select(), ops.ZerosLike()
        self.one, self.most = Tensor(1.0, mstype.float32), Tensor(float(_MOST_CALLS), mstype.float32)
        # Hold the number of each call once for each measured quantity, so that no input or output has to repeat it.
        self.numbers = Tensor(np.broadcast_to(np.arange(1, _MOST_CALLS + 1, dtype=np.float32)[:, None], shape))

    @property
    def sinks(self) -> tuple[Any, ...]:
        return (*self.sinks_in, *self.sinks_out)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            layer = vars(self)["_cells"].get("layer")
            # Take an attribute that this wrapper lacks from the wrapped cell. But a flag, such as fp16, and a gradient
            # of the cell's own must apply to the wrapped cell only: MindSpore would not differentiate the wrapper.
            if layer is None or name.startswith("_") or name in (*layer.get_flags(), "bprop"):
                raise
            return getattr(layer, name)

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        self.assign_add(self.clock, self.one)
        self.assign_add(self.calls, self.one)
        is_this_call = self.equal(self.numbers, self.minimum(self.calls, self.most))
        now = self.zeros_like(self.numbers) + self.clock
        self.assign_add(self.began, self.select(is_this_call, now, self.zeros_like(now)))
        inputs = []
        for value, sink in zip(args, self.sinks_in):  # noqa: B905, which a graph does not have
            inputs.append(self.measured(value, sink, is_this_call))
        output = self.layer(*inputs, *args[len(inputs) :], **kwargs)
        if isinstance(output, tuple):
            outputs = []
            for value, sink in zip(output, self.sinks_out):  # noqa: B905
                outputs.append(self.measured(value, sink, is_this_call))
            return tuple(outputs) + output[len(outputs) :]
        return self.measured(output, self.sinks_out[0], is_this_call)

    def measured(self, value: Any, sink: Any, is_this_call: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype in _DTYPES:
            return self.measure(value, sink, is_this_call)
        return value

    def take_beginnings(self) -> list[float]:
        """Return when the calls of the last pass began, in any unit, and 0 for calls that were not made; reset both."""
        began: list[float] = self.began.asnumpy()[:, 0].tolist()
        for parameter in (self.began, self.calls):
            parameter.set_data(Tensor(np.zeros(parameter.shape, np.float32)))
        return began

    def read(self, measured: Mapping[str, Sequence[Sequence[float]]], number: int, index: int, parent: int) -> Call:
        """Return the measurements of one call of the wrapped cell in the last pass, by the number of the call."""
        call = Call(index, self.layer_name, type(self.layer).__name__, parent=parent)
        for sinks, of_output in ((self.sinks_in, False), (self.sinks_out, True)):
            for sink in sinks:
                values = dict(zip(_MEASURED, measured[sink.name][number], strict=True))
                if not values["calls"]:
                    continue
                reading, gradient = _readings(values)
                call.gradients.append(Gradient(of_output, len(call.outputs if of_output else call.inputs), gradient))
                if of_output:
                    call.outputs.append(reading)
                else:
                    call.inputs.append(Operand(reading))
        call.inputs += _own_weights(self.layer)
        return call


def _own_weights(cell: Any) -> list[Operand]:
    """Return the Parameters of a cell that belong to no cell inside it."""
    weights = (weight for weight in cell._params.values() if weight is not None and weight.is_floating_point())
    return [Operand(read_tensor(weight), None, weight.name) for weight in weights]


def _sinks(name: str, number: int) -> Any:
    zeros = np.zeros((_MOST_CALLS, len(_MEASURED)), np.float32)
    return ParameterTuple([Parameter(Tensor(zeros), name=f"sink_of_{name}{index}") for index in range(number)])


def _readings(values: Mapping[str, float]) -> tuple[Reading, Reading]:
    calls, bad, of_bad = values["calls"], int(values["bad"]), values["of_bad"]
    dtype, size = str(_DTYPES[round(values["dtype"] / calls)]).lower(), int(values["size"] / calls)
    nans, positive = (bad if is_so else 0 for is_so in (np.isnan(of_bad), of_bad == np.inf))
    gradient = Reading(dtype, size, values["gradient_largest"] / calls, int(values["gradient_bad"]))
    return Reading(dtype, size, values["largest"] / calls, bad, nans, positive), gradient


class _Measure(nn.Cell):
    """Returns its first input unchanged, and measures this input and its gradient in the backward pass.

    The second input is a sink: the backward pass returns the measurements in place of the gradient of the sink, in the
    row of this call.
    """

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        # MindSpore compiles graphs many times faster from these Primitives than from functions.
        self.abs, self.cast, self.zeros_like = ops.Abs(), ops.Cast(), ops.ZerosLike()
        self.is_finite, self.logical_not, self.select = ops.IsFinite(), ops.LogicalNot(), ops.Select()
        self.reduce_max, self.reduce_sum, self.subtract = ops.ReduceMax(), ops.ReduceSum(), ops.Sub()
        self.stack, self.concat, self.reshape = ops.Stack(), ops.Concat(), ops.Reshape()
        self.broadcast = ops.BroadcastTo((_MOST_CALLS, len(_MEASURED)))
        self.one, self.passed, self.count = Tensor(1.0, mstype.float32), ops.StopGradient(), SumExt()

    def construct(self, value: Any, sink: Any, is_this_call: Any) -> Any:
        # Without this operator, MindSpore would take the output for the input. Then the first of
        # several layers that use a value would get the sum of the gradients of all these layers.
        return self.passed(value)

    def bprop(self, value: Any, sink: Any, is_this_call: Any, out: Any, dout: Any) -> Any:
        dtype = 0.0 if value.dtype == mstype.float16 else 1.0 if value.dtype == mstype.bfloat16 else 2.0
        size, dtype = self.cast(float(value.size), mstype.float32), self.cast(dtype, mstype.float32)
        # Measure the value and its gradient together, because MindSpore compiles half as many operators faster.
        both = self.stack((self.cast(value, mstype.float32), self.cast(dout, mstype.float32)))
        both = self.reshape(both, (2, 1)) if value.ndim == 0 else both
        axes = tuple(range(1, both.ndim))
        is_finite = self.is_finite(both)
        finite = self.select(is_finite, both, self.zeros_like(both))
        largest = self.reduce_max(self.abs(finite), axes)
        bad = self.count(self.logical_not(is_finite), axes, False, mstype.float32)
        # The sum of the elements that are inf or NaN shows their kind: inf, -inf, or NaN, also for a mixture of kinds.
        sum_of_bad = self.reduce_sum(self.subtract(both, finite), axes)
        measured = self.concat((largest, bad, sum_of_bad, self.stack((size, dtype, self.one))))
        # Select the row instead of multiplying by 0, which makes NaN of inf.
        row = self.select(is_this_call, self.broadcast(measured), self.zeros_like(sink))
        return dout, row, self.zeros_like(is_this_call)
