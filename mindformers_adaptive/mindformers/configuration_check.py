"""Check a configuration, before anything is built, for mistakes that MindFormers ignores or reports late."""

import inspect
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from mindformers_adaptive.mindformers.keys import FORMER_KEYS, NO_SECTION, PER_TOKEN, SCALE_SENSE, value_at
from mindformers_adaptive.mindformers.lost_precision import warn_of_scaling
from mindformers_adaptive.rules import find_rule, make_rule, rule_of_cell
from mindformers_adaptive.rules.checks import number_remedy
from mindformers_adaptive.rules.rule import Rule
from mindformers_adaptive.text.nearest import describe_wrong, did_you_mean, letters_apart
from mindformers_adaptive.text.untrusted import with_powers

_TRAIN_STEP = "runner_wrapper"


class _Section(NamedTuple):
    """What the YAML section of a class must have.

    Attributes:
        kind (str): the kind of the class in MindFormers' registry.
        needs (str): an argument that a class must take to be the type of this section; "" for none.
        only (tuple): the types whose keys are checked; with (), all types. MindFormers checks the keys of other types.
    """

    kind: str
    needs: str = ""
    only: tuple[str, ...] = ()


# The sections that are checked, by their path. The star stands for the number of an entry in a list.
_SCHEMA = {
    _TRAIN_STEP: _Section("wrapper", needs=PER_TOKEN),
    SCALE_SENSE: _Section("wrapper", needs="loss_scale_value"),
    # MFLossMonitor takes any keyword, and MindFormers adds this callback to every training as the first one.
    "callbacks.*": _Section("callback", only=("LossScaleMonitor", "GradientRangeMonitor", "MFLossMonitor")),
}
# Keys that MindFormers reads, although its templates of a configuration do not have them.
_OUTSIDE_TEMPLATES = ["checkpoint", "generation_config", "grouped_lr_schedule", "profile_cb", "profiler_level"]
_OUTSIDE_TEMPLATES += ["stable_rank_config", "tensorboard"]
# A key of the top level that differs from a known key by at most this number of letters is a misspelling.
_MOST_LETTERS = 2
# A shorter key can be near a known key by chance.
_SHORTEST = 5
# The YAML section of a class holds the arguments of the class, and may also hold these keys. type and auto_register
# name the class. micro_batch_num and parallel_config are set by MindFormers itself.
_NOT_ARGUMENTS = {"type", "auto_register", "micro_batch_num", "parallel_config"}
# The start of each auto_register value that names a module in this package's own register_path folder. The class in
# such a module is registered already, so there is nothing to load.
OWN_AUTO_REGISTER = "adaptive_loss_scaling."
# Usual values of the arguments that an update cell requires. For MindSpore's own cell the usual window is
# _STOCK_WINDOW.
_USUAL_VALUES = {"loss_scale_value": 65536, "scale_factor": 2, "scale_window": 20}
_STOCK_WINDOW = 1000


def check_config(config: Any) -> None:
    """Check a configuration's settings of train step, loss scaling, resuming, number formats and callbacks.

    Keys are compared with the arguments of the class that ``type`` names. A class that ``auto_register`` is still to
    load is not checked, and for a user's class with ``**kwargs`` a doubtful key only gives a warning. Values
    are checked by the update cells and callbacks of this package. All else is left to MindFormers.

    Args:
        config (MindFormerConfig): a loaded configuration, with this package registered. Texts such as 2^16 in the
            sections of loss scaling and of callbacks are replaced by numbers. The configuration of an evaluation or a
            prediction is not checked.

    Raises:
        TypeError: if a value has the wrong type, a section has keys that its class does not take, or lacks one.
        ValueError: if a value is out of range, no class has the name that ``type`` gives, a key of the top level is a
            misspelling of a known one, or the ``checkpoint:``
            section is used in PyNative mode with a MindFormers that needs hyper-parallel for it, which is not
            installed.

    Warns:
        UserWarning: if MindFormers does not read a section, the loss scale of a bfloat16 model moves, a float16 model
            has none, or weights are kept in float16.
    """
    if config.run_mode in ("eval", "predict"):
        return
    # The sections are changed in place.
    with_powers([config.runner_wrapper, config.callbacks])
    _check_top_level(config)
    _check_resuming(config)
    _check_format_of_checkpoints(config)
    sections = [section for section in _sections_of(config) if not _is_loaded_later(*section[:2])]
    if errors := [error for section in sections if (error := _check_names(*section)) is not None]:
        raise type(errors[0])("\n".join(map(str, errors)))
    for section in sections:
        _check_values(*section)
    warn_of_scaling(config)


def _sections_of(config: Any) -> Iterator[tuple[dict[str, Any], str, _Section]]:
    """Yield content, path and schema of each section to check."""
    train_step = config.get(_TRAIN_STEP)
    if train_step and isinstance(train_step, dict):
        yield train_step, _TRAIN_STEP, _SCHEMA[_TRAIN_STEP]
        if "scale_sense" in train_step:
            _require_section_or_number(train_step["scale_sense"])
            if isinstance(train_step["scale_sense"], dict):
                yield train_step["scale_sense"], SCALE_SENSE, _SCHEMA[SCALE_SENSE]
    for index, callback in enumerate(config.get("callbacks") or []):
        if isinstance(callback, dict):
            yield callback, f"callbacks.{index}", _SCHEMA["callbacks.*"]


