"""The loss-scale managers have MindSpore's defaults; ``build_train_network`` and ``Model`` train with the managers."""

import mindspore.train.amp
import numpy as np
import pytest
from mindspore import amp, nn
from mindspore.train import LambdaCallback, Model

from mindformers_adaptive import (
    AdaptiveLossScaleManager,
    AdaptiveLossScaleUpdateCell,
    GradientGuidedLossScaleManager,
    GradientGuidedLossScaler,
    build_train_network,
    enable_loss_scale_in_model,
    wrapper,
)
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from tests.shared.networks import Dense, batches

pytestmark = pytest.mark.slow

# At a loss scale of 2**24, the float16 gradients of the small network really overflow, until the scale has fallen.
START = 2**24


# Each loss-scale manager, with the arguments of AdaptiveRule that give the same steps. With a single scale window, the
# adaptive rule is dynamic scaling.
MANAGERS = {
    "fixed": (lambda: amp.FixedLossScaleManager(START), {"min_loss_scale": START, "max_loss_scale": START}),
    "dynamic": (lambda: amp.DynamicLossScaleManager(START, 2, 3), {"max_scale_window": 3, "min_scale_window": 3}),
    "adaptive": (lambda: AdaptiveLossScaleManager(START, 2, 1, 3, 1), {"max_scale_window": 3, "min_scale_window": 1}),
}


@pytest.mark.parametrize(
    ("manager", "level"),
    [("adaptive", "O0"), ("adaptive", "auto"), ("fixed", "O2"), ("dynamic", "O3")],
)
def test_model_trains_with_the_manager_as_the_reference_says(graph_mode, scaling_on_cpu, manager, level):
    dense = Dense()
    make_manager, arguments = MANAGERS[manager]
    manager, steps, weights = make_manager(), [], [dense.weight()]

    def remember(run_context):
        _, overflow, loss_scale = run_context.original_args().net_outputs
        steps.append((bool(overflow), float(loss_scale)))
        weights.append(dense.weight())

    model = Model(dense.layer, dense.loss_fn, dense.optimizer(), amp_level=level, loss_scale_manager=manager)
    remembering = LambdaCallback(on_train_step_end=remember)
    model.train(1, batches(20), callbacks=[remembering], dataset_sink_mode=False)
    assert len(steps) == 20
    rule = AdaptiveRule(**arguments)
    state = rule.start(START)
    for (overflow, loss_scale), before, after in zip(steps, weights[:-1], weights[1:], strict=True):
        state = rule.step(state, overflow)
        assert loss_scale == state.loss_scale
        assert np.array_equal(before, after) is overflow
    assert any(overflow for overflow, _ in steps) == (level != "O0")
    if isinstance(manager, AdaptiveLossScaleManager):
        assert manager.get_loss_scale() == state.loss_scale


def test_fixed_scale_without_skipping_divides_in_the_optimizer(graph_mode, scaling_on_cpu):
    scaled, plain = Dense(), Dense()
    manager, optimizer = amp.FixedLossScaleManager(1024.0, False), scaled.optimizer(loss_scale=1024.0)
    model = Model(scaled.layer, scaled.loss_fn, optimizer, loss_scale_manager=manager)
    model.train(1, batches(3), dataset_sink_mode=False)
    Model(plain.layer, plain.loss_fn, plain.optimizer()).train(1, batches(3), dataset_sink_mode=False)
    np.testing.assert_array_equal(scaled.weight(), plain.weight())


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "auto"])
def test_level_without_a_manager_has_the_stock_default(level):
    dense = Dense()
    default = mindspore.train.amp._config_level[level]["loss_scale_manager"]
    built = build_train_network(dense.layer, dense.optimizer(), dense.loss_fn, level=level)
    assert isinstance(built, wrapper.TrainOneStepWithLossScaleCell) == (default is not None)
    if default is not None:
        cell = built.loss_scaling_manager
        assert type(cell) is nn.DynamicLossScaleUpdateCell
        expected = (default.loss_scale, default.scale_factor, default.scale_window)
        assert (cell.get_loss_scale(), cell.scale_factor, cell.scale_window.asnumpy()) == expected


