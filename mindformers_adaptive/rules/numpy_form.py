"""Generate one branch-free NumPy function from the steps of loss-scaling rules, for many runs side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.rules import operations
from mindformers_adaptive.rules.checks import SMALLEST_FLOAT32
from mindformers_adaptive.rules.emit import changed_by, emit, needed_by
from mindformers_adaptive.rules.generated import make_function
from mindformers_adaptive.rules.tracing import TracedStep
from mindformers_adaptive.rules.values import Value

__all__ = ["NumpyStep", "lower_to_numpy"]

_MAKES_SUBNORMALS = frozenset({"add", "sub", "mul", "div"})


class NumpyStep(NamedTuple):
    """A NumPy function generated from the steps of loss-scaling rules.

    Attributes:
        function (Callable): takes the number of lanes, and arrays with the lanes as their last axis; returns a tuple of
            such arrays, some of which may be arrays that it took.
        inputs (tuple[str, ...]): the names of the arrays that ``function`` takes, in order.
        outputs (tuple[str, ...]): the names of the arrays that ``function`` returns, in order; values that the step
            does not change are left out.
    """

    function: Callable[..., tuple[NDArray[Any], ...]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def lower_to_numpy(rule: str, steps: Sequence[TracedStep], is_watched: bool = False) -> NumpyStep:
    """Generate one NumPy function for the steps of several loss-scaling rules that differ only in constants.

    Args:
        rule (str): the name of the rule, which becomes part of the generated file's name.
        steps (Sequence[TracedStep]): the step of each lane, or one step for all lanes.
        is_watched (bool): whether each subnormal number (below 2^-126) signals an underflow in NumPy, even if the
            number is exact. Default: False.
    """
    outputs = changed_by(steps[0].outputs)
    traces = [step.trace.values for step in steps]
    names = dict(vars(operations))
    variables: dict[tuple[Any, ...], str] = {}

    def expression_of(value: Value, arguments: Sequence[str]) -> str:
        values = [trace[value.position] for trace in traces]
        if value.op == "constant":
            array = operations.merged(np.array([value.extra for value in values]))
            variable = variables.setdefault((array.dtype, array.shape, array.tobytes()), f"c{value.position}")
            names[variable] = array
            return variable
        table = f"table{value.position}"
        if value.op == "lookup":
            names[table] = operations.Table([value.extra for value in values])
        text = operations.operation_of(values).numpy
        return text.format(*arguments, all=", ".join(arguments), extra=value.extra, table=table)

    emitted = emit(outputs.values(), expression_of)
    lines = list(emitted.lines)
    if is_watched and (watched := {emitted.names[value.position]: None for value in _watched(outputs.values())}):
        lines.append(f"notice_subnormal({', '.join(watched)})")
    results = [_result(value, emitted.names[value.position]) for value in outputs.values()]
    arguments = ["lanes", *(f"in_{name}" for name in emitted.inputs)]
    return NumpyStep(make_function(rule, arguments, lines, results, names), emitted.inputs, tuple(outputs))


def _result(value: Value, variable: str) -> str:
    """Return a Python expression for a result of a step: an array with an element for each lane (simulated run).

    The expression repeats a result that depends on no input, because such a result is the same in all lanes.
    """
    has_inputs = any(taken.op == "input" for taken in needed_by([value]))
    return variable if has_inputs else f"in_all_lanes({variable}, lanes)"


def _watched(results: Iterable[Value]) -> list[Value]:
    """Return the values in a rule's step that may be subnormal numbers.

    A value is left out if the step uses it only in maximum() with a normal constant, which replaces subnormal numbers.
    """
    results = list(results)
    taken = {value.position for value in results}
    for value in needed_by(results):
        bounds = [argument.extra for argument in value.args if argument.op == "constant"]
        if value.op != "maximum" or not bounds or not (bounds[0] >= SMALLEST_FLOAT32).all():
            taken.update(argument.position for argument in value.args)
    return [value for value in needed_by(results) if value.position in taken and _may_be_subnormal(value)]


def _may_be_subnormal(value: Value) -> bool:
    if value.dtype != "float32":
        return False
    if value.op == "constant":
        return bool(((value.extra != 0) & (np.abs(value.extra) < SMALLEST_FLOAT32)).any())
    return value.op in _MAKES_SUBNORMALS
