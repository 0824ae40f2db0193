"""The state of loss scaling as numbers by name: those of ``state_dict()``, of other cells and of Megatron-LM."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from mindformers_adaptive.rules.fields import STEP_FIELDS, kept_fields
from mindformers_adaptive.rules.saved_state import all_fields, own_keys

__all__ = ["RUN", "fields_in", "grad_scaler_in", "read_restored", "read_state_dict", "run_in", "to_state_dict"]

# What a checkpoint and a state_dict() call the number of the run.
RUN = "loss_scaling_run"
# The names of the loss scale in a state: Megatron-LM's, that of a checkpoint, and that of a loss scaler's state().
_SCALE_NAMES = ("scale", "scale_sense", "loss_scale")


def to_state_dict(rule: Any, loss_scale: float, values: Mapping[str, Any], run: int) -> dict[str, Any]:
    """Return a state as numbers, with the names that Megatron-LM's ``DynamicGradScaler`` loads too.

    Args:
        rule (Rule): the rule.
        loss_scale (float): for the next step.
        values (Mapping[str, Any]): as ``state()`` of the update cell returns it.
        run (int): the number of the run.
    """
    numbers = {
        "scale": loss_scale,
        "growth_tracker": values["cur_iter"] - 1 - values["last_overflow_iter"],
        "hysteresis_tracker": values.get("hysteresis_budget", getattr(rule, "hysteresis", 1)),
        RUN: run,
    }
    for name, value in values.items():
        is_vector = isinstance(value, tuple)
        numbers |= {f"{name}_{place}": one for place, one in enumerate(value)} if is_vector else {name: value}
    return numbers


def grad_scaler_in(state_dict: Any) -> dict[str, Any] | None:
    """Return the state that a dict is, or that it has as Megatron-LM's ``grad_scaler``; None if that is missing."""
    state = _require_dict("state_dict", state_dict)
    if "grad_scaler" not in state and "optimizer" not in state:
        return state
    scaler = state.get("grad_scaler")
    return None if scaler is None else _require_dict("grad_scaler", scaler)


def read_state_dict(
    rule: Any, state: Mapping[str, Any], present: Mapping[str, Any]
) -> tuple[str, float, dict[str, Any]]:
    """Return the name of the loss scale in a state, the loss scale, and the state by the names of ``state()``.

    Args:
        rule (Rule): the rule.
        state (Mapping[str, Any]): numbers, or tensors of one element.
        present (Mapping[str, Any]): the state of the update cell, for what Megatron-LM's trackers do not say.

    Raises:
        KeyError: if the loss scale is missing, or both the counters and Megatron-LM's trackers.
        TypeError: if a value is not a number of its kind.
        ValueError: if a counter does not fit into 32 bits, or Megatron-LM's trackers do not fit the rule.
    """
    given = values_in(rule, state) or {**present, **_counters_of_megatron(rule, state)}
    scale_name = next((name for name in _SCALE_NAMES if name in state), None)
    if scale_name is None:
        raise KeyError("The state has no 'scale'. Give what state_dict() returned.")
    return scale_name, to_real(scale_name, state[scale_name]), given


