"""The output folder of a training, in which ``adaptive-loss-scale why --run`` finds the configuration and a batch."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

__all__ = ["BATCH_FILE", "CONFIG_FILE", "run_folder_of", "why_command"]

# Two files in the output folder of a training: the configuration of the training, and the first batch at which the loss
# was inf or NaN or the loss scale collapsed.
CONFIG_FILE, BATCH_FILE = "loss_scale_config.yaml", "overflow_batch.npz"


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
