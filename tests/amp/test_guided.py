"""Gradient-guided scaling with ``Model`` and in functional training: manager and scaler equal the rule."""

import json

import mindspore
import numpy as np
import pytest
from dense_network import Dense
from mindspore import Tensor, amp
from mindspore.train import Callback, Model
from test_scaler import functional_step
from test_train_network import batches

from mindformers_adaptive import (
    GradientGuidedLossScaleManager,
    GradientGuidedLossScaler,
    GradientGuidedLossScaleUpdateCell,
    build_train_network,
)
from mindformers_adaptive.rules.guided import GuidedRule
from mindformers_adaptive.wrapper import TrainOneStepWithLossScaleCell

START = 2.0**24


class FollowsTheRule(Callback):
    """Compares manager and network with the rule after each step."""

    def __init__(self, manager):
        self.manager, self.rule = manager, manager.update_cell.rule
        self.state, self.overflows = self.rule.start(manager.get_loss_scale()), []

    def on_train_step_end(self, run_context):
        _, overflow, loss_scale = run_context.original_args().net_outputs
        self.overflows.append(bool(overflow))
        largest = self.manager.update_cell.state()["largest_gradient"]
        self.state = self.rule.step(self.state, bool(overflow), largest)
        assert self.manager.get_loss_scale() == float(loss_scale) == self.state.loss_scale
        assert self.manager.inv_scale == 1 / self.state.loss_scale


def model_with(manager):
    dense = Dense()
    return Model(dense.layer, dense.loss_fn, dense.optimizer(), amp_level="O2", loss_scale_manager=manager)


def test_model_follows_the_gradients_and_the_manager_follows_the_model(mode, scaling_on_cpu):
    manager = GradientGuidedLossScaleManager(START, exchange_rate=5)
    model, steps = model_with(manager), FollowsTheRule(manager)
    model.train(1, batches(20 if mode == "graph" else 8), callbacks=[steps], dataset_sink_mode=False)
    first_applied = steps.overflows.index(False)
    assert 1 <= first_applied <= 6
    assert not any(steps.overflows[first_applied:])
    assert manager.state_dict()["observed_steps"] == len(steps.overflows) - first_applied


def test_update_cell_goes_on_where_the_manager_is(graph_mode, scaling_on_cpu):
    manager = GradientGuidedLossScaleManager(START, track_per_parameter=True)
    first = manager.get_update_cell()
    model_with(manager).train(1, batches(6), dataset_sink_mode=False)
    state = manager.state_dict()
    assert state["cur_iter"] == 7
    cell = manager.get_update_cell()
    assert cell.state_dict() == state
    assert (cell.rule.patience, cell.track_per_parameter) == (first.rule.patience, True)
    assert first.state()["cur_iter"] == 1
    resumed = GradientGuidedLossScaleManager()
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert resumed.get_update_cell().state_dict() == state


def test_mindspores_own_train_step_is_refused_with_the_call_that_is_missing():
    assert mindspore.train.amp.build_train_network is not build_train_network
    with pytest.raises(ValueError, match=r"Call mindformers_adaptive.enable_loss_scale_on_cpu\(\) before the Model"):
        model_with(GradientGuidedLossScaleManager())


def test_overflow_flag_alone_is_refused():
    manager = GradientGuidedLossScaleManager()
    with pytest.raises(RuntimeError, match=r"by its overflow flag alone.* Give the manager to Model"):
        manager.update_loss_scale(True)
    assert manager.get_loss_scale() == 2.0**24
    assert manager.get_drop_overflow_update() is True


@pytest.mark.parametrize("given", [GradientGuidedLossScaleUpdateCell(2**8), GradientGuidedLossScaler(2**8)])
def test_what_is_no_manager_is_refused_with_the_one_that_is(given):
    dense = Dense()
    with pytest.raises(TypeError, match="Give GradientGuidedLossScaleManager with the same arguments"):
        build_train_network(dense.layer, dense.optimizer(), dense.loss_fn, loss_scale_manager=given)


@pytest.mark.parametrize("compiled", [True, False])
def test_functional_training_follows_the_rule(graph_mode, compiled):
    dense, scaler = Dense(), GradientGuidedLossScaler(START)
    step = functional_step(dense, scaler, compiled, needs_grads=True)
    rule = scaler.update_cell.rule
    state = rule.start(START)
    for overflow in (False, True, False, True, True, False, False):
        before = dense.weight()
        _, grads_finite = step(*dense.batch(overflow))
        assert bool(grads_finite) == (not overflow) == (not np.array_equal(dense.weight(), before))
        now = scaler.state()
        state = rule.step(state, overflow, now["largest_gradient"])
        assert now["loss_scale"] == state.loss_scale
        assert scaler.update_cell.rule_state() == state
        assert np.isinf(now["largest_gradient"]) == overflow


