"""Test ``explain_overflow``, except for where an overflow begins: its other results, side effects and bad arguments."""

import dataclasses
import json
import math
import re

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from mindformers_adaptive.gradients.backward import backward_pass, to_numpy
from mindformers_adaptive.gradients.reading import read_values
from mindformers_adaptive.gradients.temporary_changes import in_float32, unchanged
from mindformers_adaptive.overflow.explain import PyNativeError, explain_overflow, watched_passes
from mindformers_adaptive.overflow.explanation import Explanation
from mindformers_adaptive.overflow.origin import Origin
from tests.conftest import mindspore_mode
from tests.overflow.overflowing import (
    HALF,
    Frozen,
    Functional,
    Residuals,
    Shared,
    Stack,
    full,
    llama,
    planted,
    tokens,
    values,
)
from tests.shared.networks import GraphOnly, rows, seeded_train_step

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model():
    return llama()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_values_are_read_as_numpy_does(dtype):
    random = np.random.default_rng(0)
    for bad in ([], [np.inf], [np.nan, -np.inf], [np.nan] * 8):
        array = (random.normal(size=8) * 100).astype(dtype)
        array[: len(bad)] = bad
        reading = read_values(array, "float16")
        finite = np.abs(array[np.isfinite(array)])
        assert reading.infs_and_nans == len(bad) == array.size - finite.size
        assert reading.largest == (finite.max() if finite.size else 0.0)
    assert read_values(np.zeros((0,), dtype), "float16").headroom == math.inf


def test_nothing_of_the_training_is_changed(mode):
    train_step = seeded_train_step()
    batch = tuple(map(Tensor, rows()))

    def state():
        cells = [cell for _, cell in train_step.cells_and_names()]
        return (
            {value.name: value.asnumpy().tobytes() for value in train_step.get_parameters()},
            [(cell.training, cell.phase) for cell in cells],
            mindspore.get_rng_state().asnumpy().tobytes(),
            mindspore.get_context("mode"),
            nn.Cell.__call__,
            mindspore.ops.MatMul.__call__,
            Tensor.__add__,
            [sorted(vars(cell)) for cell in cells],
        )

    before = state()
    # The compared state includes the network's moving averages, which a forward pass changes.
    explain_overflow(train_step, [batch, batch], 2.0**30, settings={"again": seeded_train_step})
    assert state() == before


def test_a_run_takes_the_same_steps_with_a_look_in_between():
    batches = [tuple(map(Tensor, rows(seed))) for seed in range(4)]

    def losses(look_at):
        train_step = seeded_train_step()
        losses = []
        for number, batch in enumerate(batches):
            if number == look_at:
                explain_overflow(train_step, [batch], 2.0**30)
            losses.append(train_step(*batch)[0].asnumpy().tobytes())
        return losses

    assert losses(2) == losses(None)


@pytest.mark.usefixtures("graph_mode")
def test_gradients_that_are_watched_are_those_that_are_not(model):
    backward = backward_pass(model)
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    with unchanged(model):
        _, gradients, _ = backward(Tensor(2.0**10, mstype.float32), *tokens())
        plain = {w.name: np.abs(to_numpy(g)).max() for w, g in zip(backward.weights, gradients, strict=True)}
    with watched_passes(model) as passes:
        [reading] = passes([tokens()], 2.0**10)
    assert {name: np.float32(weight.largest) for name, weight in reading.weights.items()} == plain
    # The recorded calls of layers are in the order in which the forward pass executes the layers.
    layers = [call.layer for call in reading.calls if not call.operator]
    assert layers.index("model.layers.0.attention.wq") < layers.index("model.layers.0.ffn_norm")
    assert layers.index("model.layers.0.feed_forward.w1") < layers.index("lm_head")


