"""Histograms of signed values, with bins of equal width from the lowest value to the highest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

# The number of bins of a histogram: enough for a picture, and few enough for a line of a record file.
_BINS = 64


class SignedHistogram(NamedTuple):
    """Histogram of signed values: the numbers of finite values in bins of equal width.

    Attributes:
        lowest (float), highest (float): the lower edge of the first bin and the upper edge of the last.
        counts (tuple[int, ...]): the number of values in each bin.
    """

    lowest: float
    highest: float
    counts: tuple[int, ...]

    @property
    def edges(self) -> NDArray[np.float64]:
        """The edges of the bins, one more than bins. If all values are equal, the edges lie just around this value."""
        low, high = self.lowest, self.highest
        if not high > low:
            low, high = np.nextafter(low, -np.inf), np.nextafter(high, np.inf)
        return np.linspace(low, high, len(self.counts) + 1)

    def divided_by(self, divisor: float) -> SignedHistogram:
        """Divide the values by a positive number, and return the histogram of the quotients."""
        return self._replace(lowest=self.lowest / divisor, highest=self.highest / divisor)

    def quantiles(self, shares: Sequence[float]) -> NDArray[np.float64]:
        """Return the quantiles at ``shares`` (0.5: the median), as if the values were evenly spread within each bin.

        Examples:
            >>> signed_histogram(np.linspace(-1.0, 3.0, 10001)).quantiles([0.25, 0.5]).round(2).tolist()
            [0.0, 1.0]
        """
        below = np.append(0, np.cumsum(self.counts)) / max(sum(self.counts), 1)
        return np.clip(np.interp(shares, below, self.edges), self.lowest, self.highest)


def signed_histogram(values: ArrayLike) -> SignedHistogram | None:
    """Return the histogram of an array's values, or None if no value is finite.

    Args:
        values (ArrayLike): of any shape and any real dtype.

    Examples:
        >>> found = signed_histogram([-1.0, 1.0, 1.0, float("inf")])
        >>> found.lowest, found.highest, found.counts[0], found.counts[-1]
        (-1.0, 1.0, 1, 2)
    """
    array = np.asarray(values, np.float64).reshape(-1)
    finite = array[np.isfinite(array)]
    if not finite.size:
        return None
    empty = SignedHistogram(float(finite.min()), float(finite.max()), (0,) * _BINS)
    return empty._replace(counts=tuple(np.histogram(finite, empty.edges)[0].tolist()))


def merge_signed(histograms: Iterable[SignedHistogram | None]) -> SignedHistogram | None:
    """Merge the histograms of several arrays, exact to within the width of their bins; None without a histogram.

    Examples:
        >>> merge_signed([signed_histogram([-1.0]), None, signed_histogram([1.0, 1.0])]).counts[-1]
        2
    """
    parts = [histogram for histogram in histograms if histogram is not None]
    if len(parts) < 2:
        return parts[0] if parts else None
    lowest, highest = min(part.lowest for part in parts), max(part.highest for part in parts)
    together = SignedHistogram(lowest, highest, (0,) * _BINS)
    # The number of values below each edge of the merged bins. Round these numbers, not their differences, so that no
    # value is lost.
    below = np.zeros(_BINS + 1)
    for part in parts:
        edges = part.edges
        # If all values of a histogram are equal, its edges lie just around this value. So move the first and the last
        # edge to the lowest and the highest value. Otherwise an edge could lie outside of the merged bins.
        edges[[0, -1]] = part.lowest, max(part.highest, edges[-2])
        below += np.interp(together.edges, edges, np.append(0, np.cumsum(part.counts)))
    below[-1] = sum(sum(part.counts) for part in parts)
    return together._replace(counts=tuple(np.diff(np.rint(below)).astype(int).tolist()))


def read_signed(content: Any) -> SignedHistogram | None:
    """Return the histogram from the list of its fields in a JSON file, or None if the file has no histogram."""
    return None if content is None else SignedHistogram(float(content[0]), float(content[1]), tuple(content[2]))
