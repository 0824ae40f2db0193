"""The share of weight updates lost to float16 rounding equals NumPy's count, and the loss-scale finder reports it."""

import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore import dtype as mstype

from mindformers_adaptive.cli.find import learning_rate_in
from mindformers_adaptive.gradients.ranges import find_loss_scale, learning_rate_of
from mindformers_adaptive.gradients.recommendation import lost_updates
from mindformers_adaptive.gradients.statistics import array_statistics
from mindformers_adaptive.wrapper import TrainOneStepWithLossScaleCell
from tests.shared.networks import HalfPrecisionSum

NUMBERS = np.random.default_rng(0)


@pytest.mark.parametrize("update", [1.1e-3, 1e-5, 1.1e-7, 2e-8])
def test_lost_updates_are_those_that_rounding_to_float16_undoes(update):
    size = (NUMBERS.normal(0, 1, 5000) * 2.0 ** NUMBERS.integers(-26, 4, 5000)).astype(np.float16)
    weights = {"all": size, "norm": np.ones(10, np.float16), "small": size[np.abs(size) < 1e-3]}
    lost = lost_updates({name: array_statistics(array) for name, array in weights.items()}, update)
    # The updates point away from 0. In this direction, a power of two is a full spacing away from its float16 neighbor.
    # Its neighbor towards 0 is only half as far.
    stays = {
        name: (np.abs(w).astype(np.float64) + update).astype(np.float16) == np.abs(w) for name, w in weights.items()
    }
    assert lost.share == np.mean(np.concatenate([*stays.values()]))
    shares = {name: each.mean() for name, each in stays.items()}
    assert lost.parameter_share == shares[lost.parameter] == max(shares.values())


def test_finder_says_what_is_lost_with_a_learning_rate(graph_mode):
    network, ones = HalfPrecisionSum(2), np.ones(2, np.float32)
    assert find_loss_scale(network, ones, learning_rate=1e-4).lost_updates is None
    network.weight = Parameter(Tensor([1.0, 2.0**-10], mstype.float16), name="weight")
    recommendation = find_loss_scale(network, ones, learning_rate=1e-4)
    assert (recommendation.lost_updates.share, recommendation.to_dict()["lost_updates"]["parameter"]) == (0.5, "weight")
    said = ("learning rate, 0.0001, is lost in 50.0%", "50.0% of weight", "'param_init_type: float32'")
    assert all(part in str(recommendation) for part in said)
    assert find_loss_scale(network, ones).lost_updates is None
    with pytest.raises(ValueError, match="'learning_rate'"):
        find_loss_scale(network, ones, learning_rate=0.0)


class WarmUp(nn.learning_rate_schedule.LearningRateSchedule):
    """The learning rate rises from 0 to 1e-4 within 1000 steps."""

    def construct(self, step):
        return ops.minimum(ops.cast(step, mstype.float32) * 1e-7, Tensor(1e-4, mstype.float32))


@pytest.mark.parametrize(
    "rate",
    [
        lambda weights: nn.Momentum(weights, 1e-4, 0.9),
        lambda weights: nn.Momentum(weights, [0.0, 1e-4, 1e-5], 0.9),
        lambda weights: nn.Momentum(weights, WarmUp(), 0.9),
        lambda weights: nn.Momentum([{"params": weights, "lr": 1e-4}], 1e-6, 0.9),
        lambda weights: mint.optim.SGD(weights, lr=1e-4),
    ],
    ids=["number", "list", "schedule", "groups", "mint"],
)
def test_the_learning_rate_is_read_from_the_optimizer(graph_mode, rate):
    network = HalfPrecisionSum(2)
    network.weight = Parameter(Tensor([1.0, 2.0**-10], mstype.float16), name="weight")
    optimizer = rate(network.trainable_params())
    assert learning_rate_of(optimizer) == pytest.approx(1e-4)
    if isinstance(optimizer, nn.Optimizer):
        train_step = TrainOneStepWithLossScaleCell(network, optimizer, scale_sense=Tensor(8.0, mstype.float32))
        assert "learning rate, 0.0001, is lost in 50.0%" in str(find_loss_scale(train_step, np.ones(2, np.float32)))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        ({"lr_schedule": {"learning_rate": 1e-5}, "optimizer": {"learning_rate": 0.1}}, 1e-5),
        ({"lr_schedule": {"learning_rate": "high"}, "optimizer": {"learning_rate": 0.1}}, 0.1),
    ],
)
def test_program_takes_the_learning_rate_of_the_configuration(config, expected):
    assert learning_rate_in(config) == expected
