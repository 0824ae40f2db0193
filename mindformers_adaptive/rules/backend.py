"""The functions that the text of a rule is made of, for NumPy: for one run, and for thousands side by side.

A text that imports them from here is compiled by MindSpore with the functions of the same names in
:mod:`mindformers_adaptive.cells.graph_backend`. Arrays have the lanes, one for each run, as their last axis.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy import absolute, ceil, floor, logical_and, logical_not, logical_or, maximum, minimum, where

__all__ = ["absolute", "argmin", "ceil", "count", "float32", "floor", "int32", "logical_and", "logical_not"]
__all__ += ["logical_or", "maximum", "minimum", "stack", "unstack", "where"]

Array = Any


def int32(x: Array) -> Array:
    """Return numbers or flags as int32; floats without what stands after their point."""
    return np.asarray(x).astype(np.int32)


def float32(x: Array) -> Array:
    """Return numbers or flags as float32."""
    return np.asarray(x).astype(np.float32)


def argmin(x: Array) -> Array:
    """Return the place of the smallest element of a vector, of equals the first; int32."""
    return np.argmin(x, axis=0).astype(np.int32)


def count(flags: Array) -> Array:
    """Return how many flags of a vector are true, int32; at most 2**24."""
    return np.count_nonzero(flags, axis=0).astype(np.int32)


def stack(values: Sequence[Array]) -> Array:
    """Return scalars of one dtype as a vector."""
    return np.stack(np.broadcast_arrays(*values))


def unstack(x: Array) -> tuple[Array, ...]:
    """Return the elements of a vector."""
    return tuple(x)
