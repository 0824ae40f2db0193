"""Checks of a configuration before anything is built: what MindFormers ignores, reports late, or cannot do on a CPU."""

from __future__ import annotations

import difflib
import inspect
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from mindformers_adaptive.rules import find_rule, rule_of_cell
from mindformers_adaptive.rules.base import Rule
from mindformers_adaptive.rules.checks import require_flag, require_integer, require_number, require_positive
from mindformers_adaptive.rules.formats import FLOAT16

__all__ = ["FIXED_SCALES", "OWN_AUTO_REGISTER", "check_config", "check_cpu", "check_sections", "given_to_train_step"]
__all__ += ["value_at"]

_SKIP = "use_skip_data_by_global_norm"
_PER_TOKEN = "calculate_per_token_loss"
_ACCUMULATION = "runner_config.gradient_accumulation_steps"
_TRAIN_STEP = "runner_wrapper"
_SCALE_SENSE = f"{_TRAIN_STEP}.scale_sense"
_COMPUTE_DTYPE = "model.model_config.compute_dtype"
_WEIGHTS_DTYPE = "model.model_config.param_init_type"
_FLAGS = (
    "use_parallel",
    _PER_TOKEN,
    _SKIP,
    "check_for_nan_in_loss_and_grad",
    "runner_config.sink_mode",
    "runner_wrapper.use_clip_grad",
    "runner_wrapper.local_norm",
)
# What MindFormers reads as a section of keys, and as a list of such sections.
_SECTIONS = (
    *("context", "eval_dataset", "eval_dataset_task", "lr_schedule", "metric", "model", "moe_config", "monitor_config"),
    *("optimizer", "parallel", "parallel_config", "processor", "recompute_config", "runner_config", _TRAIN_STEP),
    *("swap_config", "train_dataset", "train_dataset_task", "trainer", "model.model_config", "model.arch"),
)
_LISTS = ("callbacks", "eval_callbacks")
# Both stop on a norm that is too large, where use_skip_data_by_global_norm goes on.
_STOP_BY_NORM = ("check_for_global_norm", "health_checkpoint.global_norm_spike_threshold")

# Arguments of MindSpore's own update cells, which do not check them.
_STOCK_ARGUMENTS: dict[str, Callable[[str, Any], object]] = {
    "loss_scale_value": require_positive,
    "scale_factor": lambda name, value: require_number(
        name, value, "a finite number above 1", lambda number: number > 1, "The usual value is 2."
    ),
    "scale_window": lambda name, value: require_integer(name, value, 1, "The usual value is 1000."),
}

# Keys of the section of a class that are not arguments of the class. The last two MindFormers sets itself.
_NOT_ARGUMENTS = {"type", "auto_register", "micro_batch_num", "parallel_config"}
_OWN_CALLBACKS = ("LossScaleMonitor", "GradientRangeMonitor")
# The module in the register_path folder of this package, whose class is registered already.
OWN_AUTO_REGISTER = "adaptive_loss_scaling."

# Update cells that do not move the scale.
FIXED_SCALES = ("FixedLossScaleUpdateCell", "NoLossScaleUpdateCell")
# Update cells that move the scale beside those of RULES, and so skip steps and keep a state.
_MOVING = ("DynamicLossScaleUpdateCell", Rule.cell)
# From 2^32, the usual start, a training of mean losses loses about 16 steps. A start above that is worth a word.
_USUAL_START = 2.0**32
# Optimizers of MindSpore whose state has the type of the weights; that of MindFormers' AdamW is float32 always.
_STATE_AS_WEIGHTS = ("Adam", "AdamWeightDecay")
_BFLOAT16, _FLOAT16 = ("bfloat16", "bf16"), ("float16", "fp16")

