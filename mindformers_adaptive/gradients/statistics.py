"""Statistics of the magnitudes of an array: its range, its zeros, and a histogram by powers of two."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["ArrayStatistics", "array_statistics", "count_underflows", "lost_norm", "merge_by_name", "merge_statistics"]

# An array is read in pieces of this many elements, so that the float64 copies stay small.
_PIECE = 2**20

# Of the smallest subnormal of float64.
_LOWEST_EXPONENT = -1074


@dataclass(frozen=True)
class ArrayStatistics:
    """The magnitudes of one array, or of several together.

    Attributes:
        size (int): number of elements.
        zeros (int): how many of them are exactly 0.
        infs_and_nans (int): how many of them are inf or NaN; the attributes below ignore these.
        largest (float): the largest magnitude; 0.0 if there is none.
        smallest (float, optional): the smallest magnitude above 0; None if there is none.
        norm (float): the square root of the sum of the squares, in float64.
        histogram (dict[int, int]): how many magnitudes lie in [2^e, 2^(e+1)), by exponent e; in increasing order,
            without empty ones. Those of FP16 lie between e = -24 and e = 15.
        underflowed (int, optional): how many elements are 0 here and not 0 at the reference; None without a reference.
    """

    size: int
    zeros: int = 0
    infs_and_nans: int = 0
    largest: float = 0.0
    smallest: float | None = None
    norm: float = 0.0
    histogram: dict[int, int] = field(default_factory=dict)
    underflowed: int | None = None

    def share(self, count: int | None) -> float | None:
        """Return a count as a share of all elements, between 0 and 1; None for None, and 0.0 for an empty array."""
        if count is None:
            return None
        return count / self.size if self.size else 0.0

    def divided_by(self, divisor: float) -> ArrayStatistics:
        """Return the statistics of the array divided by a positive number, without the histogram."""
        smallest = None if self.smallest is None else self.smallest / divisor
        return replace(self, largest=self.largest / divisor, smallest=smallest, norm=self.norm / divisor, histogram={})

    def to_dict(self) -> dict[str, object]:
        """Return all attributes as JSON can hold them, and the counts as shares too."""
        counts = {"zeros": self.zeros, "underflowed": self.underflowed, "infs_and_nans": self.infs_and_nans}
        return {
            **vars(self),
            **{f"{name}_share": self.share(count) for name, count in counts.items()},
            "histogram": {str(exponent): count for exponent, count in self.histogram.items()},
        }


def array_statistics(array: ArrayLike, underflowed: int | None = None) -> ArrayStatistics:
    """Return the statistics of an array.

    Args:
        array (ArrayLike): of any shape and any real dtype.
        underflowed (int, optional): see :class:`ArrayStatistics`. Default: None.

    Examples:
        >>> statistics = array_statistics([0.0, -0.25, 3.0, float("inf")])
        >>> statistics.largest, statistics.smallest, statistics.zeros, statistics.infs_and_nans, statistics.histogram
        (3.0, 0.25, 1, 1, {-2: 1, 1: 1})
    """
    flat = np.asarray(array).reshape(-1)
    pieces = [_piece_statistics(flat[start : start + _PIECE]) for start in range(0, flat.size, _PIECE)]
    return replace(merge_statistics(pieces), underflowed=underflowed)


def merge_statistics(statistics: Iterable[ArrayStatistics]) -> ArrayStatistics:
    """Return the statistics of several arrays as if they were one.

    Args:
        statistics (Iterable[ArrayStatistics]): one for each array; if ``underflowed`` is None in any, it is None.

    Examples:
        >>> together = merge_statistics([array_statistics([3.0, 0.0]), array_statistics([4.0])])
        >>> together.norm, together.size, together.histogram
        (5.0, 3, {1: 1, 2: 1})
    """
    parts = list(statistics)
    histogram: Counter[int] = Counter()
    for part in parts:
        histogram.update(part.histogram)
    underflows = [part.underflowed for part in parts if part.underflowed is not None]
    return ArrayStatistics(
        size=sum(part.size for part in parts),
        zeros=sum(part.zeros for part in parts),
        infs_and_nans=sum(part.infs_and_nans for part in parts),
        largest=max((part.largest for part in parts), default=0.0),
        smallest=min((part.smallest for part in parts if part.smallest is not None), default=None),
        norm=math.hypot(*(part.norm for part in parts)),
        histogram=dict(sorted(histogram.items())),
        underflowed=sum(underflows) if len(underflows) == len(parts) else None,
    )


def merge_by_name(parts: Sequence[Mapping[str, ArrayStatistics]]) -> dict[str, ArrayStatistics]:
    """Return :func:`merge_statistics` for each name; all parts have the same names."""
    return {name: merge_statistics(part[name] for part in parts) for name in parts[0]}


def count_underflows(array: ArrayLike, reference_is_zero: ArrayLike) -> int:
    """Return how many elements are exactly 0 in an array and were not at the reference.

    Args:
        array (ArrayLike): of any shape.
        reference_is_zero (ArrayLike): bool of the same shape.

    Examples:
        >>> count_underflows([0.0, 0.0, 1.0], [True, False, False])
        1
    """
    return int(np.count_nonzero((np.asarray(array) == 0) & ~np.asarray(reference_is_zero)))


def lost_norm(array: ArrayLike, reference: ArrayLike, ratio: float) -> float:
    """Return the norm of what an array lacks of ``ratio`` times the reference, in float64.

    Args:
        array (ArrayLike): of any shape, finite.
        reference (ArrayLike): of the same shape.
        ratio (float): what the array would be as a multiple of the reference, if nothing were lost.

    Examples:
        >>> lost_norm([0.0, 1.0], [6.0, 2.0], 0.5)
        3.0
    """
    flat, expected = np.asarray(array).reshape(-1), np.asarray(reference).reshape(-1)
    squares = 0.0
    for start in range(0, flat.size, _PIECE):
        piece = slice(start, start + _PIECE)
        squares += float(np.sum(np.square(flat[piece].astype(np.float64) - ratio * expected[piece].astype(np.float64))))
    return math.sqrt(squares)


def _piece_statistics(piece: NDArray[Any]) -> ArrayStatistics:
    # float64 holds the squares and every subnormal of float32.
    magnitudes = np.abs(piece.astype(np.float64))
    finite = magnitudes[np.isfinite(magnitudes)]
    nonzero = finite[finite > 0]
    # The mantissa of frexp lies in [0.5, 1), so its exponents are one higher.
    counts = np.bincount(np.frexp(nonzero)[1] - _LOWEST_EXPONENT - 1)
    return ArrayStatistics(
        size=piece.size,
        zeros=finite.size - nonzero.size,
        infs_and_nans=piece.size - finite.size,
        largest=float(nonzero.max(initial=0.0)),
        smallest=float(nonzero.min()) if nonzero.size else None,
        norm=float(np.sqrt(np.sum(np.square(nonzero)))),
        histogram={int(place) + _LOWEST_EXPONENT: int(counts[place]) for place in np.flatnonzero(counts)},
    )
