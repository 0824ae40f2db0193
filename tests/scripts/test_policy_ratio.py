"""The study of the ratio of two policies: its roundings, its gradients, and the start of each run in the data."""

import numpy as np
import pytest

from scripts.studies import policy_ratio
from scripts.studies.policy_ratio import SEEDS, WAYS, gradients_of, measure, rounded
from tests.shared.pages import figure


@pytest.mark.parametrize("way", WAYS)
def test_first_gradient_has_the_error_of_the_data(way):
    runs = figure("policy_ratio")["ways"][way]
    assert len(runs) == SEEDS
    # A run of one update has the same first gradient as a whole run. Sums differ a little between machines.
    assert measure(way, seed=0, updates=1)["error"] == pytest.approx(runs[0]["error"], rel=0.02, abs=1e-5)


def test_mantissa_sets_the_ratio_and_scale_the_gradient():
    measured = {way: measure(way, seed=1, updates=2) for way in WAYS}
    token = {way: measured[way]["token"] for way in WAYS}
    assert token["FP32"] < token["FP16, adaptive"] / 4 < token["BF16"] / 16
    assert token["FP16, no scaling"] < token["BF16"] / 2
    error = {way: measured[way]["error"] for way in WAYS}
    assert error["FP32"] == 0.0
    assert error["FP16, adaptive"] < error["BF16"] < 0.01 < 0.5 < error["FP16, no scaling"]


def test_data_show_what_the_page_says():
    mean = {
        way: {name: np.mean([run[name] for run in runs]) for name in runs[0]}
        for way, runs in figure("policy_ratio")["ways"].items()
    }
    assert mean["BF16"]["token"] > 2 * mean["FP16, no scaling"]["token"] > 2 * mean["FP16, adaptive"]["token"]
    assert mean["FP16, adaptive"]["error"] < mean["BF16"]["error"] < 1 < mean["FP16, no scaling"]["error"]
    scaled = [mean[way]["reward"] for way in ("FP32", "BF16", "FP16, adaptive")]
    assert mean["FP16, no scaling"]["reward"] < min(scaled) - 10 * (max(scaled) - min(scaled))


def test_rounding_to_bfloat16_is_to_nearest_even():
    exact = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8, 3e38, 0.0], np.float32)
    expected = np.array([1.0, 1.0, 1 + 2**-6, 1 + 2**-7, -1.0, 3e38, 0.0], np.float32)
    assert rounded(exact, "bfloat16")[:5].tolist() == expected[:5].tolist()
    assert rounded(exact, "bfloat16")[6] == 0.0
    assert rounded(np.float32([65519.0, 65520.0]), "float16").tolist() == [65504.0, np.inf]


def test_gradients_are_those_of_the_loss(monkeypatch):
    monkeypatch.setattr(policy_ratio, "SEQUENCES", 2)
    monkeypatch.setattr(policy_ratio, "LENGTH", 3)
    training = policy_ratio.Training(seed=0, format=None, rule=None)
    contexts, actions, _ = training.write()
    advantages = np.linspace(-1.0, 1.0, len(actions)).astype(np.float32)
    weights = [weight.astype(np.float64) for weight in training.weights]

    def loss():
        return -float(gradients_of(weights, contexts, actions, advantages, 1.0, None)[0] @ advantages)

    _, gradients = gradients_of(weights, contexts, actions, advantages, 1.0, None)
    for weight, gradient in zip(weights, gradients, strict=True):
        index = np.unravel_index(np.abs(gradient).argmax(), gradient.shape)
        before = weight[index]
        weight[index] = before + 1e-4
        above = loss()
        weight[index] = before - 1e-4
        below = loss()
        weight[index] = before
        assert (above - below) / 2e-4 == pytest.approx(gradient[index], rel=1e-3)
