"""The data of the lines of a training log, stored in one array per field, because a log may have a million lines."""

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, get_args, get_type_hints

import msgspec
import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.record.log_formats import NAMED
from mindformers_adaptive.record.step import COLUMNS, RARE_FIELDS, LogLine, Step
from mindformers_adaptive.text.table import counted

# Log lines of several ranks may be out of order by up to this many lines. If the step numbers go back further, the run
# was restarted.
_RANKS_APART = 8

# The number of restarts of a run that get a note each; further restarts are only counted.
_RESTARTS_NAMED = 3

# A run that is restarted goes back to a checkpoint. If lines disagree about the last step more often than this, they
# are of several optimizers.
_AT_SAME_STEP = 3
# Overflows of two optimizers alternate: each leads on from the last but one. So it may look this often by chance.
_ALTERNATE = 3
_MIXED = (
    "The log must be of one optimizer, but up to {}, {}: the lines of two optimizers are mixed, such as an actor's and "
    "a critic's. Give the lines of one of them, for example every second line of steps: awk 'NR % 2 == 1'."
)

# New log lines wait in a list. The data of this many lines is moved into the columns of LogLines at a time.
_BLOCK = 4096

_STATED = ("overflow", "loss_scale", "next_loss_scale", "skipped_since", "skipped_steps")


# The fields that are stored, beside those that become columns of a run.
_STORED = ("step", "overflow", "loss_scale", "skipped_steps", "skipped_since", "steps", "rounding")


def _columns() -> dict[str, str]:
    """Return the array type code for each stored field of :class:`LogLine`, by field name."""
    types = {name: get_args(hint) or (hint,) for name, hint in get_type_hints(LogLine).items()}
    codes = {bool: "b", int: "q", float: "d"}
    names = dict.fromkeys((*_STORED, *COLUMNS))
    return {name: next(codes[kind] for kind in types[name] if kind in codes) for name in names}


_COLUMNS = _columns()
_UNKNOWN = {"b": -1, "q": -1, "d": float("nan")}