def read_restored(rule: Any, state: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Return what a rule can use of the state of a cell, also of another rule, and the fields that it had.

    Args:
        rule (Rule): the rule.
        state (Mapping[str, Any]): numbers, and lists of numbers.

    Raises:
        TypeError: if a value is not a number of its kind.
        ValueError: if a counter does not fit into 32 bits.
    """
    given = values_in(rule, state)
    restored = fields_in(rule, given)
    if not restored.issuperset(field.name for field in kept_fields(rule)):
        # Another rule may have pieces of the same name.
        given = {key: value for key, value in given.items() if key not in own_keys(rule)}
    return given, restored


def run_in(state: Mapping[str, Any], otherwise: int) -> int:
    """Return the number of the run in a state, or another number if it has none; raise TypeError or ValueError."""
    return to_integer(RUN, state[RUN]) if RUN in state else otherwise


def fields_in(rule: Any, values: Mapping[str, Any]) -> set[str]:
    """Return the names of the fields of which all parts are there."""
    return {field.name for field in all_fields(rule) if all(key in values for key in field.keys)}


def values_in(rule: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a state that the update cell of a rule has, by the names of ``state()``."""
    values: dict[str, Any] = {}
    # A checkpoint has Parameters by their names, beside those of a network, one of which may be called as a part is.
    if STEP_FIELDS[0].parameter in given and STEP_FIELDS[0].name not in given:
        given = _by_key(rule, given)
    for field in all_fields(rule):
        if field.shape and not field.parts:
            names = (f"{field.name}_{place}" for place in range(field.shape[0]))
            vector = given.get(field.name, [given[name] for name in names if name in given])
            if not hasattr(vector, "__len__"):
                raise TypeError(f"{field.name!r} must be {field.shape[0]} numbers, but got {vector!r}.")
            if len(vector) == field.shape[0]:
                values[field.name] = tuple(to_real(field.name, number) for number in vector)
            continue
        for key in field.keys:
            if key in given:
                values[key] = (to_integer if field.dtype == "int32" else to_real)(key, given[key])
    return values


def _by_key(rule: Any, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the Parameters of an update cell hold, by the names of ``state()``."""
    given: dict[str, Any] = {}
    for field in all_fields(rule):
        whole: Any = parameters.get(field.parameter)
        if field.shape:
            whole = whole.tolist() if hasattr(whole, "tolist") else whole
            if not isinstance(whole, (list, tuple)) or len(whole) != field.shape[0]:
                continue
        if whole is not None:
            given |= field.by_key(whole)
    return given


def _counters_of_megatron(rule: Any, state: Mapping[str, Any]) -> dict[str, int]:
    missing = [key for key in ("scale", "growth_tracker", "hysteresis_tracker") if key not in state]
    if missing:
        raise KeyError(
            "The state must have the counters of the update cell, or those of Megatron-LM's dynamic scaler, of which "
            f"{', '.join(map(repr, missing))} is missing. Give what state_dict() returned, or the checkpoint's "
            "'grad_scaler'; a constant scaler saves no state."
        )
    growth, tracker = (to_integer(name, state[name]) for name in ("growth_tracker", "hysteresis_tracker"))
    hysteresis = getattr(rule, "hysteresis", 1)
    if growth < 0 or tracker > hysteresis:
        raise ValueError(
            f"'growth_tracker' must not be negative, nor 'hysteresis_tracker' above hysteresis={hysteresis}, but got "
            f"{growth} and {tracker}. Give the 'hysteresis' that Megatron-LM was started with."
        )
    # Below 0, where Megatron-LM counts on, all numbers mean the same.
    budget = {"hysteresis_budget": max(tracker, 0)} if hysteresis > 1 else {}
    return {"cur_iter": growth + 1, "last_overflow_iter": 0, **budget}


def _require_dict(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"'{name}' must be a dict, but got {value!r}. Give what state_dict() returned.")
    return value


def to_integer(name: str, value: Any) -> int:
    """Return a counter of a state as an int32, whether it is a number or a tensor of one element; raise TypeError."""
    number = to_number(value)
    if isinstance(number, bool) or not isinstance(number, Integral):
        raise TypeError(f"'{name}' must be an integer, but got {value!r}. Give what state_dict() returned.")
    if not -(2**31) <= int(number) < 2**31:
        raise ValueError(f"'{name}' must fit into 32 bits, but got {number}. Give what state_dict() returned.")
    return int(number)


def to_real(name: str, value: Any) -> float:
    """Return a number of a state as a float, whether it is a number or a tensor of one element; raise TypeError."""
    number = to_number(value)
    if isinstance(number, bool) or not isinstance(number, Real):
        raise TypeError(f"'{name}' must be a number, but got {value!r}. Give what state_dict() returned.")
    try:
        return float(number)
    except OverflowError:
        raise ValueError(f"'{name}' must be a number of float32. Give what state_dict() returned.") from None


def to_number(value: Any) -> Any:
    """Return a tensor of one element, of whatever library, as its number, and anything else as it is."""
    try:
        return value.item() if hasattr(value, "item") else value
    except (RuntimeError, ValueError):
        # Of several elements, or of none.
        return value
