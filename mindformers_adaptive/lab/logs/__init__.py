"""Readers of training logs, one for each format, and :func:`read_log`, which recognises the format."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.lab.logs.deepspeed import DeepSpeedReader
from mindformers_adaptive.lab.logs.entries import Reader
from mindformers_adaptive.lab.logs.expansion import expand
from mindformers_adaptive.lab.logs.lines import LogLines
from mindformers_adaptive.lab.logs.megatron import MegatronReader
from mindformers_adaptive.lab.logs.mindformers import MindFormersReader
from mindformers_adaptive.lab.logs.record import RecordReader
from mindformers_adaptive.lab.policies import Policy
from mindformers_adaptive.lab.traces.recorded_run import RecordedRun

__all__ = ["FORMATS", "read_log"]

LogPath = str | os.PathLike[str]


# Megatron-DeepSpeed's logs have DeepSpeed's lines too, so DeepSpeed comes last.
_READERS: tuple[type[Reader], ...] = (RecordReader, MindFormersReader, MegatronReader, DeepSpeedReader)

FORMATS = tuple(reader.name for reader in _READERS)


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
    reader = _reader_of(paths, format)()
    lines = LogLines(paths)
    used, foreign = 0, Counter[str]()
    for text in lines:
        if reader.take(text, lines):
            used += 1
        else:
            foreign.update(_other_format(text, reader))
    cut = not lines.complete
    entries = reader.finish()
    if not entries:
        raise ValueError(_nothing_found(paths, [reader], lines))
    steps = expand(entries, rule)
    loss_scale = np.array(steps.loss_scale, dtype=np.float64)
    if np.isnan(loss_scale).all():
        raise ValueError(
            f"The log must name a loss scale, but none of the {used} lines of steps in {_names(paths)} does. Give a "
            "log of a training with loss scaling."
        )
    reader.timeline.close()
    notes = [*steps.notes, *reader.timeline.notes]
    notes += [
        f"{count} line(s) are of another format, {name}, and were ignored; format={name!r} reads them instead."
        for name, count in foreign.items()
    ]
    if lines.undecodable:
        notes.append(f"{lines.undecodable} line(s) have bytes that are not UTF-8.")
    if cut:
        notes.append(f"{lines.where}: the log ends in the middle of a line, or without a newline.")
    return RecordedRun(
        paths[0].name,
        tuple(map(str, paths)),
        reader.name,
        np.array(steps.step, dtype=np.int64),
        loss_scale,
        np.array(steps.overflow, dtype=np.bool_),
        np.array(steps.position_known, dtype=np.bool_),
        _or_none(steps.loss),
        _or_none(steps.seconds),
        steps.scale_factor,
        lines.lines_read,
        used,
        lines.lines_read - used,
        tuple(notes),
        tuple(lines.problems),
        np.array(steps.lines, dtype=np.int64),
        steps.final_loss_scale,
        steps.factor_bound,
        reader.timeline.superseded,
        _or_none(steps.largest_gradient),
        tuple(steps.overflowed_parameters),
        tuple(entry.step for entry in entries if entry.dropped_by_norm),
    )


def _reader_of(paths: tuple[Path, ...], format: str | None) -> type[Reader]:
    if format is not None:
        if not isinstance(format, str):
            raise TypeError(
                f"'format' must be text, but got {format!r} of type {type(format).__name__}. Use {FORMATS}."
            )
        if format not in FORMATS:
            raise ValueError(f"'format' must be one of {FORMATS}, but got {format!r}. Leave it out: the lines show it.")
        return _READERS[FORMATS.index(format)]
    *certain, last = _READERS
    lines, last_seen = LogLines(paths), False
    for text in lines:
        for reader in certain:
            if reader.is_step_line(text):
                return reader
        last_seen = last_seen or last.is_step_line(text)
    if not last_seen:
        raise ValueError(_nothing_found(paths, _READERS, lines))
    return last


def _other_format(text: str, reader: Reader) -> list[str]:
    """The format of which a line is that the reader could not use; Megatron-DeepSpeed prints two."""
    expected = {reader.name, DeepSpeedReader.name} if reader.name == MegatronReader.name else {reader.name}
    return [other.name for other in _READERS if other.name not in expected and other.is_step_line(text)][:1]


def _nothing_found(paths: tuple[Path, ...], readers: Iterable[Reader | type[Reader]], lines: LogLines) -> str:
    looked_for = "; ".join(f"{reader.name}: {reader.looked_for}" for reader in readers)
    return (
        f"The log must have lines of steps, but in {_names(paths)} ({lines.lines_read} lines) there is none. Looked "
        f"for: {looked_for}. Give the log of a training, or another format."
    )


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


def _or_none(values: list[float]) -> NDArray[np.float64] | None:
    array = np.array(values, dtype=np.float64)
    return None if np.isnan(array).all() else array
