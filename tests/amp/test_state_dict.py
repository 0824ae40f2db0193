"""``state_dict()`` for Megatron-LM and from it, and of cells within a train step."""

import numpy as np
import pytest
from dense_network import Dense
from every_rule import Owned
from mindspore import Tensor, nn

from mindformers_adaptive import AdaptiveLossScaleUpdateCell

OVERFLOWS = (np.random.default_rng(5).random(60) < 0.3).tolist()


class DynamicGradScaler:
    """Megatron-LM's scaler as its description has it, loaded with a state of ours."""

    def __init__(self, state, hysteresis, interval):
        self.scale = state["scale"]
        self.growth, self.hysteresis = state["growth_tracker"], state["hysteresis_tracker"]
        self.full, self.interval = hysteresis, interval

    def update(self, overflow):
        if overflow:
            self.growth, self.hysteresis = 0, self.hysteresis - 1
            self.scale = max(self.scale * 0.5, 1.0) if self.hysteresis <= 0 else self.scale
        else:
            self.growth += 1
            if self.growth == self.interval:
                self.growth, self.hysteresis, self.scale = 0, self.full, self.scale * 2.0
        return self.scale


def stepped(hysteresis, **windows):
    windows = {"scale_window": 1, "max_scale_window": 4, "min_scale_window": 1, **windows}
    return Owned(AdaptiveLossScaleUpdateCell(2.0**20, 2, hysteresis=hysteresis, **windows))


def path(owned, overflows):
    for overflow in overflows:
        owned.step(overflow)
        yield owned.update_cell.state_dict()


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_megatron_goes_on_from_a_state_of_ours(graph_mode, hysteresis):
    ours = stepped(hysteresis, scale_window=4, max_scale_window=4, min_scale_window=4)
    cell = ours.update_cell
    states = [cell.state_dict(), *path(ours, OVERFLOWS)]
    for steps in (0, 7, 23, 60):
        cell.load_state_dict(states[steps])
        theirs = DynamicGradScaler(states[steps], hysteresis, interval=4)
        for overflow, state in zip(OVERFLOWS[::-1][:30], path(ours, OVERFLOWS[::-1][:30]), strict=True):
            assert theirs.update(overflow) == state["scale"], steps


def test_megatrons_tracker_below_zero_is_a_spent_budget(graph_mode):
    # Megatron-LM counts on below 0 with every overflow after the budget is spent.
    ours = stepped(2)
    ours.update_cell.load_state_dict({"scale": 64.0, "growth_tracker": 0, "hysteresis_tracker": -3})
    assert ours.update_cell.state()["hysteresis_budget"] == 0
    assert [state["scale"] for state in path(ours, [True, False, True, True])] == [32.0, 64.0, 64.0, 32.0]


def test_cell_of_a_train_step_reads_and_sets_its_loss_scale(graph_mode):
    update_cell = AdaptiveLossScaleUpdateCell(1024, 2, 20)
    step = Dense().train_step(update_cell)
    step(*Dense.batch(overflow=True))
    state = update_cell.state_dict()
    assert (state["scale"], state["skipped_steps"]) == (512.0, 1)
    update_cell.load_state_dict({**state, "scale": 4096.0})
    assert float(step.scale_sense) == 4096.0


def test_cell_that_does_not_know_its_loss_scale_says_so(graph_mode):
    update_cell = AdaptiveLossScaleUpdateCell(1024, 2, 20)
    step = Dense().train_step(update_cell, nn.TrainOneStepWithLossScaleCell)
    assert update_cell.state_dict()["scale"] == 1024.0
    update_cell(step.scale_sense, Tensor(True))
    with pytest.raises(RuntimeError, match=r"bind_loss_scale\(train_step.scale_sense\)"):
        update_cell.state_dict()
    update_cell.bind_loss_scale(step.scale_sense)
    assert update_cell.state_dict()["scale"] == 512.0
