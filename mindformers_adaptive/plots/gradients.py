"""Pictures of a sweep over loss scales: histograms of the gradients scale by scale, and what is lost at each scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mindformers_adaptive.gradients.report import GradientRanges, parameter_group
from mindformers_adaptive.gradients.statistics import (
    FP16_LARGEST,
    FP16_SMALLEST_NORMAL,
    FP16_SMALLEST_SUBNORMAL,
    ArrayStatistics,
)
from mindformers_adaptive.plots import canvas
from mindformers_adaptive.plots.canvas import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["FP16_EXPONENTS", "draw_histograms", "draw_underflow"]

# The smallest subnormal number of FP16, the smallest normal one and the largest, as exponents of 2.
FP16_EXPONENTS = tuple(map(math.log2, (FP16_SMALLEST_SUBNORMAL, FP16_SMALLEST_NORMAL, FP16_LARGEST)))

# The exponents that have a bar: those of FP16 and a few beyond. Gradients in float32 further out count at the ends.
_FIRST, _LAST = -30, 19

# Where the bar of underflows and that of inf and NaN stand, apart from the others.
_ZERO, _INF = _FIRST - 3, _LAST + 3
_TICKS = {_ZERO + 0.5: "0", -24: "$2^{-24}$", -14: "$2^{-14}$", 0: "1", 16: "$2^{16}$", _INF + 0.5: "inf"}

# Colour and name of the bars from a place on.
_KINDS = {
    _ZERO: (canvas.WARNING, "underflowed to 0"),
    _FIRST: (canvas.FAINT, "subnormal or below"),
    -14: (canvas.MAIN, "normal"),
    _INF: (canvas.PURPLE, "inf or NaN"),
}
_PLACES = range(_ZERO, _INF + 1)
_COLOURS = [_KINDS[max(first for first in _KINDS if first <= place)][0] for place in _PLACES]
_LABELS = [_KINDS[place][1] if place in _KINDS else "_" for place in _PLACES]

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
    All shares are of all gradients of the group. Magnitudes below 2^-30 or from 2^20 on count in the last bars.

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
        bars = [_draw_histogram(axes, counts[name]) for axes, counts in zip(row, columns, strict=True)]
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
    canvas.headline(figure, _histogram_finding({scale: ranges.overall(scale) for scale in chosen}))
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


def _draw_histogram(axes: Axes, counts: ArrayStatistics) -> Floats:
    """Draw the bars of a histogram, and return their heights in percent."""
    canvas.style_axes(axes)
    axes.grid(visible=False, axis="x")
    exponents = np.clip(list(counts.histogram), _FIRST, _LAST)
    numbers, _ = np.histogram(exponents, [*_PLACES, _INF + 1], weights=list(counts.histogram.values()))
    numbers[[0, -1]] = counts.underflowed or 0, counts.infs_and_nans
    shares: Floats = 100.0 * numbers / max(counts.size, 1)
    axes.bar(_PLACES, shares, width=1.0, align="edge", color=_COLOURS, label=_LABELS, edgecolor="white", linewidth=0.4)
    limits: dict[str, Any] = {"colors": canvas.MUTED, "linewidth": 0.9, "linestyles": "dashed", "gid": "limits"}
    limits["label"] = "FP16: $2^{-24}$, $2^{-14}$, 65504"
    axes.vlines(FP16_EXPONENTS, 0, 1, transform=axes.get_xaxis_transform(), **limits)
    axes.set_xticks(list(_TICKS), list(_TICKS.values()))
    axes.set_xlim(_ZERO - 1.5, _INF + 2.5)
    underflow, subnormal, inf_or_nan = _lost(counts)
    text, colour = f"underflow {underflow}, subnormal {subnormal}", canvas.MUTED
    if counts.infs_and_nans:
        text, colour = f"inf or NaN {inf_or_nan}", _DARK_PURPLE
    elif counts.underflowed:
        colour = canvas.WARNING
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    axes.text(0.01, 0.97, text, transform=axes.transAxes, va="top", fontsize=10, color=colour, bbox=box, gid="lost")
    return shares


def _histogram_finding(chosen: Mapping[float, ArrayStatistics]) -> str:
    findings = []
    for scale, counts in chosen.items():
        underflow, subnormal, inf_or_nan = _lost(counts)
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
    known = [
        f"{_lost(ranges.overall(scale))[0]} at {canvas.power_of_two(scale)}" for scale in sorted({fits[0], fits[-1]})
    ]
    last = "the highest tried" if fits[-1] == scales[-1] else "the highest that does not overflow"
    return f"Underflow: {', '.join(known)}, {last}"


def _lost(counts: ArrayStatistics) -> list[str]:
    """Return the shares that underflow, are subnormal, and are inf or NaN."""
    shares = (counts.share(counts.underflowed), counts.subnormal_share, counts.share(counts.infs_and_nans))
    return [canvas.percent(share) for share in shares]