class LogLines:
    """The data of the lines of a training log, stored in columns in the order of the steps.

    Lines of several ranks that agree about a step are merged. After a restart, a step's new line replaces the old line.

    Attributes:
        columns (dict[str, array]): a column for each number or flag of :class:`LogLine`; -1 and nan stand for None.
        overflows (list[tuple[int, LogLine]]): the lines on overflows and raises that name no step, each with the number
            of rows before the line.
        after_damage (set[int]), after_restart (set[int]): indices of rows that follow an unreadable line, and indices
            of the first rows after a restart.
        formats (list): the gradient formats, each with the index of the row at which it begins.
        notes (list[str]): notes on lines that were merged, or replaced after restarts; :meth:`finish` adds them.
        superseded (int): how many rows were replaced after restarts.
    """

    def __init__(self) -> None:
        self.columns: dict[str, Any] = {name: array(code) for name, code in _COLUMNS.items()}
        self.where: Any = array("q")
        self.overflows: list[tuple[int, LogLine]] = []
        self.after_damage: set[int] = set()
        self.after_restart: set[int] = set()
        self.formats: list[tuple[int, Any]] = []
        self.notes: list[str] = []
        self.superseded = self._merged = self._other_loss = 0
        self._pending: list[Any] = []
        self._restarts: list[str] = []
        self._last_step = -1
        # How many steps without overflow a line has named since the last overflow.
        self._clean_steps: int | None = None
        # Whether the last step has been named again.
        self._is_again = False
        # The last moves of each rank and source file, to find lines of two optimizers.
        self._moves: dict[tuple[str, str], deque[tuple[float, float]]] = {}
        self._at_same_step = self._alternating = 0

    def __len__(self) -> int:
        return len(self.where)

    def add(self, line: Step, where: int, name_of: Callable[[int], str]) -> None:
        """Add a line of the log to the stored data.

        Args:
            line (Step): the data of the line.
            where (int): the number of the line in the log.
            name_of (Callable): returns how notes name the line with a given number, such as "train.log:12".
        """
        if line.step > self._last_step:
            self._append(line, where)
        elif line.step < 0:
            assert isinstance(line, LogLine)
            self._add_without_step(line)
            if self._alternating > _ALTERNATE:
                raise ValueError(_MIXED.format(name_of(where), "overflows alternate between two loss scales"))
        elif not self._merge(line):
            self._restart(line, where, name_of)

    def add_all(self, steps: Sequence[Step], where: int) -> bool:
        """Add consecutive lines of a record, of which the first has the number ``where``, if their steps increase.

        Return whether they do. Else nothing is added.
        """
        numbers = [step.step for step in steps]
        if numbers[0] <= self._last_step or any(first >= second for first, second in pairwise(numbers)):
            return False
        for row, step in enumerate(steps, start=len(self)):
            if step.gradient_format is not msgspec.UNSET:
                self._note_format(step.gradient_format, row)
        self.where.extend(range(where, where + len(steps)))
        self._pending += steps
        self._last_step = numbers[-1]
        self._flush(max(len(self._pending) - _RANKS_APART, 0))
        return True

    def _note_format(self, gradient_format: object, row: int) -> None:
        last_format = self.formats[-1][1] if self.formats else None
        if gradient_format not in (None, msgspec.UNSET, last_format):
            self.formats.append((row, gradient_format))

    def _add_without_step(self, line: LogLine) -> None:
        if line.overflow:
            self._note_alternation(line)
        named = self._pending[-1] if self._pending and getattr(self._pending[-1], "source", "") == NAMED else None
        if line.overflow is None:
            if self._pending:
                self._pending[-1].dropped_by_norm = True
        elif line.overflow and named is not None and (named.loss_scale in (None, line.loss_scale) or self._is_again):
            # The line before names the step of this overflow. If another line has named the step with another scale, a
            # restart has taken the step again.
            if named.loss_scale not in (None, line.loss_scale):
                self.after_restart.add(len(self) - 1)
            named.loss_scale, named.next_loss_scale = line.loss_scale, line.next_loss_scale
        elif line.overflow:
            self.overflows.append((len(self), line))
            self._clean_steps = None
        elif line.loss_scale is None:
            self._clean_steps = line.steps
        else:
            line.steps = self._clean_steps
            self.overflows.append((len(self), line))

    def _note_alternation(self, line: LogLine) -> None:
        """Count how often an overflow leads on from the last but one, and not from the last one."""
        if line.loss_scale is None or line.next_loss_scale is None:
            return
        moves = self._moves.setdefault((line.source, line.rank), deque(maxlen=3))
        if moves and moves[-1] == (line.loss_scale, line.next_loss_scale):
            return
        moves.append((line.loss_scale, line.next_loss_scale))
        if len(moves) == moves.maxlen:
            (_, first), (before, after), (start, _) = moves
            is_far = max(start, after) > 2 * min(start, after) and max(before, first) > 2 * min(before, first)
            self._alternating = self._alternating + 1 if start == first and is_far else 0

    def _append(self, line: Step, where: int) -> None:
        self._last_step, self._is_again = line.step, False
        self._pending.append(line)
        self.where.append(where)
        self._note_format(line.gradient_format, len(self) - 1)
        if len(self._pending) >= _BLOCK + _RANKS_APART:
            self._flush(_BLOCK)

    def _flush(self, count: int) -> None:
        rows, self._pending = self._pending[:count], self._pending[count:]
        if not rows:
            return
        if all(type(row) is Step for row in rows):
            of_rows = dict(
                zip(Step.__struct_fields__, zip(*map(msgspec.structs.astuple, rows), strict=True), strict=True)
            )
        else:
            of_rows = {name: tuple(getattr(row, name, None) for row in rows) for name in _COLUMNS}
        missing = (None,) * len(rows)
        for name, code in _COLUMNS.items():
            unknown = _UNKNOWN[code]
            values: Any = of_rows.get(name, missing)
            absent = values.count(msgspec.UNSET if name in RARE_FIELDS and type(rows[0]) is Step else None)
            # In a column, nan marks an unknown value. So store a loss or gradient norm that is NaN as inf.
            bad = np.inf if name in ("loss", "gradient_norm") else unknown
            if absent == len(values):
                values = np.full(absent, unknown)
            elif absent or name in ("loss", "gradient_norm") or name in RARE_FIELDS:
                values = [
                    unknown if value is None or value is msgspec.UNSET else bad if value != value else value
                    for value in values
                ]
            self.columns[name].frombytes(np.array(values, code).tobytes())

    def _merge(self, line: Step) -> bool:
        """Merge a log line into a recent line of the same step; return False if there is none or the lines disagree."""
        if getattr(line, "source", "") == NAMED and line.step < self._last_step:
            # The line states nothing else that could disagree, and ranks overflow in the same step.
            return False
        for earlier in reversed(self._pending[-_RANKS_APART:]):
            if earlier.step < line.step:
                return False
            if earlier.step == line.step:
                break
        else:
            return False
        pairs = [(getattr(earlier, name, None), getattr(line, name, None)) for name in _STATED]
        if any(first != second for first, second in pairs if first is not None and second is not None):
            return False
        if all(first is not None or second is None for first, second in pairs):
            self._merged, self._is_again = self._merged + 1, True
            self._other_loss += repr(earlier.loss) != repr(line.loss)
            # If no rank wrote the line, but a restarted run, its loss is the one that counts.
            earlier.loss, earlier.gradient_norm = line.loss, line.gradient_norm
        elif earlier is self._pending[-1]:
            # An overflow line that is printed between two lines of the same step belongs to that step.
            self.overflows = [(min(row, len(self) - 1), overflow) for row, overflow in self.overflows]
        for name in set(line.__struct_fields__).intersection(earlier.__struct_fields__):
            if getattr(earlier, name) is None:
                setattr(earlier, name, getattr(line, name))
        if isinstance(earlier, LogLine) and isinstance(line, LogLine):
            earlier.rounding = max(earlier.rounding, line.rounding)
        return True

    def _restart(self, line: Step, where: int, name_of: Callable[[int], str]) -> None:
        last, before = self._last_step, len(self)
        self._at_same_step += line.step == last
        if self._at_same_step > _AT_SAME_STEP:
            raise ValueError(_MIXED.format(name_of(where), "lines disagree again and again about the same step"))
        while self._pending and self._pending[-1].step >= line.step:
            self._pending.pop()
        # Overflows that were named since the last line of steps may be of the earlier attempt too.
        is_named = getattr(line, "source", "") == NAMED
        while self._pending and getattr(self._pending[-1], "source", "") == NAMED and not is_named:
            if self._pending[-1].skipped_steps is not None:
                # A line with the total of skipped steps names this step too.
                break
            self._pending.pop()
        flushed = len(self.columns["step"])
        if not self._pending:
            flushed = bisect_left(self.columns["step"], line.step)
        for column in self.columns.values():
            del column[flushed:]
        rows = flushed + len(self._pending)
        del self.where[rows:]
        # The restarted run prints lines for these steps again, so their old lines are dropped. Drop also the overflow
        # lines between the old lines: an overflow line names no step, but may belong to a dropped step.
        self.overflows = [(row, overflow) for row, overflow in self.overflows if row < rows]
        self.formats = [(row, named) for row, named in self.formats if row < rows]
        self.after_damage = {row for row in self.after_damage if row < rows}
        self.after_restart = {row for row in self.after_restart if row < rows} | {rows}
        self.superseded += before - rows
        self._restarts.append(
            f"{name_of(where)}: the run restarts at step {line.step} (it had reached {last}). Ignored: "
            f"{counted(before - rows, 'earlier line')} about those steps."
        )
        self._append(line, where)

    def finish(self) -> None:
        """Store the data of the last log lines in the columns. Note how many lines were merged or replaced."""
        self._flush(len(self._pending))
        self.notes += self._restarts[:_RESTARTS_NAMED]
        if len(self._restarts) > _RESTARTS_NAMED:
            self.notes.append(f"The run restarts {len(self._restarts)} times in all.")
        if self.superseded > len(self):
            self.notes.append(
                f"Superseded: {counted(self.superseded, 'line')}; left: {len(self)}. If the run was not restarted, the "
                "log does not number its steps."
            )
        if self._merged:
            loss = f", {self._other_loss} of them with another loss" if self._other_loss else ""
            self.notes.append(
                f"Merged: {counted(self._merged, 'line')} about steps of other lines, as several ranks write{loss}. "
                "If these lines are of another run, read each run from a file of its own."
            )

    def has_step(self) -> bool:
        """Return whether a line is about a step of the run. A line of step 0 states the scale before the first step."""
        return len(self.overflows) > 0 or bool((self.array("step") > 0).any())

    def array(self, name: str) -> NDArray[Any]:
        """Return a column of log data as an array, with nan or -1 for values that a log line does not state."""
        return np.asarray(self.columns[name])
