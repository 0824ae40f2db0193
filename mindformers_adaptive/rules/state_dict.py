"""Convert a loss-scaling state to and from a dict of numbers, for ``state_dict()``, other cells and Megatron-LM."""

from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

from mindformers_adaptive.rules.fields import STEP_FIELDS, Field, form_of, kept_fields
from mindformers_adaptive.rules.saved_state import all_fields, own_keys

# The names of two entries of a checkpoint and of a state_dict(): the number of the run, and a checksum of the rule's
# name and of the fields of its state. The checksum shows whether the saved state fits a rule.
RUN, FORM = "loss_scaling_run", "loss_scaling_form"
# Names of the loss scale in a state of Megatron-LM, in a checkpoint, and in the state of a loss scaler, in this order.
_SCALE_NAMES = ("scale", "scale_sense", "loss_scale")

# Parameter names of MindFormers' own adaptive cell, mapped to field names. Usually a checkpoint has other names. But if
# two Parameters of a training have the same name, MindSpore names each Parameter after the attribute that holds it. A
# constant learning rate causes such equal names.
FORMER_NAMES = {
    "window_up_count": "growth_num",
    "window_down_count": "down_num",
    "cur_iter": "cur_iter",
    "last_overflow_iter": "last_overflow_iter",
}


class RestoredState(NamedTuple):
    """The part of a saved state that a rule can use.

    Attributes:
        loss_scale (float, optional): the loss scale of the next step; None where the state has no loss scale.
        scale_name (str): the name of the loss scale in the state.
        run (int, optional): the number of the run.
        values (dict[str, Any]): the values, by their names in ``state()`` of the update cell.
        restored (set[str]): the names of the fields that the state contains with all their parts.
    """

    loss_scale: float | None
    scale_name: str
    run: int | None
    values: dict[str, Any]
    restored: set[str]


def to_state_dict(rule: Any, loss_scale: float, values: Mapping[str, Any], run: int) -> dict[str, Any]:
    """Return a loss-scaling state as numbers by name; Megatron-LM's ``DynamicGradScaler`` can load them too.

    Args:
        rule (Rule): the rule.
        loss_scale (float): the loss scale for the next step.
        values (Mapping[str, Any]): as ``state()`` of the update cell returns it.
        run (int): the number of the run.
    """
    numbers = {
        "scale": loss_scale,
        "growth_tracker": values["cur_iter"] - 1 - values["last_overflow_iter"],
        "hysteresis_tracker": values.get("hysteresis_budget", getattr(rule, "hysteresis", 1)),
        RUN: run,
        FORM: form_of(rule),
    }
    for name, value in values.items():
        is_vector = isinstance(value, tuple)
        numbers |= {f"{name}_{index}": number for index, number in enumerate(value)} if is_vector else {name: value}
    return numbers


def grad_scaler_in(state_dict: Any) -> dict[str, Any] | None:
    """Return a gradient scaler's state: the given dict, or its entry ``grad_scaler`` as in Megatron-LM, or None."""
    state = _require_dict("state_dict", state_dict)
    if "grad_scaler" not in state and "optimizer" not in state:
        return state
    scaler = state.get("grad_scaler")
    return None if scaler is None else _require_dict("grad_scaler", scaler)


def read_state(rule: Any, state: Mapping[str, Any]) -> RestoredState:
    """Return the part of a saved state that a rule can use. The state may come from a cell with another rule.

    Args:
        rule (Rule): the rule.
        state (Mapping[str, Any]): numbers, tensors and lists of numbers by the names of ``state()`` or
            ``state_dict()``; or Parameters by their names in a checkpoint. Other keys are ignored.

    Raises:
        TypeError: if a value is not a number of its kind.
        ValueError: if a counter does not fit into 32 bits.
    """
    name = next((name for name in _SCALE_NAMES if name in state), "")
    loss_scale = to_real(name, state[name]) if name else None
    run, form = (to_integer(key, state[key]) if key in state else None for key in (RUN, FORM))
    is_other_form = form is not None and abs(form) != form_of(rule) and rule.identifying_fields is None
    rule_fields = {field.name for field in kept_fields(rule)}
    fields = [field for field in all_fields(rule) if not is_other_form or field.name not in rule_fields]
    values = _values_in(fields, state)
    restored = {field.name for field in fields if all(key in values for key in field.keys)}
    needed = rule_fields if rule.identifying_fields is None else set(rule.identifying_fields)
    if not needed <= restored:
        # The state lacks fields of this rule, so it may belong to another rule that uses the same names for other
        # values.
        values = {key: value for key, value in values.items() if key not in own_keys(rule)}
    return RestoredState(loss_scale, name, run, values, restored)


