"""Summarizes the magnitudes in one tensor: the largest and smallest, and the number of inf and NaN."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, is_dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.rules.formats import FLOAT16, FORMATS

# The largest finite number of each dtype. Tensors hold values in 8-bit formats as wider dtypes, so 8-bit formats are
# not listed.
_LARGEST = {name: FORMATS[name].largest for name in ("float16", "bfloat16")}
_LARGEST |= {"float32": float(np.finfo(np.float32).max), "float64": float(np.finfo(np.float64).max)}


@dataclass(frozen=True, slots=True)
class Reading:
    """A summary of the magnitudes in one tensor, such as the largest magnitude and the number of inf and NaN.

    Attributes:
        dtype (str): MindSpore's name of the dtype, in lower case.
        size (int): number of elements.
        largest (float): the largest finite magnitude; 0.0 if there is none.
        infs_and_nans (int): how many elements are inf or NaN.
        nans (int): how many elements are NaN.
        positive_infs (int): how many elements are +inf.
        smallest (float, optional): the smallest magnitude; None where it was not measured.

    Examples:
        >>> reading = read_values(np.array([1.0, -1024.0, np.inf], np.float16), "float16")
        >>> reading.largest, reading.infs_and_nans, reading.finite
        (1024.0, 1, False)
    """

    dtype: str
    size: int
    largest: float
    infs_and_nans: int = 0
    nans: int = 0
    positive_infs: int = 0
    smallest: float | None = None

    @property
    def finite(self) -> bool:
        """Whether no element of the tensor is inf or NaN."""
        return not self.infs_and_nans

    @property
    def only_minus_inf(self) -> bool:
        """Whether some element of the tensor is -inf and no element is +inf or NaN, as in an additive mask."""
        return self.infs_and_nans > self.nans + self.positive_infs == 0

    @property
    def limit(self) -> float:
        """The largest finite number of the tensor's dtype."""
        return _LARGEST.get(self.dtype, _LARGEST["float32"])

    @property
    def headroom(self) -> float:
        """By how many powers of two a tensor's values may grow before overflow; 0 after overflow, inf if all are 0."""
        if not self.finite:
            return 0.0
        # Subtract logarithms, because the quotient of limit and largest value may be too large for a float.
        return math.log2(self.limit) - math.log2(self.largest) if self.largest else math.inf


def read_values(array: NDArray[np.floating[Any]], dtype: str) -> Reading:
    """Return a Reading of an array: its largest and smallest magnitude, and its number of inf and NaN.

    Args:
        array (numpy.ndarray): an array of float16, float32 or float64.
        dtype (str): the dtype of the tensor from which the array was made, which NumPy may not have.
    """
    # The bits of magnitudes, read as unsigned integers, have the same order as the magnitudes. Comparing integers takes
    # a tenth of the time of abs and isfinite.
    integer = np.dtype(f"u{array.dtype.itemsize}")
    sign = integer.type(1 << (8 * array.dtype.itemsize - 1))
    bits = np.ascontiguousarray(array).reshape(-1).view(integer)
    magnitudes = bits & ~sign
    infinite = np.array(np.inf, array.dtype).view(integer)[()]
    bad = nans = positive = 0
    if magnitudes.max(initial=0) >= infinite:
        is_finite = magnitudes < infinite
        bad = bits.size - int(np.count_nonzero(is_finite))
        nans = int(np.count_nonzero(magnitudes > infinite))
        positive = int(np.count_nonzero(bits == infinite))
        magnitudes = magnitudes[is_finite]
    extremes = np.array([magnitudes.max(initial=0), magnitudes.min(initial=infinite)], integer).view(array.dtype)
    smallest = float(extremes[1]) if magnitudes.size else None
    return Reading(dtype, array.size, float(extremes[0]), bad, nans, positive, smallest)


def largest_of(readings: Iterable[Reading]) -> float | None:
    """Return the largest finite magnitude of several readings, or None if there is no reading."""
    return max((reading.largest for reading in readings), default=None)


@dataclass(frozen=True)
class WeightsBeyond:
    """The weights that FP16 cannot hold: a cast to FP16 turns them into inf.

    Attributes:
        elements (int): the number of elements that FP16 cannot hold.
        parameters (tuple[str, ...]): the Parameters with such elements; the Parameter with the largest element is
            first.
        largest (float): the largest finite magnitude in these Parameters.
        infs_and_nans (int): the number of elements that are inf or NaN even before a cast.
        weight_format (str): the format, always "float16".
    """

    elements: int
    parameters: tuple[str, ...]
    largest: float
    infs_and_nans: int
    weight_format: str = FLOAT16.name

    def __str__(self) -> str:
        more = f" and {len(self.parameters) - 1} more" if len(self.parameters) > 1 else ""
        where = f"{self.elements:,} elements, in {self.parameters[0]}{more}"
        if self.infs_and_nans == self.elements:
            return f"weights that are inf or NaN: {where}"
        bad = f"; {self.infs_and_nans:,} are inf or NaN as they are" if self.infs_and_nans else ""
        return f"weights that {FLOAT16.title} cannot hold: {where}, the largest {self.largest:.5g}{bad}"


def as_plain(value: object) -> object:
    """Return a Reading, or another dataclass with Readings in it, as a dict for JSON.

    The dict of a Reading has its limit and its headroom too; an infinite headroom is None.
    """
    if isinstance(value, Reading):
        headroom = value.headroom if math.isfinite(value.headroom) else None
        names = ("dtype", "size", "largest", "infs_and_nans", "limit")
        return {**{name: getattr(value, name) for name in names}, "headroom": headroom}
    if isinstance(value, list | tuple):
        return [as_plain(each) for each in value]
    return {name: as_plain(each) for name, each in vars(value).items()} if is_dataclass(value) else value