# Of the configuration of a model: what a CPU needs, and why.
_CPU_MODEL: dict[str, tuple[bool, str]] = {
    "use_flash_attention": (False, "MindSpore has no flash attention (FlashAttentionScore) for a CPU"),
    "fused_rms_norm": (False, "MindSpore has no fused norm (RmsNorm) for a CPU"),
    "use_rope_slice": (True, "a CPU does not broadcast the matrices of the other way"),
}
# From parallel.parallel_mode: semi-automatic and automatic parallelism, by number and by name.
_COMPILED_PARALLELISM = (1, 2, "semi_auto_parallel", "auto_parallel")
_SPLITS = ("model_parallel", "pipeline_stage", "context_parallel", "expert_parallel")


def value_at(config: Any, key: str) -> Any:
    """Return what a dotted key of a configuration leads to, or None."""
    for name in key.split("."):
        config = config.get(name) if isinstance(config, dict) else None
    return config


def given_to_train_step(config: Any, name: str) -> Any:
    """Return what MindFormers gives to a train-step cell: from the cell's own section, or else from the top."""
    own = value_at(config, f"runner_wrapper.{name}")
    return value_at(config, name) if own is None else own


def check_sections(config: Mapping[str, Any]) -> None:
    """Raise TypeError where a configuration, or a YAML file, has something else for a section of MindFormers."""
    for key in _SECTIONS:
        if not isinstance(value := value_at(config, key), dict | None):
            raise TypeError(f"'{key}' must be a section of keys, but got {value!r}. Write its keys below it, indented.")
    for key in _LISTS:
        callbacks = config.get(key)
        if not isinstance(callbacks, list | None) or not all(isinstance(one, dict) for one in callbacks or []):
            raise TypeError(
                f"'{key}' must be a list of sections, but got {callbacks!r}. Write '- type: LossScaleMonitor', its "
                "arguments below that."
            )


def check_config(config: Any) -> None:
    """Check what a configuration says about the training loop, the train step, loss scaling and its callbacks.

    Keys are compared with the arguments of the class that ``type`` names. A class that ``auto_register`` is still to
    load is not checked, and for a user's class with ``**kwargs`` a doubtful key is only warned of. Values are those
    that the update cells and the callbacks of this package take.

    Args:
        config (MindFormerConfig): a loaded configuration, with this package registered. That of an evaluation or a
            prediction is not checked.

    Raises:
        TypeError: if a value has the wrong type, a section has a key that its class does not take, or lacks one.
        ValueError: if a value is out of range, no class has the name that ``type`` gives, steps are to be dropped
            by a norm that is not calculated, or that two features react to, or the ``checkpoint:`` section is used in
            PyNative mode with a MindFormers that needs hyper-parallel for it, which is not installed.

    Warns:
        UserWarning: if a loss per token starts from a scale that costs a dozen steps more than the usual start, if
            the loss scale of a bfloat16 model moves, a float16 model has none, or weights are kept in float16.
    """
    if config.run_mode in ("eval", "predict"):
        return
    _check_values(config)
    _check_format_of_checkpoints(config)
    _warn_of_lost_updates(config)
    if given_to_train_step(config, _SKIP):
        _check_dropping(config)
    train_step = config.runner_wrapper
    if isinstance(train_step, dict) and train_step:
        _check_section(train_step, _TRAIN_STEP)
        _check_scale_sense(train_step.get("scale_sense"))
        _warn_of_format(config)
        _warn_of_high_start(config)
    for section, kind in (("optimizer", "optimizer"), ("lr_schedule", "lr")):
        if value_at(config, f"{section}.type") is not None:
            _find_class(config[section], section, kind)
    _warn_of_order(config)
    for place, callback in enumerate(config.callbacks or []):
        if isinstance(callback, dict):
            _find_class(callback, f"callbacks.{place}", "callback")
            if callback["type"] in _OWN_CALLBACKS:
                _check_section(callback, f"callbacks.{place}", "callback")


