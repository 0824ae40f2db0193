"""A lock on a file that ends with its process."""

import contextlib
import os
import sys
from pathlib import Path

if sys.platform != "win32":
    import fcntl

__all__ = ["RunLock"]

# A process can lock a file again that it has locked itself, so the paths are kept here.
_locked: set[Path] = set()


class RunLock:
    """A lock on a file, held by way of a hidden one beside it. It ends with its process, however that ends.

    Args:
        path (Path): the file; it need not exist.

    Raises:
        BlockingIOError: if another process, or another lock of this one, holds it.
        OSError: if the file cannot be locked, such as in a folder that cannot be written to.

    Examples:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp(), "record.jsonl")
        >>> lock = RunLock(file)
        >>> try:
        ...     RunLock(file)
        ... except BlockingIOError as error:
        ...     print("locked")
        locked
        >>> lock.release()
    """

    _file: int | None = None

    def __init__(self, path: Path) -> None:
        self._path = _lock_of(path)
        self._process = os.getpid()
        if self._path in _locked:
            raise BlockingIOError(f"{path} is locked by this process")
        path.parent.mkdir(parents=True, exist_ok=True)
        while self._file is None:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                if sys.platform != "win32":
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Between the two calls, the process that held the lock may have released it and deleted the file.
                if self._path.exists() and os.path.samestat(os.fstat(file), os.stat(self._path)):
                    self._file = file
            finally:
                if self._file is None:
                    os.close(file)
        _locked.add(self._path)

    @staticmethod
    def is_held_here(path: Path) -> bool:
        """Return whether this process holds the lock on a file."""
        return _lock_of(path) in _locked

    def release(self) -> None:
        """Release the lock."""
        # A forked process does not hold the locks of its parent.
        if self._file is not None and os.getpid() == self._process:
            with contextlib.suppress(OSError):
                self._path.unlink()
            os.close(self._file)
            _locked.discard(self._path)
        self._file = None

    def __del__(self) -> None:
        self.release()


def _lock_of(path: Path) -> Path:
    return path.resolve().with_name(f".{path.name}.lock")
