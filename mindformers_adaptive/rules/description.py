"""Check the class and attributes of a loss-scaling rule when the rule is created. Errors address the rule's author."""

import functools
import inspect
import keyword
from collections.abc import Callable, Mapping
from typing import Any

from mindformers_adaptive.rules.checks import fits, to_float32
from mindformers_adaptive.rules.fields import LARGEST_GRADIENT, STEP_FIELDS, is_of_this_package

# The default of the initial loss scale in MindFormers' TrainingArguments.
DEFAULT_LOSS_SCALE = 2.0**16

# Names that this package itself uses in states, records or steps. No field of a rule's state may have such a name.
RESERVED = {"loss_scale", "exponent", "replace", "overflow", "step"}
RESERVED |= {"min_loss_scale", "max_loss_scale", "min_exponent", "max_exponent", "loss", "next_loss_scale"}
RESERVED |= {"history", "recorded", "restored", "resumed", "run", "saved", "inv_scale"}
RESERVED |= {"scale", "scale_sense", "growth_tracker", "hysteresis_tracker", "loss_scaling_run", "loss_scaling_form"}
RESERVED |= {"form"}
RESERVED |= {"gradient_known", "max_safe_exponent", "since_event", LARGEST_GRADIENT.name}
RESERVED |= {field.name for field in STEP_FIELDS}

# Attributes that the class Rule gives to every rule. A user's rule may replace only one of these attributes, the method
# start().
OF_EVERY_RULE = ("start", "step", "fields", "State", "arguments", "moves_by_bits", "nearest_scale")

# Arguments of update cells, loss-scale managers and loss scalers, and keys of a YAML section for loss scaling. No
# argument of a rule may have such a name.
_ARGUMENTS_OF_CELLS = {"loss_scale_value", "init_loss_scale", "scale_value", "history_size"}
_ARGUMENTS_OF_CELLS |= {"rule", "type"}

# Attributes of a rule's class: whether a value is valid, and what it must be.
_ATTRIBUTES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "needs_gradients": (lambda value: isinstance(value, bool), "needs_gradients = True or False"),
    "title": (lambda text: isinstance(text, str) and text.isprintable(), "one line of text as 'title'"),
    "state": (lambda fields: isinstance(fields, Mapping), "'state' as a dict of names and dtypes"),
    "recorded": (
        lambda names: isinstance(names, (tuple, list)) and all(isinstance(name, str) for name in names),
        "'recorded' as a tuple of names, such as ('mean',)",
    ),
}


@functools.cache
def arguments_of(rule_class: Any) -> dict[str, inspect.Parameter]:
    """Return the arguments of a rule's constructor, by name.

    If the constructor takes ``**bounds``, the arguments of the base class's constructor are included.

    Examples:
        >>> from mindformers_adaptive.rules.adaptive import AdaptiveRule
        >>> list(arguments_of(AdaptiveRule))[:2]
        ['scale_factor', 'max_scale_window']
    """
    arguments: dict[str, inspect.Parameter] = {}
    for owner in rule_class.__mro__:
        if "__init__" not in vars(owner):
            continue
        parameters = list(inspect.signature(vars(owner)["__init__"]).parameters.values())[1:]
        for parameter in parameters:
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                arguments.setdefault(parameter.name, parameter)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return arguments


@functools.cache
def all_arguments(rule_class: Any) -> dict[str, Any]:
    """Return by name the defaults of ``loss_scale_value`` and of all arguments of a rule's constructor and start().

    Args:
        rule_class (type): the class of the rule.

    Returns:
        dict[str, Any], defaults by argument, ``usual_arguments`` first; ``inspect.Parameter.empty`` for an argument
        without a default.

    Examples:
        >>> from mindformers_adaptive.rules.adaptive import AdaptiveRule
        >>> list(all_arguments(AdaptiveRule).items())[:3]
        [('loss_scale_value', 65536.0), ('scale_factor', 2.0), ('scale_window', None)]
    """
    of_start = inspect.signature(rule_class.start).parameters
    defaults = {name: parameter.default for name, parameter in arguments_of(rule_class).items()}
    defaults |= {name: of_start[name].default for name in rule_class.start_arguments}
    defaults["loss_scale_value"] = DEFAULT_LOSS_SCALE
    # The constructor of a subclass may lack some of the arguments in ``usual_arguments``.
    usual = [name for name in rule_class.usual_arguments if name in defaults]
    return {name: defaults[name] for name in dict.fromkeys((*usual, *defaults))}