def _values_in(fields: Sequence[Field], state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the given fields that a state contains, by their names in ``state()``."""
    values: dict[str, Any] = {}
    # In a checkpoint, look only for the full Parameter names of the update cell, because a Parameter of the network may
    # have the same short name as a field of the rule's state.
    if STEP_FIELDS[0].parameter in state and STEP_FIELDS[0].name not in state:
        state = _by_key(fields, state)
    names_of_fields = {key for field in fields for key in field.keys}
    for field in fields:
        if field.shape and not field.parts:
            if (vector := _vector_in(field, state, names_of_fields)) is not None:
                values[field.name] = vector
            continue
        for key in field.keys:
            if key in state:
                values[key] = (to_integer if field.dtype == "int32" else to_real)(key, state[key])
    return values


def _vector_in(field: Field, state: Mapping[str, Any], names_of_fields: set[str]) -> tuple[Any, ...] | None:
    """Return the elements of a vector field from a state; None if they are missing or have another length."""
    length = field.shape[0]
    names = [f"{field.name}_{index}" for index in range(length)]
    elements = [state[name] for name in names if name in state]
    if (longer := f"{field.name}_{length}") in state and longer not in names_of_fields:
        return None
    vector = state.get(field.name, elements)
    if hasattr(vector, "tolist"):
        vector = vector.tolist()
    if not isinstance(vector, (list, tuple)):
        raise TypeError(
            f"{field.name!r} must be {length} numbers, but got {vector!r}. Give the value that state_dict() returned."
        )
    if len(vector) != length:
        return None
    convert = to_integer if field.dtype == "int32" else to_real
    return tuple(convert(field.name, number) for number in vector)


def _by_key(fields: Sequence[Field], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values in the Parameters of an update cell, by their names in ``state()``."""
    values: dict[str, Any] = {}
    for field in fields:
        whole: Any = parameters.get(field.parameter)
        if field.shape:
            whole = whole.tolist() if hasattr(whole, "tolist") else whole
            if not isinstance(whole, (list, tuple)) or len(whole) != field.shape[0]:
                continue
        if whole is not None:
            values |= field.by_key(whole)
    return values


def counters_of_megatron(rule: Any, state: Mapping[str, Any]) -> dict[str, int]:
    """Return the step counters that follow from the trackers of Megatron-LM's scaler, by their names in ``state()``.

    Args:
        rule (Rule): the rule.
        state (Mapping[str, Any]): the state of Megatron-LM's ``DynamicGradScaler``.

    Raises:
        KeyError: if a tracker is missing.
        TypeError: if a tracker is not an integer.
        ValueError: if the trackers do not fit the rule.
    """
    missing = [key for key in ("scale", "growth_tracker", "hysteresis_tracker") if key not in state]
    if missing:
        raise KeyError(
            "The state must have the counters of an update cell or of Megatron-LM's dynamic gradient scaler. It lacks "
            f"{', '.join(map(repr, missing))}. Give the dict that state_dict() returned, or the 'grad_scaler' of a "
            "Megatron-LM checkpoint. A constant gradient scaler saves no state."
        )
    growth, tracker = (to_integer(name, state[name]) for name in ("growth_tracker", "hysteresis_tracker"))
    hysteresis = getattr(rule, "hysteresis", 1)
    if growth < 0 or tracker > hysteresis:
        raise ValueError(
            f"'growth_tracker' must be at least 0, 'hysteresis_tracker' at most {hysteresis} (the rule's hysteresis), "
            f"but got {growth} and {tracker}. Give the 'hysteresis' with which Megatron-LM was started."
        )
    # Megatron-LM keeps decreasing its hysteresis tracker below 0, where every value has the same effect as 0.
    budget = {"hysteresis_budget": max(tracker, 0)} if hysteresis > 1 else {}
    return {"cur_iter": growth + 1, "last_overflow_iter": 0, **budget}


def _require_dict(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"'{name}' must be a dict, but got {value!r}. Give the dict that state_dict() returned.")
    return value


def to_integer(name: str, value: Any) -> int:
    """Return a counter as an int, also from a tensor of one element; raise an error if the counter is not an int32."""
    number = to_number(value)
    if isinstance(number, bool) or not isinstance(number, Integral):
        raise TypeError(f"'{name}' must be an integer, but got {value!r}. Give the value that state_dict() returned.")
    if not -(2**31) <= int(number) < 2**31:
        raise ValueError(
            f"'{name}' must fit into 32 bits, but got {number}. Give the value that state_dict() returned."
        )
    return int(number)


def to_real(name: str, value: Any) -> float:
    """Return a number or a tensor of one element as a float; raise an error for any other value."""
    number = to_number(value)
    if isinstance(number, bool) or not isinstance(number, Real):
        raise TypeError(f"'{name}' must be a number, but got {value!r}. Give the value that state_dict() returned.")
    try:
        return float(number)
    except OverflowError:
        raise ValueError(
            f"'{name}' must be a number that float32 can hold. Give the value that state_dict() returned."
        ) from None


def to_number(value: Any) -> Any:
    """Return the number in a one-element tensor of any library; return any other value unchanged."""
    try:
        return value.item() if hasattr(value, "item") else value
    except (RuntimeError, ValueError):
        # The tensor has several elements, or none.
        return value
