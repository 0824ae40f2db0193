"""Counts the kernels that a device launches for one update of the loss scale, in the graph that MindSpore exports."""

import tempfile
from pathlib import Path

import mindspore
from mindspore import Parameter, Tensor, nn
from mindspore import dtype as mstype
from mindspore.train.mind_ir_pb2 import ModelProto

# The nodes of a graph that order or group values. Each other node is a kernel.
NO_KERNELS = {"Constant", "Load", "MakeTuple", "TupleGetItem", "UpdateState", "Depend"}


class WithLossScale(nn.Cell):
    """Passes ``overflow`` and a loss scale of its own to an update cell, as a train-step cell does."""

    def __init__(self, update_cell):
        super().__init__(auto_prefix=False)
        self.update_cell = update_cell
        self.loss_scale = Parameter(Tensor(update_cell.get_loss_scale(), mstype.float32), name="loss_scale")

    def construct(self, overflow):
        return self.update_cell(self.loss_scale, overflow)


def count_kernels(cell):
    """Return how many kernels a device launches for one update of a :class:`WithLossScale`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "graph.mindir")
        mindspore.export(cell, Tensor(True), file_name=str(file), file_format="MINDIR")
        model = ModelProto.FromString(file.read_bytes())
    primitives = {f"REF::{primitive.name}": primitive.op_type for primitive in model.primitives}
    return sum(primitives.get(node.op_type, node.op_type) not in NO_KERNELS for node in model.graph.node)
