"""A run read from a log: each step's loss scale and overflow flag, and whether the flag is known or inferred."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.record.run_folder import is_from_program
from mindformers_adaptive.record.step import COLUMNS
from mindformers_adaptive.record.trace import Trace, consecutive_runs, implied_ceilings, just_below, require_one_length
from mindformers_adaptive.rules.formats import FLOAT16, find_format

__all__ = ["ASSUMPTIONS", "RecordedRun", "bound_shares"]

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

ASSUMPTIONS = ("interpolated", "lower_bound", "upper_bound", "gradients")


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """A training run as its log shows it: the data of each step, and what was inferred.

    Attributes:
        name (str): what the run is called in tables and pictures.
        files (tuple[str, ...]): the log files from which the run was read.
        log_format (str): the format of the log files.
        step (NDArray): int64 of shape (steps,), the numbers of the steps, increasing; without those that are not in the
            log.
        loss_scale (NDArray): float64 of shape (steps,), the scale used in the step; nan where nothing is known of it.
        overflow (NDArray): bool of shape (steps,), whether the step overflowed and was skipped. Where a line stands for
            several steps, a guess that agrees with the line.
        position_known (NDArray): bool of shape (steps,), whether the log states for this very step that it overflowed
            or was applied. False if the log only counts the skipped steps of an interval, and the step was inferred.
        columns (Mapping[str, NDArray]): what else the log states of the steps, by the name of a field of
            ``mindformers_adaptive.record.step.Step``, such as "loss": float64 of shape (steps,), nan where the log does
            not say. A flag is 0 or 1. A loss or gradient norm of NaN is inf. A column is absent if nothing is known of
            it. Default: no columns.
        scale_factor (float): the factor by which an overflow divides the loss scale, as the log shows; 2 if the log
            does not show it.
        lines_read (int): how many lines the files have.
        lines_used (int): how many of them something was read from.
        notes (tuple[str, ...]): what was inferred, merged, superseded or is missing.
        problems (tuple[str, ...]): lines that seem to be about a step but cannot be read, each as ``file:line: why``.
        lines (NDArray, optional): int64 of shape (lines, 3), for each line of the log the number of steps up to its
            last one, and the fewest and the most of them that may have been skipped. Default: None, a line for each
            step, and ``overflow`` is exact.
        final_loss_scale (float): the scale after the last step, nan where nothing is known of it.
        lines_superseded (int): how many used lines are superseded by later lines about the same steps.
        gradient_format (Format): the format of the gradients, also by its name or numbers. Default: float16.
        without_line (NDArray, optional): bool of shape (steps,), whether the step has no line of its own in a record
            but is counted by other lines. Default: None, for no step.
        is_numbered (bool): whether the log numbers all of its steps. Where overflows at its end have no number, the run
            has at least the steps that their scales need, and nothing bounds how many were skipped.

    Raises:
        TypeError: if an argument that must be an array has another type.
        ValueError: if the arrays do not have one length, the steps do not increase, or a column has an unknown name.

    Examples:
        >>> run = RecordedRun("run", ("run.log",), "jsonl", np.array([1, 2, 3]), np.array([4.0, 2.0, 2.0]),
        ...                   np.array([True, False, False]), np.array([True, True, True]), lines_read=3, lines_used=3)
        >>> run.skipped_steps, run.to_trace().ceiling.round(2).tolist()
        (1, [2.83, 2.83, 2.83])
    """

    name: str
    files: tuple[str, ...]
    log_format: str
    step: NDArray[np.int64]
    loss_scale: Floats
    overflow: Flags
    position_known: Flags
    columns: Mapping[str, Floats] = field(default_factory=dict)
    scale_factor: float = 2.0
    lines_read: int = 0
    lines_used: int = 0
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    lines: NDArray[np.int64] | None = None
    final_loss_scale: float = np.nan
    lines_superseded: int = 0
    gradient_format: Any = FLOAT16
    without_line: Flags | None = None
    is_numbered: bool = True

    def __post_init__(self) -> None:
        arrays = self.step, self.loss_scale, self.overflow, self.position_known, self.without_line
        require_one_length(f"run {self.name!r}", *arrays, *map(self.column, self.columns))
        object.__setattr__(self, "gradient_format", find_format(self.gradient_format))
        if (np.diff(self.step) <= 0).any():
            raise ValueError(f"The steps of the run {self.name!r} must increase. Give each step once, in order.")
        if self.lines is None:
            exact = np.cumsum(self.overflow)
            object.__setattr__(self, "lines", np.column_stack([np.arange(1, len(self) + 1), exact, exact]))

    def __len__(self) -> int:
        return len(self.step)

    def column(self, name: str) -> Floats | None:
        """Return the column of a field, or None if the log never states the field.

        Args:
            name (str): the name of the field, such as "loss"; one of ``mindformers_adaptive.record.step.COLUMNS``.

        Returns:
            NDArray, optional: float64 of shape (steps,), nan where the log does not say.

        Raises:
            ValueError: if no column can have this name.
        """
        if name not in COLUMNS:
            raise ValueError(f"A column's name must be one of {COLUMNS}, but got {name!r}. Choose one of them.")
        return self.columns.get(name)

    def steps_where(self, flag: str) -> NDArray[np.int64]:
        """Return the numbers of the steps for which the log says that a flag is true.

        Args:
            flag (str): the name of the flag, such as "saved" for the steps after which a checkpoint was saved.

        Returns:
            NDArray, int64 of shape (numbers,).
        """
        values = self.column(flag)
        return self.step[:0] if values is None else self.step[values == 1]

    @property
    def is_from_program(self) -> bool:
        """bool: whether this is the record of a Python program that trained without a YAML file."""
        return self.log_format == "jsonl" and is_from_program(*self.files)

    @property
    def lines_ignored(self) -> int:
        """int: how many lines of the log were not used."""
        return self.lines_read - self.lines_used

    @property
    def skipped_steps(self) -> int:
        """int: how many steps ``overflow`` marks as skipped; :meth:`skipped_bounds` gives bounds on the true number."""
        return int(self.overflow.sum())

    @property
    def filled_loss_scale(self) -> Floats:
        """NDArray: float64 of shape (steps,), where the scale is unknown the one before, or else the first known."""
        return _forward_fill(np.append(self.loss_scale, self.final_loss_scale))[:-1]

    def first_loss_scales(self) -> tuple[float, float] | None:
        """Return bounds on the loss scale at the start of the run, or None if the log does not bound it.

        If the first steps are overflows and no line states their scale, each of them may have lowered the scale or left
        it as it was (hysteresis).

        Returns:
            tuple[float, float], optional: the lowest and the highest.
        """
        scales = np.append(self.loss_scale, self.final_loss_scale)
        known = np.flatnonzero(~np.isnan(scales))
        if not len(known) or self.skipped_bounds(int(known[0]))[0] < known[0]:
            return None
        low = float(scales[known[0]])
        return low, low * self.scale_factor ** min(int(known[0]), 1000)

    def line_ends(self) -> NDArray[np.int64]:
        """Return for each line of the log how many steps the run has up to the line's last step.

        Returns:
            NDArray, int64 of shape (lines,).
        """
        return np.asarray(self.lines, np.int64)[:, 0]

    def skipped_bounds(self, steps: int | None = None) -> tuple[int, int]:
        """Return the least and the greatest number of skipped steps that the run's first steps may have.

        Args:
            steps (int, optional): the number of these first steps. Default: None, all.

        Returns:
            tuple[int, int], the fewest and the most.

        Examples:
            >>> arrays = np.arange(1, 5), np.full(4, 8.0), np.full(4, False), np.full(4, False)
            >>> run = RecordedRun("run", (), "mindformers", *arrays, lines=np.array([[4, 1, 3]]))
            >>> run.skipped_bounds(), run.skipped_bounds(2)
            ((1, 3), (0, 2))
        """
        count = len(self) if steps is None else steps
        lines = np.asarray(self.lines)
        line = int(np.searchsorted(lines[:, 0], count, side="right"))
        before = lines[line - 1] if line else np.zeros(3, np.int64)
        taken, fewest, most = before.tolist()
        if taken < count:
            length, fewest_inside, most_inside = (lines[line] - before).tolist()
            inside = count - taken
            fewest, most = fewest + max(fewest_inside - (length - inside), 0), most + min(most_inside, inside)
        return fewest, most

    def applied_gradients(self) -> Floats | None:
        """Return for each step of the run its largest gradient, if the step was applied.

        Returns:
            NDArray, optional: float64 of shape (steps,), unscaled, nan where they are not known; None if none shows
            anything.
        """
        if (largest := self.column("largest_gradient")) is None:
            return None
        gradients = np.where(~self.overflow & self.position_known, largest, np.nan)
        return None if np.isnan(implied_ceilings(gradients)).all() else np.where(np.isinf(gradients), np.nan, gradients)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """tuple[str, ...]: the ways in which :meth:`to_trace` can assume ceilings, the default first."""
        return ASSUMPTIONS[:-1] if self.applied_gradients() is None else (ASSUMPTIONS[-1], *ASSUMPTIONS[:-1])

    def to_trace(self, assume: str | None = None) -> Trace:
        r"""Return the trace of ceilings (largest loss scales without overflow) that follows from this run.

        Bounds come from steps whose position and scale are known: a step that was applied at scale s has a ceiling of
        at least s, one that was skipped has one below s. Of other steps nothing is known (0 and inf). Where only the
        last of several steps of a line is known, s is the scale after it, taken back by the change that it may have
        made. The ceiling is assumed, for inferred steps within the bounds that they would give:

        - ``"interpolated"``: at each run of consecutive skipped steps, with s the smallest scale that was skipped and a
          the scale of the next applied step, or s / scale_factor if that is smaller or there is none,
          :math:`\log_2 c = (\log_2 s + \log_2 a) / 2`. Between two of them :math:`\log_2 c` is linear in the place of
          the step, before the first and after the last it is constant; then it is moved into the step's own bounds. An
          applied step has at least the largest scale that the applied steps after it reach before the next skipped
          step. Without any skipped step c is the largest scale that was applied.
        - ``"lower_bound"``: an applied step has c = s; a skipped one the smallest of s / scale_factor and the scales of
          the nearest applied steps before and after it.
        - ``"upper_bound"``: a skipped step has the largest c below s; an applied one the larger of the ceilings of the
          nearest skipped steps before and after it, at least as much as "interpolated" gives it; inf if no step was
          skipped.
        - ``"gradients"``: an applied step has the c that its largest gradient g shows, in FP16 65504 / g; between two
          of them :math:`\log_2 c` is linear, for skipped steps and for those that show nothing. If after more than half
          of the runs of skipped steps the gradients show more than the scale that was skipped, then something else
          overflows first, and all c are lowered by the median of the excess. Without gradients as ``"interpolated"``.

        Args:
            assume (str, optional): one of ``ASSUMPTIONS``. Default: None, "gradients" where any are known, else
                "interpolated", which errs to both sides.

        Returns:
            Trace, with this run's name, times, and the gradients of its applied steps.

        Raises:
            ValueError: if ``assume`` is another word.
        """
        assume = assume or self.assumptions[0]
        if assume not in ASSUMPTIONS:
            raise ValueError(f"'assume' must be one of {ASSUMPTIONS}, but got {assume!r}. Choose one, or leave it out.")
        # A rule without a smallest loss scale can lower the scale to 0. No ceiling lies below 0, so an overflow at 0
        # would contradict every ceiling: replace 0 by a tiny positive scale.
        scale = np.maximum(np.nan_to_num(self.filled_loss_scale, nan=1.0, posinf=np.inf), np.finfo(np.float64).tiny)
        lower = np.where(self.overflow, 0.0, scale)
        below = np.where(self.overflow, scale, np.inf)
        known = self.position_known & ~np.isnan(self.loss_scale)
        # A log line for several steps may state only the loss scale after the last of these steps. The last step used
        # the stated scale, or a scale that is one change away.
        ends = self.line_ends()
        last = ends[np.diff(ends, prepend=0) > 1] - 1
        last = last[known[last] & ~known[last - 1]]
        after = np.append(scale[1:], self.final_loss_scale)[last]
        bound = max(2.0, self.scale_factor)
        lower[last] = np.where(self.overflow[last], 0.0, np.nan_to_num(after / bound))
        below[last] = np.where(self.overflow[last], np.nan_to_num(after * bound, nan=np.inf), np.inf)
        gradients = self.applied_gradients()
        if assume == "gradients" and gradients is not None:
            ceiling = _by_gradients(scale, self.overflow, implied_ceilings(gradients, self.gradient_format))
        else:
            assumed = {"lower_bound": _lower, "upper_bound": _upper}.get(assume, _interpolated)
            ceiling = assumed(scale, self.overflow, self.scale_factor)
        ceiling = np.maximum(np.minimum(ceiling, just_below(below)), lower)
        lower, below = np.where(known, lower, 0.0), np.where(known, below, np.inf)
        return Trace(self.name, ceiling, lower, below, self.column("seconds"), gradients, self.gradient_format)


def bound_shares(trace: Trace) -> dict[str, float]:
    """Return the shares of a trace's steps whose ceiling has both bounds, only a lower, only an upper, or no bound.

    A log bounds the ceiling of a step on one side only: a step is either applied or skipped. So "both" is 0 for logs.
    Measured and synthetic ceilings have both bounds.

    Args:
        trace (Trace): a trace of at least one step.

    Returns:
        dict[str, float], the shares "both", "lower_bound", "upper_bound" and "neither"; they sum to 1.

    Examples:
        >>> bound_shares(Trace.exact("made", [8.0, 16.0]))
        {'both': 1.0, 'lower_bound': 0.0, 'upper_bound': 0.0, 'neither': 0.0}
    """
    # No ceiling lies below 0, so a ceiling of exactly 0 needs no lower bound.
    lower = (trace.lower_bound > 0) | (trace.upper_bound <= np.nextafter(0.0, 1.0))
    upper = np.isfinite(trace.upper_bound)
    return {
        "both": float((lower & upper).mean()),
        "lower_bound": float((lower & ~upper).mean()),
        "upper_bound": float((upper & ~lower).mean()),
        "neither": float((~lower & ~upper).mean()),
    }


def _forward_fill(scale: Floats) -> Floats:
    """Return loss scales with each nan replaced by the last known scale before it, or else by the first known."""
    known = np.flatnonzero(~np.isnan(scale))
    if len(known) == 0:
        return scale
    before = np.searchsorted(known, np.arange(len(scale)), side="right") - 1
    carried: Floats = scale[known[np.maximum(before, 0)]]
    return carried


def _nearest(values: Floats, chosen: Flags, missing: float) -> tuple[Floats, Floats]:
    """Return, for each step, the values at the nearest chosen step before it and at the nearest chosen step after it.

    A chosen step counts as nearest to itself, on both sides. ``missing`` is the value if there is no chosen step.
    """
    at = np.flatnonzero(chosen)
    padded = np.concatenate([[missing], values[at], [missing]])
    places = np.arange(len(values))
    return padded[np.searchsorted(at, places, side="right")], padded[np.searchsorted(at, places, side="left") + 1]


def _skipped_runs(scale: Floats, overflow: Flags) -> tuple[NDArray[np.int64], Floats]:
    """Return for each series of consecutive skipped steps the first and last index, and the smallest loss scale."""
    runs = consecutive_runs(np.flatnonzero(overflow))
    between = np.minimum.reduceat(np.append(scale, np.inf), (runs + np.array([0, 1])).ravel())
    return runs, between[::2]


def _lower(scale: Floats, overflow: Flags, factor: float) -> Floats:
    before, after = _nearest(scale, ~overflow, np.inf)
    return np.where(overflow, np.minimum(np.minimum(before, after), scale / factor), scale)


def _upper(scale: Floats, overflow: Flags, factor: float) -> Floats:
    if not overflow.any():
        return np.full_like(scale, np.inf)
    before, after = _nearest(just_below(scale), overflow, 0.0)
    return np.maximum(np.maximum(before, after), _reached(scale, overflow))


def _interpolated(scale: Floats, overflow: Flags, factor: float) -> Floats:
    if not overflow.any():
        return np.full_like(scale, scale.max(initial=0.0))
    runs, smallest = _skipped_runs(scale, overflow)
    following = np.append(scale, np.inf)[runs[:, 1] + 1]
    anchors = (np.log2(smallest) + np.log2(np.minimum(following, smallest / factor))) / 2
    # All consecutive skipped steps get the same assumed ceiling.
    ceiling = np.exp2(np.interp(np.arange(len(scale)), runs.ravel(), np.repeat(anchors, 2)))
    return np.maximum(ceiling, _reached(scale, overflow))


def _reached(scale: Floats, overflow: Flags) -> Floats:
    """Return for each applied step the largest scale of the applied steps from it up to the next skipped step.

    Return 0 for a skipped step. Without these ceilings, each scale of a run that climbs would seem the highest one.
    """
    reached = np.where(overflow, 0.0, scale)
    for first, last in consecutive_runs(np.flatnonzero(~overflow)).tolist():
        row = slice(first, last + 1)
        reached[row] = np.maximum.accumulate(reached[row][::-1])[::-1]
    return reached


def _by_gradients(scale: Floats, overflow: Flags, shown: Floats) -> Floats:
    known = np.flatnonzero(~np.isnan(shown))
    exponents = np.interp(np.arange(len(scale)), known, np.log2(shown[known]))
    if overflow.any():
        runs, smallest = _skipped_runs(scale, overflow)
        after = known[np.minimum(np.searchsorted(known, runs[:, 1]), len(known) - 1)]
        exponents -= max(float(np.median(exponents[after] - np.log2(smallest))), 0.0)
    return np.exp2(exponents)
