"""A run as its picture needs it: arrays over the steps, from a record or from a log, and the finding for the title."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

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


class RunSeries(NamedTuple):
    """The recorded steps of a run; the arrays have the shape (steps,).

    Attributes:
        step (NDArray): float64, increasing.
        loss (NDArray): float64; nan where it is not known, inf where it was inf or NaN.
        overflow (NDArray): bool, whether the step is known to have been skipped.
        scales (NDArray): float64 of shape (steps + 1,), the scales used in the steps and the one after the last; nan
            where none above 0 is known.
        scale_window (NDArray, optional): float64, the window after the step; None where no window is known, and where
            the scale follows the gradients and the window of its limit never moves.
        first_step (int), last_step (int): where the record begins and ends; those steps may be missing in it.
        skipped (int), counted (int): how many of how many steps were skipped: of the steps 1 to ``last_step``, missing
            ones included, where the record tells, else of those in ``step``.
        ceiling (NDArray, optional): float64, what the largest gradient of the step shows of its ceiling; nan where it
            is not known, None where it never is.
    """

    step: Floats
    loss: Floats
    scales: Floats
    overflow: NDArray[np.bool_]
    scale_window: Floats | None
    first_step: int
    last_step: int
    skipped: int
    counted: int
    ceiling: Floats | None

    @property
    def span(self) -> int:
        """How many steps there are from the first to the last, missing ones included."""
        return self.last_step - self.first_step + 1

    @property
    def gaps(self) -> NDArray[np.float64]:
        """First and last step of each gap, shape (gaps, 2); no gaps if the record is one of single steps."""
        first = np.append(self.first_step - 1, self.step) + 1
        last = np.append(self.step, self.last_step + 1) - 1
        gaps = np.column_stack([first, last])[first <= last]
        return gaps[:0] if len(gaps) > _GAPS_PER_STEP * len(self.step) else gaps

    def broken(self, x: Floats, y: Floats) -> tuple[Floats, Floats]:
        """Return the points of a line outside the gaps, with a nan that breaks the line at the start of each gap."""
        first, last = self.gaps.T
        outside = np.searchsorted(first, x, "right") == np.searchsorted(last, x)
        x, y = x[outside], y[outside]
        places = np.searchsorted(x, first)
        return np.insert(x, places, first), np.insert(y, places, np.nan)

    def finding(self) -> str:
        """Return in one sentence how many steps were skipped and where the loss scale went."""
        whole = count(self.counted, "step" if self.counted == self.span else "recorded step")
        number = "None of" if self.skipped == 0 else f"{self.skipped:,} of"
        if self.skipped == self.counted > 1:
            number = "All"
        path = _path(self.scales[~np.isnan(self.scales)])
        below = "" if self.ceiling is None else _headroom(self.scales[:-1], self.ceiling)
        return "".join([f"{number} {whole} skipped", path and f"; loss scale {path}", below and f", {below}"])


def _path(known: Floats) -> str:
    """Say where a loss scale went; "" if it is not known."""
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
    if isinstance(run, RecordedRun):
        lines: Sequence[Mapping[str, object]] = [{}]
        columns = {field: np.asarray(getattr(run, field), np.float64) for field in ("step", "loss_scale", "overflow")}
        others = {"loss": run.loss, "largest_gradient": run.applied_gradients()}
        columns |= {field: values for field, values in others.items() if values is not None}
    else:
        lines, columns = run, _columns(run)
    step, overflow, loss_scale = columns["step"], columns["overflow"] == 1, columns["loss_scale"]
    if not len(step):
        raise ValueError(
            "There must be at least 1 step to draw, but there is none. Let the run take a step, or check that the "
            "file is the record of this run."
        )
    [first_step], [last_step] = _column("first_step", lines[:1]), _column("last_step", lines[-1:])
    first_step, last_step = np.fmin(first_step, step[0]), np.fmax(last_step, step[-1])
    [skipped], [after] = _column("skipped_steps", lines[-1:]), _column("next_loss_scale", lines[-1:])
    scales = np.append(loss_scale, loss_scale[-1] if np.isnan(after) else after)
    unknown = np.full(len(step), np.nan)
    window = columns.get("scale_window", unknown)
    ceiling = shown_ceilings(np.where(overflow, np.nan, columns.get("largest_gradient", unknown)))
    has_ceiling = not np.isnan(ceiling).all()
    counts_all = first_step == 1 and not np.isnan(skipped)
    return RunSeries(
        step=step,
        loss=columns.get("loss", unknown),
        scales=np.where((scales > 0) & np.isfinite(scales), scales, np.nan),
        overflow=overflow,
        scale_window=window if len(np.unique(window[np.isfinite(window)])) > has_ceiling else None,
        first_step=int(first_step),
        last_step=int(last_step),
        skipped=int(skipped if counts_all else overflow.sum()),
        counted=int(last_step) if counts_all else len(step),
        ceiling=ceiling if has_ceiling else None,
    )


def _columns(record: Sequence[Mapping[str, object]]) -> dict[str, Floats]:
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
    fields = ("step", "loss", "overflow", "loss_scale", "scale_window", "largest_gradient")
    columns = {field: _column(field, rows) for field in fields}
    there = np.array([row.get("loss") is not None for row in rows], bool)
    columns["loss"][there & ~np.isfinite(columns["loss"])] = np.inf
    return columns


def _column(field: str, rows: Iterable[Mapping[str, object]]) -> Floats:
    try:
        # None, and a field that is absent, becomes nan.
        return np.array([row.get(field) for row in rows], np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(
            f"'{field}' must be a number or None in each line of the record, but: {error}. Read the file with "
            "mindformers_adaptive.monitor.record.read_record."
        ) from error
