"""Thin out a long line, or a row of marks, whose points lie too close together to be distinguished in a picture."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Floats", "gather", "one_per_column", "thinned"]

Floats = NDArray[np.float64]

# The number of columns into which a panel is divided: about twice the panel's width in pixels, in a picture 1200 pixels
# wide.
_COLUMNS = 2000

# A line with more points than this is thinned before it is drawn.
_MANY_POINTS = 50_000


def one_per_column(x: ArrayLike, columns: int = _COLUMNS) -> Floats:
    """Return the x positions of the marks to draw: the first mark in each of the narrow columns that divide a panel.

    Args:
        x (ArrayLike): of shape (marks,), increasing.
        columns (int): the number of columns into which the range of x is cut. Default: 2000.

    Returns:
        NDArray, float64, increasing: all positions if there are at most ``columns`` marks.

    Examples:
        >>> one_per_column([0, 1, 2, 99], columns=2).tolist()
        [0.0, 99.0]
    """
    across = np.asarray(x, np.float64)
    if len(across) <= columns:
        return across
    column = np.floor((across - across[0]) / np.ptp(across) * columns)
    return across[np.unique(column, return_index=True)[1]]


def gather(x: ArrayLike, y: ArrayLike, blocks: int) -> tuple[Floats, Floats, Floats, Floats]:
    """Group the points of a line into blocks, whose medians show the line without its noise.

    Args:
        x (ArrayLike): of shape (points,), increasing.
        y (ArrayLike): of shape (points,); inf and nan are ignored.
        blocks (int): the number of blocks, whose sizes differ by at most one point; at most the number of points.

    Returns:
        tuple of four float64 arrays of shape (blocks,): the middle of each block in x, and the lowest, the median and
        the highest y in it, nan where a block has no finite number.

    Examples:
        >>> middle, _, median, highest = gather([1, 2, 3, 4, 5, 6], [1, 2, 900, 5, float("nan"), 7], 2)
        >>> middle.tolist(), median.tolist(), highest.tolist()
        ([2.0, 5.0], [2.0, 6.0], [900.0, 7.0])
    """
    rows = []
    for block in np.array_split(np.column_stack([x, y]), blocks):
        across, values = block.T
        finite = values[np.isfinite(values)]
        extremes = (finite.min(), np.median(finite), finite.max()) if len(finite) else (math.nan,) * 3
        rows.append(((across[0] + across[-1]) / 2, *extremes))
    middle, lowest, median, highest = np.array(rows, np.float64).T
    return middle, lowest, median, highest


def thinned(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Return the visible points of a line: the first, lowest, highest and last point in each column of the panel.

    Args:
        x (NDArray): float64 of shape (points,), increasing.
        y (NDArray): float64 of shape (points,); the first nan of each column is kept, and breaks the line.

    Returns:
        tuple of x and y, with all points if the line has at most 50,000.

    Examples:
        >>> x = np.arange(1e6)
        >>> few = thinned(x, np.sin(x))
        >>> len(few[0]) <= 4 * 2000, bool(few[1].max() == np.sin(x).max())
        (True, True)
    """
    if len(x) <= _MANY_POINTS:
        return x, y
    points: list[int] = []
    for block in np.array_split(np.arange(len(x)), _COLUMNS):
        first, values = int(block[0]), y[block[0] : block[-1] + 1]
        known = ~np.isnan(values)
        places = {0, len(values) - 1} | ({int(np.argmin(known))} if not known.all() else set())
        if known.any():
            places |= {int(np.nanargmin(values)), int(np.nanargmax(values))}
        points += [first + point for point in sorted(places)]
    return x[points], y[points]
