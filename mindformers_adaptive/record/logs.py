"""Read training logs: :func:`read_log` finds the format of a log and returns the data of the logged steps in order."""

import codecs
import gzip
import os
import re
import textwrap
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from mindformers_adaptive.record.log_formats import FORMATS, LogFormat, Record, missing_steps
from mindformers_adaptive.record.log_lines import LogLines
from mindformers_adaptive.record.pattern import Pattern
from mindformers_adaptive.record.run import RecordedRun
from mindformers_adaptive.record.step import Step, step_of
from mindformers_adaptive.record.stretches import run_of_lines
from mindformers_adaptive.rules.checks import require_choice, with_type
from mindformers_adaptive.text.files import refuse_pipe
from mindformers_adaptive.text.table import counted
from mindformers_adaptive.text.untrusted import printable

LogPath = str | os.PathLike[str]

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
# The first bytes of a file that gzip has compressed.
_GZIP = b"\x1f\x8b"
_LAST_WORD = re.compile(r"[^\s,|]*$")
# Read this many lines of a record at once.
_BLOCK = 4096
# Show at most this many characters of a line that cannot be read.
_SHOWN = 190


@dataclass
class _TextLines:
    """The lines of several log files, read like one file: decoded to text, without ANSI codes, and numbered.

    Attributes:
        number (int): how many lines were handed out so far.
        undecodable (int): how many of these lines were not UTF-8.
        is_cut (bool): whether the last line ended without a newline.
    """

    paths: Sequence[Path]
    number: int = 0
    undecodable: int = 0
    is_cut: bool = False

    def __post_init__(self) -> None:
        self._starts: list[int] = []

    def __iter__(self) -> Iterator[str]:
        for path in self.paths:
            self._starts.append(self.number)
            try:
                refuse_pipe(path)
                with open(path, "rb") as file:
                    mark = file.read(2)
                is_utf_16 = mark in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
                opened = gzip.open if mark == _GZIP else open
                # In text mode, a carriage return ends a line too, as in the output of a progress bar.
                with opened(path, "rt", encoding="utf-16" if is_utf_16 else "utf-8-sig", errors="replace") as lines:
                    for text in lines:
                        self.number += 1
                        yield self._clean(text)
            except (OSError, EOFError, zlib.error) as error:
                why = getattr(error, "strerror", None) or error
                reason = f"The log must be a file that can be read, but: {why}. Check the path"
                raise OSError(getattr(error, "errno", None), reason, str(path)) from error

    def _clean(self, text: str) -> str:
        self.is_cut = not text.endswith("\n")
        if "\ufffd" in text:
            self.undecodable += 1
        if "\x1b" in text:
            text = _ANSI.sub("", text)
        # The last number of a log line that was cut may have lost digits.
        return (_LAST_WORD.sub("", text) if self.is_cut and not text.endswith("}") else text).strip()

    def name_of(self, number: int) -> str:
        """Return the name of a log line, as ``file:number``."""
        index = bisect_right(self._starts, number - 1) - 1
        return f"{self.paths[index]}:{number - self._starts[index]}"


