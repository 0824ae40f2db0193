"""Pictures of gradients: of a sweep over loss scales, and of their record over the steps of a training."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.gradients.report import ArrayStatistics, GradientRanges, parameter_group
from mindformers_adaptive.plots import canvas
from mindformers_adaptive.plots.canvas import Floats
from mindformers_adaptive.rules.formats import Format

__all__ = [
    "GradientSeries",
    "GroupSeries",
    "draw_gradient_records",
    "draw_histograms",
    "draw_underflow",
    "is_gradient_record",
    "series_of_gradients",
]

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Beside the exponents of the format so many more have a bar, below and above. Gradients further out count at the ends.
_BELOW, _ABOVE = 6, 4

# The bar of underflows and that of inf and NaN stand so far apart from the others.
_APART = 3

# Purple is too pale for letters.
_DARK_PURPLE = "#9b3f76"


def draw_histograms(
    sweep: Mapping[str, Any],
    loss_scales: Sequence[float] | None = None,
    group: Callable[[str], str | None] = parameter_group,
) -> Figure:
    """Draw histograms of the magnitudes of gradients: a row for each group of Parameters, a column for each scale.

    The gradients are those of the backward pass, multiplied by the loss scale. A bar on the left is the share that
    underflowed to 0, a bar on the right the share that is inf or NaN; gradients that are 0 at every scale have no bar.
    All shares are of all gradients of the group. Magnitudes far out of the format's range, in FP16 below 2^-30 or from
    2^20 on, count in the last bars.

    Args:
        sweep (Mapping): what ``GradientRanges.to_dict()`` returns, or its JSON file holds.
        loss_scales (Sequence[float], optional): scales of the sweep. Default: None, the lowest and the highest that did
            not overflow.
        group (Callable): from a Parameter's name to its group, or None for its first component. Default:
            :func:`mindformers_adaptive.gradients.report.parameter_group`.

    Returns:
        Figure, at least 1200 pixels wide; the title gives the shares of underflows and subnormal numbers at each scale.

    Raises:
        ImportError: if matplotlib is missing.
        TypeError: if ``sweep`` is not a sweep.
        ValueError: if the sweep does not have one of the scales.

    Examples:
        >>> counts = {"size": 10, "zeros": 4, "underflowed": 4, "infs_and_nans": 0, "histogram": {"-20": 1, "-3": 5}}
        >>> at_64 = {"loss_scale": 64.0, "overflowed_batches": 0, "parameters": {"attention.weight": counts}}
        >>> draw_histograms({"loss_scales": [at_64], "batches": [{}]}, [64]).get_suptitle()
        'At loss scale $2^{6}$, 40 % of the gradients underflow and 10 % are subnormal'
    """
    ranges = GradientRanges.from_dict(sweep)
    tried = ranges.loss_scales
    chosen = loss_scales or sorted({tried[0], (ranges.fitting_scales or tried)[-1]})
    columns = [ranges.groups(scale, group) for scale in chosen]
    figure = canvas.new_figure(max(10.0, 4.2 * len(chosen)), 2.0 + 1.5 * len(columns[0]))
    panels = figure.subplots(len(columns[0]), len(chosen), sharex=True, sharey="row", squeeze=False)
    for row, name in zip(panels, columns[0], strict=True):
        drawn = zip(row, columns, strict=True)
        bars = [_draw_histogram(axes, counts[name], ranges.gradient_format) for axes, counts in drawn]
        row[0].set_ylabel(f"{canvas.as_text(name)}\nshare, %", fontsize=10.5)
        # Room above the bars for the text.
        row[0].set_ylim(0, (np.max(bars) or 1.0) * 1.45)
    for axes, scale in zip(panels[0], chosen, strict=True):
        title = f"loss scale {canvas.power_of_two(scale)} = {scale:,.10g}"
        axes.set_title(title, loc="left", fontsize=11, color=canvas.MUTED)
    for axes in panels[-1]:
        axes.set_xlabel("magnitude of gradient times loss scale, log2", fontsize=10.5)
    canvas.legend_below(figure, panels[0, 0].get_legend_handles_labels()[0])
    figure.align_ylabels()
    canvas.headline(figure, _histogram_finding(ranges, chosen))
    return figure


def draw_underflow(sweep: Mapping[str, Any], group: Callable[[str], str | None] = parameter_group) -> Figure:
    """Draw the share of gradients that underflow at each loss scale, for each group of Parameters and for all.

    Scales at which a batch overflowed are shaded; there the share that underflows is not known.

    Args:
        sweep (Mapping): as in :func:`draw_histograms`.
        group (Callable): likewise.

    Returns:
        Figure; the title gives the share at the lowest and at the highest scale without overflow.

    Raises:
        ImportError: if matplotlib is missing.
        TypeError: if ``sweep`` is not a sweep.
    """
    ranges = GradientRanges.from_dict(sweep)
    scales = np.array(ranges.loss_scales)
    counts = [{**ranges.groups(scale, group), "all": ranges.overall(scale)} for scale in ranges.loss_scales]
    figure = canvas.new_figure(10, 5.5)
    axes = figure.subplots()
    canvas.style_axes(axes, x_label="loss scale, log2", y_label="underflowed share of the gradients, %")
    for row, (name, (colour, dashes)) in enumerate(zip(counts[0], canvas.LINE_STYLES, strict=False)):
        # Where lines cover each other, the marks of all of them are visible.
        style: dict[str, Any] = {"marker": "o", "markersize": 10 - 1.5 * row, "color": colour, "linestyle": dashes}
        if name == "all":
            style = {"color": "black", "linewidth": 2.6, "zorder": 1.9}
        shares = np.array([at_scale[name].share(at_scale[name].underflowed) for at_scale in counts], np.float64)
        axes.plot(scales, 100.0 * shares, label=canvas.as_text(name), gid=name, **style)
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    canvas.use_percent_axis(axes)
    edges = np.array([scales[0] / 2, *np.sqrt(scales[1:] * scales[:-1]), scales[-1] * 2])
    axes.set_xlim(edges[0], edges[-1])
    overflow = np.array([ranges.overflowed_batches(scale) > 0 for scale in ranges.loss_scales])
    if overflow.any():
        shade: dict[str, Any] = {"color": canvas.WARNING, "alpha": 0.15, "label": "a batch overflowed"}
        shade.update(fill=True, linewidth=0, transform=axes.get_xaxis_transform(), gid="overflow")
        axes.stairs(np.where(overflow, 1.0, np.nan), edges, **shade)
    canvas.legend_above(axes)
    canvas.headline(figure, _underflow_finding(ranges))
    return figure


def _draw_histogram(axes: Axes, counts: ArrayStatistics, gradient_format: Format) -> Floats:
    """Draw the bars of a histogram, and return their heights in percent."""
    canvas.style_axes(axes)
    axes.grid(visible=False, axis="x")
    subnormal, normal, largest = map(math.floor, gradient_format.exponents)
    first, last = subnormal - _BELOW, largest + _ABOVE
    zero, inf = first - _APART, last + _APART
    # Colour and name of the bars from a place on.
    kinds = {
        zero: (canvas.WARNING, "underflowed to 0"),
        first: (canvas.FAINT, "subnormal or below"),
        normal: (canvas.MAIN, "normal"),
        inf: (canvas.PURPLE, "inf or NaN"),
    }
    places = range(zero, inf + 1)
    colours = [kinds[max(start for start in kinds if start <= place)][0] for place in places]
    labels = [kinds[place][1] if place in kinds else "_" for place in places]
    exponents = np.clip(list(counts.histogram), first, last)
    numbers, _ = np.histogram(exponents, [*places, inf + 1], weights=list(counts.histogram.values()))
    numbers[[0, -1]] = counts.underflowed or 0, counts.infs_and_nans
    shares: Floats = 100.0 * numbers / max(counts.size, 1)
    axes.bar(places, shares, width=1.0, align="edge", color=colours, label=labels, edgecolor="white", linewidth=0.4)
    limits: dict[str, Any] = {"colors": canvas.MUTED, "linewidth": 0.9, "linestyles": "dashed", "gid": "limits"}
    limits["label"] = f"{gradient_format.title}: $2^{{{subnormal}}}$, $2^{{{normal}}}$, {gradient_format.largest:.6g}"
    axes.vlines(gradient_format.exponents, 0, 1, transform=axes.get_xaxis_transform(), **limits)
    powers = {float(place): f"$2^{{{place}}}$" for place in (subnormal, normal, largest + 1)}
    ticks = {zero + 0.5: "0", **powers, 0: "1", inf + 0.5: "inf"}
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.set_xlim(zero - 1.5, inf + 2.5)
    underflow, coarse, inf_or_nan = _lost(counts, gradient_format)
    text, colour = f"underflow {underflow}, subnormal {coarse}", canvas.MUTED
    if counts.infs_and_nans:
        text, colour = f"inf or NaN {inf_or_nan}", _DARK_PURPLE
    elif counts.underflowed:
        colour = canvas.WARNING
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    axes.text(0.01, 0.97, text, transform=axes.transAxes, va="top", fontsize=10, color=colour, bbox=box, gid="lost")
    return shares


def _histogram_finding(ranges: GradientRanges, scales: Iterable[float]) -> str:
    findings = []
    for scale in scales:
        counts = ranges.overall(scale)
        underflow, subnormal, inf_or_nan = _lost(counts, ranges.gradient_format)
        lost = f"{subnormal} are subnormal"
        if counts.infs_and_nans:
            lost = f"{inf_or_nan} are inf or NaN"
        elif counts.underflowed is not None:
            lost = f"{underflow} underflow and {lost}"
        findings.append(f"at {canvas.power_of_two(scale)}, {lost}")
    first = findings[0].replace("at ", "At loss scale ", 1).replace(" %", " % of the gradients", 1)
    return "; ".join([first, *findings[1:]])


def _underflow_finding(ranges: GradientRanges) -> str:
    scales, fits = ranges.loss_scales, ranges.fitting_scales
    if not fits:
        return f"Every loss scale from {canvas.power_of_two(scales[0])} to {canvas.power_of_two(scales[-1])} overflows"
    ends = sorted({fits[0], fits[-1]})
    known = [
        f"{_lost(ranges.overall(scale), ranges.gradient_format)[0]} at {canvas.power_of_two(scale)}" for scale in ends
    ]
    last = "the highest tried" if fits[-1] == scales[-1] else "the highest that does not overflow"
    return f"Underflow: {', '.join(known)}, {last}"


def _lost(counts: ArrayStatistics, gradient_format: Format) -> list[str]:
    """Return the shares that underflow, are subnormal, and are inf or NaN."""
    subnormal = counts.subnormal_share(gradient_format)
    shares = (counts.share(counts.underflowed), subnormal, counts.share(counts.infs_and_nans))
    return [canvas.percent(share) for share in shares]


# The edges of the bands of magnitudes, as shares of the gradients.
_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)

# What is known of a group in a step: the bands, the largest, the underflowed and the subnormal share.
_COLUMNS = len(_QUANTILES) + 3

# All gradients together stand among the groups by this name, which no group has.
_ALL = "\0"

# The axis goes on to a limit of the format that is at most so many powers of two away from the gradients.
_NEAR = 12.0

_WARNING, _PALE_WARNING = "#f2b48f", "#fae3d6"


class GroupSeries(NamedTuple):
    """The gradients of a group of Parameters; all arrays are float64.

    Attributes:
        bands (NDArray): of shape (5, steps): 5, 25, 50, 75 and 95 % of the gradients that are not 0 have a magnitude
            below 2 to this power, without the loss scale. As measured at the highest loss scale that did not overflow;
            nan if every one did.
        largest (NDArray): of shape (steps,), likewise the exponent of the largest magnitude.
        underflowed (NDArray): of shape (steps,), the share of the gradients that underflows at the loss scale of the
            training; nan where that is not known.
        subnormal (NDArray): of shape (steps,), likewise the share that is subnormal.
    """

    bands: Floats
    largest: Floats
    underflowed: Floats
    subnormal: Floats


class GradientSeries(NamedTuple):
    """The gradients of a run, at those steps that were measured.

    Attributes:
        step (NDArray): float64 of shape (steps,), increasing.
        loss_scale (NDArray): float64 of shape (steps,), that of the training; nan where it is not known.
        overflow (NDArray): bool of shape (steps,), whether the gradients overflowed at that scale.
        groups (dict[str, GroupSeries]): by group of Parameters.
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
    """Return whether lines are those of ``GradientRangeMonitor``'s record."""
    return any("loss_scales" in line for line in record)


