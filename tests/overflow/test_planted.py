"""Planted overflows: of each it is known which layer and which operator make the first inf, forward or going back."""

import mindspore
import numpy as np
import pytest
from conftest import mindspore_mode
from mindformers.pet import get_pet_model
from mindformers.tools.register import MindFormerConfig
from mindspore import Tensor, nn, ops
from mindspore.ops import auto_generate
from overflowing import (
    HALF,
    WIDTH,
    Convolutions,
    Frozen,
    Functional,
    LossInHalf,
    Masked,
    Recurrent,
    Residuals,
    Shared,
    WithOwnGradient,
    llama,
    planted,
    tokens,
    values,
)

from mindformers_adaptive.overflow.explain import explain_overflow
from mindformers_adaptive.wrapper import AdaptiveLossScaleUpdateCell, MFTrainOneStepCell


@pytest.fixture(scope="module")
def model():
    with mindspore_mode("pynative"):
        yield llama()


def named(network, batch, loss_scale):
    with mindspore_mode("pynative"):
        explanation = explain_overflow(network, [batch], loss_scale, remedies=False)
    assert len(str(explanation).splitlines()) <= 25
    print(explanation)
    origin = explanation.origin
    return origin.phase, origin.layer, origin.operator.partition(" ")[0]


IN_LLAMA = {
    "embedding": ({"tok_emb": 1e8}, 1, ("forward", "model", "Cast")),
    "norm": ({"layers.0.attention_norm": 6e4}, 1, ("forward", "model.layers.0.attention_norm", "Mul")),
    "projection": ({"layers.1.attention.wk": np.full(1, 4e4)}, 1, ("forward", "model.layers.1.attention.wk", "MatMul")),
    "query and key": (
        {"layers.1.attention.wq": 2e4, "layers.1.attention.wk": 2e4},
        1,
        ("forward", "model.layers.1.attention", "BatchMatMul"),
    ),
    "feed forward": (
        {"layers.0.feed_forward.w1": 2e4, "layers.0.feed_forward.w3": 2e4},
        1,
        ("forward", "model.layers.0.feed_forward", "Mul"),
    ),
    "residual": (
        {
            "tok_emb": np.full(1, 5e4),
            "layers.0.attention.wv": np.full(1, 1 / WIDTH),
            "layers.0.attention.wo": np.full(1, 4e4 / WIDTH),
        },
        1,
        ("forward", "model.layers.0", "Add"),
    ),
    "head": ({"lm_head": np.full(1, 4e4), "norm_out": 2.0}, 1, ("forward", "lm_head", "MatMul")),
    "weights": ({"lm_head": 1e8}, 1, ("forward", "lm_head", "Cast")),
    "weight that is NaN": ({"layers.1.feed_forward.w2": np.nan}, 1, ("forward", "model.layers.1.feed_forward.w2", "")),
    "head, going back": ({"lm_head": 1.0}, 2.0**32, ("backward", "lm_head", "MatMul")),
    "norm, going back": ({"tok_emb": 1e-8}, 2.0**32, ("backward", "model.norm_out", "Cast")),
}


@pytest.mark.parametrize(("changes", "scale", "expected"), IN_LLAMA.values(), ids=IN_LLAMA)
def test_in_llama(model, changes, scale, expected):
    with planted(model, changes):
        assert named(model, tokens(), scale) == expected


LORA = {"pet_type": "lora", "lora_rank": 2, "lora_alpha": 2, "target_modules": ".*wq|.*wv"}


def test_in_a_frozen_layer_of_llama_with_lora():
    """The gradient of activations overflows in a layer that is not trained: its weight has no gradient to show it."""
    mindspore.set_seed(0)
    with mindspore_mode("pynative"):
        network = get_pet_model(llama(), MindFormerConfig(**LORA))
        assert len(network.trainable_params()) == 8
        # The values that go into the head are small, so that its product fits, and its weights are large.
        with planted(network, {"lm_head": 3e5, "norm_out": 1e-6}):
            assert named(network, tokens(), 2.0**18) == ("backward", "lm_head", "MatMul")


IN_QWEN3 = {
    "norm": ({"layers.0.input_layernorm": 1e5}, 1, ("forward", "decoder.layers.0.input_layernorm", "Cast")),
    "query and key": (
        {"layers.1.self_attention.q_layernorm": 300, "layers.1.self_attention.k_layernorm": 300},
        1,
        ("forward", "decoder.layers.1.self_attention.core_attention.flash_attention", "BatchMatMul"),
    ),
    "feed forward": ({"layers.1.mlp.linear_fc1": 1e4}, 1, ("forward", "decoder.layers.1.mlp", "Mul")),
    "head, going back": ({"output_layer": 1.0}, 2.0**32, ("backward", "output_layer", "MatMul")),
}


