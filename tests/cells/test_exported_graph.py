"""What must not be in a graph for Ascend is found in an exported graph, and told by its name."""

import pytest
from exported_graph import ExportedGraph, export_update_cell
from graph_checks import (
    control_flow,
    forbidden_plain_constants,
    forbidden_tensors,
    plain_outputs,
    undocumented_on_ascend,
)
from mindspore import dtype as mstype
from mindspore import nn, ops
from mindspore.train.mind_ir_pb2 import ModelProto, TensorProto

from mindformers_adaptive.cells.adaptive_update_cell import AdaptiveLossScaleUpdateCell

pytestmark = pytest.mark.usefixtures("graph_mode")

ARGUMENTS = {"loss_scale_value": 2**16, "scale_factor": 2, "scale_window": 20}


def test_the_stock_cell_documented_for_ascend_passes_the_check_of_primitives():
    assert "``Ascend``" in nn.DynamicLossScaleUpdateCell.__doc__
    assert undocumented_on_ascend(export_update_cell(nn.DynamicLossScaleUpdateCell(**ARGUMENTS))) == set()


def test_graphs_inside_attributes_and_functions_are_read_too():
    model = ModelProto()
    hidden = model.graph.node.add(op_type="Add").attribute.add().g.node.add(op_type="Fmax")
    hidden.attribute.add().tensors.add(data_type=TensorProto.INT64)
    model.functions.add().node.add(op_type="Switch")
    graph = ExportedGraph(model)
    assert sorted(graph.kernels) == ["Add", "Fmax", "Switch"]
    assert control_flow(graph) == {"Switch", "3 graphs"}
    assert forbidden_tensors(graph) == {("INT64", "Fmax")}


class Branches(AdaptiveLossScaleUpdateCell):
    def construct(self, loss_scale, overflow):
        super().construct(loss_scale, overflow)
        if overflow:
            self.assign(self.skipped_steps, self.one)
        return overflow


class ComputesInFloat64(AdaptiveLossScaleUpdateCell):
    def construct(self, loss_scale, overflow):
        super().construct(loss_scale, overflow)
        wide = self.cast(loss_scale, mstype.float64)
        self.assign(loss_scale, self.cast(wide - wide, mstype.float32))
        return overflow


class MultipliesByPythonNumber(AdaptiveLossScaleUpdateCell):
    def construct(self, loss_scale, overflow):
        super().construct(loss_scale, overflow)
        self.assign(self.skipped_steps, self.skipped_steps * 3)
        return overflow


class AsksTheHost(AdaptiveLossScaleUpdateCell):
    def construct(self, loss_scale, overflow):
        super().construct(loss_scale, overflow)
        self.assign(self.skipped_steps, ops.scalar_to_tensor(int(self.skipped_steps), mstype.int32))
        return overflow


class TakesFmax(AdaptiveLossScaleUpdateCell):
    def construct(self, loss_scale, overflow):
        super().construct(loss_scale, overflow)
        self.assign(self.skipped_steps, ops.fmax(self.skipped_steps, self.one))
        return overflow


@pytest.mark.parametrize(
    ("cell", "check", "found"),
    [
        (Branches, control_flow, {"Switch", "Partial", "Call", "3 graphs"}),
        (ComputesInFloat64, forbidden_tensors, {("DOUBLE", "Cast"), ("DOUBLE", "Sub")}),
        (MultipliesByPythonNumber, forbidden_plain_constants, {("INT64", "Muls", 1)}),
        (MultipliesByPythonNumber, undocumented_on_ascend, {"Muls"}),
        (AsksTheHost, plain_outputs, {("SCALAR", "TensorToScalar")}),
        (TakesFmax, undocumented_on_ascend, {"Fmax"}),
    ],
    ids=lambda it: getattr(it, "__name__", ""),
)
def test_what_must_not_be_in_the_graph_is_reported_by_name(cell, check, found):
    assert check(export_update_cell(cell(**ARGUMENTS))) == found
