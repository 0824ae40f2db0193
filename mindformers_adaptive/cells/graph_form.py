"""The step of a rule as one straight function that MindSpore compiles."""

from __future__ import annotations

import collections
import itertools
import sys
import types
from collections.abc import Iterable
from typing import Any

import numpy as np
from mindspore import Tensor, ops
from mindspore import dtype as mstype

from mindformers_adaptive.rules import operations
from mindformers_adaptive.rules.checks import LARGEST_FLOAT32, SMALLEST_FLOAT32
from mindformers_adaptive.rules.generated import make_function
from mindformers_adaptive.rules.program import Node, make_program
from mindformers_adaptive.rules.rule import Rule

__all__ = ["GraphStep"]

_numbers = itertools.count()


class GraphStep:
    """The generated function of a rule.

    Args:
        rule (Rule): the rule.

    Attributes:
        function (function): takes Parameters and Tensors, and returns a tuple of Tensors. What it returns was computed
            before: a Parameter handed on as it is would be read when it is assigned to another one.
        inputs (tuple[str, ...]): the names of what it takes, in order.
        outputs (tuple[str, ...]): the names of what it returns, in order; what stays as it is is not among them.
    """

    def __init__(self, rule: Rule) -> None:
        program = make_program([rule.traced.outputs], rule.fixed_state)
        self._program, self._names, nodes = program, _names(), program.nodes
        self._lines: list[str] = []
        self._copies = {place for name, place in program.outputs.items() if nodes[place].op == "input"}
        changed = {name: place for name, place in program.outputs.items() if nodes[place].extra != name}
        together = self._picked_together(changed.values())
        elements = {nodes[place].args[1] for place in together}
        for place in program.used:
            if place not in together and place not in elements:
                self._compute(place)
        if together:
            self._pick_together(together)
        self.inputs = tuple(sorted({nodes[place].extra for place in program.used if nodes[place].op == "input"}))
        self.outputs = tuple(changed)
        results = "".join(f"v{place}{'_copy' if place in self._copies else ''}, " for place in changed.values())
        head = f"def step({', '.join(f'in_{name}' for name in self.inputs)}):"
        source = "\n".join([head, *self._lines, f"    return ({results})", ""])
        # MindSpore looks names up in the module that a function says it is from.
        module = types.ModuleType(f"mindformers_adaptive_step_{next(_numbers)}")
        vars(module).update(self._names)
        self.function = make_function(rule.name, source, vars(module))
        sys.modules[module.__name__] = module

    def _picked_together(self, results: Iterable[int]) -> list[int]:
        """Return the results that are each an element of a vector or something else, as one flag says for all."""
        nodes, groups = self._program.nodes, collections.defaultdict(list)
        for place in results:
            if nodes[place].op == "where" and nodes[nodes[place].args[1]].op == "element":
                flag, element, _ = nodes[place].args
                groups[flag, nodes[element].args[0]].append(place)
        for (_, vector), places in groups.items():
            elements = [nodes[place].args[1] for place in places]
            # What the pick itself takes, and what all else does: none of it may be picked.
            others = {arg for place in places for arg in (nodes[place].args[0], nodes[place].args[2])}
            others |= {arg for place in self._program.used if place not in places for arg in nodes[place].args}
            is_whole = [nodes[element].extra for element in elements] == list(range(*nodes[vector].shape))
            if is_whole and others.isdisjoint([*elements, *places]):
                return places
        return []

    def _pick_together(self, places: list[int]) -> None:
        """Pick between two vectors, which takes fewer kernels than to pick between their elements."""
        nodes = self._program.nodes
        flag, vector = nodes[places[0]].args[0], nodes[nodes[places[0]].args[1]].args[0]
        others = "".join(f"v{nodes[place].args[2]}, " for place in places)
        self._add(f"picked = ops.unstack(ops.select(v{flag}, v{vector}, ops.stack(({others}))))")
        for element, place in enumerate(places):
            self._add(f"v{place} = picked[{element}]")

    def _add(self, line: str) -> None:
        self._lines.append(f"    {line}")

    def _compute(self, place: int) -> None:
        node, constants = self._program.nodes[place], self._program.constants
        if node.op == "input":
            self._add(f"v{place} = in_{node.extra}")
            if place in self._copies:
                # Before MindSpore 2.8 copy() takes integers through float32.
                copied = "move(v{0})" if node.dtype == "int32" else "v{0}.copy()"
                self._add(f"v{place}_copy = {copied.format(place)}")
            return
        if node.op == "constant":
            self._names[f"v{place}"] = Tensor(np.array(constants[place][..., 0]))
            return
        args = [f"v{arg}" for arg in node.args]
        known: list[Any] = [constants.get(arg) for arg in node.args]
        extra = {"all": ", ".join(args), "extra": node.extra}
        if node.op == "element" and f"{args[0]}_parts" not in self._names:
            self._add(f"{args[0]}_parts = ops.unstack({args[0]})")
            self._names[f"{args[0]}_parts"] = None
        if node.op == "take":
            extra["last"] = self._constant(f"last{place}", np.int32(self._program.nodes[node.args[0]].shape[0] - 1))
        if node.op == "lookup":
            table, lowest = known[1][..., 0], known[2][..., 0]
            extra["table"] = self._constant(f"table{place}", table.reshape(*node.extra[2], table.shape[-1]))
            extra["minus_lowest"] = f" - {args[2]}" if lowest.any() else ""
        if node.op in ("exponent", "power"):
            lowest, highest = (int(known[n][0]) for n in (1, 2))
            self._constant("powers", [2.0**n for n in range(lowest, highest + 1)], np.float32)
            self._constant("below_lowest", np.int32(lowest - 1))
        if node.op == "max_safe_exponent":
            # A gradient that is at most so many of these shows that exponent: inf and NaN none, 0 all of them.
            largest = float(known[2][0])
            exponents = operations.possible_exponents(largest)
            fits_at = [min(largest * 2.0**-n, LARGEST_FLOAT32) for n in exponents]
            self._constant("fits_at", [*fits_at, np.nextafter(np.float32(SMALLEST_FLOAT32), np.float32(0))], np.float32)
            self._constant("exponents", [operations.UNSHOWN, *exponents, operations.UNSHOWN], np.int32)
        if (other := self._folded(node)) is not None:
            self._add(f"v{place} = {other}")
            return
        dtype = self._program.nodes[node.args[0]].dtype
        self._add(f"v{place} = " + operations.operation_of(node.op, dtype, known).mindspore.format(*args, **extra))

    def _folded(self, node: Node) -> str | None:
        """Return another expression with the same bits for what the compiler would change, or None."""
        nodes, constants = self._program.nodes, self._program.constants
        for x, c in (node.args, node.args[::-1]) if node.op in ("add", "mul") and node.dtype == "float32" else ():
            if c not in constants:
                continue
            array = constants[c][..., 0]
            # It takes NaN, which other constants give, for 1, and leaves the product out.
            if node.op == "mul" and (is_nan := np.isnan(array)).any():
                others = self._constant(f"others_v{c}", -np.where(is_nan, np.float32(2), array))
                return f"ops.select({self._constant(f'nan_v{c}', is_nan)}, NAN, -v{x} * {others})"
            inner = [arg for arg in nodes[x].args if arg in constants] if nodes[x].op == "mul" else []
            # It multiplies two constants first, with another last bit. A change of both signs keeps it.
            if node.op == "mul" and inner:
                return f"-v{x} * {self._constant(f'minus_v{c}', -array)}"
            # It leaves out a sum with what is about 0, which is none for -0.0.
            if node.op == "add" and (np.abs(array) <= SMALLEST_FLOAT32).any():
                return f"v{x} - {self._constant(f'minus_v{c}', -array)}"
        return None

    def _constant(self, name: str, array: Any, dtype: Any = None) -> str:
        self._names.setdefault(name, Tensor(np.array(array, dtype)))
        return name


def _names() -> dict[str, Any]:
    return {
        "ops": ops,
        "mstype": mstype,
        "reduce_sum": ops.ReduceSum(),
        "move": ops.Primitive("TensorMove"),
        "argmin": ops.Argmin(axis=0, output_type=mstype.int32),
        "ZERO": Tensor(0.0, mstype.float32),
        "NONE": Tensor(0, mstype.int32),
        "NAN": Tensor(np.nan, mstype.float32),
        "INF": Tensor(np.inf, mstype.float32),
        "SMALLEST_AS_INT32": Tensor(operations.SMALLEST_AS_INT32),
        "LARGEST_AS_INT32": Tensor(operations.largest_int32_of_float32),
    }
