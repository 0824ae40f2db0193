"""Networks that overflow on purpose: the layer and the operator that make the first inf are known."""

import contextlib

import mindspore
import numpy as np
from mindformers.models.llama import LlamaConfig, LlamaForCausalLM
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

from mindformers_adaptive.overflow.explain import explain_overflow
from tests.conftest import mindspore_mode

HALF = mstype.float16
VOCABULARY, SEQ_LENGTH, WIDTH = 32, 8, 16


def llama(layers=1, **settings):
    """Return a Llama of MindFormers in FP16."""
    mindspore.set_seed(0)
    config = {"compute_dtype": "float16", "param_init_type": "float32", "use_flash_attention": False}
    config |= {"use_rope_slice": True, "fused_rms_norm": False, "pad_token_id": VOCABULARY, "ignore_token_id": -100}
    sizes = {"batch_size": 2, "seq_length": SEQ_LENGTH, "hidden_size": WIDTH, "num_layers": layers, "num_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, multiple_of=8, **sizes, **config, **settings))


def tokens():
    numbers = np.random.default_rng(0).integers(VOCABULARY, size=(2, SEQ_LENGTH + 1))
    return (Tensor(numbers.astype(np.int32)),)


@contextlib.contextmanager
def planted(network, changes):
    """Change Parameters within the block: multiply those whose names contain a text, or set them to an array."""
    before = {}
    # Leave out the Parameters that the search for overflows adds to a network in graph mode: like the names of weights,
    # their names contain layer names.
    weights = [weight for weight in network.get_parameters() if not weight.name.startswith(("sink_of", "watch_of"))]
    for weight in weights:
        for text, change in changes.items():
            if text in weight.name:
                before[weight] = weight.asnumpy().copy()
                value = before[weight] * change if np.isscalar(change) else np.broadcast_to(change, weight.shape)
                weight.set_data(Tensor(value.astype(np.float32)).astype(weight.dtype))
    assert before, changes
    try:
        yield network
    finally:
        for weight, value in before.items():
            weight.set_data(Tensor(value, weight.dtype))


def explained(network, batch, loss_scale=1.0, *, graph=False, remedies=False, **options):
    """Explain how a batch, an array or a tuple of Tensors, overflows a network in PyNative or in graph mode."""
    batch = batch if isinstance(batch, tuple) else (Tensor(batch),)
    with mindspore_mode("graph" if graph else "pynative"):
        explanation = explain_overflow(network, [batch], loss_scale, graph=graph, remedies=remedies, **options)
    print(explanation)
    return explanation


def values(*shape, scale=1.0):
    return np.random.default_rng(1).normal(size=shape).astype(np.float32) * np.float32(scale)


def full(value, *shape):
    return np.full(shape, value, np.float32)


class Convolutions(nn.Cell):
    """Two convolutions in FP16, with batch norms in float32."""

    def __init__(self, gamma="ones"):
        super().__init__()
        self.conv1 = nn.Conv2d(2, 4, 3, weight_init="ones").to_float(HALF)
        self.norm1 = nn.BatchNorm2d(4, gamma_init=gamma if gamma == "ones" else Tensor(np.full(4, gamma, np.float32)))
        self.conv2 = nn.Conv2d(4, 4, 3, weight_init="ones").to_float(HALF)
        self.norm2 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU()
        self.head = nn.Dense(4, 2, "normal").to_float(HALF)

    def construct(self, images):
        hidden = self.relu(self.norm1(self.conv1(images).astype(mstype.float32)))
        hidden = self.relu(self.norm2(self.conv2(hidden).astype(mstype.float32)))
        return (self.head(hidden.mean(axis=(2, 3))).astype(mstype.float32) ** 2).mean()


class Recurrent(nn.Cell):
    """A recurrent network, whose state goes through a dense layer in FP16 at each step."""

    def __init__(self, growth):
        super().__init__()
        self.inputs = nn.Dense(4, 4, "ones", has_bias=False).to_float(HALF)
        self.state = nn.Dense(4, 4, Tensor(np.eye(4, dtype=np.float32) * growth), has_bias=False).to_float(HALF)
        self.tanh = nn.Tanh()

    def construct(self, steps):
        state = self.inputs(steps[:, 0])
        for step in range(1, steps.shape[1]):
            state = self.state(state) + self.inputs(steps[:, step])
        return self.tanh(state.astype(mstype.float32)).mean()


class Functional(nn.Cell):
    """A cell without subcells, which calls functions, methods of Tensors and Python's operators."""

    def __init__(self, function):
        super().__init__()
        self.weight = Parameter(Tensor(np.ones((4, 4), np.float32)), name="weight")
        self.function = function

    def construct(self, x):
        return self.function(x, self.weight).astype(mstype.float32).mean()


class Residuals(nn.Cell):
    """Residual blocks: the output of each block is added to its input."""

    def __init__(self, last=1.0):
        super().__init__()
        self.first = nn.Dense(4, 4, "ones", has_bias=False).to_float(HALF)
        self.blocks = nn.CellList([Block(), Block()])
        self.last = last

    def construct(self, x):
        hidden = self.first(x)
        for block in self.blocks:
            hidden = block(hidden)
        return (hidden.astype(mstype.float32) * self.last).sum()


class Block(nn.Cell):
    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(4, 4, Tensor(np.eye(4, dtype=np.float32)), has_bias=False).to_float(HALF)
        self.add = ops.Add()

    def construct(self, x):
        return self.add(x, self.dense(x))


class Frozen(nn.Cell):
    """A trained layer, then frozen layers whose weights make gradients larger and values smaller."""

    def __init__(self):
        super().__init__()
        self.trained = nn.Dense(4, 4, "ones").to_float(HALF)
        self.frozen = nn.Dense(4, 4, Tensor(np.eye(4, dtype=np.float32) * 4096), has_bias=False).to_float(HALF)
        self.frozen.weight.requires_grad = False
        self.shrink = 2.0**-12

    def construct(self, x):
        return (self.frozen(self.trained(x) * self.shrink).astype(mstype.float32)).sum()


class Shared(nn.Cell):
    """A weight that two layers share: the gradient from each layer fits into FP16, but the sum of both does not."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(np.ones((4, 4)), HALF), name="weight")
        self.left, self.right = Times(), Times()

    def construct(self, x):
        return self.left(x, self.weight) + self.right(x, self.weight)


class Times(nn.Cell):
    def __init__(self):
        super().__init__()
        self.mul = ops.Mul()

    def construct(self, x, weight):
        return self.mul(x.astype(HALF), weight).astype(mstype.float32).sum()


class WithOwnGradient(nn.Cell):
    """A layer with a custom gradient function, whose operators explain_overflow cannot see."""

    def __init__(self, layer=None, inputs=1):
        super().__init__()
        self.dense = nn.Dense(4, 4, "ones")
        self.layer = layer or OwnGradient()
        self.inputs = inputs

    def construct(self, x):
        hidden = self.dense(x).astype(HALF)
        return self.layer(*(hidden,) * self.inputs).astype(mstype.float32).sum()


class OwnGradient(nn.Cell):
    def construct(self, x):
        return x * 2.0

    def bprop(self, x, out, dout):
        return (dout * 4096.0,)


class OwnGradientOfTwo(nn.Cell):
    """A layer with a custom gradient function and a layer inside, which the gradient function does not use."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Dense(4, 4, "ones").to_float(HALF)

    def construct(self, x, y):
        return self.inner(x) + y

    def bprop(self, x, y, out, dout):
        return dout * 4096.0, dout


class Attention(nn.Cell):
    """Attention that computes the product, the mask and the softmax by calls of functions instead of cells."""

    def __init__(self, growth=1.0, mask=None):
        super().__init__()
        self.query = nn.Dense(4, 4, Tensor(np.eye(4, dtype=np.float32) * growth), has_bias=False).to_float(HALF)
        self.key = nn.Dense(4, 4, Tensor(np.eye(4, dtype=np.float32) * growth), has_bias=False).to_float(HALF)
        self.mask = None if mask is None else Tensor(mask)

    def construct(self, x):
        query, key = self.query(x), self.key(x)
        scores = ops.matmul(query, key.swapaxes(-1, -2))
        if self.mask is not None:
            scores = scores.masked_fill(self.mask, float("-inf"))
        return x + ops.matmul(ops.softmax(scores, axis=-1), key).astype(mstype.float32)


class MaskedScores(nn.Cell):
    """Attention with a float32 softmax. ``mask(cell, scores)`` masks the scores by the attributes of the cell."""

    def __init__(self, mask, growth=1.0, after=1.0, **attributes):
        super().__init__()
        self.query = nn.Dense(4, 4, Tensor(np.eye(4, dtype=np.float32) * growth), has_bias=False).to_float(HALF)
        self.key = nn.Dense(4, 4, Tensor(np.eye(4, dtype=np.float32) * growth), has_bias=False).to_float(HALF)
        self.mask, self.after, self.softmax = mask, after, nn.Softmax()
        for name, value in attributes.items():
            setattr(self, name, value)

    def construct(self, x):
        query, key = self.query(x), self.key(x)
        scores = self.mask(self, ops.matmul(query, key.swapaxes(-1, -2)))
        weights = self.softmax(scores.astype(mstype.float32)).astype(HALF)
        return (ops.matmul(weights, key) * self.after).astype(mstype.float32)


def filled_mask(size):
    """Return a function that masks attention scores with -inf above the diagonal."""
    hidden = Tensor(np.triu(np.ones((size, size), bool), 1))
    return lambda cell, scores: scores.masked_fill(hidden, float("-inf"))


class MaskOfBatch(nn.Cell):
    """Attention scores to which a mask from the batch is added."""

    def __init__(self, growth=1.0):
        super().__init__()
        self.scores = nn.Dense(4, 4, Tensor(np.eye(4, dtype=np.float32) * growth), has_bias=False).to_float(HALF)
        self.softmax = nn.Softmax()

    def construct(self, x, mask):
        return self.softmax((self.scores(x) + mask.astype(HALF)).astype(mstype.float32)).var()


class Holds(nn.Cell):
    """A layer in FP16 whose output is multiplied by a Tensor that the cell holds."""

    def __init__(self, *scale):
        super().__init__()
        self.dense = nn.Dense(4, 4, "ones").to_float(HALF)
        self.scale = Tensor(np.array(scale, np.float16))

    def construct(self, x):
        return self.dense(x) * self.scale


class Writes(nn.Cell):
    """An FP16 layer, then a function that writes to the Parameter ``state``. ``trained``: whether it is trainable."""

    def __init__(self, function, trained=False):
        super().__init__()
        self.dense = nn.Dense(4, 4, "ones").to_float(HALF)
        self.state = Parameter(Tensor(np.ones((2, 4)), HALF), name="state", requires_grad=trained)
        self.function = function

    def construct(self, x):
        return self.function(self, self.dense(x))


class BetweenLayers(nn.Cell):
    """A network that calls a function between two FP16 layers. A plain list hides the second layer from MindSpore."""

    def __init__(self, function, growth=1.0):
        super().__init__()
        self.first = nn.Dense(4, 4, "ones").to_float(HALF)
        self.unknown = [nn.Dense(4, 4, Tensor(np.eye(4, dtype=np.float32) * growth)).to_float(HALF)]
        self.function = function

    def construct(self, x):
        return self.unknown[0](self.function(self.first(x)))


class Stack(nn.Cell):
    """Layers in sequence, and the mean of the output of the last layer."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.CellList(list(layers))

    def construct(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.astype(mstype.float32).mean()


class Mixer(nn.Cell):
    """Tokens and channels are mixed in turn, with layer norms; the loss is a cross entropy."""

    def __init__(self):
        super().__init__()
        self.norms = nn.CellList([nn.LayerNorm((8,)) for _ in range(3)])
        self.tokens, self.channels = nn.Dense(6, 6).to_float(HALF), nn.Dense(8, 8).to_float(HALF)
        self.head = nn.Dense(8, 5).to_float(HALF)
        self.loss, self.labels = nn.CrossEntropyLoss(), Tensor(np.arange(5, dtype=np.int32))

    def construct(self, x):
        mixed = self.tokens(self.norms[0](x).swapaxes(1, 2)).swapaxes(1, 2)
        x = x + mixed.astype(mstype.float32)
        x = x + self.channels(self.norms[1](x)).astype(mstype.float32)
        scores = self.head(self.norms[2](x).mean(1)).astype(mstype.float32)
        return self.loss(scores, self.labels)


class Autoencoder(nn.Cell):
    """Two dense layers, and the mean of the squared error; a tanh between them unless it is linear."""

    def __init__(self, is_linear=False):
        super().__init__()
        self.between = nn.Identity() if is_linear else nn.Tanh()
        self.encoder, self.decoder = nn.Dense(16, 4).to_float(HALF), nn.Dense(4, 16).to_float(HALF)
        self.loss = nn.MSELoss()

    def construct(self, x):
        return self.loss(self.decoder(self.between(self.encoder(x))).astype(mstype.float32), x)


class Calls(nn.Cell):
    """A layer in FP16, whose output is passed to ``function``."""

    def __init__(self, function, growth=1.0, width=4):
        super().__init__()
        weight = Tensor(np.eye(width, dtype=np.float32) * growth)
        self.dense = nn.Dense(width, width, weight, has_bias=False).to_float(HALF)
        self.function = function

    def construct(self, x):
        return self.function(self.dense(x))


def twice(layer):
    """Return a network that calls one layer twice."""
    return Stack(layer, layer)


def written_in_place(x):
    x = x * 1
    x[:, 0] = x[:, 0] * x[:, 0]
    return x


def normed_in_half(x):
    """Normalize in FP16: the squares overflow, but the reciprocal of inf is 0, so the loss stays finite."""
    return x * ops.rsqrt((x * x).mean(-1, keep_dims=True) + 1e-6)


def smoothed(x):
    """Return the cross entropy of a softmax in FP16 with smoothed labels."""
    labels = ops.one_hot(ops.arange(4), 4, Tensor(0.9, HALF), Tensor(0.025, HALF))
    return -(labels * ops.log(ops.softmax(x, axis=-1))).sum(-1)


def recomputed(layer):
    layer.recompute()
    return layer


class Tied(nn.Cell):
    """An embedding whose table is also the weight of the head."""

    def __init__(self, size):
        super().__init__()
        self.embedding = nn.Embedding(8, 4, embedding_table=Tensor(np.full((8, 4), size, np.float32)))

    def construct(self, tokens):
        hidden = self.embedding(tokens).astype(HALF)
        return ops.matmul(hidden, self.embedding.embedding_table.astype(HALF).T).astype(mstype.float32).mean()
