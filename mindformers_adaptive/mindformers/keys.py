"""Look up the values of a configuration by key."""

import inspect
from collections.abc import Mapping
from typing import Any

SCALE_SENSE = "runner_wrapper.scale_sense"
# What to write in place of a loss-scaling section that is a text, a list or nothing.
NO_SECTION = "Write 'type: AdaptiveLossScale' below it, with 'loss_scale_value' and the other arguments."
WEIGHTS_DTYPE = "model.model_config.param_init_type"
PER_TOKEN = "calculate_per_token_loss"
ACCUMULATION = "runner_config.gradient_accumulation_steps"

# Values of parallel.parallel_mode for semi-automatic and automatic parallelism, by number and by name.
COMPILED_PARALLELISM = (1, 2, "semi_auto_parallel", "auto_parallel")

# Keys of runner_wrapper that MindFormers' train-step cells once took, or that MindFormers' documents show, and today's
# keys with the same effect. MindFormers accepts the old keys and ignores them. enable_check_overflow needs no key
# today, because overflows are always detected.
FORMER_KEYS = {
    "clip_norm": "max_grad_norm",
    "enable_check_overflow": "",
    "enable_global_norm": "use_clip_grad",
    "loss_scale_value": "scale_sense",
    "scale_update_cell": "scale_sense",
    "sens": "scale_sense",
}


def value_at(config: Any, key: str) -> Any:
    """Return the value at a dotted key of a configuration, or None if the key is missing."""
    for name in key.split("."):
        config = config.get(name) if isinstance(config, Mapping) else None
    return config


def given_to_train_step(config: Any, name: str) -> Any:
    """Return the value of an argument of the train-step cell, from ``runner_wrapper`` or from the top level."""
    value = value_at(config, f"runner_wrapper.{name}")
    return value_at(config, name) if value is None else value


def micro_batches_of(config: Any, is_parallel: bool, device_target: str) -> int:
    """Return the number of micro-batches by which a training divides each loss before the backward pass.

    Semi-automatic parallelism takes the mean loss over all data-parallel processes, so the result is multiplied by the
    number of processes.

    Args:
        config (MindFormerConfig): the configuration of a training.
        is_parallel (bool): whether the training runs in several processes.
        device_target (str): the device. On a CPU this package accumulates gradients; MindFormers accumulates them in
            semi-automatic parallelism only.
    """
    if given_to_train_step(config, PER_TOKEN):
        # With a per-token loss, the gradients are divided by the number of tokens, but only after the backward pass.
        return 1
    if is_parallel and value_at(config, "parallel.parallel_mode") in COMPILED_PARALLELISM:
        has_stages = (value_at(config, "parallel_config.pipeline_stage") or 1) > 1
        micro_batches = value_at(config, "parallel_config.micro_batch_num" if has_stages else ACCUMULATION) or 1
        return int(micro_batches) * int(value_at(config, "parallel_config.data_parallel") or 1)
    return int(value_at(config, ACCUMULATION) or 1) if device_target == "CPU" else 1


def model_values(config: Any) -> Mapping[str, Any]:
    """Return the section ``model.model_config``, completed by the defaults of the class that it names."""
    section = value_at(config, "model.model_config")
    if not isinstance(section, dict):
        return {}
    from mindformers.tools.register import MindFormerRegister

    name = section.get("type")
    if not isinstance(name, str) or not MindFormerRegister.is_exist("config", name):
        return section
    parameters = inspect.signature(MindFormerRegister.get_cls("config", name)).parameters.values()
    return {each.name: each.default for each in parameters if each.default is not each.empty} | section