def draw_gradient_records(
    records: Mapping[str, Sequence[Mapping[str, Any]]], group: Callable[[str], str | None] = parameter_group
) -> Figure:
    """Draw where the gradients lie over the steps of a run: a row for each group of Parameters, a column for each run.

    Magnitudes are without the loss scale. Bands hold 50 and 90 % of the gradients that are not 0, as measured at the
    highest loss scale that did not overflow. Shades show what the format loses at the loss scale of the training:
    gradients in them underflow to 0, are subnormal, or overflow.

    Args:
        records (Mapping[str, Sequence[Mapping]]): by the runs' names the lines of ``GradientRangeMonitor``'s record, as
            :func:`mindformers_adaptive.monitor.record.read_record` returns them; at least one.
        group (Callable): from a Parameter's name to its group, or None for its first component. Default:
            :func:`mindformers_adaptive.gradients.report.parameter_group`.

    Returns:
        Figure, at least 1200 pixels wide; the title says what each run loses at worst.

    Raises:
        ImportError: if matplotlib is missing.
        TypeError: if a line is not a sweep over loss scales.
        ValueError: if there is no record, or no line in one.

    Examples:
        >>> counts = {"size": 10, "zeros": 4, "largest": 0.2, "underflowed": 4, "histogram": {"-20": 1, "-3": 5}}
        >>> at_64 = {"loss_scale": 64.0, "overflowed_batches": 0, "parameters": {"attention.weight": counts}}
        >>> line = {"step": 100, "loss_scale": 64.0, "loss_scales": [at_64]}
        >>> draw_gradient_records({"a.jsonl": [line]}).get_suptitle()
        'At most 40 % of the gradients underflow and 10 % are subnormal at loss scale $2^{6}$'
    """
    runs = {name: series_of_gradients(record, group) for name, record in records.items()}
    kinds = list(dict.fromkeys(kind for run in runs.values() for kind in run.groups))
    figure = canvas.new_figure(max(10.0, 5.0 * len(runs)), 2.0 + 1.7 * len(kinds))
    panels = figure.subplots(len(kinds), len(runs), sharex="col", sharey=True, squeeze=False)
    panels[0, 0].set_ylim(*_limits([*runs.values()]))
    for column, (name, run) in zip(panels.T, runs.items(), strict=True):
        for axes, kind in zip(column, kinds, strict=True):
            canvas.style_axes(axes)
            _shade_limits(axes, run)
            if kind in run.groups:
                _draw_group(axes, run, run.groups[kind])
        if len(runs) > 1:
            column[0].set_title(canvas.as_text(name), loc="left", fontsize=11, color=canvas.MUTED)
        canvas.use_step_axis(column[-1], run.step[0], run.step[-1])
    for axes, kind in zip(panels[:, 0], kinds, strict=True):
        axes.set_ylabel(f"{canvas.as_text(kind)}\nmagnitude", fontsize=10.5)
        axes.yaxis.set_major_formatter(lambda exponent, _: f"$2^{{{exponent:g}}}$")
    handles = {handle.get_label(): handle for axes in panels.flat for handle in axes.get_legend_handles_labels()[0]}
    canvas.legend_below(figure, list(handles.values()))
    figure.align_ylabels()
    canvas.headline(figure, _finding(runs))
    return figure


