"""The recorded steps of a run as arrays to draw, and a sentence that sums them up."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.plots.canvas import Floats
from mindformers_adaptive.record.logs import run_of_record
from mindformers_adaptive.record.run import RecordedRun
from mindformers_adaptive.record.scale_summary import bounds_in_words, summary_of
from mindformers_adaptive.record.trace import implied_ceilings
from mindformers_adaptive.text.table import counted

# A gap is a series of missing steps in a record, and breaks a drawn line. A record with more gaps per recorded step
# than this has only scattered steps, so gaps would leave nothing of the line: ignore the gaps of such a record.
_GAPS_PER_STEP = 0.1

# The largest float32. Losses and gradient norms are cut to this number, because matplotlib cannot make an axis of much
# larger numbers.
_LARGEST = float(np.finfo(np.float32).max)


class RunSeries(NamedTuple):
    """The recorded steps of a run; the arrays have the shape (steps,).

    Attributes:
        step (NDArray): float64, increasing.
        loss (NDArray): float64, cut to the range of float32; nan where the loss is not known, inf where it was inf or
            NaN.
        overflow (NDArray): bool, whether the step is known to have been skipped.
        scales (NDArray): float64 of shape (steps + 1,), the loss scale of each step and the loss scale after the last;
            nan where no scale above 0 is known.
        scale_window (NDArray, optional): float64, the window after each step; None if the window never changes or is
            not known.
        first_step (int), last_step (int): the first and the last step of the run, which may be missing in ``step``.
        counted (int): the number of steps of the run that the log lists or counts.
        bounds (tuple[int, int or None]): the fewest and the most of them that were skipped; None if the log does not
            number all of its steps.
        path (str): a sentence that says where the loss scale went, with powers of two as formulas; "" if
            the log states no loss scale.
        ceiling (NDArray, optional): float64, the ceiling that the largest gradient of each step implies; nan where it
            is not known, None if it is never known.
        gradient_norm (NDArray, optional): float64, the norm of all gradients of the step; nan where the norm is unknown
            or not above 0, or the step was skipped; None if the norm is never known.
        resumed (NDArray): float64 of shape (resumes,), the first step after each time that the training was resumed.
        saved (NDArray): float64 of shape (checkpoints,), the steps after which a checkpoint was saved.
    """

    step: Floats
    loss: Floats
    scales: Floats
    overflow: NDArray[np.bool_]
    scale_window: Floats | None
    first_step: int
    last_step: int
    counted: int
    bounds: tuple[int, int | None]
    path: str
    ceiling: Floats | None
    gradient_norm: Floats | None
    resumed: Floats
    saved: Floats

    @property
    def span(self) -> int:
        """The number of steps from the first to the last step of the run, missing steps included."""
        return self.last_step - self.first_step + 1

    @property
    def skipped_as_text(self) -> str:
        """The number of skipped steps, or its bounds; there is no upper bound if steps of the log have no number."""
        return bounds_in_words(*self.bounds)

    @property
    def skipped_at_start(self) -> int:
        """The number of steps that were skipped before the first applied step."""
        return len(self.overflow) if self.overflow.all() else int(np.argmin(self.overflow))

    @property
    def gaps(self) -> NDArray[np.float64]:
        """The first and last step of each gap in the record, shape (gaps, 2); empty if there are too many to draw."""
        first = np.append(self.first_step - 1, self.step) + 1
        last = np.append(self.step, self.last_step + 1) - 1
        gaps = np.column_stack([first, last])[first <= last]
        return gaps[:0] if len(gaps) > _GAPS_PER_STEP * len(self.step) else gaps

    def broken(self, x: Floats, y: Floats) -> tuple[Floats, Floats]:
        """Return a plotted line without its points in gaps of the record; a nan breaks the line where a gap starts."""
        first, last = self.gaps.T
        outside = np.searchsorted(first, x, "right") == np.searchsorted(last, x)
        x, y = x[outside], y[outside]
        places = np.searchsorted(x, first)
        return np.insert(x, places, first), np.insert(y, places, np.nan)

    @property
    def bad_losses_as_text(self) -> str:
        """The number of steps whose loss was inf or NaN, or of lines if the log does not state all losses, else ""."""
        bad, stated = int(np.isinf(self.loss).sum()), int((~np.isnan(self.loss)).sum())
        if not bad:
            return ""
        return f"in {counted(bad, 'step')}" if stated == self.counted else f"on {bad:,} of {counted(stated, 'line')}"

    def finding(self) -> str:
        """Return a sentence that says how many steps were skipped and how the loss scale moved."""
        (fewest, most), whole = self.bounds, counted(self.counted, "step")
        number = "None of" if most == 0 else f"{self.skipped_as_text.capitalize()} of"
        if most is None:
            number, whole = "At least", counted(fewest, "step")
        elif fewest == self.counted > 1:
            number = "All"
        below = "" if self.ceiling is None else _headroom(self.scales[:-1], self.ceiling)
        bad = self.bad_losses_as_text
        bad = bad and f"; loss inf or NaN {bad}, first {self.step[np.isinf(self.loss)][0]:.0f}"
        # In a title, a path needs no article, and its end repeats how many steps were skipped.
        path = self.path and f"; {self.path.removeprefix('The ').partition(':')[0]}"
        return f"{number} {whole} skipped{bad}{path}{below and f', {below}'}"


def _headroom(loss_scale: Floats, ceiling: Floats) -> str:
    """Return a phrase for the median distance of the loss scales from their ceilings, or "" if it is not known."""
    bits = np.log2(ceiling / loss_scale)
    bits = bits[np.isfinite(bits)]
    if not len(bits):
        return ""
    middle = float(np.median(bits))
    if abs(middle) < 0.05:
        return "at the ceiling"
    return f"{abs(middle):.1f} bits {'below' if middle > 0 else 'above'} the ceiling"


def series_of(run: RecordedRun | Sequence[Mapping[str, object]]) -> RunSeries:
    """Return the recorded steps of a run as arrays to draw.

    Args:
        run (RecordedRun or Sequence[Mapping]): the run as :func:`mindformers_adaptive.record.logs.read_log` returns it,
            or the lines that :func:`mindformers_adaptive.record.writer.read_record` returns.

    Raises:
        TypeError: if a line is not a mapping, or a value is neither a number nor None.
        ValueError: if there is no step, or the lines are not a record of loss scales.
    """
    run = run if isinstance(run, RecordedRun) else run_of_record(run)
    if not len(run):
        raise ValueError("The run must have at least 1 step to draw, but has none. Wait until it has taken a step.")
    # Draw a point for each step that the log states something of, and for the last step of each longer stretch. In a
    # record, a longer stretch is one of missing steps.
    at = ~np.isnan([run.used, run.after, *run.columns.values()]).all(axis=0)
    at = (run.lengths == 1) & (at | (run.fewest == run.most)) | (at & (run.log_format != "jsonl"))
    fewest, most = run.skipped_bounds
    unknown, gradients = np.full(len(run.first), np.nan), run.applied_gradients()
    optional = (run.column("loss"), run.column("scale_window"), gradients, run.column("gradient_norm"))
    loss, window, shown, norm = (unknown if values is None else values for values in optional)
    loss = np.where(np.isinf(loss), loss, np.clip(loss, -_LARGEST, _LARGEST))
    norm = np.where((norm > 0) & (norm < np.inf) & ~run.skipped, np.minimum(norm, _LARGEST), np.nan)[at]
    ceiling = implied_ceilings(shown[at], run.gradient_format)
    has_ceiling = not np.isnan(ceiling).all()
    # Where a line does not state the scale that its last step used, draw the scale after it.
    scales = np.append(np.where(np.isnan(run.used), run.after, run.used)[at], run.after[-1])
    if np.isnan(scales[-1]) and len(scales) > 1:
        scales[-1] = scales[-2]
    scales = np.where((scales > 0) & np.isfinite(scales), scales, np.nan)
    return RunSeries(
        step=run.last[at].astype(np.float64),
        loss=loss[at],
        scales=scales,
        path=re.sub(r"2\^(-?\d+)", r"$2^{\1}$", summary_of(run).path),
        overflow=run.skipped[at],
        scale_window=window[at] if len(np.unique(window[np.isfinite(window)])) > 1 else None,
        first_step=int(run.first[0]),
        last_step=int(run.last[-1]),
        counted=len(run),
        bounds=(fewest, most if run.is_numbered else None),
        ceiling=ceiling if has_ceiling else None,
        gradient_norm=None if np.isnan(norm).all() else norm,
        resumed=run.steps_where("resumed").astype(np.float64),
        saved=run.steps_where("saved").astype(np.float64),
    )
