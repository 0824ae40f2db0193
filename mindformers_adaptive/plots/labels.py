"""Names beside points, where there is room for them."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.plots.canvas import MUTED, as_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Bbox

__all__ = ["listed", "place_labels"]

# Where a name may stand, in font points from its point, and on which side of it; the first free place is taken.
_SIDES = ((1, 1), (1, 0), (1, -1), (0, 1), (0, -1), (-1, 1), (-1, 0), (-1, -1))
_PLACES = [(distance, *side) for distance in (9, 22, 38, 56, 78, 104) for side in _SIDES]
_BESIDE = 22

# Names of one point stand together, on lines of so many letters.
_LETTERS, _MOST_NAMES = 34, 8


def listed(names: Sequence[str]) -> str:
    """Return names as a sentence lists them; of more than three, only how many policies they are.

    Examples:
        >>> listed(["torch"]), listed(["adaptive", "torch"]), listed(list("abcd"))
        ('torch', 'adaptive and torch', '4 policies')
    """
    if len(names) > 3:
        return f"{len(names)} policies"
    *others, last = map(as_text, names)
    return f"{', '.join(others)} and {last}" if others else last


def place_labels(
    axes: Axes,
    x: NDArray[np.float64],
    y: NDArray[np.float64],
    names: Sequence[str],
    corners: tuple[NDArray[np.float64], NDArray[np.float64]],
) -> None:
    """Write a name beside each point; it covers no other name, no point and no line as long as there is room.

    Args:
        axes (Axes): the panel with its points; its limits and scales are final.
        x, y (NDArray): the points, shape (points,).
        names (Sequence[str]): a name for each, "" for no name.
        corners (tuple[NDArray, NDArray]): x and y of a line of horizontal and vertical pieces, to be kept free.
    """
    from matplotlib.transforms import Bbox

    canvas: Any = axes.figure.canvas
    canvas.draw()  # The layout decides where the points are.
    centres, ends = (axes.transData.transform(np.column_stack(line)) for line in ((x, y), corners))
    taken = [Bbox([centre, centre]).padded(6) for centre in centres]
    taken += [Bbox(np.sort(piece, axis=0)).padded(2) for piece in pairwise(ends)]
    together: dict[tuple[float, float], list[str]] = {}
    for point, name in zip(zip(x.tolist(), y.tolist(), strict=True), names, strict=True):
        if name:
            together.setdefault(point, []).append(name)
    for point, called in sorted(together.items()):
        shown = called if len(called) <= _MOST_NAMES else [*called[: _MOST_NAMES - 1], "..."]
        taken.append(_place(axes, point, as_text(textwrap.fill(", ".join(shown), _LETTERS)), taken))


def _place(axes: Axes, point: tuple[float, float], text: str, taken: Sequence[Bbox]) -> Bbox:
    """Write a text where it covers the fewest boxes, and return its own box; all boxes are in pixels."""
    from matplotlib.transforms import Bbox

    style: dict[str, Any] = {"textcoords": "offset points", "fontsize": 10, "color": MUTED}
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
        arrow = {"arrowstyle": "-", "color": MUTED, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 5}
        nearest = np.clip(centre, box.min, box.max)
        axes.annotate("", point, tuple((nearest - centre) / per_point), textcoords="offset points", arrowprops=arrow)
    return box
