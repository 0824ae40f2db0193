"""The loss-scale manager: its rule on the host, its update cell, and the errors of what is given in its place."""

import numpy as np
import pytest
from dense_network import Dense
from mindspore import Parameter, Tensor, amp, int32, load_param_into_net

from mindformers_adaptive import AdaptiveLossScaleManager, AdaptiveLossScaler, AdaptiveLossScaleUpdateCell
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.wrapper import MFTrainOneStepCell, TrainOneStepWithLossScaleCell

OVERFLOWS = np.random.default_rng(0).random(300) < 0.2


def test_defaults_are_those_of_the_dynamic_manager_and_of_the_ladder():
    manager, dynamic = AdaptiveLossScaleManager(), amp.DynamicLossScaleManager()
    assert manager.get_loss_scale() == dynamic.get_loss_scale()
    assert manager.get_drop_overflow_update() is dynamic.get_drop_overflow_update() is True
    cell = manager.get_update_cell()
    assert type(cell) is AdaptiveLossScaleUpdateCell
    assert (cell.rule.scale_factor, cell.rule.ladder[0], cell.rule.ladder[-1]) == (dynamic.scale_factor, 20, 1000)
    assert cell.state()["scale_window"] == 20


def test_host_follows_the_rule():
    manager = AdaptiveLossScaleManager(2**20, 3, 2, 4, 1, min_loss_scale=0.5, max_loss_scale=2**22, hysteresis=2)
    rule = AdaptiveRule(3, 4, 1, min_loss_scale=0.5, max_loss_scale=2**22, hysteresis=2)
    state = rule.start(2**20, 2)
    for overflow in OVERFLOWS:
        manager.update_loss_scale(overflow)
        state = rule.step(state, overflow)
        assert manager.get_loss_scale() == state.loss_scale


@pytest.mark.parametrize("steps", [0, 1, 50, 200])
@pytest.mark.parametrize("options", [{}, {"hysteresis": 3}, {"shrink_from_min_window": True}])
def test_update_cell_goes_on_where_the_manager_is(graph_mode, steps, options):
    manager = AdaptiveLossScaleManager(2**20, 2, 2, 4, 1, **options)
    for overflow in OVERFLOWS[:steps]:
        manager.update_loss_scale(overflow)
    cell = manager.get_update_cell()
    assert cell.state()["skipped_steps"] == OVERFLOWS[:steps].sum()
    loss_scale = Parameter(Tensor(cell.get_loss_scale()), name="loss_scale")
    for overflow in OVERFLOWS[steps : steps + 40]:
        cell(loss_scale, Tensor(bool(overflow)))
        manager.update_loss_scale(overflow)
        assert float(loss_scale) == manager.get_loss_scale()


def test_update_cell_of_a_fresh_manager_knows_a_checkpoint_of_dynamic_scaling():
    cell = AdaptiveLossScaleManager().get_update_cell()
    dynamic = {"current_iterator_step": 501, "last_overflow_iterator_step": 100}
    load_param_into_net(cell, {name: Parameter(Tensor(value, int32)) for name, value in dynamic.items()})
    with pytest.warns(UserWarning, match="has steps but no window, as one of dynamic or gradient-guided loss scaling"):
        cell.set_train()
    assert cell.state()["last_overflow_iter"] == 500


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"init_loss_scale": "2**24"}, TypeError, "'init_loss_scale' must be a number"),
        ({"init_loss_scale": 0}, ValueError, "'init_loss_scale' must be finite and above 0"),
        ({"init_loss_scale": 4, "min_loss_scale": 8}, ValueError, "'init_loss_scale' must lie between"),
        ({"scale_factor": 1}, ValueError, "'scale_factor'"),
        ({"scale_window": 20.0}, TypeError, "'scale_window'"),
        ({"max_scale_window": True}, TypeError, "'max_scale_window'"),
        ({"min_scale_window": 0}, ValueError, "'min_scale_window'"),
        ({"hysteresis": 0}, ValueError, "'hysteresis'"),
        ({"growth_interval": 20}, TypeError, "growth_interval"),
    ],
)
def test_bad_argument_is_named(arguments, error, message):
    with pytest.raises(error, match=message):
        AdaptiveLossScaleManager(**arguments)


def test_window_off_the_ladder_starts_at_the_smallest_with_a_warning():
    with pytest.warns(UserWarning, match="'scale_window' must be one of the ladder"):
        manager = AdaptiveLossScaleManager(scale_window=21)
    assert manager.get_update_cell().state()["scale_window"] == 20


@pytest.mark.parametrize("cell", [TrainOneStepWithLossScaleCell, MFTrainOneStepCell])
@pytest.mark.parametrize(
    ("scale_sense", "remedy"),
    [
        (AdaptiveLossScaleManager(), r"manager\.get_update_cell\(\)"),
        (amp.FixedLossScaleManager(), r"manager\.get_update_cell\(\)"),
        (AdaptiveLossScaler(1024), "give AdaptiveLossScaleUpdateCell"),
        (amp.FixedLossScaleManager(8, False).get_update_cell(), "use FixedScaleTrainOneStepCell"),
    ],
)
def test_what_is_no_update_cell_is_refused_where_one_is_needed(cell, scale_sense, remedy):
    dense = Dense()
    with pytest.raises(TypeError, match=f"'scale_sense' must be an update cell or a Tensor, but got .*{remedy}"):
        cell(dense.network, dense.optimizer(), scale_sense=scale_sense)