def _limits(runs: Sequence[GradientSeries]) -> tuple[float, float]:
    """Return the ends of the axis: all magnitudes, and the limits of the formats where they are near."""
    groups = [group for run in runs for group in run.groups.values()]
    found = np.concatenate([np.append(group.bands, group.largest) for group in groups])
    found = found[np.isfinite(found)]
    bottom, top = (found.min(), found.max()) if len(found) else (-24.0, 0.0)
    ends = [(run, limit) for run in runs for limit in run.gradient_format.exponents[::2]]
    limits = np.concatenate([limit - np.log2(run.loss_scale) for run, limit in ends])
    near = limits[(bottom - _NEAR <= limits) & (limits <= top + _NEAR)]
    return near.min(initial=bottom) - 2.0, near.max(initial=top) + 2.0


def _shade_limits(axes: Axes, run: GradientSeries) -> None:
    """Shade what the format cannot hold, or only as subnormal numbers, at the loss scale of each step."""
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


def _draw_group(axes: Axes, run: GradientSeries, group: GroupSeries) -> None:
    low, lower, median, upper, high = group.bands
    axes.fill_between(run.step, low, high, color=canvas.MAIN, alpha=0.2, linewidth=0, label="90 % of the gradients")
    axes.fill_between(run.step, lower, upper, color=canvas.MAIN, alpha=0.4, linewidth=0, label="50 %")
    marker = canvas.point_marker(len(run.step))
    axes.plot(run.step, median, color=canvas.MAIN, linewidth=1.6, marker=marker, label="median", gid="median")
    axes.plot(run.step, group.largest, color=canvas.MUTED, linewidth=0.9, marker=marker, label="largest", gid="largest")
    canvas.mark_above(axes, run.step[run.overflow], canvas.WARNING, "overflowed", "overflowed")
    worst = ", ".join(_worst(group))
    axes.set_title(worst and f"at most {worst}", loc="right", fontsize=10, color=canvas.MUTED, pad=3)


