"""A configuration of the gradient-guided rule, and grids of them."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from mindformers_adaptive.lab.replay.configuration import yaml_number
from mindformers_adaptive.rules.guided import GuidedRule

__all__ = ["GuidedConfiguration", "guided_grid"]


@dataclass(frozen=True)
class GuidedConfiguration:
    """The arguments of ``GradientGuidedLossScaleUpdateCell``, under the same names, and refused as the cell does.

    Args:
        loss_scale_value (float): the initial loss scale, a power of two. Default: 2**16, as of
            :class:`~mindformers_adaptive.lab.replay.configuration.Configuration`.
        exchange_rate, min_loss_scale, max_loss_scale: as in :class:`~mindformers_adaptive.rules.guided.GuidedRule`,
            with its defaults.

    Raises:
        TypeError: if an argument is not of its type.
        ValueError: if an argument is out of its range, or ``loss_scale_value`` is not a power of two: what the cell
            would only warn of is not worth a replay.

    Examples:
        >>> GuidedConfiguration(exchange_rate=5).label
        'guided exchange_rate=5'
    """

    loss_scale_value: float = 2.0**16
    exchange_rate: float = 1.0
    min_loss_scale: float = 1.0
    max_loss_scale: float | None = None

    def __post_init__(self) -> None:
        rule = GuidedRule(self.exchange_rate, min_loss_scale=self.min_loss_scale, max_loss_scale=self.max_loss_scale)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            try:
                rule.start(self.loss_scale_value)
            except UserWarning as warning:
                raise ValueError(f"{warning} A configuration must not rely on that: give a power of two.") from None
        object.__setattr__(self, "_rule", rule)

    @property
    def rule(self) -> GuidedRule:
        """The rule that the configuration describes."""
        rule: GuidedRule = self._rule  # type: ignore[attr-defined]
        return rule

    @property
    def label(self) -> str:
        """A short name: which rule, and whatever is not the default."""
        changed = [(field.name, getattr(self, field.name)) for field in fields(self)]
        defaults = {field.name: field.default for field in fields(self)}
        return " ".join(["guided", *(f"{name}={value:g}" for name, value in changed if value != defaults[name])])

    def scale_sense(self) -> str:
        """Return the section ``scale_sense`` for ``runner_wrapper`` in MindFormers' YAML, as text to paste.

        Examples:
            >>> print(GuidedConfiguration(exchange_rate=0.5).scale_sense(), end="")
            scale_sense:
              type: GradientGuidedLossScaleUpdateCell
              loss_scale_value: 65536
              exchange_rate: 0.5
        """
        usual = ("loss_scale_value", "exchange_rate")
        values = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name in usual or getattr(self, field.name) != field.default
        }
        lines = [f"  {name}: {yaml_number(value)}" for name, value in values.items()]
        return "\n".join(["scale_sense:", "  type: GradientGuidedLossScaleUpdateCell", *lines, ""])


def guided_grid(**values: Iterable[Any]) -> list[GuidedConfiguration]:
    """Return all combinations of values.

    Args:
        values: for names of :class:`GuidedConfiguration`'s arguments, the values to try.

    Returns:
        list[GuidedConfiguration], the last name varying fastest.

    Raises:
        TypeError: if a name is none of the arguments', or a value not of its type.
        ValueError: if a value is out of its range.

    Examples:
        >>> [one.label for one in guided_grid(exchange_rate=[0.5, 1])]
        ['guided exchange_rate=0.5', 'guided']
    """
    names = [field.name for field in fields(GuidedConfiguration)]
    unknown = sorted(values.keys() - set(names))
    if unknown:
        raise TypeError(f"A grid must name arguments of the rule ({', '.join(names)}), but got {unknown}.")
    return [
        GuidedConfiguration(**dict(zip(values, chosen, strict=True))) for chosen in itertools.product(*values.values())
    ]
