"""How far the arrays of two checkpoints, or the gradients of two devices, are apart: by Parameter, and step by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.gradients.groups import group_parameters, parameter_group
from mindformers_adaptive.text.table import align

__all__ = ["ArrayDifference", "by_group", "compare_arrays", "difference_table", "parting", "series_table"]

# Of one step: the differences of its Parameters, the worst first.
Series = Mapping[int, list["ArrayDifference"]]


class ArrayDifference(NamedTuple):
    """A Parameter in two files.

    Attributes:
        name (str): of the Parameter.
        size (int): number of elements.
        norm (float), reference_norm (float): in the first file and in the second, the reference.
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
    """Compare the arrays that both have, by name.

    Args:
        arrays (Mapping[str, ndarray]): the first.
        reference (Mapping[str, ndarray]): what they are compared with.

    Returns:
        list[ArrayDifference], the largest relative error first, and before it those with an inf or a NaN.

    Raises:
        ValueError: if they have no name in common, or an array has another shape in the other.

    Examples:
        >>> [found] = compare_arrays({"w": np.array([3.0, 4.0])}, {"w": np.array([3.0, 5.0])})
        >>> found.largest_error, round(found.relative_error, 3)
        (1.0, 0.171)
    """
    shared = [name for name in arrays if name in reference]
    if not shared:
        raise ValueError(
            "The two must have Parameters of the same names, but none of the first "
            f"({', '.join([*arrays][:2]) or 'nothing'}) is in the second ({', '.join([*reference][:2]) or 'nothing'}). "
            "Give two checkpoints of one model."
        )
    found = [_compare(name, arrays[name], reference[name]) for name in shared]
    return sorted(found, key=lambda one: -math.inf if math.isnan(one.relative_error) else -one.relative_error)


def _compare(name: str, array: NDArray[np.floating[Any]], reference: NDArray[np.floating[Any]]) -> ArrayDifference:
    if array.shape != reference.shape:
        raise ValueError(
            f"{name!r} must have one shape, but has {array.shape} and {reference.shape}. Give checkpoints of one model "
            "that is cut into slices in the same way."
        )
    first, second = array.astype(np.float64), reference.astype(np.float64)
    norm, reference_norm = float(np.linalg.norm(first)), float(np.linalg.norm(second))
    with np.errstate(invalid="ignore"):
        apart = first - second
    error, largest = float(np.linalg.norm(apart)), float(np.abs(apart).max(initial=0.0))
    relative = _relative(error, reference_norm)
    if not math.isfinite(norm + reference_norm):
        relative = largest = math.nan
    return ArrayDifference(name, array.size, norm, reference_norm, relative, largest, error)


def _relative(error: float, norm: float) -> float:
    return error / norm if norm > 0 else math.inf if error > 0 else 0.0


def difference_table(differences: list[ArrayDifference]) -> str:
    """Return a table to print, a row for each Parameter."""
    lines = [["", "elements", "norm", "norm of the reference", "relative error", "largest error"]]
    for one in differences:
        numbers = [f"{one.norm:.4g}", f"{one.reference_norm:.4g}", f"{one.relative_error:.2e}"]
        lines.append([one.name, f"{one.size:,}", *numbers, f"{one.largest_error:.2e}"])
    return align(lines, to_the_left=[0])


def by_group(series: Series, group: Callable[[str], str | None] = parameter_group) -> dict[str, list[float]]:
    """Return the relative error of each group of Parameters, and of all, in each step of a series.

    Args:
        series (Mapping[int, list[ArrayDifference]]): by step.
        group (Callable): from a Parameter's name to its group, see
            :func:`mindformers_adaptive.gradients.groups.group_parameters`. Default: :func:`parameter_group`.

    Examples:
        >>> steps = {1: ({"wq": np.ones(1)},) * 2, 2: ({"wq": np.ones(1)}, {"wq": np.full(1, 2.0)})}
        >>> by_group({step: compare_arrays(*both) for step, both in steps.items()}, lambda name: name)
        {'wq': [0.0, 0.5], 'all': [0.0, 0.5]}
    """
    sizes = {one.name: one.size for differences in series.values() for one in differences}
    members = {**group_parameters(sizes, group), "all": list(sizes)}
    return {
        name: [_together([one for one in differences if one.name in {*names}]) for differences in series.values()]
        for name, names in members.items()
    }


def _together(differences: list[ArrayDifference]) -> float:
    """The relative error of several Parameters as of one."""
    error = math.hypot(*(one.error for one in differences))
    norm = math.hypot(*(one.reference_norm for one in differences))
    return _relative(error, norm) if math.isfinite(error + norm) else math.nan


def parting(series: Series) -> str:
    """Say at which step two series begin to part, and where."""
    apart = [step for step, differences in series.items() if differences[0].relative_error != 0]
    if not apart:
        return f"All Parameters are equal in {len(series)} step(s), {min(series)} to {max(series)}."
    first, last = apart[0], max(series)
    errors = dict(zip(series, by_group(series)["all"], strict=True))
    different = [one for one in series[first] if one.relative_error != 0]
    equal = [step for step in series if step < first]
    since = f"equal up to step {equal[-1]}, apart from step {first} on" if equal else f"apart from step {first} on"
    return (
        f"They are {since}, in {len(different)} of {len(series[first])} Parameters, the most in {different[0].name}. "
        f"Relative error of all: {errors[first]:.2e} at step {first}, {errors[last]:.2e} at step {last}."
    )


def series_table(series: Series, group: Callable[[str], str | None] = parameter_group) -> str:
    """Return a table to print, a row for each step: the relative error of each group, and the worst Parameter."""
    errors = by_group(series, group)
    lines = [["step", *errors, "worst", "its error"]]
    for place, (step, differences) in enumerate(series.items()):
        worst = differences[0]
        cells = [f"{error[place]:.2e}" for error in errors.values()]
        lines.append([str(step), *cells, worst.name, f"{worst.relative_error:.2e}"])
    return align(lines, to_the_left=[len(errors) + 1])
