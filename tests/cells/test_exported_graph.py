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


def branches(skipped, one, loss_scale, overflow):
    if overflow:
        ops.assign(skipped, one)


def computes_in_float64(skipped, one, loss_scale, overflow):
    wide = ops.cast(loss_scale, mstype.float64)
    ops.assign(loss_scale, ops.cast(wide - wide, mstype.float32))


def multiplies_by_python_number(skipped, one, loss_scale, overflow):
    ops.assign(skipped, skipped * 3)


def asks_the_host(skipped, one, loss_scale, overflow):
    ops.assign(skipped, ops.scalar_to_tensor(int(skipped), mstype.int32))


def takes_fmax(skipped, one, loss_scale, overflow):
    ops.assign(skipped, ops.fmax(skipped, one))


@pytest.mark.parametrize(
    ("addition", "check", "found"),
    [
        (branches, control_flow, {"Switch", "Partial", "Call", "3 graphs"}),
        (computes_in_float64, forbidden_tensors, {("DOUBLE", "Cast"), ("DOUBLE", "Sub")}),
        (multiplies_by_python_number, forbidden_plain_constants, {("INT64", "Muls", 1)}),
        (multiplies_by_python_number, undocumented_on_ascend, {"Muls"}),
        (asks_the_host, plain_outputs, {("SCALAR", "TensorToScalar")}),
        (takes_fmax, undocumented_on_ascend, {"Fmax"}),
    ],
)
def test_what_must_not_be_in_the_graph_is_reported_by_name(addition, check, found):
    class WithAddition(AdaptiveLossScaleUpdateCell):
        def construct(self, loss_scale, overflow):
            super().construct(loss_scale, overflow)
            addition(self.skipped_steps, self.one, loss_scale, overflow)
            return overflow

    assert check(export_update_cell(WithAddition(**ARGUMENTS))) == found
