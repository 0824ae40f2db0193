"""The picture of gradients over the steps of one or more runs: their magnitudes beside what FP16 can hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mindformers_adaptive.gradients.parameter_groups import parameter_group
from mindformers_adaptive.plots import canvas
from mindformers_adaptive.plots.gradient_series import GradientSeries, GroupSeries, series_of_gradients
from mindformers_adaptive.plots.sweep_series import LARGEST, NORMAL, SUBNORMAL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_gradient_records"]

# Up to so many points a line shows each of them.
_FEW_POINTS = 50

# The axis goes on to a limit of FP16 that is at most so many powers of two away from the gradients.
_NEAR = 12.0

_WARNING, _PALE_WARNING = "#f2b48f", "#fae3d6"


def draw_gradient_records(
    records: Mapping[str, Sequence[Mapping[str, Any]]], group: Callable[[str], str | None] = parameter_group
) -> Figure:
    """Draw where the gradients lie over the steps of a run: a row for each group of Parameters, a column for each run.

    Magnitudes are without the loss scale. Bands hold 50 and 90 % of the gradients that are not 0, as measured at the
    highest loss scale that did not overflow. Shades show what FP16 loses at the loss scale of the training: gradients
    in them underflow to 0, are subnormal, or overflow.

    Args:
        records (Mapping[str, Sequence[Mapping]]): by the runs' names the lines of ``GradientRangeMonitor``'s record, as
            :func:`mindformers_adaptive.monitor.record.read_record` returns them; at least one.
        group (Callable): from a Parameter's name to its group, or None for its first component. Default:
            :func:`mindformers_adaptive.gradients.parameter_groups.parameter_group`.

    Returns:
        Figure, at least 1200 pixels wide; the title says what each run loses at worst.

    Raises:
        ImportError: if matplotlib is missing.
        TypeError: if a line is not a sweep over loss scales.
        ValueError: if there is no record, or no line in one.

    Examples:
        >>> counts = {"size": 10, "zeros": 4, "underflowed": 4, "infs_and_nans": 0, "histogram": {"-20": 1, "-3": 5}}
        >>> at_64 = {"loss_scale": 64.0, "overflowed_batches": 0, "parameters": {"attention.weight": counts}}
        >>> line = {"step": 100, "loss_scale": 64.0, "loss_scales": [at_64]}
        >>> draw_gradient_records({"a.jsonl": [line]}).get_suptitle()
        'At most 40 % of the gradients underflow and 10 % are subnormal at loss scale $2^{6}$'
    """
    if not records:
        raise ValueError("'records' must have at least 1 entry, but it is empty. Read a record of gradients first.")
    runs = {name: series_of_gradients(record, group) for name, record in records.items()}
    kinds = list(dict.fromkeys(kind for run in runs.values() for kind in run.groups))
    figure = canvas.new_figure(max(10.0, 5.0 * len(runs)), 2.0 + 1.7 * len(kinds))
    panels = figure.subplots(len(kinds), len(runs), sharex="col", sharey=True, squeeze=False)
    panels[0, 0].set_ylim(*_limits(runs.values()))
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
    place: dict[str, Any] = {"loc": "outside lower center", "ncols": len(handles)}
    figure.legend(handles=list(handles.values()), frameon=False, fontsize=10, **place)
    figure.align_ylabels()
    canvas.headline(figure, _finding(runs))
    return figure


def _limits(runs: Iterable[GradientSeries]) -> tuple[float, float]:
    """Return the ends of the axis: all magnitudes, and the limits of FP16 where they are near."""
    low, high, limits = [np.inf], [-np.inf], []
    for run in runs:
        known = np.log2(run.loss_scale[np.isfinite(run.loss_scale)])
        if len(known):
            limits += [SUBNORMAL - np.median(known), LARGEST - np.median(known)]
        for group in run.groups.values():
            low.append(float(np.nanmin(group.bands, initial=np.inf)))
            high.append(float(np.nanmax(group.largest, initial=-np.inf)))
    if not min(low) < np.inf:
        low, high = [-24.0], [0.0]
    bottom, top = min(low), max(high)
    near = [limit for limit in limits if bottom - _NEAR <= limit <= top + _NEAR]
    return min(bottom, *near, np.inf) - 2.0, max(top, *near, -np.inf) + 2.0


def _shade_limits(axes: Axes, run: GradientSeries) -> None:
    """Shade what FP16 cannot hold, or only as subnormal numbers, at the loss scale of each step."""
    scale = np.log2(run.loss_scale)
    edges = np.concatenate([[run.step[0] - 0.5], (run.step[1:] + run.step[:-1]) / 2, [run.step[-1] + 0.5]])
    bottom, top = axes.get_ylim()
    for low, high, colour, label in (
        (np.full(len(scale), bottom), SUBNORMAL - scale, _WARNING, "underflows to 0"),
        (SUBNORMAL - scale, NORMAL - scale, _PALE_WARNING, "subnormal"),
        (LARGEST - scale, np.full(len(scale), top), canvas.CONTEXT, "overflows"),
    ):
        low, high = np.clip(low, bottom, top), np.clip(high, bottom, top)
        if (high > low).any():
            axes.stairs(high, edges, baseline=low, fill=True, color=colour, label=label, gid=label, zorder=0.5)


def _draw_group(axes: Axes, run: GradientSeries, group: GroupSeries) -> None:
    low, lower, median, upper, high = group.bands
    axes.fill_between(run.step, low, high, color=canvas.MAIN, alpha=0.2, linewidth=0, label="90 % of the gradients")
    axes.fill_between(run.step, lower, upper, color=canvas.MAIN, alpha=0.4, linewidth=0, label="50 %")
    marker = "." if len(run.step) <= _FEW_POINTS else ""
    axes.plot(run.step, median, color=canvas.MAIN, linewidth=1.6, marker=marker, label="median", gid="median")
    axes.plot(run.step, group.largest, color=canvas.MUTED, linewidth=0.9, marker=marker, label="largest", gid="largest")
    skipped = run.step[run.overflow]
    if len(skipped):
        style: dict[str, Any] = {"linestyle": "none", "marker": "v", "color": canvas.WARNING, "clip_on": False}
        top = axes.get_xaxis_transform()
        axes.plot(skipped, np.ones(len(skipped)), transform=top, label="overflowed", gid="overflowed", **style)
    worst = ", ".join(_worst(group))
    axes.set_title(worst and f"at most {worst}", loc="right", fontsize=10, color=canvas.MUTED, pad=3)


def _worst(group: GroupSeries) -> list[str]:
    """Say what FP16 lost in the worst step, as far as it is known."""
    known = {"underflow": group.underflowed, "are subnormal": group.subnormal}
    return [
        f"{canvas.percent(float(np.nanmax(share)))} {what}" for what, share in known.items() if np.isfinite(share).any()
    ]


def _scales(run: GradientSeries) -> str:
    """Say at which loss scales the steps were that did not overflow."""
    applied = run.loss_scale[~run.overflow & np.isfinite(run.loss_scale)]
    return " to ".join(map(canvas.power_of_two, sorted({applied.min(), applied.max()})))


def _finding(runs: Mapping[str, GradientSeries]) -> str:
    findings = []
    for name, run in runs.items():
        worst = " and ".join(_worst(run.overall))
        finding = f"at most {worst} at loss scale {_scales(run)}" if worst else "what FP16 loses is not known"
        if run.overflow.any():
            finding = f"{run.overflow.sum():,} of {canvas.count(len(run.step), 'measured step')} overflowed"
            finding += f", in the others at most {worst} at loss scale {_scales(run)}" if worst else ""
        findings.append(f"{canvas.as_text(name)}: {finding}" if len(runs) > 1 else finding[0].upper() + finding[1:])
    return "; ".join(findings).replace(" %", " % of the gradients", 1)
