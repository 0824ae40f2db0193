"""Draws one or several training runs: loss, gradient norm, loss scale, skipped steps, scale window, underflow."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mindformers_adaptive.plots import canvas
from mindformers_adaptive.plots.canvas import Floats, gather, one_per_column
from mindformers_adaptive.plots.gradient_records import GradientSeries, series_of_gradients
from mindformers_adaptive.plots.run_series import RunSeries, series_of
from mindformers_adaptive.record.run import RecordedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# The loss of a run with at least _SMOOTH_FROM steps also has a line of at most _MEDIANS medians, without the noise.
_SMOOTH_FROM = 200
_MEDIANS = 100

# Loss scales at the start are cut off the axis if they are more than _START_ABOVE times all later loss scales, and at
# least _START_CUT_FROM loss scales follow.
_START_ABOVE, _START_CUT_FROM = 2.0**4, 40

# The axis of the loss scale has room for ceilings (largest loss scales without overflow) up to this many times the
# highest loss scale.
_CEILINGS_UP_TO = 2.0**8

# The axis of the loss is logarithmic if the highest loss is more than this many times the lowest.
_LOG_LOSS_FROM = 50.0

# The axis of the gradient norm is logarithmic if the largest norm is more than this many times the smallest.
_LOG_NORM_FROM = 10.0

# The final loss of a run is the median loss over its last steps. This is the share of these steps among all steps.
_END = 0.05

# The title of a picture of several runs has their median gradient norms if the largest median is at least this many
# times the smallest.
_NORMS_APART = 1.5

# The title of a picture lists the runs from the lowest to the highest final loss. With more runs than this, the title
# names only the first and the last run of the list.
_MOST_NAMED = 4


def draw_runs(
    runs: Mapping[str, RecordedRun | Sequence[Mapping[str, object]]],
    gradients: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
) -> Figure:
    """Draw one or several runs over the same steps: loss, gradient norm, loss scale with skipped steps, underflow.

    The gradient norm has a panel if it is recorded. Two runs have a panel with the difference of their losses, if both
    recorded the loss of the same step. A single run without gradients is drawn in more detail: with the loss of each
    step, with its scale window if the window changes, and with the missing steps of the record shaded, unless most
    steps are missing. If the record of exactly one run has largest gradients, the loss scales above the ceiling that
    they imply are shaded.

    Args:
        runs (Mapping): the record of each run by its name, as :func:`mindformers_adaptive.record.writer.read_record`
            returns it, or the run as :func:`mindformers_adaptive.record.logs.read_log` returns it; at least one. A
            single run may have the name "", so that the title does not name it.
        gradients (Mapping, optional): the records of gradients of the runs that have one, by the name of the run.
            Default: None, no panel for the underflow.

    Returns:
        Figure of two to five panels over the same steps, 1200 pixels wide; the title says how many steps a single run
        skipped; the title of several runs compares their final losses, and their underflow or skipped steps.

    Raises:
        ImportError: if matplotlib is missing.
        TypeError: if a record is not a list of lines, or a value is neither a number nor None.
        ValueError: if there is no run, if a run has no step, or if gradients belong to no given run.

    Examples:
        >>> record = [{"step": 1, "loss": 5.5, "overflow": True, "loss_scale": 8.0, "next_loss_scale": 4.0}]
        >>> draw_runs({"": record}).get_suptitle()
        '1 of 1 step skipped; loss scale fell from $2^{3}$ to $2^{2}$'
        >>> row = {"step": 1, "overflow": False, "scale_window": 20}
        >>> low, high = ({**row, "loss": 9.0 / s, "loss_scale": s, "next_loss_scale": s} for s in (2.0, 4.0))
        >>> draw_runs({"2": [low], "4": [high]}).get_suptitle()
        'Loss at the end: 2.25 (4), 4.50 (2); skipped steps: 0 (4), 0 (2)'
    """
    if not runs or not set(gradients or {}) <= set(runs):
        raise ValueError(
            f"'runs' must have at least 1 entry, and an entry for each name in 'gradients', but got the runs "
            f"{list(runs)} and gradients for {list(gradients or {})}. Use the same names in both."
        )
    series = {name: series_of(run) for name, run in runs.items()}
    measured = {name: series_of_gradients(record, group=lambda _: "all") for name, record in (gradients or {}).items()}
    alone = len(series) == 1 and not measured
    [run, *_] = series.values()
    window = run.scale_window if alone else None
    apart = _loss_difference(*series.values()) if len(series) == 2 else None
    optional = {"window": window is not None, "difference": apart is not None, "underflow": bool(measured)}
    figure, panels = _make_panels([*series.values()], optional)
    lines: dict[str, dict[str, Any]] = {}
    for name, (colour, dashes) in zip(series, itertools.cycle(canvas.LINE_STYLES), strict=False):
        lines[name] = {"color": colour, "linestyle": dashes, "linewidth": 1.6}
    # The shaded areas above the ceilings of several runs would hide each other, so show the ceiling of one run only.
    show_ceiling = [run.ceiling is not None for run in series.values()].count(True) == 1
    for index, (name, run) in enumerate(series.items()):
        prefix, mark = ("", canvas.WARNING) if alone else (f"{canvas.as_text(name)}: ", lines[name]["color"])
        if show_ceiling and run.ceiling is not None:
            known = np.isfinite(run.ceiling)
            label = prefix + "ceiling that gradients show"
            canvas.draw_ceiling(panels["scale"], run.step[known], run.ceiling[known], label)
        _draw_run(panels, run, prefix, lines[name], mark, index)
    if window is not None:
        _draw_window(panels["window"], run, window)
    if apart is not None:
        _draw_difference(panels["difference"], apart, *map(canvas.as_text, series))
    if measured:
        _draw_underflow(panels["underflow"], measured, lines)
    if alone:
        _mark_events(panels, run)
    for axes in panels.values():
        canvas.legend_above(axes)
    first, last = min(run.first_step for run in series.values()), max(run.last_step for run in series.values())
    [*_, lowest] = panels.values()
    canvas.use_step_axis(lowest, first, last)
    if alone and len(run.step) < run.span:
        lowest.set_xlabel(f"step ({len(run.step):,} recorded)")
    figure.align_ylabels()
    name = "".join(f"{canvas.as_text(name)}: " for name in series if name)
    canvas.headline(figure, name + run.finding() if alone else _comparison(series, measured))
    return figure


def _make_panels(runs: Sequence[RunSeries], optional: Mapping[str, bool]) -> tuple[Figure, dict[str, Axes]]:
    """Return an empty figure and its panels by name; ``optional`` says which of three panels are shown."""
    heights = {"loss": 3.0, "norm": 2.2, "scale": 3.0, "window": 2.2, "difference": 2.2, "underflow": 3.0}
    norms = [run.gradient_norm for run in runs if run.gradient_norm is not None]
    shown = {"norm": bool(norms), **optional}
    heights = {name: height for name, height in heights.items() if shown.get(name, True)}
    figure = canvas.new_figure(10, 0.9 + 0.85 * sum(heights.values()))
    panels = figure.subplot_mosaic([[name] for name in heights], sharex=True, height_ratios=[*heights.values()])
    _use_loss_axis(panels["loss"], runs)
    _use_loss_scale_axis(panels["scale"], runs)
    if norms:
        canvas.style_axes(panels["norm"], y_label="gradient norm")
        if np.nanmax(np.concatenate(norms)) > _LOG_NORM_FROM * np.nanmin(np.concatenate(norms)):
            panels["norm"].set_yscale("log")
    return figure, panels


def _draw_run(
    panels: Mapping[str, Axes], run: RunSeries, prefix: str, line: Mapping[str, Any], mark: str, index: int
) -> None:
    """Draw loss, gradient norm and loss scale of a run, which is the one with number ``index`` in the picture."""
    _draw_values(panels["loss"], run, run.loss, "loss", prefix, line)
    broken = run.step[np.isinf(run.loss)]
    label = f"{prefix}inf or NaN ({len(broken):,})"
    canvas.mark_above(panels["loss"], one_per_column(broken), mark, label, "broken loss")
    if run.gradient_norm is not None:
        _draw_values(panels["norm"], run, run.gradient_norm, "norm", prefix, line)
    _draw_loss_scale(panels["scale"], run, prefix, line, mark, height=0.96 - 0.07 * index)


def _mark_events(panels: Mapping[str, Axes], run: RunSeries) -> None:
    """Mark the checkpoints of a run below its loss scale, and its resumes and missing steps in all panels."""
    style: dict[str, Any]
    if len(run.saved):
        saved = one_per_column(run.saved)
        style = {"linestyle": "none", "marker": "^", "clip_on": False, "color": canvas.MUTED, "gid": "saved"}
        style |= {"label": f"checkpoint ({len(run.saved):,})", "transform": panels["scale"].get_xaxis_transform()}
        panels["scale"].plot(saved, np.zeros(len(saved)), **style)
    for axes in panels.values():
        if len(run.resumed):
            label = f"resumed ({len(run.resumed):,})" if axes is panels["scale"] else ""
            style = {"colors": canvas.MUTED, "linestyles": ":", "label": label, "gid": "resumed"}
            axes.vlines(one_per_column(run.resumed) - 0.5, 0, 1, transform=axes.get_xaxis_transform(), **style)
        if len(run.gaps):
            spans = [(first - 0.5, last - first + 1) for first, last in run.gaps]
            style = {"color": canvas.CONTEXT, "label": "not recorded", "gid": "gaps"}
            axes.broken_barh(spans, (0, 1), transform=axes.get_xaxis_transform(), **style)


def _use_loss_axis(axes: Axes, runs: Sequence[RunSeries]) -> None:
    """Make the y axis an axis of losses, which is logarithmic if the losses fall far."""
    canvas.style_axes(axes, y_label="loss, unscaled")
    losses = np.concatenate([run.loss[np.isfinite(run.loss)] for run in runs])
    if not len(losses):
        canvas.say_instead(axes, "no finite loss in the record")
    elif 0 < losses.min() < losses.max() / _LOG_LOSS_FROM:
        axes.set_yscale("log")


def _draw_values(axes: Axes, run: RunSeries, of_steps: Floats, what: str, prefix: str, line: Mapping[str, Any]) -> None:
    """Draw one quantity of a run over its steps, as medians of blocks of steps if the run is long.

    ``prefix`` begins the labels of a run in a picture of several runs. Without it, the value of each step is drawn too.
    """
    # A log may have the loss of only some steps. Break the line at gaps of the log, but not at each step without a
    # loss.
    known = np.isfinite(of_steps)
    step, values, label, gid = run.step[known], of_steps[known], what, what
    if len(values) >= _SMOOTH_FROM:
        if not prefix:
            faint: dict[str, Any] = {**line, "alpha": 0.35, "linewidth": 0.8, "label": f"{what} of a step", "gid": what}
            axes.plot(*run.broken(step, values), **faint)
        blocks = min(len(values) // 10, _MEDIANS)
        label, gid = f"median of {len(values) // blocks:,} steps", f"median {what}"
        step, _, values, _ = gather(step, values, blocks)
    if len(values):
        marker = canvas.point_marker(len(values))
        axes.plot(*run.broken(step, values), marker=marker, label=prefix + label, gid=prefix + gid, **line)


def _use_loss_scale_axis(axes: Axes, runs: Sequence[RunSeries]) -> None:
    """Make the y axis an axis of loss scales that holds the loss scales of all runs."""
    canvas.style_axes(axes, y_label="loss scale, log2")
    scales = np.concatenate([run.scales for run in runs])
    if np.isnan(scales).all():
        canvas.say_instead(axes, "no loss scale in the record")
        axes.set_ylim(0.5, 2)
    else:
        lowest, highest = np.nanmin(scales), np.nanmax([_highest_after_start(run) for run in runs])
        if (start := np.nanmax(scales)) > highest:
            text = f"the start, from {canvas.power_of_two(start)}, is cut off"
            axes.text(0.01, 0.84, text, transform=axes.transAxes, color=canvas.MUTED, gid="start")
        ceilings = [np.nanmax(run.ceiling) for run in runs if run.ceiling is not None]
        # Limit the ceilings on the axis. Otherwise the huge ceiling in a step with tiny gradients would squeeze all
        # other values.
        canvas.use_power_of_two_axis(axes, lowest, max([highest, *np.minimum(ceilings, _CEILINGS_UP_TO * highest)]))


def _highest_after_start(run: RunSeries) -> float:
    """Return a run's highest loss scale. Ignore steps skipped at the start if all later loss scales are far lower."""
    highest = float(np.nanmax(run.scales, initial=0.0))
    later = run.scales[run.skipped_at_start :]
    if len(later) < _START_CUT_FROM or np.isnan(later).all():
        return highest
    settled = float(np.nanmax(later))
    return settled if highest > _START_ABOVE * settled else highest


