"""Pictures of a sweep over loss scales: histograms of the gradients scale by scale, and what is lost at each scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from mindformers_adaptive.gradients.statistics import ArrayStatistics
from mindformers_adaptive.plots.canvas import (
    FAINT,
    LINE_STYLES,
    MAIN,
    MUTED,
    PURPLE,
    WARNING,
    as_text,
    dress,
    headline,
    legend_above,
    new_figure,
    percent,
    power_of_two,
)
from mindformers_adaptive.plots.parameter_groups import parameter_group
from mindformers_adaptive.plots.sweep_series import SweepSeries, series_of_sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_histograms", "draw_underflow"]

# FP16 as exponents of 2: the smallest subnormal number, the smallest normal one and the largest, 65504.
_SUBNORMAL, _NORMAL, _LARGEST = -24.0, -14.0, math.log2(65504.0)

# The exponents that have a bar: of FP16 and somewhat beyond. Gradients in float32 that lie further out count there.
_FIRST, _LAST = -30, 19

# Where the bars of what underflowed, and of inf and NaN, stand: apart from the others.
_ZERO, _INF = _FIRST - 3, _LAST + 3
_TICKS = {_ZERO + 0.5: "0", -24: "$2^{-24}$", -14: "$2^{-14}$", 0: "1", 16: "$2^{16}$", _INF + 0.5: "inf"}

# Purple is too pale for letters.
_DARK_PURPLE = "#9b3f76"

# The smallest share that the axis of shares tells apart from 0, in percent.
_SMALLEST_PERCENT = 1e-3


def draw_histograms(
    sweep: Mapping[str, Any],
    loss_scales: Sequence[float] | None = None,
    group: Callable[[str], str | None] = parameter_group,
) -> Figure:
    """Draw how the magnitudes of the gradients spread, a row for each group of Parameters, a column for each scale.

    The gradients are as the backward pass gave them, multiplied by the loss scale. Left of the histogram stands what
    underflowed to 0, right of it what is inf or NaN; gradients that are 0 at every scale are left out. All are shares
    of all gradients of the group. Magnitudes beyond 2^-30 and 2^20 count in the last bars.

    Args:
        sweep (Mapping): what ``GradientRanges.to_dict()`` returns, or its JSON file holds.
        loss_scales (Sequence[float], optional): scales of the sweep. Default: None, the lowest and the highest that did
            not overflow.
        group (Callable): from a Parameter's name to its group, or None for its first component. Default:
            :func:`mindformers_adaptive.plots.parameter_groups.parameter_group`.

    Returns:
        Figure, at least 1200 pixels wide; the title says what is lost at each scale.

    Raises:
        ImportError: if matplotlib is missing.
        TypeError: if ``sweep`` is no sweep.
        ValueError: if the sweep does not have one of the scales.

    Examples:
        >>> counts = {"size": 10, "zeros": 4, "underflowed": 4, "infs_and_nans": 0, "histogram": {"-20": 1, "-3": 5}}
        >>> at_64 = {"loss_scale": 64.0, "overflowed_batches": 0, "parameters": {"attention.weight": counts}}
        >>> draw_histograms({"loss_scales": [at_64], "batches": [{}]}, [64]).get_suptitle()
        'At loss scale $2^{6}$, 40 % of the gradients underflow and 10 % are subnormal'
    """
    series = series_of_sweep(sweep, group)
    chosen = series.places(loss_scales)
    figure = new_figure(max(10.0, 4.2 * len(chosen)), 2.0 + 1.5 * len(series.groups))
    panels = figure.subplots(len(series.groups), len(chosen), sharex=True, sharey="row", squeeze=False)
    for row, (name, found) in zip(panels, series.groups.items(), strict=True):
        shown = [found[place] for place in chosen]
        for axes, counts in zip(row, shown, strict=True):
            _draw_histogram(axes, counts)
        row[0].set_ylabel(f"{as_text(name)}\nshare, %", fontsize=10.5)
        # Room above the bars for what is written there.
        row[0].set_ylim(0, (max(share for counts in shown for _, share, _ in _bars(counts)) or 1.0) * 1.45)
    for axes, place in zip(panels[0], chosen, strict=True):
        scale = series.loss_scales[place]
        axes.set_title(f"loss scale {power_of_two(scale)} = {scale:,.10g}", loc="left", fontsize=11, color=MUTED)
    for axes in panels[-1]:
        axes.set_xlabel("magnitude of gradient times loss scale, log2", fontsize=10.5)
    _legend_of_histograms(figure)
    figure.align_ylabels()
    headline(figure, _histogram_finding(series, chosen))
    return figure


def draw_underflow(sweep: Mapping[str, Any], group: Callable[[str], str | None] = parameter_group) -> Figure:
    """Draw which share of the gradients underflows at each loss scale, for each group of Parameters and for all.

    Scales at which a batch overflowed are shaded; there nobody can tell what underflows.

    Args:
        sweep (Mapping): as in :func:`draw_histograms`.
        group (Callable): likewise.

    Returns:
        Figure; the title says what underflows at the lowest and at the highest scale without overflow.

    Raises:
        ImportError: if matplotlib is missing.
        TypeError: if ``sweep`` is no sweep.
    """
    series = series_of_sweep(sweep, group)
    figure = new_figure(10, 5.5)
    axes = figure.subplots()
    dress(axes, x_label="loss scale, log2", y_label="underflowed share of the gradients, %")
    lines = {name: list(found) for name, found in series.groups.items()}
    for (name, found), (colour, dashes) in zip(lines.items(), LINE_STYLES, strict=False):
        axes.plot(series.loss_scales, _percents(found), marker="o", color=colour, linestyle=dashes)
        # Where lines lie on each other, the marks of all of them are seen.
        axes.lines[-1].set(label=as_text(name), gid=name, markersize=11.5 - 1.5 * len(axes.lines))
    overall = [series.overall(place) for place in range(len(series.loss_scales))]
    axes.plot(series.loss_scales, _percents(overall), color="black", linewidth=2.6, label="all", gid="all", zorder=1.9)
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    axes.set_yscale("symlog", linthresh=_SMALLEST_PERCENT, linscale=0.6)
    axes.set_ylim(-_SMALLEST_PERCENT / 5, 200)
    ticks = [0, *(10.0**power for power in range(-3, 3))]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.yaxis.minorticks_off()
    _shade_overflow(axes, series)
    legend_above(axes, columns=8)
    headline(figure, _underflow_finding(series))
    return figure


def _bars(counts: ArrayStatistics) -> list[tuple[float, float, str]]:
    """Return the bars of a histogram: the left edge, the share in percent and the colour of each."""
    shares: dict[int, float] = {}
    for exponent, many in counts.histogram.items():
        place = min(max(exponent, _FIRST), _LAST)
        shares[place] = shares.get(place, 0.0) + 100.0 * (counts.share(many) or 0.0)
    bars: list[tuple[float, float, str]] = [
        (place, share, MAIN if place >= _NORMAL else FAINT) for place, share in shares.items()
    ]
    bars.append((_ZERO, 100.0 * (counts.share(counts.underflowed) or 0.0), WARNING))
    bars.append((_INF, 100.0 * (counts.share(counts.infs_and_nans) or 0.0), PURPLE))
    return bars


def _draw_histogram(axes: Axes, counts: ArrayStatistics) -> None:
    dress(axes)
    axes.grid(visible=False, axis="x")
    places, shares, colours = zip(*_bars(counts), strict=True)
    axes.bar(places, shares, width=1.0, align="edge", color=colours, edgecolor="white", linewidth=0.4)
    for limit in (_SUBNORMAL, _NORMAL, _LARGEST):
        axes.axvline(limit, color=MUTED, linewidth=0.9, linestyle="dashed")
    axes.set_xticks(list(_TICKS), list(_TICKS.values()))
    axes.set_xlim(_ZERO - 1.5, _INF + 2.5)
    said, colour = _lost(counts)
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    axes.text(0.01, 0.97, said, transform=axes.transAxes, va="top", fontsize=10, color=colour, bbox=box, gid="lost")


def _lost(counts: ArrayStatistics) -> tuple[str, str]:
    """Return what to write into a histogram, and in which colour."""
    if counts.infs_and_nans:
        return f"inf or NaN {percent(counts.share(counts.infs_and_nans) or 0.0)}", _DARK_PURPLE
    subnormal = f"subnormal {percent(_subnormal_share(counts))}"
    return f"underflow {_percent_underflowed(counts)}, {subnormal}", WARNING if counts.underflowed else MUTED


def _subnormal_share(counts: ArrayStatistics) -> float:
    below = sum(many for exponent, many in counts.histogram.items() if exponent < _NORMAL)
    return counts.share(below) or 0.0


def _legend_of_histograms(figure: Figure) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = [
        Patch(color=WARNING, label="underflowed to 0"),
        Patch(color=FAINT, label="subnormal or below"),
        Patch(color=MAIN, label="normal"),
        Patch(color=PURPLE, label="inf or NaN"),
        Line2D([], [], color=MUTED, linewidth=0.9, linestyle="dashed", label="FP16: $2^{-24}$, $2^{-14}$, 65504"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=10)


def _percents(found: Sequence[ArrayStatistics]) -> list[float]:
    shares = [counts.share(counts.underflowed) for counts in found]
    return [math.nan if share is None else 100.0 * share for share in shares]


def _shade_overflow(axes: Axes, series: SweepSeries) -> None:
    scales = series.loss_scales
    edges = [math.sqrt(low * high) for low, high in pairwise(scales)]
    edges = [scales[0] / 2, *edges, scales[-1] * 2]
    axes.set_xlim(edges[0], edges[-1])
    label = "a batch overflowed"
    for place, share in enumerate(series.overflowed):
        if share:
            axes.axvspan(edges[place], edges[place + 1], color=WARNING, alpha=0.15, linewidth=0, label=label)
            axes.patches[-1].set_gid("overflow")
            label = "_"


def _histogram_finding(series: SweepSeries, chosen: Sequence[int]) -> str:
    said = []
    for place in chosen:
        overall, scale = series.overall(place), power_of_two(series.loss_scales[place])
        lost = f"{percent(_subnormal_share(overall))} are subnormal"
        if overall.infs_and_nans:
            lost = f"{percent(overall.share(overall.infs_and_nans) or 0.0)} are inf or NaN"
        elif overall.underflowed is not None:
            lost = f"{_percent_underflowed(overall)} underflow and {lost}"
        said.append(f"at {scale}, {lost}")
    first = said[0].replace("at ", "At loss scale ", 1).replace(" %", " % of the gradients", 1)
    return "; ".join([first, *said[1:]])


def _underflow_finding(series: SweepSeries) -> str:
    fits = [place for place, share in enumerate(series.overflowed) if share == 0]
    first, last = power_of_two(series.loss_scales[0]), power_of_two(series.loss_scales[-1])
    if not fits:
        return f"Every loss scale from {first} to {last} overflows"
    said = [
        f"{_percent_underflowed(series.overall(place))} at {power_of_two(series.loss_scales[place])}"
        for place in sorted({fits[0], fits[-1]})
    ]
    end = "the highest tried" if fits[-1] == len(series.loss_scales) - 1 else "the highest that does not overflow"
    return f"Underflow: {', '.join(said)}, {end}"


def _percent_underflowed(counts: ArrayStatistics) -> str:
    share = counts.share(counts.underflowed)
    return "not known" if share is None else percent(share)
