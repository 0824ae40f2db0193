"""The layer that grows, large weights and a low scale are named where they stand out, not in healthy networks."""

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.common.initializer import Normal

from mindformers_adaptive.overflow.causes import large_weights, low_scale
from tests.conftest import mindspore_mode
from tests.overflow.overflowing import (
    HALF,
    Attention,
    Autoencoder,
    Calls,
    Convolutions,
    MaskedScores,
    Mixer,
    Recurrent,
    Residuals,
    Stack,
    WithOwnGradient,
    explained,
    filled_mask,
    full,
    llama,
    planted,
    tokens,
    values,
)

pytestmark = pytest.mark.slow


def named(explanation, kind):
    return {cause.layer: cause for cause in explanation.causes if cause.kind == kind}


@pytest.fixture(scope="module")
def model():
    with mindspore_mode("pynative"):
        yield llama()


PLANTED = {
    "head": ({"lm_head": 3000.0}, "lm_head", "lm_head.weight"),
    "norm": ({"norm_out": 3000.0}, "model.norm_out", "model.norm_out.weight"),
    "feed forward": (
        {"0.feed_forward.w2": 1e3},
        "model.layers.0.feed_forward.w2",
        "model.layers.0.feed_forward.w2.weight",
    ),
    "query": ({"0.attention.wq": 1e3}, "model.layers.0.attention.wq", "model.layers.0.attention.wq.weight"),
}


@pytest.mark.parametrize("case", PLANTED)
def test_the_layer_that_grows_is_named_with_its_weight(model, case):
    changes, layer, weight = PLANTED[case]
    with planted(model, changes):
        explanation = explained(model, tokens(), 2.0**16)
        [largest] = [np.abs(each.asnumpy()).max() for each in model.get_parameters() if each.name == weight]
    growth = named(explanation, "growth")
    assert list(growth) == [layer]
    assert growth[layer].factor >= 64
    assert "gradients" in str(growth[layer])
    assert f"weight is {largest:.4g}" in str(growth[layer])
    assert list(named(explanation, "weights")) == [weight]
    assert (case in ("head", "norm")) is bool(named(explanation, "scale"))


@pytest.mark.parametrize("graph", [False, True])
def test_a_gradient_that_grows_without_weights_is_named(graph):
    explanation = explained(WithOwnGradient(), np.ones((4, 4), np.float32), 1024.0, graph=graph)
    growth = named(explanation, "growth")
    assert list(growth) == ["layer"]
    assert "values" not in str(growth["layer"])


class Norms(nn.Cell):
    """Small values into a layer norm, then dense layers of very different sizes, the last of them 0."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(32, 16, embedding_table="normal"), nn.LayerNorm((16,))
        self.up = nn.Dense(16, 64).to_float(HALF)
        self.down = nn.Dense(64, 16, "zeros").to_float(HALF)
        self.loss = nn.CrossEntropyLoss()

    def construct(self, tokens):
        hidden = self.embedding(tokens[:, 0])
        hidden = hidden + self.down(ops.relu(self.up(self.norm(hidden)))).astype(mstype.float32)
        return self.loss(hidden, tokens[:, 1])


class Block(nn.Cell):
    """A layer norm and a dense layer, beside which its input passes on."""

    def __init__(self):
        super().__init__()
        self.norm, self.dense = nn.LayerNorm((16,)), nn.Dense(16, 16).to_float(HALF)

    def construct(self, hidden):
        return hidden + self.dense(self.norm(hidden)).astype(mstype.float32)


class SmallEmbedding(nn.Cell):
    """An embedding with small values, as in a large model, and a block that begins with a layer norm."""

    def __init__(self):
        super().__init__()
        self.embedding, self.block = nn.Embedding(32, 16, embedding_table=Normal(0.002)), Block()
        self.loss = nn.CrossEntropyLoss()

    def construct(self, tokens):
        return self.loss(self.block(self.embedding(tokens[:, 0])), tokens[:, 1])


def trained(network, batch, steps):
    train_step = nn.TrainOneStepCell(network, nn.Adam(network.trainable_params(), 1e-3))
    train_step.set_train()
    for _ in range(steps):
        train_step(*batch)
    return network


HEALTHY = {
    "convolutions": (Convolutions, values(2, 2, 6, 6)),
    "residuals": (Residuals, values(2, 4)),
    "attention": (lambda: Stack(Attention(), Attention()), values(1, 6, 4)),
    "mask": (lambda: Stack(MaskedScores(filled_mask(6))), values(1, 6, 4)),
    "recurrent": (lambda: Recurrent(1.0), values(2, 4, 4)),
    "norms": (Norms, np.random.default_rng(0).integers(16, size=(4, 2)).astype(np.int32)),
    "small embedding": (SmallEmbedding, np.random.default_rng(0).integers(16, size=(4, 2)).astype(np.int32)),
    "mixer": (Mixer, values(5, 6, 8)),
    "autoencoder": (Autoencoder, values(4, 16)),
    "llama": (llama, tokens()[0].asnumpy()),
}


@pytest.mark.parametrize(
    ("case", "steps", "scale"),
    [
        *((case, 0, 1.0) for case in ("attention", "convolutions", "norms", "small embedding")),
        *((case, 2, 2.0**16) for case in HEALTHY),
    ],
)
def test_nothing_is_named_in_a_healthy_network(case, steps, scale):
    mindspore.set_seed(0)
    make, batch = HEALTHY[case]
    batch = (Tensor(batch),)
    with mindspore_mode("pynative"):
        network = trained(make(), batch, steps)
    explanation = explained(network, batch, scale)
    assert not explanation.causes, str(explanation)


def test_large_weights_are_large_among_their_kind():
    matrices = {f"layer{index}.weight": (2, 0.1) for index in range(5)}
    assert not large_weights(matrices)
    assert not large_weights({**matrices, "table": (2, 5.0), "bias": (1, 300.0)})
    [cause] = large_weights({**matrices, "layer5.weight": (2, 400.0), "layer6.weight": (2, 300.0)})
    assert (cause.layer, cause.kind) == ("layer5.weight", "weights")
    assert "1 more" in str(cause)


def test_a_low_scale_is_one_that_overflows_at_2_to_the_8():
    assert [bool(low_scale(scale)) for scale in (None, 2.0**9, 2.0**8, 1.0)] == [False, False, True, True]


IN_HALF = {
    "sum": (lambda x: x.sum(), 4e3, 1.0),
    "squares": (lambda x: (x * x).mean(), 300.0, 1.0),
    "reduced": (lambda x: ops.ReduceSum()(x, ()), 4e3, 1.0),
    "loss scale": (lambda x: x.mean(), 4e-4, 2.0**18),
    "mean of a power": (lambda x: ops.pow(x, 2.0).mean(), 300.0, 1.0),
}


@pytest.mark.parametrize("case", IN_HALF)
def test_a_loss_in_float32_is_tried(case):
    function, size, scale = IN_HALF[case]
    explanation = explained(Calls(function), full(size, 8, 4), scale, remedies=True)
    [tried] = [each for each in explanation.tried if "the loss" in each.setting]
    assert tried.helps
    assert tried.setting.endswith("in float32")


def test_nothing_helps_lists_what_was_tried():
    network, batch = Calls(lambda x: x.sum()), full(np.inf, 8, 4)
    text = str(explained(network, batch, 8.0, remedies=True, settings={"other": lambda: 1 / 0}))
    tried = text[text.index("Nothing that was tried") : text.index("Evidence")]
    assert "a lower loss_scale_value" in tried
    assert "other -> could not be tried" in tried
