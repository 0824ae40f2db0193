"""The record of a run: a file of JSON lines, one a step, that only grows and survives kills and resumes."""

import json
import math
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from mindformers_adaptive.text.atomic_file import atomic_write

__all__ = ["FIELDS", "RunRecord", "read_record"]

# What a line has of a step; those from the window on are as they are after it. None is what cannot be known.
FIELDS = (
    "step",
    "loss",
    "overflow",
    "loss_scale",
    "next_loss_scale",
    "scale_window",
    "window_index",
    "growth_num",
    "down_num",
    "skipped_steps",
)

# JSON has no numbers for them.
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class RunRecord:
    """The record of one run, to be written.

    A line is a JSON object with the keys in ``FIELDS``. Steps that nobody saw leave one line for all of them:
    ``{"missing_steps": 3, "first_step": 8, "last_step": 10}``. A number that is not finite is the string ``"nan"``,
    ``"inf"`` or ``"-inf"``.

    A line is in the file as soon as :meth:`append` returns, so that a killed process loses none; it is not forced to
    the disk, as a failing machine would need.

    Args:
        path (str): the file. It need not exist, nor its folder.

    Attributes:
        path (Path): the file.
        last_step (int): the last step that the file knows of, or from which on it is to know.
        last_skipped_steps (int, optional): the steps skipped up to that one, None if the file does not know.

    Examples:
        >>> import tempfile
        >>> record = RunRecord(Path(tempfile.mkdtemp(), "record.jsonl"))
        >>> record.resume(last_step=0)
        []
        >>> record.append([{"step": 1, "overflow": True}, {"step": 4, "overflow": False}])
        >>> print(record.path.read_text(), end="")
        {"step": 1, "overflow": true}
        {"missing_steps": 2, "first_step": 2, "last_step": 3}
        {"step": 4, "overflow": false}
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.last_step = 0
        self.last_skipped_steps: int | None = None

    def resume(self, last_step: int) -> list[str]:
        """Make the file one that goes on after a step.

        Steps beyond it are taken out, for the run is going to take them again, and so is a last line that a kill left
        unfinished. The file of a run that cannot go on here, because this one starts at step 1 or the file is no
        record, is kept under another name.

        Args:
            last_step (int): the last step of the run before it was resumed, 0 for a new run.

        Returns:
            list[str], a sentence for each thing that was done to the file.

        Raises:
            OSError: if the file cannot be read or replaced; it is then as it was.
        """
        self.last_step, self.last_skipped_steps = last_step, None
        # A pipe or a device can be written to, but has no lines to go on from.
        if not self.path.is_file():
            return []
        lines, torn = _split(self.path.read_bytes())
        try:
            entries = _parse(lines)
        except ValueError as error:
            return [f"{self.path} is no record of steps, {error}: it is kept as {self._move_aside()}."]
        if last_step == 0 and entries:
            return [f"{self.path} has the steps of an earlier run: it is kept as {self._move_aside()}."]
        # A line for missing steps that goes beyond is not cut: a shorter one will be written.
        kept = [line for line, entry in zip(lines, entries, strict=True) if _last_step(entry) <= last_step]
        notes = []
        if torn:
            notes.append(f"{self.path} ended in an unfinished line, which is taken out: {_shown(torn)}")
        if len(kept) < len(lines):
            notes.append(
                f"{self.path} went on to step {_last_step(entries[-1])}: the steps after {last_step} are taken out, "
                "because the run takes them again."
            )
        if notes:
            self._replace(kept)
        if kept:
            last = json.loads(kept[-1])
            self.last_step = _last_step(last)
            if self.last_step == last_step:
                self.last_skipped_steps = last.get("skipped_steps")
        return notes

    def append(self, entries: Iterable[Mapping[str, object]]) -> None:
        """Write a line for each entry, and one for the steps that are missing before it.

        Args:
            entries (Iterable[Mapping]): by increasing step, each with an int ``step``; other values are numbers, bools
                or None.

        Raises:
            OSError: if a line cannot be written. The file ends with the last whole line.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Opened each time, so that a record that was moved or deleted meanwhile is not written to nowhere.
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            for entry in entries:
                step = entry["step"]
                if not isinstance(step, int) or step <= self.last_step:
                    raise ValueError(f"step {step} cannot follow step {self.last_step} in {self.path}")
                if step > self.last_step + 1:
                    _write_whole(file, _missing(self.last_step + 1, step - 1))
                    self.last_step = step - 1
                _write_whole(file, entry)
                self.last_step = step
        finally:
            os.close(file)

    def _replace(self, lines: list[bytes]) -> None:
        permissions = stat.S_IMODE(self.path.stat().st_mode)
        with atomic_write(self.path, "wb", permissions) as record:
            record.writelines(line + b"\n" for line in lines)

    def _move_aside(self) -> str:
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.{number}")).exists():
            number += 1
        os.replace(self.path, aside)
        return aside.name


def read_record(path: str | os.PathLike[str]) -> list[dict[str, object]]:
    """Read the record of a run, which may still be going on.

    Args:
        path (str): the file.

    Returns:
        list[dict]: the lines, those for missing steps among them. A last line that is not finished is left out.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is no record; the message names the line.

    Examples:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp(), "record.jsonl")
        >>> _ = file.write_text('{"step": 1, "loss": "nan"}\\n{"step": 2, "lo')
        >>> read_record(file)
        [{'step': 1, 'loss': nan}]
    """
    lines, _ = _split(Path(path).read_bytes())
    try:
        return _parse(lines)
    except ValueError as error:
        raise ValueError(f"{path} is no record of steps: {error}") from error


def _split(content: bytes) -> tuple[list[bytes], bytes]:
    """Return the whole lines, and what stands after them or in their place where a write was cut off."""
    *lines, torn = content.split(b"\n")
    # A machine that fails can leave a last line of the right length without its content.
    if lines and not torn and not _is_json(lines[-1]):
        torn = lines.pop()
    return lines, torn


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _parse(lines: list[bytes]) -> list[dict[str, object]]:
    entries, last_step = [], 0
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            first_step, entry_last_step = _first_step(entry), _last_step(entry)
            if not last_step < first_step <= entry_last_step:
                raise ValueError(f"step {first_step} cannot follow step {last_step}")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"line {number} is {_shown(line)} ({type(error).__name__}: {error})") from error
        last_step = entry_last_step
        entries.append({key: _number(value) for key, value in entry.items()})
    return entries


def _first_step(entry: Mapping[str, object]) -> int:
    return _as_step(entry["first_step"] if "missing_steps" in entry else entry["step"])


def _last_step(entry: Mapping[str, object]) -> int:
    return _as_step(entry["last_step"] if "missing_steps" in entry else entry["step"])


def _as_step(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"a step must be an integer, but is {value!r}")
    return value


def _missing(first_step: int, last_step: int) -> dict[str, int]:
    return {"missing_steps": last_step - first_step + 1, "first_step": first_step, "last_step": last_step}


def _write_whole(file: int, entry: Mapping[str, object]) -> None:
    """Write a line, or leave a regular file as it was."""
    line = _as_line(entry) + b"\n"
    before = os.fstat(file)
    try:
        while line:
            line = line[os.write(file, line) :]
    except OSError:
        if stat.S_ISREG(before.st_mode):
            os.ftruncate(file, before.st_size)
        raise


def _as_line(entry: Mapping[str, object]) -> bytes:
    return json.dumps({key: _for_json(value) for key, value in entry.items()}, allow_nan=False).encode()


def _for_json(value: object) -> object:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: object) -> object:
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value


def _shown(line: bytes) -> str:
    return repr(line[:80])
