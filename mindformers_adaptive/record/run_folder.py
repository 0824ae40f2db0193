"""The output folder of a training: the names of the files in it, and how commands find them."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

__all__ = ["BATCH_FILE", "CONFIG_FILE", "RECORD", "file_in", "record_in", "run_folder_of", "why_command"]

# Two files in the output folder of a training: the configuration of the training, and the first batch at which the loss
# was inf or NaN or the loss scale collapsed.
CONFIG_FILE, BATCH_FILE = "loss_scale_config.yaml", "overflow_batch.npz"
# The record of LossScaleMonitor. The name is repeated here, because the module of the callback needs MindSpore.
RECORD = "loss_scale_record.jsonl"


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


def run_folder_of(*files: str | os.PathLike[str]) -> Path | None:
    """Return the output folder of the training that wrote the given files; None if no folder has a configuration."""
    folders = (folder for file in files for folder in Path(os.path.abspath(file)).parents[:4])
    return next((folder for folder in folders if (folder / CONFIG_FILE).is_file()), None)


def why_command(folder: str | os.PathLike[str] | None) -> str:
    """Return the shell command that finds the layer that overflows, ready to paste.

    Args:
        folder (str, optional): the output folder of the training; None if the folder is not known.

    Examples:
        >>> why_command("output")
        'adaptive-loss-scale why --run output'
    """
    if folder is None:
        return "adaptive-loss-scale why --config FILE"
    path = Path(folder)
    near = os.path.relpath(path) if path.is_absolute() and path.is_relative_to(Path.cwd()) else str(path)
    return f"adaptive-loss-scale why --run {shlex.quote(near)}"
