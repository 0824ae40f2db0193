"""Check a configuration, before anything is built, for mistakes that MindFormers ignores or reports late."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Collection
from typing import Any

from mindformers_adaptive.mindformers.keys import PER_TOKEN, SCALE_SENSE, value_at
from mindformers_adaptive.mindformers.scaling_checks import (
    check_scale_sense,
    check_stock_arguments,
    is_former_key,
    train_step_instead_of,
    usual_values,
    warn_of_ignored_key,
    warn_of_scaling,
)
from mindformers_adaptive.rules import find_rule
from mindformers_adaptive.rules.description import arguments_of
from mindformers_adaptive.rules.rule import Rule
from mindformers_adaptive.text.nearest import did_you_mean

__all__ = ["OWN_AUTO_REGISTER", "check_config"]

_TRAIN_STEP = "runner_wrapper"

# The YAML section of a class holds the arguments of the class, and may also hold these keys. type and auto_register
# name the class. micro_batch_num and parallel_config are set by MindFormers itself.
_NOT_ARGUMENTS = {"type", "auto_register", "micro_batch_num", "parallel_config"}
_OWN_CALLBACKS = ("LossScaleMonitor", "GradientRangeMonitor")
# The start of each auto_register value that names a module in this package's own register_path folder. The class in
# such a module is registered already, so there is nothing to load.
OWN_AUTO_REGISTER = "adaptive_loss_scaling."


def check_config(config: Any) -> None:
    """Check a configuration's settings of train step, loss scaling, resuming, number formats and callbacks.

    Keys are compared with the arguments of the class that ``type`` names. A class that ``auto_register`` is still to
    load is not checked, and for a user's class with ``**kwargs`` a doubtful key only gives a warning. Values
    are checked by the update cells and callbacks of this package. All else is left to MindFormers.

    Args:
        config (MindFormerConfig): a loaded configuration, with this package registered. The configuration of an
            evaluation or a prediction is not checked.

    Raises:
        TypeError: if a value has the wrong type, a section has a key that its class does not take, or lacks one.
        ValueError: if a value is out of range, no class has the name that ``type`` gives, or the ``checkpoint:``
            section is used in PyNative mode with a MindFormers that needs hyper-parallel for it, which is not
            installed.

    Warns:
        UserWarning: if the loss scale of a bfloat16 model moves, a float16 model has none, or weights are kept in
            float16.
    """
    if config.run_mode in ("eval", "predict"):
        return
    _check_resuming(config.resume_training)
    _check_format_of_checkpoints(config)
    train_step = config.runner_wrapper
    if isinstance(train_step, dict) and train_step:
        _check_section(train_step, _TRAIN_STEP)
        if "scale_sense" in train_step:
            check_scale_sense(train_step["scale_sense"])
        if isinstance(train_step.get("scale_sense"), dict):
            _check_section(train_step["scale_sense"], SCALE_SENSE)
    warn_of_scaling(config)
    for index, callback in enumerate(config.callbacks or []):
        if isinstance(callback, dict):
            _find_class(callback, f"callbacks.{index}", "callback")
            if callback["type"] in _OWN_CALLBACKS:
                _check_section(callback, f"callbacks.{index}", "callback")


def _check_resuming(resume: Any) -> None:
    # With the text 'true' instead of the value True, MindFormers would look for a checkpoint file named 'true'.
    if not isinstance(resume, bool | str | None) or repr(resume).lower() in ("'true'", "'false'"):
        kind = "the text " if isinstance(resume, str) else ""
        raise TypeError(
            f"'resume_training' must be True, False or the name of a checkpoint file, but got {kind}{resume!r}. Write "
            "True and False without quotation marks."
        )


def _check_format_of_checkpoints(config: Any) -> None:
    try:
        from mindformers.checkpoint.layout_adapter import DTensor
    except ImportError:  # MindFormers before 2.0 does not have DTensor
        return
    # DTensor is None if hyper-parallel is not installed. MindFormers would report this only at the first save of a
    # checkpoint.
    if DTensor is None and config.get("checkpoint") and value_at(config, "context.mode") in (1, "PYNATIVE_MODE"):
        raise ValueError(
            "'context.mode' must be 0 (graph mode) with the 'checkpoint' section, but is 1 (PyNative): for this "
            "section in PyNative mode, MindFormers needs hyper-parallel, which is not installed. Set 'context.mode' to "
            "0, or remove the 'checkpoint' section: the callback CheckpointMonitor saves checkpoints without it."
        )


def _check_arguments(cls: Callable[..., Any], section: dict[str, Any], path: str) -> None:
    """Check the values in a class's YAML section, if the class is from this package, MindSpore or MindFormers."""
    origin = cls.__module__.partition(".")[0]
    arguments = {name: value for name, value in section.items() if name not in _NOT_ARGUMENTS}
    try:
        if origin == "mindformers_adaptive":
            with warnings.catch_warnings():
                # Ignore warnings in this check: the class warns again when MindFormers creates it for the training.
                warnings.simplefilter("ignore")
                cls(**arguments)
        elif origin in ("mindspore", "mindformers"):
            check_stock_arguments(arguments)
    except (TypeError, ValueError) as error:
        raise type(error)(f"'{path}': {error}") from error


