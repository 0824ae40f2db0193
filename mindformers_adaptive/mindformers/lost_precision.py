"""Warnings of loss-scaling settings and number formats with which a training loses weight updates or precision."""

import warnings
from typing import Any

from mindformers_adaptive.mindformers.keys import SCALE_SENSE, WEIGHTS_DTYPE, model_values, value_at
from mindformers_adaptive.rules import rule_of_cell
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.rules.checks import require_positive, warn_of_rounding
from mindformers_adaptive.rules.formats import FLOAT16
from mindformers_adaptive.rules.rule import Rule

# Update cells that never change the loss scale.
FIXED_SCALES = ("FixedLossScaleUpdateCell", "NoLossScaleUpdateCell")
# Further update cells, besides the cells of RULES, that change the loss scale, skip steps and keep a state.
_MOVING = ("DynamicLossScaleUpdateCell", Rule.cell)
# Optimizers of MindSpore whose state has the dtype of the weights. MindFormers' AdamW always keeps its state in
# float32.
_STATE_AS_WEIGHTS = ("Adam", "AdamWeightDecay")


def warn_of_scaling(config: Any) -> None:
    """Warn of number formats and initial loss scales with which a training loses weight updates or precision.

    Args:
        config (MindFormerConfig): the configuration of a training, with this package registered.

    Raises:
        TypeError: if a fixed loss scale is not a number.
        ValueError: if a fixed loss scale is not positive.
    """
    _warn_of_lost_updates(config)
    if value_at(config, "runner_wrapper.type") is None:
        return
    scale_sense, kind = value_at(config, SCALE_SENSE), None
    if isinstance(scale_sense, dict):
        cell = scale_sense.get("type")
        rule = rule_of_cell(cell)
        kind = cell if cell in _MOVING or rule else ""
        # Rules other than the adaptive rule round the initial loss scale down to a power of two, and warn of the
        # rounding themselves.
        if rule in (None, AdaptiveRule) and (cell != Rule.cell or scale_sense["rule"] == AdaptiveRule.name):
            warn_of_rounding(f"{SCALE_SENSE}.loss_scale_value", scale_sense.get("loss_scale_value"), stacklevel=4)
    elif scale_sense is not None:
        kind = ""
        warn_of_rounding(SCALE_SENSE, require_positive(SCALE_SENSE, scale_sense), stacklevel=4)
    _warn_of_dtype(model_values(config).get("compute_dtype"), kind)


def _warn_of_dtype(dtype: object, kind: str | None) -> None:
    """Warn if a float16 model has no loss scaling, or the loss scale of a bfloat16 model moves.

    Args:
        dtype (object): the dtype in which the model computes.
        kind (str, optional): the type of ``scale_sense``; "" for a fixed loss scale, None without ``scale_sense``.
    """
    key, name = "model.model_config.compute_dtype", str(dtype).lower().rpartition(".")[2]
    if name in ("float16", "fp16") and kind is None:
        warnings.warn(
            f"'{key}' is {dtype}, in which small gradients become 0, but there is no '{SCALE_SENSE}', so the loss is "
            "not scaled. Add a section of type AdaptiveLossScale, or 'scale_sense: 1.0' to train without loss scaling.",
            stacklevel=5,
        )
    if name in ("bfloat16", "bf16") and kind:
        warnings.warn(
            f"'{key}' is {dtype}, which has the range of float32 and needs no loss scaling, but '{SCALE_SENSE}' is of "
            f"type {kind}. Training goes on with loss scaling. Set 'scale_sense: 1.0' to train without loss scaling, "
            f"or set '{key}' to float16 if you meant to train in float16.",
            stacklevel=5,
        )


def _warn_of_lost_updates(config: Any) -> None:
    # Optimizers compute in float32, but store float16 weights in float16. A weight loses an update that is below half
    # the distance to the next float16 number. Half of this distance is 1/4096 to 1/2048 of the weight.
    if str(value_at(config, WEIGHTS_DTYPE)).lower() != "float16":
        return
    problem = f"'{WEIGHTS_DTYPE}' is float16: an update below 1/4096 of its weight is lost, at any loss scale."
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
        f"{problem} Training goes on with float16 weights. Set '{WEIGHTS_DTYPE}' to float32; 'compute_dtype' may stay "
        "float16.",
        stacklevel=5,
    )
