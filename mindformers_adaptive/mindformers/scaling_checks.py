"""Checks of what a configuration says about loss scaling and the formats that it is for."""

from __future__ import annotations

import math
import warnings
from typing import Any

from mindformers_adaptive.mindformers.keys import (
    ACCUMULATION,
    PER_TOKEN,
    SCALE_SENSE,
    given_to_train_step,
    model_values,
    value_at,
)
from mindformers_adaptive.mindformers.pynative_section import warn_of_dtype
from mindformers_adaptive.rules import rule_of_cell
from mindformers_adaptive.rules.checks import require_positive
from mindformers_adaptive.rules.formats import FLOAT16
from mindformers_adaptive.rules.rule import Rule

__all__ = ["FIXED_SCALES", "check_scale_sense", "warn_of_scaling"]

_WEIGHTS_DTYPE = "model.model_config.param_init_type"
# Update cells that do not move the scale.
FIXED_SCALES = ("FixedLossScaleUpdateCell", "NoLossScaleUpdateCell")
# Update cells that move the scale beside those of RULES, and so skip steps and keep a state.
_MOVING = ("DynamicLossScaleUpdateCell", Rule.cell)
# From 2^32, the usual start, a training of mean losses loses about 16 steps. A start above that is worth a word.
_USUAL_START = 2.0**32
# Optimizers of MindSpore whose state has the type of the weights; that of MindFormers' AdamW is float32 always.
_STATE_AS_WEIGHTS = ("Adam", "AdamWeightDecay")


def check_scale_sense(scale_sense: Any) -> None:
    """Raise TypeError or ValueError if ``runner_wrapper.scale_sense`` is neither a number nor a section with a type."""
    if isinstance(scale_sense, str | list | bool | None):
        kind = "the text " if isinstance(scale_sense, str) else ""
        raise TypeError(
            f"'{SCALE_SENSE}' must be a section or a number, but got {kind}{scale_sense!r}. Write the name of the "
            "class as its 'type', with 'loss_scale_value' and the other arguments beside it; leave the key out where "
            "the loss is not to be scaled."
        )
    if isinstance(scale_sense, int | float):
        require_positive(SCALE_SENSE, scale_sense)
    if isinstance(scale_sense, dict) and not scale_sense.get("type"):
        what = f"has only {', '.join(scale_sense)}" if scale_sense else "has no keys"
        what = "that is empty" if "type" in scale_sense else what
        raise TypeError(f"'{SCALE_SENSE}' must have a 'type', but {what}. Add 'type: AdaptiveLossScale'.")


def warn_of_scaling(config: Any) -> None:
    """Warn of formats and starts with which a training loses updates or steps.

    Args:
        config (MindFormerConfig): of a training, with this package registered.
    """
    _warn_of_lost_updates(config)
    if isinstance(config.runner_wrapper, dict) and config.runner_wrapper:
        kind = None if value_at(config, SCALE_SENSE) is None else ""
        if (cell := value_at(config, f"{SCALE_SENSE}.type")) in _MOVING or rule_of_cell(cell):
            kind = cell
        dtype = model_values(config).get("compute_dtype")
        warn_of_dtype("model.model_config.compute_dtype", dtype, SCALE_SENSE, kind, stacklevel=5)
        _warn_of_high_start(config)


def _warn_of_lost_updates(config: Any) -> None:
    # The optimizers compute in float32, and write the weights in their own type. Half the distance between two numbers
    # of float16 is 1/4096 to 1/2048 of them.
    if str(value_at(config, _WEIGHTS_DTYPE)).lower() != "float16":
        return
    text = f"'{_WEIGHTS_DTYPE}' is float16: an update below 1/4096 of its weight is lost, at any loss scale."
    optimizer, eps = value_at(config, "optimizer.type"), value_at(config, "optimizer.eps")
    if optimizer in _STATE_AS_WEIGHTS:
        text += (
            f" 'optimizer.type' is {optimizer}, which then keeps its state in float16 too: gradients of 1e-4 and less "
            "add 0 to its second moments."
        )
        if optimizer == "AdamWeightDecay" and (eps is None or eps <= FLOAT16.smallest_subnormal / 2):
            text += " Its eps is 0 there, and weights with a gradient of 0 become NaN."
        text += " AdamW keeps its state in float32."
    warnings.warn(
        f"{text} Training goes on with it. Set it to float32; 'compute_dtype' may stay float16.", stacklevel=5
    )


def _warn_of_high_start(config: Any) -> None:
    scale_sense = value_at(config, SCALE_SENSE)
    if config.get("resume_training") or not isinstance(scale_sense, dict):
        return
    # Whoever sees the gradients comes down in a few steps from anywhere.
    if (rule := rule_of_cell(scale_sense.get("type"))) is not None and rule.needs_gradients:
        return
    scale = scale_sense.get("loss_scale_value")
    # How many tokens the backward pass sums over in one process at most, where the file says.
    sizes = [value_at(config, key) for key in ("runner_config.batch_size", "model.model_config.seq_length")]
    sizes.append(value_at(config, ACCUMULATION) or 1)
    is_known = all(isinstance(size, int) and size >= 1 for size in sizes)
    # A wrong value is for the cell to refuse.
    if not given_to_train_step(config, PER_TOKEN) or not is_known or not isinstance(scale, int | float):
        return
    if scale * (tokens := math.prod(sizes)) > _USUAL_START:
        bits = math.log2(tokens)
        warnings.warn(
            f"With '{PER_TOKEN}' the gradients are divided by the number of tokens only after the backward pass, so "
            f"overflows begin at a scale lower by log2({tokens}) = {bits:.0f} bits, and a start from "
            f"2^{math.log2(scale):.0f} skips about {bits:.0f} steps more. 'adaptive-loss-scale find' says where to "
            "start.",
            stacklevel=5,
        )
