"""Networks that are broken in a known way: what the explanation of their overflow says names the cause."""

import re

import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from mindformers_adaptive.record.diagnosis import diagnose
from mindformers_adaptive.record.symptom import Seen
from tests.overflow.overflowing import (
    HALF,
    Attention,
    Autoencoder,
    Block,
    Calls,
    Convolutions,
    Mixer,
    Recurrent,
    Residuals,
    Stack,
    explained,
    planted,
    values,
)

pytestmark = pytest.mark.slow


def printed(explanation):
    """Return what a training's log has of an explanation, and what ``print`` shows."""
    return [str(explanation), explanation.summary()]


def explained_by(said, network, batch):
    """Explain how a batch breaks a network; the first line must say it, in the log and where it is printed."""
    explanation = explained(network, batch, 2.0**16, remedies=True)
    assert all(said in text.splitlines()[0] for text in printed(explanation))
    return explanation


NETWORKS = {
    "mixer": (Mixer, values(5, 6, 8)),
    "autoencoder": (Autoencoder, values(4, 16)),
    "convolutions": (Convolutions, values(2, 2, 6, 6)),
    "residuals": (Residuals, values(2, 4)),
    "recurrent": (lambda: Recurrent(1.0), values(2, 4, 4)),
    "attention": (lambda: Stack(Attention(), Attention()), values(1, 6, 4)),
}
# A network, a weight of it, and whether only one element is an outlier.
OUTLIERS = [
    ("mixer", "channels.weight", True),
    ("mixer", "norms.2.gamma", False),
    ("autoencoder", "encoder.weight", False),
    ("autoencoder", "decoder.weight", True),
    ("convolutions", "conv2.weight", True),
    ("residuals", "blocks.1.dense.weight", False),
    ("recurrent", "state.weight", True),
    ("attention", "layers.0.key.weight", False),
]


@pytest.mark.parametrize(("network", "weight", "is_single"), OUTLIERS)
def test_a_weight_outlier_is_named(network, weight, is_single):
    make, batch = NETWORKS[network]
    network = make()
    [changed] = [each.asnumpy().copy() for each in network.get_parameters() if each.name.endswith(weight)]
    if is_single:
        changed.flat[0] = 4000.0 * np.abs(changed).max()
    else:
        changed *= 4000.0
    with planted(network, {weight: changed}):
        explanation = explained(network, batch, 2.0**16)
    [named] = [cause for cause in explanation.causes if cause.kind == "weights"]
    assert named.layer.endswith(weight)
    assert all(str(named) in text for text in printed(explanation))


LARGE = [("convolutions", 64.0), ("mixer", 300.0), ("autoencoder", 500.0), ("recurrent", 100.0), ("attention", 64.0)]


@pytest.mark.parametrize(("network", "factor"), LARGE)
def test_weights_after_too_large_an_update_are_named(network, factor):
    make, batch = NETWORKS[network]
    network = make()
    with planted(network, {weight.name: factor for weight in network.get_parameters() if weight.ndim > 1}):
        explanation = explained(network, batch, 2.0**16)
    [named] = [cause for cause in explanation.causes if cause.kind == "weights"]
    assert not named.layer
    assert all("learning rate" in text for text in printed(explanation))


@pytest.mark.parametrize(("network", "bad"), [*zip(NETWORKS, [np.nan, np.inf] * 3, strict=True)])
def test_a_bad_batch_is_named(network, bad):
    make, batch = NETWORKS[network]
    batch = batch.copy()
    batch.flat[-1] = bad
    assert not explained_by("the batch itself has inf", make(), batch).causes


CAUSAL = np.triu(np.ones((6, 6), bool), 1)
# The first token is padding, so that with a causal mask the first row sees nothing.
PADDING = np.arange(6) == 0
HIDDEN = Tensor(CAUSAL | PADDING)
ADDED = [Tensor(np.where(mask, -np.inf, 0.0).astype(np.float16)) for mask in (CAUSAL, np.tile(PADDING, (6, 1)))]


def softmax(x):
    return ops.softmax(x, axis=-1).astype(mstype.float32).var()


def log_softmax(x):
    return ops.log_softmax(x, axis=-1).astype(mstype.float32).mean()


MASKS = {
    "everything": lambda: Stack(Attention(mask=np.ones((6, 6), bool))),
    "the diagonal too": lambda: Stack(Attention(), Attention(mask=np.triu(np.ones((6, 6), bool)))),
    "padding": lambda: Stack(Attention(mask=CAUSAL | PADDING), Attention()),
    "where": lambda: Calls(lambda x: softmax(ops.where(HIDDEN, Tensor(-np.inf, HALF), x)), width=6),
    "two masks": lambda: Calls(lambda x: softmax(x + ADDED[0] + ADDED[1]), width=6),
    "a logarithm": lambda: Calls(lambda x: log_softmax(x.masked_fill(HIDDEN, float("-inf"))), width=6),
}


