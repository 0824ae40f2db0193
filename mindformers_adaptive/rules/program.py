"""What a step computes, as a short list of operations: equal ones once, unused and foldable ones left out.

Rules whose steps do the same with other numbers share a program: its constants have one value, or one for each rule, in
their last axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.rules.operations import fold
from mindformers_adaptive.rules.values import Value

__all__ = ["Node", "Program", "make_program", "shape_of_trace", "used_by"]

_COMMUTATIVE = frozenset({"add", "mul", "and", "or", "equal"})


class Node(NamedTuple):
    """An operation of a program.

    Attributes:
        op (str): as of :class:`~mindformers_adaptive.rules.values.Value`.
        args (tuple[int, ...]): the places of the nodes that it takes.
        dtype (str): "bool", "int32" or "float32".
        shape (tuple[int, ...]): () or (n,), without the lanes.
        extra (Any): as there; of a constant its bytes and shape.
    """

    op: str
    args: tuple[int, ...]
    dtype: str
    shape: tuple[int, ...]
    extra: Any = None


class Program(NamedTuple):
    """A step as a list of operations.

    Attributes:
        nodes (list[Node]): each after what it takes.
        constants (dict[int, NDArray]): by the place of the node; the last axis is 1 or the number of rules.
        outputs (dict[str, int]): the places of the results, by name.
        used (list[int]): the places of the nodes that the results need, in order.
    """

    nodes: list[Node]
    constants: dict[int, NDArray[Any]]
    outputs: dict[str, int]
    used: list[int]


def shape_of_trace(outputs: Mapping[str, Value]) -> tuple[Any, ...]:
    """Return what has to be equal for rules to share a program: all but the numbers, and the sizes of tables."""
    values = next(iter(outputs.values())).trace.values
    kept = [
        (value.op, tuple(arg.place for arg in value.args), value.dtype, value.shape)
        + ((value.extra,) if value.op in ("input", "element") else ())
        for value in values
    ]
    return (*kept, *((name, value.place) for name, value in outputs.items()))


def make_program(each: Sequence[Mapping[str, Value]], fixed: Mapping[str, int] | None = None) -> Program:
    """Return the program of rules whose traces have the same shape.

    Args:
        each (Sequence[Mapping[str, Value]]): for each rule, the results of its step by name.
        fixed (Mapping[str, int], optional): inputs that are a number, which are no results either. Default: None.
    """
    builder = _Builder()
    traces = [next(iter(outputs.values())).trace.values for outputs in each]
    fixed = fixed or {}
    wanted = {name: value for name, value in each[0].items() if name not in fixed}
    needed = _reachable(list(wanted.values()))
    places: dict[int, int] = {}
    for value in traces[0]:
        if value.place not in needed:
            continue
        args = tuple(places[arg.place] for arg in value.args)
        if value.op == "constant":
            place = builder.constant(_merged(np.array([trace[value.place].extra for trace in traces])), value.dtype)
        elif value.op == "lookup":
            place = builder.lookup(value, args, [trace[value.place].extra for trace in traces])
        elif value.op == "input" and value.extra in fixed:
            place = builder.constant(np.array([fixed[value.extra]], value.dtype), value.dtype)
        else:
            place = builder.add(Node(value.op, args, value.dtype, value.shape, value.extra))
        places[value.place] = place
    outputs = {name: places[value.place] for name, value in wanted.items()}
    return Program(builder.nodes, builder.constants, outputs, used_by(builder.nodes, outputs.values()))


def used_by(nodes: Sequence[Node], roots: Any) -> list[int]:
    """Return the places of the nodes that some need, in order."""
    found, waiting = set(), list(roots)
    while waiting:
        place = waiting.pop()
        if place not in found:
            found.add(place)
            waiting += nodes[place].args
    return sorted(found)


def _reachable(roots: list[Value]) -> set[int]:
    found, waiting = set(), list(roots)
    while waiting:
        value = waiting.pop()
        if value.place not in found:
            found.add(value.place)
            waiting += value.args
    return found


def _merged(each: NDArray[Any]) -> NDArray[Any]:
    """Return constants of rules, which are the first axis, with the last one for them, of length 1 where all agree."""
    # By their bits, because -0.0 is equal to 0.0.
    bits = each.view(np.uint8).reshape(len(each), -1) if each.ndim > 1 else each.reshape(-1, 1).view(np.uint8)
    kept = each[:1] if (bits == bits[0]).all() else each
    return np.ascontiguousarray(np.moveaxis(kept, 0, -1))


class _Builder:
    """Makes nodes, each once, and simpler ones where that changes no bit."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.constants: dict[int, NDArray[Any]] = {}
        self._places: dict[Node, int] = {}

    def constant(self, array: NDArray[Any], dtype: str) -> int:
        place = self._place(Node("constant", (), dtype, array.shape[:-1], (array.tobytes(), array.shape)))
        self.constants[place] = array
        return place

    def lookup(self, value: Value, args: tuple[int, ...], extras: list[Any]) -> int:
        """Lay the tables of the rules end to end, each once, and look up a row by its number."""
        each = {id(table): table for table, _ in extras}
        tables = [table.reshape(-1, table.shape[-1]) for table in each.values()]
        if len({table.tobytes() for table in tables}) == 1:
            tables, offsets = tables[:1], [0] * len(extras)
        else:
            starts = dict(zip(each, np.cumsum([0, *map(len, tables)]).tolist(), strict=False))
            offsets = [starts[id(table)] for table, _ in extras]
        sizes = np.array([table.shape[:-1] for table, _ in extras], np.int64)
        strides = np.concatenate([np.cumprod(sizes[:, :0:-1], axis=1)[:, ::-1], np.ones((len(extras), 1), np.int64)], 1)
        lowest = np.array([low for _, low in extras], np.int32)
        bounds = (lowest, lowest + sizes - 1, strides, offsets - (lowest * strides).sum(1))
        given = [_merged(bound.astype(np.int32)) for bound in bounds]
        rows = np.concatenate(tables)
        extra = (rows.tobytes(), rows.shape, tuple(int(size) for size in sizes[0]))
        extra_places = tuple(self.constant(array, "int32") for array in (rows[..., np.newaxis], *given))
        packed = self._stack(args, "int32")
        return self.add(Node("lookup", (packed, *extra_places), "int32", value.shape, extra))

    def add(self, node: Node) -> int:
        if node.op in _COMMUTATIVE:
            node = node._replace(args=tuple(sorted(node.args)))
        simpler = self._simplified(node)
        if isinstance(simpler, int):
            return simpler
        arrays = [self.constants[arg] for arg in simpler.args if arg in self.constants]
        if arrays and len(arrays) == len(simpler.args):
            folded = fold(simpler.op, simpler.extra, arrays)
            if folded is not None:
                return self.constant(folded, simpler.dtype)
        return self._place(simpler)

    def _place(self, node: Node) -> int:
        if node not in self._places:
            self._places[node] = len(self.nodes)
            self.nodes.append(node)
        return self._places[node]

    def _is(self, place: int, number: float) -> bool:
        array = self.constants.get(place)
        return array is not None and bool(np.all(array == number))

    def _simplified(self, node: Node) -> Node | int:
        rule: Callable[[Node], Node | int | None] | None = getattr(self, f"_simplify_{node.op}", None)
        found = None if rule is None else rule(node)
        return node if found is None else found

    def _simplify_where(self, node: Node) -> int | None:
        condition, x, y = node.args
        if x == y:
            return x if self.nodes[x].shape == node.shape else None
        if node.dtype == "bool" and (x == condition or self._is(x, True)):
            return self.add(Node("or", (condition, y), node.dtype, node.shape))
        known = self.constants.get(condition)
        if known is not None and (known.all() or not known.any()):
            picked = x if known.all() else y
            return picked if self.nodes[picked].shape == node.shape else None
        return None

    def _simplify_mul(self, node: Node) -> Node | int | None:
        """Products of integers wrap around, so constants may be multiplied first, and 1 left out."""
        for one, other in (node.args, node.args[::-1]):
            if self._is(other, 1) and self.nodes[one].shape == node.shape:
                return one
            inner = self.nodes[one]
            known = [arg for arg in inner.args if arg in self.constants] if inner.op == "mul" else []
            if node.dtype == "int32" and other in self.constants and known and inner.shape == node.shape:
                [rest] = [arg for arg in inner.args if arg != known[0]]
                number = self.constant(self.constants[known[0]] * self.constants[other], "int32")
                return self.add(Node("mul", (rest, number), node.dtype, node.shape))
        return None

    def _simplify_div(self, node: Node) -> int | None:
        x, y = node.args
        return x if self._is(y, 1) and self.nodes[x].shape == node.shape else None

    def _simplify_add(self, node: Node) -> Node | int | None:
        """Sums of integers wrap around, so constants may be added first, and 0 left out."""
        x, y = node.args if node.args[1] in self.constants else node.args[::-1]
        if node.dtype != "int32" or y not in self.constants or x in self.constants:
            return None
        number, inner = self.constants[y], self.nodes[x]
        for place, other in (inner.args, inner.args[::-1]) if inner.op == "add" else ():
            if other in self.constants and self.nodes[place].shape == inner.shape == node.shape:
                x, number = place, self.constants[other] + number
        if not number.any() and self.nodes[x].shape == node.shape:
            return x
        return Node("add", tuple(sorted((x, self.constant(number, "int32")))), node.dtype, node.shape)

    def _simplify_sub(self, node: Node) -> Node | int | None:
        x, y = node.args
        if node.dtype != "int32" or y not in self.constants or x in self.constants:
            return None
        negative = self.constant(-self.constants[y], "int32")
        return self.add(Node("add", (x, negative), node.dtype, node.shape))

    def _simplify_and(self, node: Node) -> int | None:
        for one, other in (node.args, node.args[::-1]):
            if self._is(other, True) and self.nodes[one].shape == node.shape:
                return one
            if self._is(other, False) and self.nodes[other].shape == node.shape:
                return other
        return None

    def _simplify_not(self, node: Node) -> int | None:
        inner = self.nodes[node.args[0]]
        return inner.args[0] if inner.op == "not" else None

    def _simplify_element(self, node: Node) -> int | None:
        vector = self.nodes[node.args[0]]
        return vector.args[node.extra] if vector.op == "stack" else None

    def _simplify_stack(self, node: Node) -> int:
        return self._stack(node.args, node.dtype)

    def _stack(self, args: tuple[int, ...], dtype: str) -> int:
        """Put numbers into a vector: the one that they come from, or one ``where`` of vectors for many of numbers."""
        nodes = [self.nodes[arg] for arg in args]
        vector = nodes[0].args[0] if nodes[0].op == "element" else None
        parts = [(node.op, node.args, node.extra) for node in nodes]
        whole = [("element", (vector,), place) for place in range(len(args))]
        if vector is not None and self.nodes[vector].shape == (len(args),) and parts == whole:
            return vector
        if all(node.op == "where" and node.args[0] == nodes[0].args[0] for node in nodes):
            x, y = (self._stack(tuple(node.args[side] for node in nodes), dtype) for side in (1, 2))
            return self.add(Node("where", (nodes[0].args[0], x, y), dtype, (len(args),)))
        if all(arg in self.constants for arg in args):
            lanes = max(self.constants[arg].shape[-1] for arg in args)
            rows = [np.broadcast_to(self.constants[arg], (lanes,)) for arg in args]
            return self.constant(np.stack(rows), dtype)
        return self._place(Node("stack", args, dtype, (len(args),)))