def read_log(path: LogPath | Iterable[LogPath], format: str | None = None, pattern: str | None = None) -> RecordedRun:
    """Read the log of one run.

    Every line counts as used or as ignored. A line that looks like a step's and cannot be read is a problem; the steps
    that it may be about then count as unknown. Lines of several ranks that state the same of a step are merged; where
    the steps go back, the run was restarted, and the later attempt supersedes the earlier one's steps. What
    was merged, superseded or is missing is in the run's ``notes``.

    Args:
        path (str, os.PathLike or an iterable of them): the log file, or files in the order in which they were written.
        format (str, optional): one of ``FORMATS``. Default: None, the first of them that a line matches.
        pattern (str, optional): a regular expression for a log of another format, with the named groups ``step`` and at
            least one of ``loss_scale`` (after the step), ``overflow``, ``skipped`` (since the line before) and
            ``total_skipped`` (since the start); also ``loss`` and ``gradient_norm``. Default: None.

    Returns:
        RecordedRun, named after the first file.

    Raises:
        TypeError: if ``path``, ``format`` or ``pattern`` is not of its type.
        ValueError: if there is no file, the format is unknown, the pattern is wrong or given with a format, no line
            states a step, or no line names a loss scale and the log is no record.
        OSError: if a file cannot be read.

    Examples:
        >>> import pathlib, tempfile
        >>> log = pathlib.Path(tempfile.mkdtemp(), "run.jsonl")
        >>> line = '{"step": %s, "overflow": %s, "loss_scale": %s}'
        >>> _ = log.write_text(chr(10).join([line % (1, "true", 4), line % (2, "false", 2)]))
        >>> run = read_log(log)
        >>> run.log_format, run.skipped_bounds, run.used.tolist()
        ('jsonl', (1, 1), [4.0, 2.0])
    """
    paths = _require_paths(path)
    if pattern is not None and format is not None:
        raise ValueError(f"'format' and 'pattern' exclude each other, but got {format!r} and {pattern!r}. Give one.")
    log_format: LogFormat | None
    if pattern is not None:
        log_format = Pattern(pattern)
    elif format is not None:
        remedy = "Leave 'format' out to recognize the format from the lines of the log."
        log_format = FORMATS[require_choice("format", format, FORMATS, remedy)]
    else:
        log_format = _find_format(paths)
    # If no line fits a format, read the log in all formats, to name the first line that nearly fits one.
    formats = [log_format, *(FORMATS[name] for name in log_format.printed_with)] if log_format else [*FORMATS.values()]
    texts, lines, used, problems, nearest = _TextLines(paths), LogLines(), 0, list[str](), ("", "")
    for number, block in _blocks(texts, _BLOCK if isinstance(log_format, Record) else 1):
        if isinstance(log_format, Record) and (steps := log_format.parse_all(block)) and lines.add_all(steps, number):
            used += len(steps)
            continue
        for where, text in enumerate(block, start=number):
            is_used = False
            for line in _statements(text, formats):
                if isinstance(line, str):
                    problems.append(f"{texts.name_of(where)}: looks like a step's line, but {line}")
                    nearest = nearest if nearest[0] else (f"{texts.name_of(where)}: {line}", text)
                    lines.after_damage.add(len(lines))
                else:
                    lines.add(line, where, texts.name_of)
                    is_used = True
            used += is_used
    lines.finish()
    if log_format is None or not lines.has_step():
        raise ValueError(_nothing_found(paths, formats, texts.number, nearest))
    run = run_of_lines(lines, log_format, texts.name_of)
    # The record of a training without loss scaling can still be drawn.
    if not len(run.stated_scales) and not run.is_rounded and not isinstance(log_format, Record):
        raise ValueError(
            f"The log must show the loss scale, but no line of {_names(paths)} shows it (lines about steps: {used}). "
            "Give the log of a training with loss scaling, or describe its lines with --pattern."
        )
    notes = [*lines.notes, *run.notes]
    if texts.undecodable:
        notes.append(f"The log has {counted(texts.undecodable, 'line')} with bytes that are not UTF-8.")
    if texts.is_cut:
        notes.append(f"{texts.name_of(texts.number)}: the log ends in the middle of a line, or without a newline.")
    return replace(
        run,
        name=printable(paths[0].name),
        files=tuple(map(str, paths)),
        lines_read=texts.number,
        lines_used=used,
        notes=tuple(notes),
        problems=tuple(problems),
    )


