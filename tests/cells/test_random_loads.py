"""Random schedules of training, keeping, loading, failing and evaluating, beside a train step that needs no loads.

The reference is a second train step: values are written into its Parameters by ``copy_``, in the memory that its graphs
use, and its steps are called one by one.
"""

import copy

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, amp, nn, ops
from mindspore.train import Callback, Model

from mindformers_adaptive import (
    AdaptiveLossScaleUpdateCell,
    FixedScaleTrainOneStepCell,
    GradientGuidedLossScaleUpdateCell,
    build_train_network,
)
from mindformers_adaptive.wrapper import MFTrainOneStepCell, TrainOneStepWithLossScaleCell
from tests.cells.loading import LOADS, SEEN_EVERYWHERE, VIEWS, Outer, values_of

pytestmark = pytest.mark.slow


class Network(nn.Cell):
    """Linear regression that can fail; in PyNative mode it counts its forward passes by ``set_data``."""

    def __init__(self, counts):
        super().__init__()
        self.weight = Parameter(Tensor(np.linspace(-1, 1, 9).reshape(3, 3), mindspore.float32), name="weight")
        self.bias = Parameter(Tensor(np.zeros(3), mindspore.float32), name="bias")
        self.passes = Parameter(Tensor(0.0, mindspore.float32), name="passes", requires_grad=False)
        self.is_interrupted = False
        self.counts = counts

    def construct(self, x, y):
        if self.counts:
            self.passes.set_data(self.passes + 1)
        outputs = ops.matmul(x, self.weight) + self.bias
        if x.shape[0] != 4:
            raise ValueError("a batch of a wrong shape")
        if self.is_interrupted:
            raise KeyboardInterrupt
        return ((outputs - y) ** 2).mean()


def adaptive(network):
    optimizer = nn.Momentum(network.trainable_params(), 0.05, 0.9)
    return TrainOneStepWithLossScaleCell(network, optimizer, AdaptiveLossScaleUpdateCell(2.0**10, 2, 2, 4, 1))


def guided(network):
    optimizer = nn.AdamWeightDecay(network.trainable_params(), 0.05)
    return MFTrainOneStepCell(network, optimizer, scale_sense=GradientGuidedLossScaleUpdateCell(2.0**8))


def fixed(network):
    return FixedScaleTrainOneStepCell(network, nn.Momentum(network.trainable_params(), 0.05, 0.9), 256.0)


def plain(network):
    manager = amp.FixedLossScaleManager(1.0, drop_overflow_update=False)
    return build_train_network(network, nn.Momentum(network.trainable_params(), 0.05, 0.9), loss_scale_manager=manager)


class Loads(Callback):
    """Carries out one action of a schedule after each step of ``Model.train``."""

    def __init__(self, actions):
        self.actions = actions

    def on_train_step_end(self, run_context):
        next(self.actions, None)


def batch(number):
    rng = np.random.default_rng(number)
    return rng.normal(size=(4, 3)).astype(np.float32), rng.normal(size=(4, 3)).astype(np.float32)


COPIES = {
    "copied array": lambda parameter: parameter.asnumpy().copy(),
    "value": lambda parameter: parameter.value(),
    "copy": lambda parameter: parameter.copy(),
    "clone": lambda parameter: parameter.clone(),
    "deepcopy": copy.deepcopy,
    "Tensor": lambda parameter: Tensor(parameter.asnumpy()),
}


