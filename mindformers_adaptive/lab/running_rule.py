"""Rules that run: a rule with its present state, and a function that starts a rule by its name and parameters.

A preset is a rule that reproduces the loss scaler of another system, with the names and defaults used there. A comment
above each preset names the class that the preset reproduces. If that class has no defaults, the comment says which
defaults are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from mindformers_adaptive.rules import RULES, find_rule, is_rule_name
from mindformers_adaptive.rules.checks import require_flag, require_integer, require_number, to_float32
from mindformers_adaptive.rules.description import DEFAULT_LOSS_SCALE, all_arguments
from mindformers_adaptive.rules.rule import Rule
from mindformers_adaptive.text.nearest import did_you_mean


class DynamicState(NamedTuple):
    """Everything that :class:`DynamicRule` remembers between two steps.

    Attributes:
        loss_scale (float): the scale for the next step.
        scale_window (int, optional): number of clean steps before a raise; None if the scale never rises.
        clean_steps (int): steps since the last overflow or raise.
        overflows (int): number of overflows since this number was last reset to 0.
        stopped (bool): whether the original system would have ended the training with an error.
    """

    loss_scale: float
    scale_window: int | None = None
    clean_steps: int = 0
    overflows: int = 0
    stopped: bool = False


@dataclass(frozen=True, kw_only=True)
class DynamicRule:
    r"""Dynamic loss scaling: grow after an interval of clean steps, back off once overflows are no longer tolerated.

    .. code-block:: text

        overflow:  clean_steps = 0, overflows += 1
                   if overflows >= tolerance:
                       loss_scale = max(loss_scale * backoff_factor, floor)                         (a drop)
        clean:     clean_steps += 1
                   if clean_steps == scale_window:
                       clean_steps = 0, overflows = 0
                       loss_scale = loss_scale * growth_factor                                     (a raise)

    By default only a raise resets ``overflows``. Until a raise, each overflow from number ``tolerance`` on is a drop.

    Attributes:
        scale_dtype (Callable): rounds the scale to the dtype that it has in the original system: ``to_float32`` for a
            tensor, ``float`` for a Python float. A scale beyond the largest float32 becomes inf there. Products and
            quotients of float32 numbers, computed in float64 and then rounded, equal float32 arithmetic.
        factor_dtype (Callable): rounds the factors to the dtype that they have there.
        growth_factor (float): what a raise multiplies the scale by.
        backoff_factor (float, optional): what a drop multiplies the scale by. None: a drop divides the scale by
            ``growth_factor``, which rounds differently.
        reciprocal (bool): without ``backoff_factor``: whether a drop multiplies by the rounded 1 / ``growth_factor``
            instead of dividing.
        floor (float): the smallest scale that a drop can lead to.
        stays_finite (bool): whether a raise beyond the largest float32 number leaves the scale as it is.
        tolerance (int): how many overflows it takes to drop the scale.
        clean_step_forgives (bool): whether a clean step also resets the count of overflows to 0.
        stops_at_floor (bool): whether the original system ends the training when a scale at the floor would drop.
    """

    scale_dtype: Callable[[float], float]
    factor_dtype: Callable[[float], float]
    growth_factor: float = 2.0
    backoff_factor: float | None = None
    reciprocal: bool = False
    floor: float = 0.0
    stays_finite: bool = False
    tolerance: int = 1
    clean_step_forgives: bool = False
    stops_at_floor: bool = False

    def start(self, loss_scale: float, scale_window: int | None = None) -> DynamicState:
        """Return the state before the first step."""
        return DynamicState(self.scale_dtype(loss_scale), scale_window)

    def step(self, state: DynamicState, overflow: bool, largest_gradient: float | None = None) -> DynamicState:
        """Return the state after a step that overflowed or was clean; ``state`` itself is not changed."""
        loss_scale, window, clean_steps, overflows, stopped = state
        if overflow:
            if overflows + 1 < self.tolerance:
                return DynamicState(loss_scale, window, 0, overflows + 1, stopped)
            stopped = stopped or (self.stops_at_floor and loss_scale == self.floor)
            return DynamicState(self._drop(loss_scale), window, 0, self.tolerance, stopped)
        if clean_steps + 1 != window:
            return DynamicState(
                loss_scale, window, clean_steps + 1, 0 if self.clean_step_forgives else overflows, stopped
            )
        raised = self.scale_dtype(loss_scale * self.factor_dtype(self.growth_factor))
        if not self.stays_finite or math.isfinite(to_float32(raised)):
            loss_scale = raised
        return DynamicState(loss_scale, window, 0, 0, stopped)

    def _drop(self, loss_scale: float) -> float:
        growth = self.factor_dtype(self.growth_factor)
        if self.backoff_factor is not None:
            dropped = loss_scale * self.factor_dtype(self.backoff_factor)
        elif self.reciprocal:
            dropped = loss_scale * self.factor_dtype(1.0 / growth)
        else:
            dropped = loss_scale / growth
        return max(self.scale_dtype(dropped), self.scale_dtype(self.floor))


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
    """

    parameters: Mapping[str, Parameter]
    constants: Mapping[str, Any]


