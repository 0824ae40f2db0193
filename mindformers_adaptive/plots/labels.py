"""Names beside points, where there is room for them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.plots.canvas import MUTED, as_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["listed", "place_labels"]

# How far from its point a name may stand, in font points, and on which sides; the first that is free is taken.
_DISTANCES = (9, 22, 38, 56, 78, 104)
_SIDES = ((1, 1), (1, 0), (1, -1), (0, 1), (0, -1), (-1, 1), (-1, 0), (-1, -1))

# Names of one point stand together, on lines of so many letters.
_LETTERS, _MOST_NAMES = 34, 8

_Box = tuple[float, float, float, float]


def listed(names: Sequence[str]) -> str:
    """Return names as a text lists them, or how many policies they are where they are more than three.

    Examples:
        >>> listed(["torch"]), listed(["adaptive", "torch"]), listed(list("abcd"))
        ('torch', 'adaptive and torch', '4 policies')
    """
    shown = [as_text(name) for name in names]
    if len(shown) > 3:
        return f"{len(shown)} policies"
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def place_labels(
    axes: Axes,
    x: NDArray[np.float64],
    y: NDArray[np.float64],
    names: Sequence[str],
    corners: tuple[NDArray[np.float64], NDArray[np.float64]],
) -> None:
    """Write a name beside each point, so that it covers no other one, no point and not the line where there is room.

    Args:
        axes (Axes): the panel with its points; its limits and scales are final.
        x, y (NDArray): the points, shape (points,).
        names (Sequence[str]): a name for each, "" for none.
        corners (tuple[NDArray, NDArray]): x and y of a line of horizontal and vertical pieces, to be kept free.
    """
    together: dict[tuple[float, float], list[str]] = {}
    for point, name in zip(zip(x.tolist(), y.tolist(), strict=True), names, strict=True):
        if name:
            together.setdefault(point, []).append(name)
    canvas: Any = axes.figure.canvas
    canvas.draw()  # lays the figure out, which all extents below depend on
    taken = [_square(centre) for centre in axes.transData.transform(np.column_stack([x, y])).tolist()]
    taken += [_piece(*ends) for ends in pairwise(axes.transData.transform(np.column_stack(corners)).tolist())]
    for point, called in sorted(together.items()):
        shown = called if len(called) <= _MOST_NAMES else [*called[: _MOST_NAMES - 1], "..."]
        taken.append(_place(axes, point, as_text(textwrap.fill(", ".join(shown), _LETTERS)), taken))


def _square(centre: Sequence[float]) -> _Box:
    return centre[0] - 6, centre[1] - 6, centre[0] + 6, centre[1] + 6


def _piece(one: Sequence[float], other: Sequence[float]) -> _Box:
    left, right = sorted((one[0], other[0]))
    low, high = sorted((one[1], other[1]))
    return left - 2, low - 2, right + 2, high + 2


def _place(axes: Axes, point: tuple[float, float], text: str, taken: Sequence[_Box]) -> _Box:
    """Write a text beside a point where it covers the least that is taken, and return its box in pixels."""
    label = axes.annotate(text, point, (0, 0), textcoords="offset points", fontsize=10, color=MUTED, gid="name")
    frame = axes.get_window_extent()
    found: list[tuple[float, int, tuple[float, float]]] = []
    for number, offset in enumerate(_offsets()):
        box = _box_at(label, offset)
        outside = box[0] < frame.x0 or box[2] > frame.x1 or box[1] < frame.y0 or box[3] > frame.y1
        found.append((sum(_overlap(box, other) for other in taken) + 1e6 * outside, number, offset))
        if found[-1][0] == 0:
            break
    _, _, offset = min(found)
    if np.hypot(*offset) > 2 * _DISTANCES[0]:
        arrow = {"arrowstyle": "-", "color": MUTED, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 5}
        axes.annotate("", point, offset, textcoords="offset points", arrowprops=arrow)
    return _box_at(label, offset)


def _box_at(label: Any, offset: tuple[float, float]) -> _Box:
    """Move a text, and return the box in pixels that it has there."""
    across, up = offset
    label.set(position=offset, ha=_side(across, "left", "right"), va=_side(up, "bottom", "top"))
    box = label.get_window_extent()
    return box.x0, box.y0, box.x1, box.y1


def _side(offset: float, positive: str, negative: str) -> str:
    return "center" if offset == 0 else positive if offset > 0 else negative


def _offsets() -> Iterator[tuple[float, float]]:
    for distance in _DISTANCES:
        yield from ((distance * across, 0.8 * distance * up) for across, up in _SIDES)


def _overlap(one: _Box, other: _Box) -> float:
    """The area that two boxes share."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return width * height if width > 0 and height > 0 else 0.0
