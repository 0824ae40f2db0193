"""Cells with a gradient function, operators without a gradient, and indexes out of range, in both modes."""

import re

import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from mindformers_adaptive.overflow.explain import PyNativeError
from tests.overflow.overflowing import HALF, Calls, OwnGradient, OwnGradientOfTwo, WithOwnGradient, explained

pytestmark = pytest.mark.slow

ONES = np.ones((4, 4), np.float32)


@pytest.mark.parametrize(
    ("layer", "inputs", "graph"), [(OwnGradient, 1, False), (OwnGradientOfTwo, 2, False), (OwnGradientOfTwo, 2, True)]
)
def test_a_cell_with_its_own_gradient_is_named(layer, inputs, graph):
    origin = explained(WithOwnGradient(layer(), inputs), ONES, 2.0**10, graph=graph).origin
    assert (origin.phase, origin.layer, origin.layer_class) == ("backward", "layer", layer.__name__)


def test_a_gradient_that_reaches_no_weight_is_no_limit():
    explanation = explained(Calls(lambda x: ops.round(x).astype(mstype.float32).sum()), ONES)
    assert explanation.safe_scale == 2.0**40
    assert "nor up to 2^40" in explanation.headline


class Indexed(nn.Cell):
    """An embedding, a layer in FP16, and a loss of the layer's output and labels."""

    def __init__(self, loss):
        super().__init__()
        self.embedding, self.dense, self.loss = nn.Embedding(8, 4), nn.Dense(4, 4).to_float(HALF), loss

    def construct(self, tokens, labels):
        return self.loss(self.dense(self.embedding(tokens)).astype(mstype.float32), labels).mean()


class Gathers(nn.Cell):
    def construct(self, logits, labels):
        return ops.gather_nd(logits, ops.stack((labels, labels), -1))


TOO_LARGE = {
    "label": (nn.CrossEntropyLoss, [0, 1, 2, 3], [0, 1, 2, 7], "column 1: 0 to 7"),
    "negative label": (nn.CrossEntropyLoss, [0, 1, 2, 3], [0, 1, 2, -5], "column 1: -5 to 2"),
    "token": (nn.CrossEntropyLoss, [0, 1, 2, 100], [0, 1, 2, 3], "column 0: 0 to 100"),
    "index of two": (Gathers, [0, 1, 2, 3], [0, 1, 2, 7], "column 1: 0 to 7"),
}


@pytest.mark.parametrize(("case", "graph"), [*((case, False) for case in TOO_LARGE), ("index of two", True)])
def test_an_index_out_of_range_is_said_with_its_column(case, graph):
    loss, tokens, labels, column = TOO_LARGE[case]
    batch = tuple(Tensor(np.array(column, np.int32)) for column in (tokens, labels))
    with pytest.raises(PyNativeError) as refused:
        explained(Indexed(loss()), batch, 1024.0, graph=graph)
    assert re.search(rf"index is out of range\b.* classes.* vocabulary.*{column}", str(refused.value))
    assert "shapes and types" not in str(refused.value)
