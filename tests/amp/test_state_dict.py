"""One pair, ``state_dict()`` and ``load_state_dict()``, for update cell, manager and scaler, and for Megatron-LM."""

import json
import warnings

import numpy as np
import pytest
from dense_network import Dense
from mindspore import Parameter, Tensor, nn

from mindformers_adaptive import AdaptiveLossScaleManager, AdaptiveLossScaler, AdaptiveLossScaleUpdateCell
from mindformers_adaptive.rules.base import STEP_LIMIT
from mindformers_adaptive.wrapper import TrainOneStepWithLossScaleCell

OVERFLOWS = (np.random.default_rng(5).random(60) < 0.3).tolist()
WINDOWS = {"scale_factor": 2, "scale_window": 1, "max_scale_window": 4, "min_scale_window": 1}


class Stepped:
    """An update cell with its loss scale, a manager or a scaler, stepped in the same way."""

    def __init__(self, kind, **options):
        options = {**WINDOWS, **options}
        if kind == "cell":
            self.state_owner = AdaptiveLossScaleUpdateCell(2.0**20, **options)
            loss_scale = Parameter(Tensor(self.state_owner.get_loss_scale()), name="loss_scale")
            self.state_owner.bind_loss_scale(loss_scale)
            self.step = lambda overflow: self.state_owner(loss_scale, Tensor(overflow))
        elif kind == "manager":
            self.state_owner = AdaptiveLossScaleManager(2.0**20, **options)
            self.step = self.state_owner.update_loss_scale
        else:
            self.state_owner = AdaptiveLossScaler(2.0**20, **options)
            self.step = lambda overflow: self.state_owner.adjust(Tensor(not overflow))

    def path(self, overflows):
        for overflow in overflows:
            self.step(overflow)
            yield self.state_owner.state_dict()


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


@pytest.mark.parametrize("target", ["cell", "manager", "scaler"])
@pytest.mark.parametrize("source", ["cell", "manager", "scaler"])
def test_each_goes_on_from_the_state_of_each(graph_mode, source, target):
    whole = Stepped(source, hysteresis=2)
    *_, state = whole.path(OVERFLOWS[:30])
    resumed = Stepped(target, hysteresis=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.state_owner.load_state_dict(json.loads(json.dumps(state)))
    assert resumed.state_owner.state_dict() == state
    assert list(resumed.path(OVERFLOWS[30:45])) == list(whole.path(OVERFLOWS[30:45]))


@pytest.mark.parametrize("kind", ["cell", "manager", "scaler"])
@pytest.mark.parametrize("scale", [65536.0, 3.0, 1000.1])
def test_inv_scale_is_the_reciprocal_in_float32(kind, scale):
    owner = Stepped(kind).state_owner
    owner.load_state_dict({**owner.state_dict(), "scale": np.array([scale], np.float32)})
    assert owner.inv_scale == np.float32(1.0 / np.float64(np.float32(scale)))


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_megatron_goes_on_from_a_state_of_ours(graph_mode, hysteresis):
    one_window = {"scale_window": 4, "max_scale_window": 4, "min_scale_window": 4, "hysteresis": hysteresis}
    ours = Stepped("cell", **one_window)
    states = [ours.state_owner.state_dict(), *ours.path(OVERFLOWS)]
    for steps in (0, 7, 23, 60):
        ours.state_owner.load_state_dict(states[steps])
        theirs = DynamicGradScaler(states[steps], hysteresis, interval=4)
        for overflow in OVERFLOWS[::-1][:30]:
            ours.step(overflow)
            assert theirs.update(overflow) == ours.state_owner.state_dict()["scale"], steps


def test_megatrons_tracker_below_zero_is_a_spent_budget(graph_mode):
    # Megatron-LM counts on below 0 with every overflow after the budget is spent.
    cell = Stepped("cell", hysteresis=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cell.state_owner.load_state_dict({"scale": 64.0, "growth_tracker": 0, "hysteresis_tracker": -3})
    assert cell.state_owner.state()["hysteresis_budget"] == 0
    assert [state["scale"] for state in cell.path([True, False, True, True])] == [32.0, 64.0, 64.0, 32.0]


@pytest.mark.parametrize("kind", ["cell", "manager", "scaler"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cur_iter": -5}, "'current_iterator_step' -5"),
        ({"cur_iter": 2**31 - 3}, "'current_iterator_step' 2147483645"),
        ({"skipped_steps": 2**31 - 1}, "'skipped_steps' 2147483647"),
        ({"growth_num": 9}, "'scale_window_up_count' 9"),
        ({"scale_window": 500, "window_index": 6}, "'scale_window' 500 with 'list_index' 6"),
    ],
)
def test_counters_that_no_run_can_reach_are_changed_with_a_warning(kind, changes, message):
    owner = Stepped(kind).state_owner
    before = owner.state_dict()
    with pytest.warns(UserWarning, match=message):
        owner.load_state_dict({**before, **changes})
    assert all(owner.state_dict()[name] != value for name, value in changes.items())


@pytest.mark.parametrize("kind", ["cell", "manager", "scaler"])
def test_steps_are_counted_up_to_the_limit(graph_mode, kind):
    stepped = Stepped(kind)
    last = {"cur_iter": STEP_LIMIT - 1, "last_overflow_iter": STEP_LIMIT - 2}
    stepped.state_owner.load_state_dict({**stepped.state_owner.state_dict(), **last})
    *_, state = stepped.path([False, True, True, False])
    assert (state["cur_iter"], state["scale"]) == (STEP_LIMIT, 2.0**20)
    stepped.state_owner.load_state_dict(state)
    assert stepped.state_owner.state_dict() == state


@pytest.mark.parametrize("kind", ["cell", "manager", "scaler"])
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"scale": 0.0}, ValueError, "'scale' 0.0; a loss scale must be finite and above 0"),
        ({"scale": float("nan")}, ValueError, "'scale' nan; a loss scale must be finite and above 0"),
        ({"cur_iter": 2.5}, TypeError, "'cur_iter' must be an integer, but got 2.5"),
        ({"growth_num": True}, TypeError, "'growth_num' must be an integer, but got True"),
    ],
)
def test_impossible_value_is_refused_and_nothing_is_changed(kind, changes, error, message):
    owner = Stepped(kind).state_owner
    before = owner.state_dict()
    with pytest.raises(error, match=message):
        owner.load_state_dict({**before, **changes})
    assert owner.state_dict() == before


