"""Traces for replays of loss scaling: bounds on the largest loss scale (ceiling) at which a step does not overflow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mindformers_adaptive.rules.checks import LARGEST_FLOAT32, SMALLEST_FLOAT32
from mindformers_adaptive.rules.formats import FLOAT16, Format


@dataclass(frozen=True, eq=False)
class Trace:
    """The steps of a training, each with its *ceiling*: the largest loss scale at which the step does not overflow.

    A step at loss scale s overflows where s is above the ceiling. A log shows the ceiling within bounds only: a step
    that was applied at s has a ceiling of at least s, one that was skipped at s has a ceiling below s. So a trace
    keeps both bounds, and beside them the ceiling that is assumed between them.

    Attributes:
        name (str): what the trace is called in tables and pictures.
        ceiling (NDArray): float64 of shape (steps,), the ceiling that a replay uses; 0 where every scale overflows,
            inf where none does.
        lower_bound (NDArray): float64 of shape (steps,), the largest loss scale that is known not to overflow; 0 where
            nothing is known.
        upper_bound (NDArray): float64 of shape (steps,), the smallest loss scale that is known to overflow; inf where
            nothing is known.
        largest_gradient (NDArray, optional): float64 of shape (steps,), the largest absolute value of the step's
            gradients, unscaled; nan where it is not known. A rule is given it for the steps that are applied.
        gradient_format (Format): the format of the gradients. Default: float16.

    Raises:
        TypeError: if an argument that must be an array has another type.
        ValueError: if the arrays do not have one length, or a ceiling lies outside its bounds.

    Examples:
        >>> trace = Trace.exact("sudden drop", [2.0**16, 2.0**16, 2.0**10])
        >>> len(trace), float(trace.known([2.0**12, 2.0**12, 2.0**12]).mean())
        (3, 1.0)
    """

    name: str
    ceiling: NDArray[np.float64]
    lower_bound: NDArray[np.float64]
    upper_bound: NDArray[np.float64]
    largest_gradient: NDArray[np.float64] | None = None
    gradient_format: Format = FLOAT16

    def __post_init__(self) -> None:
        arrays = [self.ceiling, self.lower_bound, self.upper_bound, self.largest_gradient]
        require_one_length(f"trace {self.name!r}", *arrays)
        outside = ~((self.lower_bound <= self.ceiling) & ((self.ceiling < self.upper_bound) | np.isinf(self.ceiling)))
        if outside.any():
            step = int(np.flatnonzero(outside)[0])
            raise ValueError(
                f"The ceiling of each step must lie between its bounds, but in the trace {self.name!r} step {step} "
                f"(counted from 0) has the ceiling {self.ceiling[step]}, the lower bound {self.lower_bound[step]} and "
                f"the upper bound {self.upper_bound[step]}. Correct the ceiling or the bounds."
            )

    @classmethod
    def exact(cls, name: str, ceiling: ArrayLike) -> Trace:
        """Return a trace of steps whose ceilings are known exactly.

        Args:
            name (str): what it is called.
            ceiling (ArrayLike): the largest loss scale of each step that does not overflow, shape (steps,).

        Returns:
            Trace, with the ceilings as lower bounds and the next larger numbers as upper bounds.

        Raises:
            ValueError: if the ceilings are not of shape (steps,).
        """
        known = np.asarray(ceiling, dtype=np.float64)
        return cls(name, known, known, np.nextafter(known, np.inf))

    def __len__(self) -> int:
        return len(self.ceiling)

    def known(self, loss_scale: ArrayLike) -> NDArray[np.bool_]:
        """Return for each step whether its outcome at a loss scale (overflow or not) is known, not only assumed.

        Args:
            loss_scale (ArrayLike): shape (steps,) or one that broadcasts to it.

        Returns:
            NDArray, bool of shape (steps,).
        """
        scale = np.asarray(loss_scale, dtype=np.float64)
        return np.broadcast_to((scale <= self.lower_bound) | (scale >= self.upper_bound), self.ceiling.shape)


def implied_ceilings(largest_gradient: ArrayLike, gradient_format: Format = FLOAT16) -> NDArray[np.float64]:
    """Return the largest loss scale that each gradient allows: ``gradient_format.largest / largest_gradient``.

    Args:
        largest_gradient (ArrayLike): absolute values, unscaled, of any shape. The ceiling is nan for 0, nan, inf and
            subnormal float32 numbers.
        gradient_format (Format): the number format of the gradients. Default: float16.

    Examples:
        >>> implied_ceilings([1.0, 65504.0, 0.0, float("inf")]).tolist()
        [65504.0, 1.0, nan, nan]
    """
    gradients = np.asarray(largest_gradient, np.float64)
    shows = (gradients >= SMALLEST_FLOAT32) & (gradients <= LARGEST_FLOAT32)
    return gradient_format.largest / np.where(shows, gradients, np.nan)


def consecutive_runs(numbers: ArrayLike) -> NDArray[np.int64]:
    """Split increasing integers into stretches of consecutive numbers; return the first and last number of each.

    Args:
        numbers (ArrayLike): increasing integers, shape (numbers,).

    Returns:
        NDArray, int64 of shape (runs, 2).

    Examples:
        >>> consecutive_runs([1, 2, 3, 7]).tolist()
        [[1, 3], [7, 7]]
    """
    array = np.asarray(numbers, dtype=np.int64)
    starts = np.diff(array, prepend=array[:1] - 2) != 1
    return np.column_stack([array[starts], array[np.roll(starts, -1)]])


def just_below(scale: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return for each loss scale the float64 just below it, the highest ceiling at which it overflows; inf for inf."""
    return np.where(np.isinf(scale), np.inf, np.nextafter(scale, 0.0))


def require_one_length(what: str, *arrays: NDArray[Any] | None) -> None:
    """Raise TypeError or ValueError unless all arrays are NumPy arrays with one number per step.

    All arrays but the first may be None.
    """
    for array in arrays:
        if array is not None and not isinstance(array, np.ndarray):
            raise TypeError(
                f"All arrays of the {what} must be NumPy arrays, but got {str(array)[:80]!r} of type "
                f"{type(array).__name__}. Convert the array by numpy.array(...)."
            )
    shapes = {array.shape for array in arrays if array is not None}
    if len(shapes) > 1 or len(min(shapes)) != 1:
        raise ValueError(
            f"All arrays of the {what} must have one number for each step, but got shapes {sorted(shapes)}. Give "
            "one-dimensional arrays of equal length."
        )