def _check_section(section: dict[str, Any], path: str, kind: str = "wrapper") -> None:
    """Check that a YAML section has only keys that the class named in it takes, and all that the class requires."""
    cls = _find_class(section, path, kind)
    if cls is None:
        return
    names, may_take_more = _arguments_of(cls)
    if path == _TRAIN_STEP and PER_TOKEN not in names and not may_take_more:
        raise TypeError(
            f"'{path}.type' must be a cell that takes '{PER_TOKEN}', which MindFormers gives to it, but got "
            f"{section['type']!r}. {train_step_instead_of(section)}"
        )
    if section["type"] == Rule.cell and "rule" in section:
        # In YAML, the section of an update cell for any rule also holds the arguments of the rule.
        try:
            names |= arguments_of(find_rule(section["rule"])).keys() - {"start"}
        except (TypeError, ValueError) as error:
            raise type(error)(f"'{path}': {error}") from error
    accepted = sorted(names - {"network", "optimizer"})
    for key in map(str, section.keys() - names - _NOT_ARGUMENTS):
        nearest = did_you_mean(key, accepted, most=3, similarity=0.8)
        message = f"'{path}' must have keys that {cls.__name__} takes, but got {key!r}. {nearest}"
        if path == _TRAIN_STEP and not may_take_more and (is_former_key(key) or not nearest):
            # MindFormers' train-step cells accept any keyword, and ignore keywords that they do not know.
            warn_of_ignored_key(section, key)
        elif not may_take_more:
            raise TypeError(f"{message}It takes {', '.join(accepted)}.")
        elif nearest:
            warnings.warn(f"{message}The key is passed to {cls.__name__} unchanged.", stacklevel=4)
    positional = [each for each in _parameters_of(cls) if each.kind is each.POSITIONAL_OR_KEYWORD]
    required = [each.name for each in positional if each.default is each.empty]
    missing = [name for name in required if name not in section]
    # Check only update cells for missing arguments: MindFormers itself adds arguments for the other classes.
    if path == SCALE_SENSE and missing:
        raise TypeError(
            f"'{path}' must have all of {', '.join(required)}, which {cls.__name__} requires, but lacks "
            f"{', '.join(missing)}. {usual_values(section['type'], missing)}"
        )
    if path != _TRAIN_STEP:
        _check_arguments(cls, section, path)


def _find_class(section: dict[str, Any], path: str, kind: str = "wrapper") -> Callable[..., Any] | None:
    """Return the class that a YAML section names, or None if ``auto_register`` has not loaded the class yet."""
    from mindformers.tools.register import MindFormerRegister

    name, auto_register = section.get("type"), section.get("auto_register")
    if auto_register and not str(auto_register).startswith(OWN_AUTO_REGISTER):
        if not (isinstance(auto_register, str) and os.environ.get("REGISTER_PATH")):
            raise ValueError(
                f"'{path}.auto_register' must be 'module.Class' in the folder that --register-path names, but got "
                f"{auto_register!r} and the folder {os.environ.get('REGISTER_PATH')!r}. Give both, or leave out "
                "'auto_register' if the class is from this package."
            )
        return None
    if callable(name):
        return name  # type: ignore[no-any-return]
    if not isinstance(name, str):
        raise TypeError(f"'{path}.type' must be the name of a class, but got {name!r}. Add 'type: ...' to the section.")
    if MindFormerRegister.is_exist(kind, name):
        return MindFormerRegister.get_cls(kind, name)  # type: ignore[no-any-return]
    known = sorted(other for other in MindFormerRegister.registry[kind] if _may_stand_at(path, kind, other))
    suggestion = did_you_mean(name, known, most=3, similarity=0.8)
    if path == _TRAIN_STEP and not suggestion:
        suggestion = f"{train_step_instead_of(section)} "
    raise ValueError(
        f"'{path}.type' must name a registered class, but got {name!r}. {suggestion}If {name!r} is a class that you "
        f"wrote, add the key 'auto_register' to the section '{path}'."
    )


def _may_stand_at(path: str, kind: str, name: str) -> bool:
    """Return whether a class may be the type of the YAML section at a path.

    The section ``runner_wrapper`` needs a train-step cell, and ``scale_sense`` needs an update cell.
    """
    from mindformers.tools.register import MindFormerRegister

    needed = {_TRAIN_STEP: PER_TOKEN, SCALE_SENSE: "loss_scale_value"}.get(path)
    return needed is None or needed in _arguments_of(MindFormerRegister.get_cls(kind, name))[0]


def _arguments_of(cls: Callable[..., Any]) -> tuple[set[str], bool]:
    """Return the keyword arguments of a class, and whether a user's class takes others by ``**kwargs``."""
    names, may_take_more = set(), False
    for base in [each for each in cls.__mro__ if "__init__" in vars(each)] if inspect.isclass(cls) else [cls]:
        parameters = _parameters_of(base)
        names |= {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
        if not any(each.kind is each.VAR_KEYWORD for each in parameters):
            break
        # An argument that this class does not take goes through **kwargs to the next base class.
        may_take_more |= base.__module__.partition(".")[0] not in ("mindspore", "mindformers", "mindformers_adaptive")
    return names, may_take_more


def _parameters_of(function: Callable[..., Any]) -> Collection[inspect.Parameter]:
    return inspect.signature(function).parameters.values()
