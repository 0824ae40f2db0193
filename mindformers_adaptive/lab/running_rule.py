"""Rules that run: a rule with its present state, and a function that starts a rule by its name and parameters.

A preset is a rule that reproduces the loss scaler of another system, with the names and defaults used there. A comment
above each preset names the class that the preset reproduces. If that class has no defaults, the comment says which
defaults are used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from mindformers_adaptive.lab.dynamic_rule import FLOAT32, FLOAT32_FLOAT64_FACTORS, FLOAT64, DynamicRule
from mindformers_adaptive.rules import RULES, find_rule, is_rule_name
from mindformers_adaptive.rules.checks import require_flag, require_integer, require_number
from mindformers_adaptive.rules.description import DEFAULT_LOSS_SCALE, all_arguments
from mindformers_adaptive.rules.rule import Rule
from mindformers_adaptive.text.nearest import did_you_mean

__all__ = ["PRESETS", "REMOVED_PRESETS", "RULE_NAMES", "Parameter", "Preset", "RunningRule", "rule_and_state"]
__all__ += ["start_rule"]


# A function that takes the name and the value of a parameter, and returns the value in the right type or raises an
# error.
_Check = Callable[[str, object], object]


def _number(wanted: str, accepts: Callable[[float], bool], remedy: str) -> _Check:
    return lambda name, value: require_number(name, value, wanted, accepts, remedy)


_positive = _number("a finite number above 0", lambda number: number > 0, "Loss scales are usually 1 to 2^32.")
_not_negative = _number("a finite number of at least 0", lambda number: number >= 0, "0 means no limit.")
_factor_above_one = _number("a finite number above 1", lambda number: number > 1, "The usual value is 2.")
_ratio_below_one = _number("a number between 0 and 1", lambda number: 0 < number < 1, "The usual value is 0.5.")
_steps: _Check = partial(require_integer, least=1, remedy="Give a positive number of steps.")


class Parameter(NamedTuple):
    """A parameter of a preset, which reproduces the loss scaler of another system, such as PyTorch.

    Attributes:
        sets (str): the argument of ``DynamicRule`` or of its ``start()`` that the parameter sets.
        default (object): the value if the parameter is left out.
        check (Callable): takes the name of the parameter and a value, and returns the value in its type or raises.
    """

    sets: str
    default: Any
    check: _Check


class Preset(NamedTuple):
    """How ``DynamicRule`` imitates a framework's loss scaler: the scaler's parameters, and the rule's fixed arguments.

    Attributes:
        parameters (Mapping[str, Parameter]): the parameters of the loss scaler, by name.
        constants (Mapping[str, object]): arguments of ``DynamicRule`` that no parameter sets.
        aliases (Mapping[str, str]): further names of parameters, each with the main name of the parameter.
    """

    parameters: Mapping[str, Parameter]
    constants: Mapping[str, Any]
    aliases: Mapping[str, str] = {}


_scale = partial(Parameter, "loss_scale", check=_positive)
_window = partial(Parameter, "scale_window", check=_steps)
_factor = Parameter("growth_factor", 2.0, _factor_above_one)
_backoff = Parameter("backoff_factor", 0.5, _ratio_below_one)
_tolerance = partial(Parameter, "tolerance", check=_steps)

PRESETS: dict[str, Preset] = {
    # This preset reproduces MindSpore's amp.FixedLossScaleManager. The parameter can also be called 'loss_scale_value',
    # as in nn.FixedLossScaleUpdateCell.
    "fixed": Preset(
        {"loss_scale": _scale(128.0)},
        {"arithmetic": FLOAT64, "growth_factor": 1.0, "backoff_factor": 1.0},
        aliases={"loss_scale_value": "loss_scale"},
    ),
    # This preset reproduces MindSpore's nn.DynamicLossScaleUpdateCell. The defaults and the parameter name
    # 'init_loss_scale' are from DynamicLossScaleManager.
    "dynamic": Preset(
        {"init_loss_scale": _scale(2.0**24), "scale_factor": _factor, "scale_window": _window(2000)},
        {"arithmetic": FLOAT32, "reciprocal": True, "floor": 1.0},
        aliases={"loss_scale_value": "init_loss_scale"},
    ),
    # This preset reproduces PyTorch's torch.amp.GradScaler, with the arithmetic of the kernel _amp_update_scale_, which
    # updates the loss scale.
    "torch": Preset(
        {
            "init_scale": _scale(2.0**16),
            "growth_factor": _factor,
            "backoff_factor": _backoff,
            "growth_interval": _window(2000),
        },
        {"arithmetic": FLOAT32_FLOAT64_FACTORS, "stays_finite": True},
    ),
    # This preset reproduces DynamicGradScaler of Megatron-LM core. This class has no defaults, so use the defaults of
    # OptimizerConfig and the factors that get_megatron_optimizer passes.
    "megatron": Preset(
        {
            "initial_scale": _scale(2.0**32),
            "min_scale": Parameter("floor", 1.0, _positive),
            "growth_factor": _factor,
            "backoff_factor": _backoff,
            "growth_interval": _window(1000),
            "hysteresis": _tolerance(2),
        },
        {"arithmetic": FLOAT32},
    ),
    # This preset reproduces DeepSpeed's runtime.fp16.loss_scaler.DynamicLossScaler, which the ZeRO optimizers use.
    "deepspeed": Preset(
        {
            "init_scale": _scale(2.0**32),
            "scale_factor": _factor,
            "scale_window": _window(1000),
            "min_scale": Parameter("floor", 1.0, _not_negative),
            "delayed_shift": _tolerance(1),
            "consecutive_hysteresis": Parameter("clean_step_forgives", False, require_flag),
            "raise_error_at_min_scale": Parameter("stops_at_floor", True, require_flag),
        },
        {"arithmetic": FLOAT64},
    ),
}

# Presets that this package has removed, each with the most similar rule that is left.
REMOVED_PRESETS = {
    "metaseq": "deepspeed:init_scale=4,scale_window=256",
    "fairseq": "deepspeed:init_scale=2^15,scale_window=2000",
    "apex_hysteresis": "torch",
    "apex": "torch",
    "dynamic_scaler": "dynamic",
    "tensorflow": "dynamic:init_loss_scale=2^15",
    "tensorflow_contrib": "megatron:initial_scale=2^15,growth_interval=2000,backoff_factor=0.8",
    "keras": "torch:init_scale=2^15",
    "keras2": "dynamic:init_loss_scale=2^15",
    "deepspeed_fused": "deepspeed",
    "deepspeed_unfused": "deepspeed:init_scale=2^16,min_scale=0.25",
    "jmp": "dynamic:init_loss_scale=2^15",
    "paddle": "dynamic:init_loss_scale=2^16",
}


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
    All others are rows of ``PRESETS`` of this module, each with its source,
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
