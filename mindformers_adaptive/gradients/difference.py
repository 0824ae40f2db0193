"""Compares, for each Parameter, the arrays of two checkpoints or the gradients of two devices."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.text.table import align

# Two trainings drift apart at the first step whose error is this many times the median error of the steps before.
DRIFT = 10.0


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


def drift_step(errors: Mapping[int, float]) -> int | None:
    """Return the step from which two trainings drift apart.

    It is the first step whose error is at least ten times the median of the steps before.

    Args:
        errors (Mapping[int, float]): the relative error of the worst Parameter by step, in the order of the steps; nan
            if either training has an inf or a NaN.

    Returns:
        int, or None if there is no such step. The first step has no steps before it, so it is never returned.

    Examples:
        >>> drift_step({100: 1e-6, 200: 2e-6, 300: 1e-5, 400: 0.5}), drift_step({100: 0.0, 200: 0.0})
        (400, None)
    """
    steps, known = list(errors), list(errors.values())
    for number in range(1, len(steps)):
        usual, error = median_error(known[:number]), median_error(known[number : number + 1])
        # After equal steps, any error is a drift. After steps with an inf or a NaN, none is.
        if error > usual and error >= DRIFT * usual:
            return steps[number]
    return None


def median_error(errors: Sequence[float]) -> float:
    """Return the median of relative errors; nan, from an inf or a NaN in a training, counts as inf."""
    return float(np.median([math.inf if math.isnan(error) else error for error in errors]))


def step_table(steps: Mapping[int, list[ArrayDifference]], worst: int = 1) -> str:
    """Return a table to print with rows for the worst Parameters of each step."""
    lines = [["step", "worst Parameter", "relative", "largest", "equal"]]
    for step, differences in steps.items():
        equal = f"{sum(difference.relative_error == 0 for difference in differences)} of {len(differences)}"
        for difference in differences[:worst]:
            errors = [f"{difference.relative_error:.2e}", f"{difference.largest_error:.2e}"]
            lines.append([f"{step:,}", difference.name, *errors, equal])
    return align(lines, to_the_left=[1])


def difference_table(differences: list[ArrayDifference]) -> str:
    """Return a table to print of the differences between two files, with a row for each Parameter."""
    lines = [["Parameter", "elements", "relative", "largest"]]
    for difference in differences:
        errors = [f"{difference.relative_error:.2e}", f"{difference.largest_error:.2e}"]
        lines.append([difference.name, f"{difference.size:,}", *errors])
    return align(lines, to_the_left=[0])