def _draw_loss_scale(
    axes: Axes, run: RunSeries, prefix: str, line: Mapping[str, Any], mark: str, height: float
) -> None:
    """Draw the loss scale of a run, and a row of ticks that mark its skipped steps.

    ``height`` is the height of this row in the panel, from 0 (bottom) to 1 (top).
    """
    steps = np.append(run.step, run.last_step + 1)
    axes.step(*run.broken(steps, run.scales), where="post", gid=prefix + "loss scale", **line)
    recorded = int(run.overflow.sum())
    of_all = "" if run.bounds == (recorded, recorded) else f" of {run.skipped_as_text}"
    label = f"{prefix}skipped step ({recorded:,}{of_all})"
    # Draw the skipped steps as ticks in a row at the top of the panel, because marks on the curve would hide it.
    step = one_per_column(run.step[run.overflow])
    style: dict[str, Any] = {"linestyle": "none", "color": mark, "label": label, "gid": "skipped steps"}
    style.update(marker="|", markersize=9, markeredgewidth=1.0, transform=axes.get_xaxis_transform())
    axes.plot(step, np.full(len(step), height), **style)


def _draw_window(axes: Axes, run: RunSeries, scale_window: Floats) -> None:
    what = "the loss scale" if run.ceiling is None else "the limit of the loss scale"
    canvas.style_axes(axes, title=f"scale window: clean steps before {what} is raised", y_label="scale window, steps")
    style: dict[str, Any] = {"color": canvas.SECOND, "linewidth": 1.6, "gid": "scale window"}
    marker = canvas.point_marker(len(scale_window))
    axes.step(*run.broken(run.step, scale_window), where="post", marker=marker, **style)
    windows = np.unique(scale_window[np.isfinite(scale_window)])
    # Label the scale windows on the axis from the largest down, but only windows with enough room for a label.
    room = np.log(windows[-1] / windows[0]) / 8
    labelled: list[float] = []
    for window in windows[::-1].tolist():
        if not labelled or np.log(labelled[-1] / window) >= room:
            labelled.append(window)
    axes.set_yscale("log")
    axes.set_ylim(windows[0] / 1.4, windows[-1] * 1.4)
    axes.set_yticks(labelled, [f"{window:g}" for window in labelled])
    axes.minorticks_off()