def _worst(group: GroupSeries) -> list[str]:
    """Say what was lost in the worst step, as far as it is known."""
    known = {"underflow": group.underflowed, "are subnormal": group.subnormal}
    return [
        f"{canvas.percent(float(np.nanmax(share)))} {what}" for what, share in known.items() if np.isfinite(share).any()
    ]


def _finding(runs: Mapping[str, GradientSeries]) -> str:
    findings = []
    for name, run in runs.items():
        worst, applied = _worst(run.overall), run.loss_scale[~run.overflow & np.isfinite(run.loss_scale)]
        scales = " to ".join(map(canvas.power_of_two, np.unique([applied.min(), applied.max()]))) if worst else ""
        lost = f"at most {' and '.join(worst)} at loss scale {scales}"
        finding = lost if worst else f"what {run.gradient_format.title} loses is not known"
        if run.overflow.any():
            finding = f"{run.overflow.sum():,} of {canvas.count(len(run.step), 'measured step')} overflowed"
            finding += f", in the others {lost}" if worst else ""
        findings.append(f"{canvas.as_text(name)}: {finding}" if len(runs) > 1 else finding[0].upper() + finding[1:])
    return "; ".join(findings).replace(" %", " % of the gradients", 1)


def series_of_gradients(record: Sequence[Mapping[str, Any]], group: Callable[[str], str | None]) -> GradientSeries:
    """Return the series of a record of gradients.

    Args:
        record (Sequence[Mapping]): the lines, as :func:`mindformers_adaptive.monitor.record.read_record` returns them.
        group (Callable): from a Parameter's name to its group, or None.

    Raises:
        TypeError: if a line is not a sweep over loss scales.
        ValueError: if there is no line with gradients.
    """
    lines = [line for line in record if "missing_steps" not in line]
    if not lines:
        raise ValueError(
            "There must be at least 1 step with gradients to draw, but there is none. Let the run take 'every_n_steps' "
            "steps, or check that the file is the record of GradientRangeMonitor."
        )
    group = functools.cache(group)
    sweeps = [GradientRanges.from_dict(line) for line in lines]
    scales = [line.get("loss_scale") for line in lines]
    measured = list(zip(sweeps, scales, strict=True))
    rows = [_rows(sweep, scale, group) for sweep, scale in measured]
    groups = {}
    for kind in dict.fromkeys(chain(*rows)):
        # In some steps a group may be absent.
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


def _rows(ranges: GradientRanges, loss_scale: Any, group: Callable[[str], str | None]) -> dict[str, list[float]]:
    """Return by group bands, largest, underflowed and subnormal in one step."""
    fits = ranges.fitting_scales
    best = (fits or ranges.loss_scales)[-1]
    at_best = {**ranges.groups(best, group), _ALL: ranges.overall(best)}
    at_training = {**ranges.groups(loss_scale, group), _ALL: ranges.overall(loss_scale)} if loss_scale in fits else {}
    rows = {}
    for kind, counts in at_best.items():
        rows[kind] = row = [math.nan] * _COLUMNS
        if fits and counts.histogram:
            exponents, numbers = np.array(sorted(counts.histogram.items())).T
            edges = np.append(exponents[0], exponents + 1)
            below = np.append(0, np.cumsum(numbers)) / numbers.sum()
            row[:-2] = [*np.interp(_QUANTILES, below, edges), math.log2(counts.largest)] - np.log2(best)
        if kind in at_training:
            share = at_training[kind].share(at_training[kind].underflowed)
            row[-2:] = math.nan if share is None else share, at_training[kind].subnormal_share(ranges.gradient_format)
    return rows
