"""Generate the source lines of a function for a rule's step: one assignment for each value that the results need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from mindformers_adaptive.rules.values import Value

__all__ = ["Emitted", "emit", "needed_by"]


class Emitted(NamedTuple):
    """The source lines of a generated function's body, and the variables in these lines.

    Attributes:
        lines (list[str]): the assignments, in order.
        names (dict[int, str]): the variable of each value, by ``position`` of the value.
        inputs (tuple[str, ...]): the names of the inputs; the variable of an input begins with ``in_``.
    """

    lines: list[str]
    names: dict[int, str]
    inputs: tuple[str, ...]


def emit(results: Iterable[Value], expression_of: Callable[[Value, Sequence[str]], str]) -> Emitted:
    """Return source lines that compute the results of a rule's step. Equal expressions share one assignment.

    Args:
        results (Iterable[Value]): the values that the generated function returns.
        expression_of (Callable): takes a value and the variables of its arguments, and returns the expression that
            computes the value; for a constant, the name of a variable.
    """
    names: dict[int, str] = {}
    variables: dict[str, str] = {}
    needed = needed_by(results)
    for value in needed:
        arguments = [names[argument.position] for argument in value.args]
        expression = f"in_{value.extra}" if value.op == "input" else expression_of(value, arguments)
        is_variable = expression.isidentifier()
        names[value.position] = expression if is_variable else variables.setdefault(expression, f"v{value.position}")
    lines = [f"{variable} = {expression}" for expression, variable in variables.items()]
    return Emitted(lines, names, tuple(sorted({value.extra for value in needed if value.op == "input"})))


def needed_by(results: Iterable[Value]) -> list[Value]:
    """Return the results of a rule's step and all values that these results are computed from.

    A value comes after the values that it is computed from.
    """
    needed: dict[int, Value] = {}
    waiting = list(results)
    while waiting:
        value = waiting.pop()
        if value.position not in needed:
            needed[value.position] = value
            waiting += value.args
    return [needed[index] for index in sorted(needed)]


def changed_by(outputs: Mapping[str, Value]) -> dict[str, Value]:
    """Return the outputs of a rule's step, except each output that is just the input of the same name."""
    return {name: value for name, value in outputs.items() if value.op != "input" or value.extra != name}
