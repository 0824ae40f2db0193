"""A run as its picture needs it: arrays over the steps, from a record or from a log, and the finding for the title."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.lab.traces.gradients import shown_ceilings
from mindformers_adaptive.lab.traces.recorded_run import RecordedRun
from mindformers_adaptive.plots.canvas import Floats, count, power_of_two

__all__ = ["RunSeries", "series_of"]

# A scale has settled if it stays within a factor of 4 in 95 % of the last quarter of at least 40 steps: it tries the
# next power of two, and falls back. Single outliers do not count.
_SETTLED_WITHIN, _SETTLED_SHARE, _SETTLED_FROM = 4.0, 0.95, 40

# With more gaps than that for each step, the record is one of single steps; no line would be left between its gaps.
_GAPS_PER_STEP = 0.1


@dataclass(frozen=True, eq=False)
class RunSeries:
    """The recorded steps of a run; the arrays have the shape (steps,).

    Attributes:
        step (NDArray): float64, increasing.
        loss (NDArray): float64; nan where it is not known, inf where it was inf or NaN.
        loss_scale (NDArray): float64, the scale used in the step; nan where it is not known.
        overflow (NDArray): bool, whether the step is known to have been skipped.
        scale_window (NDArray, optional): float64, the window after the step; None where no window is known, and where
            the scale follows the gradients and the window of its limit never moves.
        final_loss_scale (float): the scale after the last step.
        first_step (int), last_step (int): where the record begins and ends; those steps may be missing in it.
        all_skipped (int, optional): how many of the steps 1 to ``last_step`` were skipped, missing ones included; None
            where only those in ``overflow`` are known.
        ceiling (NDArray, optional): float64, what the largest gradient of the step shows of its ceiling; nan where it
            is not known, None where it never is.
    """

    step: Floats
    loss: Floats
    loss_scale: Floats
    overflow: NDArray[np.bool_]
    scale_window: Floats | None
    final_loss_scale: float
    first_step: int
    last_step: int
    all_skipped: int | None = None
    ceiling: Floats | None = None

    @property
    def skipped(self) -> int:
        """How many steps were skipped, missing ones included where that is known."""
        return int(self.overflow.sum()) if self.all_skipped is None else self.all_skipped

    @property
    def complete(self) -> bool:
        """Whether no step between the first and the last is missing."""
        return len(self.step) == self.last_step - self.first_step + 1

    @property
    def gaps(self) -> NDArray[np.float64]:
        """First and last step of each gap, shape (gaps, 2); no gaps if the record is one of single steps."""
        first = np.append(self.first_step - 1, self.step) + 1
        last = np.append(self.step, self.last_step + 1) - 1
        gaps = np.column_stack([first, last])[first <= last]
        return gaps[:0] if len(gaps) > _GAPS_PER_STEP * len(self.step) else gaps

    @property
    def scales(self) -> tuple[Floats, Floats]:
        """The steps up to the one after the last, and their loss scales; nan where a scale is not a number above 0."""
        scale = np.append(self.loss_scale, self.final_loss_scale)
        return np.append(self.step, self.last_step + 1), np.where((scale > 0) & np.isfinite(scale), scale, np.nan)

    def broken(self, x: Floats, y: Floats) -> tuple[Floats, Floats]:
        """Return the points of a line outside the gaps, with a nan that breaks the line at the start of each gap."""
        first, last = self.gaps.T
        outside = np.searchsorted(first, x, "right") == np.searchsorted(last, x)
        x, y = x[outside], y[outside]
        places = np.searchsorted(x, first)
        return np.insert(x, places, first), np.insert(y, places, np.nan)

    def finding(self) -> str:
        """Return in one sentence how many steps were skipped and where the loss scale went."""
        known = self.all_skipped is not None
        steps, skipped = self.last_step if known else len(self.step), self.skipped
        whole = count(steps, "step" if known or self.complete else "recorded step")
        number = "None of" if skipped == 0 else "All" if skipped == steps > 1 else f"{skipped:,} of"
        path = _path(np.append(self.loss_scale, self.final_loss_scale))
        below = "" if self.ceiling is None else _headroom(self.loss_scale, self.ceiling)
        return "".join([f"{number} {whole} skipped", f"; loss scale {path}" if path else "", below and f", {below}"])


def _path(loss_scale: Floats) -> str:
    """Say where a loss scale went; "" if it is not known."""
    known = loss_scale[loss_scale > 0]
    if not len(known):
        return ""
    first, last = known[0], known[-1]
    if known.min() == known.max():
        return f"stayed at {power_of_two(last)}"
    recent = np.sort(known[-(len(known) // 4 + 1) :])
    outside = int(len(recent) * (1 - _SETTLED_SHARE) / 2)
    low, high = recent[outside], recent[-1 - outside]
    if len(known) >= _SETTLED_FROM and high <= _SETTLED_WITHIN * low:
        return "settled at " + " to ".join(map(power_of_two, sorted({low, high})))
    if first == last:
        return f"ended where it began, at {power_of_two(last)}"
    return f"{'rose' if last > first else 'fell'} from {power_of_two(first)} to {power_of_two(last)}"


def _headroom(loss_scale: Floats, ceiling: Floats) -> str:
    """Say how far scales were below the ceilings that the gradients show; "" where nothing is known."""
    with np.errstate(divide="ignore", invalid="ignore"):
        bits = np.log2(ceiling / loss_scale)
    bits = bits[np.isfinite(bits)]
    if not len(bits):
        return ""
    middle = float(np.median(bits))
    if abs(middle) < 0.05:
        return "at the ceiling"
    return f"{abs(middle):.1f} bits {'below' if middle > 0 else 'above'} the ceiling"


def series_of(run: RecordedRun | Sequence[Mapping[str, object]]) -> RunSeries:
    """Return the series of a run.

    Args:
        run (RecordedRun or Sequence[Mapping]): the run as :func:`mindformers_adaptive.lab.logs.read_log` returns it,
            which has no windows, or the lines that :func:`mindformers_adaptive.monitor.record.read_record` returns.

    Raises:
        TypeError: if a line is not a mapping, or a value is neither a number nor None.
        ValueError: if there is no step, or the record is not one of loss scales.
    """
    if not isinstance(run, RecordedRun):
        return _series_of_record(run)
    _require_steps(run.step)
    return RunSeries(
        step=run.step.astype(np.float64),
        loss=np.full(len(run), np.nan) if run.loss is None else run.loss,
        loss_scale=run.loss_scale,
        overflow=run.overflow,
        scale_window=None,
        final_loss_scale=float(run.loss_scale[-1]),
        first_step=int(run.step[0]),
        last_step=int(run.step[-1]),
        ceiling=_shown(run.applied_gradients()),
    )


def _series_of_record(record: Sequence[Mapping[str, object]]) -> RunSeries:
    if not isinstance(record, Sequence) or not all(isinstance(row, Mapping) for row in record):
        raise TypeError(
            f"'record' must be a list of lines, each a dict, but got {str(record)[:80]!r} of type "
            f"{type(record).__name__}. Read the file with mindformers_adaptive.monitor.record.read_record."
        )
    rows = [row for row in record if "missing_steps" not in row]
    if rows and not any("overflow" in row for row in rows):
        raise ValueError(
            f"The lines of a record must have 'overflow', but the first has {', '.join(map(str, rows[0]))}. Give the "
            "record of LossScaleMonitor; draw_gradient_records draws that of GradientRangeMonitor."
        )
    step = _column("step", rows)
    _require_steps(step)
    [first_step], [last_step] = _column("first_step", record[:1]), _column("last_step", record[-1:])
    first_step, last_step = np.fmin(first_step, step[0]), np.fmax(last_step, step[-1])
    [all_skipped], [final_loss_scale] = _column("skipped_steps", record[-1:]), _column("next_loss_scale", record[-1:])
    loss, window = _column("loss", rows), _column("scale_window", rows)
    there = np.array([row.get("loss") is not None for row in rows])
    overflow = _column("overflow", rows) == 1
    ceiling = _shown(np.where(overflow, np.nan, _column("largest_gradient", rows)))
    return RunSeries(
        step=step,
        loss=np.where(there & ~np.isfinite(loss), np.inf, loss),
        loss_scale=_column("loss_scale", rows),
        overflow=overflow,
        scale_window=window if len(np.unique(window[np.isfinite(window)])) > (ceiling is not None) else None,
        final_loss_scale=float(final_loss_scale),
        first_step=int(first_step),
        last_step=int(last_step),
        all_skipped=int(all_skipped) if first_step == 1 and not np.isnan(all_skipped) else None,
        ceiling=ceiling,
    )


def _shown(largest_gradient: Floats | None) -> Floats | None:
    ceiling = None if largest_gradient is None else shown_ceilings(largest_gradient)
    return None if ceiling is None or np.isnan(ceiling).all() else ceiling


def _require_steps(steps: Sequence[object] | NDArray[np.generic]) -> None:
    if not len(steps):
        raise ValueError(
            "There must be at least 1 step to draw, but there is none. Let the run take a step, or check that the "
            "file is the record of this run."
        )


def _column(field: str, rows: Iterable[Mapping[str, object]]) -> Floats:
    try:
        # None, and a field that is absent, becomes nan.
        return np.array([row.get(field) for row in rows], np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(
            f"'{field}' must be a number or None in each line of the record, but: {error}. Read the file with "
            "mindformers_adaptive.monitor.record.read_record."
        ) from error
