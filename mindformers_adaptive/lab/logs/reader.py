"""What all readers of logs share: the lines of the files, what a line says of steps, and the order of such lines."""

from __future__ import annotations

import codecs
import errno
import io
import itertools
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple

__all__ = ["LARGEST_STEP", "LONGEST_INTERVAL", "LogEntry", "LogLines", "Overflow", "Reader"]
__all__ += ["parse_loss", "parse_number", "parse_scale"]

# A line that would stand for more steps than this is taken for one after a gap.
LONGEST_INTERVAL = 10_000

# A larger step number is a torn or mixed line, not a step; 2^53 is also where float64 stops counting.
LARGEST_STEP = 2**53

# So many lines are handed out at a time.
_BLOCK = 4096

# Lines of several ranks may come out of order by a few steps. A run that goes back by more was restarted.
_RANKS_APART = 8

# At most this many restarts get a note each.
_RESTARTS_NAMED = 3

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_LARGEST_SCALE = 3.5e38  # just above the largest float32, 3.4e38
_SMALLEST_SCALE = 1e-45  # the smallest float32 above 0


@dataclass
class LogLines:
    """Iterates over the lines of several files as over one: decoded, ANSI codes stripped, counted.

    Args:
        paths (Sequence[Path]): the files, in the order in which they were written.

    Attributes:
        lines_read (int): how many lines were handed out so far.
        undecodable (int): how many of them were not UTF-8; bytes that are not are replaced by U+FFFD.
        problems (list[str]): what is wrong with lines, each naming file and line.
        complete (bool): whether the current line ended with a newline; a line that was cut off did not.
        file (str), number (int): where the current line stands; lines count from 1.

    Raises:
        OSError: if a file cannot be read; the subclass and the number are the system's.
    """

    paths: Sequence[Path]
    lines_read: int = 0
    undecodable: int = 0
    problems: list[str] = field(default_factory=list)
    complete: bool = True
    file: str = ""
    number: int = 0

    @property
    def where(self) -> str:
        """str: the current line as ``file:number``."""
        return f"{self.file}:{self.number}" if self.file else ""

    def __iter__(self) -> Iterator[str]:
        for block in self.blocks():
            yield from self.texts(block)

    def blocks(self) -> Iterator[list[bytes]]:
        """Hand out many lines at a time, each for :meth:`texts` or :meth:`pass_over`."""
        for path in self.paths:
            try:
                with open(path, "rb") as file:
                    if not file.seekable():
                        raise OSError(errno.ESPIPE, "it is a pipe, and is read more than once. Save it to a file first")
                    self.file, self.number = str(path), 0
                    raw_lines = _in_utf_8(file)
                    while block := list(itertools.islice(raw_lines, _BLOCK)):
                        yield block
            except OSError as error:
                reason = f"The log must be a file that can be read, but: {error.strerror}. Check the path"
                raise OSError(error.errno, reason, str(path)) from error

    def pass_over(self, block: Sequence[bytes]) -> None:
        """Count the lines of a block as handed out."""
        self.lines_read += len(block)
        self.number += len(block)
        self.complete = block[-1].endswith(b"\n")

    def texts(self, block: Sequence[bytes]) -> Iterator[str]:
        """Hand out the lines of a block, one by one."""
        for raw in block:
            self.pass_over((raw,))
            yield self._text(raw)

    def _text(self, raw: bytes) -> str:
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


