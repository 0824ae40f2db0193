"""Check a configuration for features that MindSpore or MindFormers lacks on a CPU."""

from collections.abc import Iterator, Mapping
from typing import Any

from mindformers_adaptive.mindformers.keys import COMPILED_PARALLELISM, model_values, value_at

# For some keys of the model's configuration, the value that a CPU needs and the reason.
_CPU_MODEL: dict[str, tuple[bool, str]] = {
    "use_flash_attention": (False, "MindSpore has no flash attention (FlashAttentionScore) for a CPU"),
    "fused_rms_norm": (False, "MindSpore has no fused norm (RmsNorm) for a CPU"),
    "use_rope_slice": (True, "otherwise the rotary embedding needs a product that a CPU does not broadcast"),
}
_SPLITS = ("model_parallel", "pipeline_stage", "context_parallel", "expert_parallel")


def check_cpu(config: Any, model_config: Any = None) -> None:
    """Raise ValueError if a training on a CPU uses features that MindSpore or MindFormers lacks on a CPU.

    MindSpore itself would report these features only after compilation, or not at all.

    Args:
        config (MindFormerConfig): the configuration of a training.
        model_config (PretrainedConfig, optional): the configuration of the model, if it is built already. Default:
            None, the section ``model.model_config`` and the defaults of the class that it names.

    Raises:
        ValueError: for flash attention, fused norms, BF16, mixture of experts, mcore models, semi-automatic
            parallelism, pipeline stages, the ``checkpoint:`` section of several processes, dumps of ``monitor_config``
            and Lamb; the message names each key, and its remedy.
    """
    model = model_values(config) if model_config is None else vars(model_config)
    if problems := [*_cpu_problems(config, model)]:
        raise ValueError(
            "This configuration cannot be trained on a CPU:\n" + "\n".join(f"- {problem}." for problem in problems)
        )


def _cpu_problems(config: Any, model: Mapping[str, Any]) -> Iterator[str]:
    for key, (needed, reason) in _CPU_MODEL.items():
        if key in model and bool(model[key]) is not needed:
            yield f"'model.model_config.{key}' must be {needed}, but is {model[key]}: {reason}"
    for key, value in model.items():
        if str(value).lower().rpartition(".")[2] == "bfloat16":
            yield f"'model.model_config.{key}' must be another type, but is bfloat16. Set it to float16 or float32"
    if config.get("use_legacy") is False:
        yield (
            "'use_legacy' must be True, but is False: the mcore models need operators that MindSpore does not have for "
            "a CPU (RmsNorm, FlashAttentionScore). Take one of the models under mindformers.models.llama"
        )
    if (experts := value_at(config, "moe_config.expert_num") or 1) > 1:
        yield f"'moe_config.expert_num' must be 1, but is {experts}: MindFormers' experts need an Ascend"
    # MindFormers reads the settings of parallelism in a parallel run only.
    parallel = config if config.get("use_parallel") else {}
    if (mode := value_at(parallel, "parallel.parallel_mode")) in COMPILED_PARALLELISM:
        yield (
            f"'parallel.parallel_mode' must be 0 (data parallel), but is {mode}: MindSpore does not compile "
            "semi-automatic parallelism for a CPU"
        )
    for key in _SPLITS:
        parts = value_at(parallel, f"parallel_config.{key}")
        if isinstance(parts, int) and parts > 1:
            yield (
                f"'parallel_config.{key}' must be 1, but is {parts}: a value above 1 needs semi-automatic parallelism, "
                "which MindSpore does not compile for a CPU. Divide the work by 'parallel_config.data_parallel'"
            )
    if config.get("checkpoint") and (value_at(parallel, "parallel_config.data_parallel") or 1) > 1:
        yield (
            "'checkpoint' must be left out with several processes: with this section, MindFormers asks for the layout "
            "of semi-automatic parallelism, which a CPU does not have, and stops at the first save. The callback "
            "CheckpointMonitor saves .ckpt and .safetensors files without the section"
        )
    folder = value_at(config, "monitor_config.dump_path")
    if value_at(config, "monitor_config.monitor_on") and folder:
        yield (
            f"'monitor_config.dump_path' must be '', but is {folder!r}: MindSpore writes no dumps (TensorDump) on a "
            "CPU. The formats of 'monitor_config' that write to the log or to TensorBoard do not need the path"
        )
    if value_at(config, "optimizer.type") == "Lamb":
        yield "'optimizer.type' must be another optimizer, but is Lamb. Set it to AdamW"
