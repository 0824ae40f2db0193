"""Pictures of the lab: replays on a trace, and policies by skipped steps and headroom lost."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mindformers_adaptive.lab.measures import LARGEST_LOSS_SCALE, SMALLEST_LOSS_SCALE, Measures
from mindformers_adaptive.lab.replay import Comparison, Replay, pareto_front
from mindformers_adaptive.plots import canvas
from mindformers_adaptive.plots.canvas import Floats
from mindformers_adaptive.plots.points import one_per_column
from mindformers_adaptive.record.trace import Trace, implied_ceilings

__all__ = ["draw_comparison", "draw_pareto_front", "draw_replays"]

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox


# Ceilings whose log2 differ by less, but in a few of the steps, are drawn as one line.
_SAME_BITS, _FEW = 0.05, 0.05


def draw_replays(trace: Trace, replays: Mapping[str, Replay]) -> Figure:
    """Draw what policies did on a trace: its ceiling, the loss scale of each policy, and the steps that each skipped.

    On a long trace each line becomes medians within a band from the lowest to the highest value. A trace with largest
    gradients has a line for the ceiling that they show, where it is another one.

    Args:
        trace (Trace): what was replayed.
        replays (Mapping[str, Replay]): by the policies' names, what
            :func:`mindformers_adaptive.lab.replay.replay` returned on this trace; at least one.

    Returns:
        Figure of two panels over the same steps, 1200 pixels wide; the title says who skipped the fewest steps and who
        lost the least headroom.

    Raises:
        ImportError: if matplotlib is missing.
        ValueError: if there is no replay, or one is of another number of steps.

    Examples:
        >>> from mindformers_adaptive.lab.policies import make_policy
        >>> from mindformers_adaptive.lab.replay import replay
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
        skipped = one_per_column(np.flatnonzero(result.overflow) + 1)
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
    shown = implied_ceilings(gradients, trace.gradient_format)
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


# An outlier with so many times the median of skipped steps needs a logarithmic axis.
_LOG_SKIPPED_FROM = 50.0

# Where a name may stand, in font points from its point, and on which side of it; the first free place is taken.
_SIDES = ((1, 1), (1, 0), (1, -1), (0, 1), (0, -1), (-1, 1), (-1, 0), (-1, -1))
_PLACES = [(distance, *side) for distance in (9, 22, 38, 56, 78, 104) for side in _SIDES]
_BESIDE = 22

# Names of one point stand together, on lines of so many letters.
_LETTERS = 34


def draw_comparison(comparison: Comparison) -> Figure:
    """Draw skipped steps against headroom lost for the policies of a comparison, as means over its traces.

    Args:
        comparison (Comparison): what :func:`mindformers_adaptive.lab.replay.compare` returned.

    Returns:
        Figure, see :func:`draw_pareto_front`.

    Raises:
        ImportError: if matplotlib is missing.
    """
    means = comparison.means()
    # An array has nan for None.
    skipped, headroom = np.array([(mean["skipped"], mean["headroom_lost"]) for mean in means.values()], float).T
    where = comparison.traces[0] if len(comparison.traces) == 1 else f"mean of {len(comparison.traces)} traces"
    return draw_pareto_front(skipped, headroom, list(means), where)


def draw_pareto_front(skipped: ArrayLike, headroom_lost: ArrayLike, names: Sequence[str], where: str) -> Figure:
    """Draw skipped steps against headroom lost; a line joins the policies that no other policy beats in both.

    Args:
        skipped (ArrayLike): skipped steps of each policy, shape (policies,).
        headroom_lost (ArrayLike): likewise, in bits. Policies with nan are not drawn; the picture says how many.
        names (Sequence[str]): a name for each policy.
        where (str): the trace or traces, for the title.

    Returns:
        Figure; the title says which policies are on the front, of more than three how many.

    Raises:
        ImportError: if matplotlib is missing.
        ValueError: if no policy has headroom.

    Examples:
        >>> draw_pareto_front([1, 5, 9], [3.0, 1.0, 2.0], ["torch", "adaptive", "fixed"], "drop").get_suptitle()
        'drop: torch and adaptive are on the Pareto front of skipped steps and headroom lost'
    """
    x, y = np.asarray(skipped, np.float64), np.asarray(headroom_lost, np.float64)
    measured = np.isfinite(x) & np.isfinite(y)
    if not measured.any():
        raise ValueError(
            "At least 1 result must have headroom to measure, but none of "
            f"{len(x)} has: all steps were skipped or had no ceiling. Compare on another trace."
        )
    x, y, shown = x[measured], y[measured], np.array(names, object)[measured].tolist()
    front = pareto_front(x, y)
    figure = canvas.new_figure(10, 6.2)
    axes = figure.subplots()
    x_label = "skipped steps"
    if len(x) < len(measured):
        x_label += f"; {canvas.count(len(measured) - len(x), 'result')} without headroom not shown"
    canvas.style_axes(axes, x_label=x_label, y_label="headroom lost, bits in the mean of applied steps")
    corners = _draw_points(axes, x, y, front)
    canvas.legend_above(axes)
    _place_labels(axes, x, y, shown, corners)
    best = [name for name, on_front in zip(shown, front.tolist(), strict=True) if on_front]
    subject = canvas.listed(best) if len(best) <= 3 else f"{len(best):,} of {len(front):,} policies"
    finding = f"{subject} {'is' if len(best) == 1 else 'are'} on the Pareto front of skipped steps and headroom lost"
    canvas.headline(figure, f"{canvas.as_text(where)}: {finding}")
    return figure


