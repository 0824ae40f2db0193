"""Read the floating-point arrays of a checkpoint, and write such arrays to a file."""

from pathlib import Path
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor

from mindformers_adaptive.gradients.backward import to_numpy
from mindformers_adaptive.mindformers.checkpoint_reader import Checkpoint, read_checkpoints
from mindformers_adaptive.text.files import atomic_write
from mindformers_adaptive.text.install_hint import install_hint


def read_arrays(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the floating-point arrays of a checkpoint, or of a file that :func:`save_arrays` wrote.

    Args:
        checkpoint (Checkpoint): one that :func:`find_checkpoints` returned.

    Returns:
        dict[str, ndarray], the arrays by Parameter name.

    Raises:
        ValueError: if a file cannot be read.
    """
    loaded = _load_all(checkpoint)
    arrays = {name: value for name, value in loaded.items() if isinstance(value, Tensor) and value.is_floating_point()}
    return {name: to_numpy(value) for name, value in arrays.items()}


def save_arrays(file: str, arrays: dict[str, Any]) -> None:
    """Write arrays by name into a .safetensors file, which appears whole or not at all.

    Args:
        file (str): the file; an existing file is replaced.
        arrays (dict[str, ndarray]): the arrays.
    """
    with install_hint("A .safetensors file"):
        from safetensors.numpy import save

    with atomic_write(file, "wb") as output:
        output.write(save({name: np.ascontiguousarray(array) for name, array in arrays.items()}))


def load_newest(path: str) -> tuple[Checkpoint, dict[str, Any]]:
    """Load a checkpoint file, or the newest checkpoint of a folder, and return it with its Parameters by name.

    Args:
        path (str): a ``.ckpt`` or ``.safetensors`` file, or a folder of them, of ``rank_N`` folders or of MindFormers'
            ``checkpoint:`` format.

    Returns:
        tuple[Checkpoint, dict[str, Parameter]].

    Raises:
        FileNotFoundError: if there is no such path, or no checkpoint in the folder.
        ValueError: if a file is no checkpoint, or has no Parameters.
    """
    newest = find_checkpoints(path)[-1]
    return newest, _load_all(newest)


def find_checkpoints(path: str) -> list[Checkpoint]:
    """Return all checkpoints of a file or folder, the newest last.

    Args:
        path (str): as in :func:`load_newest`.

    Returns:
        list[Checkpoint], at least one.

    Raises:
        FileNotFoundError: if there is no such path, or no checkpoint in the folder.
    """
    checkpoints = read_checkpoints(path)
    if not checkpoints:
        raise FileNotFoundError(f"There is no .ckpt or .safetensors file in the folder {str(path)!r}.")
    return checkpoints


def _load_all(checkpoint: Checkpoint) -> dict[str, Any]:
    path = checkpoint.path
    loaded: dict[str, Any] = {}
    for file in [path] if path.is_file() else sorted(path.glob("*-model-*.safetensors")):
        loaded |= _load(file)
    return loaded


def _load(file: Path) -> Any:
    if file.suffix not in (".ckpt", ".safetensors"):
        raise ValueError(
            f"{str(file)!r} must be a checkpoint, but its name ends neither in .ckpt nor in .safetensors. Give a file "
            "with one of these endings, or a folder of checkpoints."
        )
    remedy = "Give a checkpoint that was written completely."
    if file.stat().st_size == 0:
        raise ValueError(f"{str(file)!r} must be a checkpoint, but is empty. {remedy}")
    try:
        return mindspore.load_checkpoint(str(file), format=file.suffix[1:])
    except Exception as error:
        # Replace MindSpore's errors about a damaged file: they name arguments of MindSpore that the user never gave.
        raise ValueError(
            f"{str(file)!r} must be a checkpoint with at least one Parameter, but MindSpore finds none in it. {remedy}"
        ) from error
