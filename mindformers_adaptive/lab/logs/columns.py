"""The lines of a log as arrays: a month of training is a million of them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.lab.logs.reader import LogEntry

__all__ = ["LogColumns"]

# What most lines have: fields of LogEntry, their type, and what stands for None. Others are kept for the lines that
# have them.
_TYPES = {"step": "q", "steps": "q", "skipped_so_far": "q", "overflow": "b", "dropped_by_norm": "b"}
_TYPES |= dict.fromkeys(("next_loss_scale", "loss_scale", "loss", "largest_gradient"), "d")
_TYPES |= dict.fromkeys(("scale_window", "gradient_norm"), "d")
_NONE = -1

_DEFAULTS = LogEntry._field_defaults
_SPARSE = tuple(name for name in LogEntry._fields if name not in (*_TYPES, "where", "gradient_format"))


class LogColumns(Sequence[LogEntry]):
    """Entries of a log, which can be appended and taken off at the end as from a list.

    Attributes:
        of (dict[str, array]): the columns, by the name of the field in :class:`LogEntry`; -1 stands for None in those
            of integers and flags.
        sparse (dict[int, dict[str, object]]): by the place of an entry the values that few entries have.
    """

    def __init__(self) -> None:
        self.of: dict[str, Any] = {name: array(code) for name, code in _TYPES.items()}
        self.sparse: dict[int, dict[str, Any]] = {}
        self._where: list[str | int] = []
        self._files: list[tuple[int, str]] = []
        self._formats: list[tuple[int, Any]] = []

    @classmethod
    def holding(cls, entries: Iterable[LogEntry]) -> LogColumns:
        """Return columns that hold entries; the same object where they do already."""
        if isinstance(entries, LogColumns):
            return entries
        columns = cls()
        for entry in entries:
            columns.append(entry)
        return columns

    def __len__(self) -> int:
        return len(self._where)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        place = place + len(self) if place < 0 else place
        values: dict[str, Any] = {}
        for name, code in _TYPES.items():
            value = self.of[name][place]
            if code == "d":
                values[name] = float(value)
            elif value != _NONE:
                values[name] = int(value) if code == "q" else bool(value)
        formats = dict(self._formats)
        return LogEntry(
            where=self.where(place), gradient_format=formats.get(place), **values, **self.sparse.get(place, {})
        )

    @property
    def last_step(self) -> int:
        """int: the step of the last entry, -1 where there is none."""
        return self.of["step"][-1] if self._where else -1

    def where(self, place: int) -> str:
        """Return the line of an entry, as ``file:number``."""
        where = self._where[place]
        if isinstance(where, str):
            return where
        return f"{next(file for first, file in reversed(self._files) if first <= place)}:{where}"

    def append_lines(
        self, file: str, number: int, columns: Mapping[str, Sequence[Any]], formats: Sequence[str]
    ) -> None:
        """Add entries of one step each that have nothing rare.

        Args:
            file (str): the file that they are in.
            number (int): the line of the first one there; the others follow.
            columns (Mapping[str, Sequence]): the columns but ``steps``.
            formats (Sequence[str]): of the gradients of each; "" where it is not named.
        """
        if not self._files or self._files[-1][1] is not file:
            self._files.append((len(self._where), file))
        for place, one in enumerate(formats, start=len(self._where)):
            if one:
                self._note_format(one, place)
        for name, column in self.of.items():
            column.extend([1] * len(formats) if name == "steps" else columns[name])
        self._where.extend(range(number, number + len(formats)))

    def append(self, entry: LogEntry) -> None:
        """Add an entry."""
        place = len(self)
        for name, code in _TYPES.items():
            value = getattr(entry, name)
            self.of[name].append(_NONE if value is None and code != "d" else value)
        rare = {name: getattr(entry, name) for name in _SPARSE if getattr(entry, name) is not _DEFAULTS[name]}
        if rare := {name: value for name, value in rare.items() if value == value}:
            self.sparse[place] = rare
        if entry.gradient_format is not None:
            self._note_format(entry.gradient_format, place)
        self._where.append(entry.where)

    def _note_format(self, gradient_format: Any, place: int) -> None:
        """Keep the format of the gradients of an entry, where it is another one than before."""
        if not self._formats or self._formats[-1][1] != gradient_format:
            self._formats.append((place, gradient_format))

    def pop(self) -> None:
        """Take off the last entry."""
        self._where.pop()
        for column in self.of.values():
            column.pop()
        self.sparse.pop(len(self), None)
        for noted in (self._formats, self._files):
            if noted and noted[-1][0] == len(self):
                noted.pop()

    @property
    def named_formats(self) -> list[tuple[int, Any]]:
        """The different formats of gradients that entries name, in order, each after the place of its first entry."""
        found: list[tuple[int, Any]] = []
        for place, one in self._formats:
            if one and all(one != earlier for _, earlier in found):
                found.append((place, one))
        return found

    def array(self, name: str) -> NDArray[Any]:
        """Return a field of all entries as an array; nan or -1 where an entry does not have it."""
        if name in _TYPES:
            return np.asarray(self.of[name])
        default = _DEFAULTS[name]
        values = np.full(len(self), math.nan if isinstance(default, float) else _NONE if default is None else default)
        for place, rare in self.sparse.items():
            if rare.get(name) is not None:
                values[place] = rare[name]
        return values

    def with_inserted(self, places: Sequence[int], entries: Sequence[LogEntry]) -> LogColumns:
        """Return these columns with entries in front of those at some places, which increase."""
        result, added = LogColumns(), LogColumns.holding(entries)
        for name in _TYPES:
            result.of[name] = np.insert(np.asarray(self.of[name]), places, added.of[name])
        at = np.searchsorted(places, np.arange(len(self)), side="right") + np.arange(len(self))
        new = np.asarray(places, np.int64) + np.arange(len(places))
        where = np.empty(len(self) + len(places), object)
        where[at], where[new] = self._where, added._where
        result._where = where.tolist()
        result._files = [(int(at[place]), file) for place, file in self._files]
        result.sparse = {int(at[place]): values for place, values in self.sparse.items()}
        result.sparse |= {int(new[place]): values for place, values in added.sparse.items()}
        result._formats = [(int(at[place]), one) for place, one in self._formats]
        return result
