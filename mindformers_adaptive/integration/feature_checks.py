"""Checks of a loaded YAML file for features of MindFormers that need something else beside loss scaling."""

from __future__ import annotations

import math
import warnings
from typing import Any

from mindformers_adaptive.rules.checks import require_integer

__all__ = ["check_features", "given_to_train_step", "value_at"]

_SKIP = "use_skip_data_by_global_norm"
_PER_TOKEN = "calculate_per_token_loss"
_ACCUMULATION = "runner_config.gradient_accumulation_steps"
# From 2^32, the usual start, a training of mean losses loses about 16 steps. A start above that is worth a word.
_USUAL_START = 2.0**32


def check_features(config: Any) -> None:
    """Check settings that stop or mislead a training with loss scaling after it has started.

    Args:
        config (MindFormerConfig): a loaded configuration of a training.

    Raises:
        TypeError: if the threshold of the norm or the number of accumulated batches has the wrong type.
        ValueError: if steps are to be dropped by a norm that is not calculated, or that two features react to; if
            fewer than one batch is to be accumulated.

    Warns:
        UserWarning: if a loss per token starts from a scale that costs a dozen steps more than the usual start.
    """
    _check_dropping(config)
    if (steps := value_at(config, _ACCUMULATION)) is not None:
        require_integer(_ACCUMULATION, steps, 1, "Give 1 for no accumulation.", unit="number of batches")
    _advise_on_loss_per_token(config)


def value_at(config: Any, key: str) -> Any:
    """Return what a dotted key of a configuration leads to, or None."""
    for name in key.split("."):
        config = config.get(name) if isinstance(config, dict) else None
    return config


def given_to_train_step(config: Any, name: str) -> Any:
    """Return what MindFormers gives to a train-step cell: from the cell's own section, or else from the top."""
    own = value_at(config, f"runner_wrapper.{name}")
    return value_at(config, name) if own is None else own


def _check_dropping(config: Any) -> None:
    threshold = value_at(config, "monitor_config.global_norm_spike_threshold")
    if threshold is not None and not isinstance(threshold, float):
        raise TypeError(
            f"'monitor_config.global_norm_spike_threshold' must be a float, but got {threshold!r}. Write it with a "
            "decimal point, as in 3.0."
        )
    if not given_to_train_step(config, _SKIP):
        return
    if not value_at(config, "runner_wrapper.use_clip_grad"):
        raise ValueError(
            f"'{_SKIP}' must come with 'runner_wrapper.use_clip_grad: True', because only clipping calculates the norm "
            "of the gradients, but got use_clip_grad=False. Set it to True; a large 'max_grad_norm' clips nothing."
        )
    others = ("check_for_global_norm", "health_checkpoint.global_norm_spike_threshold")
    for other in others:
        if value_at(config, "monitor_config.monitor_on") and value_at(config, f"monitor_config.{other}"):
            raise ValueError(
                f"'{_SKIP}' must not be True beside 'monitor_config.{other}': one drops a step with a large norm, the "
                "other ends the training there. Set one of them to False."
            )


def _advise_on_loss_per_token(config: Any) -> None:
    scale_sense = value_at(config, "runner_wrapper.scale_sense")
    if (
        not given_to_train_step(config, _PER_TOKEN)
        or config.get("resume_training")
        or not isinstance(scale_sense, dict)
    ):
        return
    scale = scale_sense.get("loss_scale_value")
    guided = scale_sense.get("type") == "GradientGuidedLossScaleUpdateCell"
    tokens = _tokens_of_batch(config)
    # A wrong value is for the cell to refuse. The guided cell comes down in a few steps from anywhere.
    if guided or isinstance(scale, bool) or not isinstance(scale, int | float) or tokens is None:
        return
    if scale * tokens > _USUAL_START:
        bits = math.log2(tokens)
        warnings.warn(
            f"With '{_PER_TOKEN}' the gradients are divided by the number of tokens only after the backward pass, so "
            f"overflows begin at a scale lower by log2({tokens}) = {bits:.0f} bits, and a start from "
            f"2^{math.log2(scale):.0f} skips about {bits:.0f} steps more. 'adaptive-loss-scale find' says where to "
            "start.",
            stacklevel=5,
        )


def _tokens_of_batch(config: Any) -> int | None:
    """How many tokens the backward pass sums over in one process at most, where the file says."""
    batch, length = (value_at(config, key) for key in ("runner_config.batch_size", "model.model_config.seq_length"))
    accumulated = value_at(config, _ACCUMULATION) or 1
    numbers = (batch, length, accumulated)
    if any(isinstance(number, bool) or not isinstance(number, int) or number < 1 for number in numbers):
        return None
    return int(math.prod(numbers))
