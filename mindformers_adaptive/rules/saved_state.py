"""The state of a rule as an update cell and a checkpoint have it: conversion there and back, and repair."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from mindformers_adaptive.rules.fields import SIGNALS, STEP_FIELDS, STEP_LIMIT, Field, kept_fields

__all__ = ["all_fields", "describe_fresh_start", "from_values", "keep_within", "own_keys", "repair"]
__all__ += ["repair_loss_scale", "to_values"]


def all_fields(rule: Any) -> tuple[Field, ...]:
    """Return the fields of the state that the update cell keeps.

    Args:
        rule (Union[Rule, type]): a rule, or its class for all that one of its rules may have.

    Returns:
        tuple[Field, ...], the rule's own, then ``STEP_FIELDS`` and the signals.
    """
    return (*kept_fields(rule), *STEP_FIELDS, *(SIGNALS[name] for name in rule.signals))


def own_keys(rule: Any) -> tuple[str, ...]:
    """Return the names of a rule's own state, without the loss scale, the step counters and the signals.

    Args:
        rule (Union[Rule, type]): a rule, or its class.
    """
    return tuple(key for field in kept_fields(rule) for key in field.keys)


def to_values(rule: Any, state: Any, steps: int, last_event: int | None = None) -> dict[str, Any]:
    """Return what the update cell holds after so many steps that led to a state.

    Args:
        rule (Rule): the rule.
        state (NamedTuple): the state of the rule.
        steps (int): how many steps were taken, 0 for the start.
        last_event (int, optional): the step of the last overflow or raise. Default: None, the last step; a rule that
            counts clean steps knows it.

    Returns:
        dict, as ``state()`` of the update cell returns it, without the signals.

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
    own = {key: values[key] for key in own_keys(rule)}
    return own | {field.name: min(values[field.name], STEP_LIMIT) for field in STEP_FIELDS}


def from_values(rule: Any, loss_scale: float, values: Mapping[str, Any]) -> Any:
    """Return the state that :func:`to_values` would turn into these values.

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
    """Return a restored loss scale, moved to the nearer bound with a warning if it is out of bounds.

    Args:
        rule (Rule): the rule.
        loss_scale (float): the restored loss scale.
        name (str): the Parameter or argument that holds it.

    Returns:
        float, within the bounds; where the rule needs a power of two, the nearest one below.

    Raises:
        ValueError: if it is not finite and above 0.
    """
    if not (math.isfinite(loss_scale) and loss_scale > 0):
        raise ValueError(
            f"The checkpoint has '{name}' {loss_scale}; a loss scale must be finite and above 0. Resume from "
            f"another checkpoint, or set '{name}'."
        )
    bounded = min(max(loss_scale, rule.min_loss_scale), rule.max_loss_scale)
    if bounded != loss_scale:
        warnings.warn(
            f"The checkpoint has '{name}' {loss_scale}, which is not between 'min_loss_scale' and "
            f"'max_loss_scale': {bounded} is used.",
            stacklevel=3,
        )
    power: float = rule.nearest_scale(bounded)
    if power != bounded:
        warnings.warn(
            f"The checkpoint has '{name}' {bounded}, and this cell needs a power of two: {power} is used.",
            stacklevel=3,
        )
    return power


def repair(
    rule: Any, values: Mapping[str, Any], loss_scale: float, restored: Collection[str] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Return values that a rule can go on with, and a sentence for each thing that had to be changed.

    Args:
        rule (Rule): the rule.
        values (dict): as ``state()`` of the update cell returns it.
        loss_scale (float): for the next step, within the bounds.
        restored (Collection[str], optional): the fields that a checkpoint had, by name. Default: None, all.

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
    problem = _missing_state(rule, repaired, restored) or _unsound_state(rule, repaired)
    if problem is None:
        return repaired, rule.fit_state(repaired, restored) + problems
    start = to_values(rule, rule.start(loss_scale), repaired["cur_iter"] - 1)
    repaired |= {key: start[key] for key in (*own_keys(rule), "last_overflow_iter")}
    return repaired, [f"{problem}: it starts afresh at loss scale {loss_scale:g}.", *problems]


def keep_within(
    values: dict[str, Any], field: Field, least: int, most: int, otherwise: int, meaning: str = ""
) -> list[str]:
    """Set a counter that no run can reach to another value, and return a sentence if it was one."""
    value = values[field.name]
    if least <= value <= most:
        return []
    values[field.name] = otherwise
    limits = f"must lie between {least} and {most}{meaning}"
    return [f"The checkpoint has '{field.parameter}' {value}, which {limits}: {otherwise} is used."]


def _missing_state(rule: Any, values: Mapping[str, Any], restored: Collection[str] | None) -> str | None:
    if restored is None or "cur_iter" not in restored or rule.mends_missing_state:
        return None
    there = [field.name in restored for field in kept_fields(rule)]
    if all(there) or values["cur_iter"] <= 1:
        return None
    if any(there):
        return f"The checkpoint has an older form of the state of {rule.title}"
    return f"The checkpoint has {values['cur_iter'] - 1} steps but no state of {rule.title}"


def _unsound_state(rule: Any, values: Mapping[str, Any]) -> str | None:
    if not all(np.isfinite(values[key]).all() for key in own_keys(rule)):
        return f"The checkpoint has a state of {rule.title} that is not finite"
    problem: str | None = rule.find_state_problem(values)
    return problem


def describe_fresh_start(rule: Any, values: Mapping[str, Any]) -> str:
    """Return how training goes on where a checkpoint has no state, for a sentence.

    Args:
        rule (Rule): the rule.
        values (Mapping[str, Any]): as ``state()`` of the update cell returns it.
    """
    if "scale_window" in rule.start_arguments:
        return f"with a fresh ladder, at window {values['scale_window']}"
    return f"with a fresh state of {rule.title}"
