"""Measured gradients of layer outputs equal calculated ones at each loss scale, and measuring has no side effects."""

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore import dtype as mstype

from mindformers_adaptive.gradients.layers import LayerOutputs, LayerOutputsError
from mindformers_adaptive.gradients.ranges import GradientSweep, gradient_ranges
from mindformers_adaptive.gradients.report import GradientRanges
from mindformers_adaptive.gradients.selection import select
from mindformers_adaptive.gradients.statistics import array_statistics
from tests.shared.networks import GraphOnly, OnlyLoss, Twice, WithStateAndDropout, rows

X = np.array([[2.0**-12, 0.0, 1.0, 0.0]], np.float32)


def test_gradients_are_right_in_their_dtype_and_order(mode):
    before = mindspore.get_context("mode")
    seen = {}
    sweep = GradientSweep(Twice(), ["pair", "shared", "*Dense"])
    ranges = sweep(
        [(Tensor(X),)], [2, 64], observe_output_gradients=lambda scale, arrays: seen.setdefault(scale, arrays)
    )
    # The loss is the sum of pair(shared(shared(x))). Each layer has 4 inputs and 4 outputs, and every weight is 1. So
    # each layer multiplies the gradient by 4.
    expected = {"shared": [16.0] * 4 + [4.0] * 4, "pair": [1.0] * 4, "pair.dense": [1.0] * 4}
    for scale in (2, 64):
        gradients_of = select(ranges, "activation_gradients").parameters(scale)
        assert list(gradients_of) == list(seen[scale]) == list(expected)
        for name, gradient in expected.items():
            np.testing.assert_array_equal(seen[scale][name], gradient)
            assert gradients_of[name].histogram == array_statistics(scale * np.array(gradient)).histogram
            assert (gradients_of[name].underflowed, gradients_of[name].size) == (0, len(gradient))
    assert mindspore.get_context("mode") == before


def test_what_fp16_loses_of_them_is_told_at_each_scale():
    network = OnlyFactor()
    x = np.array([[2.0**-20, 2.0**-3, 0.0]], np.float32)
    ranges = gradient_ranges(network, Tensor(x), [1, 2**8, 2**24], layers=["half"])
    of_outputs = select(ranges, "activation_gradients")
    # The gradient of the output of ``half`` is x times 2^-8. At a loss scale of 1, its smallest value 2^-28 is 0 in
    # FP16. At a loss scale of 2^24, the factor 2^24 * 2^-8 = 2^16 does not fit into FP16.
    lowest, middle, highest = (of_outputs.parameters(scale)["half"] for scale in (1, 2**8, 2**24))
    assert (lowest.underflowed, lowest.zeros, lowest.largest) == (1, 2, 2.0**-11)
    assert (middle.underflowed, middle.zeros, middle.smallest) == (0, 1, 2.0**-20)
    assert (highest.underflowed, highest.infs_and_nans) == (None, 3 - highest.zeros - len(highest.histogram))
    assert highest.infs_and_nans > 0
    assert of_outputs.fitting_scales == (1, 2**8)
    assert of_outputs.parameters(2**8, unscaled=True)["half"].largest == 2.0**-11
    read = GradientRanges.from_dict(ranges.to_dict())
    assert select(read, "activation_gradients").overall(1.0).underflowed == 1
    assert read.to_dict()["activation_gradients"][0]["layers"]["half"]["underflowed_share"] == 1 / 3


class OnlyFactor(nn.Cell):
    """A network in which the gradient of the output of ``half`` is x / 2^8, in FP16."""

    def __init__(self):
        super().__init__()
        self.first = nn.Dense(3, 3, "ones", has_bias=False)
        self.half = Half()

    def construct(self, x):
        return (self.half(self.first(x)) * x.astype(mstype.float16)).astype(mstype.float32).sum() * 2.0**-8


class Half(nn.Cell):
    def construct(self, x):
        return x.astype(mstype.float16)