def _require_section_or_number(scale_sense: Any) -> None:
    if isinstance(scale_sense, str | list | bool | None):
        kind = "the text " if isinstance(scale_sense, str) else ""
        raise TypeError(
            f"'{SCALE_SENSE}' must be a section or a number, but got {kind}{scale_sense!r}. "
            f"{number_remedy(scale_sense, NO_SECTION)} Or leave the key out, so that the loss is not scaled."
        )
    if isinstance(scale_sense, dict) and not scale_sense.get("type"):
        what = f"has only {', '.join(scale_sense)}" if scale_sense else "has no keys"
        what = "the 'type' is empty" if "type" in scale_sense else what
        raise TypeError(f"'{SCALE_SENSE}' must have a 'type', but {what}. Add 'type: AdaptiveLossScale'.")


def _check_top_level(config: Any) -> None:
    """Raise an error for a misspelled key of the top level; warn of a section that MindFormers does not read."""
    from mindformers.tools.register import template

    known = [*template.CONFIG_NAME_TO_CLASS, *template.GeneralConfig.keys(), *_OUTSIDE_TEMPLATES]
    for key in [key for key in config if key not in known]:
        distances = {name: letters_apart(key, name) for name in known} if len(key) >= _SHORTEST else {}
        nearest = min(distances, key=lambda name: distances[name], default="")
        if distances and distances[nearest] <= _MOST_LETTERS:
            raise ValueError(
                f"{key!r} is not a key that MindFormers reads, so it would have no effect. Write {nearest!r}, or give "
                "a section of your own a name that is less like it."
            )
        if isinstance(config[key], dict | list):
            warnings.warn(
                f"MindFormers does not read the section {key!r}, so it has no effect. Check its name, or take it out.",
                stacklevel=4,
            )


def _check_resuming(config: Any) -> None:
    resume = config.get("resume_training")
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


def _check_names(section: dict[str, Any], path: str, schema: _Section) -> Exception | None:
    """Return an error if a YAML section names no class, or has keys that its class does not take; otherwise None.

    Warn of keys that have no effect, and of doubtful keys that a user's class may take.
    """
    name: Any = section.get("type")
    if (cls := _class_of(name, path, schema)) is None:
        known = _fitting_classes(schema)
        is_unlike_all = path == _TRAIN_STEP and not _hint_at(name, known)
        instead = f"{_train_step_instead_of(section)} " if is_unlike_all else ""
        return ValueError(
            f"'{path}.type' must name a registered class, but got {describe_wrong([name], known)}{instead}If "
            f"{name!r} is a class that you wrote, add the key 'auto_register' to the section '{path}'."
        )
    names, may_take_more = _arguments_of(cls)
    if path == _TRAIN_STEP and PER_TOKEN not in names and not may_take_more:
        raise TypeError(
            f"'{path}.type' must be a cell that takes '{PER_TOKEN}', which MindFormers gives to it, but got "
            f"{name!r}. {_train_step_instead_of(section)}"
        )
    # The update cell for any rule itself refuses keys that are no arguments of its rule.
    if name == Rule.cell or (schema.only and name not in schema.only):
        return None
    accepted = sorted(names - {"network", "optimizer"})
    start = f"'{path}' must have keys that {cls.__name__} takes, but got "
    refused = []
    for key in [str(key) for key in section if key not in (*accepted, *_NOT_ARGUMENTS)]:
        hint, warning = _hint_at(key, accepted), ""
        if may_take_more:
            warning = f"{start}{key!r}. {hint}The key is passed to {cls.__name__} unchanged." if hint else ""
        elif path == _TRAIN_STEP and (key in FORMER_KEYS or not hint):
            # MindFormers' train-step cells accept any keyword, and ignore keywords that they do not know.
            remedy = f"Write {_present_key(key, section[key])} instead." if FORMER_KEYS.get(key) else "Take it out."
            warning = f"'{path}.{key}' has no effect, because {name} ignores it. {remedy}"
        else:
            refused.append(key)
        if warning:
            warnings.warn(warning, stacklevel=4)
    if not refused:
        return None
    return TypeError(f"{start}{describe_wrong(refused, accepted)}It takes {', '.join(accepted)}.")


def _hint_at(name: str, known: list[str]) -> str:
    return did_you_mean(name, known, most=3, similarity=0.8)