def test_network_that_returns_the_loss_needs_no_loss_function(graph_mode):
    dense = Dense()
    built = build_train_network(dense.network, dense.optimizer(), loss_scale_manager=AdaptiveLossScaleManager())
    assert built.training
    assert not bool(built(*dense.batch())[1])
    assert bool(built(*dense.batch(overflow=True))[1])


def test_none_as_manager_scales_nothing():
    dense = Dense()
    built = build_train_network(dense.layer, dense.optimizer(), dense.loss_fn, level="O2", loss_scale_manager=None)
    assert isinstance(built, nn.TrainOneStepCell)
    assert not isinstance(built, nn.TrainOneStepWithLossScaleCell)


def test_other_things_as_manager_are_refused_as_by_mindspore():
    dense = Dense()
    with pytest.raises(TypeError, match="loss_scale_manager"):
        build_train_network(dense.layer, dense.optimizer(), dense.loss_fn, loss_scale_manager=1024)


def test_gradients_never_divided_give_a_warning():
    dense = Dense()
    manager = amp.FixedLossScaleManager(1024.0, False)
    with pytest.warns(UserWarning, match=r"1024.0 times too large.*FixedScaleTrainOneStepCell"):
        build_train_network(dense.layer, dense.optimizer("AdamWeightDecay"), dense.loss_fn, loss_scale_manager=manager)


def test_what_has_stock_cells_that_cpu_cannot_run_is_refused():
    dense = Dense()
    accumulating = nn.GradAccumulationCell(dense.network, 2)
    with pytest.raises(ValueError, match="with gradient accumulation on CPU"):
        build_train_network(accumulating, dense.optimizer(), loss_scale_manager=AdaptiveLossScaleManager())
    with pytest.raises(ValueError, match="with boost_level='O1' on CPU"):
        build_train_network(
            dense.layer,
            dense.optimizer(),
            dense.loss_fn,
            boost_level="O1",
            loss_scale_manager=AdaptiveLossScaleManager(),
        )
    mindspore.set_auto_parallel_context(pipeline_stages=2)
    try:
        with pytest.raises(ValueError, match="with pipeline_stages above 1 on CPU"):
            build_train_network(dense.network, dense.optimizer(), loss_scale_manager=AdaptiveLossScaleManager())
    finally:
        mindspore.reset_auto_parallel_context()


def test_enabling_again_changes_nothing(scaling_on_cpu):
    enable_loss_scale_in_model()
    assert mindspore.amp.build_train_network is mindspore.train.amp.build_train_network is build_train_network


def test_defaults_equal_the_dynamic_managers_and_the_ladders():
    manager, dynamic = AdaptiveLossScaleManager(), amp.DynamicLossScaleManager()
    assert manager.get_loss_scale() == dynamic.get_loss_scale()
    assert manager.get_drop_overflow_update() is dynamic.get_drop_overflow_update() is True
    cell = manager.get_update_cell()
    assert type(cell) is AdaptiveLossScaleUpdateCell
    assert (cell.rule.scale_factor, cell.rule.ladder[0], cell.rule.ladder[-1]) == (dynamic.scale_factor, 20, 1000)
    assert cell.state()["scale_window"] == 20


@pytest.mark.parametrize(
    ("kind", "argument"),
    [(GradientGuidedLossScaleManager, "init_loss_scale"), (GradientGuidedLossScaler, "scale_value")],
)
def test_start_that_is_no_power_of_two_gives_one_warning(kind, argument):
    with pytest.warns(UserWarning, match=rf"'{argument}' .*power of two .*'guided', .* 1000\.0.* 512\.0") as it:
        assert kind(1000).state_dict()["scale"] == 512
    assert len(it) == 1


@pytest.mark.parametrize("factor", [100, 3000])
def test_a_factor_that_looks_like_a_window_is_warned_of(factor):
    dense = Dense()
    manager = amp.DynamicLossScaleManager(4, factor)
    with pytest.warns(UserWarning, match=f"'scale_factor' of Dynamic.* is {factor}: .* scale_window={factor}"):
        build_train_network(dense.network, dense.optimizer(), level="O0", loss_scale_manager=manager)
    # A scale factor of 16 must give no warning. In the tests, a warning is an error.
    AdaptiveLossScaleManager(4, 16)
    build_train_network(
        dense.network, dense.optimizer(), level="O0", loss_scale_manager=amp.DynamicLossScaleManager(4, 16)
    )