def test_three_passes_find_the_largest_scale_without_overflow():
    network = Residuals()
    batch, backward = (Tensor(values(2, 4)),), backward_pass(network)
    for scale in (1.0, 2.0**30):
        done = []
        explain_overflow(network, [batch] * 2, scale, remedies=False, progress=done.append)
        assert done == list(range(1, len(done) + 1))
        assert len(done) <= 6
        explanation = explain_overflow(network, [batch], scale)
        safe, bad = explanation.safe_scale, explanation.overflowing_scale
        assert bad == 2 * safe
        for tried, expected in ((safe, False), (bad, True)):
            _, gradients, _ = backward(Tensor(tried, mstype.float32), *batch)
            assert any(not np.isfinite(to_numpy(gradient)).all() for gradient in gradients) is expected
        assert explanation.overflow is (scale > safe)


def test_trials_are_said_and_what_helps_comes_first(model):
    with planted(model, {"layers.0.feed_forward.w1": 2e4, "layers.0.feed_forward.w3": 2e4}):
        settings = {"as it is": lambda: model, "broken": lambda: 1 / 0}
        explanation = explain_overflow(model, [tokens()], 2.0**8, settings=settings)
    text = str(explanation).splitlines()
    assert re.match(r"The forward pass overflows, whatever .*: in model\.layers\.0\.feed_forward \(", text[0])
    tried = {trial.setting: trial for trial in explanation.tried}
    assert not tried["a lower loss_scale_value"].helps
    assert tried["model.layers.0.feed_forward in float32 (dtype)"].helps
    assert tried["as it is"].origin.layer == "model.layers.0.feed_forward"
    assert "could not be tried: ZeroDivisionError" in str(tried["broken"])
    assert text[1].startswith("What stands out")
    helps = next(number for number, line in enumerate(text) if line.startswith("What helps"))
    assert text[helps + 1].lstrip().startswith("model.layers.0.feed_forward in")
    failing = [str(each) for each in explanation.tried if not each.helps]
    assert [line.strip() for line in explanation.details().splitlines()[-3:]] == failing
    assert len(text) <= 25
    assert json.loads(json.dumps(explanation.to_dict()))["origin"]["operator"] == "Mul mul"


def test_a_setting_helps_from_twice_the_scale_on():
    settings = {f"{part} of the loss": lambda part=part: Residuals(part) for part in (1.0, 0.5)}
    tried = explain_overflow(Residuals(), [(Tensor(values(2, 4)),)], 2.0**30, settings=settings).tried[-2:]
    assert {trial.setting: trial.helps for trial in tried} == {"1.0 of the loss": False, "0.5 of the loss": True}


def test_passes_of_one_batch_have_the_same_random_numbers():
    mindspore.set_seed(0)
    network = Functional(lambda x, weight: ops.rand(4, 4) * weight + x)
    first, second = explain_overflow(network, [(Tensor(values(4, 4)),)] * 2, 1.0, remedies=False).losses
    assert first == second


def test_a_weight_just_beyond_float16_is_counted():
    network = Functional(lambda x, weight: x.astype(HALF))
    network.weight.set_data(Tensor(np.resize(np.float32([65519, 65520, -65520, 1]), (4, 4))))
    explanation = explain_overflow(network, [(Tensor(values(4, 4)),)], 1.0, remedies=False)
    assert (explanation.weights.elements, explanation.weights.parameters) == (8, ("weight",))


def test_of_layers_that_overflow_the_worst_batch_is_told():
    batches = [(Tensor(np.where(np.arange(16).reshape(4, 4) < bad, 1e5, 1).astype(np.float32)),) for bad in (1, 5, 2)]
    network = Functional(lambda x, weight: (x * weight).astype(HALF))
    explanation = explain_overflow(network, batches, 1.0, remedies=False)
    assert explanation.layers[0].forward.infs_and_nans == 5


def test_the_gradients_that_a_sum_is_made_of_fit_each():
    origin = explain_overflow(Shared(), [(Tensor(np.full((4, 4), 0.6, np.float32)),)], 60000, remedies=False).origin
    assert re.match("sum of the gradients .*left and right", origin.what)
    assert origin.largest_input == pytest.approx(36000, rel=1e-3)


