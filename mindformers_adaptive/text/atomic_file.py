"""Atomic writes: a file is replaced as a whole, or stays as it was."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

__all__ = ["atomic_write"]


@contextmanager
def atomic_write(path: str | os.PathLike[str], mode: str = "w", permissions: int = 0o644) -> Iterator[IO[Any]]:
    """Open a temporary file that replaces a file once it is completely written.

    Args:
        path (str): the file; an older one is replaced at the end, and stays as it was if anything fails.
        mode (str): "w" for text or "wb" for bytes. Default: "w".
        permissions (int): those of the file. Default: 0o644; a temporary file can be read by its owner only.

    Yields:
        the temporary file, open.

    Raises:
        OSError: if the file cannot be written.

    Examples:
        >>> target = Path(tempfile.mkdtemp(), "report.txt")
        >>> with atomic_write(target) as file:
        ...     _ = file.write("all of it")
        >>> target.read_text()
        'all of it'
    """
    target = Path(path)
    encoding = None if "b" in mode else "utf-8"
    unfinished = tempfile.NamedTemporaryFile(  # noqa: SIM115
        mode, dir=target.parent, prefix=f".{target.name}-", encoding=encoding, delete=False
    )
    try:
        with unfinished:
            yield unfinished
            unfinished.flush()
            os.fsync(unfinished.fileno())
        os.chmod(unfinished.name, permissions)
        os.replace(unfinished.name, target)
    except BaseException:
        os.unlink(unfinished.name)
        raise
