"""Checks of a loaded YAML file before anything is built: mistakes that MindFormers ignores, or reports late."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Collection
from typing import Any

from mindformers_adaptive.integration.feature_checks import check_features, value_at
from mindformers_adaptive.integration.precision import warn_of_needless_scaling
from mindformers_adaptive.rules.checks import require_flag, require_integer, require_number

__all__ = ["check_config"]

_FLAGS = (
    "use_parallel",
    "calculate_per_token_loss",
    "use_skip_data_by_global_norm",
    "check_for_nan_in_loss_and_grad",
    "runner_config.sink_mode",
    "runner_wrapper.use_clip_grad",
    "runner_wrapper.local_norm",
)
# Keys of every section of a class that are not arguments of the class.
_NOT_ARGUMENTS = {"type", "auto_register"}
# What MindFormers gives to a train-step cell. Keys of runner_wrapper that it sets itself are no mistakes of users.
_GIVEN_TO_TRAIN_STEPS = "calculate_per_token_loss"
_SET_BY_MINDFORMERS = {"micro_batch_num", "parallel_config"}
# The module in the register_path folder of this package, whose class is registered already.
_OWN_AUTO_REGISTER = "adaptive_loss_scaling."


def check_config(config: Any) -> None:
    """Check what a configuration says about the training loop, the train step, loss scaling and callbacks.

    So does :func:`mindformers_adaptive.integration.feature_checks.check_features`, which is called here.
    Keys are compared with the arguments of the class that ``type`` names. A class that ``auto_register`` is still to
    load is not checked, and for a user's class with ``**kwargs`` a doubtful key is only warned of.

    Args:
        config (MindFormerConfig): a loaded configuration, with this package registered. That of an evaluation or a
            prediction is not checked.

    Raises:
        TypeError: if a value has the wrong type, a section has a key that its class does not take, or lacks one.
        ValueError: if a value is out of range, or no class has the name that ``type`` gives.
    """
    if config.run_mode in ("eval", "predict"):
        return
    _check_values(config)
    check_features(config)
    train_step = config.runner_wrapper
    if isinstance(train_step, dict) and train_step:
        _check_train_step(train_step)
        _check_scale_sense(train_step.get("scale_sense"))
        warn_of_needless_scaling(config)
    for key, module_type in (("optimizer", "optimizer"), ("lr_schedule", "lr")):
        if isinstance(config.get(key), dict) and config[key].get("type"):
            _find_class(config[key], key, module_type)
    for place, callback in enumerate(config.callbacks or []):
        if isinstance(callback, dict) and callback.get("type"):
            path = f"callbacks.{place}"
            cls = _find_class(callback, path, "callback")
            # One that takes any argument may ignore some: with MindFormers' own callbacks people rely on that.
            if cls is not None and not _takes_any(cls):
                _check_keys(callback, path, cls)


def _check_values(config: Any) -> None:
    for key in _FLAGS:
        if (value := value_at(config, key)) is not None:
            require_flag(key, value)
    resume = config.resume_training
    if isinstance(resume, str) and resume.lower() in ("true", "false"):
        raise TypeError(
            f"'resume_training' must be True, False or the name of a checkpoint file, but got the text {resume!r}. "
            "Write it without quotation marks."
        )
    if (epochs := value_at(config, "runner_config.epochs")) is not None:
        # The default of TrainingArguments is 3.0.
        epochs = int(epochs) if isinstance(epochs, float) and epochs.is_integer() else epochs
        require_integer("runner_config.epochs", epochs, 1, "Give how often to go through the data.")
    if (norm := value_at(config, "runner_wrapper.max_grad_norm")) is not None:
        remedy = "YAML reads '1.0' in quotation marks and 1e-3 as text, and 1.0 and 1.0e-3 as numbers."
        require_number("runner_wrapper.max_grad_norm", norm, "a finite number above 0", lambda value: value > 0, remedy)


def _check_train_step(section: dict[str, Any]) -> None:
    cls = _find_class(section, "runner_wrapper", "wrapper")
    if cls is None:
        return
    names, _ = _arguments_of(cls)
    if _GIVEN_TO_TRAIN_STEPS not in names and not _takes_any(cls):
        raise TypeError(
            f"'runner_wrapper.type' must be a cell that takes '{_GIVEN_TO_TRAIN_STEPS}', which MindFormers gives to "
            f"it, but got {section['type']!r}. Use MFTrainOneStepCell, which does the same and clips gradients."
        )
    _check_keys(section, "runner_wrapper", cls, allowed=_SET_BY_MINDFORMERS)


def _check_scale_sense(scale_sense: Any) -> None:
    if isinstance(scale_sense, str):
        raise TypeError(
            f"'runner_wrapper.scale_sense' must be a section or a number, but got the text {scale_sense!r}. Write the "
            "name of the class as its 'type', with 'loss_scale_value' and the other arguments beside it."
        )
    if not isinstance(scale_sense, dict):
        return
    if not scale_sense.get("type"):
        raise TypeError(
            f"'runner_wrapper.scale_sense' must have a 'type', but has only {', '.join(scale_sense) or 'no keys'}. Add "
            "'type: AdaptiveLossScaleUpdateCell'."
        )
    cls = _find_class(scale_sense, "runner_wrapper.scale_sense", "wrapper")
    if cls is not None:
        _check_keys(scale_sense, "runner_wrapper.scale_sense", cls)
        required = [
            argument.name
            for argument in inspect.signature(cls).parameters.values()
            if argument.default is argument.empty and argument.kind is argument.POSITIONAL_OR_KEYWORD
        ]
        if missing := [name for name in required if name not in scale_sense]:
            raise TypeError(
                f"'runner_wrapper.scale_sense' must have all of {', '.join(required)}, which {cls.__name__} requires, "
                f"but lacks {', '.join(missing)}. Add {'it' if len(missing) == 1 else 'them'}."
            )


def _find_class(section: dict[str, Any], path: str, module_type: str) -> Callable[..., Any] | None:
    """Return the class that a section names; None if ``auto_register`` is still to load it."""
    from mindformers.tools.register import MindFormerRegister

    name, auto_register = section["type"], section.get("auto_register")
    if auto_register and not str(auto_register).startswith(_OWN_AUTO_REGISTER):
        return None
    if not isinstance(name, str):
        return name if callable(name) else None
    if MindFormerRegister.is_exist(module_type, name):
        return MindFormerRegister.get_cls(module_type, name)  # type: ignore[no-any-return]
    known = sorted(MindFormerRegister.registry.get(module_type, ()))
    raise ValueError(
        f"'{path}.type' must name a registered class, but got {name!r}. {_nearest(name, known)}A class of your own "
        "needs 'auto_register' beside it."
    )


def _check_keys(section: dict[str, Any], path: str, cls: Callable[..., Any], allowed: Collection[str] = ()) -> None:
    names, may_take_more = _arguments_of(cls)
    for key in section.keys() - names - _NOT_ARGUMENTS - set(allowed):
        own = sorted(names - {"network", "optimizer"})
        message = f"'{path}' must have keys that {cls.__name__} takes, but got {key!r}. {_nearest(key, own)}"
        if not may_take_more:
            raise TypeError(f"{message}It takes {', '.join(own)}.")
        if difflib.get_close_matches(key, own, cutoff=0.8):
            warnings.warn(f"{message}It is passed on as it is.", stacklevel=5)


def _arguments_of(cls: Callable[..., Any]) -> tuple[set[str], bool]:
    """Return the keyword arguments of a class, and whether code of a user may take others from ``**kwargs``."""
    names = _keywords(cls)
    if not inspect.isclass(cls) or not _takes_any(cls):
        return names, _takes_any(cls)
    may_take_more = False
    for base in (base for base in cls.__mro__ if "__init__" in vars(base)):
        initialise = vars(base)["__init__"]
        names |= _keywords(initialise)
        if not _takes_any(initialise):
            break
        # What this class does not take is given to the next one.
        package = base.__module__.partition(".")[0]
        may_take_more |= package not in ("mindspore", "mindformers", "mindformers_adaptive")
    return names - {"self"}, may_take_more


def _keywords(function: Callable[..., Any]) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}


def _takes_any(cls: Callable[..., Any]) -> bool:
    return any(each.kind is each.VAR_KEYWORD for each in inspect.signature(cls).parameters.values())


def _nearest(word: str, known: Collection[str]) -> str:
    candidates = difflib.get_close_matches(word, known, n=3, cutoff=0.6)
    return f"Did you mean {' or '.join(map(repr, candidates))}? " if candidates else ""
