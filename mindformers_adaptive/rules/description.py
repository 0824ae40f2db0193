"""Checks of what the author of a rule writes, before it is used."""

from __future__ import annotations

import inspect
import keyword
import math
from collections.abc import Mapping
from typing import Any

from mindformers_adaptive.rules.checks import LARGEST_INT32, to_float32
from mindformers_adaptive.rules.fields import SIGNALS, STEP_FIELDS

__all__ = ["DEFAULT_LOSS_SCALE", "all_arguments", "arguments_of", "check_description", "checked_value"]

# The initial loss scale of MindFormers' TrainingArguments.
DEFAULT_LOSS_SCALE = 2.0**16

# What the package itself calls something in a state, a record or a step.
_TAKEN = {"loss_scale", "exponent", "replace", "overflow", "step"}
_TAKEN |= {"min_loss_scale", "max_loss_scale", "min_exponent", "max_exponent", "loss", "next_loss_scale"}
_TAKEN |= {"gradient_known", "max_safe_exponent", *SIGNALS, *(field.name for field in STEP_FIELDS)}


def arguments_of(rule_class: type[Any]) -> dict[str, inspect.Parameter]:
    """Return the arguments of a rule's constructor, by name.

    Those that ``**bounds`` hands on are the arguments of the next constructor.

    Examples:
        >>> from mindformers_adaptive.rules.guided import GuidedRule
        >>> list(arguments_of(GuidedRule))[:2]
        ['exchange_rate', 'scale_factor']
    """
    found: dict[str, inspect.Parameter] = {}
    for owner in rule_class.__mro__:
        if "__init__" not in vars(owner):
            continue
        parameters = list(inspect.signature(owner.__init__).parameters.values())[1:]
        hands_on = any(one.kind is one.VAR_KEYWORD for one in parameters)
        found |= {one.name: one for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)} | found
        if not hands_on:
            break
    return found


def all_arguments(rule_class: type[Any]) -> dict[str, Any]:
    """Return the arguments of a rule, the initial loss scale and those of its start, with their defaults.

    Args:
        rule_class (type): the class of the rule.

    Returns:
        dict[str, Any], the usual ones first; ``inspect.Parameter.empty`` for an argument without a default.

    Examples:
        >>> from mindformers_adaptive.rules.guided import GuidedRule
        >>> list(all_arguments(GuidedRule).items())[:3]
        [('loss_scale_value', 65536.0), ('exchange_rate', 1.0), ('scale_factor', 2)]
    """
    of_start = inspect.signature(rule_class.start).parameters
    defaults = {name: parameter.default for name, parameter in arguments_of(rule_class).items()}
    defaults |= {name: of_start[name].default for name in rule_class.start_arguments}
    defaults["loss_scale_value"] = DEFAULT_LOSS_SCALE
    return {name: defaults[name] for name in dict.fromkeys((*rule_class.usual_arguments, *defaults))}


def check_description(rule: Any) -> None:
    """Raise ValueError for what is wrong with a rule's name, state, signals or arguments.

    Args:
        rule (Rule): a rule after its constructor.
    """
    of = f"The rule {rule.name!r} of {type(rule).__module__}.{type(rule).__qualname__}"
    if not isinstance(rule.name, str) or not rule.name.isidentifier():
        raise ValueError(f"{of} must have a name of letters, digits and '_', such as name = 'halve'.")
    for name in arguments_of(type(rule)):
        if not hasattr(rule, name):
            raise ValueError(f"{of} must keep its argument {name!r} as an attribute: write self.{name} = {name}.")
    for signal in rule.signals if isinstance(rule.signals, (tuple, list)) else (rule.signals,):
        if signal not in SIGNALS:
            raise ValueError(f"{of} must have signals = ('largest_gradient',) or none, but has {rule.signals!r}.")
    if not isinstance(rule.state, Mapping):
        raise ValueError(f"{of} must have its state as a dict of names and dtypes, but has {rule.state!r}.")
    seen: set[str] = set()
    for field in rule.fields:
        for key in {field.name, *field.keys}:
            if not isinstance(key, str) or not key.isidentifier() or keyword.iskeyword(key) or key.startswith("_"):
                raise ValueError(f"{of} has {key!r} in its state, which must be a name of letters, digits and '_'.")
            if key in seen or key in _TAKEN:
                raise ValueError(f"{of} has {key!r} in its state, a name that is taken. Choose another one.")
        seen |= {field.name, *field.keys}
    for key in rule.recorded:
        if key not in {key for field in rule.fields for key in field.keys}:
            raise ValueError(f"{of} has {key!r} in 'recorded', which is no part of its state.")


def checked_value(rule: Any, key: str, dtype: str, value: Any, like: Any) -> Any:
    """Return a value of the first state as the update cell keeps it, or raise ValueError.

    Args:
        rule (Rule): the rule.
        key (str): the name of the value.
        dtype (str): "int32" or "float32".
        value (Any): a number, or a sequence for a vector.
        like (Any): a number, or a tuple of as many.
    """
    if isinstance(like, (tuple, list)):
        numbers = list(value) if hasattr(value, "__len__") else [value]
        if len(numbers) != len(like):
            raise ValueError(
                f"The first state of the rule {rule.name!r} has {key!r} of {len(numbers)}, not {len(like)}."
            )
        return tuple(checked_value(rule, key, dtype, one, 0) for one in numbers)
    number = value.item() if hasattr(value, "item") else value
    if dtype == "int32":
        fits = type(number) is int and abs(number) <= LARGEST_INT32
    else:
        fits = type(number) in (int, float) and (abs(number) == math.inf or not math.isinf(to_float32(number)))
    if not fits:
        raise ValueError(f"The first state of the rule {rule.name!r} has {key!r} {value!r}, which is no {dtype}.")
    return int(number) if dtype == "int32" else to_float32(number)