def _draw_points(axes: Axes, x: Floats, y: Floats, front: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Draw the results and the front; return the corners of its line, x and y."""
    beaten: dict[str, Any] = {"color": canvas.MUTED, "alpha": 0.55, "markersize": 6, "label": "beaten by another"}
    axes.plot(x[~front], y[~front], "o", gid="beaten", **beaten)
    order = np.lexsort((y[front], x[front]))
    corners_x, corners_y = np.repeat(x[front][order], 2)[1:], np.repeat(y[front][order], 2)[:-1]
    axes.plot(corners_x, corners_y, color=canvas.MAIN, linewidth=1.2, gid="front line")
    axes.plot(x[front], y[front], "o", color=canvas.MAIN, markersize=8, label="Pareto front", gid="front", zorder=3)
    if x.max() > _LOG_SKIPPED_FROM * max(float(np.median(x)), 1.0):
        axes.set_xscale("symlog", linthresh=1.0)
    axes.margins(x=0.12, y=0.14)
    axes.xaxis.set_major_formatter(lambda steps, _: f"{steps:,.6g}")
    return corners_x, corners_y


def _place_labels(axes: Axes, x: Floats, y: Floats, names: Sequence[str], corners: tuple[Floats, Floats]) -> None:
    """Write a name beside each point; it covers no other name, no point and no line as long as there is room.

    Args:
        axes (Axes): the panel with its points; its limits and scales are final.
        x, y (NDArray): the points, shape (points,).
        names (Sequence[str]): a name for each.
        corners (tuple[NDArray, NDArray]): x and y of a line of horizontal and vertical pieces, to be kept free.
    """
    from matplotlib.transforms import Bbox

    drawn: Any = axes.figure.canvas
    drawn.draw()  # The layout decides where the points are.
    centres, ends = (axes.transData.transform(np.column_stack(line)) for line in ((x, y), corners))
    taken = [Bbox([centre, centre]).padded(6) for centre in centres]
    taken += [Bbox(np.sort(piece, axis=0)).padded(2) for piece in pairwise(ends)]
    together: dict[tuple[float, float], list[str]] = {}
    for point, name in zip(zip(x.tolist(), y.tolist(), strict=True), names, strict=True):
        together.setdefault(point, []).append(name)
    for point, called in sorted(together.items()):
        taken.append(_place(axes, point, canvas.as_text(textwrap.fill(", ".join(called), _LETTERS)), taken))


def _place(axes: Axes, point: tuple[float, float], text: str, taken: Sequence[Bbox]) -> Bbox:
    """Write a text where it covers the fewest boxes, and return its own box; all boxes are in pixels."""
    style: dict[str, Any] = {"textcoords": "offset points", "fontsize": 10, "color": canvas.MUTED}
    label = axes.annotate(text, point, (0, 0), gid="name", **style)
    frame = axes.get_window_extent()

    def move(place: tuple[int, int, int]) -> Bbox:
        distance, x, y = place
        sides = {"ha": ("center", "left", "right")[x], "va": ("center", "bottom", "top")[y]}
        label.set(position=(distance * x, 0.8 * distance * y), **sides)
        return label.get_window_extent()

    def cost(place: tuple[int, int, int]) -> int:
        box = move(place)
        inside = frame.contains(*box.min) and frame.contains(*box.max)
        return box.count_overlaps(taken) + (0 if inside else 1000)

    best = min(_PLACES, key=cost)
    box = move(best)
    if best[0] >= _BESIDE:
        arrow = {"arrowstyle": "-", "color": canvas.MUTED, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 5}
        centre = axes.transData.transform(point)
        nearest = (np.clip(centre, box.min, box.max) - centre) * 72 / axes.figure.dpi
        axes.annotate("", point, tuple(nearest), textcoords="offset points", arrowprops=arrow)
    return box
