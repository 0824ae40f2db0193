"""Trace the step of a loss-scaling rule: record the inputs, the operations and the results of the step."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any, NamedTuple

from mindformers_adaptive.rules.description import is_of_this_package
from mindformers_adaptive.rules.functions import State, maximum, minimum, stack, where
from mindformers_adaptive.rules.operations import UNSHOWN
from mindformers_adaptive.rules.values import RuleError, Trace, Value, constant, is_line_of_a_rule, refused

__all__ = ["TracedStep", "told", "trace_for_cell", "trace_step"]

_COUNTS = ("skipped_steps", "consecutive_overflows")


class TracedStep(NamedTuple):
    """The operations and results of a loss-scaling rule's step, recorded by calling the step once.

    Attributes:
        outputs (Mapping[str, Value]): the values after the step: ``loss_scale``, the fields of the rule, and
            ``clean_steps`` where the rule counts them.
        moves_by_bits (bool): whether the scale is always a power of two.
        shape (tuple): the step without constants and table sizes; rules with equal shapes can run side by side.
        trace (Trace): the recording of the step, with all its values.
    """

    outputs: Mapping[str, Value]
    moves_by_bits: bool
    shape: tuple[Any, ...]
    trace: Trace


class Seen:
    """The argument ``seen`` of a rule's step: ``overflow`` and, if the rule needs gradients, the largest gradient.

    The attributes for the largest gradient are ``gradient_known``, ``largest_gradient`` and ``max_safe_exponent``.
    """

    def __init__(self, rule: Any) -> None:
        self.overflow = _input("overflow", "bool")
        vars(self)["_rule"] = rule

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        shown = ("gradient_known", "largest_gradient", "max_safe_exponent")
        if name not in shown:
            raise refused(f"reads seen.{name}, but 'seen' has only overflow, {', '.join(shown)}. Use one of these")
        if not self._rule.needs_gradients:
            raise refused(
                f"reads seen.{name}, which only a rule that needs gradients has. Set needs_gradients = True in the "
                "rule's class"
            )
        largest = _input("largest_gradient", "float32")
        of_format = constant(self._rule.gradient_format.largest, "float32")
        shown_exponent: Any = Value("max_safe_exponent", (largest, self.overflow, of_format), "int32", ())
        known = shown_exponent > UNSHOWN
        derived: dict[str, Any] = {"gradient_known": known, "max_safe_exponent": shown_exponent}
        derived["largest_gradient"] = where(known, largest, 0.0)
        vars(self).update(derived)
        return derived[name]

    def __bool__(self, *_: object) -> bool:
        raise refused("compares 'seen', or uses 'seen' as a condition. Use seen.overflow or seen.gradient_known")

    __eq__ = __ne__ = __bool__
    __hash__ = object.__hash__

    def __setattr__(self, name: str, value: object) -> None:
        if name != "overflow" or name in vars(self):
            raise refused(f"sets {name!r} in 'seen', which cannot change. Use a variable of your own")
        super().__setattr__(name, value)


def trace_step(rule: Any) -> TracedStep:
    """Call the step of a rule with values that record the operations on them, and return the traced step.

    Args:
        rule (Rule): a rule after its constructor.

    Raises:
        ValueError: if the step does something that cannot be computed in the same way everywhere, or raises an error.
    """
    traced = _traced_once(rule, {})
    # A trace records a single call of the step. A step that depends on the time or on random numbers would compute
    # something else in the next call. So trace a user's step twice, and compare the two traces. Skip this check for the
    # rules of this package, because their steps depend on their arguments only, and a sweep creates many such rules.
    if not is_of_this_package(type(rule)):
        again = _traced_once(rule, {})
        if (again.shape, again.trace.numbers) != (traced.shape, traced.trace.numbers):
            problem = "does something else when it is called again. Let it depend on its arguments only"
            raise ValueError(_message(rule, problem))
    return traced


def trace_for_cell(rule: Any) -> TracedStep:
    """Trace a rule's step for the update cell. Replace the fields in ``rule.fixed_state`` by their constant values."""
    return _traced_once(rule, rule.fixed_state) if rule.fixed_state else rule.traced


def _traced_once(rule: Any, constants: Mapping[str, int]) -> TracedStep:
    with Trace(rule) as trace:
        before, groups = _state_before(rule, constants)
        names = set(before)
        dtypes = {name: (value.dtype, value.shape) for name, value in before.items() if name not in _COUNTS}
        state = _ReadState(before, dtypes)
        try:
            after = rule.next_state(state, Seen(rule))
        except RuleError:
            raise
        except (Exception, SystemExit) as error:
            raise ValueError(f"The step of the rule {rule.name!r} raises {told(error, rule)}.") from error
        if trace.problem is not None:
            raise trace.problem
        if not isinstance(after, State) or set(vars(after)["_values"]) != names:
            raise ValueError(_message(rule, f"must return state.replace(...), but returns {after!r}"))
        if any(value.trace is not trace for value in vars(after)["_values"].values()):
            problem = (
                "returns the state of another call of next_state(). Return state.replace(...) of the argument 'state'"
            )
            raise ValueError(_message(rule, problem))
        values: dict[str, Value] = vars(after)["_values"]
        moves_by_bits = values["exponent"] is not before["exponent"] or "exponent" in vars(state).get("_read", ())
        if moves_by_bits and values["loss_scale"] is not before["loss_scale"]:
            problem = "sets loss_scale and also uses exponent, the log2 of loss_scale. Use only one of the two"
            raise ValueError(_message(rule, problem))
        if moves_by_bits and rule.min_exponent > rule.max_exponent:
            raise ValueError(
                "There must be a power of two from 'min_loss_scale' to 'max_loss_scale', but got "
                f"{rule.min_loss_scale} and {rule.max_loss_scale}. Lower 'min_loss_scale' or raise 'max_loss_scale'."
            )
        outputs = {"loss_scale": _next_scale(rule, values, before, moves_by_bits)}
        for name, keys in groups.items():
            if name in constants:
                continue
            outputs[name] = stack([values[key] for key in keys]) if keys else values[name]
        if rule.counts_clean_steps:
            outputs["clean_steps"] = values["clean_steps"]
        return TracedStep(outputs, moves_by_bits, _shape_of(trace, outputs), trace)