@pytest.mark.parametrize("case", MASKS)
def test_an_empty_row_of_a_mask_is_named(case):
    network = MASKS[case]()
    batch = values(6, 6) if isinstance(network, Calls) else values(1, 6, 4)
    assert not explained_by("mask leaves nothing of", network, batch).causes


# A mask of -1e9 that hides all of the first row, so that softmax in FP16 makes NaN of it.
FIRST_ROW = Tensor(np.eye(6, dtype=np.float32)[:1].T @ np.full((1, 6), -1e9, np.float32))
BEYOND = {
    "multiplied": lambda x: softmax(x + HIDDEN.astype(HALF) * -1e9),
    "a row": lambda x: softmax(x + FIRST_ROW.astype(HALF)),
    "kept by 0": lambda x: softmax(x * 1.0 + HIDDEN.astype(HALF) * Tensor(-1e9).astype(HALF)),
}


@pytest.mark.parametrize("case", BEYOND)
def test_a_mask_that_fp16_cannot_hold_is_said(case):
    explained_by("1e+09 is inf in float16", Calls(BEYOND[case], width=6), values(6, 6))


NOT_IN_THE_DOMAIN = {
    "logarithm of 0": (lambda x: -ops.log(ops.softmax(x.astype(mstype.float32) * 1000, -1)).mean(), "logarithm of 0"),
    "logarithm below 0": (lambda x: ops.log(x.astype(mstype.float32) - 100.0).mean(), "below 0"),
    "division by 0": (lambda x: (1.0 / (x.astype(mstype.float32) * 0.0)).mean(), "divides by 0"),
}


@pytest.mark.parametrize("case", NOT_IN_THE_DOMAIN)
def test_an_input_for_which_an_operator_has_no_number_is_said(case):
    function, said = NOT_IN_THE_DOMAIN[case]
    explained_by(said, Calls(function), values(4, 4))


def test_numbers_of_the_backward_pass_are_called_so():
    explanation = explained(
        Calls(lambda x: ops.rsqrt(x * x).astype(mstype.float32).mean()), np.full((4, 4), 3e-3, np.float32)
    )
    assert explanation.origin.phase == "backward"
    assert re.search("smallest input .*forward pass", str(explanation))
    assert "largest incoming gradient" in str(explanation)


def test_what_lets_weights_pass_does_not_undo_their_update():
    network = Stack(Attention(), Attention(growth=300.0))
    explanation = explained(network, values(1, 6, 4), remedies=True)
    helping = "What helps"
    assert helping in str(explanation)
    jump = diagnose([Seen(1, 2.0), Seen(2, 4000.0), Seen(3, 4000.0)])
    after = explanation.after(jump)
    assert re.match(r"The training: The loss .* step 2, 2,000 times", str(after))
    assert "lower the learning rate" in str(after).splitlines()[0]
    for text in printed(after):
        assert helping not in text
        assert "does not undo an update" in text
    assert str(explanation.after([])) == str(explanation)


class SumOf(nn.Cell):
    """Layers, and a loss that is a sum over everything instead of a mean, in float32."""

    def __init__(self, *layers, power=2.0, factor=1.0):
        super().__init__()
        self.layers = nn.CellList(list(layers))
        self.power, self.factor = power, factor

    def construct(self, x):
        for layer in self.layers:
            x = layer(x)
        return (x.astype(mstype.float32) ** self.power).sum() * self.factor


def half(inputs, outputs):
    return nn.Dense(inputs, outputs, "ones", has_bias=False).to_float(HALF)


LOW = {
    "one layer": (lambda: SumOf(half(4, 4)), values(512, 4, scale=8.0)),
    "two layers": (lambda: SumOf(half(4, 4), half(4, 4)), values(64, 4, scale=4.0)),
    "linear": (lambda: SumOf(half(4, 4), power=1.0), values(4096, 4) + 1.0),
    "a factor": (lambda: SumOf(half(4, 4), factor=500.0), values(8, 4)),
    "residual": (lambda: SumOf(half(4, 4), Block(), Block()), values(256, 4, scale=4.0)),
}


@pytest.mark.parametrize("case", LOW)
def test_an_unusually_low_scale_is_named(case):
    make, batch = LOW[case]
    explanation = explained(make(), batch, 2.0**16)
    [named] = [cause for cause in explanation.causes if cause.kind == "scale"]
    assert all(str(named) in text for text in printed(explanation))
    assert "sum" in str(named)
    # The same network with a mean as the loss holds a usual scale.
    explanation = explained(make(), batch / 2**10, 2.0**16)
    assert not any(cause.kind == "scale" for cause in explanation.causes)