def test_a_weight_is_named_through_all_of_its_casts():
    def product(x, weight):
        return x.astype(HALF) * weight.astype(HALF).astype(mstype.float32).astype(HALF)

    batch = (Tensor(np.full((4, 4), 300, np.float32)),)
    origin = explain_overflow(Functional(product), [batch], 2.0**12, remedies=False).origin
    assert (origin.operator, origin.what, origin.weight) == ("Mul", "gradient of its weight", "weight")


def test_a_lower_scale_is_tried_before_it_is_recommended():
    explanation = explain_overflow(Frozen(), [(Tensor(values(2, 4)),)], 2.0**16)
    [lower, *_] = explanation.tried
    assert lower.helps
    assert explanation.scales[lower.safe_scale] is False
    assert lower.setting == f"loss_scale_value: {lower.safe_scale:.0f}"


def test_network_without_overflow_gets_the_layers_next_to_it(model):
    explanation = explain_overflow(model, [tokens()], 2.0**4)
    assert re.match(r"No overflow .* 2\^4, .*up to 2\^", explanation.headline)
    assert not explanation.tried
    assert explanation.weights is None
    # The attention mask of -10000, and the sum of scores and mask, are left out. Otherwise both would be listed as
    # closest to overflow.
    rows = explanation.details().splitlines()
    first = rows.index(next(line for line in rows if line.startswith("bits left forward")))
    bits = [float(line.split()[1]) for line in rows[first + 1 : first + 6]]
    assert bits == sorted(bits)
    assert bits[0] > 8
    # The loss scale can grow by as many powers of two as the backward pass has bits left before an overflow.
    left = min(layer.backward.headroom for layer in explanation.layers if layer.backward is not None)
    assert math.floor(left) == math.log2(explanation.safe_scale) - 4


def test_where_nothing_was_seen_to_overflow_no_layer_is_named():
    explanation = Explanation(1.0, 1, (1.0,), {1.0: True}, Origin("backward", None))
    assert "no layer was seen" in explanation.headline
    assert "so none is named" in str(explanation)


def test_finite_loss_does_not_explain_a_nan_in_training():
    explanation = Explanation(8.0, 1, (1.0,), {8.0: False}, failure="the loss of step 3 was nan in the training")
    assert explanation.headline.startswith(f"This is not the cause: {explanation.failure}")
    assert all(name in str(explanation) for name in ("--checkpoint", "save_checkpoint_steps", "--batch", "explain"))
    bad = dataclasses.replace(explanation, losses=(math.nan,), scales={8.0: True}, origin=Origin("forward", None))
    assert bad.headline.startswith("The forward pass overflows")


def test_layers_in_float32_are_put_back():
    network = nn.SequentialCell(nn.Dense(2, 2).to_float(HALF), nn.Dense(2, 2))
    x = Tensor(np.ones((1, 2), np.float32))

    def attributes():
        return [{name: repr(value) for name, value in vars(cell).items()} for cell in network.cells()]

    # The first call of a cell sets some of its attributes. So call the cell before its attributes are compared.
    assert network[0](x).dtype == HALF
    before = attributes()
    with in_float32(network) as changed:
        assert changed == "to_float"
        assert network[0](x).dtype == mstype.float32
    assert attributes() == before
    assert network[0](x).dtype == HALF
    with in_float32(network[1]) as changed:
        assert changed == ""


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["Dense", []], TypeError, "'network' must be a Cell"),
        ([Residuals(), []], ValueError, "'batches' must hold .*empty"),
        ([Residuals(), [Tensor([1.0])], "high"], TypeError, "'loss_scale' must be"),
        ([Residuals(), [Tensor([1.0])], 0], ValueError, "'loss_scale' must be"),
        ([Residuals(), [(Tensor(full(1, 1, 3)),)]], PyNativeError, "in PyNative mode, .*fails.*: .*Check the shapes"),
    ],
)
def test_bad_input_is_refused(graph_mode, arguments, error, message):
    with pytest.raises(error, match=message):
        explain_overflow(*arguments)
    assert mindspore.get_context("mode") == mindspore.GRAPH_MODE


