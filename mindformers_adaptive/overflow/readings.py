"""The record of a pass through a network: the values at each cell and operator, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.rules.formats import FORMATS

__all__ = ["BATCH", "CASTS", "Call", "Gradient", "Operand", "Pass", "Reading", "largest_of", "read_values"]

# The names of operators that only change the dtype of a tensor.
CASTS = {"Cast", "Astype", "To", "Type", "TypeAs"}

# The value of Operand.source for an input that is a part of the batch.
BATCH = -1

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
        """The powers of two by which the values may grow before overflow; 0 after overflow, inf if all values are 0."""
        if not self.finite:
            return 0.0
        # Subtract logarithms, because the quotient of limit and largest value may be too large for a float.
        return math.log2(self.limit) - math.log2(self.largest) if self.largest else math.inf

    def to_dict(self) -> dict[str, object]:
        """Return a dict with the dtype and size of the tensor, its largest magnitude, and its number of inf and NaN."""
        return {name: getattr(self, name) for name in ("dtype", "size", "largest", "infs_and_nans")}


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


@dataclass(frozen=True, slots=True)
class Operand:
    """An input tensor of a recorded call of a cell or operator.

    Attributes:
        reading (Reading): the magnitudes in the tensor.
        source (int, optional): the index of the call that computed the tensor, or ``BATCH``; None if it is not known.
        weight (str, optional): the name of the Parameter, if the tensor is a Parameter.
        buffer (str, optional): the layer and its attribute, if the tensor is a constant Tensor that a layer holds.
    """

    reading: Reading
    source: int | None = None
    weight: str | None = None
    buffer: str | None = None

    @property
    def is_computed(self) -> bool:
        """Whether the tensor comes from a recorded call of a cell or operator."""
        return self.source is not None and self.source != BATCH


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient of an input or output of a recorded call of a cell or operator.

    Attributes:
        of_output (bool): whether the tensor is an output of the call; otherwise it is an input. The gradient of an
            output is the sum over all its uses; the gradient of an input is the contribution of this call.
        index (int): the index of the output or input.
        reading (Reading): the magnitudes in the gradient.
    """

    of_output: bool
    index: int
    reading: Reading


@dataclass(slots=True)
class Call:
    """The record of one call of a cell or operator in a pass.

    Attributes:
        index (int): the position of the call in the order in which calls begin.
        layer (str): the name of the cell, or of the innermost cell that calls the operator; "" is the whole network.
        kind (str): the class of the cell, or the name of the operator.
        operator (bool): whether the call is a call of an operator.
        parent (int, optional): the index of the call of the surrounding cell; None for the whole network.
        attribute (str): the attribute of the cell that holds the operator; "" if there is no such attribute.
        inputs (list[Operand]): the floating-point inputs.
        outputs (list[Reading]): the floating-point outputs.
        gradients (list[Gradient]): the gradients of inputs and outputs, in the order of the backward pass.
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
        """The layer of the call and the attribute that holds the operator, such as ``attention.batch_matmul``."""
        return ".".join(filter(None, (self.layer, self.attribute)))

    def gets_gradient(self, index: int) -> bool:
        """Return whether the backward pass computed a gradient of an input of this call."""
        return any(not gradient.of_output and gradient.index == index for gradient in self.gradients)


@dataclass(frozen=True)
class Pass:
    """The record of one forward and backward pass of a batch at one loss scale.

    Attributes:
        loss_scale (float): the loss scale of the pass.
        loss (float): the loss, not multiplied by the loss scale.
        calls (list[Call]): the calls, in the order in which they begin.
        backward (list[tuple[int, Gradient]]): the gradients in the order of the backward pass, each after the index of
            its call.
        weights (Mapping[str, Reading]): the gradient of each trainable Parameter, by name.
        loss_source (int, optional): the index of the call that computed the loss.
        sees_operators (bool): whether the pass shows operators, and which values get a gradient in training. In graph
            mode it shows neither. Default: True.
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
        """Yield the recorded calls that were made within a call of a cell, at any depth."""
        within = {call.index}
        for other in self.calls[call.index + 1 :]:
            if other.parent in within:
                within.add(other.index)
                yield other
