"""Write the configuration of a training into its output folder, and read for ``why`` what a training has left."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mindformers_adaptive.mindformers.checkpoint_reader import read_checkpoints
from mindformers_adaptive.mindformers.workarounds import is_whole
from mindformers_adaptive.record.diagnosis import diagnose
from mindformers_adaptive.record.run_folder import BATCH_FILE, CONFIG_FILE, record_in
from mindformers_adaptive.record.symptom import Finding, Seen
from mindformers_adaptive.record.writer import read_record
from mindformers_adaptive.text.files import atomic_write, make_folder_of
from mindformers_adaptive.text.untrusted import read_yaml

# The saved configuration names the folder of the user's classes in a line above the YAML, because MindFormers has no
# key for this folder.
_REGISTER_PATH = "# register-path: "


def save_configuration(config: Mapping[str, Any], before: Mapping[str, Any]) -> str | None:
    """Write the configuration of a training to its output folder, in the first process only.

    Args:
        config (MindFormerConfig): the configuration.
        before (Mapping): the sections of the configuration, as :func:`as_text` returned them before MindFormers
            replaced some of them by objects.

    Returns:
        str, the folder, or None if the configuration cannot be written.
    """
    from mindformers.tools.logger import logger
    from mindformers.tools.utils import get_real_rank

    folder = os.path.normpath(config.get("output_dir") or "output")
    file = Path(folder, CONFIG_FILE)
    try:
        if get_real_rank() == 0:
            make_folder_of(file)
            with atomic_write(file) as output:
                output.write(f"{_REGISTER_PATH}{os.environ.get('REGISTER_PATH', '')}\n")
                output.writelines((dict(before) | as_text(config)).values())
    # The training goes on without a saved configuration.
    except OSError as error:
        logger.warning("'adaptive-loss-scale why --run %s' will not work: %s.", folder, error)
        return None
    return folder


def as_text(config: Mapping[str, Any]) -> dict[str, str]:
    """Return each section of a configuration as YAML text, by key, except sections that hold objects."""
    sections = {}
    # Leave out the section 'metric': MindFormers turns it into a list, which MindFormers cannot read back.
    for key, value in ((key, value) for key, value in config.items() if key != "metric"):
        with contextlib.suppress(yaml.YAMLError):
            sections[key] = yaml.safe_dump({key: _plain(value)}, sort_keys=False, allow_unicode=True)
    return sections


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True, kw_only=True)
class OverflowCase:
    """What ``why`` explains: a training that a YAML file describes, or the network of a Python program.

    Attributes:
        config (str, optional): the YAML file.
        network (str, optional): instead of the YAML file, ``module.function``; the function takes no arguments and
            returns the train-step cell, or a network that returns its loss.
        register_path (str, optional): the folder of the user's classes.
        overrides (Mapping): values by dotted key that replace values of the YAML file.
        checkpoint (str, optional): a ``.ckpt`` or ``.safetensors`` file, or a folder, whose newest checkpoint is taken.
            None for the weights that the YAML file says to load, or that the function gives to the network.
        train_dataset_dir (str, optional): the training data, instead of those that the YAML file names.
        batch (str, optional): a file of one batch, as ``LossScaleMonitor(explain=True)`` writes it, instead of the
            data. A Python program needs it.
        batches (int): how many batches of the data. Each costs up to three passes in PyNative mode, and a model that
            overflows does so with almost any batch, so two are enough.
        loss_scale (float, optional): the loss scale of the training; None for the one of the train-step cell.
        graph (bool): whether the passes are run in graph mode.
        findings (Sequence[Finding]): what the steps of the training show.
    """

    config: str | None = None
    network: str | None = None
    register_path: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: str | None = None
    train_dataset_dir: str | None = None
    batch: str | None = None
    batches: int = 2
    loss_scale: float | None = None
    graph: bool = False
    findings: Sequence[Finding] = ()


def read_run(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what the output folder of a training says about a case, by the names of :class:`OverflowCase`.

    Args:
        folder (str): the output folder.

    Returns:
        dict with ``config`` and, if the folder has them, ``register_path``, ``checkpoint`` (the newest complete one),
        ``batch``, ``loss_scale`` and ``findings``.

    Raises:
        FileNotFoundError: if the folder has no configuration.
        ValueError: if the configuration cannot be read.
    """
    file = Path(folder, CONFIG_FILE)
    if not file.is_file():
        raise FileNotFoundError(
            f"'run' must be the output folder of a training, but {folder} has no {CONFIG_FILE}, which 'adaptive-loss-"
            "scale train' and Trainer leave there. Give --config, --checkpoint and --loss-scale instead."
        )
    config, began = read_yaml(file), file.stat().st_mtime
    with file.open(encoding="utf-8") as lines:
        register_path = lines.readline().removeprefix(_REGISTER_PATH).strip()
    callbacks = [each for each in config.get("callbacks") or [] if isinstance(each, dict)]
    record = next((Path(each["record_path"]) for each in callbacks if each.get("record_path")), None)
    record = record or Path(folder, "loss_scale_record.jsonl")
    arguments: dict[str, Any] = {"config": str(file), "register_path": register_path}
    # Files older than the saved configuration are from an earlier training in the same folder.
    batch = record.parent / BATCH_FILE
    arguments["batch"] = str(batch) if batch.is_file() and batch.stat().st_mtime >= began else None
    saved = reversed(read_checkpoints(Path(folder)))
    whole = (each for each in saved if each.path.stat().st_mtime >= began and is_whole(each.path))
    if (checkpoint := next(whole, None)) is not None:
        arguments |= {"checkpoint": str(checkpoint.path), "loss_scale": checkpoint.values["loss_scale"]}
    if record.is_file() and record.stat().st_mtime >= began:
        arguments |= _facts_of(record)
    return {name: value for name, value in arguments.items() if value}


def read_program_run(record: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what the record of a Python program says about a case, by the names of :class:`OverflowCase`.

    Args:
        record (str): the record of ``LossScaleMonitor``, or its folder.

    Returns:
        dict with ``loss_scale`` of the last step, ``batch``, if one was saved beside the record, and ``findings``, as
        :func:`read_run` returns them.

    Raises:
        OSError: if there is no such record, or it cannot be read.
        ValueError: if the file is no record.
    """
    file = record_in(record)
    batch = file.with_name(BATCH_FILE)
    return {**({"batch": str(batch)} if batch.is_file() else {}), **_facts_of(file)}


def _facts_of(record: Path) -> dict[str, Any]:
    """Return what the steps of a record say, as :func:`read_run` does."""
    steps = read_record(record)
    facts: dict[str, Any] = {}
    if steps and steps[-1].get("loss_scale"):
        facts["loss_scale"] = steps[-1]["loss_scale"]
    if findings := diagnose(map(Seen.of, steps)):
        facts["findings"] = findings
    return facts
