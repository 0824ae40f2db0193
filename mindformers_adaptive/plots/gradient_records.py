"""The picture of a gradient record: gradients, weights or outputs of layers over the steps of a training."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.gradients.report import GradientRanges
from mindformers_adaptive.gradients.selection import SCALED, select
from mindformers_adaptive.plots import canvas
from mindformers_adaptive.plots.canvas import Floats
from mindformers_adaptive.plots.gradients import group_for, require_signed, wrapped
from mindformers_adaptive.rules.formats import Format

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# The picture draws bands between these quantiles of the gradients' magnitudes, and a line at the median.
_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)

# This many numbers describe a group of Parameters in a step: the quantiles of the gradients' magnitudes, the largest
# magnitude, the share of gradients that underflowed, and the share that is subnormal.
_COLUMNS = len(_QUANTILES) + 3

# The key for the statistics of all gradients together. No group of Parameters has this name.
_ALL = "\0"

# The axis of magnitudes includes a limit of the floating-point format if it is at most this many powers of two away
# from the gradients.
_NEAR = 12.0

_WARNING, _PALE_WARNING = "#f2b48f", "#fae3d6"


class GroupSeries(NamedTuple):
    """The gradients of one group of Parameters over the steps of a run, as float64 arrays.

    Attributes:
        bands (NDArray): of shape (5, steps), the 5, 25, 50, 75 and 95 % quantiles of nonzero magnitudes, as exponents
            of 2 without the loss scale; measured at the training's scale, or else at the highest scale without
            overflow; nan if all scales overflowed.
        largest (NDArray): of shape (steps,), the exponent of the largest magnitude in each step.
        underflowed (NDArray): of shape (steps,), the share of the gradients that underflows at the loss scale of the
            training; nan where that is not known.
        subnormal (NDArray): of shape (steps,), the share of the gradients that is subnormal at that loss scale; nan
            where it is not known.
    """

    bands: Floats
    largest: Floats
    underflowed: Floats
    subnormal: Floats


class GradientSeries(NamedTuple):
    """The gradients of a run at the steps in which they were measured.

    Attributes:
        step (NDArray): float64 of shape (steps,), increasing.
        loss_scale (NDArray): float64 of shape (steps,), the loss scale of the training; nan where it is not known.
        overflow (NDArray): bool of shape (steps,), whether the gradients overflowed at that scale.
        groups (dict[str, GroupSeries]): the series of each group of Parameters, by the name of the group.
        overall (GroupSeries): all gradients together.
        gradient_format (Format): the format of the gradients.
    """

    step: Floats
    loss_scale: Floats
    overflow: NDArray[np.bool_]
    groups: dict[str, GroupSeries]
    overall: GroupSeries
    gradient_format: Format


def is_gradient_record(record: Iterable[Mapping[str, object]]) -> bool:
    """Return whether ``GradientRangeMonitor`` wrote the given lines of a record."""
    return any("loss_scales" in line for line in record)


def draw_gradient_records(
    records: Mapping[str, Sequence[Mapping[str, Any]]],
    kind: str = "gradients",
    modules: Sequence[str] = (),
    axis: str = "log2",
) -> Figure:
    """Draw the magnitudes of gradients over the steps: a row for each group of Parameters, a column for each run.

    Magnitudes are without the loss scale. Bands hold 50 and 90 % of the gradients that are not 0, as the training had
    them at its loss scale, and in a step that overflowed there, at the highest scale that did not. Shades show what the
    format loses at the loss scale of the training: gradients in them underflow to 0, are subnormal, or overflow.
    Pictures of weights or outputs, and pictures with a linear axis, have no shades.

    Args:
        records (Mapping[str, Sequence[Mapping]]): the lines of each run's record, by the name of the run, as
            :func:`mindformers_adaptive.record.writer.read_record` returns them; at least one.
        kind (str), modules (Sequence[str]), axis (str): as in
            :func:`~mindformers_adaptive.plots.gradients.draw_sweeps`.

    Returns:
        Figure, at least 1200 pixels wide; each panel says what its group loses in the worst step.

    Raises:
        ImportError: if matplotlib is missing.
        TypeError: if a line is not a sweep over loss scales.
        ValueError: if there is no record, a record has no line, nothing of the kind was measured, or a module is
            missing.

    Examples:
        >>> counts = {"size": 10, "zeros": 4, "largest": 0.2, "underflowed": 4, "histogram": {"-20": 1, "-3": 5}}
        >>> at_64 = {"loss_scale": 64.0, "overflowed_batches": 0, "parameters": {"attention.weight": counts}}
        >>> line = {"step": 100, "loss_scale": 64.0, "loss_scales": [at_64]}
        >>> draw_gradient_records({"a.jsonl": [line]}).get_suptitle()
        'Gradients over the steps'
    """
    runs = {name: series_of_gradients(record, kind, modules, axis) for name, record in records.items()}
    rows = list(dict.fromkeys(row for run in runs.values() for row in run.groups))
    figure = canvas.new_figure(max(10.0, 5.0 * len(runs)), 2.0 + 1.7 * len(rows))
    is_linear = axis == "linear"
    panels = figure.subplots(len(rows), len(runs), sharex="col", sharey="row" if is_linear else True, squeeze=False)
    if not is_linear:
        panels[0, 0].set_ylim(*_limits([*runs.values()]))
    for column, (name, run) in zip(panels.T, runs.items(), strict=True):
        for axes, row in zip(column, rows, strict=True):
            canvas.style_axes(axes)
            if not is_linear:
                _shade_limits(axes, run)
            if row in run.groups:
                _draw_group(axes, run, run.groups[row], kind, "" if is_linear else ", ".join(_worst(run.groups[row])))
        if len(runs) > 1:
            column[0].set_title(canvas.as_text(name), loc="left", fontsize=11, color=canvas.MUTED)
        canvas.use_step_axis(column[-1], run.step[0], run.step[-1])
    for axes, row in zip(panels[:, 0], rows, strict=True):
        axes.set_ylabel(f"{wrapped(row)}\n{'value' if is_linear else 'magnitude'}", fontsize=10.5)
        if not is_linear:
            axes.locator_params(axis="y", integer=True)
            axes.yaxis.set_major_formatter(lambda exponent, _: f"$2^{{{exponent:g}}}$")
    handles = {handle.get_label(): handle for axes in panels.flat for handle in axes.get_legend_handles_labels()[0]}
    canvas.legend_below(figure, list(handles.values()))
    figure.align_ylabels()
    canvas.headline(figure, f"{kind.capitalize().replace('_', ' ')} over the steps")
    return figure


def _limits(runs: Sequence[GradientSeries]) -> tuple[float, float]:
    """Return the ends of the y axis, which shows all magnitudes and the limits of number formats near them."""
    groups = [group for run in runs for group in run.groups.values()]
    magnitudes = np.concatenate([np.append(group.bands, group.largest) for group in groups])
    magnitudes = magnitudes[np.isfinite(magnitudes)]
    bottom, top = (magnitudes.min(), magnitudes.max()) if len(magnitudes) else (-24.0, 0.0)
    ends = [(run, limit) for run in runs for limit in run.gradient_format.exponents[::2]]
    limits = np.concatenate([limit - np.log2(run.loss_scale) for run, limit in ends])
    near = limits[(bottom - _NEAR <= limits) & (limits <= top + _NEAR)]
    return near.min(initial=bottom) - 2.0, near.max(initial=top) + 2.0


def _shade_limits(axes: Axes, run: GradientSeries) -> None:
    """Shade the magnitudes that underflow, are subnormal or overflow in the format at each step's loss scale."""
    scale = np.log2(run.loss_scale)
    edges = np.concatenate([[run.step[0] - 0.5], (run.step[1:] + run.step[:-1]) / 2, [run.step[-1] + 0.5]])
    bottom, top = axes.get_ylim()
    subnormal, normal, largest = run.gradient_format.exponents
    for low, high, colour, label in (
        (np.full(len(scale), bottom), subnormal - scale, _WARNING, "underflows to 0"),
        (subnormal - scale, normal - scale, _PALE_WARNING, "subnormal"),
        (largest - scale, np.full(len(scale), top), canvas.CONTEXT, "overflows"),
    ):
        low, high = np.clip(low, bottom, top), np.clip(high, bottom, top)
        if (high > low).any():
            axes.stairs(high, edges, baseline=low, fill=True, color=colour, label=label, gid=label, zorder=0.5)


