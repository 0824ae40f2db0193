"""Where loss scales overflow on a trace: found once for each scale, and kept in as little memory as it takes."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.lab.replay.measures import overflow_flags

__all__ = ["Overflows"]

# More places of overflows are not kept: a scale factor that is no power of two may lead to ever new scales.
_MOST_BYTES = 128_000_000
_BLOCK = 1024


class Overflows:
    """Where loss scales overflow on a trace.

    Args:
        ceiling (NDArray): float64 of shape (steps,).
    """

    def __init__(self, ceiling: NDArray[np.float64]) -> None:
        self.steps = len(ceiling)
        self._ceiling = ceiling
        self._rows: dict[float, Any] = {}
        self._room = _MOST_BYTES
        starts = np.arange(0, self.steps, _BLOCK)
        self._lowest = np.minimum.reduceat(ceiling, starts) if self.steps else ceiling

    def following(self, loss_scale: float) -> Any:
        """Return what tells for each step, by its place in brackets, the first one from it on that overflows.

        Of the number of steps itself, and where none follows, it is that number.
        """
        if loss_scale not in self._rows:
            rows = _Rows(overflow_flags(np.asarray(loss_scale), self._ceiling))
            size = 8 * len(rows.starts)
            self._rows[loss_scale] = rows if size <= self._room else _Search(self._ceiling, self._lowest, loss_scale)
            self._room -= size if size <= self._room else 0
        return self._rows[loss_scale]


class _Rows:
    """Finds the next overflow among the rows of steps that overflow."""

    def __init__(self, flags: NDArray[np.bool_]) -> None:
        edges = np.flatnonzero(np.diff(flags, prepend=False, append=False)).astype(np.int32)
        # Behind the last row one that begins after the last step.
        self.starts, self._ends = array("i", edges[::2]), array("i", edges[1::2])
        self.starts.append(len(flags))

    def __getitem__(self, step: int) -> int:
        start = self.starts[bisect_right(self._ends, step)]
        return start if start > step else step


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
