"""Write files as a whole or not at all, and write JSON that any parser can read."""

import errno
import json
import math
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def atomic_write(path: str | os.PathLike[str], mode: str = "w", permissions: int = 0o644) -> Iterator[IO[Any]]:
    """Open a temporary file that replaces the file at ``path`` once it is completely written.

    Args:
        path (str): the file or a link to it. An existing file is replaced at the end; on an error it stays as it was.
        mode (str): "w" for text or "wb" for bytes. Default: "w".
        permissions (int): permissions of the file. Default: 0o644; a temporary file can be read by its owner only.

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
    # Replace the file that a link points to, not the link.
    target = Path(os.path.realpath(path))
    if target.is_dir():
        reason = "The output must be a file, but is a folder. Give the name of a file in it"
        raise IsADirectoryError(errno.EISDIR, reason, str(path))
    encoding = None if "b" in mode else "utf-8"
    try:
        unfinished = tempfile.NamedTemporaryFile(  # noqa: SIM115
            mode, dir=target.parent, prefix=f".{target.name}-", encoding=encoding, delete=False
        )
    except OSError as error:
        # The system's error message names the temporary file. So raise an error that names the output file.
        raise _not_written(error, path) from error
    try:
        with unfinished:
            yield unfinished
            unfinished.flush()
            os.fsync(unfinished.fileno())
        os.chmod(unfinished.name, permissions)
        os.replace(unfinished.name, target)
    except BaseException as error:
        os.unlink(unfinished.name)
        if isinstance(error, OSError) and error.strerror and error.filename is None:
            # The system's error message about a full disk names no file. So raise an error that names the output file.
            raise _not_written(error, path) from error
        raise


def _not_written(error: OSError, path: str | os.PathLike[str]) -> OSError:
    reason = f"The output must be a file that can be written, but: {error.strerror}. Check its folder"
    return OSError(error.errno, reason, str(path))


def make_folder_of(path: str | os.PathLike[str]) -> None:
    """Create the missing folder of a file that is to be written; if that fails, the OSError names the file."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"The folder of the output file cannot be created: {error.strerror}. Check the path"
        raise OSError(error.errno, reason, str(path)) from error


def refuse_pipe(path: str | os.PathLike[str]) -> None:
    """Raise OSError for a pipe or a device: waiting for a pipe's writer may take forever, and a device has no end."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.ESPIPE, "it is a pipe or a device, not a file. Save its content to a file first", str(path))


# The strings that stand for nan, inf and -inf, which JSON does not have.
NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def json_text(content: Any, indent: int | None = None) -> str:
    """Return a value as JSON; a float that is not finite becomes the string "nan", "inf" or "-inf".

    Args:
        content (Any): dicts, lists, tuples, strings, numbers, bools and None.
        indent (int, optional): spaces for each level. Default: None, everything on one line.

    Raises:
        TypeError: if ``content`` has a value of another type.

    Examples:
        >>> json_text({"loss": float("nan"), "ceilings": (2.0, float("inf"))})
        '{"loss": "nan", "ceilings": [2.0, "inf"]}'
        >>> NOT_FINITE[json.loads(json_text(float("-inf")))]
        -inf
    """
    return json.dumps(_replace_not_finite(content), indent=indent, allow_nan=False)


def write_json(path: str | os.PathLike[str], content: Any) -> None:
    """Write a value to a JSON file with :func:`atomic_write`, in the form that :func:`json_text` returns."""
    with atomic_write(path) as file:
        file.write(json_text(content, indent=2) + "\n")


def json_object(line: str) -> dict[str, Any]:
    """Return the JSON object in a stripped line, or {} if the line is no JSON object.

    Examples:
        >>> json_object('{"step": 1}'), json_object('{"step": 1'), json_object("[1]")
        ({'step': 1}, {}, {})
    """
    try:
        record = json.loads(line) if line.startswith("{") and line.endswith("}") else None
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _replace_not_finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _replace_not_finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_replace_not_finite(value) for value in content]
    return str(content) if isinstance(content, float) and not math.isfinite(content) else content
