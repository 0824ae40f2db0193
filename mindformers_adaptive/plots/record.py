"""The picture of a run: loss, loss scale with the skipped steps marked, and scale window over the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mindformers_adaptive.lab.traces.recorded_run import RecordedRun
from mindformers_adaptive.plots import canvas
from mindformers_adaptive.plots.ceilings import draw_ceiling
from mindformers_adaptive.plots.run_series import Floats, RunSeries, series_of_record, series_of_run
from mindformers_adaptive.plots.thinning import gather, one_per_column

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_loss_scale", "draw_record", "draw_run", "loss_line", "mark_broken_loss", "mark_skipped"]
__all__ += ["draw_shown_ceiling", "use_loss_axis", "use_loss_scale_axis"]

# From so many steps on, a line of medians shows the loss without its noise.
_SMOOTH_FROM = 200
_MEDIANS = 100

# Up to so many points a line shows each of them, and up to so many skipped steps are crosses.
_FEW_POINTS = 50
_FEW_MARKS = 300

# Ceilings fit the axis up to so many times the highest loss scale.
_CEILINGS_UP_TO = 2.0**8

# A loss that falls to less than one part in so many is drawn on a logarithmic axis.
_LOG_LOSS_FROM = 50.0


def draw_record(record: Sequence[Mapping[str, object]], name: str = "") -> Figure:
    """Draw the record of a run: its loss, its loss scale with the skipped steps marked, and its window.

    Steps that are missing in the record are shaded, unless most are missing. Where the record has largest gradients,
    so are the loss scales above the ceiling that they show.

    Args:
        record (Sequence[Mapping]): the lines, as :func:`mindformers_adaptive.monitor.record.read_record` returns them.
        name (str): what to call the run in the title. Default: "", nothing.

    Returns:
        Figure of three panels over the same steps, 1200 pixels wide; the title says how many steps were skipped.

    Raises:
        ImportError: if matplotlib is missing.
        TypeError: if a line is not a mapping, or a value is neither a number nor None.
        ValueError: if the record has no step.

    Examples:
        >>> record = [{"step": 1, "loss": 5.5, "overflow": True, "loss_scale": 8.0, "next_loss_scale": 4.0}]
        >>> draw_record(record).get_suptitle()
        '1 of 1 step skipped; loss scale fell from $2^{3}$ to $2^{2}$'
    """
    return _draw(series_of_record(record), name)


def draw_run(run: RecordedRun) -> Figure:
    """Draw a run that was read from its log, as :func:`draw_record` does, without the window.

    Args:
        run (RecordedRun): at least one step.

    Returns:
        Figure of two panels over the same steps; the title names the run.

    Raises:
        ImportError: if matplotlib is missing.
        ValueError: if the run has no step.
    """
    return _draw(series_of_run(run), run.name)


def _draw(run: RunSeries, name: str) -> Figure:
    heights = [3.0, 3.0] if run.scale_window is None else [3.0, 3.0, 2.2]
    figure = canvas.new_figure(10, 6 if run.scale_window is None else 7.8)
    panels = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    _draw_loss(panels[0], run)
    _draw_loss_scale(panels[1], run)
    if run.scale_window is not None:
        _draw_window(panels[2], run, run.scale_window)
    for axes in panels:
        if len(run.gaps):
            spans = [(first - 0.5, last - first + 1) for first, last in run.gaps]
            everywhere = axes.get_xaxis_transform()
            axes.broken_barh(
                spans, (0, 1), transform=everywhere, color=canvas.CONTEXT, label="not recorded", gid="gaps"
            )
        canvas.legend_above(axes)
    canvas.use_step_axis(panels[-1], run.step[0] if not len(run.gaps) else run.first_step, run.last_step)
    if not run.complete:
        panels[-1].set_xlabel(f"step ({len(run.step):,} recorded)")
    figure.align_ylabels()
    canvas.headline(figure, f"{canvas.as_text(name)}: {run.finding()}" if name else run.finding())
    return figure


def _draw_loss(axes: Axes, run: RunSeries) -> None:
    canvas.style_axes(axes, title="loss", y_label="loss, unscaled")
    step, loss, block = loss_line(run)
    style: dict[str, Any] = {"color": canvas.MAIN, "linewidth": 1.4, "label": "loss", "gid": "loss", **_points(loss)}
    if block > 1:
        known = np.isfinite(run.loss)
        faint: dict[str, Any] = {"alpha": 0.35, "linewidth": 0.8, "label": "loss of a step", "gid": "loss"}
        axes.plot(*run.broken(run.step[known], run.loss[known]), color=canvas.MAIN, **faint)
        style.update(linewidth=1.8, label=f"median of {block:,} steps", gid="median loss")
    axes.plot(step, loss, **style) if len(loss) else canvas.say_instead(axes, "no finite loss in the record")
    use_loss_axis(axes, [run])
    mark_broken_loss(axes, run, canvas.WARNING, f"inf or NaN ({np.isinf(run.loss).sum():,})")


def loss_line(run: RunSeries) -> tuple[Floats, Floats, int]:
    """Return the loss of a run to draw, x and y, and how many steps each point is the median of; 1 for short runs."""
    # A log may have the loss of some steps only: lines break at gaps, not at each of the other steps.
    known = np.isfinite(run.loss)
    step, loss = run.step[known], run.loss[known]
    if len(loss) < _SMOOTH_FROM:
        return *run.broken(step, loss), 1
    blocks = min(len(loss) // 10, _MEDIANS)
    middle, _, median, _ = gather(step, loss, blocks)
    return *run.broken(middle, median), len(loss) // blocks


def use_loss_axis(axes: Axes, runs: Sequence[RunSeries]) -> None:
    """Make the y axis logarithmic if the losses are positive and far apart."""
    loss = np.concatenate([run.loss[np.isfinite(run.loss)] for run in runs])
    if len(loss) and 0 < loss.min() < loss.max() / _LOG_LOSS_FROM:
        axes.set_yscale("log")


def mark_broken_loss(axes: Axes, run: RunSeries, colour: str, label: str) -> None:
    """Mark the steps whose loss was inf or NaN at the upper edge."""
    broken = run.step[np.isinf(run.loss)]
    if len(broken):
        x = broken[one_per_column(broken)]
        style: dict[str, Any] = {"linestyle": "none", "marker": "v", "markersize": 6, "clip_on": False}
        style.update(transform=axes.get_xaxis_transform(), color=colour, label=label, gid="broken loss")
        axes.plot(x, np.ones(len(x)), **style)


def _draw_loss_scale(axes: Axes, run: RunSeries) -> None:
    canvas.style_axes(axes, title="loss scale", y_label="loss scale, log2")
    use_loss_scale_axis(axes, [run])
    draw_shown_ceiling(axes, run, "ceiling that gradients show")
    draw_loss_scale(axes, run, canvas.MAIN, "loss scale")
    if run.overflow.any() or run.all_skipped:
        label = f"skipped step ({run.overflow.sum():,})"
        if run.all_skipped is not None and run.all_skipped != run.overflow.sum():
            label = f"skipped step ({run.overflow.sum():,} of {run.all_skipped:,} recorded)"
        mark_skipped(axes, run, canvas.WARNING, label)


def use_loss_scale_axis(axes: Axes, runs: Sequence[RunSeries]) -> None:
    """Make the y axis one of loss scales, which holds those of all runs."""
    scales = np.concatenate([run.scales[1] for run in runs])
    if np.isnan(scales).all():
        canvas.say_instead(axes, "no loss scale in the record")
        axes.set_ylim(0.5, 2)
    else:
        lowest, highest = np.nanmin(scales), np.nanmax(scales)
        ceilings = [np.nanmax(run.ceiling) for run in runs if run.ceiling is not None]
        # A single tiny gradient must not squeeze everything else.
        canvas.use_power_of_two_axis(axes, lowest, max([highest, *np.minimum(ceilings, _CEILINGS_UP_TO * highest)]))


def draw_shown_ceiling(axes: Axes, run: RunSeries, label: str) -> None:
    """Shade the scales above the ceiling that the gradients of a run show, if they are known."""
    if run.ceiling is not None:
        known = np.isfinite(run.ceiling)
        draw_ceiling(axes, run.step[known], run.ceiling[known], label)


def draw_loss_scale(axes: Axes, run: RunSeries, colour: str, label: str, dashes: str = "solid") -> None:
    """Draw the scales of a run, up to the one after its last step."""
    style: dict[str, Any] = {"where": "post", "color": colour, "linestyle": dashes, "linewidth": 1.6}
    if np.isfinite(run.scales[1]).any():
        axes.step(*run.broken(*run.scales), label=label, gid=label, **style)


def mark_skipped(axes: Axes, run: RunSeries, colour: str, label: str, height: float = 0.96) -> None:
    """Mark the skipped steps of a run, each at its scale; many of them as a strip at a height of the panel."""
    # A skipped step of unknown scale is marked all the same, at the bottom.
    scale = run.scales[1][:-1][run.overflow]
    step, y = run.step[run.overflow], np.where(np.isnan(scale), axes.get_ylim()[0], scale)
    style: dict[str, Any] = {"linestyle": "none", "color": colour, "label": label, "gid": "skipped steps"}
    if len(step) <= _FEW_MARKS:
        axes.plot(step, y, marker="x", markersize=6, markeredgewidth=1.4, zorder=3, **style)
    else:
        # So many crosses would hide the line: a strip shows where they are dense.
        step = step[one_per_column(step)]
        style.update(marker="|", markersize=9, markeredgewidth=0.6, transform=axes.get_xaxis_transform())
        axes.plot(step, np.full(len(step), height), **style)


def _draw_window(axes: Axes, run: RunSeries, scale_window: Floats) -> None:
    what = "the loss scale" if run.ceiling is None else "the limit of the loss scale"
    canvas.style_axes(axes, title=f"scale window: clean steps before {what} is raised", y_label="scale window, steps")
    style: dict[str, Any] = {"color": canvas.SECOND, "linewidth": 1.6, **_points(scale_window)}
    axes.step(*run.broken(run.step, scale_window), where="post", gid="scale window", **style)
    windows = np.unique(scale_window[np.isfinite(scale_window)])
    # From the largest down, those windows have a label that have room for it.
    room = np.log(windows[-1] / windows[0]) / 8
    labelled: list[float] = []
    for window in windows[::-1].tolist():
        if not labelled or np.log(labelled[-1] / window) >= room:
            labelled.append(window)
    axes.set_yscale("log")
    axes.set_ylim(windows[0] / 1.4, windows[-1] * 1.4)
    axes.set_yticks(labelled, [f"{window:g}" for window in labelled])
    axes.minorticks_off()


def _points(values: Floats) -> dict[str, Any]:
    # Between two gaps a line of one point would be invisible.
    return {"marker": "."} if len(values) <= _FEW_POINTS else {}
