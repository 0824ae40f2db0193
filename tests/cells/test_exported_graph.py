"""The update cell can run on Ascend, by its exported graph and MindSpore's documentation: this needs no Ascend."""

import pydoc
import re

import mindformers
import mindspore
import pytest
from conftest import mindspore_mode
from exported_graph import BOOKKEEPING, ExportedGraph, export_update_cell
from mindformers.wrapper.adaptive_loss_scale import AdaptiveLossScaleUpdateCell as MindFormersUpdateCell
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.train.mind_ir_pb2 import ModelProto, TensorProto

from mindformers_adaptive.cells.adaptive_update_cell import AdaptiveLossScaleUpdateCell

pytestmark = pytest.mark.usefixtures("graph_mode")

ARGUMENTS = {"loss_scale_value": 2**16, "scale_factor": 2, "scale_window": 20}
CONFIGURATIONS = {
    "defaults": {},
    "hysteresis": {"hysteresis": 2},
    "shrink": {"shrink_from_min_window": True},
    "hysteresis-and-shrink": {"hysteresis": 2, "shrink_from_min_window": True},
    "one-window": {"max_scale_window": 20, "min_scale_window": 20},
}

# The compiler puts these in to order and group values. They are no operators, so no documentation names a platform.
FROM_THE_COMPILER = {"Load", "MakeTuple", "TupleGetItem", "UpdateState"}

TENSOR_TYPES = {"FLOAT", "INT32", "BOOL"}

# What these take as plain numbers only: Gather its axis and its batch_dims, Cast its dtype, TupleGetItem a place.
# The compiler reads them; no kernel computes with an int64.
PLAIN_CONSTANTS = {("INT64", "Gather", 2), ("INT64", "Gather", 3), ("INT64", "Cast", 1), ("INT64", "TupleGetItem", 1)}

REFERENCE_PAIR = (mindspore.__version__, mindformers.__version__) == ("2.9.0", "1.9.0")


@pytest.fixture(scope="module", params=CONFIGURATIONS.values(), ids=CONFIGURATIONS.keys())
def graph(request):
    with mindspore_mode("graph"):
        return export_update_cell(AdaptiveLossScaleUpdateCell(**ARGUMENTS, **request.param))


def control_flow(graph):
    return {*graph.control_flow} | ({f"{graph.graphs} graphs"} if graph.graphs > 1 else set())


def forbidden_tensors(graph):
    """The tensors of Parameters, inputs, outputs, constants and nodes that are not float32, int32 or bool."""
    return {(kind, place) for kind in graph.tensor_types.keys() - TENSOR_TYPES for place in graph.tensor_types[kind]}


def forbidden_plain_constants(graph):
    return graph.plain_constants - PLAIN_CONSTANTS


def plain_outputs(graph):
    return graph.plain_outputs


def undocumented_on_ascend(graph):
    return {name for name in graph.primitives - FROM_THE_COMPILER if "Ascend" not in documented_platforms(name)}


def documented_platforms(primitive):
    """Return what stands under "Supported Platforms" in the primitive's docstring, or in that it refers to."""
    for module in (ops, ops.operations, ops.auto_generate):
        text = getattr(getattr(module, primitive, None), "__doc__", None) or ""
        reference = re.search(r"Refer to :(?:func|class):`(mindspore\.[\w.]+)`", text)
        text_referred_to = getattr(pydoc.locate(reference[1]), "__doc__", None) if reference else None
        for documentation in (text, text_referred_to or ""):
            platforms = re.search(r"Supported Platforms:\n(.+)", documentation)
            if platforms:
                return re.findall(r"\w+", platforms[1])
    return []


def test_graph_has_no_control_flow(graph):
    assert control_flow(graph) == set()


def test_every_primitive_is_documented_for_ascend(graph):
    assert undocumented_on_ascend(graph) == set()


def test_tensors_are_float32_int32_or_bool_everywhere(graph):
    seen = set.union(*graph.tensor_types.values())
    assert seen >= {*graph.kernels, "Constant", "loss_scale", "scale_window", "overflow"}
    assert forbidden_tensors(graph) == set()


def test_no_number_comes_back_to_the_host(graph):
    # TensorToScalar is documented for Ascend, and its note says that it runs on the host there.
    assert plain_outputs(graph) == set()


def test_plain_numbers_are_only_where_no_tensor_is_possible(graph):
    assert graph.plain_constants
    assert forbidden_plain_constants(graph) == set()


def test_an_update_takes_at_most_30_kernels():
    graph = export_update_cell(AdaptiveLossScaleUpdateCell(**ARGUMENTS))
    assert len(graph.kernels) <= 30
    assert BOOKKEEPING.isdisjoint(graph.kernels)


@pytest.mark.skipif(not REFERENCE_PAIR, reason="the kernels of the stock cells were counted in 2.9.0 and 1.9.0")
@pytest.mark.parametrize(("stock_cell", "kernels"), [(nn.DynamicLossScaleUpdateCell, 15), (MindFormersUpdateCell, 65)])
def test_kernels_of_the_stock_cells_are_counted_as_known(stock_cell, kernels):
    assert len(export_update_cell(stock_cell(**ARGUMENTS)).kernels) == kernels


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


class Loops(AdaptiveLossScaleUpdateCell):
    def construct(self, loss_scale, overflow):
        super().construct(loss_scale, overflow)
        while self.less_equal(self.skipped_steps, self.one):
            self.assign_add(self.skipped_steps, self.one)
        return overflow


class ComputesInFloat64(AdaptiveLossScaleUpdateCell):
    def construct(self, loss_scale, overflow):
        super().construct(loss_scale, overflow)
        wide = self.cast(loss_scale, mstype.float64)
        self.assign(loss_scale, self.cast(wide - wide, mstype.float32))
        return overflow


class CountsInInt64(AdaptiveLossScaleUpdateCell):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.steps = Parameter(Tensor(0, mstype.int64), name="steps")
        self.wide_one = Tensor(1, mstype.int64)

    def construct(self, loss_scale, overflow):
        super().construct(loss_scale, overflow)
        self.assign_add(self.steps, self.wide_one)
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
        (Loops, control_flow, {"Switch", "Partial", "Call", "4 graphs"}),
        (ComputesInFloat64, forbidden_tensors, {("DOUBLE", "Cast"), ("DOUBLE", "Sub")}),
        (
            CountsInInt64,
            forbidden_tensors,
            {("INT64", "steps"), ("INT64", "Constant"), ("INT64", "AssignAdd")},
        ),
        (MultipliesByPythonNumber, forbidden_plain_constants, {("INT64", "Muls", 1)}),
        (MultipliesByPythonNumber, undocumented_on_ascend, {"Muls"}),
        (AsksTheHost, plain_outputs, {("SCALAR", "TensorToScalar")}),
        (TakesFmax, undocumented_on_ascend, {"Fmax"}),
    ],
    ids=lambda it: getattr(it, "__name__", ""),
)
def test_what_must_not_be_in_the_graph_is_reported_by_name(cell, check, found):
    assert check(export_update_cell(cell(**ARGUMENTS))) == found