def _check_values(section: dict[str, Any], path: str, schema: _Section) -> None:
    """Check the values of a section, and that the section of loss scaling has all arguments that its class requires.

    A train-step cell is not checked, because MindFormers itself adds arguments to its section.
    """
    if path == _TRAIN_STEP:
        return
    cls = _class_of(section.get("type"), path, schema)
    if cls is None or (schema.only and section["type"] not in schema.only):
        return
    positional = [each for each in _parameters_of(cls) if each.kind is each.POSITIONAL_OR_KEYWORD]
    required = [each.name for each in positional if each.default is each.empty]
    missing = [name for name in required if name not in section]
    if path == SCALE_SENSE and missing:
        raise TypeError(
            f"'{path}' must have all of {', '.join(required)}, which {cls.__name__} requires, but lacks "
            f"{', '.join(missing)}. {_usual_values(section['type'], missing)}"
        )
    if cls.__module__.startswith("mindformers_adaptive."):
        arguments = {name: value for name, value in section.items() if name not in _NOT_ARGUMENTS}
        try:
            with warnings.catch_warnings():
                # Ignore warnings in this check: the class warns again when MindFormers creates it for the training.
                warnings.simplefilter("ignore")
                if path == SCALE_SENSE:
                    _check_rule(cls, arguments)
                else:
                    # A callback only keeps its arguments until a training begins.
                    cls(**arguments)
        except (TypeError, ValueError) as error:
            raise type(error)(f"'{path}': {error}") from error


def _check_rule(cell: Any, arguments: dict[str, Any]) -> None:
    """Check the arguments of an update cell by its rule, which is plain Python, without the cell."""
    if not hasattr(cell, "rule_class"):
        # A cell with a fixed loss scale.
        return
    # Import MindSpore only here, because the help of the commands needs this module.
    from mindformers_adaptive.cells.compiled_update import checked_history_size

    checked_history_size(arguments.pop("history_size", 0))
    rule_class = find_rule(arguments.pop("rule", None) or cell.rule_class)
    names = [name for name in ("loss_scale_value", *rule_class.start_arguments) if name in arguments]
    start = [arguments.pop(name) for name in names]
    make_rule(rule_class, **arguments).start(*start)


def _is_loaded_later(section: dict[str, Any], path: str) -> bool:
    """Return whether ``auto_register`` is still to load the class of a YAML section."""
    auto_register = section.get("auto_register")
    if not auto_register or str(auto_register).startswith(OWN_AUTO_REGISTER):
        return False
    if not (isinstance(auto_register, str) and os.environ.get("REGISTER_PATH")):
        raise ValueError(
            f"'{path}.auto_register' must be 'module.Class' in the folder that --register-path names, but got "
            f"{auto_register!r} and the folder {os.environ.get('REGISTER_PATH')!r}. Give both, or leave out "
            "'auto_register' if the class is from this package."
        )
    return True


def _class_of(name: Any, path: str, schema: _Section) -> Callable[..., Any] | None:
    """Return the class that the ``type`` of a YAML section names, or None if no such class is registered."""
    from mindformers.tools.register import MindFormerRegister

    if callable(name):
        return name  # type: ignore[no-any-return]
    if not isinstance(name, str):
        raise TypeError(f"'{path}.type' must be the name of a class, but got {name!r}. Add 'type: ...' to the section.")
    return MindFormerRegister.get_cls(schema.kind, name) if MindFormerRegister.is_exist(schema.kind, name) else None


def _fitting_classes(schema: _Section) -> list[str]:
    """Return the names of the classes that may be the type of a section."""
    from mindformers.tools.register import MindFormerRegister

    classes = MindFormerRegister.registry[schema.kind]
    return sorted(name for name in classes if not schema.needs or schema.needs in _arguments_of(classes[name])[0])


def _usual_values(cell: str, names: Iterable[str]) -> str:
    """Return a sentence that tells the user to add the missing arguments of an update cell, with usual values.

    Examples:
        >>> _usual_values("AdaptiveLossScale", ["scale_factor", "scale_window"])
        "Add them; usual are 'scale_factor: 2' and 'scale_window: 20'."
    """
    usual = _USUAL_VALUES if rule_of_cell(cell) else _USUAL_VALUES | {"scale_window": _STOCK_WINDOW}
    known = [f"'{name}: {usual[name]}'" for name in names if name in usual]
    them = "them" if len(known) > 1 else "it"
    return f"Add {them}; usual {'are' if len(known) > 1 else 'is'} {' and '.join(known)}." if known else "Add them."


def _train_step_instead_of(section: Mapping[str, Any]) -> str:
    """Return a sentence that recommends MindFormers' train-step cell, and names the present key for each outdated key.

    Examples:
        >>> _train_step_instead_of({"type": "TrainOneStepCell", "sens": 1024})
        "Use MFTrainOneStepCell, which scales the loss and clips gradients, with 'scale_sense: 1024' for 'sens'."
    """
    present = [f"{_present_key(key, section[key])} for {key!r}" for key in section if FORMER_KEYS.get(key)]
    renamed = f", with {' and '.join(present)}" if present else ""
    return f"Use MFTrainOneStepCell, which scales the loss and clips gradients{renamed}."


def _present_key(key: str, value: Any) -> str:
    return f"'{FORMER_KEYS[key]}: {value}'"


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
