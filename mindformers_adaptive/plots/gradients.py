"""Pictures of a sweep over loss scales, which show the gradients, the weights or the outputs of layers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mindformers_adaptive.gradients.groups import parameter_group
from mindformers_adaptive.gradients.report import GradientRanges
from mindformers_adaptive.gradients.selection import SCALED, group_of_modules, select
from mindformers_adaptive.gradients.signed import SignedHistogram
from mindformers_adaptive.gradients.statistics import ArrayStatistics
from mindformers_adaptive.plots import canvas
from mindformers_adaptive.plots.canvas import Floats
from mindformers_adaptive.rules.formats import Format

AXES = ("log2", "linear")

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# The histogram of magnitudes has _BELOW bars below the smallest exponent of the floating-point format, and _ABOVE bars
# above the largest exponent. The two outermost bars also count all magnitudes further out.
_BELOW, _ABOVE = 6, 4

# The bar of underflows and the bar of inf and NaN stand this many bar widths apart from the histogram's other bars.
_APART = 3

# A line of the label beside a row of panels has room for this many letters.
_ROW_LETTERS = 17

# A dark purple for text, because PURPLE is too pale for letters.
_DARK_PURPLE = "#9b3f76"


class _Column(NamedTuple):
    """The data of a column of panels: a sweep, its name, the loss scale that is drawn, and statistics for each row."""

    name: str
    ranges: GradientRanges
    scale: float
    rows: dict[str, ArrayStatistics]


def draw_sweeps(
    sweeps: Mapping[str, GradientRanges | Mapping[str, Any]],
    loss_scales: Sequence[float] | None = None,
    kind: str = "gradients",
    modules: Sequence[str] = (),
    axis: str = "log2",
) -> Figure:
    """Draw histograms of sweeps over loss scales: a row for each group of Parameters, a column for each loss scale.

    Several sweeps, of checkpoints, runs or devices, have columns side by side. Weights or outputs of layers have only
    one column for each sweep, because the loss scale does not change them.

    The gradients are shown as the backward pass computes them, multiplied by the loss scale. The bar on the left is the
    share that underflowed to 0, the bar on the right the share that is inf or NaN. Gradients that are 0 at every scale
    have no bar. All shares refer to all gradients of the group. Magnitudes far outside the range of the format, for
    FP16 below 2^-30 or from 2^20 on, count in the last bars.

    Args:
        sweeps (Mapping[str, Union[GradientRanges, Mapping]]): the sweeps, or the contents of their JSON files, by name;
            a single one may have the name "".
        loss_scales (Sequence[float], optional): the scales to draw of each sweep. Default: None, the highest scale
            without an overflow, and of a single sweep the lowest scale too.
        kind (str): "gradients", "weights", "outputs" of layers, or "activation_gradients", the gradients of the outputs
            of layers. Default: "gradients".
        modules (Sequence[str]): the modules to draw, a row for each, see
            :func:`mindformers_adaptive.gradients.selection.group_of_modules`. Default: none, draw the groups of
            :func:`mindformers_adaptive.gradients.groups.parameter_group`.
        axis (str): "log2", of magnitudes, or "linear", of values with their signs and without the loss scale. Default:
            "log2".

    Returns:
        Figure, at least 1200 pixels wide; each panel gives the shares of underflows and subnormal numbers.

    Raises:
        ImportError: if matplotlib is missing.
        TypeError: if a value of ``sweeps`` is not a sweep.
        ValueError: if a sweep has no such scale, nothing of the kind, no such module, or, for a linear axis, was
            measured without signs.

    Examples:
        >>> counts = {"size": 10, "zeros": 4, "underflowed": 4, "infs_and_nans": 0, "histogram": {"-20": 1, "-3": 5}}
        >>> at_64 = {"loss_scale": 64.0, "overflowed_batches": 0, "parameters": {"attention.weight": counts}}
        >>> draw_sweeps({"": {"loss_scales": [at_64], "batches": [{}]}}, [64]).get_suptitle()
        'Gradients by magnitude'
    """
    of_gradients, columns = kind in SCALED, list[_Column]()
    for name, sweep in sweeps.items():
        ranges = select(_read(sweep), kind, modules)
        group_of, tried = group_for(modules, ranges), ranges.loss_scales
        highest = (ranges.fitting_scales or tried)[-1]
        chosen = (of_gradients and loss_scales) or sorted({highest, *tried[: len(sweeps) == 1 and axis == "log2"]})
        columns += [_Column(name, ranges, scale, ranges.groups(scale, group_of)) for scale in chosen]
    rows = list(dict.fromkeys(row for column in columns for row in column.rows))
    figure = canvas.new_figure(max(10.0, 4.2 * len(columns)), 2.0 + 1.5 * len(rows))
    share: Any = {"sharex": "row", "sharey": "row"} if axis == "linear" else {"sharex": True, "sharey": "row"}
    panels = figure.subplots(len(rows), len(columns), squeeze=False, **share)
    for row, name in zip(panels, rows, strict=True):
        row[0].set_ylabel(f"{wrapped(name)}\nshare, %", fontsize=10.5)
        bars = [1.0]
        for axes, column in zip(row, columns, strict=True):
            counts = column.rows.get(name)
            if counts is None:
                canvas.say_instead(axes, "not in this one")
            elif axis == "linear":
                bars.append(_draw_signed(axes, counts, column.scale if of_gradients else 1.0))
            else:
                bars.append(_draw_histogram(axes, counts, column.ranges.gradient_format, of_gradients).max())
        # Leave room in each panel above the bars for the text.
        row[0].set_ylim(0, max(bars[1:], default=0.0) * 1.45 or 1.0)
    for axes, column in zip(panels[0], columns, strict=True):
        scale = f"loss scale {canvas.power_of_two(column.scale)} = {column.scale:,.10g}" if of_gradients else kind
        title = f"{canvas.as_text(column.name)}: {scale}" if column.name else scale
        axes.set_title(title, loc="left", fontsize=11, color=canvas.MUTED)
    what = kind[:-1].replace("_", " ") if of_gradients else "value"
    magnitude = f"magnitude of {what} times loss scale, log2" if of_gradients else "magnitude, log2"
    for axes in panels[-1]:
        axes.set_xlabel(f"{what}, with its sign" if axis == "linear" else magnitude, fontsize=10.5)
    canvas.legend_below(figure, panels[0, 0].get_legend_handles_labels()[0])
    figure.align_ylabels()
    what = kind.capitalize().replace("_", " ")
    canvas.headline(figure, f"{what} by {'value' if axis == 'linear' else 'magnitude'}")
    return figure


def _read(sweep: GradientRanges | Mapping[str, Any]) -> GradientRanges:
    return sweep if isinstance(sweep, GradientRanges) else GradientRanges.from_dict(sweep)


def _draw_signed(axes: Axes, counts: ArrayStatistics, scale: float) -> float:
    """Draw a histogram of values with signs, divided by ``scale``, and return the highest bar's height in percent."""
    canvas.style_axes(axes)
    signed = require_signed(counts).divided_by(scale)
    shares = 100.0 * np.array(signed.counts) / max(counts.size, 1)
    axes.stairs(
        shares, signed.edges, fill=True, color=canvas.MAIN, alpha=0.8, label="share of the values", gid="signed"
    )
    low, middle, high = signed.quantiles((0.05, 0.5, 0.95))
    axes.axvline(middle, color=canvas.WARNING, linewidth=1.2, label="median", gid="median")
    axes.axvspan(low, high, color=canvas.CONTEXT, zorder=0.5, linewidth=0, label="90 %", gid="90 %")
    axes.locator_params(axis="x", nbins=4)
    text = f"{signed.lowest:.3g} to {signed.highest:.3g}"
    axes.text(0.01, 0.97, text, transform=axes.transAxes, va="top", fontsize=10, color=canvas.MUTED, gid="range")
    return float(shares.max())


