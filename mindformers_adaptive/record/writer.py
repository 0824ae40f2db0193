"""Write and read the record of a run: a file with one JSON line per step, which survives kills and resumes."""

import contextlib
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec
from filelock import FileLock, Timeout

from mindformers_adaptive.record.step import MARKS, entry_of
from mindformers_adaptive.text.files import NOT_FINITE, atomic_write, json_text, refuse_pipe

_COPIED_AT_ONCE = 2**20


class _Line(msgspec.Struct):
    """The step that a line of a run's record is about, or the first and last step of a line for missing steps."""

    step: int | None = None
    run: int = 0
    missing_steps: Any = None
    first_step: int | None = None
    last_step: int | None = None

    def span(self) -> tuple[int, int]:
        """Return the first and last step of this record line; raise ValueError if the line names no step."""
        first, last = (self.step, self.step) if self.missing_steps is None else (self.first_step, self.last_step)
        if first is None or last is None:
            raise ValueError("the line names no step")
        return first, last


_LINE = msgspec.json.Decoder(_Line)


class RunRecord:
    """Writer of the record of one run: a file with one JSON line per step.

    A line is a JSON object with at least ``step``, ``overflow`` and ``loss_scale``. Missing steps leave one line for
    all of them: ``{"missing_steps": 3, "first_step": 8, "last_step": 10}``. A number that is not finite is the string
    ``"nan"``, ``"inf"`` or ``"-inf"``.

    A killed process loses no line that :meth:`append` has written; a machine that fails may lose the last ones.

    The first line of a record has the number of its run, as ``run``. Nothing of another run is overwritten: where a new
    run finds the record of an earlier one, that file is renamed to ``NAME_RUN.jsonl``, with the number of the earlier
    run. A run that finds a file which another process writes, or which it cannot continue, writes ``NAME_RUN.jsonl``
    with its own number. Each run finds its record by that name when it is resumed.

    From :meth:`resume` to :meth:`close` the process holds a lock, a hidden file beside the record. The lock of a
    process that was killed does not count.

    Args:
        path (str): the file. Neither it nor its folder need exist.
        every_step (bool): whether each line needs ``overflow`` and ``loss_scale``, and missing steps leave a line.
            Default: True.

    Attributes:
        path (Path): the file that is written.
        run (int): the number of the run, 0 for none.
        last_step (int): the last step in the file, or the one that it continues from.
        last_skipped_steps (int, optional): ``skipped_steps`` of that step; None if the file does not have it.

    Examples:
        >>> import tempfile
        >>> record = RunRecord(Path(tempfile.mkdtemp(), "record.jsonl"))
        >>> record.resume(last_step=0)
        []
        >>> record.append([{"step": step, "overflow": step == 1, "loss_scale": 8.0} for step in (1, 4)])
        >>> print(record.path.read_text(), end="")
        {"step": 1, "overflow": true, "loss_scale": 8.0}
        {"missing_steps": 2, "first_step": 2, "last_step": 3}
        {"step": 4, "overflow": false, "loss_scale": 8.0}
    """

    def __init__(self, path: str | os.PathLike[str], every_step: bool = True) -> None:
        self.path, self.run = Path(path), 0
        self.last_step = 0
        self.last_skipped_steps: int | None = None
        self._every_step = every_step
        self._lock: FileLock | None = None

    def resume(self, last_step: int, run: int = 0) -> list[str]:
        """Prepare the record file so that the run can continue it after the step ``last_step``.

        Later steps are removed, because the run takes them again, and so is a last line that a kill left unfinished.
        Without a number they may be steps of another run, and are kept in a file of their own.

        Args:
            last_step (int): the last step of the run before it was resumed, 0 for a new run.
            run (int): the run's number, from :func:`new_run`, as its checkpoints store it. Default: 0, no number
                stored. If another process continues from the same checkpoint, ``run`` of the record becomes a new
                number.

        Returns:
            list[str], a sentence for each change to the file.

        Raises:
            OSError: if the file cannot be read or replaced; it is then unchanged.
        """
        self.last_step, self.last_skipped_steps, self.run = last_step, None, run
        # If the record is a pipe or a device, it can be written to, but has no lines to continue.
        if self.path.exists() and not self.path.is_file():
            return []
        notes = [] if self._lock is not None else self._choose_file(last_step)
        if self.path.exists():
            notes += self._cut_after(last_step)
        return notes

    def _choose_file(self, last_step: int) -> list[str]:
        """Choose and lock the file for the record of this run.

        Return a sentence for the user if the file has another name than ``path``, or if the file of an earlier run was
        renamed.
        """
        wanted, reason, is_shared = self.path, "", False
        of_this_run = wanted.with_name(f"{wanted.stem}_{self.run}{wanted.suffix}")
        for path in [of_this_run, wanted] if last_step and self.run and of_this_run.exists() else [wanted]:
            try:
                self._lock = _lock(path)
            except Timeout:
                reason, is_shared = "is being written by another run", True
                continue
            except OSError:
                # append() reports a record's folder that cannot be written to. If only locking fails, go on without a
                # lock.
                pass
            self.path = path
            try:
                content = _look_through(path, last_step) if path.exists() else _Content()
            except ValueError as error:
                reason = f"is no run record, {error}"
            else:
                if not content.last_step or (last_step and content.run == self.run):
                    return []
                if not last_step:
                    aside = _unused_name(path, content.run)
                    os.replace(path, aside)
                    return [f"{path} has the steps of an earlier run: it was renamed to {aside.name}."]
                reason = "is the record of another run"
            self.close()
        if is_shared and last_step and self.run:
            # Another process continues this run from the same checkpoint under the run's number. So give the
            # continuation in this process a new number.
            self.run = new_run()
        self.path = _unused_name(wanted, self.run)
        with contextlib.suppress(OSError):
            self._lock = _lock(self.path)
        return [f"{wanted} {reason}: this run is recorded in {self.path.name}."]

    def _cut_after(self, last_step: int) -> list[str]:
        """Remove an unfinished last line and the steps after ``last_step``; return a sentence for each removal."""
        content, notes = _look_through(self.path, last_step), []
        if content.torn:
            notes.append(f"{self.path} ended in an unfinished line, which was removed: {content.torn[:80]!r}")
        if content.last_step > last_step:
            aside = "" if self.run else f" They were moved to {self._keep_aside(content.kept_until, content.whole)}."
            notes.append(
                f"{self.path} went on to step {content.last_step}: the steps after {last_step} were removed, because "
                f"the resumed run takes them again.{aside}"
            )
        if content.kept_until < self.path.stat().st_size:
            # Truncate now, so that the record file is right even if the process is killed later or the disk is full.
            os.truncate(self.path, content.kept_until)
        if content.last_kept:
            self.last_step = _LINE.decode(content.last_kept).span()[1]
            entry = msgspec.json.decode(content.last_kept)
            self.last_skipped_steps = entry.get("skipped_steps") if self.last_step == last_step else None
        return notes

    def append(self, entries: Iterable[Mapping[str, object]]) -> None:
        """Write each entry as a line of the record. If steps are missing before an entry, write a line for them first.

        Args:
            entries (Iterable[Mapping]): by increasing step, each with ``step`` (int), ``overflow`` and ``loss_scale``.

        Raises:
            OSError: if a line cannot be written. The file ends with the last whole line, or where the disk does not
                even allow that, the next line begins after what was written of this one.
            TypeError: if a value cannot be written as JSON.
            ValueError: if an entry lacks ``overflow`` or ``loss_scale``, or a ``step`` that follows the last one.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Look at the record on each call: the file may have been moved or deleted since the last call.
        is_device = self.path.exists() and not self.path.is_file()
        file = os.open(self.path, os.O_CREAT | os.O_APPEND | (os.O_WRONLY if is_device else os.O_RDWR), 0o644)
        try:
            if not _ends_in_line(file):
                os.write(file, b"\n")
            for entry in (entry_of(values, is_step=self._every_step) for values in entries):
                if (step := entry["step"]) <= self.last_step:
                    raise ValueError(
                        f"step {step} cannot follow step {self.last_step} in {self.path}. Append the steps in order."
                    )
                if self._every_step and step > self.last_step + 1:
                    first, last = self.last_step + 1, step - 1
                    missing = {"missing_steps": last - first + 1, "first_step": first, "last_step": last}
                    _write_line(file, missing, self.run)
                    self.last_step = last
                _write_line(file, entry, self.run)
                self.last_step = step
        finally:
            os.close(file)

    def close(self) -> None:
        """Release the lock on the record file, so that other processes can continue the record."""
        # A forked process does not hold the locks of its parent.
        if self._lock is not None and self._lock.is_locked:
            # Delete the lock file before releasing the lock. A process that has just opened the lock file then notices
            # the deletion.
            with contextlib.suppress(OSError):
                os.unlink(self._lock.lock_file)
            self._lock.release()
        self._lock = None

    def _keep_aside(self, start: int, end: int) -> str:
        aside, permissions = _unused_name(self.path), stat.S_IMODE(self.path.stat().st_mode)
        with self.path.open("rb") as record, atomic_write(aside, "wb", permissions) as copy:
            record.seek(start)
            while part := record.read(min(end - record.tell(), _COPIED_AT_ONCE)):
                copy.write(part)
        return aside.name


def _unused_name(path: Path, run: int = 0) -> Path:
    """Return an unused path NAME_NUMBER: with the run's number if it is known and free, else with a random number."""
    number = run or new_run()
    while (unused := path.with_name(f"{path.stem}_{number}{path.suffix}")).exists():
        number = new_run()
    return unused


