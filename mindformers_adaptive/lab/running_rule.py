"""Rules that run: a rule with its present state, and a function that starts a rule by its name and parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from mindformers_adaptive.lab.dynamic_rule import DynamicRule
from mindformers_adaptive.lab.presets import PRESETS, REMOVED_PRESETS, Preset
from mindformers_adaptive.rules import RULES, find_rule, is_rule_name
from mindformers_adaptive.rules.description import DEFAULT_LOSS_SCALE, all_arguments
from mindformers_adaptive.rules.rule import Rule
from mindformers_adaptive.text.nearest import did_you_mean

__all__ = ["RULE_NAMES", "RunningRule", "rule_and_state", "start_rule"]

RULE_NAMES = (*RULES, *PRESETS)

# Arguments of DynamicRule.start(). All other arguments of a preset go to the constructor of DynamicRule.
_STARTS = ("loss_scale", "scale_window")


def start_rule(name: str | type[Rule], **params: Any) -> RunningRule:
    """Return the rule with the given name in its first state; the rule may imitate another system, such as PyTorch.

    ``adaptive`` is this package's own rule, with the arguments of ``AdaptiveLossScaleUpdateCell``: ``loss_scale_value``
    (default 65536, as in MindFormers' ``TrainingArguments``), ``scale_window`` (default: the smallest window) and all
    of :class:`~mindformers_adaptive.rules.adaptive.AdaptiveRule`. The others of
    ``mindformers_adaptive.rules.RULES``, and ``module.Class``, a rule of your own, see
    :class:`~mindformers_adaptive.rules.rule.Rule`, take ``loss_scale_value`` (default 65536) and their own arguments.
    All others are rows of ``PRESETS`` in :mod:`mindformers_adaptive.lab.presets`, each with its source,
    parameters and defaults; ``fixed`` keeps ``loss_scale`` (default 128.0, as in MindSpore's
    ``FixedLossScaleManager``).

    Args:
        name (Union[str, type]): one of ``RULE_NAMES``, or a rule of your own: ``module.Class``, or the class.
        **params: the system's own parameters; what is left out has the system's own default.

    Returns:
        RunningRule, before its first step. ``step(overflow, largest_gradient=None)`` returns the loss scale for the
        next step. Rules that use gradients also need the largest unscaled gradient of each applied step. If the
        original system would end the training with an error, ``stopped`` is True from then on and the replay goes on.

    Raises:
        TypeError: if the rule has no such parameter, or a value is not of its type.
        ValueError: if there is no such rule, or a value is out of its range.

    Examples:
        >>> running = start_rule("megatron", initial_scale=1024.0, growth_interval=2, hysteresis=2)
        >>> [running.step(overflow) for overflow in (True, True, False, False)]
        [1024.0, 512.0, 512.0, 1024.0]
        >>> start_rule("adaptive", max_scale_window=1000, min_scale_window=20).scale_window
        20
    """
    if isinstance(name, type) or is_rule_name(name):
        own_rule, state = rule_and_state(name, params)
        return RunningRule(name if isinstance(name, str) else own_rule.name, own_rule, state)
    if name in REMOVED_PRESETS:
        raise ValueError(f"The rule {name!r} was removed. Use the most similar rule, {REMOVED_PRESETS[name]}.")
    if name not in RULE_NAMES:
        message = f"'name' must be one of {', '.join(RULE_NAMES)}, but got {name!r}. "
        raise ValueError((message + did_you_mean(name, RULE_NAMES)).rstrip())
    preset = PRESETS[name]
    values = _values_of(name, preset, params)
    settings = {parameter.sets: values[name] for name, parameter in preset.parameters.items()}
    _check_limits(preset, values)
    start = {key: settings.pop(key) for key in _STARTS if key in settings}
    rule = DynamicRule(**preset.constants, **settings)
    return RunningRule(name, rule, rule.start(**start))


def rule_and_state(name: str | type[Rule], arguments: Mapping[str, Any]) -> tuple[Rule, Any]:
    """Return a loss-scaling rule and the state of the rule before the first step.

    Args:
        name (Union[str, type]): the name or the class of the rule.
        arguments (Mapping): the arguments of the rule and of its start, by name. Arguments left out have defaults.
    """
    rule_class = find_rule(name)
    _refuse_unknown(name, arguments, all_arguments(rule_class))
    of_start = {"loss_scale_value", *rule_class.start_arguments}
    of_rule = {name: value for name, value in arguments.items() if name not in of_start}
    rule = rule_class(**of_rule)
    start_values = {name: value for name, value in arguments.items() if name in of_start}
    return rule, rule.start(**{"loss_scale_value": DEFAULT_LOSS_SCALE, **start_values})


def _values_of(name: str, preset: Preset, params: dict[str, Any]) -> dict[str, Any]:
    """Return the checked values of all parameters of a preset, by their names in the original system."""
    _refuse_unknown(name, params, [*preset.parameters, *preset.aliases])
    values: dict[str, Any] = {}
    for key, value in params.items():
        preset_key = preset.aliases.get(key, key)
        if preset_key in values:
            raise TypeError(f"{key!r} and {preset_key!r} of the rule {name!r} are the same parameter. Give only one.")
        parameter = preset.parameters[preset_key]
        values[preset_key] = parameter.check(key, value)
    return {key: values.get(key, parameter.default) for key, parameter in preset.parameters.items()}


def _refuse_unknown(rule: str | type[Rule], params: Iterable[str], known: Collection[str]) -> None:
    """Raise TypeError if a name in ``params`` is not one of the ``known`` parameters of the rule."""
    name = rule if isinstance(rule, str) else rule.__qualname__
    for key in params:
        if key not in known:
            raise TypeError(
                f"The rule {name!r} has no parameter {key!r}. {did_you_mean(key, known)}"
                f"Its parameters are {', '.join(known)}."
            )


def _check_limits(preset: Preset, values: dict[str, Any]) -> None:
    named = {parameter.sets: name for name, parameter in preset.parameters.items()}
    floor = values[named["floor"]] if "floor" in named else None
    if floor is not None and "loss_scale" in named and values[named["loss_scale"]] < floor:
        raise ValueError(
            f"'{named['loss_scale']}' must be at least '{named['floor']}' ({floor}), but got "
            f"{values[named['loss_scale']]}. Raise '{named['loss_scale']}' or lower '{named['floor']}'."
        )


class RunningRule:
    """A loss-scaling rule and its present state.

    Args:
        name (str): the name of the rule, see :func:`~mindformers_adaptive.lab.running_rule.start_rule`.
        rule (Rule or DynamicRule): the rule, whose ``step()`` returns the state after a step.
        state (NamedTuple): the state before the first step.

    Attributes:
        current (NamedTuple): the current state; do not change it.

    Examples:
        >>> from mindformers_adaptive.lab.running_rule import start_rule
        >>> running = start_rule("torch", init_scale=1024.0, growth_interval=2)
        >>> [running.step(overflow) for overflow in (True, False, False)]
        [512.0, 512.0, 1024.0]
        >>> running.loss_scale, running.scale_window
        (1024.0, 2)
    """

    def __init__(self, name: str, rule: Any, state: Any) -> None:
        self.name = name
        self.rule = rule
        self.current = state

    @property
    def loss_scale(self) -> float:
        """float: the loss scale for the next step."""
        return float(self.current.loss_scale)

    @property
    def scale_window(self) -> int | None:
        """int, optional: after how many clean steps the rule now raises the loss scale; None without a window."""
        window = getattr(self.current, "scale_window", None)
        # In the state of a user's rule, scale_window may be a vector. A vector is not a number of steps, so ignore it.
        return None if isinstance(window, tuple) else window

    @property
    def stopped(self) -> bool:
        """bool: whether the system that this rule imitates would have ended the training with an error by now.

        DeepSpeed's ``DynamicLossScaler`` does so if a step overflows at its smallest scale, unless
        ``raise_error_at_min_scale`` is False. A replay can go on: the scale stays the smallest until a raise.
        """
        return bool(getattr(self.current, "stopped", False))

    def step(self, overflow: bool, largest_gradient: float | None = None) -> float:
        """Update the state after a step that overflowed or was clean, and return the loss scale for the next step.

        Args:
            overflow (bool): whether the step overflowed.
            largest_gradient (float, optional): the largest absolute value of the step's unscaled gradients, if the step
                was applied. Rules that use only the overflow ignore it. Default: None, not known.
        """
        self.current = self.rule.step(self.current, bool(overflow), largest_gradient)
        return self.loss_scale

    def state(self) -> dict[str, Any]:
        """Return the values of the rule's current state by name, as plain Python numbers."""
        return dict(self.current._asdict())

    def __repr__(self) -> str:
        return f"<rule {self.name}: {self.current}>"
