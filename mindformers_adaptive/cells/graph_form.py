"""The step of a rule as a function that MindSpore compiles: the rule's own function, with operations of MindSpore.

The step of a user's rule is tried before training: its compiled form is compared with NumPy, where it trains.
"""

import os
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from mindspore import Tensor, context, jit, ops
from mindspore import dtype as mstype
from mindspore.communication._comm_helper import GlobalComm
from numpy.typing import NDArray

from mindformers_adaptive.rules.checks import LARGEST_FLOAT32, SMALLEST_FLOAT32
from mindformers_adaptive.rules.fields import STEP_LIMIT, is_of_this_package
from mindformers_adaptive.rules.lanes import GRADIENT, NumpyStep, arguments_of_step, arrays_of, handed_on, keeps_bounds
from mindformers_adaptive.rules.operations import (
    LARGEST_AS_INT32,
    OPERATIONS,
    SMALLEST_AS_INT32,
    UNSHOWN,
    Namespace,
    possible_exponents,
)
from mindformers_adaptive.rules.rule import Rule

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


_STEPS = 200
# In every second step, a value of the state is replaced by an extreme one with this probability.
_EXTREME = 0.2
_FLOATS = (0.0, 1.0, -1.0, 2.0**-100, 2.0**100, LARGEST_FLOAT32, np.inf, -np.inf, np.nan)
_INTS = (0, 1, -1, 1000, STEP_LIMIT, 2**31 - 1, -(2**31))
_GRADIENTS = (0.0, SMALLEST_FLOAT32, 1.0, 65504.0, LARGEST_FLOAT32, np.inf, np.nan)
_COUNTS = ("skipped_steps", "consecutive_overflows", "clean_steps")


def can_try() -> bool:
    """Return whether steps can run: not before init() of a parallel training, nor in a dry run, which gives zeros."""
    is_parallel = context.get_auto_parallel_context("parallel_mode") != "stand_alone"
    return (GlobalComm.INITED or not is_parallel) and not os.environ.get("MS_SIMULATION_LEVEL")


def try_rule(rule: Rule) -> None:
    """Compare random steps of a rule in NumPy with the same steps of its compiled form, on the present device.

    Raises:
        ValueError: if the two compute different values. The message has the values before the step, and both results.

    Warns:
        UserWarning: if a float of the state differs by its rounding.
    """
    graph, (before, after) = GraphStep(rule), _random_steps(rule)
    # In these modes MindSpore would distribute the inputs of a compiled function. So run its operators one by one.
    is_distributed = context.get_auto_parallel_context("parallel_mode") in ("semi_auto_parallel", "auto_parallel")
    compiled = graph.function if is_distributed else jit(graph.function)
    is_rounded = False
    for step in range(_STEPS):
        inputs = [Tensor(_value(rule, name, before, step)) for name in graph.inputs]
        for name, result in zip(graph.outputs, compiled(*inputs), strict=True):
            ours, theirs = _value(rule, name, after, step), result.asnumpy()
            # Devices may flush subnormal numbers to 0.
            ours, theirs = (value * (np.abs(value) >= SMALLEST_FLOAT32) for value in (ours, theirs))
            if np.array_equal(ours, theirs, equal_nan=True):
                continue
            if theirs.dtype != np.float32 or name == "loss_scale" or not np.allclose(ours, theirs, equal_nan=True):
                values = ", ".join(f"{key}={_value(rule, key, before, step).tolist()}" for key in graph.inputs)
                raise ValueError(
                    f"The rule {rule.name!r} computes {name!r} differently in MindSpore and in NumPy: "
                    f"{theirs.tolist()} and {ours.tolist()}, in a step from {values}. Write the step with other "
                    "operations, so that replays show what the training does."
                )
            is_rounded = True
    if is_rounded:
        warnings.warn(
            f"The rule {rule.name!r} rounds a float of its state differently in MindSpore and in NumPy. Replays of a "
            "training can differ from it in the last digits.",
            stacklevel=2,
        )


def _random_steps(rule: Rule) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Return the values before and after random steps of a rule in NumPy.

    The values before come from a run of the rule. In every second step, some of them are extreme.
    """
    random = np.random.default_rng(0)
    overflow = random.random(_STEPS) < 0.3
    gradients = np.exp2(random.uniform(-30, 10, _STEPS))
    gradients = np.where(random.random(_STEPS) < 0.2, random.choice(_GRADIENTS, _STEPS), gradients)
    states = [rule.start(rule.nearest_scale(min(max(rule.min_loss_scale, 2.0**16), rule.max_loss_scale)))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for flag, gradient in zip(overflow[1:].tolist(), gradients[1:].tolist(), strict=True):
            states.append(rule.step(states[-1], flag, gradient))
    before = arrays_of(rule, states)
    for name, values in before.items():
        is_extreme = (random.random(values.shape) < _EXTREME) & (np.arange(_STEPS) % 2 == 1)
        if name == "loss_scale":
            extremes: Any = [rule.nearest_scale(rule.min_loss_scale), rule.nearest_scale(rule.max_loss_scale)]
        else:
            extremes = _FLOATS if values.dtype == np.float32 else [0, 1, STEP_LIMIT] if name in _COUNTS else _INTS
        before[name] = np.where(is_extreme, random.choice(extremes, values.shape), values).astype(values.dtype)
    before |= {"overflow": overflow, "largest_gradient": gradients.astype(np.float32)}
    with np.errstate(all="ignore"):
        return before, NumpyStep(rule)(dict(before))


def _value(rule: Rule, name: str, values: dict[str, NDArray[Any]], step: int) -> NDArray[Any]:
    """Return the value of an input or result of the compiled step: a number, or a vector of a field's parts."""
    parts = next((field.parts for field in rule.fields if field.name == name), ())
    return np.array([values[part][step] for part in parts]) if parts else np.asarray(values[name][..., step])