def check_description(rule: Any, base: Any) -> None:
    """Raise ValueError if a rule's name, step, state, arguments or other attributes are invalid.

    Args:
        rule (Rule): the rule, after its constructor has run.
        base (type): the class Rule.
    """
    of = f"The rule {rule.name!r} of {type(rule).__module__}.{type(rule).__qualname__}"
    if not isinstance(rule.name, str) or not rule.name.isidentifier() or keyword.iskeyword(rule.name):
        raise ValueError(f"{of} must have a name of letters, digits and '_', such as name = 'halve'.")
    of_this_package = [known for known in base.__subclasses__() if is_of_this_package(known)]
    if any(known.name == rule.name and not isinstance(rule, known) for known in of_this_package):
        raise ValueError(
            f"{of} has the same name as a rule of this package, so a saved state would be mistaken for the state of "
            "that rule. Choose another name."
        )
    if type(rule).make_step is base.make_step:
        if hasattr(rule, "next_state"):
            raise ValueError(
                f"{of} has a method next_state(), which is no longer called. Define make_step(self, xp), which returns "
                "the step as a function of arrays; checkpoints of the rule go on. See docs/en/own_rule.md."
            )
        raise ValueError(f"{of} does not define its step. Define the method make_step(self, xp).")
    if not hasattr(rule, "min_exponent"):
        raise ValueError(f"{of} must call super().__init__(**bounds) in its constructor.")
    for name in arguments_of(rule.__class__):
        if hasattr(base, name) or name in _ARGUMENTS_OF_CELLS:
            raise ValueError(
                f"{of} has an argument {name!r}, but the class Rule or the update cell already uses this name. Rename "
                "the argument."
            )
        if not hasattr(rule, name):
            raise ValueError(f"{of} must keep its argument {name!r} as an attribute: write self.{name} = {name}.")
    for attribute, (is_sound, wanted) in _ATTRIBUTES.items():
        if not is_sound(value := getattr(rule, attribute)):
            raise ValueError(f"{of} must have {wanted}, but has {value!r}.")
    for name in ("keeps_bounds", "fixed_state", *OF_EVERY_RULE):
        owner = next(owner for owner in type(rule).__mro__ if name in vars(owner))
        if not is_of_this_package(owner) and not (name == "start" and callable(rule.start)):
            raise ValueError(
                f"{of} has {name!r}, which only a rule of this package may have. Leave it out or rename it."
            )
    _check_names(of, rule)


def _check_names(of: str, rule: Any) -> None:
    # In a state dict, the elements of a vector "mean" without named parts are "mean_0", "mean_1" and so on. No other
    # field may have such a name.
    vectors = [field for field in rule.fields if field.shape and not field.parts]
    seen = {f"{field.name}_{index}" for field in vectors for index in range(field.shape[0])}
    seen |= {"clean_steps"} if rule.counts_clean_steps else set()
    for field in rule.fields:
        for key in dict.fromkeys((field.name, *field.keys)):
            if not isinstance(key, str) or not key.isidentifier() or keyword.iskeyword(key) or key.startswith("_"):
                raise ValueError(f"{of} has {key!r} in its state, which must be a name of letters, digits and '_'.")
            if key in RESERVED:
                raise ValueError(
                    f"{of} has {key!r} in its state, but this package uses this name in states, records or steps. "
                    f"Choose another name, none of {', '.join(sorted(RESERVED))}."
                )
            if key in seen:
                raise ValueError(
                    f"{of} has {key!r} in its state, but another field of this state has an element or a counter of "
                    "this name. Rename one of them."
                )
        seen |= {field.name, *field.keys}
    for key in rule.recorded:
        if key not in {key for field in rule.fields if field.parts or not field.shape for key in field.keys}:
            raise ValueError(
                f"{of} has {key!r} in 'recorded', but its state has no number of that name. Remove or correct the name."
            )


def checked_value(rule: Any, key: str, dtype: str, value: Any, like: Any) -> Any:
    """Return a value of a rule's first state as an int, float or tuple; raise ValueError if it does not fit ``dtype``.

    Args:
        rule (Rule): the rule.
        key (str): the name of the value in the state.
        dtype (str): "int32" or "float32".
        value (Any): a number, or a sequence for a vector.
        like (Any): any number if a number is expected; for a vector, a tuple or list of the expected length.
    """
    problem = f"The first state of the rule {rule.name!r} has {key!r} ="
    if isinstance(like, (tuple, list)):
        numbers = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(numbers, (list, tuple)) or len(numbers) != len(like):
            raise ValueError(f"{problem} {value!r}, but this field is a vector. Give a list of {len(like)} numbers.")
        return tuple(checked_value(rule, key, dtype, number, 0) for number in numbers)
    number = value.item() if getattr(value, "size", 0) == 1 else value
    if not fits(number, dtype):
        shown = repr(value) if len(repr(value)) < 80 else f"a {type(value).__name__}"
        raise ValueError(
            f"{problem} {shown}, which is not a valid {dtype} number. Give {key!r} such a number, or change its dtype "
            "in the rule's 'state'."
        )
    return int(number) if dtype == "int32" else to_float32(number)