def _warn_of_order(config: Any) -> None:
    """Warn where the copies of hot experts would go back into place only after a checkpoint was saved."""
    named = [callback.get("type") for callback in config.callbacks or [] if isinstance(callback, dict)]
    if not value_at(config, "moe_config.enable_cold_hot_expert") or "CheckpointMonitor" not in named:
        return
    # MindFormers sorts its own callbacks, and then puts ColdHotExpertMonitor into the second place.
    before = [name for name in ("MFLossMonitor", "TrainingStateMonitor") if name in named]
    if not before:
        warnings.warn(
            "'moe_config.enable_cold_hot_expert' must come with another callback before CheckpointMonitor, because "
            "MindFormers puts ColdHotExpertMonitor into the second place, but CheckpointMonitor is the first: "
            "checkpoints are saved before the experts are back in place. Add MFLossMonitor to 'callbacks'.",
            stacklevel=3,
        )


def _check_values(config: Any) -> None:
    for key in _FLAGS:
        if (value := value_at(config, key)) is not None:
            require_flag(key, value)
    resume = config.resume_training
    if not isinstance(resume, bool | str | None) or repr(resume).lower() in ("'true'", "'false'"):
        kind = "the text " if isinstance(resume, str) else ""
        raise TypeError(
            f"'resume_training' must be True, False or the name of a checkpoint file, but got {kind}{resume!r}. Write "
            "it without quotation marks."
        )
    if (epochs := value_at(config, "runner_config.epochs")) is not None:
        # The default of TrainingArguments is 3.0.
        epochs = int(epochs) if isinstance(epochs, float) and epochs.is_integer() else epochs
        require_integer("runner_config.epochs", epochs, 1, "Give how often to go through the data.")
    if (size := value_at(config, "runner_config.batch_size")) is not None:
        require_integer("runner_config.batch_size", size, 1, "Give the samples of a step.")
    if (seed := config.seed) is not None:
        require_integer("seed", seed, 0, "The usual value is 0.", most=2**32 - 1)
    if (steps := value_at(config, _ACCUMULATION)) is not None:
        require_integer(_ACCUMULATION, steps, 1, "Give 1 for no accumulation.", unit="number of batches")
    if (norm := value_at(config, "runner_wrapper.max_grad_norm")) is not None:
        remedy = "YAML reads '1.0' in quotation marks and 1e-3 as text, and 1.0 and 1.0e-3 as numbers."
        require_number("runner_wrapper.max_grad_norm", norm, "a finite number above 0", lambda value: value > 0, remedy)
    threshold = value_at(config, "monitor_config.global_norm_spike_threshold")
    if not isinstance(threshold, float | None):
        raise TypeError(
            f"'monitor_config.global_norm_spike_threshold' must be a float, but got {threshold!r}. Write it with a "
            "decimal point, as in 3.0."
        )


def _check_format_of_checkpoints(config: Any) -> None:
    try:
        from mindformers.checkpoint.layout_adapter import DTensor
    except ImportError:  # before MindFormers 2.0
        return
    # DTensor is None without hyper-parallel; MindFormers says so at the first save.
    if DTensor is None and config.get("checkpoint") and value_at(config, "context.mode") in (1, "PYNATIVE_MODE"):
        raise ValueError(
            "'context.mode' must be 0 (graph mode) with the 'checkpoint' section, but is 1 (PyNative): for that this "
            "MindFormers needs hyper-parallel, which is not installed. Set it to 0, or take out the section: "
            "CheckpointMonitor saves without it."
        )


def _check_dropping(config: Any) -> None:
    if not value_at(config, "runner_wrapper.use_clip_grad"):
        raise ValueError(
            f"'{_SKIP}' must come with 'runner_wrapper.use_clip_grad: True', because only clipping calculates the norm "
            "of the gradients, but got use_clip_grad=False. Set it to True; a large 'max_grad_norm' clips nothing."
        )
    for other in _STOP_BY_NORM:
        if value_at(config, "monitor_config.monitor_on") and value_at(config, f"monitor_config.{other}"):
            raise ValueError(
                f"'{_SKIP}' must not be True beside 'monitor_config.{other}': one drops a step with a large norm, the "
                "other ends the training there. Set one of them to False."
            )


