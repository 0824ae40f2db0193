"""Small networks: a dense layer that overflows on demand, and networks whose FP16 gradients are known by hand."""

import mindspore
import numpy as np
from mindspore import Model, Parameter, Tensor, amp, dataset, nn, ops
from mindspore import dtype as mstype
from mindspore.ops.primitive import constexpr

from mindformers_adaptive.wrapper import AdaptiveLossScaleUpdateCell, TrainOneStepWithLossScaleCell

# Number of tokens in a batch of PerToken.
TOKENS = 48


class HalfPrecisionSum(nn.Cell):
    """The loss is the sum of weight * x in FP16, times ``factor``; so the gradient of the weight is x * factor."""

    def __init__(self, size, factor=1.0, dtype=mstype.float16):
        super().__init__()
        self.weight = Parameter(Tensor(np.ones(size, np.float32)), name="weight")
        self.factor = Tensor(factor, mstype.float32)
        self.dtype = dtype
        self.cast = ops.Cast()

    def construct(self, x):
        products = self.cast(self.weight, self.dtype) * self.cast(x, self.dtype)
        return self.cast(products, mstype.float32).sum() * self.factor


class PerToken(nn.Cell):
    """Returns the sum of the token losses and the number of tokens, as MindFormers' models do for a per-token loss."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(np.linspace(0.5, 1.5, 8), mstype.float32), name="weight")
        self.cast = ops.Cast()
        self.number = Tensor([TOKENS], mstype.float32)

    def construct(self, x):
        products = self.cast(self.weight, mstype.float16) * self.cast(x, mstype.float16)
        losses = self.cast(products, mstype.float32).sum(axis=1)
        return losses.sum().reshape((1,)), self.number


def gradient_in_fp16(x, factor, loss_scale):
    """Return, computed with NumPy, the gradient of :class:`HalfPrecisionSum` times the loss scale."""
    with np.errstate(over="ignore", invalid="ignore"):
        incoming = np.float32(loss_scale * factor).astype(np.float16)
        return (incoming * np.asarray(x, np.float16)).astype(np.float32)


class ListedDropout(nn.Cell):
    """Dropout that takes its masks from a fixed list, one after the other.

    MindSpore's own dropout on a CPU depends on how many threads draw random numbers, and so on how long earlier calls
    took.
    """

    def __init__(self, size, masks=32, p=0.3):
        super().__init__()
        is_kept = np.random.default_rng(0).random((masks, size)) >= p
        self.masks = Tensor(is_kept / (1 - p), mstype.float32)
        self.used = Parameter(Tensor(0, mstype.int32), name="used", requires_grad=False)
        self.one = Tensor(1, mstype.int32)
        self.gather = ops.Gather()
        self.assign_add = ops.AssignAdd()

    def construct(self, x):
        if not self.training:
            return x
        dropped = x * self.gather(self.masks, self.used, 0)
        return ops.depend(dropped, self.assign_add(self.used, self.one))


class WithStateAndDropout(nn.Cell):
    """A network with dropout, moving averages and a cast to FP16; it returns the loss and the outputs."""

    def __init__(self, functional_dropout=False, listed_dropout=False):
        super().__init__()
        self.first = nn.Dense(8, 8).to_float(mstype.float16)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = ListedDropout(8) if listed_dropout else nn.Dropout(p=0.3)
        self.second = nn.Dense(8, 2)
        self.loss = nn.MSELoss()
        self.cast = ops.Cast()
        self.functional_dropout = functional_dropout

    def construct(self, x, target):
        hidden = self.dropout(self.norm(self.cast(self.first(x), mstype.float32)))
        if self.functional_dropout:
            hidden = ops.dropout(hidden, p=0.3, training=self.training)
        outputs = self.second(hidden)
        return self.loss(outputs, target), outputs


class OnlyLoss(nn.Cell):
    """A cell that returns only the first output of a network, the loss."""

    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, *inputs):
        return self.network(*inputs)[0]


class Twice(nn.Cell):
    """A network that calls an FP16 dense layer twice, then a layer in FP32 that returns a tuple."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Dense(4, 4, "ones", has_bias=False).to_float(mstype.float16)
        self.pair = Pair()
        self.cast = ops.Cast()

    def construct(self, x):
        hidden = self.cast(self.shared(self.shared(x)), mstype.float32)
        doubled, _, _ = self.pair(hidden)
        return doubled.sum()


class Pair(nn.Cell):
    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(4, 4, "ones", has_bias=False)

    def construct(self, x):
        return self.dense(x), x, Tensor(3, mstype.int32)


@constexpr
def in_graph_mode():
    return mindspore.get_context("mode") == mindspore.GRAPH_MODE


