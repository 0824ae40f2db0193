"""Cells that step several update cells in one graph, and read back all that they remember."""

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype


class SideBySide(nn.Cell):
    """Steps several update cells at once, each with a loss scale and an overflow flag of its own.

    Calling it with the flags, bool of shape (cells,), returns the next loss scales, float32 of shape (cells,), and the
    Parameters of all cells one after the other, int32: of each cell those that ``names`` lists or, without it, those
    of its ``state()``.
    """

    def __init__(self, update_cells, names=None):
        super().__init__()
        self.update_cells = nn.CellList(update_cells)
        self.loss_scales = ParameterTuple(
            [
                Parameter(Tensor(cell.get_loss_scale(), mstype.float32), name=f"loss_scale_{place}")
                for place, cell in enumerate(update_cells)
            ]
        )
        self.memory = ParameterTuple([getattr(cell, name) for cell in update_cells for name in names or cell.state()])
        self.stack = ops.Stack()

    def construct(self, overflows):
        for place in range(len(self.update_cells)):
            self.update_cells[place](self.loss_scales[place], overflows[place])
        return self.stack(self.loss_scales), self.stack(self.memory)

    def step(self, overflows):
        """Return the next loss scales and the memory as lists."""
        return [output.asnumpy().tolist() for output in self(Tensor(np.asarray(overflows)))]


class StepFromState(nn.Cell):
    """One step of :class:`SideBySide` from loss scales and a memory that are given."""

    def __init__(self, side_by_side):
        super().__init__()
        self.side_by_side = side_by_side
        self.loss_scales = side_by_side.loss_scales
        self.memory = side_by_side.memory
        self.assign = ops.Assign()

    def construct(self, loss_scales, memory, overflows):
        for place in range(len(self.loss_scales)):
            self.assign(self.loss_scales[place], loss_scales[place])
        for place in range(len(self.memory)):
            self.assign(self.memory[place], memory[place])
        return self.side_by_side(overflows)

    def step(self, loss_scales, memory, overflows):
        """Take lists, return the next loss scales and the memory as lists."""
        inputs = np.array(loss_scales, np.float32), np.array(memory, np.int32), np.asarray(overflows)
        return [output.asnumpy().tolist() for output in self(*map(Tensor, inputs))]
