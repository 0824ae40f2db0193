"""Readers of training logs, one for each format, and :func:`read_log`, which recognises the format."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mindformers_adaptive.lab.logs.expansion import run_of_entries
from mindformers_adaptive.lab.logs.megatron_deepspeed import DeepSpeedReader, MegatronReader
from mindformers_adaptive.lab.logs.mindformers import MindFormersReader
from mindformers_adaptive.lab.logs.reader import LogLines, Reader
from mindformers_adaptive.lab.logs.record import JsonlReader
from mindformers_adaptive.lab.policies import Policy
from mindformers_adaptive.lab.recorded_run import RecordedRun
from mindformers_adaptive.text.table import counted
from mindformers_adaptive.text.untrusted import printable

__all__ = ["FORMATS", "read_log"]

LogPath = str | os.PathLike[str]


# Megatron-DeepSpeed's logs have DeepSpeed's lines too, so DeepSpeed comes last: a log is of its format where no line is
# of another.
_READERS: dict[str, type[Reader]] = {
    reader.name: reader for reader in (JsonlReader, MindFormersReader, MegatronReader, DeepSpeedReader)
}

FORMATS = tuple(_READERS)


def read_log(
    path: LogPath | Iterable[LogPath], format: str | None = None, *, rule: Policy | None = None
) -> RecordedRun:
    """Read the log of one run.

    Every line counts as used or as ignored. A line that looks like a step's and cannot be read is a problem and
    ignored. Lines of several ranks that say the same of a step are merged; where the steps go back, the run was
    restarted, and the later attempt supersedes the earlier one's steps. What was inferred is in the run's ``notes``.

    Args:
        path (str, os.PathLike or an iterable of them): the log file, or files in the order in which they were written.
        format (str, optional): one of ``FORMATS``. Default: None, the first of them that a line matches.
        rule (Policy, optional): the rule that the run followed, before its first step. Where lines stand for several
            steps, as in sink mode, the bounds on the number of skipped ones are then those that this rule allows; it is
            also what tells the scale of the first step. Default: None, any rule.

    Returns:
        RecordedRun, named after the first file.

    Raises:
        TypeError: if ``path`` or ``format`` is not of its type.
        ValueError: if there is no file, the format is unknown, no line is that of a step, or no such line names a loss
            scale; if the log does not follow ``rule``.
        OSError: if a file cannot be read.

    Examples:
        >>> import pathlib, tempfile
        >>> log = pathlib.Path(tempfile.mkdtemp(), "run.jsonl")
        >>> line = '{"step": %s, "overflow": %s, "loss_scale": %s}'
        >>> _ = log.write_text(chr(10).join([line % (1, "true", 4), line % (2, "false", 2)]))
        >>> run = read_log(log)
        >>> run.log_format, run.skipped_steps, run.loss_scale.tolist()
        ('jsonl', 1, [4.0, 2.0])
    """
    paths = _require_paths(path)
    reader = _READERS[_find_format(paths) if format is None else _require_format(format)]()
    others = [name for name in FORMATS if name not in (reader.name, *reader.printed_with)]
    lines, used, foreign = LogLines(paths), 0, Counter[str]()
    for text in reader.left_over(lines):
        if reader.take(text, lines):
            used += 1
        elif name := _format_of_line(text, others):
            foreign[name] += 1
    used += reader.taken_together
    is_cut = not lines.complete
    entries = reader.finish()
    if not entries:
        raise ValueError(_nothing_found(paths, [reader], lines))
    run = run_of_entries(entries, rule, reader.name)
    if np.isnan(run.loss_scale).all():
        raise ValueError(
            f"The log must show what loss scale a step used, but the {counted(used, 'line')} of steps in "
            f"{_names(paths)} cannot tell. Give a log of a training with loss scaling, with several such lines."
        )
    notes = [*run.notes, *reader.notes]
    notes += [
        f"{count} line(s) are of another format, {name}, and were ignored; format={name!r} reads them instead."
        for name, count in foreign.items()
    ]
    if lines.undecodable:
        notes.append(f"{lines.undecodable} line(s) have bytes that are not UTF-8.")
    if is_cut:
        notes.append(f"{lines.where}: the log ends in the middle of a line, or without a newline.")
    return replace(
        run,
        name=printable(paths[0].name),
        files=tuple(map(str, paths)),
        lines_read=lines.lines_read,
        lines_used=used,
        lines_superseded=reader.superseded,
        notes=tuple(notes),
        problems=tuple(lines.problems),
    )


def _format_of_line(text: str, formats: Sequence[str]) -> str:
    """The first of some formats of which a line is that of a step; "" where there is none."""
    return next((name for name in formats if _READERS[name].is_step_line(text)), "")


def _find_format(paths: tuple[Path, ...]) -> str:
    lines, found = LogLines(paths), ""
    for text in lines:
        found = _format_of_line(text, FORMATS) or found
        if found not in ("", FORMATS[-1]):
            break
    if not found:
        raise ValueError(_nothing_found(paths, _READERS.values(), lines))
    return found


def _nothing_found(paths: tuple[Path, ...], readers: Iterable[Reader | type[Reader]], lines: LogLines) -> str:
    looked_for = "; ".join(f"{reader.name}: {reader.looked_for}" for reader in readers)
    return (
        f"The log must have lines of steps, but in {_names(paths)} ({counted(lines.lines_read, 'line')}) there is "
        f"none. Looked for: {looked_for}. Give the log of a training, or another format."
    )


def _require_format(format: object) -> str:
    if not isinstance(format, str):
        raise TypeError(f"'format' must be text, but got {format!r} of type {type(format).__name__}. Use {FORMATS}.")
    if format not in FORMATS:
        raise ValueError(f"'format' must be one of {FORMATS}, but got {format!r}. Leave it out: the lines show it.")
    return format


def _names(paths: tuple[Path, ...]) -> str:
    return ", ".join(map(str, paths))


def _require_paths(path: object) -> tuple[Path, ...]:
    several = isinstance(path, Iterable) and not isinstance(path, str | bytes | os.PathLike)
    paths: list[Any] = list(path) if several else [path]  # type: ignore[call-overload]
    for one in paths:
        if not isinstance(one, str | os.PathLike):
            raise TypeError(
                f"'path' must be a path or an iterable of paths, but got {one!r} of type {type(one).__name__}. Give "
                "the name of the log."
            )
    if not paths:
        raise ValueError("'path' must name at least one log, but got none. Give the name of the log.")
    return tuple(map(Path, paths))
