"""A warning for a training whose number format needs no loss scaling."""

from __future__ import annotations

import warnings
from typing import Any

from mindformers_adaptive.integration.feature_checks import value_at

__all__ = ["warn_of_needless_scaling"]

_BFLOAT16 = {"bfloat16", "bf16"}
# Update cells that move the scale, and so skip steps and keep a state.
_MOVING = ("DynamicLossScaleUpdateCell", "AdaptiveLossScaleUpdateCell", "GradientGuidedLossScaleUpdateCell")


def warn_of_needless_scaling(config: Any) -> None:
    """Warn once where a model computes in bfloat16 and its loss scale moves.

    bfloat16 has the range of float32: nothing underflows or overflows that would not in float32.

    Args:
        config (MindFormerConfig): a loaded configuration.

    Examples:
        >>> warn_of_needless_scaling({"model": {"model_config": {"compute_dtype": "float16"}}})
    """
    cell = value_at(config, "runner_wrapper.scale_sense.type")
    dtype = value_at(config, "model.model_config.compute_dtype")
    if cell in _MOVING and str(dtype).lower() in _BFLOAT16:
        warnings.warn(
            f"'model.model_config.compute_dtype' is {dtype}, which has the range of float32 and needs no loss scaling, "
            f"but 'runner_wrapper.scale_sense' is of type {cell}. Training goes on with it. Set 'scale_sense: 1.0' to "
            "train without, or 'compute_dtype' to float16 if that is what you mean.",
            stacklevel=3,
        )