def _draw_group(axes: Axes, run: GradientSeries, group: GroupSeries, kind: str, worst: str) -> None:
    low, lower, median, upper, high = group.bands
    axes.fill_between(
        run.step, low, high, color=canvas.MAIN, alpha=0.2, linewidth=0, label=f"90 % of the {kind.replace('_', ' ')}"
    )
    axes.fill_between(run.step, lower, upper, color=canvas.MAIN, alpha=0.4, linewidth=0, label="50 %")
    marker = canvas.point_marker(len(run.step))
    axes.plot(run.step, median, color=canvas.MAIN, linewidth=1.6, marker=marker, label="median", gid="median")
    axes.plot(run.step, group.largest, color=canvas.MUTED, linewidth=0.9, marker=marker, label="largest", gid="largest")
    canvas.mark_above(axes, run.step[run.overflow], canvas.WARNING, "overflowed", "overflowed")
    axes.set_title(worst and f"at most {worst}", loc="right", fontsize=10, color=canvas.MUTED, pad=3)


def _worst(group: GroupSeries) -> list[str]:
    """Return the largest shares of a group in any step as texts, such as "3 % underflow" and "9 % are subnormal".

    A share that is not known in any step is left out.
    """
    known = {"underflow": group.underflowed, "are subnormal": group.subnormal}
    return [
        f"{canvas.percent(float(np.nanmax(share)))} {what}" for what, share in known.items() if np.isfinite(share).any()
    ]