def test_cells_with_a_bprop_have_gradients_and_frozen_ones_none():
    # Before MindSpore 2.8, a network that has run once ignores later freezing. So use a second network.
    frozen, network = (
        nn.SequentialCell(nn.Dense(4, 4, has_bias=False), nn.ReLU(), Tripled(), nn.Dense(4, 4, "ones"), Sum())
        for _ in range(2)
    )
    frozen[0].weight.requires_grad = False
    names = ["0", "1", "2", "3"]
    ranges = gradient_ranges(frozen, Tensor(X), [4], layers=names)
    assert list(ranges.outputs) == names
    assert list(ranges.to_dict()["activation_gradients"][0]["layers"]) == ["3"]
    unscaled = select(gradient_ranges(network, Tensor(X), [4], layers=names), "activation_gradients")
    assert {name: each.largest for name, each in unscaled.parameters(4, unscaled=True).items()} == {
        **{"0": 12 if (network[0](Tensor(X)).asnumpy() > 0).any() else 0, "1": 12, "2": 4, "3": 1}
    }


class Tripled(nn.Cell):
    def construct(self, x):
        return 3 * x

    def bprop(self, x, out, dout):
        return (3 * dout,)


class Sum(nn.Cell):
    def construct(self, x):
        return x.sum()


def test_passes_leave_the_network_alone_and_are_told_of(mode):
    mindspore.set_seed(1)
    network = OnlyLoss(WithStateAndDropout())
    call, done = nn.Cell.__call__, []
    before = {value.name: value.asnumpy().tobytes() for value in network.get_parameters()}
    states = [(cell.training, cell.phase, cell.requires_grad) for _, cell in network.cells_and_names()]
    random = [np.array(state) for state in mindspore.get_rng_state()]
    ranges = gradient_ranges(network, rows(), [1, 2**10], layers=["*"], progress=done.append)
    assert done == [1, 2, 3, 4]
    assert {value.name: value.asnumpy().tobytes() for value in network.get_parameters()} == before
    assert [(cell.training, cell.phase, cell.requires_grad) for _, cell in network.cells_and_names()] == states
    assert all(np.array_equal(a, b) for a, b in zip(random, mindspore.get_rng_state(), strict=True))
    assert nn.Cell.__call__ is call
    assert not any("construct" in vars(cell) for _, cell in network.cells_and_names())
    # The measurement turns dropout off. So the layer ``dropout`` passes on its input and its gradient unchanged.
    assert ranges.outputs["dropout"] == ranges.outputs["norm"]
    [of_outputs] = select(ranges, "activation_gradients").batches
    assert of_outputs[0].parameters["dropout"] == of_outputs[0].parameters["norm"]
    # A compiled graph rounds at other operations than PyNative mode, so the losses of the two modes differ slightly.
    assert of_outputs[0].loss == pytest.approx(ranges.batches[0][0].loss, rel=1e-3)


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
def test_recomputed_layers_are_measured_once(mode):
    network = Twice()
    plain = select(gradient_ranges(network, Tensor(X), [8], layers=["*"]), "activation_gradients").parameters(8)
    network.pair.recompute()
    cell, attributes = network.pair._recompute_cell, sorted(vars(network.pair))
    again = select(gradient_ranges(network, Tensor(X), [8], layers=["*"]), "activation_gradients").parameters(8)
    assert again == plain
    assert network.pair._recompute_cell is cell is not None
    assert sorted(vars(network.pair)) == attributes


def test_without_layers_it_is_said_how_to_measure_them(graph_mode):
    ranges = gradient_ranges(GraphOnly(), Tensor(X), [1])
    content = ranges.to_dict()
    assert (ranges.activation_gradients, content.pop("activation_gradients"), ranges.outputs) == ((), [], {})
    # Also test a report that is read from an older file, without activation gradients.
    for old in (ranges, GradientRanges.from_dict(content)):
        with pytest.raises(ValueError, match=r"no activation gradients .* give 'layers'"):
            select(old, "activation_gradients")


def test_network_without_a_backward_pass_is_reported(graph_mode):
    network, call = nn.SequentialCell(nn.Dense(4, 4), Sum()), nn.Cell.__call__

    def fail():
        network(Tensor(X))
        raise RuntimeError("a kernel is missing")

    message = "activation gradients of 'layers', .*PyNative mode.* a kernel is missing.* Leave out 'layers'"
    with pytest.raises(LayerOutputsError, match=message):
        LayerOutputs(network, ["Dense"]).gradients(fail)
    assert (mindspore.get_context("mode"), nn.Cell.__call__) == (mindspore.GRAPH_MODE, call)
