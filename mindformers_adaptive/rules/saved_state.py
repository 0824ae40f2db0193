"""Convert the state of a loss-scaling rule to and from the values in update cells and checkpoints."""

import math
import warnings
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from mindformers_adaptive.rules.fields import (
    LARGEST_GRADIENT,
    STEP_FIELDS,
    STEP_LIMIT,
    Field,
    form_of,
    kept_fields,
)


def all_fields(rule: Any) -> tuple[Field, ...]:
    """Return all fields that the update cell of a rule keeps.

    Args:
        rule (Union[Rule, type]): a rule, or a class of rules, for the fields that any rule of the class may have.

    Returns:
        tuple[Field, ...], the fields of the rule, ``STEP_FIELDS`` and, if the rule needs it, the largest gradient.
    """
    return (*kept_fields(rule), *STEP_FIELDS, *([LARGEST_GRADIENT] if rule.needs_gradients else []))


def own_keys(rule: Any) -> tuple[str, ...]:
    """Return the names in a rule's own state, without the loss scale, the step counters and the largest gradient.

    Args:
        rule (Union[Rule, type]): a rule, or its class.
    """
    return tuple(key for field in kept_fields(rule) for key in field.keys)


def to_values(rule: Any, state: Any, steps: int, last_event: int | None = None) -> dict[str, Any]:
    """Convert a state of a rule to the values that the rule's update cell holds after ``steps`` steps.

    Args:
        rule (Rule): the rule.
        state (NamedTuple): the state of the rule.
        steps (int): the number of steps that were taken, 0 before the first step.
        last_event (int, optional): the step of the last overflow or raise. Default: None, the last step. Ignored for a
            rule that counts clean steps, because its state tells the step.

    Returns:
        dict, as ``state()`` of the update cell returns it, without the largest gradient.

    Examples:
        >>> from mindformers_adaptive.rules.adaptive import AdaptiveRule
        >>> rule = AdaptiveRule()
        >>> values = to_values(rule, rule.step(rule.start(2.0**16), overflow=False), steps=1)
        >>> values["cur_iter"], values["last_overflow_iter"]
        (2, 0)
        >>> from_values(rule, 2.0**16, values).clean_steps
        1
    """
    steps = min(steps, STEP_LIMIT - 1)
    last_event = steps if last_event is None else min(last_event, steps)
    if rule.counts_clean_steps:
        last_event = steps - state.clean_steps
    values = {**state._asdict(), "cur_iter": steps + 1, "last_overflow_iter": last_event}
    rule_values = {key: values[key] for key in own_keys(rule)}
    return rule_values | {field.name: min(values[field.name], STEP_LIMIT) for field in STEP_FIELDS}


def from_values(rule: Any, loss_scale: float, values: Mapping[str, Any]) -> Any:
    """Convert the values of an update cell to a state of the rule: the inverse of :func:`to_values`.

    Args:
        rule (Rule): the rule.
        loss_scale (float): the loss scale of the state.
        values (Mapping[str, Any]): as :func:`to_values` returns them.

    Returns:
        NamedTuple, as ``rule.start()`` returns it.
    """
    state = rule.start(loss_scale)
    if rule.counts_clean_steps:
        values = {**values, "clean_steps": values["cur_iter"] - 1 - values["last_overflow_iter"]}
    return state._replace(**{name: values[name] for name in state._fields if name in values})


def repair_loss_scale(rule: Any, loss_scale: float, name: str) -> float:
    """Return a restored loss scale that a rule can use; warn if the scale had to be changed.

    Args:
        rule (Rule): the rule.
        loss_scale (float): the restored loss scale.
        name (str): the Parameter or argument that holds it.

    Returns:
        float, within the bounds; where the rule needs a power of two, the nearest one below.

    Raises:
        ValueError: if the restored loss scale is not finite and above 0.
    """
    if not (math.isfinite(loss_scale) and loss_scale > 0):
        raise ValueError(
            f"The checkpoint has '{name}' {loss_scale}; a loss scale must be finite and above 0. Resume from "
            f"another checkpoint, or set '{name}'."
        )
    usable: float = rule.nearest_scale(min(max(loss_scale, rule.min_loss_scale), rule.max_loss_scale))
    if usable != loss_scale:
        what = "a power of two " if rule.moves_by_bits else "a loss scale "
        warnings.warn(
            f"The checkpoint has '{name}' {loss_scale}, but {rule.title} needs {what}between 'min_loss_scale' and "
            f"'max_loss_scale': {usable} is used instead.",
            stacklevel=3,
        )
    return usable