def test_a_network_that_fails_op_by_op_is_run_in_graph_mode(graph_mode):
    explanation = explain_overflow(GraphOnly(), [(Tensor(np.ones((1, 4), np.float32)),)], 2.0**8)
    assert explanation.graph
    assert re.search("PyNative mode .*: RuntimeError: a kernel", str(explanation))
    assert mindspore.get_context("mode") == mindspore.GRAPH_MODE


class _Sum(nn.Cell):
    def construct(self, *values):
        total = values[0]
        for value in values[1:]:
            total = total + value
        return total


class _SumOfMany(Functional):
    """Calls a cell with 12 inputs, of which graph mode measures 8."""

    def __init__(self):
        super().__init__(None)
        self.sum = _Sum()

    def construct(self, x):
        product = x * self.weight
        return self.sum(product, x, x, x, x, x, x, x, x, x, x, x).sum()


def test_inputs_that_are_not_measured_still_reach_the_cell(graph_mode):
    batch = (Tensor(np.ones((4, 4), np.float32)),)
    in_graph, in_pynative = (explain_overflow(_SumOfMany(), [batch], 1.0, graph=graph) for graph in (True, False))
    assert in_graph.losses == in_pynative.losses == (12 * 16.0,)


class _Failing(nn.Cell):
    """A cell that casts its inputs to FP16, and raises an error after some calls."""

    def __init__(self, calls):
        super().__init__()
        self.dense = nn.Dense(4, 4)
        self.to_float(HALF)
        self._calls = calls

    def construct(self, x):
        self._calls -= 1
        if self._calls < 0:
            raise LookupError("planted")
        return self.dense(x).sum()


@pytest.mark.parametrize("explained", [True, False], ids=["explained before", "trained before"])
def test_a_pass_that_failed_before_leaves_nothing_behind(explained):
    """After an exception MindSpore keeps recording operators, and then cannot record a LayerNorm's backward pass."""
    batch = (Tensor(values(2, 4)),)
    with mindspore_mode("pynative"):
        # explain_overflow calls the network twice, and MindSpore records operators only in the second call. So let the
        # first call succeed and the second call fail.
        failing = _Failing(1 if explained else 0)
        if explained:
            with pytest.raises(PyNativeError, match="planted"):
                explain_overflow(failing, [batch], 1.0)
        else:
            with pytest.raises(LookupError, match="planted"):
                mindspore.value_and_grad(failing, None, failing.trainable_params())(*batch)
        network = Stack(nn.Dense(4, 4), nn.LayerNorm((4,), gamma_init=Tensor(np.full(4, 6e4, np.float32))), nn.ReLU())
        explanation = explain_overflow(network, [batch], 2.0**16)
        assert explanation.origin is None
        assert network.layers[0](*batch).dtype == mstype.float32


def test_functions_of_mint_are_seen():
    def product(x, weight):
        return mindspore.mint.mul(mindspore.mint.add(x, x).astype(HALF), weight.astype(HALF) * 1000)

    network = Functional(product)
    explanation = explain_overflow(network, [(Tensor(np.full((4, 4), 100, np.float32)),)], 1.0)
    assert explanation.origin.operator == "Mul"
    assert explanation.origin.largest_input == 1000


def test_overflow_at_every_scale_recommends_no_scale():
    def steep(x, weight):
        near = (x.astype(HALF) * weight.astype(HALF)).abs()
        return (near + 1) / (near * 1e-4 + 1e-3)

    network = Functional(steep)
    explanation = explain_overflow(network, [(Tensor(np.full((4, 4), 0.01, np.float32)),)], 2.0**20)
    assert re.match(r"The backward pass overflows, even .* 2\^0: in the network", explanation.headline)
    assert explanation.origin.operator == "Truediv"
    assert explanation.safe_scale is None
    assert str(explanation.tried[0]) == "a lower loss_scale_value -> it overflows at 2^0 too"
    assert explanation.layers_scale == 1.0
