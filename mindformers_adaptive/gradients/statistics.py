"""How the magnitudes of an array spread: what FP16 loses below, and what it cannot hold above."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["ArrayStatistics", "array_statistics", "count_underflows", "merge_statistics"]

# An array is read in pieces of this many elements, so that the float64 copies stay small.
_PIECE = 2**20


@dataclass(frozen=True)
class ArrayStatistics:
    """What is known of the magnitudes of one array, or of several together.

    Attributes:
        size (int): how many elements.
        zeros (int): how many of them are exactly 0.
        infs_and_nans (int): how many of them are inf or NaN; all that follows leaves them out.
        largest (float): the largest magnitude; 0.0 where there is none.
        smallest (float, optional): the smallest magnitude that is not 0; None where all are 0.
        norm (float): the square root of the sum of the squares, in float64.
        histogram (dict[int, int]): how many magnitudes lie in [2^e, 2^(e+1)), by exponent e; in increasing order,
            without empty ones. Those of FP16 lie between e = -24 and e = 15.
        underflowed (int, optional): how many elements are 0 here and not 0 at the reference; None where there is
            nothing to compare with.
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
        """Return a count as a share of all elements, between 0 and 1; None of None, and 0.0 of an empty array."""
        if count is None:
            return None
        return count / self.size if self.size else 0.0

    def to_dict(self) -> dict[str, object]:
        """Return everything as JSON can hold it, with the shares of zeros, of underflows and of inf and NaN."""
        return {
            "size": self.size,
            "largest": self.largest,
            "smallest": self.smallest,
            "norm": self.norm,
            "zeros": self.zeros,
            "zeros_share": self.share(self.zeros),
            "underflowed": self.underflowed,
            "underflowed_share": self.share(self.underflowed),
            "infs_and_nans": self.infs_and_nans,
            "infs_and_nans_share": self.share(self.infs_and_nans),
            "histogram": {str(exponent): count for exponent, count in self.histogram.items()},
        }


def array_statistics(array: ArrayLike, underflowed: int | None = None) -> ArrayStatistics:
    """Return the statistics of an array.

    Args:
        array (ArrayLike): of any shape and any real dtype.
        underflowed (int, optional): see :class:`ArrayStatistics`. Default: None.

    Examples:
        >>> found = array_statistics([0.0, -0.25, 3.0, float("inf")])
        >>> found.largest, found.smallest, found.zeros, found.infs_and_nans, found.histogram
        (3.0, 0.25, 1, 1, {-2: 1, 1: 1})
    """
    flat = np.asarray(array).reshape(-1)
    pieces = [_piece_statistics(flat[start : start + _PIECE]) for start in range(0, flat.size, _PIECE)]
    return replace(merge_statistics(pieces), underflowed=underflowed)


def merge_statistics(statistics: Iterable[ArrayStatistics]) -> ArrayStatistics:
    """Return the statistics that all the arrays have together, as if they were one array.

    Args:
        statistics (Iterable[ArrayStatistics]): one for each array; ``underflowed`` is None if it is in any of them.

    Examples:
        >>> together = merge_statistics([array_statistics([3.0, 0.0]), array_statistics([4.0])])
        >>> together.norm, together.size, together.histogram
        (5.0, 3, {1: 1, 2: 1})
    """
    parts = list(statistics)
    histogram: Counter[int] = Counter()
    for part in parts:
        histogram.update(part.histogram)
    underflows = [part.underflowed for part in parts]
    known = [count for count in underflows if count is not None]
    return ArrayStatistics(
        size=sum(part.size for part in parts),
        zeros=sum(part.zeros for part in parts),
        infs_and_nans=sum(part.infs_and_nans for part in parts),
        largest=max((part.largest for part in parts), default=0.0),
        smallest=min((part.smallest for part in parts if part.smallest is not None), default=None),
        norm=math.hypot(*(part.norm for part in parts)),
        histogram=dict(sorted(histogram.items())),
        underflowed=sum(known) if len(known) == len(underflows) else None,
    )


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


def _piece_statistics(piece: NDArray[Any]) -> ArrayStatistics:
    # float64 has room for the squares and for every subnormal of float32.
    magnitudes = np.abs(piece.astype(np.float64))
    finite = magnitudes[np.isfinite(magnitudes)]
    nonzero = finite[finite > 0]
    return ArrayStatistics(
        size=piece.size,
        zeros=finite.size - nonzero.size,
        infs_and_nans=piece.size - finite.size,
        largest=float(nonzero.max(initial=0.0)),
        smallest=float(nonzero.min()) if nonzero.size else None,
        norm=float(np.sqrt(np.sum(np.square(nonzero)))),
        histogram=_histogram(nonzero),
    )


def _histogram(nonzero: NDArray[np.float64]) -> dict[int, int]:
    if not nonzero.size:
        return {}
    # frexp gives a mantissa in [0.5, 1).
    exponents = np.frexp(nonzero)[1].astype(np.int64) - 1
    lowest = int(exponents.min())
    counts = np.bincount(exponents - lowest).tolist()
    return {lowest + place: count for place, count in enumerate(counts) if count}