def _lock(path: Path) -> FileLock:
    """Lock a record until this process ends, and return the lock; raise Timeout if another process holds it."""
    whole = path.resolve()
    # thread_local is False, because another thread may close the record and release the lock.
    lock = FileLock(whole.with_name(f".{whole.name}.lock"), thread_local=False)
    # Try more than once: if another process is just deleting the lock file, the next try makes a new file.
    lock.acquire(timeout=0.1, poll_interval=0.01)
    return lock


def new_run() -> int:
    """Return a random number for a new run, from 1 to 2**31 - 1."""
    return 1 + secrets.randbelow(2**31 - 1)


def read_record(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the record of a run, which may still be running.

    Args:
        path (str): the file.

    Returns:
        list[dict]: the lines, including those for missing steps, as they are of a run that was never resumed: without
        ``run``, ``resumed`` and ``saved``. Lines that a failed write left unfinished are left out.

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
    entries: list[dict[str, Any]] = []
    refuse_pipe(path)
    try:
        with open(path, "rb") as file:
            for _, text, line in _lines(file):
                if line is not None:
                    content = msgspec.json.decode(text)
                    entries.append({k: NOT_FINITE.get(v, v) if isinstance(v, str) else v for k, v in content.items()})
    except ValueError as error:
        raise ValueError(f"{path} is no run record: {error}") from error
    for index, entry in enumerate(entries):
        for mark in MARKS if index else ("run", *MARKS):
            entry.pop(mark, None)
    return entries


class _Content(NamedTuple):
    """The facts about a record file that :meth:`RunRecord.resume` needs.

    Attributes:
        run (int): the number of the run, 0 for none.
        last_step (int): the last step in the complete lines, 0 if there is none.
        kept_until (int): the position, in bytes, where the lines up to the resumed step end.
        whole (int): the position, in bytes, where the complete lines end.
        last_kept (bytes): the last line up to the resumed step.
        torn (bytes): the unfinished line that an interrupted write left at the end.
    """

    run: int = 0
    last_step: int = 0
    kept_until: int = 0
    whole: int = 0
    last_kept: bytes = b""
    torn: bytes = b""


def _look_through(path: Path, last_step: int) -> _Content:
    """Return facts about a run record, read line by line because a record of months would not fit into memory.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if the file is no record; the message names the line.
    """
    content = _Content()
    with path.open("rb") as file:
        for end, text, line in _lines(file):
            if line is None:
                content = content._replace(torn=content.torn or text)
                continue
            if not content.last_step:
                content = content._replace(run=line.run)
            last = line.span()[1]
            content = content._replace(last_step=last, whole=end, torn=b"")
            # Keep only the lines that end at or before last_step. This drops also a line for missing steps that begins
            # before last_step and ends after last_step; append() then writes a new line for these missing steps.
            if last <= last_step:
                content = content._replace(kept_until=end, last_kept=text)
    return content


def _lines(file: IO[bytes]) -> Iterator[tuple[int, bytes, _Line | None]]:
    """Yield the end (byte offset), the text and the steps of each record line; an unfinished line has None as steps.

    A failed write leaves the beginning of a line, and a machine that fails may leave anything at the end of the file.

    Raises:
        ValueError: if a line does not belong to a record.
    """
    end = last_step = 0
    strange = ""
    for number, raw in enumerate(file, start=1):
        end, text = end + len(raw), raw.removesuffix(b"\n")
        # A text editor may have left an empty line in the record.
        if not text.strip():
            continue
        if strange:
            raise ValueError(strange)
        problem = f"line {number} is {text[:80]!r}"
        try:
            line = _LINE.decode(text)
            first, last = line.span()
        except msgspec.ValidationError as error:
            raise ValueError(f"{problem} ({error})") from error
        except msgspec.DecodeError:
            strange = "" if text.startswith(b"{") else problem
            yield end, text, None
            continue
        except (RecursionError, ValueError) as error:
            raise ValueError(f"{problem} ({error})") from error
        if not last_step < first <= last:
            raise ValueError(f"{problem} (step {first} cannot follow step {last_step})")
        last_step = last
        yield end, text, line


def _ends_in_line(file: int) -> bool:
    """Return whether a file ends with a newline, is empty, or is not a regular file."""
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or not status.st_size:
        return True
    return os.pread(file, 1, status.st_size - 1) == b"\n"


def _write_line(file: int, entry: Mapping[str, object], run: int) -> None:
    """Write a record line; if that fails, restore the file as it was before, unless it is a pipe or a device.

    The first line of a file also states the run number ``run``, unless ``run`` is 0.
    """
    before = os.fstat(file)
    is_first = stat.S_ISREG(before.st_mode) and before.st_size == 0
    line = json_text({"run": run, **entry} if run and is_first else entry).encode() + b"\n"
    try:
        while line:
            line = line[os.write(file, line) :]
    except OSError:
        if stat.S_ISREG(before.st_mode):
            # Remove the part of the line that was written. If that fails too, append() begins a new line after it.
            with contextlib.suppress(OSError):
                os.ftruncate(file, before.st_size)
        raise
