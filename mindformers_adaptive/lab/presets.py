"""The systems as a table: under what names and defaults each takes its numbers, and which general rule they set.

A comment names the source of each row. Where a system has no default of its own, the row says whose is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from mindformers_adaptive.lab import dynamic_rule
from mindformers_adaptive.lab.dynamic_rule import FLOAT32, FLOAT64
from mindformers_adaptive.rules.checks import require_flag, require_integer, require_number

__all__ = ["PRESETS", "Parameter", "Preset"]

# Takes the name of a parameter and a value; returns the value as its type, or raises.
_Check = Callable[[str, object], object]


def _number(wanted: str, accepts: Callable[[float], bool], remedy: str) -> _Check:
    return lambda name, value: require_number(name, value, wanted, accepts, remedy)


_FACTOR_REMEDY, _RATIO_REMEDY = "The usual value is 2.", "The usual value is 0.5."

_positive = _number("a finite number above 0", lambda number: number > 0, "Loss scales are usually 1 to 2^32.")
_not_negative = _number("a finite number of at least 0", lambda number: number >= 0, "0 means no limit.")
_factor_above_one = _number("a finite number above 1", lambda number: number > 1, _FACTOR_REMEDY)
_at_least_one = _number("a finite number of at least 1", lambda number: number >= 1, _FACTOR_REMEDY)
_ratio_below_one = _number("a number between 0 and 1", lambda number: 0 < number < 1, _RATIO_REMEDY)
_ratio_up_to_one = _number("a number above 0 and at most 1", lambda number: 0 < number <= 1, _RATIO_REMEDY)
_steps: _Check = partial(require_integer, least=1, remedy="Give a positive number of steps.")
_count: _Check = partial(require_integer, least=0, remedy="A fresh counter is 0.")


class Parameter(NamedTuple):
    """A parameter of a system.

    Attributes:
        sets (str, optional): what it is called in the rule or in its ``start``; None where the system takes it
            and does not use it.
        default (object): its value where it is left out.
        check (Callable): takes its name and a value, returns the value as its type or raises.
    """

    sets: str | None
    default: Any
    check: _Check


class Preset(NamedTuple):
    """A system: what it calls its parameters, and what it does not let one choose.

    Attributes:
        parameters (Mapping[str, Parameter]): its parameters by name.
        constants (Mapping[str, object]): arguments of the rule that are always the same.
        aliases (Mapping[str, str]): second names of parameters.
    """

    parameters: Mapping[str, Parameter]
    constants: Mapping[str, Any]
    aliases: Mapping[str, str] = {}


# What most systems have, by its default.
_scale = partial(Parameter, "loss_scale", check=_positive)
_window = partial(Parameter, "scale_window", check=_steps)
_factor = Parameter("growth_factor", 2.0, _factor_above_one)
_backoff = partial(Parameter, "backoff_factor", check=_ratio_below_one)
_floor = partial(Parameter, "floor", check=_not_negative)
_optional_floor = Parameter("floor", None, lambda name, value: None if value is None else _not_negative(name, value))
_tolerance = partial(Parameter, "tolerance", check=_steps)


def _deepspeed_optimizer(scale: Parameter, floor: Parameter) -> Preset:
    return Preset(
        {"init_scale": scale, "scale_factor": _factor, "scale_window": _window(1000), "min_scale": floor},
        {"arithmetic": FLOAT64, "clean_steps_before": -1},
    )


def _fairseq(scale: float, window: int, smallest: Parameter, **constants: Any) -> Preset:
    return Preset(
        {
            "init_scale": _scale(scale),
            "scale_factor": _factor,
            "scale_window": _window(window),
            "tolerance": Parameter("tolerated_share", 0.0, _not_negative),
            "threshold": _optional_floor,
            "min_loss_scale": smallest,
        },
        {"arithmetic": FLOAT64, "drop_forgives": True, **constants},
    )


PRESETS: dict[str, Preset] = {
    # MindSpore amp.FixedLossScaleManager; the name 'loss_scale_value': nn.FixedLossScaleUpdateCell.
    "fixed": Preset({"loss_scale": _scale(128.0)}, {}, aliases={"loss_scale_value": "loss_scale"}),
    # facebookresearch/metaseq optim.dynamic_loss_scaler.DynamicLossScaler.
    "metaseq": _fairseq(4.0, 256, Parameter("keeps_below", 2.0**-5, _not_negative), window_follows=True),
    # MindSpore nn.DynamicLossScaleUpdateCell; defaults and the name 'init_loss_scale': DynamicLossScaleManager.
    "dynamic": Preset(
        {"init_loss_scale": _scale(2.0**24), "scale_factor": _factor, "scale_window": _window(2000)},
        {"arithmetic": FLOAT32, "reciprocal": True, "floor": 1.0},
        aliases={"loss_scale_value": "init_loss_scale"},
    ),
    # MindSpore amp.DynamicLossScaler, which has no defaults: those of DynamicLossScaleManager.
    "dynamic_scaler": Preset(
        {
            "scale_value": _scale(2.0**24),
            "scale_factor": _factor,
            "scale_window": _window(2000),
            "initial_counter": Parameter("clean_steps", 0, _count),
        },
        {"arithmetic": FLOAT32, "floor": 1.0, "stays_finite": True},
    ),
    # PyTorch torch.amp.GradScaler and the kernel of _amp_update_scale_.
    "torch": Preset(
        {
            "init_scale": _scale(2.0**16),
            "growth_factor": _factor,
            "backoff_factor": _backoff(0.5),
            "growth_interval": _window(2000),
        },
        {"arithmetic": dynamic_rule.FLOAT32_FLOAT64_FACTORS, "stays_finite": True},
    ),
    # Megatron-LM core DynamicGradScaler, which has no defaults: those of OptimizerConfig, and the factors that
    # get_megatron_optimizer passes.
    "megatron": Preset(
        {
            "initial_scale": _scale(2.0**32),
            "min_scale": Parameter("floor", 1.0, _positive),
            "growth_factor": _factor,
            "backoff_factor": _backoff(0.5),
            "growth_interval": _window(1000),
            "hysteresis": _tolerance(2),
        },
        {"arithmetic": FLOAT32},
    ),
    # DeepSpeed runtime.fp16.loss_scaler.DynamicLossScaler, of the ZeRO optimizers.
    "deepspeed": Preset(
        {
            "init_scale": _scale(2.0**32),
            "scale_factor": _factor,
            "scale_window": _window(1000),
            "min_scale": _floor(1.0),
            "delayed_shift": _tolerance(1),
            "consecutive_hysteresis": Parameter("clean_step_forgives", False, require_flag),
            "raise_error_at_min_scale": Parameter("stops_at_floor", True, require_flag),
        },
        {"arithmetic": FLOAT64},
    ),
    # DeepSpeed runtime.fp16.fused_optimizer.FP16_Optimizer without dynamic_loss_args; its scale_factor is fixed at 2.
    "deepspeed_fused": _deepspeed_optimizer(_scale(2.0**32), _floor(1.0)),
    # DeepSpeed runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer without dynamic_loss_args; its scale_factor is
    # fixed at 2.
    "deepspeed_unfused": _deepspeed_optimizer(_scale(2.0**16), _floor(0.25)),
    # Apex amp.scaler.LossScaler, which takes a scale_factor and always doubles and halves.
    "apex": Preset(
        {
            "init_scale": _scale(2.0**16),
            "scale_factor": Parameter(None, 2.0, _factor_above_one),
            "scale_window": _window(2000),
            "min_loss_scale": _optional_floor,
            "max_loss_scale": Parameter("upper_bound", 2.0**24, _positive),
        },
        {"arithmetic": FLOAT64, "growth_factor": 2.0},
    ),
    # Apex csrc/update_scale_hysteresis.cu, built for fast mathematics, which has no defaults: those of NeMo's
    # GradScaler, which calls it.
    "apex_hysteresis": Preset(
        {
            "init_scale": _scale(2.0**16),
            "growth_factor": Parameter("growth_factor", 2.0, _at_least_one),
            "backoff_factor": Parameter("backoff_factor", 0.5, _ratio_up_to_one),
            "growth_interval": _window(2000),
            "hysteresis": _tolerance(1),
        },
        {"arithmetic": dynamic_rule.FLOAT32_FLUSHED_FLOAT64_FACTORS, "stays_finite": True, "clean_step_forgives": True},
    ),
    # fairseq optim.dynamic_loss_scaler.DynamicLossScaler.
    "fairseq": _fairseq(2.0**15, 2000, Parameter("stops_at_or_below", 1e-4, _not_negative)),
    # TensorFlow python/training/experimental/loss_scale.py DynamicLossScale; its floor is fixed at 1.
    "tensorflow": Preset(
        {
            "initial_loss_scale": _scale(2.0**15),
            "increment_period": _window(2000),
            "multiplier": _factor,
            "min_scale": _floor(1.0),
        },
        {"arithmetic": FLOAT32, "stays_finite": True},
    ),
    # TensorFlow 1 contrib.mixed_precision ExponentialUpdateLossScaleManager, which has no default for the first two:
    # those of its successor DynamicLossScale; its floor is fixed at 1.
    "tensorflow_contrib": Preset(
        {
            "init_loss_scale": _scale(2.0**15),
            "incr_every_n_steps": _window(2000),
            "decr_every_n_nan_or_inf": _tolerance(2),
            "incr_ratio": _factor,
            "decr_ratio": _backoff(0.8),
            "min_scale": _floor(1.0),
        },
        {"arithmetic": FLOAT32, "stays_finite": True, "drop_forgives": True},
    ),
    # Keras 3 optimizers.LossScaleOptimizer, which always doubles and halves.
    "keras": Preset(
        {"initial_scale": _scale(2.0**15), "dynamic_growth_steps": _window(2000)},
        {"arithmetic": FLOAT32, "growth_factor": 2.0},
    ),
    # Keras 2 mixed_precision.LossScaleOptimizer, which always doubles and halves; its floor is fixed at 1.
    "keras2": Preset(
        {"initial_scale": _scale(2.0**15), "dynamic_growth_steps": _window(2000), "min_scale": _floor(1.0)},
        {"arithmetic": FLOAT32, "growth_factor": 2.0, "stays_finite": True},
    ),
    # JMP DynamicLossScale, which has no default for the scale: that of its example. The scale is an array of the
    # caller's type. JMP's tests state float64 quotients; the range is that of JAX's default type, float32.
    "jmp": Preset(
        {
            "loss_scale": _scale(2.0**15),
            "counter": Parameter("clean_steps", 0, _count),
            "period": _window(2000),
            "factor": _factor,
            "min_loss_scale": _floor(1.0),
        },
        {"arithmetic": FLOAT64, "stays_finite": True},
    ),
    # Paddle update_loss_scaling (phi/kernels/impl/amp_kernel_impl.h); defaults of amp.GradScaler and
    # static.amp.decorate.
    "paddle": Preset(
        {
            "init_loss_scaling": _scale(2.0**16),
            "incr_ratio": _factor,
            "decr_ratio": _backoff(0.5),
            "incr_every_n_steps": _window(2000),
            "decr_every_n_nan_or_inf": _tolerance(1),
            "initial_good_steps": Parameter("clean_steps", 0, _count),
            "initial_bad_steps": Parameter("overflows", 0, _count),
        },
        {"arithmetic": FLOAT32, "floor": 1.0, "stays_finite": True, "clean_step_forgives": True, "drop_forgives": True},
    ),
}
