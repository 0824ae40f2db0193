"""A lock on a file for as long as a process writes it."""

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
    """Locks a file, by a hidden one beside it. A process that ends in whatever way loses its locks.

    Args:
        path (Path): the file; it need not exist.

    Raises:
        BlockingIOError: if another process, or another lock of this one, has the file.
        OSError: if there is no lock to be had, such as in a folder that cannot be written to.

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
        self._path = path.resolve().with_name(f".{path.name}.lock")
        self._process = os.getpid()
        if self._path in _locked:
            raise BlockingIOError(f"{path} is locked by this process")
        path.parent.mkdir(parents=True, exist_ok=True)
        while self._file is None:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                if sys.platform != "win32":
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Between the two calls a process that let it go may have deleted the file.
                if self._path.exists() and os.path.samestat(os.fstat(file), os.stat(self._path)):
                    self._file = file
            finally:
                if self._file is None:
                    os.close(file)
        _locked.add(self._path)

    def release(self) -> None:
        """Let the file go."""
        # A process that was forked has no part in the locks.
        if self._file is not None and os.getpid() == self._process:
            with contextlib.suppress(OSError):
                self._path.unlink()
            os.close(self._file)
            _locked.discard(self._path)
        self._file = None

    def __del__(self) -> None:
        self.release()
