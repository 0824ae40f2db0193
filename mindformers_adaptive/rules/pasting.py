"""Settings as Python text to paste: the call of an update cell's class, with the arguments that the class takes."""

from collections.abc import Mapping
from numbers import Real
from typing import Any

from mindformers_adaptive.rules import RULES
from mindformers_adaptive.rules.description import all_arguments, arguments_of
from mindformers_adaptive.rules.formats import Format
from mindformers_adaptive.rules.rule import Rule


def cell_call(rule_class: type[Rule], values: Mapping[str, Any]) -> str:
    """Return the call of the update cell of a rule.

    Args:
        rule_class (type): the class of the rule.
        values (Mapping): the arguments of the cell, by name.

    Examples:
        >>> from mindformers_adaptive.rules.guided import GuidedRule
        >>> print(cell_call(GuidedRule, {"loss_scale_value": 65536.0, "margin": 8}), end="")
        GradientGuidedLossScaleUpdateCell(
            loss_scale_value=65536,
            margin=8,
        )
    """
    name = f"{rule_class.cell}UpdateCell"
    if rule_class not in RULES.values():
        # The cell of any other rule takes the rule as module.Class.
        name, values = Rule.cell, {"rule": f"{rule_class.__module__}.{rule_class.__qualname__}", **values}
    lines = [f"    {key}={python_value(value)}," for key, value in values.items()]
    return "\n".join([f"{name}(", *lines, ")", ""])


def arguments_of_rule(rule: Rule) -> dict[str, Any]:
    """Return the arguments of a rule's update cell by name, without most of those that have their default values.

    Examples:
        >>> from mindformers_adaptive.rules.guided import GuidedRule
        >>> arguments_of_rule(GuidedRule()), arguments_of_rule(GuidedRule(max_loss_scale=2.0**20))
        ({'margin': 2}, {'margin': 2, 'max_loss_scale': 1048576.0})
    """
    parameters = arguments_of(type(rule))
    is_complete = not any(each.default is each.empty for each in parameters.values())
    default = vars(type(rule)()) if is_complete else {}
    arguments = {}
    for name in all_arguments(type(rule)):
        if name in rule.start_arguments:
            arguments[name] = getattr(rule.start(rule.min_loss_scale), name)
        elif name in parameters and (name in rule.usual_arguments or vars(rule)[name] != default.get(name)):
            value = vars(rule)[name]
            arguments[name] = value.to_config() if isinstance(value, Format) else value
    return arguments


def python_value(value: Any) -> str:
    """Return a value as Python text.

    Examples:
        >>> python_value(65536.0), python_value(0.5), python_value("float16"), python_value(None)
        ('65536', '0.5', "'float16'", 'None')
    """
    is_whole = isinstance(value, Real) and not isinstance(value, bool) and float(value).is_integer()
    return str(int(value)) if is_whole else repr(value)