def parse_number(value: object) -> float:
    """Return a number that was printed, or one of JSON, which has to write NaN and Infinity as text; nan for others.

    Examples:
        >>> parse_number("2.5"), parse_number(3), parse_number("inf"), parse_number(True), parse_number(None)
        (2.5, 3.0, inf, nan, nan)
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


def parse_loss(printed: str | None) -> float:
    """Return a loss that was printed; inf for one that was NaN, for nan is a loss that is not known.

    Examples:
        >>> parse_loss("2.5"), parse_loss("nan"), parse_loss("unavailable"), parse_loss(None)
        (2.5, inf, nan, nan)
    """
    return math.inf if printed is not None and printed.strip("+-").lower() == "nan" else parse_number(printed)


def parse_scale(value: object) -> float | None:
    """Return a loss scale that was printed, or one of JSON; None for what is no number that a loss scale can be.

    Examples:
        >>> parse_scale("65536.0"), parse_scale("inf"), parse_scale("0"), parse_scale("6553x")
        (65536.0, inf, None, None)
    """
    scale = parse_number(value)
    return scale if _SMALLEST_SCALE < scale < _LARGEST_SCALE or scale == math.inf else None


class Overflow(NamedTuple):
    """A line on one skipped step: the scale that was tried, the one after, and where the line stands and comes from.

    Attributes:
        loss_scale (float), next_loss_scale (float): the scale that was tried, and the one after.
        where (str): the line, as ``file:number``.
        printer (tuple[str, str]): the source file and the rank that printed it; "" where the line does not say.
    """

    loss_scale: float
    next_loss_scale: float
    where: str
    printer: tuple[str, str]


class LogEntry(NamedTuple):
    """A line of a log that names a step.

    Attributes:
        step (int): the last step that the line speaks of.
        where (str): the line, as ``file:number``.
        next_loss_scale (float): the scale after that step; nan where the line does not say.
        loss_scale (float): the scale used in that step; nan where the line does not say.
        overflow (bool, optional): whether just that step overflowed; None where the line does not say.
        skips (int, optional): how many steps were skipped since the line before; None where the line does not say.
        overflows (tuple[Overflow, ...]): the skipped steps since the line before that have lines of their own.
        steps (int, optional): how many steps the line stands for; None for as many as the others.
        placed (bool): whether ``step`` stood in the log; False where it was counted.
        loss (float), seconds (float): the step's loss, and how long a step took; nan where the line does not say.
        largest_gradient (float): the largest absolute gradient of the step, unscaled; nan where the line does not say.
        dropped_by_norm (bool): whether the step was dropped for the size of its gradients, which is no overflow.
        gradient_norm (float): the norm of all gradients of the step, unscaled; nan where the line does not say.
        scale_window (float): the window after the step, in steps; nan where the line does not say.
        gradient_format (object): the format of the gradients, by its name or numbers; None where the line does not say.
        after_restart (bool): whether the run was restarted between the line before and this one.
        skipped_so_far (int, optional): how many steps of the run were skipped up to this one; None where the line does
            not say.
        is_exact (bool): whether ``steps`` and ``skips`` were counted as the steps were taken, so that no fall of the
            scale speaks against them.
        has_line (bool): whether the last of its steps has a line of its own.
    """

    step: int
    where: str
    next_loss_scale: float = math.nan
    loss_scale: float = math.nan
    overflow: bool | None = None
    skips: int | None = None
    overflows: tuple[Overflow, ...] = ()
    steps: int | None = None
    placed: bool = True
    loss: float = math.nan
    seconds: float = math.nan
    largest_gradient: float = math.nan
    dropped_by_norm: bool = False
    scale_window: float = math.nan
    gradient_norm: float = math.nan
    gradient_format: Any = None
    after_restart: bool = False
    skipped_so_far: int | None = None
    is_exact: bool = False
    has_line: bool = True


class Reader(ABC):
    """Reads the lines of one format, and puts what they say into the order of the steps.

    Lines of other ranks that say the same of a step are merged; a later attempt at a step supersedes an earlier one.

    Attributes:
        name (str): what the format is called.
        looked_for (str): what a line of a step looks like, for messages.
        printed_with (tuple[str, ...]): formats whose lines belong among those of this one.
        entries (Sequence[LogEntry]): the lines that name a step; steps strictly increasing.
        taken_together (int): lines that :meth:`left_over` took.
        merged (int): lines that said of a step what another line had said.
        merged_with_other_loss (int): those of them whose loss is another one.
        superseded (int): lines on steps that a later line says something else of.
        notes (list[str]): what was inferred, merged or superseded, after :meth:`finish`.
    """

    name: ClassVar[str]
    looked_for: ClassVar[str]
    printed_with: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self.entries: Any = []
        self.taken_together = self.merged = self.merged_with_other_loss = self.superseded = 0
        self.notes: list[str] = []
        self._restarts: list[str] = []

    @classmethod
    @abstractmethod
    def parse(cls, text: str, where: str, complete: bool) -> Iterable[LogEntry | Overflow | str]:
        """Return what a line says, in order; for what looks like a step and cannot be read, a sentence on that.

        Args:
            text (str): the line.
            where (str): as ``file:number``.
            complete (bool): whether it ended with a newline. The number at the end of a cut line may have lost digits.
        """

    @classmethod
    def is_step_line(cls, text: str) -> bool:
        """Whether a line is one that shows the format."""
        return any(isinstance(said, LogEntry) for said in cls.parse(text, "", True))

    def left_over(self, lines: LogLines) -> Iterator[str]:
        """Take those lines that can be taken many at a time, and hand out the others for :meth:`take`."""
        yield from lines

    def take(self, text: str, lines: LogLines) -> bool:
        """Take a line; return whether it was used."""
        used = False
        for said in self.parse(text, lines.where, lines.complete):
            if isinstance(said, str):
                lines.problems.append(f"{lines.where}: {said}")
            else:
                self.add(said)
                used = True
        return used

    def add(self, entry: Any) -> bool:
        """Take an entry; return False if another rank had said the same of its step."""
        if not self.entries or entry.step > self.entries[-1].step:
            self.entries.append(entry)
            return True
        for place in range(1, min(_RANKS_APART + 1, len(self.entries)) + 1):
            earlier = self.entries[-place]
            if _statement(earlier) == _statement(entry):
                self.merged += 1
                self.merged_with_other_loss += repr(entry.loss) != repr(earlier.loss)
                return False
            if earlier.step < entry.step:
                break
        last, superseded = self.entries[-1].step, 0
        while self.entries and self.entries[-1].step >= entry.step:
            self.entries.pop()
            superseded += 1
        self.entries.append(entry._replace(after_restart=True))
        self.superseded += superseded
        self._restarts.append(
            f"{entry.where}: the run goes back from step {last} to step {entry.step}; what {superseded} earlier "
            "line(s) said of the steps from there on is superseded."
        )
        return True

    def finish(self) -> Sequence[LogEntry]:
        """Return the entries of all lines, after the notes on restarts and merged lines were added."""
        self.notes += self._restarts[:_RESTARTS_NAMED]
        if len(self._restarts) > _RESTARTS_NAMED:
            self.notes.append(f"The run goes back {len(self._restarts)} times in all.")
        if self.superseded > len(self.entries):
            self.notes.append(
                f"{self.superseded} step(s) cannot be placed: later lines give their numbers to others, and only "
                f"{len(self.entries)} line(s) are left. If the run was not restarted, the log does not number its "
                "steps."
            )
        if self.merged_with_other_loss:
            self.notes.append(
                f"{self.merged} line(s) said the same of a step's overflow and scale as another and were merged, as "
                f"those of other ranks; {self.merged_with_other_loss} of them have another loss. If they are of "
                "another run, read each run from a file of its own."
            )
        elif self.merged:
            self.notes.append(f"{self.merged} line(s) of other ranks said the same of a step and were merged.")
        entries: Sequence[LogEntry] = self.entries
        return entries


def _statement(entry: LogEntry) -> tuple[object, ...]:
    # nan, where a line does not name the scale, equals nan here.
    return entry.step, entry.overflow, entry.skips, repr(entry.loss_scale), repr(entry.next_loss_scale)
