"""Update cells with loss scales of their own, stepped in graphs, which read back all that they remember."""

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype


class HeldCell(nn.Cell):
    """An update cell with its loss scale.

    Calling it with the overflow flag, bool of shape (), returns the Parameters that ``names`` lists or, without it,
    those of the cell's ``state()``: int32 of shape (names,).
    """

    def __init__(self, update_cell, names=None):
        super().__init__()
        self.update_cell = update_cell
        self.loss_scale = Parameter(Tensor(update_cell.get_loss_scale(), mstype.float32), name="loss_scale")
        self.memory = ParameterTuple([getattr(update_cell, name) for name in names or update_cell.state()])
        self.stack = ops.Stack()

    def construct(self, overflow):
        self.update_cell(self.loss_scale, overflow)
        return self.stack(self.memory)

    def step(self, overflow):
        """Return the next loss scale and the memory, a float and a list."""
        memory = self(_FLAGS[bool(overflow)]).asnumpy().tolist()
        return float(self.loss_scale.asnumpy()), memory


class StepFromState(nn.Cell):
    """One step of a :class:`HeldCell` from a loss scale and a memory that are given."""

    def __init__(self, held):
        super().__init__()
        self.held = held
        self.assign = ops.Assign()

    def construct(self, loss_scale, memory, overflow):
        self.assign(self.held.loss_scale, loss_scale)
        for place in range(len(self.held.memory)):
            self.assign(self.held.memory[place], memory[place])
        return self.held(overflow)

    def step(self, loss_scale, memory, overflow):
        """Take and return a loss scale and a memory, a float and a list."""
        given = Tensor(loss_scale, mstype.float32), Tensor(np.array(memory, np.int32)), _FLAGS[bool(overflow)]
        memory = self(*given).asnumpy().tolist()
        return float(self.held.loss_scale.asnumpy()), memory


class SideBySide:
    """Several update cells, each in a graph of its own, with a loss scale and an overflow flag of its own.

    In one graph they would be slower: MindSpore runs graphs of more than about a hundred kernels in several threads,
    and these wait for each other most of the time.
    """

    def __init__(self, update_cells, names=None):
        self.update_cells = update_cells
        self._held = [HeldCell(cell, names) for cell in update_cells]
        self.loss_scales = [held.loss_scale for held in self._held]

    def step(self, overflows):
        """Return the next loss scales and the memory of all cells one after the other, as lists."""
        steps = [held.step(overflow) for held, overflow in zip(self._held, overflows, strict=True)]
        return [loss_scale for loss_scale, _ in steps], [value for _, memory in steps for value in memory]


_FLAGS = {flag: Tensor(flag) for flag in (False, True)}
