"""A run read from a log: a list of stretches of steps, with what the log states of each and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mindformers_adaptive.record.run_folder import is_from_program
from mindformers_adaptive.record.step import COLUMNS
from mindformers_adaptive.record.symptom import Seen
from mindformers_adaptive.record.trace import implied_ceilings, require_one_length
from mindformers_adaptive.rules.formats import FLOAT16, find_format

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

_LOSS_AND_NORM = ("loss", "gradient_norm")


class Move(NamedTuple):
    """A change of the loss scale that has a log line of its own, without the number of its step.

    Attributes:
        stretch (int): the index of the stretch in which the scale moved.
        is_overflow (bool): whether an overflow moved the scale; else a series of steps without overflow raised it.
        before (float), after (float): the loss scale before and after the move, nan where the line does not state it.
        clean_steps (int): for a raise, how many steps in a row the scale ``before`` held; 0 if the log does not say.
    """

    stretch: int
    is_overflow: bool
    before: float
    after: float
    clean_steps: int = 0


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """A training run as its log shows it: stretches of steps, in order. Nothing is filled in.

    A stretch is a series of steps of which the log gives one account. In a record, and in a log with a line for each
    step, every stretch has one step.

    Attributes:
        name (str): what the run is called in tables and pictures.
        files (tuple[str, ...]): the log files from which the run was read.
        log_format (str): the format of the log files.
        first (NDArray): int64 of shape (stretches,), the first step of each stretch. Steps that are in no stretch are
            not in the log.
        last (NDArray): int64 of shape (stretches,), the last step of each stretch.
        fewest (NDArray): int64 of shape (stretches,), how many steps of the stretch were skipped at least: as many as
            have lines of their own.
        most (NDArray): int64 of shape (stretches,), how many of them were skipped at most: as many as are not stated as
            applied. It equals ``fewest`` if the log states the number.
        used (NDArray): float64 of shape (stretches,), the loss scale that the last step of the stretch used; nan where
            the log does not state it.
        after (NDArray): float64 of shape (stretches,), the scale after that step; nan where the log does not state it.
        columns (Mapping[str, NDArray]): what else the log states of the last step, by the name of a field of
            ``mindformers_adaptive.record.step.Step``, such as "loss": float64 of shape (stretches,), nan where the log
            does not say. A flag is 0 or 1. A loss or gradient norm of NaN is inf. A column is absent if nothing is
            known of it. Default: no columns.
        so_far (NDArray, optional): int64 of shape (stretches, 2), the fewest and the most steps that were skipped up to
            the end of each stretch. Default: None, the sums of ``fewest`` and ``most``.
        restarted (NDArray, optional): bool of shape (stretches,), whether the run was restarted before the stretch.
            Default: None, it never was.
        start (float): the scale before the first step, where a line states it. Default: nan, not stated.
        moves (tuple[Move, ...]): the changes of the scale whose lines name no step.
        halvings (float, optional): how many bits the scale fell at least, all falls added up. Default: None, the falls
            between the stated scales.
        lines_read (int): how many lines the files have.
        lines_used (int): how many of them something was read from.
        lines_superseded (int): how many used lines are superseded by later lines about the same steps.
        notes (tuple[str, ...]): what was merged, superseded or is missing.
        problems (tuple[str, ...]): lines that seem to be about a step but cannot be read, each as ``file:line: why``.
        gradient_format (Format): the format of the gradients, also by its name or numbers. Default: float16.
        is_numbered (bool): whether the log numbers all of its steps. Where overflows at its end have no number, the run
            has at least as many steps as there are overflows, and nothing bounds how many were skipped.
        is_rounded (bool): whether the log rounds some scales so coarsely that they are left out here.

    Raises:
        TypeError: if an argument that must be an array has another type.
        ValueError: if the arrays do not have one length, the steps do not increase, or a column has an unknown name.

    Examples:
        >>> run = RecordedRun.of_steps([1, 2, 3], [4.0, 2.0, 2.0], [True, False, False])
        >>> run.skipped_bounds, run.first_loss_scales, run.known_share
        ((1, 1), (4.0, 4.0), 1.0)
    """

    name: str
    files: tuple[str, ...]
    log_format: str
    first: Integers
    last: Integers
    fewest: Integers
    most: Integers
    used: Floats
    after: Floats
    columns: Mapping[str, Floats] = field(default_factory=dict)
    so_far: Integers | None = None
    restarted: Flags | None = None
    start: float = np.nan
    moves: tuple[Move, ...] = ()
    halvings: float | None = None
    lines_read: int = 0
    lines_used: int = 0
    lines_superseded: int = 0
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    gradient_format: Any = FLOAT16
    is_numbered: bool = True
    is_rounded: bool = False

    def __post_init__(self) -> None:
        arrays = self.first, self.last, self.fewest, self.most, self.used, self.after, self.restarted
        require_one_length(f"run {self.name!r}", *arrays, *map(self.column, self.columns))
        object.__setattr__(self, "gradient_format", find_format(self.gradient_format))
        if (self.last < self.first).any() or (self.first[1:] <= self.last[:-1]).any():
            raise ValueError(f"The steps of the run {self.name!r} must increase. Give each step once, in order.")
        if self.so_far is None:
            object.__setattr__(self, "so_far", np.cumsum(np.column_stack([self.fewest, self.most]), axis=0))
        if self.restarted is None:
            object.__setattr__(self, "restarted", np.zeros(len(self.first), bool))
        if self.halvings is None:
            scales = np.append(np.column_stack([self.used, self.after]).ravel(), 0.0)
            scales = scales[(scales > 0) & np.isfinite(scales)]
            object.__setattr__(self, "halvings", float(np.maximum(-np.diff(np.log2(scales)), 0.0).sum()))

    @classmethod
    def of_steps(
        cls,
        step: ArrayLike,
        loss_scale: ArrayLike,
        overflow: ArrayLike,
        known: ArrayLike = True,
        final_loss_scale: float = np.nan,
        name: str = "run",
        files: tuple[str, ...] = (),
        log_format: str = "jsonl",
        **attributes: Any,
    ) -> RecordedRun:
        """Return a run whose log has a line for each step, from arrays with a number for each step.

        Args:
            step (ArrayLike): the numbers of the steps, increasing; int64 of shape (steps,).
            loss_scale (ArrayLike): the scale that each step used, nan where it is not stated; float64 of shape
                (steps,).
            overflow (ArrayLike): whether each step overflowed and was skipped, bool of shape (steps,).
            known (ArrayLike): whether the log states that, bool of shape (steps,) or (). Default: True, for each step.
            final_loss_scale (float): the scale after the last step. Default: nan, not stated.
            name (str): the name of the run. Default: "run".
            files (tuple[str, ...]): the names of its files. Default: ().
            log_format (str): the format of the log. Default: "jsonl".
            **attributes (Any): further attributes of the run, such as ``columns``.

        Returns:
            RecordedRun, with a stretch for each step.
        """
        last, used = np.array(step, np.int64), np.array(loss_scale, np.float64)
        skipped, stated = np.array(overflow, bool), np.broadcast_to(known, len(last))
        after = np.append(np.where(np.diff(last) == 1, used[1:], np.nan), final_loss_scale)[: len(last)]
        if (next_scale := attributes.get("columns", {}).get("next_loss_scale")) is not None:
            after = np.where(np.isnan(next_scale), after, next_scale)
        bounds = (skipped & stated).astype(np.int64), (skipped | ~stated).astype(np.int64)
        return cls(name, files, log_format, last, last, *bounds, used, after, **attributes)

    def __len__(self) -> int:
        return int(self.lengths.sum())

    @cached_property
    def lengths(self) -> Integers:
        """NDArray: int64 of shape (stretches,), the number of steps of each stretch."""
        return self.last - self.first + 1

    @cached_property
    def skipped(self) -> Flags:
        """NDArray: bool of shape (stretches,), whether the log states that all steps of the stretch were skipped."""
        flags = np.equal(self.fewest, self.lengths)
        # Between overflows without a number, there may be any number of other steps.
        flags[len(flags) - (not self.is_numbered) :] = False
        return flags

    @cached_property
    def applied(self) -> Flags:
        """NDArray: bool of shape (stretches,), whether the log states that no step of the stretch was skipped."""
        return np.equal(self.most, 0)

    @cached_property
    def follows(self) -> Flags:
        """NDArray: bool of shape (stretches,), whether the stretch goes on where the one before it ended."""
        return np.append(False, (self.first[1:] == self.last[:-1] + 1) & ~np.asarray(self.restarted)[1:])

    @property
    def known_share(self) -> float:
        """float: the share of steps of which the log shows both the loss scale and whether they were skipped."""
        known = (self.skipped | self.applied) & ~np.isnan(self.scale_ranges[0])
        return float(self.lengths[known].sum() / len(self))

    def column(self, name: str) -> Floats | None:
        """Return the column of a field, or None if the log never states the field.

        Args:
            name (str): the name of the field, such as "loss"; one of ``mindformers_adaptive.record.step.COLUMNS``.

        Returns:
            NDArray, optional: float64 of shape (stretches,), nan where the log does not say.

        Raises:
            ValueError: if no column can have this name.
        """
        if name not in COLUMNS:
            raise ValueError(f"A column's name must be one of {COLUMNS}, but got {name!r}. Choose one of them.")
        return self.columns.get(name)

    def steps_where(self, flag: str) -> Integers:
        """Return the numbers of the steps for which the log says that a flag is true.

        Args:
            flag (str): the name of the flag, such as "saved" for the steps after which a checkpoint was saved.

        Returns:
            NDArray, int64 of shape (numbers,).
        """
        values = self.column(flag)
        return self.last[:0] if values is None else self.last[values == 1]

    @property
    def is_from_program(self) -> bool:
        """bool: whether this is the record of a Python program that trained without a YAML file."""
        return self.log_format == "jsonl" and is_from_program(*self.files)

    @property
    def lines_ignored(self) -> int:
        """int: how many lines of the log were not used."""
        return self.lines_read - self.lines_used

    def skipped_up_to(self, stretches: int) -> tuple[int, int]:
        """Return how many steps were skipped in the first stretches of the run.

        Args:
            stretches (int): how many stretches, from the first on.

        Returns:
            tuple[int, int], the fewest and the most that the log allows.

        Examples:
            >>> run = RecordedRun.of_steps([1, 2, 3], [8.0] * 3, [True, False, False], known=[True, True, False])
            >>> run.skipped_up_to(2), run.skipped_bounds
            ((1, 1), (1, 2))
        """
        fewest, most = np.asarray(self.so_far)[stretches - 1].tolist() if stretches else (0, 0)
        return fewest, most

    @property
    def skipped_bounds(self) -> tuple[int, int]:
        """tuple[int, int]: the fewest and the most steps that were skipped in the run."""
        return self.skipped_up_to(len(self.first))

    @cached_property
    def scale_ranges(self) -> tuple[Floats, Floats]:
        """tuple[NDArray, NDArray]: bounds on the scales that each stretch used, float64 of shape (stretches,).

        Nan where they are not shown. A series of applied steps only raises the scale, and a series of skipped steps
        only lowers it. (A rule that lowers the scale in an applied step has a record, with a line for each step.)
        """
        before = np.where(self.follows, np.append(np.nan, self.after[:-1]), np.nan)
        before[:1] = self.start
        rises, falls = self.applied & (before <= self.after), self.skipped & (before >= self.after)
        low = np.where(rises, before, np.where(falls, self.after, np.nan))
        high = np.where(rises, self.after, np.where(falls, before, np.nan))
        is_single = self.lengths == 1
        return np.where(is_single, self.used, low), np.where(is_single, self.used, high)

    @cached_property
    def stated_scales(self) -> Floats:
        """NDArray: float64 of shape (scales,), all loss scales that the lines and moves of the log state, in order."""
        scales = np.column_stack([self.used, self.after])
        if self.moves:
            at = np.repeat([move.stretch for move in self.moves], 2)
            pairs = np.ravel([(move.before, move.after) for move in self.moves])
            return (every := np.insert(scales.ravel(), 2 * at, pairs))[~np.isnan(every)]
        return scales[~np.isnan(scales)]

    @property
    def first_loss_scales(self) -> tuple[float, float] | None:
        """tuple[float, float], optional: bounds on the loss scale at the start of the run; None if there are none.

        If the first steps are overflows and no line states their scale, each of them may have halved the scale or left
        it as it was (hysteresis). If the first step was applied, it may have doubled the scale.
        """
        known = self.start if np.isnan(self.used[0]) or self.lengths[0] > 1 else float(self.used[0])
        if known == known:
            return known, known
        scale = float(self.after[0])
        if np.isnan(scale):
            return None
        if self.applied[0] and self.lengths[0] == 1:
            return scale / 2, scale
        return (scale, scale * 2.0 ** min(int(self.lengths[0]), 1000)) if self.skipped[0] else None

    @property
    def seen_steps(self) -> Iterator[Seen]:
        """Iterator[Seen]: what the log states of each step, or of the last step of each stretch, in order."""
        unknown = np.full(len(self.first), np.nan)
        loss, norm = (unknown if (values := self.column(field)) is None else values for field in _LOSS_AND_NORM)
        flags = np.where(self.skipped, 1.0, np.where(self.applied, 0.0, np.nan))
        # A raise on a line of its own shows that some step of the stretch was applied.
        raised = np.isin(np.arange(len(loss)), [move.stretch for move in self.moves if not move.is_overflow])
        raised &= np.isnan(flags) & np.isnan(loss)
        flags[raised] = 0.0
        # Where overflows with lines of their own moved the scale, some steps did not use the scale after them.
        moved = [move.stretch for move in self.moves if move.is_overflow and move.before != move.after]
        is_moved = np.isin(np.arange(len(loss)), moved) & (self.lengths > 1)
        stated = [loss, flags, self.used, np.where(is_moved, np.nan, self.after), norm]
        chosen = ~np.isnan(stated).all(axis=0)
        dropped = np.isin(self.last, self.steps_where("dropped_by_norm"))[chosen].tolist()
        follows = self.column("largest_gradient") is not None
        loss_list, flags_list, used, after, norm_list = (_with_none(column[chosen]) for column in stated)
        overflow = map({1.0: True, 0.0: False, None: None}.get, flags_list)
        lengths = np.where(raised, 1, self.lengths)[chosen].tolist()
        columns = [self.last[chosen].tolist(), loss_list, overflow, used, after, norm_list, dropped]
        rows = zip(*columns, repeat(None), repeat(follows), lengths, strict=False)
        return map(Seen._make, rows)

    def applied_gradients(self) -> Floats | None:
        """Return the largest gradient of each stretch of one step that was applied.

        Returns:
            NDArray, optional: float64 of shape (stretches,), unscaled, nan where it is not known or not a positive
            finite number; None if none is known.
        """
        if (largest := self.column("largest_gradient")) is None:
            return None
        is_shown = self.applied & (self.lengths == 1) & (largest < np.inf)
        gradients = np.where(is_shown, largest, np.nan)
        return None if np.isnan(implied_ceilings(gradients)).all() else gradients


def _with_none(values: Floats) -> list[float | None]:
    """Return an array as a list, with None in place of nan."""
    numbers: list[float | None] = values.tolist()
    return [None if number != number else number for number in numbers] if np.isnan(values).any() else numbers