def series_of_gradients(
    record: Sequence[Mapping[str, Any]],
    kind: str = "gradients",
    modules: Sequence[str] = (),
    axis: str = "log2",
    group: Callable[[str], str | None] | None = None,
) -> GradientSeries:
    """Return the record of a run's gradients as arrays to draw.

    Args:
        record (Sequence[Mapping]): the lines, as :func:`mindformers_adaptive.record.writer.read_record` returns them.
        kind (str), modules (Sequence[str]), axis (str): as in
            :func:`~mindformers_adaptive.plots.gradients.draw_sweeps`; on a linear axis bands and largest are values.
        group (Callable, optional): a function from a Parameter's name to its group, or to None. Default: None, the rows
            of :func:`~mindformers_adaptive.plots.gradients.draw_sweeps`.

    Raises:
        TypeError: if a line is not a sweep over loss scales.
        ValueError: if there is no line with gradients, or, for a linear axis, a line has no signed values.
    """
    lines = [line for line in record if "missing_steps" not in line]
    if not lines:
        raise ValueError(
            "There must be at least 1 step with gradients to draw, but there is none. Train for at least "
            "'every_n_steps' steps, or check that the file is the record of a GradientRangeMonitor."
        )
    sweeps = [select(GradientRanges.from_dict(line), kind, modules) for line in lines]
    group = functools.cache(group or group_for(modules, sweeps[0]))
    # Weights and outputs of layers do not depend on the loss scale.
    scales = [line.get("loss_scale") if kind in SCALED else None for line in lines]
    measured = list(zip(sweeps, scales, strict=True))
    rows = [_rows(sweep, scale, group, axis) for sweep, scale in measured]
    groups = {}
    for kind in dict.fromkeys(chain(*rows)):
        # In some steps a group of Parameters may be absent.
        *bands, largest, underflowed, subnormal = np.array([row.get(kind, [math.nan] * _COLUMNS) for row in rows]).T
        groups[kind] = GroupSeries(np.array(bands), largest, underflowed, subnormal)
    return GradientSeries(
        step=np.array([line["step"] for line in lines], np.float64),
        loss_scale=np.array(scales, np.float64),
        overflow=np.array([scale in {*sweep.loss_scales} - {*sweep.fitting_scales} for sweep, scale in measured]),
        overall=groups.pop(_ALL),
        gradient_format=sweeps[0].gradient_format,
        groups=groups,
    )


def _rows(
    ranges: GradientRanges, loss_scale: Any, group: Callable[[str], str | None], axis: str
) -> dict[str, list[float]]:
    """Return a step's gradient statistics by Parameter group: quantiles, maximum, underflowed and subnormal share."""
    fits = ranges.fitting_scales
    best = loss_scale if loss_scale in fits else (fits or ranges.loss_scales)[-1]
    at_best = {**ranges.groups(best, group), _ALL: ranges.overall(best)}
    at_training = {**ranges.groups(loss_scale, group), _ALL: ranges.overall(loss_scale)} if loss_scale in fits else {}
    rows = {}
    for kind, counts in at_best.items():
        rows[kind] = row = [math.nan] * _COLUMNS
        if fits and axis == "linear":
            signed = require_signed(counts).divided_by(best)
            row[:-2] = [*signed.quantiles(_QUANTILES), signed.highest]
        elif fits and counts.histogram:
            exponents, numbers = np.array(sorted(counts.histogram.items())).T
            edges = np.append(exponents[0], exponents + 1)
            below = np.append(0, np.cumsum(numbers)) / numbers.sum()
            # For the quantiles, assume that the values are spread evenly within each power of two, but not beyond the
            # smallest and the largest value.
            ends = [math.log2(counts.smallest or counts.largest), math.log2(counts.largest)]
            bands = np.clip(np.interp(_QUANTILES, below, edges), ends[0], ends[1])
            row[:-2] = [*bands, ends[1]] - np.log2(best)
        if kind in at_training:
            share = at_training[kind].share(at_training[kind].underflowed)
            row[-2:] = math.nan if share is None else share, at_training[kind].subnormal_share(ranges.gradient_format)
    return rows