@pytest.mark.parametrize("grads", [Tensor(np.float16([-3.0])), (Tensor([1.0]), Tensor([[-3.0]])), [Tensor([-3.0])]])
def test_adjust_measures_one_gradient_or_several(mode, grads):
    scaler = GradientGuidedLossScaler(2**10)
    assert scaler.adjust(amp.all_finite(grads if isinstance(grads, (tuple, list)) else (grads,)), grads) is True
    assert scaler.state()["largest_gradient"] == 3.0
    assert scaler.state()["cur_iter"] == 2


def test_adjust_without_gradients_is_refused():
    with pytest.raises(TypeError, match="grads"):
        GradientGuidedLossScaler(2**10).adjust(Tensor(True))


def test_saved_and_loaded_scaler_goes_on_as_if_it_had_never_stopped(graph_mode, tmp_path):
    whole, resumed = GradientGuidedLossScaler(START), GradientGuidedLossScaler(8.0)
    random = np.random.default_rng(0)
    steps = [(bool(random.random() < 0.3), Tensor(np.float32(random.lognormal(-5)))) for _ in range(14)]

    def take(scaler, some):
        for overflow, gradient in some:
            scaler.adjust(Tensor(not overflow), gradient)
        return scaler.state()

    take(whole, steps[:8])
    mindspore.save_checkpoint(Dense().layer, str(tmp_path / "all.ckpt"), append_dict=whole.state_dict())
    resumed.load_state_dict(mindspore.load_checkpoint(str(tmp_path / "all.ckpt")))
    assert take(resumed, []) == take(whole, [])
    assert take(resumed, steps[8:]) == take(whole, steps[8:])


def test_a_state_that_cannot_be_used_changes_nothing():
    scaler = GradientGuidedLossScaler(2**10)
    before = scaler.state_dict()
    for change, error, message in (
        ({"scale": float("nan")}, ValueError, "'scale' nan; a loss scale must be finite"),
        ({"base": 3.5}, TypeError, "'base' must be an integer, but got 3.5"),
    ):
        with pytest.raises(error, match=message):
            scaler.load_state_dict({**before, **change})
    with pytest.raises(KeyError, match="The state has no level, overflow_rate_3"):
        scaler.load_state_dict({name: before[name] for name in before if name not in ("level", "overflow_rate_3")})
    assert scaler.state_dict() == before


@pytest.mark.parametrize("kind", [GradientGuidedLossScaleManager, GradientGuidedLossScaler])
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({0: "2**24"}, TypeError, "'{}' must be a number"),
        ({0: 4, "min_loss_scale": 8}, ValueError, "'{}' must lie between"),
        ({"scale_factor": 3}, ValueError, "'scale_factor' must be 2"),
        ({"exchange_rate": 0}, ValueError, "'exchange_rate' must be a number from 0.001 to 1000"),
        ({"scale_window": 20}, TypeError, "scale_window"),
    ],
)
def test_bad_argument_is_named(kind, arguments, error, message):
    name = "init_loss_scale" if kind is GradientGuidedLossScaleManager else "scale_value"
    arguments = {name: 2.0**10, **{name if key == 0 else key: value for key, value in arguments.items()}}
    with pytest.raises(error, match=message.format(name)):
        kind(**arguments)


def test_start_that_is_no_power_of_two_gives_one_warning():
    for kind in (GradientGuidedLossScaleManager, GradientGuidedLossScaler):
        with pytest.warns(
            UserWarning, match=r"must be a power of two here, but got 1000.0: training starts at 512"
        ) as it:
            assert kind(1000).state_dict()["scale"] == 512
        assert len(it) == 1


def test_every_argument_of_the_rule_is_taken():
    for kind in (GradientGuidedLossScaleManager, GradientGuidedLossScaler):
        rule = kind(4.0, exchange_rate=20, min_loss_scale=2, max_loss_scale=8).update_cell.rule
        assert (rule.exchange_rate, rule.min_loss_scale, rule.max_loss_scale) == (20, 2, 8)


def test_update_cell_of_a_manager_trains_in_a_train_step_cell(graph_mode):
    dense, manager = Dense(), GradientGuidedLossScaleManager(2**8)
    step = TrainOneStepWithLossScaleCell(dense.network, dense.optimizer(), manager.get_update_cell()).set_train()
    step(*dense.batch(True))
    assert manager.get_loss_scale() == GuidedRule().step(GuidedRule().start(2**8), True).loss_scale == 2**7