def _check_scale_sense(scale_sense: Any) -> None:
    if isinstance(scale_sense, str | list | bool):
        kind = "the text " if isinstance(scale_sense, str) else ""
        raise TypeError(
            f"'{_SCALE_SENSE}' must be a section or a number, but got {kind}{scale_sense!r}. Write the name of the "
            "class as its 'type', with 'loss_scale_value' and the other arguments beside it."
        )
    if isinstance(scale_sense, int | float):
        require_positive(_SCALE_SENSE, scale_sense)
    if not isinstance(scale_sense, dict):
        return
    if not scale_sense.get("type"):
        raise TypeError(
            f"'{_SCALE_SENSE}' must have a 'type', but has only {', '.join(scale_sense) or 'no keys'}. Add "
            "'type: AdaptiveLossScale'."
        )
    _check_section(scale_sense, _SCALE_SENSE)


def _check_arguments(cls: Callable[..., Any], section: dict[str, Any], path: str) -> None:
    """Check the values that a section has for a class, if it is one of this package or a stock update cell."""
    origin = cls.__module__.partition(".")[0]
    given = {name: value for name, value in section.items() if name not in _NOT_ARGUMENTS}
    try:
        if origin == "mindformers_adaptive":
            with warnings.catch_warnings():
                # It warns again when it is made to be used.
                warnings.simplefilter("ignore")
                cls(**given)
        elif origin in ("mindspore", "mindformers"):
            for name in _STOCK_ARGUMENTS.keys() & given:
                _STOCK_ARGUMENTS[name](name, given[name])
    except (TypeError, ValueError) as error:
        raise type(error)(f"'{path}': {error}") from error


def _check_section(section: dict[str, Any], path: str, kind: str = "wrapper") -> None:
    """Check a section that names a class: its keys, and that it has those without which the class cannot be built."""
    cls = _find_class(section, path, kind)
    if cls is None:
        return
    names, may_take_more = _arguments_of(cls)
    if path == _TRAIN_STEP and _PER_TOKEN not in names and not may_take_more:
        raise TypeError(
            f"'{path}.type' must be a cell that takes '{_PER_TOKEN}', which MindFormers gives to it, but got "
            f"{section['type']!r}. Use MFTrainOneStepCell, which does the same and clips gradients."
        )
    if section["type"] == Rule.cell and "rule" in section:
        # The arguments of the rule stand beside those of its cell.
        names |= inspect.signature(find_rule(section["rule"])).parameters.keys()
    own = sorted(names - {"network", "optimizer"})
    for key in section.keys() - names - _NOT_ARGUMENTS:
        message = f"'{path}' must have keys that {cls.__name__} takes, but got {key!r}. {_nearest(key, own)}"
        if not may_take_more:
            raise TypeError(f"{message}It takes {', '.join(own)}.")
        if difflib.get_close_matches(key, own, cutoff=0.8):
            warnings.warn(f"{message}It is passed on as it is.", stacklevel=4)
    given = [each for each in _parameters_of(cls) if each.kind is each.POSITIONAL_OR_KEYWORD]
    required = [each.name for each in given if each.default is each.empty]
    missing = [name for name in required if name not in section]
    # To the other classes MindFormers gives arguments of its own.
    if path == _SCALE_SENSE and missing:
        raise TypeError(
            f"'{path}' must have all of {', '.join(required)}, which {cls.__name__} requires, but lacks "
            f"{', '.join(missing)}. Add {'it' if len(missing) == 1 else 'them'}."
        )
    if path != _TRAIN_STEP:
        _check_arguments(cls, section, path)


