"""What one line of a log says of the steps up to it, the order of such lines, and what all readers of logs share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

from mindformers_adaptive.lab.logs.lines import LogLines

__all__ = ["LARGEST_STEP", "LONGEST_INTERVAL", "LogEntry", "Overflow", "Reader", "Timeline"]

# A line that speaks for more steps than this is taken for one after a gap.
LONGEST_INTERVAL = 10_000

# A larger step number is a torn or mixed line, not a step; 2^53 is also where float64 stops counting.
LARGEST_STEP = 2**53

# Lines of several ranks may come out of order by a few steps. A run that goes back by more was restarted.
_RANKS_APART = 8

# So many restarts have a note each.
_RESTARTS_NAMED = 3


class Overflow(NamedTuple):
    """One skipped step that has a line of its own: the scale that was tried, and the one after."""

    loss_scale: float
    next_loss_scale: float


class LogEntry(NamedTuple):
    """A line of a log that names a step.

    Attributes:
        step (int): the last step that the line speaks of.
        where (str): the line, as file:number.
        next_loss_scale (float): the scale after that step; nan where the line does not say.
        loss_scale (float): the scale used in that step; nan where the line does not say.
        overflow (bool, optional): whether just that step overflowed; None where the line does not say.
        skips (int, optional): how many steps were skipped since the line before; None where the line does not say.
        overflows (tuple[Overflow, ...]): the skipped steps since the line before that have lines of their own.
        steps (int, optional): for how many steps the line speaks; None for as many as the others do.
        placed (bool): whether ``step`` stood in the log; False where it was counted.
        loss (float), seconds (float): the step's loss, and how long a step took; nan where the line does not say.
        largest_gradient (float): the largest absolute gradient of the step, unscaled; nan where the line does not say.
        overflowed_parameters (tuple[str, ...], optional): whose gradients overflowed; None where that is not known.
        dropped_by_norm (bool): whether the step was dropped for the size of its gradients, which is no overflow.
        after_restart (bool): whether the run was restarted between the line before and this one.
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
    overflowed_parameters: tuple[str, ...] | None = None
    dropped_by_norm: bool = False
    after_restart: bool = False


class Timeline:
    """Entries in the order of their steps: other ranks' lines are merged, a later attempt supersedes an earlier one.

    Attributes:
        entries (list[LogEntry]): steps strictly increasing.
        merged (int): lines that said of a step what another line had said.
        merged_with_other_loss (int): those of them whose loss is another one.
        superseded (int): lines that said of a step something else than a later line.
        notes (list[str]): what was merged or superseded, after :meth:`close`.
    """

    def __init__(self) -> None:
        self.entries: list[LogEntry] = []
        self.merged = self.merged_with_other_loss = self.superseded = 0
        self.notes: list[str] = []
        self._restarts: list[str] = []

    def add(self, entry: LogEntry) -> bool:
        """Take an entry; return False if another rank had said the same of its step."""
        if not self.entries or entry.step > self.entries[-1].step:
            self.entries.append(entry)
            return True
        same = [earlier for earlier in self.entries[-_RANKS_APART - 1 :] if _same(entry, earlier)]
        if same:
            self.merged += 1
            self.merged_with_other_loss += repr(entry.loss) != repr(same[0].loss)
            return False
        self._restart(entry)
        return True

    def _restart(self, entry: LogEntry) -> None:
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

    def close(self) -> None:
        """Add the notes on restarts and merged lines."""
        self.notes += self._restarts[:_RESTARTS_NAMED]
        if len(self._restarts) > _RESTARTS_NAMED:
            self.notes.append(f"The run goes back {len(self._restarts)} times in all.")
        if self.superseded > len(self.entries):
            self.notes.append(
                f"{self.superseded} step(s) cannot be placed: later lines give their numbers to others, and only "
                f"{len(self.entries)} line(s) are left. If the run was not restarted, the log does not number its "
                "steps."
            )
        if self.merged:
            note = f"{self.merged} line(s) of other ranks said the same of a step and were merged."
            if self.merged_with_other_loss:
                note = (
                    f"{self.merged} line(s) said the same of a step's overflow and scale as another and were merged, "
                    f"as those of other ranks; {self.merged_with_other_loss} of them have another loss. If they are "
                    "of another run, read each run from a file of its own."
                )
            self.notes.append(note)


def _same(entry: LogEntry, earlier: LogEntry) -> bool:
    # nan, where a line does not name the scale, equals nan here.
    def said(of: LogEntry) -> tuple[object, ...]:
        return of.step, of.overflow, of.skips, repr(of.loss_scale), repr(of.next_loss_scale)

    return entry.step == earlier.step and said(entry) == said(earlier)


class Reader(ABC):
    """Reads the lines of one format.

    Attributes:
        name (str): what the format is called.
        looked_for (str): what a line of a step looks like, for messages.
        timeline (Timeline): the entries so far.
    """

    name: ClassVar[str]
    looked_for: ClassVar[str]

    def __init__(self) -> None:
        self.timeline = Timeline()

    @staticmethod
    @abstractmethod
    def is_step_line(text: str) -> bool:
        """Whether a line is one that this reader can use."""

    @abstractmethod
    def take(self, text: str, lines: LogLines) -> bool:
        """Take a line; return whether it was used."""

    def finish(self) -> list[LogEntry]:
        """Return the entries of all lines."""
        return self.timeline.entries
