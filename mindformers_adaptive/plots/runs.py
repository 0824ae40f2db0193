"""The picture of several runs side by side: loss, loss scale with the skipped steps, and underflow over the steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mindformers_adaptive.lab.traces.recorded_run import RecordedRun
from mindformers_adaptive.plots import canvas, record
from mindformers_adaptive.plots.gradient_series import GradientSeries, series_of_gradients
from mindformers_adaptive.plots.run_series import Floats, RunSeries, series_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_runs"]

# The loss at the end of a run is the median over this share of its steps.
_END = 0.05

# Of more runs the title names the best and the worst.
_MOST_NAMED = 4

_Styles = Mapping[str, tuple[str, str]]


def draw_runs(
    runs: Mapping[str, RecordedRun | Sequence[Mapping[str, object]]],
    gradients: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
) -> Figure:
    """Draw several runs over the same steps: loss, loss scale with the skipped steps marked, and underflow.

    Where the record of just one of them has largest gradients, the loss scales above the ceiling that they show are
    shaded.

    Args:
        runs (Mapping): by name the record of each run, as :func:`mindformers_adaptive.monitor.record.read_record`
            returns it, or the run as :func:`mindformers_adaptive.lab.logs.read_log` returns it; at least one.
        gradients (Mapping, optional): by name of the run the record of its gradients, where there is one. Default:
            None, no panel for the underflow.

    Returns:
        Figure of two or three panels over the same steps, 1200 pixels wide; the title compares the losses at the end
        and what underflows.

    Raises:
        ImportError: if matplotlib is missing.
        TypeError: if a record is not a list of lines.
        ValueError: if there is no run, a run has no step, or gradients belong to none of the runs.

    Examples:
        >>> row = {"step": 1, "overflow": False, "scale_window": 20}
        >>> low, high = ({**row, "loss": 9.0 / s, "loss_scale": s, "next_loss_scale": s} for s in (2.0, 4.0))
        >>> draw_runs({"2": [low], "4": [high]}).get_suptitle()
        'Loss at the end: 2.25 (4), 4.50 (2); skipped steps: 0 (4), 0 (2)'
    """
    if not runs or not set(gradients or {}) <= set(runs):
        raise ValueError(
            f"'runs' must have at least 1 entry, and one for each of 'gradients', but got {list(runs)} and "
            f"{list(gradients or {})}. Give both the names of the same runs."
        )
    series = {name: series_of(run) for name, run in runs.items()}
    measured = {name: series_of_gradients(lines, lambda _: "all") for name, lines in (gradients or {}).items()}
    figure = canvas.new_figure(10, 8.6 if measured else 6)
    panels = figure.subplots(3 if measured else 2, 1, sharex=True)
    styles = {name: canvas.LINE_STYLES[place % len(canvas.LINE_STYLES)] for place, name in enumerate(series)}
    _draw_losses(panels[0], series, styles)
    _draw_loss_scales(panels[1], series, styles)
    if measured:
        _draw_underflow(panels[2], measured, styles)
    for axes in panels[:2]:
        canvas.legend_above(axes)
    first, last = min(run.first_step for run in series.values()), max(run.last_step for run in series.values())
    canvas.use_step_axis(panels[-1], first, last)
    figure.align_ylabels()
    canvas.headline(figure, _finding(series, measured))
    return figure


def _draw_losses(axes: Axes, runs: Mapping[str, RunSeries], styles: _Styles) -> None:
    blocks = {record.loss_line(run)[2] for run in runs.values()}
    medians = " or ".join(f"{block:,}" for block in sorted(blocks))
    canvas.style_axes(
        axes, title="loss" if blocks == {1} else f"loss, medians of {medians} steps", y_label="loss, unscaled"
    )
    record.use_loss_axis(axes, list(runs.values()))
    for name, run in runs.items():
        colour, dashes = styles[name]
        step, loss, _ = record.loss_line(run)
        marker = "." if len(step) == 1 else ""
        style: dict[str, Any] = {"color": colour, "linestyle": dashes, "linewidth": 1.8, "marker": marker}
        axes.plot(step, loss, label=canvas.as_text(name), gid=name, **style)
        record.mark_broken_loss(axes, run, colour, "inf or NaN")


def _draw_loss_scales(axes: Axes, runs: Mapping[str, RunSeries], styles: _Styles) -> None:
    shown = [(name, run) for name, run in runs.items() if run.ceiling is not None]
    # The ceilings of several runs would hide each other. With one, the legend leaves the title less room.
    title = "loss scale" if len(shown) == 1 else "loss scale, with skipped steps marked"
    canvas.style_axes(axes, title=title, y_label="loss scale, log2")
    record.use_loss_scale_axis(axes, list(runs.values()))
    if len(shown) == 1:
        record.draw_shown_ceiling(axes, shown[0][1], f"ceiling that gradients show ({canvas.as_text(shown[0][0])})")
    for place, (name, run) in enumerate(runs.items()):
        colour, dashes = styles[name]
        record.draw_loss_scale(axes, run, colour, "_" + name, dashes)
        record.mark_skipped(
            axes, run, colour, f"{canvas.as_text(name)}: {_skipped(run):,} skipped", height=0.96 - 0.07 * place
        )


def _draw_underflow(axes: Axes, runs: Mapping[str, GradientSeries], styles: _Styles) -> None:
    what, shares = _lost(runs)
    canvas.style_axes(axes, title=f"{what}, share of all gradients", y_label="share, %")
    canvas.use_percent_axis(axes)
    for name, share in shares.items():
        colour, dashes = styles[name]
        style: dict[str, Any] = {"color": colour, "linestyle": dashes, "marker": ".", "linewidth": 1.2}
        axes.plot(runs[name].step, 100.0 * share, gid=name, **style)


def _lost(runs: Mapping[str, GradientSeries]) -> tuple[str, dict[str, Floats]]:
    """Return what FP16 loses, and the share of each run: what underflows, or what is subnormal if that is not known."""
    shares = {name: run.overall.underflowed for name, run in runs.items()}
    if all(np.isfinite(share).any() for share in shares.values()):
        return "underflow", shares
    return "subnormal gradients", {name: run.overall.subnormal for name, run in runs.items()}


def _skipped(run: RunSeries) -> int:
    return int(run.overflow.sum()) if run.all_skipped is None else run.all_skipped


def _finding(runs: Mapping[str, RunSeries], gradients: Mapping[str, GradientSeries]) -> str:
    """Compare the runs at the last step that all of them have taken, the lowest loss first."""
    last = min(run.last_step for run in runs.values())
    losses = {name: _end_loss(run, last) for name, run in runs.items()}
    order = sorted(runs, key=lambda name: np.nan_to_num(losses[name], nan=math.inf))
    end = "at the end" if all(run.last_step == last for run in runs.values()) else f"at step {last:,}"
    words = {"inf": "not finite", "nan": "not known"}
    ends = _listed({name: words.get(str(losses[name]), f"{losses[name]:.2f}") for name in order})
    what, shares = _lost(gradients)
    most = {name: share[np.isfinite(share)] for name, share in shares.items()}
    known = {name: canvas.percent(float(most[name].max())) for name in order if name in most and len(most[name])}
    if known:
        return f"Loss {end}: {ends}; {what} at most {_listed(known)}"
    return f"Loss {end}: {ends}; skipped steps: {_listed({name: f'{_skipped(runs[name]):,}' for name in order})}"


def _end_loss(run: RunSeries, last: int) -> float:
    """Return the median loss of the last steps up to a step; inf if it is not finite, nan if it is not known."""
    loss = run.loss[(run.step <= last) & ~np.isnan(run.loss)]
    return float(np.median(loss[-max(1, int(_END * len(loss))) :])) if len(loss) else math.nan


def _listed(values: Mapping[str, str]) -> str:
    named = [f"{value} ({canvas.as_text(name)})" for name, value in values.items()]
    return ", ".join(named if len(named) <= _MOST_NAMED else [named[0], "...", named[-1]])
