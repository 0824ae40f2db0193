"""The share of weight updates lost to float16 rounding equals NumPy's count, and the loss-scale finder reports it."""

import argparse

import numpy as np
import pytest
from mindspore import Parameter, Tensor
from mindspore import dtype as mstype

from mindformers_adaptive.cli.find import read_learning_rate
from mindformers_adaptive.gradients.ranges import find_loss_scale
from mindformers_adaptive.gradients.report import array_statistics
from mindformers_adaptive.gradients.updates import lost_updates
from tests.conftest import CONFIG
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


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], 3e-3),
        (["lr_schedule.learning_rate=1e-5"], 1e-5),
        (["lr_schedule.learning_rate=high", "optimizer.learning_rate=0.1"], 0.1),
    ],
)
def test_program_takes_the_learning_rate_of_file_or_options(options, expected):
    assert read_learning_rate(argparse.Namespace(config=str(CONFIG), options=options)) == expected
