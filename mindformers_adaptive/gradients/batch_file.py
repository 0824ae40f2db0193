"""Save and read a batch as a file, so that an overflow in a training can be examined later."""

import os
import zipfile
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.text.files import atomic_write, refuse_pipe

# The largest batch file that is read, in bytes. A batch of text takes a few megabytes, but a damaged or hostile file
# may claim any size.
_MOST_BYTES = 2**32 - 2


def save_batch(path: str | os.PathLike[str], batch: Sequence[NDArray[Any]]) -> None:
    """Write the arrays of a batch to an .npz file. If writing fails, no partial file is left.

    Args:
        path (str): the file; an existing file is replaced.
        batch (Sequence[numpy.ndarray]): the columns, in the order of the network's inputs.

    Raises:
        OSError: if the file cannot be written.
    """
    with atomic_write(path, "wb") as file:
        np.savez(file, **{f"column_{index}": column for index, column in enumerate(batch)})


def read_batch(path: str | os.PathLike[str]) -> tuple[NDArray[Any], ...]:
    """Read a batch that :func:`save_batch` wrote; no code in the file is run.

    Args:
        path (str): the file.

    Returns:
        tuple[numpy.ndarray, ...], the columns in the order of the network's inputs.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if :func:`save_batch` did not write the file, or the file holds more than 4 GB.

    Examples:
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp(), "batch.npz")
        >>> save_batch(file, [np.arange(3), np.ones(2)])
        >>> [column.tolist() for column in read_batch(file)]
        [[0, 1, 2], [1.0, 1.0]]
    """
    try:
        refuse_pipe(path)
        with zipfile.ZipFile(path) as members:
            size = sum(member.file_size for member in members.infolist())
            if size > _MOST_BYTES:
                raise ValueError(f"it holds {size:,} bytes")
        with np.load(path, allow_pickle=False) as columns:
            names = [f"column_{index}" for index in range(len(columns.files))]
            if not names or sorted(columns.files) != sorted(names):
                raise ValueError(f"its entries are {columns.files[:3]}")
            batch = [columns[name] for name in names]
            # If an entry of an .npz file is not an array, NumPy returns the entry as bytes.
            if not all(isinstance(column, np.ndarray) for column in batch):
                raise ValueError("a column is not an array")
            return tuple(batch)
    except FileNotFoundError:
        raise FileNotFoundError(f"'batch' must name a file, but there is no {str(path)!r}. Check the path.") from None
    # Reading a damaged file raises errors of many kinds.
    except Exception as error:
        raise ValueError(
            "'batch' must be a file that LossScaleMonitor wrote (overflow_batch.npz), with the columns column_0, "
            f"column_1, ... and at most 4 GB in total. But {path} is not such a file: {error}."
        ) from error
