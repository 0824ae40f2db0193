"""The picture of what policies did on a trace: ceiling, loss scales and skipped steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mindformers_adaptive.lab.replay.measures import LARGEST_LOSS_SCALE, SMALLEST_LOSS_SCALE, Measures
from mindformers_adaptive.lab.replay.simulate import Replay
from mindformers_adaptive.lab.traces.gradients import shown_ceilings
from mindformers_adaptive.lab.traces.trace import Trace
from mindformers_adaptive.plots import canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_replays"]

# Ceilings whose log2 differ by less, but in a few of the steps, are drawn as one line.
_SAME_BITS, _FEW = 0.05, 0.05


def draw_replays(trace: Trace, replays: Mapping[str, Replay]) -> Figure:
    """Draw what policies did on a trace: its ceiling, the loss scale of each policy, and the steps that each skipped.

    On a long trace each line becomes medians within a band from the lowest to the highest value. A trace with largest
    gradients has a line for the ceiling that they show, where it is another one.

    Args:
        trace (Trace): what was replayed.
        replays (Mapping[str, Replay]): by the policies' names, what
            :func:`mindformers_adaptive.lab.replay.simulate.replay` returned on this trace; at least one.

    Returns:
        Figure of two panels over the same steps, 1200 pixels wide; the title says who skipped the fewest steps and who
        lost the least headroom.

    Raises:
        ImportError: if matplotlib is missing.
        ValueError: if there is no replay, or one is of another number of steps.

    Examples:
        >>> from mindformers_adaptive.lab.policies import make_policy
        >>> from mindformers_adaptive.lab.replay.simulate import replay
        >>> trace = Trace.exact("sudden drop", [8.0, 8.0, 2.0, 2.0])
        >>> draw_replays(trace, {"fixed": replay(make_policy("fixed", loss_scale_value=4.0), trace)}).get_suptitle()
        'sudden drop: fixed skipped 2 of 4 steps and lost 1.0 bits of headroom'
    """
    figure = canvas.new_figure(10, 5.2 + 0.32 * len(replays))
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[4.2, 0.6 + 0.32 * len(replays)])
    _draw_ceiling(upper, trace, replays)
    canvas.style_axes(upper, y_label="loss scale, log2")
    steps = np.arange(1, len(trace) + 1, dtype=np.float64)
    canvas.style_axes(lower, title="skipped steps")
    for row, ((name, result), (colour, dashes)) in enumerate(zip(replays.items(), canvas.LINE_STYLES, strict=False)):
        # Where lines cover each other, the first is the widest, so that all of them are visible.
        width = 1.2 + 2.6 * (1 - (row + 1) / len(replays))
        line: dict[str, Any] = {"color": colour, "linestyle": dashes, "linewidth": width, "gid": name}
        canvas.draw_steps(upper, steps, result.loss_scale, label=canvas.as_text(name), **line)
        skipped = canvas.one_per_column(np.flatnonzero(result.overflow) + 1)
        style: dict[str, Any] = {"linestyle": "none", "marker": "|", "markersize": 11, "markeredgewidth": 1.0}
        lower.plot(skipped, np.full(len(skipped), row), color=colour, gid=name, **style)
    names = [f"{canvas.as_text(name)} ({result.measures.skipped:,})" for name, result in replays.items()]
    lower.set_yticks(range(len(replays)), names)
    lower.set_ylim(len(replays) - 0.4, -0.6)
    lower.grid(visible=False, axis="y")
    canvas.use_step_axis(lower, 1, len(trace))
    canvas.legend_above(upper)
    finding = _finding({name: result.measures for name, result in replays.items()})
    canvas.headline(figure, f"{canvas.as_text(trace.name)}: {finding}")
    return figure


def _draw_ceiling(axes: Axes, trace: Trace, replays: Mapping[str, Replay]) -> None:
    """Shade where steps overflow, and fit the axis to all scales and to the ceilings that FP32 can hold."""
    gradients = np.full(len(trace), np.nan) if trace.largest_gradient is None else trace.largest_gradient
    shown = shown_ceilings(gradients)
    scales = np.concatenate([trace.ceiling, shown, *(result.loss_scale for result in replays.values())])
    scales = scales[(scales >= SMALLEST_LOSS_SCALE) & (scales <= LARGEST_LOSS_SCALE)]
    canvas.use_power_of_two_axis(axes, scales.min(), scales.max())
    # Known exactly: a scale at the ceiling does not overflow, and the next number above it does.
    exact = (trace.ceiling <= trace.lower_bound) & (trace.upper_bound <= np.nextafter(trace.ceiling, np.inf))
    label = "ceiling" if exact.all() else "ceiling, partly assumed"
    steps = np.arange(1, len(trace) + 1, dtype=np.float64)
    canvas.draw_ceiling(axes, steps, trace.ceiling, label)
    # What the gradients show has a line of its own, unless it is the same.
    with np.errstate(divide="ignore", invalid="ignore"):
        differs = np.abs(np.log2(shown / trace.ceiling)) >= _SAME_BITS
    known = np.isfinite(shown)
    if differs.sum() > _FEW * known.sum():
        style: dict[str, Any] = {"color": canvas.MUTED, "linestyle": "dotted", "linewidth": 1.0, "gid": "shown"}
        values = np.clip(shown[known], *axes.get_ylim())
        canvas.draw_steps(axes, steps[known], values, opacity=0.1, label="what the gradients show", **style)


def _finding(measures: Mapping[str, Measures]) -> str:
    if len(measures) == 1:
        [(name, only)] = measures.items()
        finding = f"{canvas.as_text(name)} skipped {only.skipped:,} of {canvas.count(only.steps, 'step')}"
        lost = only.headroom_lost
        return finding if math.isnan(lost) else f"{finding} and lost {lost:.1f} bits of headroom"
    skipped = {name: one.skipped for name, one in measures.items()}
    headroom = {name: one.headroom_lost for name, one in measures.items() if not math.isnan(one.headroom_lost)}
    fewest, best = _smallest(skipped)
    steps = next(iter(measures.values())).steps
    finding = f"{best} skipped the fewest steps ({fewest:,.0f} of {steps:,})"
    if headroom:
        least, best = _smallest(headroom)
        finding += f", {best} lost the least headroom ({least:.1f} bits)"
    return finding


def _smallest(values: Mapping[str, float]) -> tuple[float, str]:
    """Return the smallest value, and the names that have it as a text."""
    smallest = min(values.values())
    return smallest, canvas.listed([name for name, value in values.items() if value == smallest])
