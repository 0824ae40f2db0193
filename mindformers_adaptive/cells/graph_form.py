"""Generates the step of a loss-scaling rule as one function without branches, which MindSpore compiles."""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from mindspore import Tensor, ops
from mindspore import dtype as mstype

from mindformers_adaptive.rules.emit import changed_by, emit, needed_by
from mindformers_adaptive.rules.generated import make_function
from mindformers_adaptive.rules.operations import CONSTANTS, operation_of
from mindformers_adaptive.rules.rule import Rule
from mindformers_adaptive.rules.tracing import trace_for_cell
from mindformers_adaptive.rules.values import Value

__all__ = ["GraphStep"]

_numbers = itertools.count()

# Operations that MindSpore's compiler may replace by one of their arguments, as it may replace x * 1 by x.
_MAY_HAND_ON = frozenset(
    {"add", "sub", "mul", "div", "floordiv", "neg", "abs", "minimum", "maximum", "where", "stack", "element"}
)


class GraphStep:
    """Generates the function that computes the step of a loss-scaling rule from Parameters and Tensors.

    Args:
        rule (Rule): the rule.

    Attributes:
        function (function): takes Parameters and Tensors, and returns a tuple of Tensors. No result is another
            Parameter itself: MindSpore would read that Parameter only at the assignment, when it may have changed.
        inputs (tuple[str, ...]): the names of the function's arguments, in order.
        outputs (tuple[str, ...]): the names of its results, in order, without values that the step does not change.
    """

    def __init__(self, rule: Rule) -> None:
        outputs = changed_by(trace_for_cell(rule).outputs)
        self._names: dict[str, Any] = {name: Tensor(number) for name, number in CONSTANTS.items()}
        self._names |= {"ops": ops, "mstype": mstype, "reduce_sum": ops.ReduceSum()}
        self._names |= {"argmin": ops.Argmin(axis=0, output_type=mstype.int32), "move": ops.Primitive("TensorMove")}
        self._constants: dict[tuple[Any, ...], str] = {}
        emitted = emit(outputs.values(), self._expression_of)
        handed_on = _handed_on(outputs.values())
        # The input clean_steps is not a Parameter: the update cell computes it before the step of the rule. So a result
        # equal to clean_steps needs no copy.
        computed = ("clean_steps",) if rule.counts_clean_steps else ()
        results = []
        for name, value in outputs.items():
            result, inputs = emitted.names[value.position], handed_on[value.position]
            if len(inputs) == 1 and inputs.isdisjoint((name, *computed)):
                # Before MindSpore 2.8, copy() converts integers to float32 and back, so copy integers by TensorMove.
                result = f"move({result})" if value.dtype == "int32" else f"{result}.copy()"
            results.append(result)
        self.inputs, self.outputs = emitted.inputs, tuple(outputs)
        # MindSpore looks up a function's global names in the module that its __module__ names, so make such a module.
        module = types.ModuleType(f"mindformers_adaptive_step_{next(_numbers)}")
        vars(module).update(self._names)
        arguments = [f"in_{name}" for name in self.inputs]
        self.function = make_function(rule.name, arguments, emitted.lines, results, vars(module))
        sys.modules[module.__name__] = module

    def _expression_of(self, value: Value, arguments: Sequence[str]) -> str:
        if value.op == "constant":
            return self._constant(value.extra)
        operation = operation_of([value])
        constants = {name: self._constant(make(value)) for name, make in operation.constants.items()}
        return operation.mindspore.format(*arguments, all=", ".join(arguments), extra=value.extra, **constants)

    def _constant(self, numbers: Any) -> str:
        array = np.array(numbers)
        key = (array.dtype, array.shape, array.tobytes())
        name = self._constants.setdefault(key, f"c{len(self._constants)}")
        self._names[name] = Tensor(array)
        return name


def _handed_on(results: Iterable[Value]) -> dict[int, set[str]]:
    """Return for the position of each traced value the step inputs by which the compiler may replace the value."""
    handed_on: dict[int, set[str]] = {}
    for value in needed_by(results):
        taken = (value.args[1:] if value.op == "where" else value.args) if value.op in _MAY_HAND_ON else ()
        handed_on[value.position] = {value.extra} if value.op == "input" else set()
        handed_on[value.position].update(*(handed_on[argument.position] for argument in taken))
    return handed_on
