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

# Up to so many results all have a name; of more results, so many of those on the front.
_ALL_NAMED, _NAMED_ON_FRONT = 24, 10


# Where a name may stand, in font points from its point, and on which side of it; the first free place is taken.
_SIDES = ((1, 1), (1, 0), (1, -1), (0, 1), (0, -1), (-1, 1), (-1, 0), (-1, -1))
_PLACES = [(distance, *side) for distance in (9, 22, 38, 56, 78, 104) for side in _SIDES]
_BESIDE = 22

# Names of one point stand together, on lines of so many letters.
_LETTERS, _MOST_NAMES = 34, 8


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
    return draw_pareto_front(skipped, headroom, list(means), where=where, kind="policies")


def draw_pareto_front(
    skipped: ArrayLike,
    headroom_lost: ArrayLike,
    names: Sequence[str] | None = None,
    *,
    where: str = "",
    kind: str = "results",
) -> Figure:
    """Draw skipped steps against headroom lost; a line joins the results that no other result beats in both.

    Args:
        skipped (ArrayLike): skipped steps of each result, shape (results,); a column of a sweep, for example.
        headroom_lost (ArrayLike): likewise, in bits. Results with nan are not drawn; the picture says how many.
        names (Sequence[str], optional): a name for each result. Of more than 24 results, only ten on the front show
            their names. Default: None, no names.
        where (str): the trace or traces, for the title. Default: "", nothing.
        kind (str): what to call the results in the title. Default: "results".

    Returns:
        Figure; the title says how many results are on the front.

    Raises:
        ImportError: if matplotlib is missing.
        ValueError: if no result has headroom, or the arguments differ in length.

    Examples:
        >>> draw_pareto_front([1, 5, 9], [3.0, 1.0, 2.0], ["torch", "adaptive", "fixed"]).get_suptitle()
        'torch and adaptive are on the Pareto front of skipped steps and headroom lost'
    """
    x, y = np.asarray(skipped, np.float64), np.asarray(headroom_lost, np.float64)
    called = [""] * len(x) if names is None else list(names)
    if not len(x) == len(y) == len(called) or x.shape != y.shape:
        raise ValueError(
            "'skipped', 'headroom_lost' and 'names' must have one entry for each result, but got "
            f"{x.shape}, {y.shape} and {len(called)}. Give lists of one length."
        )
    measured = np.isfinite(x) & np.isfinite(y)
    if not measured.any():
        raise ValueError(
            "At least 1 result must have headroom to measure, but none of "
            f"{len(x)} has: all steps were skipped or had no ceiling. Compare on another trace."
        )
    x, y, called = x[measured], y[measured], [called[place] for place in np.flatnonzero(measured)]
    front = pareto_front(x, y)
    figure = canvas.new_figure(10, 6.2)
    axes = figure.subplots()
    x_label = "skipped steps"
    if len(x) < len(measured):
        x_label += f"; {canvas.count(len(measured) - len(x), 'result')} without headroom not shown"
    canvas.style_axes(axes, x_label=x_label, y_label="headroom lost, bits in the mean of applied steps")
    corners = _draw_points(axes, x, y, front)
    canvas.legend_above(axes)
    _place_labels(axes, x, y, _shown_names(called, x, front), corners)
    finding = _front_finding(front, called, kind)
    canvas.headline(figure, f"{canvas.as_text(where)}: {finding}" if where else finding)
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


def _shown_names(names: Sequence[str], x: Floats, front: NDArray[np.bool_]) -> list[str]:
    """Return the names to write, "" for no name: of too many, some that lie evenly along the front."""
    if len(names) <= _ALL_NAMED:
        return list(names)
    steps = np.unique(x[front])
    chosen = steps[np.linspace(0, len(steps) - 1, min(_NAMED_ON_FRONT, len(steps))).astype(np.intp)]
    shown = front & np.isin(x, chosen)
    return [name if show else "" for name, show in zip(names, shown.tolist(), strict=True)]


def _front_finding(front: NDArray[np.bool_], names: Sequence[str], kind: str) -> str:
    best = [names[place] for place in np.flatnonzero(front) if names[place]]
    subject = f"{int(front.sum()):,} of {len(front):,} {kind} are"
    if 1 <= len(best) <= 3:
        subject = f"{canvas.listed(best)} {'is' if len(best) == 1 else 'are'}"
    return f"{subject} on the Pareto front of skipped steps and headroom lost"


def _place_labels(axes: Axes, x: Floats, y: Floats, names: Sequence[str], corners: tuple[Floats, Floats]) -> None:
    """Write a name beside each point; it covers no other name, no point and no line as long as there is room.

    Args:
        axes (Axes): the panel with its points; its limits and scales are final.
        x, y (NDArray): the points, shape (points,).
        names (Sequence[str]): a name for each, "" for no name.
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
        if name:
            together.setdefault(point, []).append(name)
    for point, called in sorted(together.items()):
        shown = called if len(called) <= _MOST_NAMES else [*called[: _MOST_NAMES - 1], "..."]
        taken.append(_place(axes, point, canvas.as_text(textwrap.fill(", ".join(shown), _LETTERS)), taken))


def _place(axes: Axes, point: tuple[float, float], text: str, taken: Sequence[Bbox]) -> Bbox:
    """Write a text where it covers the fewest boxes, and return its own box; all boxes are in pixels."""
    from matplotlib.transforms import Bbox

    style: dict[str, Any] = {"textcoords": "offset points", "fontsize": 10, "color": canvas.MUTED}
    label = axes.annotate(text, point, (0, 0), va="bottom", gid="name", **style)
    frame, size = axes.get_window_extent(), label.get_window_extent()
    per_point = axes.figure.dpi / 72
    centre = axes.transData.transform(point)

    def box_at(place: tuple[int, int, int]) -> Bbox:
        distance, *side = place
        sides = np.array(side)
        # A side of 1, 0 or -1 leaves the text after, around or before its place.
        corner = centre + per_point * distance * sides * (1, 0.8) + (sides - 1) / 2 * size.size
        return Bbox([corner, corner + size.size])

    def cost(place: tuple[int, int, int]) -> int:
        box = box_at(place)
        inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
        return box.count_overlaps(taken) + (0 if inside else 1000)

    best = min(_PLACES, key=cost)
    box = box_at(best)
    label.set_position(tuple((box.min - centre) / per_point))
    if best[0] >= _BESIDE:
        arrow = {"arrowstyle": "-", "color": canvas.MUTED, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 5}
        nearest = np.clip(centre, box.min, box.max)
        axes.annotate("", point, tuple((nearest - centre) / per_point), textcoords="offset points", arrowprops=arrow)
    return box
