"""Planted overflows: explain_overflow names the known layer and operator of the first inf, forward or backward."""

import re

import mindspore
import numpy as np
import pytest
from mindformers.pet import get_pet_model
from mindformers.tools.register import MindFormerConfig
from mindspore import Parameter, Tensor, nn, ops
from mindspore.ops import auto_generate

from mindformers_adaptive.overflow.causes import growing_layers
from mindformers_adaptive.overflow.explain import explain_overflow, watched_passes
from mindformers_adaptive.overflow.origin import find_origin
from mindformers_adaptive.wrapper import AdaptiveLossScaleUpdateCell, MFTrainOneStepCell
from tests.conftest import mindspore_mode
from tests.overflow.overflowing import (
    HALF,
    WIDTH,
    Attention,
    BetweenLayers,
    Calls,
    Convolutions,
    Frozen,
    Functional,
    Holds,
    MaskedScores,
    MaskOfBatch,
    Recurrent,
    Residuals,
    Shared,
    Stack,
    Tied,
    WithOwnGradient,
    Writes,
    explained,
    full,
    llama,
    normed_in_half,
    planted,
    recomputed,
    smoothed,
    tokens,
    twice,
    values,
    written_in_place,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model():
    with mindspore_mode("pynative"):
        yield llama()


def named(network, batch, loss_scale=1):
    explanation = explained(network, batch, loss_scale)
    assert len(str(explanation).splitlines()) <= 25
    origin = explanation.origin
    layer = "nowhere" if origin.layer is None else origin.layer
    return " ".join(filter(None, (origin.phase, layer, origin.operator.partition(" ")[0])))


IN_LLAMA = {
    "embedding": ({"tok_emb": 1e8}, 1, "forward model Cast"),
    "norm": ({"attention_norm": 6e4}, 1, "forward model.layers.0.attention_norm Mul"),
    "projection": ({"attention.wk": np.full(1, 4e4)}, 1, "forward model.layers.0.attention.wk MatMul"),
    "query and key": ({"attention.wq": 2e4, "attention.wk": 2e4}, 1, "forward model.layers.0.attention BatchMatMul"),
    "feed forward": ({"feed_forward.w1": 2e4, "feed_forward.w3": 2e4}, 1, "forward model.layers.0.feed_forward Mul"),
    "residual": (
        {"tok_emb": np.full(1, 5e4), "attention.wv": np.full(1, 1 / WIDTH), "attention.wo": np.full(1, 4e4 / WIDTH)},
        1,
        "forward model.layers.0 Add",
    ),
    "head": ({"lm_head": np.full(1, 4e4), "norm_out": 2.0}, 1, "forward lm_head MatMul"),
    "weights": ({"lm_head": 1e8}, 1, "forward lm_head Cast"),
    "weight that is NaN": ({"feed_forward.w2": np.nan}, 1, "forward model.layers.0.feed_forward.w2"),
    "head, backward": ({"lm_head": 1.0}, 2.0**32, "backward lm_head MatMul"),
    "norm, backward": ({"tok_emb": 1e-8}, 2.0**32, "backward model.norm_out Cast"),
}


@pytest.mark.parametrize(("changes", "scale", "expected"), IN_LLAMA.values(), ids=IN_LLAMA)
def test_in_llama(model, changes, scale, expected):
    with planted(model, changes):
        assert named(model, tokens(), scale) == expected


@pytest.fixture(scope="module")
def three_layers():
    with mindspore_mode("pynative"):
        yield llama(layers=3)


# In each of three equal layers in turn, and far below the largest loss scale of the others.
IN_ONE_OF_THREE = {
    "weight that is NaN": (0, {"feed_forward.w2": np.nan}, 1, "forward feed_forward.w2"),
    "norm": (1, {"attention_norm": 6e4}, 1, "forward attention_norm Mul"),
    "feed forward": (1, {"feed_forward.w1": 2e4, "feed_forward.w3": 2e4}, 1, "forward feed_forward Mul"),
    "projection": (2, {"attention.wk": np.full(1, 4e4)}, 1, "forward attention.wk MatMul"),
}


@pytest.mark.parametrize(("layer", "changes", "scale", "expected"), IN_ONE_OF_THREE.values(), ids=IN_ONE_OF_THREE)
def test_in_one_of_three_equal_layers(three_layers, layer, changes, scale, expected):
    with planted(three_layers, {f"layers.{layer}.{name}": change for name, change in changes.items()}):
        assert named(three_layers, tokens(), scale) == expected.replace(" ", f" model.layers.{layer}.", 1)


class Grows(nn.Cell):
    """A layer that keeps its input, and whose gradient within is larger by the factor of its Parameters."""

    def __init__(self):
        super().__init__()
        self.factor = Parameter(Tensor(1.0, mindspore.float32), name="factor", requires_grad=False)
        self.dense = nn.Dense(4, 4, Tensor(np.eye(4, dtype=np.float32)), has_bias=False).to_float(HALF)

    def construct(self, x):
        return self.dense(x / self.factor).astype(mindspore.float32)


class Total(nn.Cell):
    def construct(self, x):
        return x.sum()


@pytest.mark.parametrize("graph", [False, True])
def test_a_gradient_that_overflows_in_one_of_three_layers(graph):
    # The gradient of the batch is not needed, so the first layer of the network must not be one of the three.
    network, batch = nn.SequentialCell(nn.Dense(4, 4, "ones"), Grows(), Grows(), Grows(), Total()), Tensor(ONES)
    with mindspore_mode("graph" if graph else "pynative"), watched_passes(network, graph=graph) as passes:
        for layer in ("1", "2", "3"):
            with planted(network, {f"{layer}.": 4096.0}):
                [seen] = passes([(batch,)], 2.0**10)
            origin = find_origin(seen)
            assert (origin.phase, origin.layer) == ("backward", f"{layer}.dense")


LORA = {"pet_type": "lora", "lora_rank": 2, "lora_alpha": 2, "target_modules": ".*wq|.*wv"}


def test_in_a_frozen_layer_of_llama_with_lora():
    mindspore.set_seed(0)
    with mindspore_mode("pynative"):
        lora = get_pet_model(llama(), MindFormerConfig(**LORA))
    assert len(lora.trainable_params()) == 4
    # The output layer (head) has small inputs, so that its product fits into FP16, but its weights are large. The head
    # is not trained, so its weight has no gradient that could show the overflow.
    with planted(lora, {"lm_head": 3e5, "norm_out": 1e-6}):
        assert named(lora, tokens(), 2.0**18) == "backward lm_head MatMul"


LARGE, SMALL, ZERO, ONES = (full(value, 2, 4) for value in (300, 1e-4, 0, 1))
FOURS, TOKENS = full(4, 4, 4), values(1, 6, 4)
# A mask that leaves nothing of any row.
NOTHING = np.ones((6, 6), bool)


def mean_of_powers(x, weight):
    return ops.exp(ops.matmul(x.astype(HALF), weight.astype(HALF)))


def products(x, weight):
    return (x.astype(HALF) @ weight.astype(HALF)) * 4096


def logarithm_of_zero(x, weight):
    return ops.log(ops.relu((x - 200) * weight.sum()))


NETWORKS = {
    "convolution": (Convolutions, values(2, 2, 6, 6, scale=3e4), 1, "forward conv1 Conv2D"),
    "batch norm": (lambda: Convolutions(gamma=1e5), values(2, 2, 6, 6), 1, "forward conv2 Conv2D"),
    "convolution, backward": (Convolutions, values(2, 2, 6, 6), 2.0**32, "backward head BiasAdd"),
    "recurrent": (lambda: Recurrent(16.0), full(1, 2, 8, 4), 1, "forward state MatMul"),
    "recurrent, backward": (lambda: Recurrent(16.0), full(1e-4, 2, 4, 4), 2.0**20, "backward state MatMul"),
    "exp": (lambda: Functional(mean_of_powers), FOURS, 1, "forward Exp"),
    "method": (lambda: Functional(products), full(10, 4, 4), 1, "forward Mul"),
    "logarithm": (lambda: Functional(logarithm_of_zero), FOURS, 1, "forward Log"),
    "batch": (Residuals, full(np.inf, 2, 4), 1, "forward"),
    "loss in FP16": (lambda: Calls(ops.mean), full(1e-4, 4, 4), 2.0**18, "backward"),
    "custom gradient": (WithOwnGradient, full(1, 4, 4), 2.0**10, "backward layer"),
    "residual, backward": (Residuals, values(2, 4, scale=0.01), 2.0**16, "backward blocks.0"),
    "frozen layer": (Frozen, values(2, 4), 2.0**10, "backward frozen MatMul"),
    "shared weight": (Shared, full(2.0, 4, 4), 2.0**15 * 0.75, "backward left"),
    "attention": (lambda: Stack(Attention(), Attention(300.0)), TOKENS * 2, 1, "forward layers.1 MatMulExt"),
    "masked row": (lambda: Stack(Attention(), Attention(mask=NOTHING)), TOKENS, 1, "forward layers.1 Softmax"),
    "called twice": (lambda: twice(Calls(ops.relu, 300.0)), ONES, 1, "forward layers.0.dense MatMul"),
    "called twice, backward": (lambda: twice(Calls(ops.relu, 64.0)), SMALL, 2.0**14, "backward layers.0.dense MatMul"),
    "recomputed": (lambda: Stack(recomputed(Calls(ops.relu, 300.0))), LARGE, 1, "forward layers.0.dense MatMul"),
    "recomputed, backward": (
        lambda: Stack(Calls(ops.relu), recomputed(Calls(ops.relu, 300.0))),
        SMALL,
        2.0**14,
        "backward layers.1.dense MatMul",
    ),
    "written in place": (lambda: Stack(Calls(written_in_place)), LARGE, 1, "forward layers.0 Mul"),
    "smoothed labels": (lambda: Stack(Calls(smoothed, 40.0)), values(4, 4), 1, "forward layers.0 Log"),
    "root, backward": (lambda: Stack(Calls(lambda x: ops.sqrt((x * x).sum(-1)))), ZERO, 1, "backward layers.0 Sqrt"),
    "depthwise convolution": (
        lambda: Stack(nn.Conv2d(4, 4, 3, group=4, weight_init="ones").to_float(HALF)),
        values(2, 4, 5, 5, scale=3e4),
        1,
        "forward layers.0 Conv2D",
    ),
    "layer norm in FP16": (
        lambda: Stack(nn.LayerNorm((4,), gamma_init=Tensor(np.full(4, 6e4, np.float32))).to_float(HALF)),
        values(2, 4, scale=30),
        1,
        "forward layers.0 LayerNorm",
    ),
    "head tied to an embedding": (lambda: Tied(200.0), np.arange(8).astype(np.int32), 1, "forward MatMulExt"),
}


@pytest.mark.parametrize(("make", "batch", "scale", "expected"), NETWORKS.values(), ids=NETWORKS)
def test_in_small_networks(make, batch, scale, expected):
    mindspore.set_seed(0)
    assert named(make(), batch, scale) == expected


HIDDEN = np.triu(np.ones((6, 6), bool), 1)
MINUS_INF = np.where(HIDDEN, -np.inf, 0).astype(np.float16)


def filled(cell, scores):
    return scores.masked_fill(cell.hidden, float("-inf"))


def added(cell, scores):
    return scores + cell.bias


def logarithm_added(cell, scores):
    return scores + ops.log(cell.kept).astype(HALF)


def chosen(cell, scores):
    return ops.where(cell.hidden, Tensor(-np.inf, HALF), scores)


def cast(cell, scores):
    return scores + ((1.0 - cell.kept) * -1e9).astype(HALF)


KEPT = Tensor((~HIDDEN).astype(np.float32))
MASKS = {
    "filled": (filled, {"hidden": Tensor(HIDDEN)}),
    "frozen Parameter": (added, {"bias": Parameter(Tensor(MINUS_INF), name="bias", requires_grad=False)}),
    "Tensor": (added, {"bias": Tensor(MINUS_INF)}),
    "logarithm of 0": (logarithm_added, {"kept": KEPT}),
    "chosen": (chosen, {"hidden": Tensor(HIDDEN)}),
    "cast": (cast, {"kept": KEPT}),
}


@pytest.mark.parametrize(("mask", "attributes"), MASKS.values(), ids=MASKS)
def test_a_healthy_mask_hides_no_overflow_and_is_none(mask, attributes):
    layer = MaskedScores(mask, after=4096.0, **attributes)
    backward = explained(Stack(layer), values(1, 6, 4, scale=1e-3), 2.0**22)
    healthy = explained(Stack(layer), values(1, 6, 4))
    assert (backward.origin.phase, backward.origin.layer) == ("backward", "layers.0")
    assert "whatever the loss scale" not in backward.headline
    assert (healthy.overflow, healthy.swallowed) == (False, "")
    # Here the product of query and key overflows too, so inf does not come from the mask only.
    network = Stack(MaskedScores(mask, growth=300.0, **attributes))
    assert named(network, values(1, 6, 4, scale=2)) == "forward layers.0 MatMulExt"


def test_a_mask_that_comes_with_the_batch():
    mask = Tensor(MINUS_INF[:4, :4].astype(np.float32))
    x = Tensor(full(1000, 4, 4))
    assert named(MaskOfBatch(300.0), (x, mask)) == "forward scores MatMul"
    assert not explained(MaskOfBatch(), (x, mask)).overflow


def masked_classes(x):
    logits = x.astype(mindspore.float32).masked_fill(Tensor([[False, False, False, True]]), float("-inf"))
    return ops.cross_entropy(logits, Tensor([0, 1], mindspore.int32))


def test_a_mask_that_is_multiplied_by_0_is_said_to():
    """MindSpore's cross entropy is NaN if a class is masked by -inf: it multiplies the mean log-softmax by 0."""
    explanation = explained(Stack(Calls(masked_classes)), ONES, remedies=True)
    assert re.match(r"The -inf of a mask\b.* multiplied\b.* NaN .*: in layers\.0 \(Calls,", explanation.headline)
    assert not explanation.tried


@mindspore.jit
def compiled(x):
    return ops.exp(x)


def assigned(cell, x):
    ops.assign(cell.state, x * 3e4)
    return x + cell.state


def added_up(cell, x):
    ops.assign_add(cell.state, x * 3e4)
    return x + cell.state


def added_by_python(cell, x):
    cell.state += x * 3e4
    return x * cell.state


def added_in_rows(cell, x):
    return x * ops.index_add(cell.state, Tensor([0, 1], mindspore.int32), x * 6e4, 0)


METHODS = {
    # A softmax by hand, and 0 divided by 0.
    "Exp": (lambda x: ops.exp(x) / ops.exp(x).sum(-1, keepdims=True), LARGE),
    "Truediv": (lambda x: x / x.abs().sum(-1, keepdims=True), ZERO),
    "Cosh": (lambda x: x.cosh(), LARGE),
    "Sinh": (lambda x: x.sinh(), LARGE),
    "Expm1": (lambda x: x.expm1(), LARGE),
    "Log1p": (lambda x: (x - 1).log1p(), ZERO),
    "TrueDivide": (lambda x: (x + 1).true_divide(x), ZERO),
    "Divide": (lambda x: (x + 1).divide(x), ZERO),
    "Subtract": (lambda x: x.subtract(x * -109), LARGE * 2),
    "Nansum": (lambda x: x.nansum(0), LARGE * 150),
    "Xlogy": (lambda x: (x + 1).xlogy(x), ZERO),
    "Atanh": (lambda x: x.atanh(), ONES),
    "Lerp": (lambda x: x.lerp(x * -100, Tensor(2.0, HALF)), LARGE * 2),
    "ReduceSum": (lambda x: ops.ReduceSum()(x, 0), LARGE * 150),
    "Mul": (lambda x: x - ops.ReduceMax(True)(x * 400, -1), LARGE),
}


@pytest.mark.parametrize("operator", METHODS)
def test_methods_and_operators_that_reduce(operator):
    function, batch = METHODS[operator]
    network = Stack(Calls(function), Calls(ops.tanh))
    assert named(network, batch) == f"forward layers.0 {operator}"


MINUS_INF_ROW = Tensor(np.array([0, -np.inf, 0, 0], np.float16))
NOT_COMPUTED_BY_A_LAYER = {
    "compiled function between layers": (lambda: BetweenLayers(compiled), LARGE, "forward layers.0"),
    "layer in a list of Python": (lambda: BetweenLayers(ops.relu, 6e4), ONES, "forward layers.0.unknown.0 MatMul"),
    "Tensor with inf": (lambda: Holds(1, np.inf, 1, 1), ONES, "forward layers.0"),
    "Tensor with -inf": (lambda: Holds(1, -np.inf, 1, 1), ONES, "forward layers.0"),
    "Tensor with -inf, added": (lambda: Calls(lambda x: x + MINUS_INF_ROW), ONES, "forward layers.0"),
    "assigned": (lambda: Writes(assigned), ONES, "forward layers.0 Mul"),
    "assigned and trained": (lambda: Writes(assigned, True), ONES, "forward layers.0 Mul"),
    "added up": (lambda: Writes(added_up), ONES, "forward layers.0 Mul"),
    "added by Python": (lambda: Writes(added_by_python, True), ONES, "forward layers.0 Mul"),
    "added in rows": (lambda: Writes(added_in_rows), ONES, "forward layers.0 Mul"),
    "in place": (lambda: Calls(lambda x: (x * 1).mul_(x * 200)), LARGE, "forward layers.0 Mul"),
}


@pytest.mark.parametrize(("make", "batch", "expected"), NOT_COMPUTED_BY_A_LAYER.values(), ids=NOT_COMPUTED_BY_A_LAYER)
def test_values_that_no_operator_in_sight_makes(make, batch, expected):
    mindspore.set_seed(0)
    network = Stack(make())
    before = [weight.asnumpy().copy() for weight in network.get_parameters()]
    assert named(network, batch) == expected
    for weight, value in zip(network.get_parameters(), before, strict=True):
        np.testing.assert_array_equal(weight.asnumpy(), value)


def test_what_overflows_only_in_a_later_batch():
    batches = [(Tensor(full(value, 2, 4)),) for value in (1, 6e4)]
    with mindspore_mode("pynative"):
        origin = explain_overflow(Stack(Calls(ops.relu, 3.0)), batches, 1.0, remedies=False).origin
    assert (origin.phase, origin.layer) == ("forward", "layers.0.dense")


def test_values_that_overflow_with_a_finite_loss_are_named():
    explanation = explained(Stack(Calls(normed_in_half)), LARGE)
    without = explained(Stack(Attention(mask=np.triu(np.ones((6, 6), bool), 1))), values(1, 6, 4))
    assert not explanation.overflow
    assert re.search(r"layers\.0 \(Calls\) computes inf or NaN\b.* loss does not show$", explanation.headline)
    # The -inf of an attention mask is intended, so it is no overflow.
    assert (without.overflow, without.swallowed) == (False, "")


def test_in_a_graph_the_same_is_measured_and_nothing_is_changed():
    mindspore.set_seed(0)
    network, batch = Frozen(), values(2, 4)
    cells = [(name, id(cell)) for name, cell in network.cells_and_names()]
    explanation, op_by_op = (explained(network, batch, 2.0**10, graph=graph) for graph in (True, False))
    origin, other = explanation.origin, op_by_op.origin
    assert (origin.phase, origin.layer, origin.operator) == ("backward", "frozen", "")
    assert (other.phase, other.layer) == ("backward", "frozen")
    assert (other.what, other.reading.size) == (origin.what, origin.reading.size)
    assert (explanation.scales, explanation.losses) == (op_by_op.scales, op_by_op.losses)
    measured, expected = (
        {layer.layer: layer.backward.largest for layer in each.layers if layer.backward}
        for each in (explanation, op_by_op)
    )
    assert measured["frozen"] == expected["frozen"]
    assert re.search(r"in graph mode, .* layers and no operators\b", str(explanation))
    assert [(name, id(cell)) for name, cell in network.cells_and_names()] == cells


@pytest.mark.parametrize("graph", [False, True])
def test_each_call_of_a_repeated_layer_is_measured(graph):
    """The state goes through one layer four times, and is beyond FP16 after the third time."""
    origin = explained(Recurrent(60.0), values(4, 5, 4), graph=graph).origin
    assert (origin.phase, origin.layer) == ("forward", "state")
    assert origin.largest_input == pytest.approx(10568.0)


class OwnParameter(nn.Cell):
    """A network that itself has a Parameter, beside its layer."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(4, 4).to_float(HALF)
        self.gain = Parameter(Tensor(np.ones(4, np.float32)), name="gain")

    def construct(self, x):
        return (self.dense(x * self.gain).astype(mindspore.float32) ** 2).mean()


def test_in_a_graph_a_bad_batch_or_own_parameter_is_named():
    batch, network = values(2, 4), OwnParameter()
    with planted(network, {"gain": np.inf}):
        assert "the weight gain has inf" in explained(network, batch, graph=True).headline
    batch[1, 2] = np.nan
    assert "the batch itself has inf" in explained(network, batch, graph=True).headline


def test_scratch_outputs_of_batch_norm_are_no_overflow():
    with mindspore_mode("pynative"):
        # Fill memory with inf, and free it, because the scratch outputs contain what was there before.
        filled = [Tensor(np.full(size, np.inf, np.float32)) * 1 for size in (2, 4, 8) * 700]
        assert not any(np.isfinite(tensor.asnumpy()).any() for tensor in filled)
        del filled
        explanation = explained(Convolutions(), values(2, 2, 6, 6))
    assert (explanation.overflow, explanation.swallowed) == (False, "")


# These cases come last, because their fixture ``qwen3`` makes MindFormers create mcore layers until this file ends.
# The cases with a Llama need MindFormers' legacy layers.
IN_QWEN3 = {
    "norm": ({"input_layernorm": 1e5}, 1, "forward decoder.layers.0.input_layernorm Cast"),
    "query and key": (
        {"q_layernorm": 300, "k_layernorm": 300},
        1,
        "forward decoder.layers.0.self_attention.core_attention.flash_attention BatchMatMul",
    ),
    "feed forward": ({"mlp.linear_fc1": 1e4}, 1, "forward decoder.layers.0.mlp Mul"),
    "head, backward": ({"output_layer": 1.0}, 2.0**32, "backward output_layer MatMul"),
}


# Replacements for operators that a CPU lacks in PyNative mode, but has in graph mode.
ON_CPU = {
    "OneHotExt": lambda _, labels, classes, on, off: ops.one_hot(labels, classes, on, off),
    "ZerosLikeExt": lambda _, like, dtype=None: ops.ZerosLike()(like),
    "SumExt": lambda _, x, axis=None, keep=False, dtype=None: ops.ReduceSum(keep)(x, () if axis is None else axis),
}


@pytest.fixture(scope="module")
def qwen3():
    from tests.mindformers import mcore_on_cpu

    with pytest.MonkeyPatch.context() as patch, mindspore_mode("pynative"), mcore_on_cpu.mcore_on_cpu():
        network = mcore_on_cpu.build_qwen3(num_hidden_layers=1)
        for name, function in ON_CPU.items():
            patch.setattr(getattr(auto_generate, name), "__call__", function)
        optimizer = nn.SGD(network.trainable_params(), 0.1)
        yield MFTrainOneStepCell(network, optimizer, scale_sense=AdaptiveLossScaleUpdateCell(2**16, 2, 20))


@pytest.mark.parametrize(("changes", "scale", "expected"), IN_QWEN3.values(), ids=IN_QWEN3)
def test_in_an_mcore_model(qwen3, changes, scale, expected):
    from tests.mindformers import mcore_on_cpu

    batch = tuple(map(Tensor, mcore_on_cpu.rows(1)[0]))
    with planted(qwen3.network, changes):
        assert named(qwen3, batch, scale) == expected


# In graph mode there is one graph for all cases, so there are more of them.
IN_A_GRAPH = IN_QWEN3 | {
    "embedding": ({"word_embeddings": 1e8}, 1, "forward embedding"),
    "projection": ({"linear_qkv": np.full(1, 4e4)}, 1, "forward decoder.layers.0.self_attention.linear_qkv"),
    "head": ({"output_layer": np.full(1, 4e4), "final_layernorm": 2.0}, 1, "forward output_layer"),
    "weights": ({"output_layer": 1e8}, 1, "forward output_layer"),
    "weight that is NaN": ({"linear_fc2": np.nan}, 1, "forward decoder.layers.0.mlp.linear_fc2"),
    # At the highest loss scale other layers overflow too, earlier than the expected layer, so use a lower loss scale.
    "large head, backward": ({"output_layer": 3e5, "final_layernorm": 1e-6}, 2.0**18, "backward output_layer"),
    "norm, backward": ({"word_embeddings": 1e-8}, 2.0**17, "backward decoder.final_layernorm"),
}


def test_in_a_graph_of_an_mcore_model(qwen3):
    from tests.mindformers import mcore_on_cpu

    batch = tuple(map(Tensor, mcore_on_cpu.rows(1)[0]))
    with mindspore_mode("graph"), watched_passes(qwen3, graph=True) as passes:
        for case, (changes, scale, expected) in IN_A_GRAPH.items():
            with planted(qwen3.network, changes):
                [seen] = passes([batch], min(scale, 2.0**20))
            origin = find_origin(seen)
            # In graph mode, no operator is seen.
            assert [origin.phase, origin.layer] == expected.split()[:2], case
        with planted(qwen3.network, {"output_layer": 3000.0}):
            [growth] = growing_layers(passes([batch], 2.0))
        assert growth.layer == "output_layer"
        assert all(name in str(growth) for name in ("values", "gradients"))
        assert not growing_layers(passes([batch], 2.0**10))
