"""What a CPU cannot do, told before anything is built; MindSpore says it after it has compiled, or not at all."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from mindformers_adaptive.integration.feature_checks import value_at

__all__ = ["check_cpu"]

# Of the configuration of a model: what a CPU needs, and why.
_MODEL: dict[str, tuple[bool, str]] = {
    "use_flash_attention": (False, "MindSpore has no flash attention (FlashAttentionScore) for a CPU"),
    "fused_rms_norm": (False, "MindSpore has no fused norm (RmsNorm) for a CPU"),
    "use_rope_slice": (True, "a CPU does not broadcast the matrices of the other way"),
}
_BFLOAT16 = "bfloat16"
# From parallel.parallel_mode: semi-automatic and automatic parallelism, by number and by name.
_COMPILED_PARALLELISM = (1, 2, "semi_auto_parallel", "auto_parallel")
_SPLITS = ("model_parallel", "pipeline_stage", "context_parallel", "expert_parallel")
_WITHOUT_KERNEL = "Lamb"


def check_cpu(config: Any, model_config: Any = None) -> None:
    """Refuse a training on a CPU that asks for what MindSpore or MindFormers cannot do there.

    Args:
        config (MindFormerConfig): of a training.
        model_config (PretrainedConfig, optional): of the model, where it is built already. Default: None, the section
            ``model.model_config``, and the defaults of the class that it names.

    Raises:
        ValueError: for flash attention, fused norms, BF16, mixture of experts, mcore models, semi-automatic
            parallelism, pipeline stages, dumps of ``monitor_config`` and Lamb; it names each key, and what
            to set instead.
    """
    problems = [*_of_model(config, model_config), *_of_parallelism(config), *_of_the_rest(config)]
    if problems:
        raise ValueError("This cannot be trained on a CPU:\n" + "\n".join(f"- {problem}." for problem in problems))


def _of_model(config: Any, model_config: Any) -> Iterator[str]:
    values = _model_values(config) if model_config is None else vars(model_config)
    for key, (needed, reason) in _MODEL.items():
        if key in values and bool(values[key]) is not needed:
            yield f"'model.model_config.{key}' must be {needed}, but is {values[key]}: {reason}"
    for key, value in values.items():
        if str(value).lower().rpartition(".")[2] == _BFLOAT16:
            yield f"'model.model_config.{key}' must be another type, but is {_BFLOAT16}. Set it to float16 or float32"
    if config.get("use_legacy") is False:
        yield (
            "'use_legacy' must be True, but is False: the mcore models need operators that MindSpore does not have for "
            "a CPU (RmsNorm, FlashAttentionScore). Take one of the models under mindformers.models.llama"
        )
    if (experts := value_at(config, "moe_config.expert_num") or 1) > 1:
        yield f"'moe_config.expert_num' must be 1, but is {experts}: MindFormers' experts need an Ascend"


def _model_values(config: Any) -> Mapping[str, Any]:
    """The section of the model, and the defaults of its class."""
    section = value_at(config, "model.model_config")
    if not isinstance(section, dict):
        return {}
    from mindformers.tools.register import MindFormerRegister

    name = section.get("type")
    defaults: dict[str, Any] = {}
    if isinstance(name, str) and MindFormerRegister.is_exist("config", name):
        parameters = inspect.signature(MindFormerRegister.get_cls("config", name)).parameters.values()
        defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
    return defaults | section


def _of_parallelism(config: Any) -> Iterator[str]:
    if not config.get("use_parallel"):
        return
    mode = value_at(config, "parallel.parallel_mode")
    if mode in _COMPILED_PARALLELISM:
        yield (
            f"'parallel.parallel_mode' must be 0 (data parallel), but is {mode}: MindSpore does not compile "
            "semi-automatic parallelism for a CPU"
        )
    for key in _SPLITS:
        parts = value_at(config, f"parallel_config.{key}")
        if isinstance(parts, int) and parts > 1:
            yield (
                f"'parallel_config.{key}' must be 1, but is {parts}: it needs semi-automatic parallelism. Share the "
                "work by 'data_parallel'"
            )


def _of_the_rest(config: Any) -> Iterator[str]:
    folder = value_at(config, "monitor_config.dump_path")
    if value_at(config, "monitor_config.monitor_on") and folder:
        yield (
            f"'monitor_config.dump_path' must be '', but is {folder!r}: MindSpore writes no dumps (TensorDump) on a "
            "CPU. What the formats print to the log and to TensorBoard does not need it"
        )
    if value_at(config, "optimizer.type") == _WITHOUT_KERNEL:
        yield f"'optimizer.type' must be another optimizer, but is {_WITHOUT_KERNEL}. Set it to AdamW"
