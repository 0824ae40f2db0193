"""The step of a rule as a function that MindSpore compiles: the rule's own function, with operations of MindSpore."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mindspore import Tensor, ops
from mindspore import dtype as mstype

from mindformers_adaptive.rules.checks import LARGEST_FLOAT32, SMALLEST_FLOAT32
from mindformers_adaptive.rules.fields import is_of_this_package
from mindformers_adaptive.rules.operations import (
    LARGEST_AS_INT32,
    OPERATIONS,
    SMALLEST_AS_INT32,
    UNSHOWN,
    Namespace,
    possible_exponents,
)
from mindformers_adaptive.rules.rule import Rule
from mindformers_adaptive.rules.step import GRADIENT, arguments_of_step, handed_on, keeps_bounds

__all__ = ["GraphStep"]

_reduce_sum = ops.ReduceSum()
_argmin_of = ops.Argmin(axis=0, output_type=mstype.int32)
_move = ops.Primitive("TensorMove")
_LOWEST, _HIGHEST, _INF = Tensor(SMALLEST_AS_INT32), Tensor(LARGEST_AS_INT32), Tensor(np.float32(np.inf))
# This tuple is annotated at module level, because MindSpore cannot compile a function with an annotated variable.
_NO_TENSORS: tuple[Any, ...] = ()
_ZERO, _NOTHING = Tensor(np.int32(0)), Tensor(np.float32(0))

# MindSpore compiles these functions where a step calls them, and decides an ``if`` on a dtype while it compiles. It
# cannot compile a lambda.


def _minimum(x: Any, y: Any) -> Any:
    # MindSpore's compiler removes ops.minimum(x, c) if the constant c is 2^127 or more, and x of inf would stay inf.
    return ops.minimum(x, y) if x.dtype == mstype.int32 else ops.select(ops.less(x, y), x, y)


def _maximum(x: Any, y: Any) -> Any:
    return ops.maximum(x, y) if x.dtype == mstype.int32 else ops.select(ops.less(y, x), x, y)


# Not by & and |: an Ascend has no kernel for these operators on bool.
def _logical_and(first: Any, *flags: Any) -> Any:
    for flag in flags:
        first = ops.logical_and(first, flag)
    return first


def _logical_or(first: Any, *flags: Any) -> Any:
    for flag in flags:
        first = ops.logical_or(first, flag)
    return first


def _int32(x: Any) -> Any:
    if x.dtype == mstype.float32:
        return ops.cast(ops.minimum(ops.maximum(x, _LOWEST), _HIGHEST), mstype.int32)
    return ops.cast(x, mstype.int32)


def _float32(x: Any) -> Any:
    return ops.cast(x, mstype.float32)


def _identity(x: Any) -> Any:
    return x


def _take(vector: Any, index: Any) -> Any:
    return ops.gather(vector, ops.minimum(ops.maximum(index, _ZERO), Tensor(vector.shape[0] - 1, mstype.int32)), 0)


def _argmin(vector: Any) -> Any:
    return _argmin_of(ops.select(ops.equal(vector, vector), vector, _INF))


def _count(flags: Any) -> Any:
    # Ascend devices sum float32, not bool. The sum is exact up to 2**24 flags.
    return ops.cast(_reduce_sum(ops.cast(flags, mstype.float32)), mstype.int32)


def _table(rows: Any, lowest: Any) -> Any:
    highest = Tensor(lowest + np.array(rows.shape[:-1], np.int32) - 1)
    rows, lowest = Tensor(rows), Tensor(lowest)

    def look_up(*arguments: Any) -> Any:
        places = ops.minimum(ops.maximum(ops.stack(arguments), lowest), highest)
        return ops.unstack(ops.gather_nd(rows, places - lowest))

    return look_up


_OPERATIONS = {
    **{"where": ops.select, "logical_and": _logical_and, "logical_or": _logical_or},
    **{"minimum": _minimum, "maximum": _maximum, "floor": ops.floor, "int32": _int32},
    **{"float32": _float32, "stack": ops.stack, "unstack": ops.unstack, "take": _take, "argmin": _argmin},
    "count": _count,
}
assert _OPERATIONS.keys() == OPERATIONS.keys()


class GraphStep:
    """Makes the function that computes the step of a loss-scaling rule from Parameters and Tensors.

    Args:
        rule (Rule): the rule.

    Attributes:
        function (function): takes Parameters and Tensors, and returns a tuple of Tensors. No result is another
            Parameter itself: MindSpore would read that Parameter only at the assignment, when it may have changed.
        inputs (tuple[str, ...]): the names of the function's arguments, in order.
        outputs (tuple[str, ...]): the names of its results, in order.
    """

    def __init__(self, rule: Rule) -> None:
        step: Any = rule.make_step(Namespace(_OPERATIONS, Tensor, _table))
        arguments = arguments_of_step(step)
        fields = [field for field in rule.fields if field.name not in rule.fixed_state]
        names = [field.name for field in fields]
        clean = ("clean_steps",) if rule.counts_clean_steps else ()
        shows_gradient = not {*GRADIENT}.isdisjoint(arguments)
        besides: tuple[str, ...] = ("largest_gradient",) if shows_gradient else ()
        besides += tuple(name for name in ("skipped_steps", "consecutive_overflows") if name in arguments)
        inputs = ("loss_scale", "overflow", *besides, *names, *clean)
        outputs = ("loss_scale", *names, *clean)

        # The function below may use only what MindSpore compiles: it unrolls loops over tuples, and decides an ``if``
        # on a flag of Python.
        fixed = tuple((name, Tensor(number, mstype.int32)) for name, number in rule.fixed_state.items())
        parts = tuple((field.name, field.parts) for field in fields if field.parts)
        moves_by_bits, is_clipped = rule.moves_by_bits, not keeps_bounds(rule)
        lowest, highest = (Tensor(bound, mstype.float32) for bound in (rule.min_loss_scale, rule.max_loss_scale))
        exponent_of, power_of = _powers(rule) if moves_by_bits else (_identity, _identity)
        limit_of = _limits(rule.gradient_format.largest)
        unshown = Tensor(UNSHOWN, mstype.int32)
        copied = () if is_of_this_package(type(rule)) else tuple(handed_on(rule))

        def function(*tensors: Any) -> Any:
            values = {"loss_scale": tensors[0]}
            for index, name in enumerate(inputs):
                values[name] = tensors[index]
            for name, number in fixed:
                values[name] = number
            for name, keys in parts:
                elements = ops.unstack(values[name])
                for index, key in enumerate(keys):
                    values[key] = elements[index]
            if moves_by_bits:
                values["exponent"] = exponent_of(tensors[0])
            if shows_gradient:
                limit = limit_of(values["largest_gradient"], tensors[1])
                values["max_safe_exponent"] = limit
                values["gradient_known"] = ops.less(unshown, limit)
                values["largest_gradient"] = ops.select(values["gradient_known"], values["largest_gradient"], _NOTHING)
            taken = _NO_TENSORS
            for name in arguments:
                taken = (*taken, values[name])
            after = step(*taken)
            if moves_by_bits:
                after["loss_scale"] = power_of(after["exponent"])
            elif is_clipped:
                wanted = after["loss_scale"]
                bounded = _minimum(_maximum(wanted, lowest), highest)
                after["loss_scale"] = ops.select(ops.equal(wanted, wanted), bounded, tensors[0])
            for name, keys in parts:
                elements = _NO_TENSORS
                for key in keys:
                    elements = (*elements, after[key])
                after[name] = ops.stack(elements)
            results = _NO_TENSORS
            for name in outputs:
                result = after[name]
                if name in copied:
                    # Before MindSpore 2.8, copy() converts integers to float32 and back. So copy them by TensorMove.
                    result = _move(result) if result.dtype == mstype.int32 else result.copy()
                results = (*results, result)
            return results

        self.function, self.inputs, self.outputs = function, inputs, outputs


def _powers(rule: Rule) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return functions for log2 of a loss scale, and for the loss scale of an exponent, within the rule's bounds."""
    powers = Tensor(
        np.array([2.0**exponent for exponent in range(rule.min_exponent, rule.max_exponent + 1)], np.float32)
    )
    lowest, below = Tensor(rule.min_exponent, mstype.int32), Tensor(rule.min_exponent - 1, mstype.int32)
    most = Tensor(rule.max_exponent - rule.min_exponent, mstype.int32)
    is_clipped = not keeps_bounds(rule)

    def exponent_of(loss_scale: Any) -> Any:
        return below + _count(ops.less_equal(powers, loss_scale))

    def power_of(exponent: Any) -> Any:
        index = exponent - lowest
        if is_clipped:
            index = ops.minimum(ops.maximum(index, _ZERO), most)
        return ops.gather(powers, index, 0)

    return exponent_of, power_of


def _limits(largest: float) -> Callable[[Any, Any], Any]:
    """Return the function for ``max_safe_exponent``: which power-of-two loss scale is the largest without overflow.

    Args:
        largest (float): the largest number of the gradients' format.
    """
    possible = possible_exponents(largest)
    # The largest gradient that does not overflow, for each exponent. Up to the last element, which is the largest
    # subnormal float32, gradients show nothing.
    fits = [min(largest * 2.0**-exponent, LARGEST_FLOAT32) for exponent in possible]
    fits_at = Tensor(np.array([*fits, np.nextafter(np.float32(SMALLEST_FLOAT32), np.float32(0))], np.float32))
    exponents = Tensor(np.array([UNSHOWN, *possible, UNSHOWN], np.int32))

    def limit_of(largest_gradient: Any, overflow: Any) -> Any:
        return ops.gather(exponents, ops.select(overflow, _ZERO, _count(ops.less_equal(largest_gradient, fits_at))), 0)

    return limit_of
