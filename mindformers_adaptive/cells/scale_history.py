"""Keeps the last steps of an update cell on the device, for a host that does not see every step."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

__all__ = ["ScaleHistory", "refuse_kept_graphs"]

# Numbers for the names of Parameters: in a graph, Parameters that belong to no cell need distinct names.
_numbers = itertools.count()


class ScaleHistory(nn.Cell):
    """A ring buffer of the last training steps, one row for each step, written by the graph of the update cell.

    Its Parameters belong to no cell, so no checkpoint contains them: a checkpoint can be loaded with any history size,
    and never brings back the steps of an earlier run.

    Args:
        size (int): how many steps are kept, at least 1.
        counts (Sequence[str]): the names of the counts, which are int32; ``overflow`` comes back as a bool.
        measures (Sequence[str]): the names of further values, which are float32. Default: none.

    Inputs:
        - **loss_scale** (Parameter) - the loss scale that the step used, float32 of shape ().
        - **next_loss_scale** (Tensor) - the loss scale for the next step, float32 of shape ().
        - **step** (Parameter) - the number of the step, int32 of shape ().
        - **counts** (tuple[Tensor]) - the counts after the step, int32 of shape ().
        - **measures** (tuple[Parameter]) - the further values of the step, float32 of shape (). Default: none.

    Outputs:
        Tensor, `next_loss_scale`.
    """

    def __init__(self, size: int, counts: Sequence[str], measures: Sequence[str] = ()) -> None:
        super().__init__(auto_prefix=False)
        self.size = size
        self.names_of_counts, self.names_of_floats = ("step", *counts), ("loss_scale", "next_loss_scale", *measures)
        self.number = next(_numbers)
        self._own("scales", np.zeros((size, len(self.names_of_floats)), np.float32))
        self._own("counts", np.zeros((size, len(self.names_of_counts)), np.int32))
        self._own("place", np.zeros(1, np.int32))
        self.place_after = Tensor(np.roll(np.arange(size), -1), mstype.int32)

    def construct(self, loss_scale: Any, next_loss_scale: Any, step: Any, counts: Any, measures: Any = ()) -> Any:
        scales = ops.stack((loss_scale, next_loss_scale, *measures))
        counts = ops.stack((step, *counts))
        ops.scatter_update(self.scales, self.place, ops.expand_dims(scales, 0))
        ops.scatter_update(self.counts, self.place, ops.expand_dims(counts, 0))
        # Look up the index of the ring buffer's next row in a table. Do not calculate it by Mod, which Ascend documents
        # as inexact for large integers.
        ops.assign(self.place, ops.gather(self.place_after, self.place, 0))
        return next_loss_scale

    def steps(self, since: int, last: int) -> list[dict[str, Any]]:
        """Return the steps after ``since`` that the ring buffer holds, up to ``last``, in order and without gaps."""
        scales, counts, index = self.scales.asnumpy(), self.counts.asnumpy(), int(self.place.asnumpy()[0])
        newest_first = []
        # Read the ring buffer backwards as long as the step number falls by 1 from row to row. Stop at another number:
        # the older rows hold steps that were undone when an earlier state was restored.
        for step in range(last, max(since, last - self.size), -1):
            index = (index - 1) % self.size
            row = dict(zip(self.names_of_counts, counts[index].tolist(), strict=True))
            if row["step"] != step:
                break
            row["overflow"] = bool(row["overflow"])
            newest_first.append(row | dict(zip(self.names_of_floats, scales[index].tolist(), strict=True)))
        return newest_first[::-1]

    def _own(self, name: str, values: Any) -> None:
        parameter = Parameter(Tensor(values), name=f"loss_scale_history_{self.number}_{name}", requires_grad=False)
        # Bypass nn.Cell.__setattr__, which would add the Parameter to the network and to every checkpoint.
        object.__setattr__(self, name, parameter)


def refuse_kept_graphs(history_size: int) -> None:
    """Raise ValueError if MindSpore caches compiled graphs: a graph from the cache writes no history of the steps."""
    if os.environ.get("MS_COMPILER_CACHE_ENABLE") == "1" or mindspore.get_context("enable_compile_cache"):
        raise ValueError(
            "'history_size' must be 0 while MindSpore keeps compiled graphs (MS_COMPILER_CACHE_ENABLE or "
            f"enable_compile_cache), but got {history_size}: a graph from the cache does not write the history. Set "
            "'history_size' to 0, or switch the cache off."
        )
