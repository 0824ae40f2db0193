"""The record of a run: a file of JSON lines, one a step, that survives kills and resumes."""

import contextlib
import itertools
import json
import os
import re
import secrets
import stat
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.text.files import NOT_FINITE, atomic_write, json_text

__all__ = ["FIELDS", "RunRecord", "new_run", "read_record"]

# Fields of one record line; null means unknown. From scale_window to skipped_steps, values are those after the step.
FIELDS: tuple[str, ...] = ("step", "loss", "overflow", "loss_scale", "next_loss_scale", *AdaptiveRule.recorded)
FIELDS += ("skipped_steps", "largest_gradient", "dropped_by_norm", "gradient_norm")

# As this package writes a line of a step. Others, and those for missing steps, are left to the parser of JSON, which
# takes twice as long.
_VALUE = rb'(?:-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|null|true|false|"[^"\\]*"|\[[^][{}\\]*\])'
_OWN_LINE = re.compile(rb'\{(?:"run": \d+, )?"step": (\d{1,15})(?:, "\w+": ' + _VALUE + rb")*\}\n")

_COPIED_AT_ONCE = 2**20

# The locks that this process holds, by the record's path.
_held: weakref.WeakValueDictionary[Path, FileLock] = weakref.WeakValueDictionary()


class RunRecord:
    """Writes the record of one run.

    A line is a JSON object with an int ``step``. Missing steps leave one line for all of them:
    ``{"missing_steps": 3, "first_step": 8, "last_step": 10}``. A number that is not finite is the string ``"nan"``,
    ``"inf"`` or ``"-inf"``.

    A killed process loses no line that :meth:`append` has written; a machine that fails may lose the last ones.

    The first line of a record has the number of its run, as ``run``. A run that is resumed goes on in the record with
    its number, also if that was kept under another name meanwhile, and never in one with another number.

    From :meth:`resume` to :meth:`close` the process holds a lock, a hidden file beside the record. Where another
    process writes the file, or the file is the record of another run, this one takes ``NAME_2.jsonl``, or the next
    number that is free. The lock of a process that was killed does not count.

    Args:
        path (str): the file. Neither it nor its folder need exist.
        every_step (bool): whether missing steps leave a line. Default: True.

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
        >>> record.append([{"step": 1, "overflow": True}, {"step": 4, "overflow": False}])
        >>> print(record.path.read_text(), end="")
        {"step": 1, "overflow": true}
        {"missing_steps": 2, "first_step": 2, "last_step": 3}
        {"step": 4, "overflow": false}
    """

    def __init__(self, path: str | os.PathLike[str], every_step: bool = True) -> None:
        self.path, self.run = Path(path), 0
        self.last_step = 0
        self.last_skipped_steps: int | None = None
        self._every_step = every_step
        self._lock: FileLock | None = None

    def resume(self, last_step: int, run: int = 0) -> list[str]:
        """Prepare the file to be continued after a step.

        Later steps are removed, because the run takes them again, and so is a last line that a kill left unfinished.
        Without a number they may be those of another run, and are kept in a file of their own. A file that cannot be
        continued, because this run starts at step 1 or the file is no record, is renamed.

        Args:
            last_step (int): the last step of the run before it was resumed, 0 for a new run.
            run (int): the number of the run, from :func:`new_run`, which its checkpoints know. Default: 0, they know
                none. Where another process goes on from the same checkpoint, ``run`` of the record is a new number.

        Returns:
            list[str], a sentence for each change to the file.

        Raises:
            OSError: if the file cannot be read or replaced; it is then unchanged.
        """
        self.last_step, self.last_skipped_steps, self.run = last_step, None, run
        notes = self._choose_file(last_step)
        # A pipe or a device can be written to, but has no lines to continue.
        if not self.path.is_file():
            return notes
        try:
            found = _look_through(self.path, last_step)
        except ValueError as error:
            return [*notes, f"{self.path} is no run record, {error}: it is kept as {self._move_aside()}."]
        if last_step == 0 and found.last_step:
            return [*notes, f"{self.path} has the steps of an earlier run: it is kept as {self._move_aside()}."]
        if found.torn:
            notes.append(f"{self.path} ended in an unfinished line, which is taken out: {found.torn[:80]!r}")
        if found.last_step > last_step:
            aside = "" if self.run else f" They are kept as {self._keep_aside(found.kept, found.whole)}."
            notes.append(
                f"{self.path} went on to step {found.last_step}: the steps after {last_step} are taken out, because "
                f"the run takes them again.{aside}"
            )
        if found.kept < self.path.stat().st_size:
            # At once, whatever is killed, and on a full disk too.
            os.truncate(self.path, found.kept)
        if found.last_kept:
            if not found.last_kept.endswith(b"\n"):
                # As editors leave it.
                with self.path.open("ab") as file:
                    file.write(b"\n")
            entry = _parse([found.last_kept])[0]
            self.last_step = _step(entry, "last_step")
            self.last_skipped_steps = entry.get("skipped_steps") if self.last_step == last_step else None
        return notes

    def append(self, entries: Iterable[Mapping[str, object]]) -> None:
        """Write a line for each entry, and one for the steps that are missing before it.

        Args:
            entries (Iterable[Mapping]): by increasing step, each with an int ``step``.

        Raises:
            OSError: if a line cannot be written. The file ends with the last whole line.
            ValueError: if a step does not follow the last one.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Opened each time: the file may have been moved or deleted meanwhile.
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            for entry in entries:
                step = entry["step"]
                if not isinstance(step, int) or step <= self.last_step:
                    raise ValueError(f"step {step} cannot follow step {self.last_step} in {self.path}")
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
        """Let other processes resume the record."""
        # A forked process does not hold the locks of its parent.
        if self._lock is not None and self._lock.is_locked:
            # While the lock is held: whoever has opened the file meanwhile finds that it has no name any more.
            with contextlib.suppress(OSError):
                os.unlink(self._lock.lock_file)
            self._lock.release()
            _held.pop(self.path.resolve(), None)
        self._lock = None

    def _choose_file(self, last_step: int) -> list[str]:
        """Lock the first file that nobody writes and, after a step, that is not the record of another run."""
        if self._lock is not None or (self.path.exists() and not self.path.is_file()):
            return []
        wanted, reason = self.path, ""
        own = self._own_files() if last_step and self.run else []
        numbered = (wanted.with_name(f"{wanted.stem}_{number}{wanted.suffix}") for number in itertools.count(2))
        for self.path in itertools.chain(own, [wanted], numbered):
            try:
                self._lock = _lock(self.path)
            except Timeout:
                here = self.path.resolve() in _held
                reason = reason or f"is being written by another {'callback of this process' if here else 'run'}"
                if self.path in own and not here:
                    # Which is from now on the only run with this number.
                    self.run = new_run()
                continue
            except OSError:
                # append() reports a folder that cannot be written to. Without locks the record is written all the same.
                pass
            if not last_step or _run_of(self.path) in (None, self.run):
                break
            reason = reason or "is the record of another run"
            self.close()
        return [f"{wanted} {reason}: this run is recorded in {self.path.name}."] if reason else []

    def _own_files(self) -> list[Path]:
        """Return the records of this run, also those that were kept under another name."""
        stem, suffix = re.escape(self.path.stem), re.escape(self.path.suffix)
        name = re.compile(rf"{stem}(_\d+)?{suffix}(\.\d+)?")
        files = [file for file in self.path.parent.glob("*") if name.fullmatch(file.name) and file.is_file()]
        own = [file for file in files if _run_of(file) == self.run]
        return sorted(own, key=lambda file: (len(file.name), file.name))

    def _move_aside(self) -> str:
        aside = self._free_name()
        os.replace(self.path, aside)
        return aside.name

    def _keep_aside(self, start: int, end: int) -> str:
        aside, permissions = self._free_name(), stat.S_IMODE(self.path.stat().st_mode)
        with self.path.open("rb") as record, atomic_write(aside, "wb", permissions) as copy:
            record.seek(start)
            while part := record.read(min(end - record.tell(), _COPIED_AT_ONCE)):
                copy.write(part)
        return aside.name

    def _free_name(self) -> Path:
        names = (self.path.with_name(f"{self.path.name}.{number}") for number in itertools.count(1))
        return next(name for name in names if not name.exists())


def _lock(path: Path) -> FileLock:
    """Return a lock on a record, which ends with this process; raise Timeout where somebody else holds it."""
    whole = path.resolve()
    # Whoever closes the record may be another thread.
    lock = FileLock(whole.with_name(f".{whole.name}.lock"), thread_local=False)
    # A file that whoever held the lock has just removed is not waited for, but made anew.
    lock.acquire(timeout=0.1, poll_interval=0.01)
    _held[whole] = lock
    return lock


def new_run() -> int:
    """Return a number for a run, from 1 to 2**31 - 1."""
    return 1 + secrets.randbelow(2**31 - 1)


def _run_of(path: Path) -> int | None:
    """Return the number of the run that a record is of, 0 where it has none, and None where there is no record."""
    try:
        with path.open("rb") as file:
            run: int = json.loads(next(filter(bytes.strip, file))).get("run", 0)
    except (AttributeError, OSError, RecursionError, StopIteration, ValueError):
        return None
    return run


def read_record(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the record of a run, which may still be running.

    Args:
        path (str): the file.

    Returns:
        list[dict]: the lines, including those for missing steps, without the number of the run. An unfinished last line
        is ignored.

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
    try:
        return _parse(_split(Path(path).read_bytes()))
    except ValueError as error:
        raise ValueError(f"{path} is no run record: {error}") from error


def _split(content: bytes) -> list[bytes]:
    """Return the whole lines, without what a write that was cut off left after them."""
    *lines, torn = content.split(b"\n")
    if torn and _is_json(torn):
        # Whole but for the end of the line, which an editor may leave out.
        return [*lines, torn]
    while lines and not lines[-1].strip():
        lines.pop()
    if lines and not torn and not _is_json(lines[-1]):
        # A machine that fails can leave a last line of the right length without its content.
        lines.pop()
    return lines


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


class _Found(NamedTuple):
    """What is in the file of a record.

    Attributes:
        last_step (int): the last step of its whole lines, 0 where there is none.
        kept (int): where the lines that are kept end, in bytes.
        whole (int): where the whole lines end.
        last_kept (bytes): the last line that is kept.
        torn (bytes): what a write that was cut off left at the end.
    """

    last_step: int = 0
    kept: int = 0
    whole: int = 0
    last_kept: bytes = b""
    torn: bytes = b""


def _look_through(path: Path, last_step: int) -> _Found:
    """Look through a record line by line, which may be months of them, for the last one up to a step.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is no record; the message names the line.
    """
    last = here = kept = whole = 0
    broken, torn, last_kept = "", b"", b""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            here += len(line)
            known = _OWN_LINE.fullmatch(line)
            if known is not None and (step := int(known[1])) > last and not broken:
                last = step
            elif not line.strip():
                continue
            elif broken or not (line.endswith(b"\n") or _is_json(line)):
                torn = torn or line
                break
            else:
                try:
                    [entry] = _parse([line.removesuffix(b"\n")], last, number)
                    last = _step(entry, "last_step")
                except ValueError as error:
                    # Only the last line may be what a machine that failed has left.
                    broken, torn = str(error), line.removesuffix(b"\n")
                    continue
            whole = here
            # A line for missing steps that ends later is removed too; append() writes a shorter one.
            if last <= last_step:
                kept, last_kept = here, line
        else:
            broken = broken if broken and _is_json(torn) else ""
    if broken:
        raise ValueError(broken)
    return _Found(last, kept, whole, last_kept, torn)


def _parse(lines: list[bytes], last_step: int = 0, first: int = 1) -> list[dict[str, Any]]:
    entries = []
    for number, line in enumerate(lines, start=first):
        # An editor may have left an empty one.
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            first_step = _step(entry, "first_step")
            if not last_step < first_step <= _step(entry, "last_step"):
                raise ValueError(f"step {first_step} cannot follow step {last_step}")
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(f"line {number} is {line[:80]!r} ({type(error).__name__}: {error})") from error
        last_step = _step(entry, "last_step")
        entries.append({key: NOT_FINITE.get(v, v) if isinstance(v, str) else v for key, v in entry.items()})
    if entries and first == 1:
        entries[0].pop("run", None)
    return entries


def _step(entry: Mapping[str, object], end: str) -> int:
    """The first or the last step that a line is about; there are several in a line for missing steps."""
    value = entry[end if "missing_steps" in entry else "step"]
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"a step must be an integer, but is {value!r}")
    return value


def _write_line(file: int, entry: Mapping[str, object], run: int) -> None:
    """Write a line, or leave a regular file as it was. The first line has the number of the run, if there is one."""
    before = os.fstat(file)
    is_first = stat.S_ISREG(before.st_mode) and before.st_size == 0
    line = json_text({"run": run, **entry} if run and is_first else entry).encode() + b"\n"
    try:
        while line:
            line = line[os.write(file, line) :]
    except OSError:
        if stat.S_ISREG(before.st_mode):
            os.ftruncate(file, before.st_size)
        raise
