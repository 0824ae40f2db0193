"""The step of rules as one straight NumPy function, for one run or for thousands side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.rules import operations
from mindformers_adaptive.rules.checks import SMALLEST_FLOAT32
from mindformers_adaptive.rules.generated import make_function
from mindformers_adaptive.rules.program import Node, Program, used_by

__all__ = ["NumpyStep", "lower_to_numpy"]

# From so many operations on, what only some lanes need is computed for these only.
_SMALLEST_BRANCH = 4

_MAKES_SUBNORMALS = frozenset({"add", "sub", "mul", "div"})


class NumpyStep(NamedTuple):
    """A generated function.

    Attributes:
        function (Callable): takes the number of lanes, and arrays with the lanes as their last axis; returns a tuple of
            such arrays.
        inputs (tuple[str, ...]): the names of what it takes, in order.
        outputs (tuple[str, ...]): the names of what it returns, in order.
    """

    function: Callable[..., tuple[NDArray[Any], ...]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def lower_to_numpy(rule: str, program: Program, is_watched: bool = False) -> NumpyStep:
    """Generate the function of a program.

    Where results are picked by one flag, what only one side of it needs is computed for the lanes that take it.

    Args:
        rule (str): the name of the rule, for that of the file.
        program (Program): the step.
        is_watched (bool): whether each number nearer to 0 than 2^-126 raises NumPy's underflow, also one that lost no
            bits. Default: False.
    """
    lines = _Lines(program, _watched(program) if is_watched else set())
    flag, inner = _branch(program)
    inside = set(inner)
    for place in program.used:
        if place not in inside and not (flag is not None and _is_picked(program, place, flag)):
            lines.compute(place, "v")
    lines.watch()
    results = {name: f"v{place}" for name, place in program.outputs.items()}
    nodes = program.nodes
    # Each result is an array of its own with all lanes, which may be changed in place.
    inputs = tuple(sorted({nodes[place].extra for place in program.used if nodes[place].op == "input"}))
    varying, returned = _varying(program), set()
    for name, place in program.outputs.items():
        if not _is_own(nodes[place], name) or place in returned or place not in varying:
            results[name] = f"own(v{place}, lanes)"
        returned.add(place)
    if flag is not None:
        picked = {name: place for name, place in program.outputs.items() if _is_picked(program, place, flag)}
        for name, place in picked.items():
            otherwise = nodes[place].args[2]
            # Lanes make since_event anew for each step, and clean_steps are what it is for.
            is_made = name == "clean_steps" and nodes[otherwise].extra == "since_event" and otherwise not in returned
            is_own = nodes[otherwise].op == "input" and (nodes[otherwise].extra == name or is_made)
            results[name] = f"v{otherwise}" if is_own else f"own(v{otherwise}, lanes)"
        for name, result in results.items():
            lines.add(f"r_{name} = {result}")
            results[name] = f"r_{name}"
        lines.add(f"places = v{flag}.nonzero()[0]")
        lines.add("if len(places):")
        taken = [nodes[place].args[1] for place in picked.values()]
        crossing = {arg for place in inner for arg in nodes[place].args if arg not in inside}
        for place in sorted(crossing | {place for place in taken if place not in inside}):
            is_one = place in program.constants and program.constants[place].shape[-1] == 1
            # Of a vector, take() is faster than an index.
            in_places = ".take(places, axis=-1)" if nodes[place].shape else "[places]"
            lines.add(f"    w{place} = v{place}" + ("" if is_one else in_places))
        for place in inner:
            lines.compute(place, "w", indent="    ")
        lines.watch(indent="    ")
        for name, place in picked.items():
            lines.add(f"    r_{name}[{':, ' * len(nodes[place].shape)}places] = w{nodes[place].args[1]}")
    arguments = ", ".join(["lanes", *(f"in_{name}" for name in inputs)])
    source = "\n".join([f"def step({arguments}):", *lines.text, f"    return ({', '.join(results.values())},)", ""])
    names = {**vars(operations), "own": _own}
    names |= {f"v{place}": array for place, array in program.constants.items()}
    return NumpyStep(make_function(rule, source, names), inputs, tuple(results))


class _Lines:
    def __init__(self, program: Program, watched: set[int]) -> None:
        self._program, self._watched = program, watched
        self._seen: list[str] = []
        self.text: list[str] = []

    def add(self, line: str) -> None:
        self.text.append(f"    {line}")

    def compute(self, place: int, prefix: str, indent: str = "") -> None:
        node = self._program.nodes[place]
        if node.op == "constant":
            return
        if node.op == "input":
            self.add(f"{indent}v{place} = in_{node.extra}")
            return
        args = [f"{prefix}{arg}" for arg in node.args]
        first = self._program.nodes[node.args[0]].dtype
        operation = operations.operation_of(node.op, first, [self._program.constants.get(arg) for arg in node.args])
        self.add(f"{indent}{prefix}{place} = " + operation.numpy.format(*args, all=", ".join(args), extra=node.extra))
        if place in self._watched:
            self._seen.append(f"{prefix}{place}")

    def watch(self, indent: str = "") -> None:
        """Look at what was computed since the last call."""
        if self._seen:
            self.add(f"{indent}notice_subnormal({', '.join(self._seen)})")
        self._seen = []


def _watched(program: Program) -> set[int]:
    """Return the places of what may be nearer to 0 than 2^-126, and is not only compared with a larger number."""
    watched = {*program.outputs.values()}
    for place in program.used:
        node = program.nodes[place]
        bound = next((program.constants[arg] for arg in node.args if arg in program.constants), None)
        if node.op != "maximum" or bound is None or not (bound >= SMALLEST_FLOAT32).all():
            watched.update(node.args)
    nodes = program.nodes
    return {place for place in watched if nodes[place].op in _MAKES_SUBNORMALS and nodes[place].dtype == "float32"}


def _is_picked(program: Program, place: int, flag: int) -> bool:
    """Whether a result is picked by a flag, and nothing else needs it."""
    node = program.nodes[place]
    if node.op != "where" or node.args[0] != flag or program.nodes[flag].shape or place not in program.outputs.values():
        return False
    return not any(place in program.nodes[other].args for other in program.used)


def _branch(program: Program) -> tuple[int | None, list[int]]:
    """Return the flag by which most of the work can be left out, and the operations that only its first side needs."""
    best: tuple[int | None, list[int]] = None, []
    roots = list(program.outputs.values())
    for flag in {program.nodes[root].args[0] for root in roots if program.nodes[root].op == "where"}:
        picked = [root for root in roots if _is_picked(program, root, flag)]
        others = [root for root in roots if root not in picked]
        outside = {*used_by(program.nodes, [flag, *others, *(program.nodes[root].args[2] for root in picked)]), *picked}
        inner = [place for place in program.used if place not in outside and place not in program.constants]
        inner = [place for place in inner if program.nodes[place].op != "input"]
        if len(inner) >= max(_SMALLEST_BRANCH, len(best[1]) + 1):
            best = flag, inner
    return best


def _is_own(node: Node, name: str) -> bool:
    """Whether what an operation gives is no array of another result, of a constant or of another input."""
    # Lanes make since_event anew for each step.
    return node.extra in (name, "since_event") if node.op == "input" else node.op not in ("constant", "element")


def _varying(program: Program) -> set[int]:
    """Return the places of what inputs take part in, which has all lanes."""
    found: set[int] = set()
    for place in program.used:
        node = program.nodes[place]
        if node.op == "input" or not found.isdisjoint(node.args):
            found.add(place)
    return found


def _own(array: NDArray[Any], lanes: int) -> NDArray[Any]:
    """Return a copy of an array with so many lanes."""
    return array.copy() if array.shape[-1] == lanes else np.array(np.broadcast_to(array, (*array.shape[:-1], lanes)))