def require_signed(counts: ArrayStatistics) -> SignedHistogram:
    """Return the histogram of the values with their signs, or raise ValueError if the signs were not measured."""
    if counts.signed is None:
        raise ValueError(
            "'axis' must be 'log2' for values that were measured without signs or are all inf or NaN, but got "
            "'linear'. Measure the values with their signs, or leave 'axis' out."
        )
    return counts.signed


def draw_underflow(sweep: GradientRanges | Mapping[str, Any]) -> Figure:
    """Draw the share of gradients that underflow at each loss scale, for each group of Parameters and for all together.

    Loss scales at which a batch overflowed are shaded. At these scales the share that underflows is not known.

    Args:
        sweep (Union[GradientRanges, Mapping]): the sweep, or the content of its JSON file.

    Returns:
        Figure of one panel.

    Raises:
        ImportError: if matplotlib is missing.
        TypeError: if ``sweep`` is not a sweep.
    """
    ranges = _read(sweep)
    scales = np.array(ranges.loss_scales)
    counts = [{**ranges.groups(scale), "all": ranges.overall(scale)} for scale in ranges.loss_scales]
    figure = canvas.new_figure(10, 5.5)
    axes = figure.subplots()
    canvas.style_axes(axes, x_label="loss scale, log2", y_label="underflowed share of the gradients, %")
    for row, (name, (colour, dashes)) in enumerate(zip(counts[0], canvas.LINE_STYLES, strict=False)):
        # The marks shrink from line to line, so that all marks are visible where lines cover each other.
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
    canvas.headline(figure, "Gradients that underflow at each loss scale")
    return figure