def _find_class(section: dict[str, Any], path: str, kind: str = "wrapper") -> Callable[..., Any] | None:
    """Return the class that a section names; None if ``auto_register`` is still to load it."""
    from mindformers.tools.register import MindFormerRegister

    name, auto_register = section.get("type"), section.get("auto_register")
    if auto_register and not str(auto_register).startswith(OWN_AUTO_REGISTER):
        return None
    if callable(name):
        return name  # type: ignore[no-any-return]
    if not isinstance(name, str):
        raise TypeError(f"'{path}.type' must be the name of a class, but got {name!r}. Add 'type: ...' to the section.")
    if MindFormerRegister.is_exist(kind, name):
        return MindFormerRegister.get_cls(kind, name)  # type: ignore[no-any-return]
    nearest = _nearest(name, sorted(MindFormerRegister.registry[kind]))
    raise ValueError(
        f"'{path}.type' must name a registered class, but got {name!r}. {nearest}A class of your own needs "
        "'auto_register' beside it."
    )


def _arguments_of(cls: Callable[..., Any]) -> tuple[set[str], bool]:
    """Return the keyword arguments of a class, and whether code of a user may take others from ``**kwargs``."""
    names, may_take_more = set(), False
    for base in [each for each in cls.__mro__ if "__init__" in vars(each)] if inspect.isclass(cls) else [cls]:
        parameters = _parameters_of(base)
        names |= {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
        if not any(each.kind is each.VAR_KEYWORD for each in parameters):
            break
        # What this class does not take is given to the next one.
        may_take_more |= base.__module__.partition(".")[0] not in ("mindspore", "mindformers", "mindformers_adaptive")
    return names, may_take_more


def _parameters_of(function: Callable[..., Any]) -> Collection[inspect.Parameter]:
    return inspect.signature(function).parameters.values()


def _nearest(word: str, known: Collection[str]) -> str:
    candidates = difflib.get_close_matches(word, known, n=3, cutoff=0.6)
    return f"Did you mean {' or '.join(map(repr, candidates))}? " if candidates else ""


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
        f"{text} Training goes on with it. Set it to float32; 'compute_dtype' may stay float16.", stacklevel=3
    )


def _warn_of_format(config: Any) -> None:
    # bfloat16 has the range of float32: nothing underflows or overflows that would not in float32.
    cell, dtype = value_at(config, f"{_SCALE_SENSE}.type"), _model_values(config).get("compute_dtype")
    if str(dtype).lower().rpartition(".")[2] in _FLOAT16 and value_at(config, _SCALE_SENSE) is None:
        warnings.warn(
            f"'{_COMPUTE_DTYPE}' is {dtype}, in which small gradients become 0, but there is no '{_SCALE_SENSE}', so "
            "the loss is not scaled. Add a section of type AdaptiveLossScale, or 'scale_sense: 1.0' if that "
            "is what you mean.",
            stacklevel=4,
        )
    if (cell in _MOVING or rule_of_cell(cell)) and str(dtype).lower() in _BFLOAT16:
        warnings.warn(
            f"'{_COMPUTE_DTYPE}' is {dtype}, which has the range of float32 and needs no loss scaling, but "
            f"'{_SCALE_SENSE}' is of type {cell}. Training goes on with it. Set 'scale_sense: 1.0' to train without, "
            "or 'compute_dtype' to float16 if that is what you mean.",
            stacklevel=4,
        )