# What a CPU lacks op by op, beside what it lacks in a graph.
ON_CPU = {
    "OneHotExt": lambda _, labels, classes, on, off: ops.one_hot(labels, classes, on, off),
    "ZerosLikeExt": lambda _, like, dtype=None: ops.ZerosLike()(like),
    "SumExt": lambda _, x, axis=None, keep=False, dtype=None: ops.ReduceSum(keep)(x, () if axis is None else axis),
}


@pytest.fixture(scope="module")
def qwen3():
    from scripts.ascend import mcore

    with pytest.MonkeyPatch.context() as patch, mindspore_mode("pynative"), mcore.mcore_on_cpu(patch):
        network = mcore.build_qwen3()
        for name, function in ON_CPU.items():
            patch.setattr(getattr(auto_generate, name), "__call__", function)
        optimizer = nn.SGD(network.trainable_params(), 0.1)
        yield MFTrainOneStepCell(network, optimizer, scale_sense=AdaptiveLossScaleUpdateCell(2**16, 2, 20))


@pytest.mark.parametrize(("changes", "scale", "expected"), IN_QWEN3.values(), ids=IN_QWEN3)
def test_in_an_mcore_model(qwen3, changes, scale, expected):
    from scripts.ascend import mcore

    batch = tuple(map(Tensor, mcore.rows(1)[0]))
    with planted(qwen3.network, changes):
        assert named(qwen3, batch, scale) == expected


def mean_of_powers(x, weight):
    return ops.exp(ops.matmul(x.astype(HALF), weight.astype(HALF)))


def products(x, weight):
    return (x.astype(HALF) @ weight.astype(HALF)) * 4096


def logarithm_of_zero(x, weight):
    return ops.log(ops.relu((x - 200) * weight.sum()))


SMALL = {
    "convolution": (Convolutions, values(2, 2, 6, 6, scale=3e4), 1, ("forward", "conv1", "Conv2D")),
    "batch norm": (lambda: Convolutions(gamma=1e5), values(2, 2, 6, 6), 1, ("forward", "conv2", "Conv2D")),
    "convolution, going back": (Convolutions, values(2, 2, 6, 6), 2.0**32, ("backward", "head", "BiasAdd")),
    "recurrent": (lambda: Recurrent(16.0), np.ones((2, 8, 4), np.float32), 1, ("forward", "state", "MatMul")),
    "recurrent, going back": (
        lambda: Recurrent(16.0),
        np.full((2, 4, 4), 1e-4, np.float32),
        2.0**20,
        ("backward", "state", "MatMul"),
    ),
    "exp": (lambda: Functional(mean_of_powers), np.full((4, 4), 4, np.float32), 1, ("forward", "", "Exp")),
    "method": (lambda: Functional(products), np.full((4, 4), 10, np.float32), 1, ("forward", "", "Mul")),
    "logarithm": (lambda: Functional(logarithm_of_zero), np.full((4, 4), 4, np.float32), 1, ("forward", "", "Log")),
    "batch": (Residuals, np.full((2, 4), np.inf, np.float32), 1, ("forward", "", "")),
    "loss in FP16": (LossInHalf, np.full((4, 4), 1e-4, np.float32), 2.0**18, ("backward", "", "")),
    "custom gradient": (WithOwnGradient, np.ones((4, 4), np.float32), 2.0**10, ("backward", "layer", "")),
    "residual, going back": (Residuals, values(2, 4, scale=0.01), 2.0**16, ("backward", "blocks.0", "")),
    "frozen layer": (Frozen, values(2, 4), 2.0**10, ("backward", "frozen", "MatMul")),
    "shared weight": (Shared, np.full((4, 4), 2.0, np.float32), 2.0**15 * 0.75, ("backward", "left", "")),
    "mask that is no overflow": (Masked, np.full((4, 4), 60, np.float32), 1, ("forward", "", "BatchMatMul")),
}


@pytest.mark.parametrize(("make", "batch", "scale", "expected"), SMALL.values(), ids=SMALL)
def test_in_small_networks(make, batch, scale, expected):
    mindspore.set_seed(0)
    network = make()
    assert named(network, (Tensor(batch),), scale) == expected