def wrapped(name: str) -> str:
    """Return the name of a row of panels, broken after dots into lines that fit the height of the row."""
    lines = [""]
    for part in re.findall(r"[^.]*\.?", canvas.as_text(name)):
        if lines[-1] and len(lines[-1] + part) > _ROW_LETTERS:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def group_for(modules: Sequence[str], ranges: GradientRanges) -> Callable[[str], str | None]:
    """Return a function that maps a Parameter's name to its row: one of the modules, or without modules its group."""
    return group_of_modules(modules, ranges.batches[0][0].parameters) if modules else parameter_group


def _draw_histogram(axes: Axes, counts: ArrayStatistics, gradient_format: Format, of_gradients: bool) -> Floats:
    """Draw the bars of a histogram of magnitudes, and return the heights of the bars in percent."""
    canvas.style_axes(axes)
    axes.grid(visible=False, axis="x")
    subnormal, normal, largest = map(math.floor, gradient_format.exponents)
    first, last = subnormal - _BELOW, largest + _ABOVE
    zero, inf = first - _APART, last + _APART
    # The colour and the label of the bars in the histogram. Each key is the exponent of the first bar that has them.
    kinds = {
        zero: (canvas.WARNING, "underflowed to 0") if of_gradients else (canvas.MUTED, "0"),
        first: (canvas.FAINT, "subnormal or below"),
        normal: (canvas.MAIN, "normal"),
        inf: (canvas.PURPLE, "inf or NaN"),
    }
    places = range(zero, inf + 1)
    colours = [kinds[max(start for start in kinds if start <= exponent)][0] for exponent in places]
    labels = [kinds[exponent][1] if exponent in kinds else "_" for exponent in places]
    exponents = np.clip(list(counts.histogram), first, last)
    numbers, _ = np.histogram(exponents, [*places, inf + 1], weights=list(counts.histogram.values()))
    numbers[[0, -1]] = (counts.underflowed or 0) if of_gradients else counts.zeros, counts.infs_and_nans
    shares: Floats = 100.0 * numbers / max(counts.size, 1)
    axes.bar(places, shares, width=1.0, align="edge", color=colours, label=labels, edgecolor="white", linewidth=0.4)
    limits: dict[str, Any] = {"colors": canvas.MUTED, "linewidth": 0.9, "linestyles": "dashed", "gid": "limits"}
    limits["label"] = f"{gradient_format.title}: $2^{{{subnormal}}}$, $2^{{{normal}}}$, {gradient_format.largest:.6g}"
    axes.vlines(gradient_format.exponents, 0, 1, transform=axes.get_xaxis_transform(), **limits)
    powers = {float(exponent): f"$2^{{{exponent}}}$" for exponent in (subnormal, normal, largest + 1)}
    ticks = {zero + 0.5: "0", **powers, 0: "1", inf + 0.5: "inf"}
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.set_xlim(zero - 1.5, inf + 2.5)
    coarse = canvas.percent(counts.subnormal_share(gradient_format))
    text, colour = f"underflow {canvas.percent(counts.share(counts.underflowed))}, subnormal {coarse}", canvas.MUTED
    if not of_gradients:
        text = f"0: {canvas.percent(counts.share(counts.zeros))}, subnormal or below {coarse}"
    if counts.infs_and_nans:
        text, colour = f"inf or NaN {canvas.percent(counts.share(counts.infs_and_nans))}", _DARK_PURPLE
    elif (counts.share(counts.underflowed) or 0.0) >= canvas.ALARMING:
        colour = canvas.WARNING
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    axes.text(0.01, 0.97, text, transform=axes.transAxes, va="top", fontsize=10, color=colour, bbox=box, gid="lost")
    return shares