def run_of_record(record: Sequence[Mapping[str, Any]]) -> RecordedRun:
    """Return the training run that the lines of a record describe.

    Args:
        record (Sequence[Mapping]): lines, as :func:`mindformers_adaptive.record.writer.read_record` returns them.

    Returns:
        RecordedRun, without a name and files.

    Raises:
        TypeError: if a line is not a mapping.
        ValueError: if there is no step, or a line does not belong to a record of loss scales.
    """
    if not isinstance(record, Sequence) or not all(isinstance(content, Mapping) for content in record):
        raise TypeError(
            f"'record' must be a list of lines, each a dict, but got {str(record)[:80]!r} of type "
            f"{type(record).__name__}. Read the file with mindformers_adaptive.record.writer.read_record."
        )
    lines = LogLines()
    for number, content in enumerate(record, start=1):
        is_gap = "missing_steps" in content
        line = missing_steps(dict(content)) if is_gap else step_of({"loss_scale": None, **content})
        if isinstance(line, str):
            raise ValueError(
                f"Line {number} of the record is not a step that LossScaleMonitor wrote: {line}. Read the file with "
                "mindformers_adaptive.record.writer.read_record. For a record of GradientRangeMonitor, use "
                "draw_gradient_records."
            )
        lines.add(line, number, "line {}".format)
    lines.finish()
    if all("missing_steps" in content for content in record) or not lines.has_step():
        raise ValueError(
            "The record must have at least 1 step to draw, but has none. Wait until the run has taken a step, or check "
            "that the file is the record of this run."
        )
    return run_of_lines(lines, FORMATS["jsonl"], "line {}".format)


def _blocks(texts: Iterable[str], length: int) -> Iterator[tuple[int, list[str]]]:
    """Yield blocks of so many lines, each with the number of its first line."""
    unread, number = iter(texts), 1
    while block := list(islice(unread, length)):
        yield number, block
        number += len(block)


def _statements(text: str, formats: Iterable[LogFormat]) -> Iterator[Step | str]:
    """Yield each step that a log line states, or the reason why a line that seems to be about a step cannot be read."""
    for log_format in formats:
        for part in (text,) if log_format.start is None else log_format.start.split(text):
            try:
                line = log_format.parse(part)
            except ValueError as error:
                yield str(error)
            else:
                if line is not None:
                    yield line


def _find_format(paths: tuple[Path, ...]) -> LogFormat | None:
    """Return the first format that a line of a log fits, or None.

    DeepSpeed is taken only if no line fits another format, because its lines also appear in the logs of other programs.
    """
    *first_tried, deepspeed = FORMATS.values()
    result, tried = None, [*first_tried, deepspeed]
    for text in _TextLines(paths):
        for log_format in tried:
            lines = [line for line in _statements(text, [log_format]) if not isinstance(line, str)]
            if lines and log_format is deepspeed:
                result, tried = deepspeed, first_tried
            elif any(line.step >= 0 for line in lines):
                return log_format
    return result


def _nothing_found(paths: tuple[Path, ...], formats: Iterable[LogFormat], count: int, nearest: tuple[str, str]) -> str:
    """Return a message about a log without lines of steps, in lines of at most 100 characters, but for long paths."""
    lines = [f"No line of {_names(paths)} ({counted(count, 'line')}) states a step."]
    where, text = map(printable, nearest)
    if where:
        lines += _wrapped(f"The first line that nearly fits is {where}:")
        lines += [*_wrapped(f"  {text.strip()[:_SHOWN]}", "  "), "The line may have been cut or wrapped."]
    else:
        lines.append("Looked for:")
        lines += [line for each in formats for line in _wrapped(f"  {each.name}: {each.example}", "    ")]
    lines.append("Give the log as the training printed it, or describe its lines with --pattern.")
    return "\n".join(lines)


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _names(paths: tuple[Path, ...]) -> str:
    return ", ".join(map(str, paths))


def _require_paths(path: object) -> tuple[Path, ...]:
    several = isinstance(path, Iterable) and not isinstance(path, str | bytes | os.PathLike)
    paths: list[Any] = list(path) if several else [path]  # type: ignore[call-overload]
    for name in paths:
        if not isinstance(name, str | os.PathLike):
            raise TypeError(
                f"'path' must be a path or an iterable of paths, but got {with_type(name)}. Give the path of the log "
                "file."
            )
    if not paths:
        raise ValueError("'path' must name at least one log, but got none. Give the path of the log file.")
    return tuple(map(Path, paths))