_scale = partial(Parameter, "loss_scale", check=_positive)
_window = partial(Parameter, "scale_window", check=_steps)
_factor = Parameter("growth_factor", 2.0, _factor_above_one)
_backoff = Parameter("backoff_factor", 0.5, _ratio_below_one)
_tolerance = partial(Parameter, "tolerance", check=_steps)

_FLOAT32 = {"scale_dtype": to_float32, "factor_dtype": to_float32}
_FLOAT64 = {"scale_dtype": float, "factor_dtype": float}

PRESETS: dict[str, Preset] = {
    # This preset reproduces MindSpore's amp.FixedLossScaleManager.
    "fixed": Preset(
        {"loss_scale": _scale(128.0)},
        {**_FLOAT64, "growth_factor": 1.0, "backoff_factor": 1.0},
    ),
    # This preset reproduces MindSpore's nn.DynamicLossScaleUpdateCell. The defaults and the parameter name
    # 'init_loss_scale' are from DynamicLossScaleManager.
    "dynamic": Preset(
        {"init_loss_scale": _scale(2.0**24), "scale_factor": _factor, "scale_window": _window(2000)},
        {**_FLOAT32, "reciprocal": True, "floor": 1.0},
    ),
    # This preset reproduces PyTorch's torch.amp.GradScaler, with the arithmetic of the kernel _amp_update_scale_, which
    # updates the loss scale, a float32 tensor, by C++ doubles.
    "torch": Preset(
        {
            "init_scale": _scale(2.0**16),
            "growth_factor": _factor,
            "backoff_factor": _backoff,
            "growth_interval": _window(2000),
        },
        {"scale_dtype": to_float32, "factor_dtype": float, "stays_finite": True},
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
        _FLOAT32,
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
        _FLOAT64,
    ),
}

# Presets that this package has removed, each with the most similar rule that is left.
REMOVED_PRESETS = {
    "apex": "torch",
    "dynamic_scaler": "dynamic",
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
        rule_class = find_rule(name)
        _refuse_unknown(name, params, all_arguments(rule_class))
        of_start = [key for key in ("loss_scale_value", *rule_class.start_arguments) if key in params]
        start = {"loss_scale_value": DEFAULT_LOSS_SCALE, **{key: params.pop(key) for key in of_start}}
        own_rule = rule_class(**params)
        return RunningRule(name if isinstance(name, str) else own_rule.name, own_rule, own_rule.start(**start))
    if name in REMOVED_PRESETS:
        raise ValueError(f"The rule {name!r} was removed. Use the most similar rule, {REMOVED_PRESETS[name]}.")
    if name not in RULE_NAMES:
        message = f"'name' must be one of {', '.join(RULE_NAMES)}, but got {name!r}. "
        raise ValueError((message + did_you_mean(name, RULE_NAMES)).rstrip())
    preset, values = PRESETS[name], _values_of(name, params)
    settings = {parameter.sets: values[key] for key, parameter in preset.parameters.items()}
    if settings["loss_scale"] < settings.get("floor", 0.0):
        raise ValueError(
            f"'{start_argument(name)}' must be at least 'min_scale' ({settings['floor']}), but got "
            f"{settings['loss_scale']}. Raise '{start_argument(name)}' or lower 'min_scale'."
        )
    start = {key: settings.pop(key) for key in _STARTS if key in settings}
    rule = DynamicRule(**preset.constants, **settings)
    return RunningRule(name, rule, rule.start(**start))


def start_argument(name: str) -> str:
    """Return the name of the argument of a rule that is the loss scale to start from.

    Each rule takes ``loss_scale_value`` too.
    """
    parameters = PRESETS[name].parameters if name in PRESETS else {}
    return next((key for key, parameter in parameters.items() if parameter.sets == "loss_scale"), "loss_scale_value")


def _values_of(name: str, params: dict[str, Any]) -> dict[str, Any]:
    """Return the checked values of all parameters of a preset, by their names in the original system."""
    preset = PRESETS[name]
    _refuse_unknown(name, params, [*preset.parameters, "loss_scale_value"])
    values: dict[str, Any] = {}
    for key, value in params.items():
        preset_key = start_argument(name) if key == "loss_scale_value" else key
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