def _shape_of(trace: Trace, outputs: Mapping[str, Value]) -> tuple[Any, ...]:
    values = (
        (value.op, *(argument.position for argument in value.args), value.dtype, value.shape)
        + ((value.extra,) if value.op in ("input", "element") else ())
        for value in trace.values
    )
    return (*values, *((name, value.position) for name, value in outputs.items()))


class _ReadState(State):
    """The state before the step. It keeps in ``_read`` the names of the values that the step reads."""

    def __getattr__(self, name: str) -> Any:
        vars(self).setdefault("_read", set()).add(name)
        return super().__getattr__(name)


def _input(name: str, dtype: str, shape: tuple[int, ...] = ()) -> Any:
    return Value("input", (), dtype, shape, name)


def _state_before(rule: Any, constants: Mapping[str, int]) -> tuple[dict[str, Value], dict[str, tuple[str, ...]]]:
    """Return the traced values of the state before a step, by name, and for each field the names of its elements."""
    loss_scale = _input("loss_scale", "float32")
    exponent = Value("exponent", (loss_scale, *_bounds(rule)), "int32", ())
    before: dict[str, Value]
    groups: dict[str, tuple[str, ...]]
    before, groups = {"loss_scale": loss_scale, "exponent": exponent}, {}
    for field in rule.fields:
        is_constant = field.name in constants
        value = (
            constant(constants[field.name], field.dtype)
            if is_constant
            else _input(field.name, field.dtype, field.shape)
        )
        groups[field.name] = field.parts
        before |= dict(zip(field.parts, value, strict=True)) if field.parts else {field.name: value}
    before |= {name: _input(name, "int32") for name in _COUNTS}
    if rule.counts_clean_steps:
        before["clean_steps"] = _input("clean_steps", "int32")
    return before, groups


def _bounds(rule: Any) -> tuple[Value, Value]:
    return constant(rule.min_exponent, "int32"), constant(rule.max_exponent, "int32")


def _next_scale(rule: Any, after: Mapping[str, Value], before: Mapping[str, Value], moves_by_bits: bool) -> Any:
    """Return the loss scale for the next step, within the rule's bounds."""
    if moves_by_bits:
        exponent, (lowest, highest) = after["exponent"], _bounds(rule)
        if not _keeps_bounds(rule):
            exponent = minimum(maximum(exponent, lowest), highest)
        return Value("power", (exponent, lowest, highest), "float32", ())
    wanted = after["loss_scale"]
    if _keeps_bounds(rule) or wanted is before["loss_scale"]:
        return wanted
    bounded = minimum(maximum(wanted, rule.min_loss_scale), rule.max_loss_scale)
    # Keep the previous loss scale if the new one is NaN, which is not equal to itself.
    next_scale: Value = where(wanted == wanted, bounded, before["loss_scale"])
    return next_scale


def _keeps_bounds(rule: Any) -> bool:
    """Return ``keeps_bounds`` from the class that defines next_state(), because it describes that next_state()."""
    owner = next(owner for owner in (rule, *type(rule).__mro__) if "next_state" in vars(owner))
    return bool(vars(owner).get("keeps_bounds", False))


def _message(rule: Any, problem: str) -> str:
    code = getattr(rule.next_state, "__code__", None)
    where = "" if code is None else f", in line {code.co_firstlineno} of {code.co_filename}"
    return f"The step of the rule {rule.name!r} {problem}{where}."


def told(error: BaseException, rule: Any) -> str:
    """Return an error as one line: the type, the first line of the message, and the line of the rule that raised it."""
    text = next(iter(str(error).strip().splitlines()), "").rstrip(".")
    return f"{type(error).__name__}{text and f': {text}'}{_place_of(error, rule)}"


def _place_of(error: BaseException, rule: Any) -> str:
    """Return the line of code to name in a message, as ", in line 3 of rule.py", or "" if no line is suitable.

    This is the innermost line of the traceback in the rule's file. If there is no line in that file, it is the
    innermost line in code that the rule called, except libraries.
    """
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    code = getattr(rule.next_state, "__code__", None)
    own_lines = [frame_line for frame_line in lines if code is not None and frame_line[0] == code.co_filename]
    called_lines = [frame_line for frame_line in lines if is_line_of_a_rule(frame_line[0])]
    return "".join(f", in line {line} of {file}" for file, line in (own_lines or called_lines)[-1:])
