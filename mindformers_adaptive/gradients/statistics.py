"""Statistics of the magnitudes in one or more arrays: counts, extremes, norm, histogram and what underflow costs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mindformers_adaptive.gradients.signed import SignedHistogram, merge_signed, read_signed, signed_histogram
from mindformers_adaptive.rules.formats import FLOAT16, Format

_Floats = NDArray[np.float64]

# Arrays are measured in chunks of this many elements, so that the float64 copies stay small.
_PIECE = 2**20

# If the rounding error in a gradient is more than this share of its norm, nothing can be said about what it loses. In
# networks of attention layers, the gradients of key biases are 0 but for rounding, and this share is 0.9 to 2.6.
_MOST_NOISE = 0.5

# The exponent of the smallest subnormal number of float64.
_LOWEST_EXPONENT = -1074


@dataclass(frozen=True)
class ArrayStatistics:
    """Statistics of the magnitudes in one array, or in several arrays together.

    Attributes:
        size (int): number of elements.
        zeros (int): how many of them are exactly 0.
        infs_and_nans (int): how many of them are inf or NaN; the attributes below ignore these.
        largest (float): the largest magnitude; 0.0 if there is none.
        smallest (float, optional): the smallest magnitude above 0; None if there is none.
        norm (float): the square root of the sum of the squares, in float64.
        histogram (dict[int, int]): how many magnitudes lie in [2^e, 2^(e+1)), by exponent e; in increasing order,
            without empty bins. In FP16, e lies between -24 and 15.
        underflowed (int, optional): how many elements are 0 here and not 0 in the reference; None without a reference.
        lost (float, optional): the norm of the difference to the reference; None without a reference, and for an array
            that is not finite.
        reference_norm (float): the norm of the reference, in the unit of ``lost``.
        noise (float, optional): the norm of the rounding error in the reference, in the unit of ``lost``; None if it
            was not measured.
        signed (SignedHistogram, optional): the histogram of the values with their signs; None if it was not measured or
            no value is finite.
    """

    size: int
    zeros: int = 0
    infs_and_nans: int = 0
    largest: float = 0.0
    smallest: float | None = None
    norm: float = 0.0
    histogram: dict[int, int] = field(default_factory=dict)
    underflowed: int | None = None
    lost: float | None = None
    reference_norm: float = 0.0
    noise: float | None = None
    signed: SignedHistogram | None = None

    @property
    def lost_share(self) -> float | None:
        """How much of an array's norm is lost, as a share, to underflow and to the coarseness of subnormal numbers.

        0 means that nothing is lost. 1 means that everything is lost, or that the error is larger than the array. None
        if the share is not known, if the reference is all 0, or if the reference is mostly rounding error.
        """
        if self.lost is None or not self.reference_norm or self.is_noise:
            return None
        return min(self.lost / self.reference_norm, 1.0)

    @property
    def is_noise(self) -> bool:
        """Whether the reference is mostly rounding error, as the gradient of a bias that is added to all keys."""
        return self.noise is not None and self.noise > _MOST_NOISE * self.reference_norm

    def subnormal_share(self, gradient_format: Format = FLOAT16) -> float:
        """Return the share of elements that are not 0, but smaller than the smallest normal number of a format."""
        _, normal, _ = gradient_format.exponents
        return self.share(sum(number for exponent, number in self.histogram.items() if exponent < normal)) or 0.0

    def share(self, count: int | None) -> float | None:
        """Return a count as a share of all elements, from 0 to 1; None for a count of None, 0.0 for an empty array."""
        if count is None:
            return None
        return count / self.size if self.size else 0.0

    def divided_by(self, divisor: float) -> ArrayStatistics:
        """Divide the array by a positive number, and return its statistics without the histogram of magnitudes."""
        smallest = None if self.smallest is None else self.smallest / divisor
        divided = replace(self, largest=self.largest / divisor, smallest=smallest, norm=self.norm / divisor)
        signed = None if self.signed is None else self.signed.divided_by(divisor)
        return replace(divided, histogram={}, signed=signed)

    def to_dict(self) -> dict[str, object]:
        """Return the fields for JSON, with shares such as ``zeros_share``, but not what depends on the reference."""
        plain = {name: value for name, value in vars(self).items() if name not in ("lost", "reference_norm", "noise")}
        return {
            **plain,
            **{f"{name}_share": self.share(getattr(self, name)) for name in ("zeros", "underflowed", "infs_and_nans")},
            "histogram": {str(exponent): count for exponent, count in self.histogram.items()},
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> ArrayStatistics:
        """Return the statistics from a dict that :meth:`to_dict` returned, or that its JSON file holds.

        Raises:
            KeyError: if there is no histogram.
            TypeError: if there is no size.
        """
        known = {field.name: content[field.name] for field in fields(cls) if field.name in content}
        known["signed"] = read_signed(content.get("signed"))
        return cls(**{**known, "histogram": {int(exponent): n for exponent, n in content["histogram"].items()}})


def array_statistics(
    array: ArrayLike, reference: ArrayLike | None = None, ratio: float = 1.0, unit: float = 1.0
) -> ArrayStatistics:
    """Return the statistics of the magnitudes in an array.

    Args:
        array (ArrayLike): the array, of any shape and any real dtype.
        reference (ArrayLike, optional): a finite array of the same shape, to count underflowed elements and to measure
            what is lost. Default: None, both stay unknown.
        ratio (float): the array as a multiple of the reference if nothing were lost. Default: 1.
        unit (float): the divisor of ``lost`` and ``reference_norm``. Default: 1.

    Examples:
        >>> statistics = array_statistics([0.0, -0.25, 3.0, float("inf")])
        >>> statistics.largest, statistics.smallest, statistics.zeros, statistics.infs_and_nans, statistics.histogram
        (3.0, 0.25, 1, 1, {-2: 1, 1: 1})
        >>> statistics = array_statistics([0.0, 1.0], reference=[6.0, 2.0], ratio=0.5)
        >>> statistics.underflowed, statistics.lost
        (1, 3.0)
    """
    flat, expected = np.asarray(array).reshape(-1), None if reference is None else np.asarray(reference).reshape(-1)
    pieces = []
    for start in range(0, max(flat.size, 1), _PIECE):
        piece = slice(start, start + _PIECE)
        at_best = None if expected is None else ratio * expected[piece].astype(np.float64)
        pieces.append(_piece_statistics(flat[piece].astype(np.float64), at_best, unit))
    return merge_statistics(pieces)


def merge_statistics(statistics: Iterable[ArrayStatistics]) -> ArrayStatistics:
    """Return the statistics of several arrays as if they were one.

    Args:
        statistics (Iterable[ArrayStatistics]): the statistics of each array; if ``underflowed`` or ``lost`` is None for
            any array, it is None in the result.

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
    lost = [part.lost for part in parts if part.lost is not None]
    noise = [part.noise for part in parts if part.noise is not None]
    return ArrayStatistics(
        size=sum(part.size for part in parts),
        zeros=sum(part.zeros for part in parts),
        infs_and_nans=sum(part.infs_and_nans for part in parts),
        largest=max((part.largest for part in parts), default=0.0),
        smallest=min((part.smallest for part in parts if part.smallest is not None), default=None),
        norm=math.hypot(*(part.norm for part in parts)),
        histogram=dict(sorted(histogram.items())),
        underflowed=sum(underflows) if len(underflows) == len(parts) else None,
        lost=math.hypot(*lost) if len(lost) == len(parts) else None,
        reference_norm=math.hypot(*(part.reference_norm for part in parts)),
        noise=math.hypot(*noise) if noise else None,
        signed=merge_signed(part.signed for part in parts),
    )


