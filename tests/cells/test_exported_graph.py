"""The checks of an exported graph find, by name, each node and dtype that a graph for Ascend must not contain."""

import pytest
from mindspore import dtype as mstype
from mindspore import nn, ops

from mindformers_adaptive.cells.update_cells import AdaptiveLossScaleUpdateCell
from tests.cells.graph_checks import (
    control_flow,
    forbidden_plain_constants,
    forbidden_tensors,
    plain_outputs,
    undocumented_on_ascend,
)
from tests.shared.exported_graph import export_update_cell

pytestmark = pytest.mark.usefixtures("graph_mode")

ARGUMENTS = {"loss_scale_value": 2**16, "scale_factor": 2, "scale_window": 20}


def test_stock_cell_for_ascend_passes_the_check_of_primitives():
    assert "``Ascend``" in nn.DynamicLossScaleUpdateCell.__doc__
    assert undocumented_on_ascend(export_update_cell(nn.DynamicLossScaleUpdateCell(**ARGUMENTS))) == set()


class Forbidden(AdaptiveLossScaleUpdateCell):
    """A cell with a branch, float64, a multiplication by a Python number, a transfer to the host, and Fmax."""

    def construct(self, loss_scale, overflow):
        super().construct(loss_scale, overflow)
        if overflow:
            ops.assign(self.skipped_steps, self.one)
        wide = ops.cast(loss_scale, mstype.float64)
        ops.assign(loss_scale, ops.cast(wide - wide, mstype.float32))
        ops.assign(self.skipped_steps, ops.fmax(self.skipped_steps * 3, self.one))
        ops.assign(self.skipped_steps, ops.scalar_to_tensor(int(self.skipped_steps), mstype.int32))
        return overflow


def test_what_must_not_be_in_the_graph_is_reported_by_name():
    graph = export_update_cell(Forbidden(**ARGUMENTS))
    assert control_flow(graph) == {"Switch", "Partial", "Call", "3 graphs"}
    assert forbidden_tensors(graph) >= {("DOUBLE", "Cast"), ("DOUBLE", "Sub"), ("INT64", "TensorToScalar")}
    assert forbidden_plain_constants(graph) == {("INT64", "Muls", 1), ("INT64", "ScalarToTensor", 1)}
    assert ("SCALAR", "TensorToScalar") in plain_outputs(graph)
    assert undocumented_on_ascend(graph) >= {"Muls", "Fmax"}
