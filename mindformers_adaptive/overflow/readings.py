"""What a pass through a network showed: the values at each cell and operator, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.rules.formats import FORMATS

__all__ = ["BATCH", "CASTS", "Call", "Gradient", "Operand", "Pass", "Reading", "largest_of", "read_values"]

# The names of operators that only change the dtype.
CASTS = {"Cast", "Astype", "To", "Type", "TypeAs"}

# The source of a value that is a part of the batch.
BATCH = -1

# By dtype, the largest finite number. Values of 8-bit formats are held in wider tensors here.
_LARGEST = {name: FORMATS[name].largest for name in ("float16", "bfloat16")}
_LARGEST |= {"float32": float(np.finfo(np.float32).max), "float64": float(np.finfo(np.float64).max)}


@dataclass(frozen=True, slots=True)
class Reading:
    """The magnitudes of one tensor.

    Attributes:
        dtype (str): as MindSpore calls it, in small letters.
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
        """Whether no element is inf or NaN."""
        return not self.infs_and_nans

    @property
    def only_minus_inf(self) -> bool:
        """Whether an element is -inf, and none is +inf or NaN, as in an additive mask."""
        return self.infs_and_nans > self.nans + self.positive_infs == 0

    @property
    def limit(self) -> float:
        """The largest finite number of the dtype."""
        return _LARGEST.get(self.dtype, _LARGEST["float32"])

    @property
    def headroom(self) -> float:
        """By how many powers of two the values may grow; 0 where one has overflowed, inf where all are 0."""
        if not self.finite:
            return 0.0
        # Subtract logarithms, because the quotient may be beyond a float.
        return math.log2(self.limit) - math.log2(self.largest) if self.largest else math.inf

    def to_dict(self) -> dict[str, object]:
        """Return everything by name."""
        return {name: getattr(self, name) for name in ("dtype", "size", "largest", "infs_and_nans")}


def read_values(array: NDArray[np.floating[Any]], dtype: str) -> Reading:
    """Return what there is to know of an array.

    Args:
        array (numpy.ndarray): of float16, float32 or float64.
        dtype (str): the dtype of the tensor that it was, which NumPy may not have.
    """
    # The bits of a magnitude, read as an integer, are in its order; this takes a tenth of the time of abs and isfinite.
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
    """Return the largest finite magnitude of several readings, None without any."""
    return max((reading.largest for reading in readings), default=None)


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that goes into a call.

    Attributes:
        reading (Reading): its magnitudes.
        source (int, optional): the index of the call that it comes from, or ``BATCH``; None where it is not known.
        weight (str, optional): the name of the Parameter that it is.
        buffer (str, optional): the layer and the attribute of the Tensor that it is, if a layer holds it.
    """

    reading: Reading
    source: int | None = None
    weight: str | None = None
    buffer: str | None = None

    @property
    def is_computed(self) -> bool:
        """Whether the tensor comes from a call that was seen."""
        return self.source is not None and self.source != BATCH


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient of a tensor of a call.

    Attributes:
        of_output (bool): whether the tensor is an output of the call, else it is an input. The gradient of an output is
            the sum over all that use it; the gradient of an input is what this call gives back.
        index (int): which output, or input.
        reading (Reading): its magnitudes.
    """

    of_output: bool
    index: int
    reading: Reading


@dataclass(slots=True)
class Call:
    """One call of a cell or of an operator.

    Attributes:
        index (int): its place in the order in which calls begin.
        layer (str): the name of the cell, or of the innermost cell that calls the operator; "" is the whole network.
        kind (str): the class of the cell, or the name of the operator.
        operator (bool): whether it is an operator.
        parent (int, optional): the index of the cell's call around it; None for the whole network.
        attribute (str): the name by which the cell knows the operator, if it does.
        inputs (list[Operand]): its inputs of floating point.
        outputs (list[Reading]): its outputs of floating point.
        gradients (list[Gradient]): in the order in which they came.
    """

    index: int
    layer: str
    kind: str
    operator: bool = False
    parent: int | None = None
    attribute: str = ""
    inputs: list[Operand] = field(default_factory=list)
    outputs: list[Reading] = field(default_factory=list)
    gradients: list[Gradient] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The layer with the attribute, ``attention.batch_matmul``."""
        return ".".join(filter(None, (self.layer, self.attribute)))

    def gets_gradient(self, index: int) -> bool:
        """Whether a gradient came back to an input."""
        return any(not gradient.of_output and gradient.index == index for gradient in self.gradients)


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass of a batch at a loss scale.

    Attributes:
        loss_scale (float): the scale.
        loss (float): the loss, without the scale.
        calls (list[Call]): in the order in which they begin.
        backward (list[tuple[int, Gradient]]): gradients in the order in which they came, with the index of their call.
        weights (Mapping[str, Reading]): by name of a trainable Parameter, its gradient.
        loss_source (int, optional): the call that the loss comes from.
        sees_operators (bool): whether operators were seen, and which values get a gradient in training; in graph mode
            they are not. Default: True.
    """

    loss_scale: float
    loss: float
    calls: list[Call]
    backward: list[tuple[int, Gradient]]
    weights: Mapping[str, Reading]
    loss_source: int | None = None
    sees_operators: bool = True

    @property
    def overflow(self) -> bool:
        """Whether a gradient of a Parameter has inf or NaN, so that a train step would be skipped."""
        return not all(reading.finite for reading in self.weights.values())

    def inside(self, call: Call) -> Iterator[Call]:
        """Yield the calls that a call makes itself, directly or by others."""
        within = {call.index}
        for other in self.calls[call.index + 1 :]:
            if other.parent in within:
                within.add(other.index)
                yield other