def _piece_statistics(piece: _Floats, expected: _Floats | None, unit: float) -> ArrayStatistics:
    # In float64, no square of a float32 number overflows, and every subnormal number of float32 is a normal number.
    magnitudes = np.abs(piece)
    finite = magnitudes[np.isfinite(magnitudes)]
    nonzero = finite[finite > 0]
    # The mantissa that np.frexp returns lies in [0.5, 1), so its exponents are one higher than the exponents of the
    # histogram.
    counts = np.bincount(np.frexp(nonzero)[1] - _LOWEST_EXPONENT - 1)
    is_finite = finite.size == piece.size
    return ArrayStatistics(
        size=piece.size,
        zeros=finite.size - nonzero.size,
        infs_and_nans=piece.size - finite.size,
        largest=float(nonzero.max(initial=0.0)),
        smallest=float(nonzero.min()) if nonzero.size else None,
        norm=float(np.sqrt(np.sum(np.square(nonzero)))),
        histogram={int(bin_index) + _LOWEST_EXPONENT: int(counts[bin_index]) for bin_index in np.flatnonzero(counts)},
        underflowed=None if expected is None else int(np.count_nonzero((piece == 0) & (expected != 0))),
        lost=float(np.linalg.norm(piece - expected)) / unit if is_finite and expected is not None else None,
        reference_norm=0.0 if expected is None else float(np.linalg.norm(expected)) / unit,
        signed=signed_histogram(piece),
    )
