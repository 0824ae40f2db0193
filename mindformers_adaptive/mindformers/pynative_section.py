"""Recognise YAML files for MindFormers' PyNative trainer, and read their section ``training.loss_scale``."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindformers_adaptive.mindformers.keys import NO_SECTION, value_at
from mindformers_adaptive.mindformers.scaling_checks import warn_of_dtype
from mindformers_adaptive.rules import RULES, find_rule, make_rule, rule_of_cell
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.rules.checks import number_remedy, require_positive, warn_of_rounding
from mindformers_adaptive.rules.description import all_arguments
from mindformers_adaptive.rules.rule import Rule
from mindformers_adaptive.text.nearest import describe_wrong
from mindformers_adaptive.text.untrusted import read_yaml, with_powers

__all__ = ["SECTION", "check_config", "is_for_pynative_trainer", "read_config", "read_section"]

SECTION = "training.loss_scale"

# Sections that only MindFormers' graph-mode trainer reads.
_GRAPH = ("runner_config", "runner_wrapper", "parallel_config", "lr_schedule", "trainer")
_TYPES = f"{', '.join(rule.cell for rule in RULES.values())}, or RuleLossScaleUpdateCell with a 'rule'"


def is_for_pynative_trainer(content: object, mode: int | None = None) -> bool:
    """Return whether a YAML file's content is for MindFormers' PyNative trainer, and not for the graph-mode trainer.

    Args:
        content (object): the content of the file.
        mode (int, optional): the ``context.mode`` to be used instead of the file's. Default: None.

    Raises:
        ValueError: if the file has sections of both trainers, or is for the PyNative trainer in graph mode.

    Examples:
        >>> is_for_pynative_trainer({"training": {"steps": 100}}), is_for_pynative_trainer({"runner_config": {}})
        (True, False)
    """
    if not isinstance(content, Mapping) or not isinstance(content.get("training"), Mapping):
        return False
    if both := [name for name in _GRAPH if content.get(name)]:
        raise ValueError(
            "The file must be for one of MindFormers' two trainers, but has 'training' of the PyNative trainer and "
            f"{', '.join(map(repr, both))} of the graph-mode trainer. Remove the sections of one trainer."
        )
    context = content.get("context")
    mode = context.get("mode", 1) if mode is None and isinstance(context, Mapping) else mode
    if mode not in (None, 1, "PYNATIVE_MODE"):
        raise ValueError(
            f"'context.mode' must be 1 in a file with 'training', which is for MindFormers' PyNative trainer, but is "
            f"{mode!r}. Set it to 1, or write the file for the graph-mode trainer, with 'runner_config' and "
            "'runner_wrapper'."
        )
    return True


def read_config(config: str | Path | Mapping[str, Any] | None) -> tuple[dict[str, Any], Any]:
    """Split a configuration into the section ``training.loss_scale``, which MindFormers would reject, and all else.

    Args:
        config (Union[str, Path, Mapping]): a YAML file, or its content; not changed.

    Returns:
        tuple[dict, object], the configuration without the section, and the section, or None if it is missing.

    Raises:
        TypeError: if ``config`` is neither a file nor a dict of keys, or ``training`` is not a section.
        ValueError: if the file is not YAML.

    Examples:
        >>> read_config({"training": {"steps": 10, "loss_scale": 1024}})
        ({'training': {'steps': 10}}, 1024)
    """
    if isinstance(config, str | Path):
        config = read_yaml(config)
    if not isinstance(config, Mapping):
        raise TypeError(f"'config' must be a YAML file or a dict of its keys, but got {str(config)[:80]!r}.")
    training = config.get("training") or {}
    if not isinstance(training, Mapping):
        raise TypeError(f"'training' must be a section of keys, but got {training!r}. Indent its keys below it.")
    other_keys = {name: value for name, value in training.items() if name != "loss_scale"}
    return {**config, "training": other_keys}, training.get("loss_scale")


def read_section(section: object) -> dict[str, Any]:
    """Check the section ``training.loss_scale``; return the class of its loss-scaling rule, and the rule's arguments.

    Args:
        section (Union[float, Mapping]): a number for a fixed loss scale, or ``type`` and the arguments, as in the
            ``scale_sense`` of the graph-mode trainer.

    Returns:
        dict, ``rule`` (type), ``loss_scale_value`` (float) and the other arguments.

    Raises:
        TypeError: if ``section`` is neither a number nor a dict, lacks ``type``, or has a key or value of a wrong kind.
        ValueError: if there is no such type, or a value is out of its range.

    Examples:
        >>> section = read_section({"type": "AdaptiveLossScale", "loss_scale_value": 1024, "scale_window": 20})
        >>> section.pop("rule").name, section
        ('adaptive', {'loss_scale_value': 1024, 'scale_window': 20})
    """
    section = with_powers(copy.deepcopy(section))
    if isinstance(section, int | float) and not isinstance(section, bool):
        scale = require_positive(SECTION, section)
        return {"rule": AdaptiveRule} | dict.fromkeys(("loss_scale_value", "min_loss_scale", "max_loss_scale"), scale)
    if not isinstance(section, Mapping):
        raise TypeError(
            f"'{SECTION}' must be a section or a number, but got {section!r}. {number_remedy(section, NO_SECTION)}"
        )
    arguments = {str(name): value for name, value in section.items()}
    rule = _rule_of(arguments)
    known = all_arguments(rule)
    if wrong := [name for name in arguments if name not in known]:
        raise TypeError(
            f"'{SECTION}' must have keys that the rule {rule.name!r} takes, but got {describe_wrong(wrong, known)}"
            f"It takes {', '.join(known)}."
        )
    arguments.setdefault("loss_scale_value", known["loss_scale_value"])
    of_start = {name: arguments[name] for name in rule.start_arguments if name in arguments}
    of_rule = {name: value for name, value in arguments.items() if name not in (*of_start, "loss_scale_value")}
    try:
        with warnings.catch_warnings():
            # Ignore warnings in this check: the rule warns again when it is created for the training.
            warnings.simplefilter("ignore")
            make_rule(rule, **of_rule).start(arguments["loss_scale_value"], **of_start)
    except (TypeError, ValueError) as error:
        raise type(error)(f"'{SECTION}': {error}") from error
    return {"rule": rule, **arguments}


def _rule_of(arguments: dict[str, Any]) -> type[Rule]:
    """Return the rule that ``type`` (or ``rule``, if the type needs it) names. Remove these keys from ``arguments``."""
    kind = arguments.pop("type", None)
    if kind == Rule.cell:
        try:
            return find_rule(arguments.pop("rule", ""))
        except (TypeError, ValueError) as error:
            raise type(error)(f"'{SECTION}': {error}") from error
    if (rule := rule_of_cell(kind)) is None:
        wrong = "it is missing" if kind is None else f"got {kind!r}"
        kind_of_error = ValueError if isinstance(kind, str) else TypeError
        raise kind_of_error(f"'{SECTION}.type' must be {_TYPES}, but {wrong}. Write 'type: AdaptiveLossScale'.")
    return rule


def check_config(config: Mapping[str, Any], section: object) -> None:
    """Check the loss-scaling section of a configuration, and the settings that cannot be combined with it.

    Args:
        config (Mapping): the configuration, without the section.
        section (object): ``training.loss_scale``, or None where there is none.

    Raises:
        TypeError: as in :func:`read_section`.
        ValueError: for the same reasons; for a pipeline; and for a callback that works with the graph-mode trainer
            only.

    Warns:
        UserWarning: if a float16 model has no section, or a bfloat16 model has one that moves its loss scale.

    Examples:
        >>> check_config({"parallelism": {"pipeline_parallel": 2}}, 1024.0)
        Traceback (most recent call last):
        ValueError: 'parallelism.pipeline_parallel' must be 1 with 'training.loss_scale', but is 2: ...
    """
    if section is not None and read_section(section)["rule"] is AdaptiveRule:
        scale = section.get("loss_scale_value") if isinstance(section, Mapping) else section
        warn_of_rounding(f"{SECTION}.loss_scale_value" if scale is not section else SECTION, scale, stacklevel=2)
    kind = section.get("type") if isinstance(section, Mapping) else None if section is None else ""
    warn_of_dtype("model.compute_dtype", value_at(config, "model.compute_dtype"), SECTION, kind, stacklevel=3)
    if section is None:
        return
    stages = value_at(config, "parallelism.pipeline_parallel")
    if isinstance(stages, int) and stages > 1:
        raise ValueError(
            f"'parallelism.pipeline_parallel' must be 1 with '{SECTION}', but is {stages}: the pipeline schedule of "
            "MindFormers starts the backward passes itself, where this package cannot multiply by the loss scale. Use "
            "data or tensor parallelism, or train in bfloat16 without the section."
        )
    callbacks = config.get("callbacks")
    for index, callback in enumerate(callbacks if isinstance(callbacks, list) else []):
        if isinstance(callback, Mapping) and callback.get("type") == "GradientRangeMonitor":
            raise ValueError(
                f"'callbacks.{index}.type' must be a callback of the PyNative trainer, but GradientRangeMonitor works "
                "with the graph-mode trainer only. Remove this callback; LossScaleMonitor works with both trainers."
            )
