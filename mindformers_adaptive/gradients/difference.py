"""Compares, for each Parameter, the arrays of two checkpoints or the gradients of two devices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.text.table import align

__all__ = ["ArrayDifference", "compare_arrays", "difference_table"]


class ArrayDifference(NamedTuple):
    """The difference between the values of one Parameter in two files.

    Attributes:
        name (str): the name of the Parameter.
        size (int): number of elements.
        norm (float), reference_norm (float): the norms in the first file and in the second, which is the reference.
        relative_error (float): the norm of the difference, as a multiple of the reference's norm; 0 where both are
            equal, inf where only the reference is 0, nan where either has an inf or a NaN.
        largest_error (float): the largest magnitude of the difference.
        error (float): the norm of the difference.
    """

    name: str
    size: int
    norm: float
    reference_norm: float
    relative_error: float
    largest_error: float
    error: float


def compare_arrays(
    arrays: Mapping[str, NDArray[np.floating[Any]]], reference: Mapping[str, NDArray[np.floating[Any]]]
) -> list[ArrayDifference]:
    """Compare the arrays that have the same name in two checkpoints or on two devices.

    Args:
        arrays (Mapping[str, ndarray]): the first arrays, by name.
        reference (Mapping[str, ndarray]): the arrays to compare them with.

    Returns:
        list[ArrayDifference], arrays with an inf or a NaN first, then from the largest relative error down.

    Raises:
        ValueError: if the mappings have no name in common, or two arrays of the same name differ in shape.

    Examples:
        >>> [found] = compare_arrays({"w": np.array([3.0, 4.0])}, {"w": np.array([3.0, 5.0])})
        >>> found.largest_error, round(found.relative_error, 3)
        (1.0, 0.171)
    """
    shared = [name for name in arrays if name in reference]
    if not shared:
        raise ValueError(
            "The two checkpoints must have Parameters of the same names, but no name of the first "
            f"({', '.join([*arrays][:2]) or 'nothing'}) is in the second ({', '.join([*reference][:2]) or 'nothing'}). "
            "Give two checkpoints of one model."
        )
    differences = [_compare(name, arrays[name], reference[name]) for name in shared]
    return sorted(
        differences,
        key=lambda difference: -math.inf if math.isnan(difference.relative_error) else -difference.relative_error,
    )


def _compare(name: str, array: NDArray[np.floating[Any]], reference: NDArray[np.floating[Any]]) -> ArrayDifference:
    if array.shape != reference.shape:
        raise ValueError(
            f"{name!r} must have the same shape in both checkpoints, but has {array.shape} and {reference.shape}. Give "
            "checkpoints of one model that is cut into slices in the same way."
        )
    first, second = array.astype(np.float64), reference.astype(np.float64)
    norm, reference_norm = float(np.linalg.norm(first)), float(np.linalg.norm(second))
    with np.errstate(invalid="ignore"):
        apart = first - second
    error, largest = float(np.linalg.norm(apart)), float(np.abs(apart).max(initial=0.0))
    relative = error / reference_norm if reference_norm > 0 else math.inf if error > 0 else 0.0
    if not math.isfinite(norm + reference_norm):
        relative = largest = math.nan
    return ArrayDifference(name, array.size, norm, reference_norm, relative, largest, error)


def difference_table(differences: list[ArrayDifference]) -> str:
    """Return a table to print of the differences between two files, with a row for each Parameter."""
    lines = [["", "elements", "norm", "norm of the reference", "relative error", "largest error"]]
    for difference in differences:
        numbers = [f"{difference.norm:.4g}", f"{difference.reference_norm:.4g}", f"{difference.relative_error:.2e}"]
        lines.append([difference.name, f"{difference.size:,}", *numbers, f"{difference.largest_error:.2e}"])
    return align(lines, to_the_left=[0])
