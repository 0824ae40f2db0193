"""The picture of a run: loss, loss scale with the skipped steps marked, and scale window over the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mindformers_adaptive.lab.traces.recorded_run import RecordedRun
from mindformers_adaptive.plots.canvas import (
    CONTEXT,
    MAIN,
    SECOND,
    WARNING,
    as_text,
    dress,
    headline,
    legend_above,
    new_figure,
    say_instead,
    use_power_of_two_axis,
    use_step_axis,
)
from mindformers_adaptive.plots.run_series import Floats, RunSeries, series_of_record, series_of_run
from mindformers_adaptive.plots.thinning import gather, one_per_column

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_record", "draw_run"]

# From so many steps on, a line of medians shows the loss without its noise.
_SMOOTH_FROM = 200
_MEDIANS = 100

# Up to so many points a line shows each of them, and up to so many skipped steps are crosses.
_FEW_POINTS = 50
_FEW_MARKS = 300

# A loss that falls to less than one part in so many is drawn on a logarithmic axis.
_LOG_LOSS_FROM = 50.0


def draw_record(record: Sequence[Mapping[str, object]], name: str = "") -> Figure:
    """Draw the record of a run: its loss, its loss scale with the skipped steps marked, and its window.

    Steps that are missing in the record are shaded, unless most are missing.

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
    figure = new_figure(10, 6 if run.scale_window is None else 7.8)
    panels = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    _draw_loss(panels[0], run)
    _draw_loss_scale(panels[1], run)
    if run.scale_window is not None:
        _draw_window(panels[2], run, run.scale_window)
    for axes in panels:
        if len(run.gaps):
            spans = [(first - 0.5, last - first + 1) for first, last in run.gaps]
            everywhere = axes.get_xaxis_transform()
            axes.broken_barh(spans, (0, 1), transform=everywhere, color=CONTEXT, label="not recorded", gid="gaps")
        legend_above(axes)
    use_step_axis(panels[-1], run.step[0] if not len(run.gaps) else run.first_step, run.last_step)
    if not run.complete:
        panels[-1].set_xlabel(f"step ({len(run.step):,} recorded)")
    figure.align_ylabels()
    headline(figure, f"{as_text(name)}: {run.finding()}" if name else run.finding())
    return figure


def _draw_loss(axes: Axes, run: RunSeries) -> None:
    dress(axes, title="loss", y_label="loss, unscaled")
    # A log may have the loss of some steps only: lines break at gaps, not at each of the other steps.
    step, loss = run.step[np.isfinite(run.loss)], run.loss[np.isfinite(run.loss)]
    style: dict[str, Any] = {"color": MAIN}
    if not len(loss):
        say_instead(axes, "no finite loss in the record")
    elif len(loss) < _SMOOTH_FROM:
        axes.plot(*run.broken(step, loss), linewidth=1.4, label="loss", gid="loss", **style, **_points(loss))
    else:
        faint: dict[str, Any] = {"alpha": 0.35, "linewidth": 0.8, "label": "loss of a step", "gid": "loss"}
        axes.plot(*run.broken(step, loss), **style, **faint)
        blocks = min(len(loss) // 10, _MEDIANS)
        gathered = gather(step, loss, blocks)
        style.update(linewidth=1.8, label=f"median of {len(loss) // blocks:,} steps", gid="median loss")
        axes.plot(*run.broken(gathered.middle, gathered.median), **style)
    if len(loss) and 0 < loss.min() < loss.max() / _LOG_LOSS_FROM:
        axes.set_yscale("log")
    broken = run.step[np.isinf(run.loss)]
    if len(broken):
        x = broken[one_per_column(broken)]
        style = {"linestyle": "none", "marker": "v", "markersize": 6, "color": WARNING, "clip_on": False}
        style.update(transform=axes.get_xaxis_transform(), label=f"inf or NaN ({len(broken):,})", gid="broken loss")
        axes.plot(x, np.ones(len(x)), **style)


def _draw_loss_scale(axes: Axes, run: RunSeries) -> None:
    dress(axes, title="loss scale", y_label="loss scale, log2")
    step, scale = np.append(run.step, run.last_step + 1), np.append(run.loss_scale, run.final_loss_scale)
    scale = np.where((scale > 0) & np.isfinite(scale), scale, np.nan)
    if np.isnan(scale).all():
        say_instead(axes, "no loss scale in the record")
        axes.set_ylim(0.5, 2)
    else:
        use_power_of_two_axis(axes, np.nanmin(scale), np.nanmax(scale))
        style: dict[str, Any] = {"where": "post", "color": MAIN, "linewidth": 1.6}
        axes.step(*run.broken(step, scale), label="loss scale", gid="loss scale", **style)
    if run.overflow.any() or run.all_skipped:
        # A skipped step of unknown scale is marked all the same, at the bottom.
        _mark_skipped(axes, run, np.where(np.isnan(scale), axes.get_ylim()[0], scale)[:-1])


def _mark_skipped(axes: Axes, run: RunSeries, y: Floats) -> None:
    step, y = run.step[run.overflow], y[run.overflow]
    label = f"skipped step ({len(step):,})"
    if run.all_skipped is not None and run.all_skipped != len(step):
        label = f"skipped step ({len(step):,} of {run.all_skipped:,} recorded)"
    style: dict[str, Any] = {"linestyle": "none", "color": WARNING, "label": label, "gid": "skipped steps"}
    if len(step) <= _FEW_MARKS:
        axes.plot(step, y, marker="x", markersize=6, markeredgewidth=1.4, zorder=3, **style)
    else:
        # So many crosses would hide the line: a strip at the upper edge shows where they are dense.
        step = step[one_per_column(step)]
        style.update(marker="|", markersize=9, markeredgewidth=0.6, transform=axes.get_xaxis_transform())
        axes.plot(step, np.full(len(step), 0.96), **style)


def _draw_window(axes: Axes, run: RunSeries, scale_window: Floats) -> None:
    dress(axes, title="scale window: clean steps before the loss scale is raised", y_label="scale window, steps")
    style: dict[str, Any] = {"color": SECOND, "linewidth": 1.6, **_points(scale_window)}
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
