"""A train step that measures gradients before it divides them is told so, and no other train step is."""

import warnings

import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from mindformers_adaptive import GradientGuidedLossScaleUpdateCell
from mindformers_adaptive.cells.division_check import DivisionCheck
from mindformers_adaptive.rules.guided import GuidedRule
from mindformers_adaptive.rules.lanes import Lanes
from mindformers_adaptive.wrapper import TrainOneStepWithLossScaleCell

STEPS = 60
NUMBERS = np.arange(STEPS)
NOISE = np.random.default_rng(0).normal(size=STEPS)
# log2 of the largest gradient in each step.
GRADIENTS = {
    "constant": 0 * NUMBERS,
    "noise": 0.3 * NOISE,
    "growing": NUMBERS / 4,
    "shrinking": -NUMBERS / 4,
    "spikes of one bit": NUMBERS % 3 == 0,
    "rare spikes": 5 * (NUMBERS % 11 == 0),
    "two levels": 3 * (NUMBERS // 9 % 2),
    "two levels in turn": 2 * (NUMBERS % 2),
    "wave": 2 * np.sin(NUMBERS / 3),
    "walk": np.cumsum(NOISE) / 2,
    "settling": 8 * np.exp(-NUMBERS / 10),
    "slowly shrinking": -NUMBERS / 20,
    "small gradients": 0 * NUMBERS - 5,
    "little noise": 0.05 * NOISE,
    "heavy tails": NOISE**3,
}


def are_warned(logarithms, starts, divided, hidden_overflows):
    """Return whether each training with the guided rule is taken for one without division.

    Args:
        logarithms (Sequence): for each training, log2 of the largest gradient in each step.
        starts (Sequence): for each training, the initial loss scale.
        divided (bool): whether the train step divides the gradients by the loss scale.
        hidden_overflows (NDArray): bool of shape (trainings, steps), overflows that the gradients do not explain.
    """
    rule, checks = GuidedRule(), [DivisionCheck() for _ in starts]
    lanes, warned = Lanes([rule] * len(starts), [rule.start(start) for start in starts]), np.zeros(len(starts), bool)
    for gradients, hidden in zip(2.0 ** np.asarray(logarithms, float).T, hidden_overflows.T, strict=True):
        scales = lanes.loss_scale.astype(np.float64)
        overflow = (gradients * scales > 65504) | hidden
        largest = np.where(overflow, np.inf, gradients if divided else gradients * scales).astype(np.float32)
        pairs = zip(checks, scales.tolist(), largest.tolist(), strict=True)
        warned |= [check.add(scale, gradient) for check, scale, gradient in pairs]
        lanes.step(overflow, largest)
    return warned


FOUND = ("constant", "slowly shrinking", "small gradients", "little noise")


@pytest.mark.parametrize(
    ("names", "start", "divided"), [(GRADIENTS, 2.0**2, True), (GRADIENTS, 2.0**16, True), (FOUND, 2.0**16, False)]
)
def test_only_undivided_gradients_are_warned_of(names, start, divided):
    hidden = np.zeros((len(names), STEPS), bool)
    warned = are_warned([GRADIENTS[name] for name in names], [start] * len(names), divided, hidden)
    assert dict(zip(names, warned.tolist(), strict=True)) == dict.fromkeys(names, not divided)


def random_gradients(random, steps):
    """Return log2 of the largest gradient in each step: noise around a level that stays, moves, jumps or has spikes."""
    numbers, noise = np.arange(steps), random.normal(size=steps)
    period, height = random.integers(2, 60), random.uniform(1, 6)
    levels = {
        "stays": 0 * numbers,
        "walks": np.cumsum(noise) / random.uniform(1, 10),
        "swings": height * np.sin(numbers / period),
        "jumps": height * (numbers // period % 2),
        "ramps": height * (numbers % period) / period,
        "settles": height * np.exp(-numbers / period),
        "has spikes": height * (random.random(steps) < 0.05),
        "has heavy tails": noise**3,
    }
    return random.uniform(-8, 4) + random.choice(list(levels.values())) + random.choice([0.05, 0.3, 0.8]) * noise


@pytest.mark.parametrize("divided", [True, False])
def test_random_trainings(divided):
    randoms, hidden = [np.random.default_rng(seed) for seed in range(30)], np.zeros((30, 500), bool)
    for random, row in zip(randoms, hidden, strict=True):
        row[random.integers(0, 500, size=random.choice([0, 8]))] = True
    gradients = [random_gradients(random, 500) for random in randoms]
    warned = are_warned(gradients, [2.0 ** random.choice([2, 16, 30]) for random in randoms], divided, hidden)
    # Noise and jumps can hide that the gradients are not divided, but a warning is never wrong.
    assert warned.sum() == 0 if divided else warned.sum() >= 15


def test_update_that_changes_the_gradient_hides_nothing():
    # The first update makes the gradient smaller by more than the loss scale falls. Later updates change it a little.
    steps = [(6, 7.7), (2, 2.24), (2, 2.18), (2, 2.13), (3, 3.1), (3, 3.04), (3, 2.98), (4, 3.95), (4, 3.89), (4, 3.83)]
    check = DivisionCheck()
    warned = [check.add(2.0**scale, 2.0**gradient) for scale, gradient in [*steps, (5, 4.8)]]
    assert warned == [False] * len(steps) + [True]


def test_spike_that_lowers_the_scale_and_is_gone_is_no_sign():
    check = DivisionCheck()
    for scale in (2.0**9, 2.0**7, 2.0**5, 2.0**3):
        assert not any(check.add(scale, gradient) for gradient in (1.0, 1.0, 1.0, 1.0, 4.0))


class Measured(TrainOneStepWithLossScaleCell):
    """Measures the gradients before or after it divides them."""

    def __init__(self, network, optimizer, scale_sense, divides_first):
        super().__init__(network, optimizer, scale_sense)
        self.divides_first = divides_first

    def construct(self, *inputs):
        loss = self.network(*inputs)
        status, scale = self.start_overflow_check(loss, self.scale_sense)
        sens = ops.ones_like(loss) * ops.cast(scale, loss.dtype)
        grads = self.grad_reducer(self.grad(self.network, self.weights)(*inputs, sens))
        divided = self.hyper_map(ops.partial(divide, scale), grads)
        measured = divided if self.divides_first else grads
        overflow = self.process_loss_scale(self.get_overflow_status(status, measured))
        if not overflow:
            loss = ops.depend(loss, self.optimizer(divided))
        return loss, overflow, scale


def divide(scale, gradient):
    return ops.cast(ops.cast(gradient, mstype.float32) / scale, gradient.dtype)


@pytest.mark.parametrize("divides_first", [False, True])
def test_train_step_that_divides_too_late_is_told_the_remedy(graph_mode, divides_first):
    network = nn.WithLossCell(nn.Dense(3, 2, "ones").to_float(mstype.float16), nn.MSELoss())
    optimizer = nn.SGD(network.trainable_params(), 0.01)
    step = Measured(network, optimizer, GradientGuidedLossScaleUpdateCell(2**16), divides_first).set_train()
    batch = Tensor(np.ones((4, 3), np.float32)), Tensor(np.zeros((4, 2), np.float32))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(30):
            step(*batch)
    messages = [str(warning.message) for warning in caught if "follows the loss scale" in str(warning.message)]
    assert len(messages) == (0 if divides_first else 1)
    if messages:
        assert "Measured" in messages[0]
        assert "first divide the gradients" in messages[0]