def restored_fields(rule: Any, form: int, loaded: Collection[str], values: Mapping[str, Any]) -> set[str]:
    """Return the fields of an update cell whose values a checkpoint has restored, and which must fit the rule.

    Args:
        rule (Rule): the rule.
        form (int): the present form of the state, as :func:`~mindformers_adaptive.rules.fields.form_of` returns it for
            the rule that saved the state; negative if no state of this package was loaded.
        loaded (Collection[str]): the names of the Parameters that were loaded, among them fields.
        values (Mapping[str, Any]): the present state, as ``state()`` of the update cell returns it.

    Returns:
        set[str], the names of the fields.
    """
    own_fields, counters = {field.name for field in kept_fields(rule)}, {field.name for field in STEP_FIELDS}
    is_of_another_rule = abs(form) != form_of(rule)
    if is_of_another_rule and rule.identifying_fields is None:
        # Another rule or another version saved the state, so the rule's own fields may mean something else.
        return counters.intersection(loaded)
    has_only_counters = own_fields.isdisjoint(loaded) and not is_of_another_rule
    clean_steps = values["cur_iter"] - 1 - values["last_overflow_iter"]
    if has_only_counters and rule.counts_clean_steps and clean_steps < values["scale_window"]:
        # MindFormers' own cell saves only counters while its scale window still is the initial window. The clean steps
        # are fewer than this window, so the counters fit.
        return set()
    return (own_fields | counters).intersection(loaded)


def repair(
    rule: Any, values: Mapping[str, Any], loss_scale: float, restored: Collection[str] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Return a restored state, changed so that a rule can continue from it, and a sentence about each change.

    Args:
        rule (Rule): the rule.
        values (dict): as ``state()`` of the update cell returns it.
        loss_scale (float): the loss scale of the next step, within its bounds.
        restored (Collection[str], optional): the names of the fields that a checkpoint had. The rule's own state is
            checked only if ``restored`` has a field of that state or ``cur_iter``. Default: None, all.

    Returns:
        tuple[dict, list[str]]; the list is empty where nothing had to be changed.
    """
    repaired: dict[str, Any] = dict(values)
    problems = keep_within(repaired, STEP_FIELDS[0], 1, STEP_LIMIT, 1)
    last_step = repaired["cur_iter"] - 1
    problems += keep_within(repaired, STEP_FIELDS[1], 0, last_step, last_step, ", the last step")
    problems += keep_within(repaired, STEP_FIELDS[2], 0, STEP_LIMIT, 0)
    skipped, meaning = repaired["skipped_steps"], ", the number of skipped steps"
    problems += keep_within(repaired, STEP_FIELDS[3], 0, skipped, 0, meaning)
    own_fields = {field.name for field in kept_fields(rule)}
    if restored is not None and own_fields.union({"cur_iter"}).isdisjoint(restored):
        return repaired, problems
    fresh = to_values(rule, rule.start(loss_scale), last_step)
    problem = _missing_state(rule, repaired, restored) or _unsound_state(rule, repaired, fresh)
    if problem is None:
        return repaired, rule.fit_state(repaired, restored) + problems
    repaired |= {key: fresh[key] for key in (*own_keys(rule), "last_overflow_iter")}
    if last_step == 0 and own_fields.isdisjoint(restored or own_fields):
        # The checkpoint was saved with another rule before the first training step. No state is lost, so nothing is
        # reported.
        return repaired, problems
    return repaired, [f"{problem}: the rule starts afresh at loss scale {loss_scale:g}.", *problems]


def keep_within(
    values: dict[str, Any], field: Field, least: int, most: int, otherwise: int, meaning: str = ""
) -> list[str]:
    """Set a restored counter to ``otherwise`` if it is below ``least`` or above ``most``.

    Return a list with a sentence about the change, or an empty list.
    """
    value = values[field.name]
    if least <= value <= most:
        return []
    values[field.name] = otherwise
    limits = f"must lie between {least} and {most}{meaning}"
    return [f"The checkpoint has '{field.parameter}' {value}, which {limits}: {otherwise} is used instead."]


def _missing_state(rule: Any, values: Mapping[str, Any], restored: Collection[str] | None) -> str | None:
    if restored is None or "cur_iter" not in restored or rule.identifying_fields is not None:
        return None
    is_there = [field.name in restored for field in kept_fields(rule)]
    if all(is_there):
        return None
    if any(is_there):
        return f"The checkpoint has an older form of the state of {rule.title}"
    return f"The checkpoint has {values['cur_iter'] - 1} steps but no state of {rule.title}"


def _unsound_state(rule: Any, values: Mapping[str, Any], fresh: Mapping[str, Any]) -> str | None:
    # The initial state of a rule may contain inf. For example, a field for the smallest gradient so far starts at inf.
    # So report a value that is not finite only if the initial value is finite.
    if any((np.isfinite(fresh[key]) & ~np.isfinite(values[key])).any() for key in own_keys(rule)):
        return f"The checkpoint has a state of {rule.title} that is not finite"
    problem: str | None = rule.find_state_problem(values)
    return problem


def describe_fresh_start(rule: Any, values: Mapping[str, Any]) -> str:
    """Return a phrase that says how training continues if a checkpoint has no state of the rule.

    Args:
        rule (Rule): the rule.
        values (Mapping[str, Any]): as ``state()`` of the update cell returns it.
    """
    if "scale_window" in rule.start_arguments:
        return f"with a fresh ladder, at window {values['scale_window']}"
    return f"with a fresh state of {rule.title}"
