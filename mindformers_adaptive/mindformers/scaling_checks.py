"""Checks of the loss-scaling settings and the number formats in a configuration."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from mindformers_adaptive.mindformers.keys import FORMER_KEYS, SCALE_SENSE, model_values, value_at
from mindformers_adaptive.mindformers.pynative_section import warn_of_dtype
from mindformers_adaptive.rules import find_rule, rule_of_cell
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.rules.checks import require_number, require_positive, warn_of_rounding
from mindformers_adaptive.rules.formats import FLOAT16
from mindformers_adaptive.rules.rule import Rule

__all__ = ["FIXED_SCALES", "check_scale_sense", "check_stock_arguments", "is_former_key", "train_step_instead_of"]
__all__ += ["usual_values", "warn_of_ignored_key", "warn_of_scaling"]

_WEIGHTS_DTYPE = "model.model_config.param_init_type"
# Update cells that never change the loss scale.
FIXED_SCALES = ("FixedLossScaleUpdateCell", "NoLossScaleUpdateCell")
# Further update cells, besides the cells of RULES, that change the loss scale, skip steps and keep a state.
_MOVING = ("DynamicLossScaleUpdateCell", Rule.cell)
# Usual values of the arguments that an update cell requires. For MindSpore's own cell the usual window is
# _STOCK_WINDOW.
_USUAL_VALUES = {"loss_scale_value": 65536, "scale_factor": 2, "scale_window": 20}
_STOCK_WINDOW = 1000
# Optimizers of MindSpore whose state has the dtype of the weights. MindFormers' AdamW always keeps its state in
# float32.
_STATE_AS_WEIGHTS = ("Adam", "AdamWeightDecay")


def check_scale_sense(scale_sense: Any) -> None:
    """Raise TypeError or ValueError if ``runner_wrapper.scale_sense`` is neither a number nor a section with a type."""
    if isinstance(scale_sense, str | list | bool | None):
        kind = "the text " if isinstance(scale_sense, str) else ""
        raise TypeError(
            f"'{SCALE_SENSE}' must be a section or a number, but got {kind}{scale_sense!r}. Write a section with "
            "the name of the update cell's class as its 'type', and with 'loss_scale_value' and the other arguments of "
            "the class. Or leave the key out, so that the loss is not scaled."
        )
    if isinstance(scale_sense, int | float):
        require_positive(SCALE_SENSE, scale_sense)
    if isinstance(scale_sense, dict) and not scale_sense.get("type"):
        what = f"has only {', '.join(scale_sense)}" if scale_sense else "has no keys"
        what = "the 'type' is empty" if "type" in scale_sense else what
        raise TypeError(f"'{SCALE_SENSE}' must have a 'type', but {what}. Add 'type: AdaptiveLossScale'.")


def check_stock_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError for a value that MindSpore's own update cells cannot use but do not check.

    A factor of 1, which keeps the loss scale as it is, is accepted: YAML files that MindFormers ships have it.

    Examples:
        >>> check_stock_arguments({"loss_scale_value": 4096, "scale_factor": 1, "scale_window": 100000})
    """
    if "loss_scale_value" in arguments:
        require_positive("loss_scale_value", arguments["loss_scale_value"])
    if "scale_factor" in arguments:
        remedy = "2 is usual; 1 keeps the loss scale as it is."
        require_number("scale_factor", arguments["scale_factor"], "a finite number above 0", lambda n: n > 0, remedy)
    if "scale_window" in arguments:
        remedy = f"{_STOCK_WINDOW} is usual."
        require_number("scale_window", arguments["scale_window"], "a finite number of steps", lambda _: True, remedy)


def usual_values(cell: str, names: Iterable[str]) -> str:
    """Return a sentence that tells the user to add the missing arguments of an update cell, with usual values.

    Examples:
        >>> usual_values("AdaptiveLossScale", ["scale_factor", "scale_window"])
        "Add them; usual are 'scale_factor: 2' and 'scale_window: 20'."
    """
    usual = _USUAL_VALUES if rule_of_cell(cell) else _USUAL_VALUES | {"scale_window": _STOCK_WINDOW}
    known = [f"'{name}: {usual[name]}'" for name in names if name in usual]
    them = "them" if len(known) > 1 else "it"
    return f"Add {them}; usual {'are' if len(known) > 1 else 'is'} {' and '.join(known)}." if known else "Add them."