def _loss_difference(first: RunSeries, second: RunSeries) -> tuple[Floats, Floats] | None:
    """Return the common steps of two runs, and at each step the loss of ``second`` minus the loss of ``first``.

    Leave out steps at which the difference is not finite. Return None if no step is left.
    """
    step, in_first, in_second = np.intersect1d(first.step, second.step, return_indices=True)
    # Where the losses of both runs are inf, their difference is not defined.
    with np.errstate(invalid="ignore"):
        apart = second.loss[in_second] - first.loss[in_first]
    known = np.isfinite(apart)
    return (step[known], apart[known]) if known.any() else None


def _draw_difference(axes: Axes, apart: tuple[Floats, Floats], first: str, second: str) -> None:
    canvas.style_axes(axes, title=f"loss of {second} minus loss of {first}", y_label="difference")
    step, values = apart
    faint = len(values) >= _SMOOTH_FROM
    style: dict[str, Any] = {"color": canvas.MUTED, "marker": canvas.point_marker(len(values)), "gid": "difference"}
    axes.plot(step, values, linewidth=0.8 if faint else 1.6, alpha=0.35 if faint else 1.0, **style)
    if faint:
        middle, _, median, _ = gather(step, values, min(len(values) // 10, _MEDIANS))
        axes.plot(middle, median, color=canvas.MUTED, linewidth=1.6, gid="median difference")
    axes.axhline(0.0, color="black", linewidth=0.8)


def _draw_underflow(axes: Axes, runs: Mapping[str, GradientSeries], lines: Mapping[str, Mapping[str, Any]]) -> None:
    what, shares = _lost(runs)
    canvas.style_axes(axes, title=f"{what}, share of all gradients", y_label="share, %")
    canvas.use_percent_axis(axes)
    for name, share in shares.items():
        axes.plot(runs[name].step, 100.0 * share, marker=".", gid=name, **lines[name])


def _lost(runs: Mapping[str, GradientSeries]) -> tuple[str, dict[str, Floats]]:
    """Return a label and each run's share of lost gradients: underflowed, or subnormal if underflow is unknown."""
    shares = {name: run.overall.underflowed for name, run in runs.items()}
    if all(np.isfinite(share).any() for share in shares.values()):
        return "underflow", shares
    return "subnormal gradients", {name: run.overall.subnormal for name, run in runs.items()}


def _comparison(runs: Mapping[str, RunSeries], gradients: Mapping[str, GradientSeries]) -> str:
    """Return a title that compares the runs at the last step that all runs have taken; the lowest loss comes first."""
    last = min(run.last_step for run in runs.values())
    losses = {name: _end_loss(run, last) for name, run in runs.items()}
    order = sorted(runs, key=lambda name: np.nan_to_num(losses[name], nan=math.inf))
    end = "at the end" if all(run.last_step == last for run in runs.values()) else f"at step {last:,}"
    words = {"inf": "inf or NaN", "nan": "not known"}
    ends = _listed({name: words.get(str(losses[name]), f"{losses[name]:.2f}") for name in order})
    what, shares = _lost(gradients)
    most = {name: share[np.isfinite(share)] for name, share in shares.items()}
    known = {name: canvas.percent(float(most[name].max())) for name in order if name in most and len(most[name])}
    finding = f"Loss {end}: {ends}; skipped steps: {_listed({name: runs[name].skipped_as_text for name in order})}"
    if known:
        finding = f"Loss {end}: {ends}; {what} at most {_listed(known)}"
    bad = {name: runs[name].bad_losses_as_text for name in order if losses[name] < math.inf}
    bad = {name: text.removeprefix("in ") for name, text in bad.items() if text}
    finding += f"; loss inf or NaN in {_listed(bad)}" if bad else ""
    norms = {name: runs[name].gradient_norm for name in order}
    middle = {name: float(np.nanmedian(norm)) for name, norm in norms.items() if norm is not None}
    if len(middle) < 2 or max(middle.values()) < _NORMS_APART * min(middle.values()):
        return finding
    return f"{finding}; median norm: {_listed({name: f'{norm:.2g}' for name, norm in middle.items()})}"


def _end_loss(run: RunSeries, last: int) -> float:
    """Return the median loss of a run's last steps up to ``last``; inf if it is not finite, nan if not known."""
    loss = run.loss[(run.step <= last) & ~np.isnan(run.loss)]
    return float(np.median(loss[-max(1, int(_END * len(loss))) :])) if len(loss) else math.nan


def _listed(values: Mapping[str, str]) -> str:
    named = [f"{value} ({canvas.as_text(name)})" for name, value in values.items()]
    return ", ".join(named if len(named) <= _MOST_NAMED else [named[0], "...", named[-1]])