def _warn_of_high_start(config: Any) -> None:
    scale_sense = value_at(config, _SCALE_SENSE)
    if config.get("resume_training") or not isinstance(scale_sense, dict):
        return
    # Whoever sees the gradients comes down in a few steps from anywhere.
    if (rule := rule_of_cell(scale_sense.get("type"))) is not None and rule.signals:
        return
    scale = scale_sense.get("loss_scale_value")
    # How many tokens the backward pass sums over in one process at most, where the file says.
    sizes = [value_at(config, key) for key in ("runner_config.batch_size", "model.model_config.seq_length")]
    sizes.append(value_at(config, _ACCUMULATION) or 1)
    is_known = all(isinstance(size, int) and size >= 1 for size in sizes)
    # A wrong value is for the cell to refuse.
    if not given_to_train_step(config, _PER_TOKEN) or not is_known or not isinstance(scale, int | float):
        return
    if scale * (tokens := math.prod(sizes)) > _USUAL_START:
        bits = math.log2(tokens)
        warnings.warn(
            f"With '{_PER_TOKEN}' the gradients are divided by the number of tokens only after the backward pass, so "
            f"overflows begin at a scale lower by log2({tokens}) = {bits:.0f} bits, and a start from "
            f"2^{math.log2(scale):.0f} skips about {bits:.0f} steps more. 'adaptive-loss-scale find' says where to "
            "start.",
            stacklevel=4,
        )


def check_cpu(config: Any, model_config: Any = None) -> None:
    """Refuse a training on a CPU that asks for what MindSpore or MindFormers cannot do there.

    MindSpore says it after it has compiled, or not at all.

    Args:
        config (MindFormerConfig): of a training.
        model_config (PretrainedConfig, optional): of the model, where it is built already. Default: None, the section
            ``model.model_config``, and the defaults of the class that it names.

    Raises:
        ValueError: for flash attention, fused norms, BF16, mixture of experts, mcore models, semi-automatic
            parallelism, pipeline stages, the ``checkpoint:`` section of several processes, dumps of ``monitor_config``
            and Lamb; it names each key, and what to set instead.
    """
    model = _model_values(config) if model_config is None else vars(model_config)
    if problems := [*_cpu_problems(config, model)]:
        raise ValueError("This cannot be trained on a CPU:\n" + "\n".join(f"- {problem}." for problem in problems))


def _model_values(config: Any) -> Mapping[str, Any]:
    """The section of the model, and the defaults of its class."""
    section = value_at(config, "model.model_config")
    if not isinstance(section, dict):
        return {}
    from mindformers.tools.register import MindFormerRegister

    name = section.get("type")
    if not isinstance(name, str) or not MindFormerRegister.is_exist("config", name):
        return section
    parameters = _parameters_of(MindFormerRegister.get_cls("config", name))
    return {each.name: each.default for each in parameters if each.default is not each.empty} | section


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
    # MindFormers reads these in a parallel run only.
    parallel = config if config.get("use_parallel") else {}
    if (mode := value_at(parallel, "parallel.parallel_mode")) in _COMPILED_PARALLELISM:
        yield (
            f"'parallel.parallel_mode' must be 0 (data parallel), but is {mode}: MindSpore does not compile "
            "semi-automatic parallelism for a CPU"
        )
    for key in _SPLITS:
        parts = value_at(parallel, f"parallel_config.{key}")
        if isinstance(parts, int) and parts > 1:
            yield (
                f"'parallel_config.{key}' must be 1, but is {parts}: it needs semi-automatic parallelism. Share the "
                "work by 'data_parallel'"
            )
    if config.get("checkpoint") and (value_at(parallel, "parallel_config.data_parallel") or 1) > 1:
        yield (
            "'checkpoint' must be left out with several processes: MindFormers then asks for the layout of "
            "semi-automatic parallelism, which a CPU does not have, and stops at the first save. CheckpointMonitor "
            "saves to .ckpt and .safetensors without it"
        )
    folder = value_at(config, "monitor_config.dump_path")
    if value_at(config, "monitor_config.monitor_on") and folder:
        yield (
            f"'monitor_config.dump_path' must be '', but is {folder!r}: MindSpore writes no dumps (TensorDump) on a "
            "CPU. What the formats print to the log and to TensorBoard does not need it"
        )
    if value_at(config, "optimizer.type") == "Lamb":
        yield "'optimizer.type' must be another optimizer, but is Lamb. Set it to AdamW"
