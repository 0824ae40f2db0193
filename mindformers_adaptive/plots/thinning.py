"""Fewer marks, and lines without their noise, for long runs. Lines themselves are thinned by matplotlib."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["gather", "one_per_column"]

# About twice the pixels of a panel that is 1200 dots wide.
_COLUMNS = 2000

_Floats = NDArray[np.float64]


def one_per_column(x: ArrayLike, columns: int = _COLUMNS) -> NDArray[np.intp]:
    """Return the places of the marks to draw: the first in each column of the panel.

    Args:
        x (ArrayLike): of shape (marks,), increasing.
        columns (int): into how many the range of x is cut. Default: 2000.

    Returns:
        NDArray of increasing places: all of them up to ``columns`` marks.

    Examples:
        >>> one_per_column([0, 1, 2, 99], columns=2).tolist()
        [0, 3]
    """
    across = np.asarray(x, np.float64)
    if len(across) <= columns:
        return np.arange(len(across))
    column = np.floor((across - across[0]) / (across[-1] - across[0]) * columns)
    kept: NDArray[np.intp] = np.unique(column, return_index=True)[1]
    return kept


def gather(x: ArrayLike, y: ArrayLike, blocks: int) -> tuple[_Floats, _Floats, _Floats, _Floats]:
    """Gather the points of a line into blocks; their medians show it without its noise.

    Args:
        x (ArrayLike): of shape (points,), increasing.
        y (ArrayLike): of shape (points,); inf and nan do not count.
        blocks (int): how many, of equal numbers of points to within one; at most as many as there are points.

    Returns:
        tuple of four float64 arrays of shape (blocks,): the middle of each block in x, and the lowest, the median and
        the highest y in it, nan where a block has no finite number.

    Examples:
        >>> middle, _, median, highest = gather([1, 2, 3, 4, 5, 6], [1, 2, 900, 5, float("nan"), 7], 2)
        >>> middle.tolist(), median.tolist(), highest.tolist()
        ([2.0, 5.0], [2.0, 6.0], [900.0, 7.0])
    """
    rows = []
    for across, values in zip(np.array_split(x, blocks), np.array_split(y, blocks), strict=True):
        finite = values[np.isfinite(values)]
        extremes = (finite.min(), np.median(finite), finite.max()) if len(finite) else (math.nan,) * 3
        rows.append(((across[0] + across[-1]) / 2, *extremes))
    middle, lowest, median, highest = np.array(rows, np.float64).T
    return middle, lowest, median, highest
