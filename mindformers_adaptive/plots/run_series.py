"""A run as its picture needs it: arrays over the steps, from a record or from a log, and what is to say of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.lab.traces.recorded_run import RecordedRun
from mindformers_adaptive.plots.canvas import count, power_of_two

__all__ = ["RunSeries", "run_finding", "series_of_record", "series_of_run"]

Floats = NDArray[np.float64]

# A scale that only tries the next power of two, and falls back, has settled: most of the last quarter of its steps it
# is within a factor of 4. A single outlier, from which it comes back, does not count.
_SETTLED_WITHIN = 4.0
_SETTLED_SHARE = 0.95
_SETTLED_FROM = 40

# With more gaps than that for each step, the record is one of single steps, and no line would be left between gaps.
_GAPS_PER_STEP = 0.1


@dataclass(frozen=True, eq=False)
class RunSeries:
    """What is drawn of a run.

    Attributes:
        step (NDArray): float64 of shape (rows,), increasing; a row is a step, or a gap that breaks the lines.
        loss (NDArray): float64 of shape (rows,); nan where it is not known, and in gaps, as in the others.
        broken_loss (NDArray): bool of shape (rows,), whether the loss was inf or NaN.
        loss_scale (NDArray): float64 of shape (rows,), the scale used in the step.
        overflow (NDArray): bool of shape (rows,), whether the step is known to have been skipped.
        scale_window (NDArray, optional): float64 of shape (rows,), the window after the step; None where nothing is
            known of it.
        final_loss_scale (float): the scale after the last step.
        gaps (tuple[tuple[float, float], ...]): first and last step of each gap to be shaded.
        last_step (int): the last step, which may lie in a gap.
        recorded_steps (int): how many steps are known.
        all_skipped (int, optional): how many of the steps 1 to ``last_step`` were skipped, those in gaps as well; None
            where only those in ``overflow`` are known.
    """

    step: Floats
    loss: Floats
    broken_loss: NDArray[np.bool_]
    loss_scale: Floats
    overflow: NDArray[np.bool_]
    scale_window: Floats | None
    final_loss_scale: float
    gaps: tuple[tuple[float, float], ...]
    last_step: int
    recorded_steps: int
    all_skipped: int | None

    @property
    def skipped(self) -> int:
        """How many steps are known to have been skipped, each with its place."""
        return int(self.overflow.sum())

    @property
    def complete(self) -> bool:
        """Whether every step from the first to the last is known."""
        return self.recorded_steps == self.last_step - int(self.step[0]) + 1

    def finding(self) -> str:
        """Return what is to say of the run, see :func:`run_finding`."""
        if self.all_skipped is not None:
            return run_finding(self.last_step, self.all_skipped, self.loss_scale, self.final_loss_scale)
        kind = "step" if self.complete else "recorded step"
        return run_finding(self.recorded_steps, self.skipped, self.loss_scale, self.final_loss_scale, kind)


def run_finding(steps: int, skipped: int, loss_scale: Floats, final_loss_scale: float, kind: str = "step") -> str:
    """Return in one sentence how many steps were skipped and where the loss scale went.

    A scale has *settled* if it stays within a factor of 4 in 95 % of the last quarter of at least 40 steps.

    Args:
        steps (int): how many.
        skipped (int): how many of them.
        loss_scale (NDArray): float64 of shape (rows,), the scale step by step; nan where it is not known.
        final_loss_scale (float): the scale after the last step; nan likewise.
        kind (str): what to call a step. Default: "step".

    Examples:
        >>> run_finding(400, 23, np.full(400, 2.0**18), 2.0**18)
        '23 of 400 steps skipped; loss scale stayed at $2^{18}$'
    """
    said = f"{skipped:,} of {count(steps, kind)} skipped"
    if skipped == 0:
        said = f"None of {count(steps, kind)} skipped"
    elif skipped == steps > 1:
        said = f"All {count(steps, kind)} skipped"
    known = np.append(loss_scale, final_loss_scale)
    known = known[known > 0]
    if not len(known):
        return said
    first, last = known[0], known[-1]
    if known.min() == known.max():
        return f"{said}; loss scale stayed at {power_of_two(last)}"
    recent = np.sort(known[-(len(known) // 4 + 1) :])
    outside = int(len(recent) * (1 - _SETTLED_SHARE) / 2)
    low, high = recent[outside], recent[len(recent) - 1 - outside]
    if len(known) >= _SETTLED_FROM and high <= _SETTLED_WITHIN * low:
        ends = power_of_two(low) if low == high else f"{power_of_two(low)} to {power_of_two(high)}"
        return f"{said}; loss scale settled at {ends}"
    if first == last:
        return f"{said}; loss scale ended where it began, at {power_of_two(last)}"
    return f"{said}; loss scale {'rose' if last > first else 'fell'} from {power_of_two(first)} to {power_of_two(last)}"


def series_of_record(record: Sequence[Mapping[str, object]]) -> RunSeries:
    """Return the series of a record.

    Args:
        record (Sequence[Mapping]): the lines, as :func:`mindformers_adaptive.monitor.record.read_record` returns them.

    Raises:
        TypeError: if a line is no mapping, or holds something else than numbers.
        ValueError: if there is no step.
    """
    if not isinstance(record, Sequence) or not all(isinstance(row, Mapping) for row in record):
        raise TypeError(
            f"'record' must be a list of lines, each a dict, but got {str(record)[:80]!r} of type "
            f"{type(record).__name__}. Read the file with mindformers_adaptive.monitor.record.read_record."
        )
    missing = [row for row in record if "missing_steps" in row]
    steps = len(record) - len(missing)
    _require_steps(steps)
    ends = _column("last_step", missing)
    single_steps = len(missing) > _GAPS_PER_STEP * steps
    rows = [row for row in record if "missing_steps" not in row] if single_steps else record
    step = _column("step", rows)
    # A line of missing steps stands at the first of them, with nothing else.
    step = np.where(np.isnan(step), _column("first_step", rows), step)
    loss = _column("loss", rows)
    there = np.array([row.get("loss") is not None for row in rows], np.bool_)
    window = _column("scale_window", rows)
    begins_at_1 = 1 in (record[0].get("step"), record[0].get("first_step"))
    all_skipped = _column("skipped_steps", record[-1:])[0] if begins_at_1 else np.nan
    return RunSeries(
        step=step,
        loss=loss,
        broken_loss=there & ~np.isfinite(loss),
        loss_scale=_column("loss_scale", rows),
        overflow=_column("overflow", rows) == 1,
        scale_window=window if np.isfinite(window).any() else None,
        final_loss_scale=float(_column("next_loss_scale", record[-1:])[0]),
        gaps=() if single_steps else tuple(zip(_column("first_step", missing).tolist(), ends.tolist(), strict=True)),
        last_step=int(max([step[-1], *ends[-1:]])),
        recorded_steps=steps,
        all_skipped=None if np.isnan(all_skipped) else int(all_skipped),
    )


def series_of_run(run: RecordedRun) -> RunSeries:
    """Return the series of a run that was read from its log, which does not tell the window.

    Args:
        run (RecordedRun): at least one step.

    Raises:
        ValueError: if there is no step.
    """
    _require_steps(len(run))
    loss = np.full(len(run), np.nan) if run.loss is None else run.loss
    return RunSeries(
        step=run.step.astype(np.float64),
        loss=loss,
        # In a log's run nan says that nothing is known.
        broken_loss=np.isinf(loss),
        loss_scale=run.loss_scale,
        overflow=run.overflow,
        scale_window=None,
        final_loss_scale=float(run.loss_scale[-1]),
        gaps=(),
        last_step=int(run.step[-1]),
        recorded_steps=len(run),
        all_skipped=None,
    )


def _require_steps(steps: int) -> None:
    if steps < 1:
        raise ValueError(
            "There must be at least 1 step to draw, but there is none. Let the run take a step, or look whether this "
            "is its record."
        )


def _column(field: str, rows: Iterable[Mapping[str, object]]) -> Floats:
    try:
        # None, and what is not there, becomes nan.
        return np.array([row.get(field) for row in rows], np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(
            f"'{field}' must be a number or None in each line of the record, but: {error}. Read the file with "
            "mindformers_adaptive.monitor.record.read_record."
        ) from error