def test_state_without_a_scale_is_refused():
    owner = Stepped("cell").state_owner
    with pytest.raises(KeyError, match="has no 'scale'"):
        owner.load_state_dict(owner.state())


def test_cell_of_a_train_step_reads_and_sets_its_loss_scale(graph_mode):
    dense = Dense()
    update_cell = AdaptiveLossScaleUpdateCell(1024, 2, 20)
    step = TrainOneStepWithLossScaleCell(dense.network, dense.optimizer(), update_cell)
    step(*dense.batch(overflow=True))
    state = update_cell.state_dict()
    assert (state["scale"], state["skipped_steps"]) == (512.0, 1)
    update_cell.load_state_dict({**state, "scale": 4096.0})
    assert float(step.scale_sense) == 4096.0


def test_cell_that_does_not_know_its_loss_scale_says_so(graph_mode):
    dense = Dense()
    update_cell = AdaptiveLossScaleUpdateCell(1024, 2, 20)
    step = nn.TrainOneStepWithLossScaleCell(dense.network, dense.optimizer(), update_cell)
    assert update_cell.state_dict()["scale"] == 1024.0
    update_cell(step.scale_sense, Tensor(True))
    with pytest.raises(RuntimeError, match=r"bind_loss_scale\(train_step.scale_sense\)"):
        update_cell.state_dict()
    update_cell.bind_loss_scale(step.scale_sense)
    assert update_cell.state_dict()["scale"] == 512.0


@pytest.mark.skipif(not hasattr(nn.Cell, "state_dict"), reason="MindSpore's cells have no state_dict yet")
def test_state_dict_of_a_whole_train_step_is_that_of_mindspore():
    def keys(train_step_class):
        dense = Dense()
        return list(
            train_step_class(dense.network, dense.optimizer(), AdaptiveLossScaleUpdateCell(8, 2, 20)).state_dict()
        )

    stock, ours = keys(nn.TrainOneStepWithLossScaleCell), keys(TrainOneStepWithLossScaleCell)
    assert set(stock) <= set(ours)
    assert "loss_scaling_manager.window_index" in stock