class Schedule:
    """One training with random actions between its steps, beside its reference."""

    def __init__(self, make, caller, seed, reference):
        self.rng, self.caller, self.reference = np.random.default_rng(seed), caller, reference
        self.network = Network(reference.network.counts)
        self.step = make(self.network).set_train()
        # Whether a step is called from Python. In PyNative mode, a cell around the train step calls it from Python too.
        is_eager = mindspore.get_context("mode") == mindspore.PYNATIVE_MODE
        self.is_called = caller == "call" or (caller == "cell" and is_eager)
        self.number, self.kept, self.saved, self.log = seed * 1000, {}, [], [f"seed {seed}"]
        self.write_into_reference(values_of(self.step))

    def write_into_reference(self, values):
        for parameter in self.reference.get_parameters():
            if parameter.name in values:
                parameter.copy_(Tensor(values[parameter.name]))

    def choose(self, options):
        return options[int(self.rng.integers(len(options)))]

    def check(self):
        values, expected = values_of(self.step), values_of(self.reference)
        assert values.keys() == expected.keys()
        for name, value in values.items():
            np.testing.assert_allclose(value, expected[name], 1e-5, 1e-6, err_msg=f"{name}, {self.log}")

    def has_stepped(self):
        """Take the step of the reference that this training has just taken, and compare."""
        self.log.append("step")
        self.reference(*map(Tensor, batch(self.number)))
        self.number += 1
        self.kept = {name: state for name, state in self.kept.items() if name in COPIES}
        self.check()

    def act(self):
        actions = [self.keep, self.load, self.load_kept, self.evaluate]
        actions += [self.fail] if self.caller == "call" else []
        action = self.choose(actions)
        self.log.append(action.__name__)
        action()
        self.check()

    def keep(self):
        cell = self.choose([self.step, self.network])
        way = self.choose(list(VIEWS) + list(COPIES))
        self.log.append(way)
        keep = VIEWS.get(way) or COPIES[way]
        true = values_of(cell)
        self.kept[way] = {parameter.name: keep(parameter) for parameter in cell.get_parameters()}, true
        self.saved = [*self.saved[-1:], true]

    def load_values(self, values):
        """Load values by a way that is chosen at random; ``copy_`` and ``ops.assign`` write into what was kept."""
        way = self.choose([way for way in LOADS if self.is_called or way in SEEN_EVERYWHERE])
        self.log.append(way)
        LOADS[way](self.step, {name: Tensor(value) for name, value in values.items()})
        if way in ("copy_", "assign") or not self.is_called:
            self.kept = {name: state for name, state in self.kept.items() if name in COPIES}
        self.write_into_reference(values)

    def load(self):
        other = {each.name: np.full(each.shape, 0.25, np.float32) for each in self.network.get_parameters()}
        self.load_values(self.choose([*self.saved, other]))

    def load_kept(self):
        if self.kept:
            way = self.choose(list(self.kept))
            self.log.append(way)
            values, true = self.kept[way]
            for name, value in values.items():
                array = value if isinstance(value, np.ndarray) else value.asnumpy()
                np.testing.assert_array_equal(array, true[name], err_msg=f"{name} kept by {way}, {self.log}")
            self.load_values(values)
            self.write_into_reference(true)

    def evaluate(self):
        x, y = batch(self.number)
        before = values_of(self.network)
        loss = float(self.network(Tensor(x), Tensor(y)))
        expected = np.mean((x @ before["weight"] + before["bias"] - y) ** 2)
        np.testing.assert_allclose(loss, expected, 1e-5, err_msg=str(self.log))
        self.reference.network(Tensor(x), Tensor(y))

    def fail(self):
        x, y = batch(self.number)
        passes = self.network.passes.asnumpy().copy()
        self.network.is_interrupted = self.network.counts and bool(self.rng.integers(2))
        shortened = x if self.network.is_interrupted else x[:2]
        with pytest.raises((ValueError, KeyboardInterrupt)):
            self.step(Tensor(shortened), Tensor(y[: len(shortened)]))
        self.network.is_interrupted = False
        # A forward pass that fails has been counted in PyNative mode.
        self.write_into_reference({"passes": passes + self.network.counts})

    def run(self, length):
        if self.caller == "Model with sink":
            self.run_in_model(length)
            return
        step = self.step

        @mindspore.jit
        def compiled(x, y):
            return step(x, y)

        call = {"call": step, "cell": Outer(step), "jit": compiled}[self.caller]
        for _ in range(length):
            self.act()
            call(*map(Tensor, batch(self.number)))
            self.has_stepped()

    def run_in_model(self, length):
        def actions():
            while True:
                self.has_stepped()
                self.act()
                yield

        data = [np.concatenate(part) for part in zip(*(batch(self.number + i) for i in range(length)), strict=True)]
        dataset = mindspore.dataset.NumpySlicesDataset(tuple(data), shuffle=False).batch(4)
        model = Model(self.step)
        model.train(1, dataset, Loads(actions()), dataset_sink_mode=True, sink_size=1)


CASES = [
    (adaptive, "graph", "call"),
    (guided, "pynative", "call"),
    (guided, "graph", "cell"),
    (adaptive, "pynative", "jit"),
    (plain, "pynative", "call"),
    (fixed, "pynative", "call"),
    (guided, "graph", "Model with sink"),
]


@pytest.mark.parametrize(
    ("seed", "make", "mode", "caller"), [(i, *case) for i, case in enumerate(CASES)], indirect=["mode"]
)
def test_loads_between_steps_touch_nothing_else(mode, make, caller, seed):
    counts = mindspore.get_context("mode") == mindspore.PYNATIVE_MODE and caller not in ("jit", "Model with sink")
    Schedule(make, caller, seed, reference=make(Network(counts)).set_train()).run(length=8)
