"""The output folder of a training: the names of the files in it, and how commands find them."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mindformers_adaptive.text.untrusted import read_yaml

# Files in the output folder of a training: the configuration of the training, the first batch at which the loss was inf
# or NaN or the loss scale collapsed, and what LossScaleMonitor(explain=True) has found there.
CONFIG_FILE, BATCH_FILE, EXPLANATION_FILE = "loss_scale_config.yaml", "overflow_batch.npz", "overflow_explanation.json"
# The record of LossScaleMonitor. The name is repeated here, because the module of the callback needs MindSpore.
RECORD = "loss_scale_record.jsonl"
# MindFormers' log within its output folder. To see whether it has the line of a step, read this many bytes of it.
_LOG, _START_OF_LOG = "log/rank_0/info.log", 2**20

# The keys of callbacks, and of the section `checkpoint`, that name a folder for checkpoints.
_SAVED_IN = ("directory", "save_path")


def file_in(path: str | os.PathLike[str], name: str) -> str:
    """Return the path of a file, as text; for a folder that has a file of the given name, the path of that file."""
    inside = Path(path, name)
    return str(inside) if inside.is_file() else str(path)


def record_in(source: str | os.PathLike[str]) -> Path:
    """Return the path of a run's record: the given file, or the record in the given folder.

    Without a record in the folder, the log that MindFormers writes is taken.

    Raises:
        FileNotFoundError: if there is no such file or folder, or neither a record nor a log in the folder.
        ValueError: if the folder has several records or logs.
    """
    path = Path(source)
    if not path.is_dir():
        if not path.exists():
            raise FileNotFoundError(
                f"There is no file or folder {str(path)!r}. Check the path; the current folder is {Path.cwd()}."
            )
        return path
    for name in (RECORD, "rank_0/info.log"):
        files = [path / name] if (path / name).is_file() else sorted(path.rglob(name))
        if len(files) > 1:
            listed = ", ".join(str(file.relative_to(path)) for file in files[:3])
            raise ValueError(
                f"The folder {str(path)!r} must hold one {name}, but holds {listed}. Name one run's folder."
            )
        if files:
            return files[0]
    raise FileNotFoundError(
        f"The folder {str(path)!r} must hold {RECORD}, which LossScaleMonitor writes, but holds none. Add the "
        "monitor to the callbacks, or give the log of the training itself."
    )


def checkpoint_folders(run: str | os.PathLike[str]) -> list[Path]:
    """Return the folders in which a training saved its checkpoints, by the output folder of the training.

    MindFormers saves in ``checkpoint``, if the configuration names no other folder.
    """
    folders = [Path(run, "checkpoint")]
    file = Path(run, CONFIG_FILE)
    config = read_yaml(file) if file.is_file() else {}
    if isinstance(config, dict):
        sections = [*(config.get("callbacks") or []), config.get("checkpoint")]
        named = (section.get(key) for section in sections if isinstance(section, dict) for key in _SAVED_IN)
        folders += [Path(folder) for folder in named if isinstance(folder, str) and folder]
    return [folder for folder in dict.fromkeys(path.resolve() for path in folders) if folder.is_dir()]


def run_folder_of(*files: str | os.PathLike[str]) -> Path | None:
    """Return the output folder of the training that wrote the given files; None if no folder has a configuration."""
    folders = (folder for file in files for folder in Path(os.path.abspath(file)).parents[:4])
    return next((folder for folder in folders if (folder / CONFIG_FILE).is_file()), None)


def is_from_program(*records: str | os.PathLike[str]) -> bool:
    """Return whether a Python program without a YAML file wrote the records of ``LossScaleMonitor``.

    The launcher and ``Trainer`` leave a configuration in the output folder. MindFormers' own script leaves its log
    there, with a line for each step.
    """
    is_known = records and all(Path(record).is_file() for record in records)
    if not is_known or run_folder_of(*records) is not None:
        return False
    return not any(_has_step_line(Path(record).parent / _LOG) for record in records)


def _has_step_line(log: Path) -> bool:
    try:
        with log.open("rb") as lines:
            return b"Epoch:[" in lines.read(_START_OF_LOG)
    except OSError:
        return False


def find_command(in_program: bool) -> str:
    """Return what measures a loss scale to start from: a shell command, or with ``in_program`` a line of Python."""
    return "print(find_loss_scale(train_step, batches))" if in_program else "adaptive-loss-scale find --config FILE"


class Ways(NamedTuple):
    """The next steps that advice gives, for a YAML file or a Python program.

    Attributes:
        why (str): the command that finds the layer that overflows; a line for each way if the training is not known.
        find (str): what measures a loss scale to start from.
        sets (str): how an argument is set, with places for its name and its value.
    """

    why: str
    find: str
    sets: str


def ways_of(files: Sequence[str], in_python: bool) -> Ways:
    """Return the next steps after a run that wrote the given files."""
    record = files[-1] if in_python and files and files[-1].endswith(".jsonl") else None
    folder = run_folder_of(*files)
    why = why_command(folder, record)
    if folder is None and record is None:
        # A log does not say whether its training has a YAML file or is a Python program.
        why += "\nadaptive-loss-scale why --network MODULE.FUNCTION --batch FILE"
    return Ways(why, find_command(in_python), "{}={}" if in_python else "{}: {}")


def why_command(folder: str | os.PathLike[str] | None, record: str | os.PathLike[str] | None = None) -> str:
    """Return the shell command that finds the layer that overflows, ready to paste.

    Args:
        folder (str, optional): the output folder of the training; None if the folder is not known.
        record (str, optional): the record that a Python program wrote without a YAML file. Default: None.

    Examples:
        >>> why_command("output")
        'adaptive-loss-scale why --run output'
        >>> why_command(None, "record.jsonl")
        'adaptive-loss-scale why --record record.jsonl --network MODULE.FUNCTION'
    """
    if folder is not None:
        return f"adaptive-loss-scale why --run {_quoted(folder)}"
    if record is not None:
        return f"adaptive-loss-scale why --record {_quoted(record)} --network MODULE.FUNCTION"
    return "adaptive-loss-scale why --config FILE"


def _quoted(path: str | os.PathLike[str]) -> str:
    path = Path(path)
    is_near = path.is_absolute() and path.is_relative_to(Path.cwd())
    return shlex.quote(os.path.relpath(path) if is_near else str(path))