class GraphOnly(Twice):
    """A network that cannot run in PyNative mode."""

    def construct(self, x):
        if not in_graph_mode():
            raise RuntimeError("a kernel is missing")
        return super().construct(x)


def seeded_train_step(**arguments):
    """Return a train step of :class:`WithStateAndDropout`, with the same initial weights each time."""
    mindspore.set_seed(1)
    network = OnlyLoss(WithStateAndDropout(**arguments))
    optimizer = nn.Adam(network.trainable_params(), 0.01)
    update_cell = AdaptiveLossScaleUpdateCell(2**10, 2, scale_window=2, max_scale_window=2, min_scale_window=2)
    return TrainOneStepWithLossScaleCell(network, optimizer, update_cell).set_train()


def rows(seed=0, count=16):
    """Return float32 inputs (count, 8) and targets (count, 2) for :class:`WithStateAndDropout`."""
    random = np.random.default_rng(seed)
    return random.normal(size=(count, 8)).astype(np.float32), random.normal(size=(count, 2)).astype(np.float32)


def resettable(cell):
    """Return a function that gives the Parameters of a compiled cell their present values again, and returns the cell.

    The values go into the memory of the Parameters, which the compiled graph uses, and do not count as loaded.
    """
    first = [(parameter, parameter.asnumpy().copy()) for parameter in cell.get_parameters()]

    def reset():
        for parameter, value in first:
            ops.assign(parameter, Tensor(value.copy(), parameter.dtype))
        return cell

    return reset


class Dense:
    """A dense layer (in FP16 on request), a loss and batches; a batch with an inf overflows at every loss scale."""

    def __init__(self, fp16=False):
        self.layer = nn.Dense(4, 2, weight_init="ones", bias_init="zeros")
        if fp16:
            self.layer.to_float(mstype.float16)
        self.loss_fn = nn.MSELoss()
        self.network = nn.WithLossCell(self.layer, self.loss_fn)

    def optimizer(self, name="Momentum", **options):
        if name == "Momentum":
            options = {"momentum": 0.9, **options}
        return getattr(nn, name)(self.layer.trainable_params(), learning_rate=0.01, **options)

    def train_step(self, update_cell, cell=TrainOneStepWithLossScaleCell):
        """Return a train-step cell that uses the update cell."""
        return cell(self.network, self.optimizer(), scale_sense=update_cell)

    def weight(self):
        return self.layer.weight.asnumpy().copy()

    @staticmethod
    def batch(overflow=False):
        features = np.arange(12, dtype=np.float32).reshape(3, 4) / 8
        features[0, 0] = np.inf if overflow else features[0, 0]
        return Tensor(features), Tensor(np.zeros((3, 2), np.float32))


def functional_step(dense, scaler, compiled, optimizer=None):
    """Return a train step in functional form; without a scaler, the step does no loss scaling."""
    optimizer = dense.optimizer() if optimizer is None else optimizer

    def forward(features, target):
        loss = dense.loss_fn(dense.layer(features), target)
        return loss if scaler is None else scaler.scale(loss)

    value_and_grad = mindspore.value_and_grad(forward, None, optimizer.parameters)

    def step(features, target):
        loss, grads = value_and_grad(features, target)
        if scaler is None:
            optimizer(grads)
            return loss, True
        loss, grads = scaler.unscale(loss), scaler.unscale(grads)
        grads_finite = amp.all_finite(grads)
        if grads_finite:
            optimizer(grads)
        scaler.adjust(grads_finite, grads)
        return loss, grads_finite

    return mindspore.jit(step) if compiled else step


def batches(count, overflows=()):
    """Return a dataset of ``count`` batches; the batches in ``overflows`` overflow at every loss scale."""
    both = [Dense.batch(number in overflows) for number in range(count)]
    rows = [np.concatenate([tensor.asnumpy() for tensor in each]) for each in zip(*both, strict=True)]
    return dataset.NumpySlicesDataset(tuple(rows), shuffle=False).batch(3)


def train_step_of(network, optimizer=None, update_cell=None):
    """Return the train step of a network that returns its loss."""
    optimizer = optimizer or nn.SGD(network.trainable_params(), 0.001)
    return TrainOneStepWithLossScaleCell(network, optimizer, update_cell or AdaptiveLossScaleUpdateCell(2.0**10, 2, 20))


def train(train_step, columns, *callbacks):
    """Train for one step for each row of the columns, and return the train step."""
    data = dataset.NumpySlicesDataset(tuple(columns), shuffle=False)
    Model(train_step).train(1, data, callbacks=[*callbacks], dataset_sink_mode=False)
    return train_step
