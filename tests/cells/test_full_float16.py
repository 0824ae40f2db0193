"""With FP16 weights, gradients and optimizer state, the adaptive and the guided rule train, skip steps, and resume."""

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore import dtype as mstype

from mindformers_adaptive import AdaptiveLossScaleManager, GradientGuidedLossScaleManager, build_train_network
from tests.shared.networks import resettable

pytestmark = pytest.mark.slow

FEATURES, STEPS, SAVED_AT = 4, 120, 90
MANAGERS = {
    "adaptive": lambda: AdaptiveLossScaleManager(2**24, 2, 1, 20, 1),
    "guided": lambda: GradientGuidedLossScaleManager(2**24),
}


def data():
    random = np.random.default_rng(0)
    points = random.uniform(-1, 1, (64, FEATURES)).astype(np.float32)
    return Tensor(points), Tensor(np.sin(2 * points).sum(1, keepdims=True).astype(np.float32))


def train_network(manager):
    mindspore.set_seed(0)
    layers = (nn.Dense(FEATURES, 16, activation="tanh", dtype=mstype.float16), nn.Dense(16, 1, dtype=mstype.float16))
    # MindSpore's precision level O3 does not change the dtype with which the layers were created.
    network = nn.SequentialCell(*layers)
    # The learning rate is high, because an FP16 weight loses any update below half a unit in the weight's last place.
    # ``eps`` is high, because second moments below 2^-24 can become 0 in FP16, as the default eps of 1e-8 does.
    optimizer = nn.Adam(network.trainable_params(), learning_rate=1e-2, eps=1e-4)
    return build_train_network(network, optimizer, nn.MSELoss(), level="O3", loss_scale_manager=MANAGERS[manager]())


def take(network, steps):
    inputs = data()
    outcomes = []
    for _ in range(steps):
        loss, overflow, scale = network(*inputs)[:3]
        outcomes.append((float(loss), bool(overflow), float(scale)))
    return outcomes


@pytest.mark.parametrize("manager", MANAGERS)
def test_all_of_it_in_float16_is_trained_and_resumed(graph_mode, tmp_path, manager):
    network = train_network(manager)
    reset = resettable(network)
    steps = take(network, SAVED_AT)
    state = [value for value in network.optimizer.get_parameters() if value.name.startswith("moment")]
    assert {value.dtype for value in [*network.optimizer.parameters, *state]} == {mstype.float16}
    assert len(state) == 8
    mindspore.save_checkpoint(network, str(tmp_path / "all.ckpt"))
    steps += take(network, STEPS - SAVED_AT)
    assert steps[0][1]
    assert np.mean([loss for loss, *_ in steps[-10:]]) < 0.2 * steps[0][0]
    assert sum(overflow for _, overflow, _ in steps[SAVED_AT:]) <= 30
    mindspore.load_param_into_net(reset(), mindspore.load_checkpoint(str(tmp_path / "all.ckpt")))
    assert take(network, STEPS - SAVED_AT) == steps[SAVED_AT:]
