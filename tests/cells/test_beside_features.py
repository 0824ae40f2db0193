"""With each MindFormers feature, this package's train-step cell takes the same steps as MindFormers' own."""

import numpy as np
import pytest
from mindformers.core import optim
from mindspore import Tensor, nn
from mindspore import dtype as mstype

from mindformers_adaptive.mindformers.trainer import MeanOverMicroBatches
from mindformers_adaptive.wrapper import AdaptiveLossScaleUpdateCell, MFTrainOneStepCell
from tests.cells.beside_stock_cell import (
    PYNATIVE_STEPS,
    STEPS,
    Layers,
    SumAndNumber,
    Vision,
    adamw,
    rows,
    schedule,
    train_both,
)
from tests.conftest import ROOT, mindspore_mode
from tests.shared.versions import BEFORE_1_7

pytestmark = pytest.mark.slow


class LowRank(nn.Cell):
    """Frozen dense layers with a trainable update of rank 2, as in LoRA. The first half of the update is recomputed."""

    def __init__(self):
        super().__init__()
        self.network = Layers()
        for weight in self.network.trainable_params():
            weight.requires_grad = False
        self.down = nn.Dense(12, 2, has_bias=False).to_float(mstype.float16)
        self.down.recompute()
        self.up = nn.Dense(2, 4, weight_init="zeros", has_bias=False).to_float(mstype.float16)

    def construct(self, features, target):
        update = self.up(self.down(features)).astype(mstype.float32)
        return self.network(features, target - update)


def averaging(network):
    """Return AdamW that averages the weights exponentially; every three steps the average replaces the weights."""
    average = {"fused_algo": "ema", "fused_num": 2, "interleave_step": 3, "ema_alpha": 0.2}
    return optim.PmaAdamW(network.trainable_params(), schedule(), **average)


def grouped(network):
    """Return AdamW with a larger learning rate for biases."""
    weights = network.trainable_params()
    groups = [
        {"params": [each for each in weights if ("bias" in each.name) is is_bias], "lr": schedule(rate)}
        for is_bias, rate in ((False, 0.01), (True, 0.1))
    ]
    return optim.AdamW([*groups, {"order_params": weights}], schedule())


def one_hot(batches):
    for features, scores in batches:
        yield features, np.eye(scores.shape[1], dtype=np.float32)[scores.argmax(axis=1)]


# The arguments of train_both() for MindFormers features. A training has two features if they do not hide each other.
FEATURES = {
    "accumulation and moving average of weights": {
        "build": lambda: MeanOverMicroBatches(Layers(), 2),
        "use_clip_grad": True,
        # MindFormers before 1.7 has no PmaAdamW.
        "build_optimizer": adamw if BEFORE_1_7 else averaging,
    },
    "loss per token, clipping and grouped learning rates": {
        "build": SumAndNumber,
        "calculate_per_token_loss": True,
        "use_clip_grad": True,
        "max_grad_norm": 0.1,
        "build_optimizer": grouped,
        "lr_scheduler": schedule(),
        "grouped_lr_scheduler": [{"lr_scheduler": schedule(0.1)}],
    },
    "low rank, recompute and local_norm": {"build": LowRank, "local_norm": True},
    "vision": {"build": Vision, "batches": list(one_hot(rows(1))) * STEPS},
}


@pytest.mark.parametrize("feature", FEATURES)
def test_losses_and_weights_equal_the_stock_cells_at_each_scale(graph_mode, feature):
    seen = train_both(**FEATURES[feature])
    assert sum(seen.overflows) >= 2
    assert any(seen.overflows[15:]), "no overflow after a raise"
    assert np.mean(seen.losses[-5:]) < np.mean(seen.losses[:5])
    # A skipped step advances neither the schedule of the learning rate nor the optimizer's step count.
    assert seen.applied_steps == STEPS - sum(seen.overflows)
    for rate, following, overflow in zip(seen.learning_rates, seen.learning_rates[1:], seen.overflows, strict=False):
        assert (rate == following) is overflow


DROPPING = {"use_clip_grad": True, "use_skip_data_by_global_norm": True, "global_norm_spike_threshold": 3.5}


@pytest.mark.parametrize("feature", [*FEATURES, "dropping by norm"])
def test_the_same_holds_in_pynative_mode(feature):
    arguments = FEATURES.get(feature, {"build": Layers, **DROPPING})
    # A per-token loss overflows at a lower loss scale, so start at a lower scale.
    start = 2.0**13 if "loss per token" in feature else 2.0**18
    with mindspore_mode("pynative"):
        seen = train_both(**{**arguments, "batches": list(rows(PYNATIVE_STEPS)), "start": start})
    assert seen.overflows[0]
    assert False in seen.overflows


def test_steps_dropped_by_norm_equal_the_stock_cells(graph_mode):
    seen = train_both(Layers, **DROPPING)
    norms = [float(outputs[4].item()) for outputs in seen.outputs]
    dropped = [norm >= 3.5 for norm, overflow in zip(norms, seen.overflows, strict=True) if not overflow]
    assert 1 <= sum(dropped) <= 10
    assert seen.applied_steps == STEPS - sum(seen.overflows) - sum(dropped)


class Normalized(nn.Cell):
    """A batch norm, followed by the network ``Layers``."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(12)
        self.network = Layers()

    def construct(self, features, target):
        return self.network(self.norm(features), target)


def test_moving_averages_of_batch_norm_go_on_in_a_skipped_step(graph_mode):
    network = Normalized()
    update_cell = AdaptiveLossScaleUpdateCell(2.0**30, 2, 4, max_scale_window=8, min_scale_window=4)
    train_step = MFTrainOneStepCell(network, adamw(network), scale_sense=update_cell).set_train()
    [(features, target)] = rows(1)
    assert bool(train_step(Tensor(features), Tensor(target))[1])
    assert network.norm.moving_mean.asnumpy().any()


def test_mindspores_graphs_for_a_cpu_take_no_lazy_inline(run_forked):
    # Run the training in its own process: after lazy inline has failed, MindSpore still applies it to the operators
    # that it compiles later.
    # If this test fails, lazy inline works, and the documentation's table of features can list lazy inline.
    finished = run_forked(ROOT / "tests" / "cells" / "lazy_inline.py", expect_exit=1)
    assert all(part in finished.stderr for part in ("must be a Primitive ValueNode", "get ValueNode<FuncGraph>"))
