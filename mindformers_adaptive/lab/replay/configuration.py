"""A configuration of the adaptive rule, and grids of them."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any

from mindformers_adaptive.rules.adaptive import AdaptiveRule, LossScaleState
from mindformers_adaptive.rules.ladder import DEFAULT_MAX_SCALE_WINDOW, DEFAULT_MIN_SCALE_WINDOW, window_ladder

__all__ = ["Configuration", "grid", "yaml_number"]


@dataclass(frozen=True)
class Configuration:
    """The arguments of ``AdaptiveLossScaleUpdateCell``, under the same names, refused where the cell refuses them.

    A ladder of one window is dynamic loss scaling: :meth:`dynamic`.

    Args:
        loss_scale_value (float): the initial loss scale. Default: 2**16, the usual start where the scale is known
            roughly, as in MindFormers' ``TrainingArguments``.
        scale_window (int, optional): the window to start with, in steps. Default: None, the smallest.
        scale_factor, max_scale_window, min_scale_window, min_loss_scale, max_loss_scale, hysteresis,
        shrink_from_min_window: as in :class:`~mindformers_adaptive.rules.adaptive.AdaptiveRule`, with its defaults.

    Raises:
        TypeError: if an argument is not of its type.
        ValueError: if an argument is out of its range, ``scale_window`` is not on the ladder, or
            ``max_scale_window`` is below ``min_scale_window``: what the cell would only warn of is not worth a replay.

    Examples:
        >>> Configuration(min_scale_window=50).rule.ladder
        (50, 100, 200, 500, 1000)
        >>> Configuration.dynamic(200).rule.ladder
        (200,)
    """

    loss_scale_value: float = 2.0**16
    scale_factor: float = 2
    scale_window: int | None = None
    max_scale_window: int = DEFAULT_MAX_SCALE_WINDOW
    min_scale_window: int = DEFAULT_MIN_SCALE_WINDOW
    min_loss_scale: float = 1.0
    max_loss_scale: float | None = None
    hysteresis: int = 1
    shrink_from_min_window: bool = False

    def __post_init__(self) -> None:
        arguments = {field.name: getattr(self, field.name) for field in fields(self)}
        of_start = arguments.pop("loss_scale_value"), arguments.pop("scale_window")
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            try:
                rule = AdaptiveRule(**arguments)
                start = rule.start(*of_start)
            except UserWarning as warning:
                raise ValueError(f"{warning} A configuration must not rely on that: give windows that fit.") from None
        object.__setattr__(self, "_rule", rule)
        object.__setattr__(self, "_start", start)

    @classmethod
    def dynamic(cls, scale_window: int, **others: Any) -> Configuration:
        """Return MindSpore's dynamic loss scaling, but that the scale stays finite: a ladder of one window.

        Args:
            scale_window (int): the window, in steps.
            others: the other arguments of :class:`Configuration`, by name.
        """
        return cls(scale_window=scale_window, max_scale_window=scale_window, min_scale_window=scale_window, **others)

    @property
    def rule(self) -> AdaptiveRule:
        """The rule that the configuration describes."""
        rule: AdaptiveRule = self._rule  # type: ignore[attr-defined]
        return rule

    @property
    def start(self) -> LossScaleState:
        """The state before the first step."""
        start: LossScaleState = self._start  # type: ignore[attr-defined]
        return start

    @property
    def label(self) -> str:
        """A short name: which rule, its windows, and whatever is not the default."""
        if self.max_scale_window == self.min_scale_window:
            windows = f"dynamic {self.min_scale_window}"
        else:
            windows = f"adaptive {self.min_scale_window}-{self.max_scale_window}"
        implied = {"max_scale_window", "min_scale_window"}
        if self.scale_window == self.start.scale_window == self.min_scale_window:
            implied.add("scale_window")
        others = [
            f"{field.name}={getattr(self, field.name):g}"
            for field in fields(self)
            if field.name not in implied and getattr(self, field.name) != field.default
        ]
        return " ".join([windows, *others])

    def scale_sense(self) -> str:
        """Return the section ``scale_sense`` for ``runner_wrapper`` in MindFormers' YAML, as text to paste.

        Arguments without which the cell has these values anyway are left out, but for the usual five.

        Examples:
            >>> print(Configuration(min_scale_window=50, hysteresis=2).scale_sense(), end="")
            scale_sense:
              type: AdaptiveLossScaleUpdateCell
              loss_scale_value: 65536
              scale_factor: 2
              scale_window: 50
              max_scale_window: 1000
              min_scale_window: 50
              hysteresis: 2
        """
        usual = ("loss_scale_value", "scale_factor", "scale_window", "max_scale_window", "min_scale_window")
        values = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name in usual or getattr(self, field.name) != field.default
        }
        values["scale_window"] = self.start.scale_window
        lines = [f"  {name}: {yaml_number(value)}" for name, value in values.items()]
        return "\n".join(["scale_sense:", "  type: AdaptiveLossScaleUpdateCell", *lines, ""])


def grid(**values: Iterable[Any]) -> list[Configuration]:
    """Return all combinations of values whose windows fit each other.

    Left out are those whose largest window is below the smallest, and those that start at a window that is not on
    their ladder.

    Args:
        values: for names of :class:`Configuration`'s arguments, the values to try.

    Returns:
        list[Configuration], the last name varying fastest.

    Raises:
        TypeError: if a name is none of the arguments', or a value not of its type.
        ValueError: if a value is out of its range, or if no combination is left.

    Examples:
        >>> [one.label for one in grid(min_scale_window=[20, 50], max_scale_window=[20, 1000])]
        ['dynamic 20', 'adaptive 20-1000', 'adaptive 50-1000']
    """
    names = [field.name for field in fields(Configuration)]
    unknown = sorted(values.keys() - set(names))
    if unknown:
        raise TypeError(f"A grid must name arguments of the rule ({', '.join(names)}), but got {unknown}.")
    tried = {name: list(choices) for name, choices in values.items()}
    combinations = [dict(zip(tried, chosen, strict=True)) for chosen in itertools.product(*tried.values())]
    configurations = [Configuration(**combination) for combination in combinations if _windows_fit(**combination)]
    if not configurations:
        raise ValueError(
            "A grid must have at least one combination with 'scale_window' on the ladder from 'min_scale_window' to "
            f"'max_scale_window', but got {tried}. Add windows that fit each other."
        )
    return configurations


def _windows_fit(
    max_scale_window: int = DEFAULT_MAX_SCALE_WINDOW,
    min_scale_window: int = DEFAULT_MIN_SCALE_WINDOW,
    scale_window: int | None = None,
    **_others: Any,
) -> bool:
    if max_scale_window < min_scale_window:
        return False
    return scale_window is None or scale_window in window_ladder(max_scale_window, min_scale_window)


def yaml_number(value: float | bool) -> str:
    """Return a number or a bool as YAML 1.1 reads it.

    Examples:
        >>> yaml_number(65536.0), yaml_number(1e-05), yaml_number(True)
        ('65536', '1.0e-05', 'True')
    """
    if isinstance(value, (bool, Integral)):
        return str(value)
    if float(value).is_integer():
        return str(int(value))
    digits, exponent, power = repr(float(value)).partition("e")
    # YAML 1.1 reads 1e-05 as text, and 1.0e-05 as a number.
    return digits + ("" if "." in digits else ".0") + exponent + power
