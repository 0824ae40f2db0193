"""Layer outputs are measured correctly, selected by name or class, in graph and PyNative mode, without side effects."""

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindformers_adaptive.gradients.layers import LayerOutputs, LayerOutputsError
from mindformers_adaptive.gradients.ranges import gradient_ranges
from mindformers_adaptive.gradients.report import GradientRanges, ScaleRanges
from mindformers_adaptive.gradients.statistics import array_statistics, merge_statistics
from tests.shared.networks import GraphOnly, Twice

X = np.array([[2.0**-12, 0.0, 1.0, 0.0]], np.float32)


def test_outputs_of_all_calls_are_measured_in_their_own_dtype(mode):
    before = mindspore.get_context("mode")
    seen = []
    network = Twice()
    outputs = LayerOutputs(network, ["shared", "Pair"])((Tensor(X),), lambda name, array: seen.append((name, array)))
    first = np.full((1, 4), X.sum(), np.float16)
    second = np.full((1, 4), first.astype(np.float32).sum(), np.float16)
    assert outputs["shared"] == merge_statistics(map(array_statistics, (first, second)))
    third = second.astype(np.float32)
    assert outputs["pair"] == merge_statistics(map(array_statistics, (np.full((1, 4), third.sum()), third)))
    assert list(outputs) == ["shared", "pair"]
    assert [(name, array.dtype) for name, array in seen] == [("shared", np.float16)] * 2 + [("pair", np.float32)] * 2
    assert mindspore.get_context("mode") == before


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        (["Dense"], {"shared", "pair.dense"}),
        (["pair.dense"], {"pair.dense"}),
        (["shared", "Dense", "pair"], {"shared", "pair", "pair.dense"}),
        (["p*"], {"pair", "pair.dense"}),
        (["*Dens*"], {"shared", "pair.dense"}),
        (["*"], {"shared", "pair", "pair.dense"}),
        ([], set()),
    ],
)
def test_layers_are_chosen_by_name_or_class(layers, names):
    assert LayerOutputs(Twice(), layers)((Tensor(X),)).keys() == names


def test_a_sweep_has_the_outputs_of_all_batches(graph_mode):
    ranges = gradient_ranges(Twice(), [(Tensor(X),), (Tensor(2 * X),)], [1], layers=["Dense"])
    assert ranges.outputs.keys() == ranges.to_dict()["outputs"].keys() == {"shared", "pair.dense"}
    # The network calls the layer ``shared`` twice for each of the two batches, with 4 output elements per call.
    assert ranges.outputs["shared"].size == 16
    assert ranges.output_table().splitlines()[1].split()[:2] == ["shared", "8.00e+00"]


def test_a_network_that_cannot_run_in_pynative_mode_is_reported(graph_mode):
    with pytest.raises(LayerOutputsError, match=r"forward .*PyNative mode, .* a kernel is missing.* out 'layers'"):
        LayerOutputs(GraphOnly(), ["Dense"])((Tensor(X),))
    assert mindspore.get_context("mode") == mindspore.GRAPH_MODE


@pytest.mark.parametrize(
    ("layers", "error", "message"),
    [
        ("Dense", TypeError, r"'layers' must be a list .*got 'Dense' of type str. Write \['Dense'\]"),
        (3, TypeError, "'layers' must be a list .*got 3 of type int"),
        ({"Dense": 1}, TypeError, "'layers' must be a list .*got {'Dense': 1} of type dict"),
        ([3], TypeError, r"'layers' must be a list .*got \[3\] of type list"),
        (["Dence"], ValueError, "but 'Dence' is neither. The nearest names are Dense"),
        (["q*"], ValueError, "but 'q\\*' is neither"),
        (["pair.dens"], ValueError, "The nearest names are pair.dense"),
    ],
)
def test_bad_layers_are_refused(layers, error, message):
    with pytest.raises(error, match=message):
        gradient_ranges(Twice(), Tensor(X), [1], layers=layers)


class Around(nn.Cell):
    """A cell around a network, like a trainer's cell: it adds no prefix to the names of the network's Parameters."""

    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, *inputs):
        return self.network(*inputs)


@pytest.mark.parametrize("asked", ["pair.dense", "network.pair.dense"])
def test_layers_are_named_as_their_parameters(asked):
    ranges = gradient_ranges(Around(Twice()), [(Tensor(X),)], [1], layers=[asked, "shared"])
    assert {f"{name}.weight" for name in ranges.outputs} == set(ranges.weights)
    assert ranges.outputs.keys() == ranges.to_dict()["outputs"].keys() == {"pair.dense", "shared"}
    assert [line.split()[0] for line in ranges.output_table().splitlines()[1:]] == ["shared", "pair.dense"]


def test_layers_come_in_order_of_execution():
    network = nn.SequentialCell(nn.ReLU(), nn.Sigmoid(), nn.Sigmoid())
    listed = nn.CellList([nn.Tanh(), nn.Sigmoid()])
    network.listed = listed
    network.construct = lambda x: listed[1](listed[0](network[0](x)))
    outputs = LayerOutputs(network, ["*"])((Tensor(-np.ones((1, 2), np.float32)),))
    # The CellList itself is never called, and a cell that is never called has no output.
    assert list(outputs) == ["0", "listed.0", "listed.1"]
    assert list(LayerOutputs(network, ["2", "0"])((Tensor(X),))) == ["0", "2"]
    nan = array_statistics(np.full(3, np.nan, np.float32))
    table = GradientRanges({}, ((ScaleRanges(1.0, 0.0, {}),),), {"all_nan": nan}).output_table()
    assert table.splitlines()[1].split() == ["all_nan", "-", "-", "-", "0.000%", "-", "100.000%"]