def is_former_key(key: str) -> bool:
    """Return whether MindFormers ignores a ``runner_wrapper`` key that it once used, or that its documents show."""
    return key in FORMER_KEYS


def warn_of_ignored_key(section: Mapping[str, Any], key: str) -> None:
    """Warn of a key that MindFormers' train step ignores, and name the key that has the same effect today."""
    remedy = f"Write {_present_key(key, section[key])} instead." if FORMER_KEYS.get(key) else "Take it out."
    warnings.warn(f"'runner_wrapper.{key}' has no effect, because {section['type']} ignores it. {remedy}", stacklevel=5)


def train_step_instead_of(section: Mapping[str, Any]) -> str:
    """Return a sentence that recommends MindFormers' train-step cell, and names the present key for each outdated key.

    Examples:
        >>> train_step_instead_of({"type": "TrainOneStepCell", "sens": 1024})
        "Use MFTrainOneStepCell, which scales the loss and clips gradients, with 'scale_sense: 1024' for 'sens'."
    """
    present = [f"{_present_key(key, section[key])} for {key!r}" for key in section if FORMER_KEYS.get(key)]
    renamed = f", with {' and '.join(present)}" if present else ""
    return f"Use MFTrainOneStepCell, which scales the loss and clips gradients{renamed}."


def _present_key(key: str, value: Any) -> str:
    return f"'{FORMER_KEYS[key]}: {value}'"


def warn_of_scaling(config: Any) -> None:
    """Warn of number formats and initial loss scales with which a training loses weight updates or precision.

    Args:
        config (MindFormerConfig): the configuration of a training, with this package registered.
    """
    _warn_of_lost_updates(config)
    if isinstance(config.runner_wrapper, dict) and config.runner_wrapper:
        kind = None if value_at(config, SCALE_SENSE) is None else ""
        if (cell := value_at(config, f"{SCALE_SENSE}.type")) in _MOVING or rule_of_cell(cell):
            kind = cell
        dtype = model_values(config).get("compute_dtype")
        warn_of_dtype("model.model_config.compute_dtype", dtype, SCALE_SENSE, kind, stacklevel=5)
        _warn_of_rounding_start(value_at(config, SCALE_SENSE))


def _warn_of_rounding_start(scale_sense: Any) -> None:
    if not isinstance(scale_sense, dict):
        warn_of_rounding(SCALE_SENSE, scale_sense, stacklevel=6)
        return
    kind = scale_sense.get("type")
    rule = find_rule(scale_sense["rule"]) if kind == Rule.cell else rule_of_cell(kind)
    # Rules other than the adaptive rule round the initial loss scale down to a power of two, and warn of the rounding
    # themselves.
    if rule in (None, AdaptiveRule):
        warn_of_rounding(f"{SCALE_SENSE}.loss_scale_value", scale_sense.get("loss_scale_value"), stacklevel=6)


def _warn_of_lost_updates(config: Any) -> None:
    # Optimizers compute in float32, but store float16 weights in float16. A weight loses an update that is below half
    # the distance to the next float16 number. Half of this distance is 1/4096 to 1/2048 of the weight.
    if str(value_at(config, _WEIGHTS_DTYPE)).lower() != "float16":
        return
    problem = f"'{_WEIGHTS_DTYPE}' is float16: an update below 1/4096 of its weight is lost, at any loss scale."
    optimizer, eps = value_at(config, "optimizer.type"), value_at(config, "optimizer.eps")
    if optimizer in _STATE_AS_WEIGHTS:
        problem += (
            f" 'optimizer.type' is {optimizer}, which then keeps its state in float16 too: gradients of 1e-4 and less "
            "add 0 to its second moments."
        )
        if optimizer == "AdamWeightDecay" and (eps is None or eps <= FLOAT16.smallest_subnormal / 2):
            problem += " Its eps becomes 0 in float16, so weights with a gradient of 0 become NaN."
        problem += " AdamW keeps its state in float32."
    warnings.warn(
        f"{problem} Training goes on with float16 weights. Set '{_WEIGHTS_DTYPE}' to float32; 'compute_dtype' may stay "
        "float16.",
        stacklevel=5,
    )
