"""The picture of skipped steps against headroom lost, with the Pareto front of several results."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mindformers_adaptive.lab.replay.simulate import Comparison, pareto_front
from mindformers_adaptive.plots import canvas
from mindformers_adaptive.plots.canvas import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

__all__ = ["draw_comparison", "draw_pareto_front"]

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
        comparison (Comparison): what :func:`mindformers_adaptive.lab.replay.simulate.compare` returned.

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
