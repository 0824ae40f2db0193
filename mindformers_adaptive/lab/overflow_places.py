"""Where loss scales overflow on a trace: found once for each scale, and kept in as little memory as it takes."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.lab.measures import overflow_flags

__all__ = ["Overflows"]

# More places of overflows are not kept: a scale factor that is no power of two may lead to ever new scales.
_MOST_BYTES = 64_000_000
_BLOCK = 1024


class Overflows:
    """Where loss scales overflow on a trace.

    Args:
        ceiling (NDArray): float64 of shape (steps,).
    """

    def __init__(self, ceiling: NDArray[np.float64]) -> None:
        self.steps = len(ceiling)
        self._ceiling = ceiling
        self._tables: dict[float, Any] = {}
        self._room, self._room_for_runs = _MOST_BYTES, _MOST_BYTES
        starts = np.arange(0, self.steps, _BLOCK)
        self._lowest = np.minimum.reduceat(ceiling, starts) if self.steps else ceiling
        self._never: Any = None

    def following(self, loss_scale: float) -> Any:
        """Return what tells for each step, by its place in brackets, the first one from it on that overflows.

        Of the number of steps itself, and where none follows, it is that number.
        """
        if loss_scale not in self._tables:
            self._tables[loss_scale] = self._made(loss_scale)
        return self._tables[loss_scale]

    def _made(self, loss_scale: float) -> Any:
        flags = overflow_flags(np.asarray(loss_scale), self._ceiling)
        count = np.count_nonzero(flags)
        if count == self.steps:
            return range(self.steps + 1)
        if not count and self._never is not None:
            return self._never
        size = 4 * self.steps
        if self._room >= size:
            self._room -= size
            table = _next(flags)
            self._never = self._never if count else table
            return table
        runs = _Runs(flags)
        if self._room_for_runs >= (size := 8 * len(runs.starts)):
            self._room_for_runs -= size
            return runs
        return _Search(self._ceiling, self._lowest, loss_scale)


def _next(flags: NDArray[np.bool_]) -> array[int]:
    places = np.append(np.flatnonzero(flags), len(flags)).astype(np.int32)
    result = array("i")
    result.frombytes(np.repeat(places, np.diff(places, prepend=-1)).tobytes())
    return result


class _Runs:
    """Finds the next overflow among the rows of steps that overflow."""

    def __init__(self, flags: NDArray[np.bool_]) -> None:
        edges = np.flatnonzero(np.diff(flags, prepend=False, append=False)).astype(np.int32)
        self.starts, self._ends, self._steps = array("i", edges[::2]), array("i", edges[1::2]), len(flags)

    def __getitem__(self, step: int) -> int:
        row = bisect_right(self._ends, step)
        return max(step, self.starts[row]) if row < len(self.starts) else self._steps


class _Search:
    """Looks for the next overflow each time, by the lowest ceiling of each block of steps."""

    def __init__(self, ceiling: NDArray[np.float64], lowest: NDArray[np.float64], loss_scale: float) -> None:
        self._ceiling, self._lowest, self._scale = ceiling, lowest, np.asarray(loss_scale)

    def __getitem__(self, step: int) -> int:
        block = step // _BLOCK
        for start, stop in ((step, (block + 1) * _BLOCK), self._block_after(block)):
            flags = overflow_flags(self._scale, self._ceiling[start:stop])
            if flags.any():
                return start + int(flags.argmax())
        return len(self._ceiling)

    def _block_after(self, block: int) -> tuple[int, int]:
        flags = overflow_flags(self._scale, self._lowest[block + 1 :])
        first = (block + 1 + int(flags.argmax())) * _BLOCK if flags.any() else len(self._ceiling)
        return first, first + _BLOCK
