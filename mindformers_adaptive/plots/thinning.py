"""Fewer points for long runs: what would fall on the same pixels is drawn once, and nothing that sticks out is lost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["COLUMNS", "Blocks", "gather", "thin_line", "thin_marks"]

# Columns of a picture: about twice the pixels of a panel that is 1200 dots wide.
COLUMNS = 2000


def thin_line(values: ArrayLike, columns: int = COLUMNS) -> NDArray[np.intp]:
    """Return the places of the points to draw of a line: of each column the first, lowest, highest and last.

    Args:
        values (ArrayLike): of shape (points,); nan, a break in the line, may be lost among other points of a column.
        columns (int): into how many the points are gathered, evenly by place. Default: 2000.

    Returns:
        NDArray of increasing places: all of them up to 4 * columns points, else at most so many.

    Examples:
        >>> thin_line([0.0, 1.0, 5.0, 1.0, 1.0, 1.0, -3.0, 1.0, 1.0], columns=1).tolist()
        [0, 2, 6, 8]
    """
    given = np.asarray(values, np.float64)
    if len(given) <= 4 * columns:
        return np.arange(len(given))
    places = _blocks(len(given), columns)
    table, rows = given[places], np.arange(columns)
    lowest = np.where(np.isnan(table), np.inf, table).argmin(axis=1)
    highest = np.where(np.isnan(table), -np.inf, table).argmax(axis=1)
    ends_and_extremes = [places[:, 0], places[rows, lowest], places[rows, highest], places[:, -1]]
    kept: NDArray[np.intp] = np.unique(np.concatenate(ends_and_extremes))
    return kept


def thin_marks(x: ArrayLike, y: ArrayLike, columns: int = COLUMNS) -> NDArray[np.intp]:
    """Return the places of the marks to draw: of those in one column and at one power of two, the first.

    Args:
        x (ArrayLike): of shape (marks,), increasing.
        y (ArrayLike): of shape (marks,), in powers of two.
        columns (int): into how many the range of x is cut. Default: 2000.

    Returns:
        NDArray of increasing places: all of them up to ``columns`` marks.

    Examples:
        >>> thin_marks([0, 1, 2, 99], [5.0, 5.0, 9.0, 5.0], columns=2).tolist()
        [0, 2, 3]
    """
    across = np.asarray(x, np.float64)
    if len(across) <= columns:
        return np.arange(len(across))
    column = np.floor((across - across[0]) / max(float(across[-1] - across[0]), 1.0) * columns)
    cells = np.column_stack([column, np.round(np.asarray(y, np.float64))])
    return np.sort(np.unique(cells, axis=0, return_index=True)[1])


@dataclass(frozen=True, eq=False)
class Blocks:
    """What points that were gathered into blocks have in common; all float64 of shape (blocks,).

    Attributes:
        middle (NDArray): of each block in x.
        lowest (NDArray), median (NDArray), highest (NDArray): of y, nan where a block has no finite number.
    """

    middle: NDArray[np.float64]
    lowest: NDArray[np.float64]
    median: NDArray[np.float64]
    highest: NDArray[np.float64]


def gather(x: ArrayLike, y: ArrayLike, blocks: int) -> Blocks:
    """Gather the points of a line into blocks; the medians show it without its noise, and outliers do not move them.

    Args:
        x (ArrayLike): of shape (points,), increasing.
        y (ArrayLike): of shape (points,); what is not finite is left out.
        blocks (int): into how many, evenly by place; at most as many as there are points.

    Examples:
        >>> found = gather([1, 2, 3, 4, 5, 6], [1, 2, 900, 5, float("nan"), 7], 2)
        >>> found.middle.tolist(), found.median.tolist(), found.highest.tolist()
        ([2.0, 5.0], [2.0, 6.0], [900.0, 7.0])
    """
    across, given = np.asarray(x, np.float64), np.asarray(y, np.float64)
    places = _blocks(len(given), blocks)
    # A place that a shorter block repeats must not count twice.
    repeated = np.diff(places, axis=1, prepend=-1) == 0
    table = np.where(repeated | ~np.isfinite(given[places]), np.nan, given[places])
    some = np.isfinite(table).any(axis=1)
    found = np.full((3, blocks), np.nan)
    found[:, some] = np.nanmin(table[some], axis=1), np.nanmedian(table[some], axis=1), np.nanmax(table[some], axis=1)
    return Blocks((across[places[:, 0]] + across[places[:, -1]]) / 2, *found)


def _blocks(points: int, blocks: int) -> NDArray[np.intp]:
    """Return the places of each block's points as a row; shorter rows repeat their last place."""
    edges = np.linspace(0, points, blocks + 1).astype(np.intp)
    starts, ends = edges[:-1], edges[1:]
    places: NDArray[np.intp] = np.minimum(starts[:, None] + np.arange((ends - starts).max()), ends[:, None] - 1)
    return places
