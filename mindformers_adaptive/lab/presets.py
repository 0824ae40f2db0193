"""Presets of one rule that reproduce the loss scalers of other systems, with the names and defaults used there.

A comment above each preset names the class that the preset reproduces. If that class has no defaults, the comment says
which defaults are used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from mindformers_adaptive.lab.dynamic_rule import FLOAT32, FLOAT32_FLOAT64_FACTORS, FLOAT64
from mindformers_adaptive.rules.checks import require_flag, require_integer, require_number

__all__ = ["PRESETS", "REMOVED_PRESETS", "Parameter", "Preset"]

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
