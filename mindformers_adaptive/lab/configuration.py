"""A configuration: a loss-scaling rule and its arguments."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from mindformers_adaptive.lab.running_rule import rule_and_state
from mindformers_adaptive.rules import RULES, find_rule
from mindformers_adaptive.rules.description import all_arguments
from mindformers_adaptive.rules.pasting import cell_call
from mindformers_adaptive.rules.rule import Rule

__all__ = ["Configuration", "yaml_value"]


@dataclass(init=False)
class Configuration:
    """A loss-scaling rule and its arguments, which have the same names and limits as in the rule's update cell.

    The adaptive rule with a single window is dynamic loss scaling, see :meth:`dynamic`.

    Args:
        rule (Union[str, type]): the rule: one of this package by its name, or one of your own as ``module.Class``
            or as the class.
        **arguments: arguments of the rule; those left out have the rule's defaults. Also ``loss_scale_value``, the
            initial loss scale (default 65536, as in MindFormers' ``TrainingArguments``).

    Attributes:
        rule_name (str): the name of the rule, for :func:`~mindformers_adaptive.lab.running_rule.start_rule`.
        arguments (dict[str, Any]): all arguments by name, including those with default values.
        rule (Rule): the rule with these arguments.
        start (NamedTuple): the state of the rule before the first step.

    Raises:
        TypeError: if the rule has no such argument, or an argument has the wrong type.
        ValueError: if there is no such rule, an argument is out of its range, or the cell would give a warning and use
            another value, so that a replay would not show the effect of these arguments.

    Examples:
        >>> Configuration("adaptive", min_scale_window=50).rule.ladder
        (50, 100, 200, 500, 1000)
    """

    rule_name: str
    arguments: dict[str, Any]
    rule: Any = field(compare=False, repr=False)
    start: Any = field(compare=False, repr=False)

    def __init__(self, rule: str | type[Rule], /, **arguments: Any) -> None:
        rule_class = find_rule(rule)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            try:
                configured, start = rule_and_state(rule, arguments)
            except UserWarning as warning:
                raise ValueError(f"{warning} A configuration must have valid values, so give another value.") from None
        path = f"{rule_class.__module__}.{rule_class.__qualname__}"
        name = rule_class.name if rule_class in RULES.values() else path
        self.rule_name = rule if isinstance(rule, str) else name
        self.arguments = {**all_arguments(rule_class), **arguments}
        self.rule, self.start = configured, start

    @classmethod
    def dynamic(cls, scale_window: int, **arguments: Any) -> Configuration:
        """Return the adaptive rule with one window. It is MindSpore's dynamic loss scaling, but the scale stays finite.

        Args:
            scale_window (int): the window, in steps.
            **arguments: the other arguments of the adaptive rule, by name.

        Examples:
            >>> Configuration.dynamic(200).rule.ladder
            (200,)
        """
        windows = dict.fromkeys(("scale_window", "max_scale_window", "min_scale_window"), scale_window)
        return cls("adaptive", **windows, **arguments)

    def scale_sense(self) -> str:
        """Return the section ``scale_sense`` for ``runner_wrapper`` in MindFormers' YAML, as text to paste.

        Arguments with default values are left out, except for ``usual_arguments`` of the rule.

        Examples:
            >>> print(Configuration("adaptive", min_scale_window=50, hysteresis=2).scale_sense(), end="")
            scale_sense:
              type: AdaptiveLossScale
              loss_scale_value: 65536
              scale_factor: 2
              scale_window: 50
              max_scale_window: 1000
              min_scale_window: 50
              hysteresis: 2
        """
        is_ours = type(self.rule) in RULES.values()
        cell = [f"  type: {self.rule.cell}"] if is_ours else [f"  type: {Rule.cell}", f"  rule: {self.rule_name}"]
        lines = [f"  {name}: {yaml_value(value)}" for name, value in self._values().items()]
        return "\n".join(["scale_sense:", *cell, *lines, ""])

    def update_cell(self) -> str:
        """Return the call of the update cell's class with these arguments, as Python text to paste.

        Examples:
            >>> print(Configuration("guided", margin=8).update_cell(), end="")
            GradientGuidedLossScaleUpdateCell(
                loss_scale_value=65536,
                margin=8,
            )
        """
        return cell_call(type(self.rule), self._values())

    def _values(self) -> dict[str, Any]:
        """Return the arguments to write into settings: those that differ from their defaults, and the usual ones."""
        changed = self._changed(self.rule.usual_arguments)
        # Where the default is None, the rule has chosen a value, such as its margin by the format of the gradients.
        values = {name: vars(self.rule).get(name) if value is None else value for name, value in changed}
        return values | {name: getattr(self.start, name) for name in self.rule.start_arguments}

    def _changed(self, always: Sequence[str] = ()) -> list[tuple[str, Any]]:
        rule_class: Any = type(self.rule)
        defaults = all_arguments(rule_class)
        return [(name, value) for name, value in self.arguments.items() if name in always or value != defaults[name]]


def yaml_value(value: Any) -> str:
    """Return a value as YAML 1.1 text.

    Examples:
        >>> yaml_value(65536.0), yaml_value(1e-05), yaml_value(True), yaml_value(None)
        ('65536', '1.0e-05', 'True', 'null')
    """
    if isinstance(value, (bool, Integral)):
        return str(value)
    if not isinstance(value, Real):
        return json.dumps(value)
    number = float(value)
    if number.is_integer():
        return str(int(number))
    digits, exponent, power = repr(number).partition("e")
    # YAML 1.1 reads 1e-05 as text, and 1.0e-05 as a number.
    return digits + ("" if "." in digits else ".0") + exponent + power
