"""The lines of log files: counted, decoded, freed of colours, and known by file and number."""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

__all__ = ["LogLines", "parse_number", "parse_scale"]

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_LARGEST_SCALE = 3.5e38  # just above the largest float32, 3.4e38
_SMALLEST_SCALE = 1e-45  # the smallest float32 above 0


class LogLines:
    """Iterates over the lines of several files as over one, and keeps count of them.

    Args:
        paths (Sequence[Path]): the files, in the order in which they were written.

    Attributes:
        lines_read (int): how many lines were handed out so far.
        undecodable (int): how many of them were not UTF-8; what is not is replaced by U+FFFD.
        problems (list[str]): what is wrong with lines, each naming file and line.
        complete (bool): whether the current line ended with a newline; a line that was cut off did not.

    Raises:
        OSError: if a file cannot be read; the subclass and the number are the system's.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)
        self.lines_read = 0
        self.undecodable = 0
        self.problems: list[str] = []
        self.complete = True
        self._name = str(self.paths[0])
        self._number = 0

    def __iter__(self) -> Iterator[str]:
        for path in self.paths:
            self._name, self._number = str(path), 0
            try:
                with open(path, "rb") as file:
                    yield from map(self._text, _in_utf_8(file))
            except OSError as error:
                reason = f"The log must be a file that can be read, but: {error.strerror}. Check the path"
                raise OSError(error.errno, reason, str(path)) from error

    @property
    def where(self) -> str:
        """The current line as ``file:number``, counted from 1."""
        return f"{self._name}:{self._number}"

    def problem(self, what: str) -> None:
        """Keep what is wrong with the current line."""
        self.problems.append(f"{self.where}: {what}")

    def _text(self, raw: bytes) -> str:
        self.lines_read += 1
        self._number += 1
        self.complete = raw.endswith(b"\n")
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            self.undecodable += 1
            text = raw.decode("utf-8", errors="replace")
        if "\x1b" in text:
            text = _ANSI.sub("", text)
        return text.rstrip()


def _in_utf_8(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file, re-encoded where it begins with the mark of UTF-16, as PowerShell writes it."""
    mark = file.read(len(codecs.BOM_UTF8))
    file.seek(len(mark) if mark == codecs.BOM_UTF8 else 0)
    if not mark.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        yield from file
        return
    with io.TextIOWrapper(file, encoding="utf-16", errors="replace", newline="\n") as text:
        yield from (line.encode("utf-8") for line in text)


def parse_scale(text: str) -> float | None:
    """Return a printed loss scale, or None where the text is no number that a loss scale can be.

    Examples:
        >>> parse_scale("65536.0"), parse_scale("inf"), parse_scale("0"), parse_scale("6553x")
        (65536.0, inf, None, None)
    """
    try:
        scale = float(text)
    except ValueError:
        return None
    if _SMALLEST_SCALE < scale < _LARGEST_SCALE or scale == float("inf"):
        return scale
    return None


def parse_number(text: str) -> float:
    """Return a printed number, or nan where the text is none."""
    try:
        return float(text)
    except ValueError:
        return float("nan")
