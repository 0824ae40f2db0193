"""Find loss-scaling rules by name, or write your own rule with :class:`Rule`."""

import inspect
from typing import Any

from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.rules.checks import imported
from mindformers_adaptive.rules.description import arguments_of
from mindformers_adaptive.rules.fields import float32, int32
from mindformers_adaptive.rules.formats import Format, find_format
from mindformers_adaptive.rules.guided import GuidedRule
from mindformers_adaptive.rules.rule import Rule
from mindformers_adaptive.text.nearest import describe_wrong

__all__ = ["RULES", "Format", "Rule", "find_format", "find_rule", "is_rule_name", "make_rule"]
__all__ += ["rule_of_cell"]
__all__ += ["float32", "int32"]

# Names that this package had: former forms of a rule and of its state, and functions that are now in ``xp``.
_FORMER = ("TextRule", "Field", "argmin", "count", "floor", "maximum", "minimum", "stack", "tabulate", "take", "where")

# The rules of this package, by name.
RULES: dict[str, type[Rule]] = {rule.name: rule for rule in (AdaptiveRule, GuidedRule)}


def is_rule_name(name: object) -> bool:
    """Return whether a value names a rule of this package, or has the form ``module.Class`` of a user's rule."""
    return isinstance(name, str) and (name in RULES or "." in name)


def rule_of_cell(cell: object) -> type[Rule] | None:
    """Return this package's rule for an update cell's class name or YAML ``type``; None if there is no such rule."""
    # The name of a class ends in UpdateCell; the short name in YAML does not.
    short = {rule.cell.removesuffix("UpdateCell"): rule for rule in RULES.values() if rule.cell != Rule.cell}
    return short.get(cell.removesuffix("UpdateCell")) if isinstance(cell, str) else None


def find_rule(rule: str | type[Rule]) -> type[Rule]:
    """Return the class of a loss-scaling rule, which is given by its name or as a class.

    Args:
        rule (Union[str, type]): the name of one of ``RULES``; ``module.Class`` of your own rule, where the module
            lies in the current folder or can be imported; or the class itself.

    Returns:
        type, a subclass of :class:`Rule`.

    Raises:
        TypeError: if ``rule`` is neither a string nor the class of a rule.
        ValueError: if there is no such rule.

    Examples:
        >>> find_rule("guided").cell
        'GradientGuidedLossScale'
    """
    rule_class: Any = RULES.get(rule, rule) if isinstance(rule, str) else rule
    if isinstance(rule_class, str):
        wanted = (
            f"'rule' must be {', '.join(map(repr, RULES))}, or 'module.Class' of a rule of your own in the current "
            "folder or in Python's search path for modules, but"
        )
        rule_class = imported(rule_class, wanted)
    if not (inspect.isclass(rule_class) and issubclass(rule_class, Rule)):
        # Numbers, and Tensors of one element.
        if hasattr(rule, "__float__"):
            raise TypeError(
                f"'rule' must be a rule's name or class, or a rule, but got {rule!r}. If rule and loss scale are "
                "swapped, give the rule first and the loss scale second."
            )
        raise TypeError(
            f"'rule' must be {', '.join(map(repr, RULES))}, 'module.Class' of a rule of your own, or such a class, but "
            f"got {rule!r}. A rule is a subclass of mindformers_adaptive.rules.Rule."
        )
    return rule_class


def make_rule(rule: str | type[Rule] | Rule, **arguments: Any) -> Rule:
    """Create a loss-scaling rule from keyword arguments; return an existing rule unchanged.

    Args:
        rule (Union[str, type, Rule]): a rule, or a name or class as :func:`find_rule` takes it.
        **arguments: arguments of the rule.

    Returns:
        Rule, of the class that :func:`find_rule` returns.

    Raises:
        TypeError: if ``rule`` is not a rule, has no such argument, or exists already and arguments are given.
        ValueError: if there is no such rule, or an argument is out of its range.

    Examples:
        >>> make_rule("guided", margin=5).margin
        5
    """
    if isinstance(rule, Rule):
        if arguments:
            names = ", ".join(arguments)
            raise TypeError(
                f"'rule' is already a rule of the class {type(rule).__name__}, so it cannot be created with the "
                f"arguments {names}. Write these arguments where you create the rule: {type(rule).__name__}(...)."
            )
        return rule
    rule_class = find_rule(rule)
    known = arguments_of(rule_class)
    if wrong := [name for name in arguments if name not in known]:
        raise TypeError(
            f"The rule {rule_class.name!r} has no argument {describe_wrong(wrong, known)}Its arguments are "
            f"{', '.join(known)}."
        )
    return rule_class(**arguments)


def __getattr__(name: str) -> Any:
    if name in _FORMER:
        raise ImportError(
            f"mindformers_adaptive.rules has no {name} any more. A rule is now a subclass of Rule, with a dict as its "
            "state and a method make_step(self, xp), which gets functions such as xp.where. See docs/en/own_rule.md."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
