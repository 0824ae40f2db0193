"""The loss-scale manager: its rule on the host, its update cell, and the errors of what is given in its place."""

import pytest
from mindspore import amp

from mindformers_adaptive import (
    AdaptiveLossScaleManager,
    AdaptiveLossScaler,
    AdaptiveLossScaleUpdateCell,
    GradientGuidedLossScaleManager,
    GradientGuidedLossScaler,
    GradientGuidedLossScaleUpdateCell,
)


def test_defaults_are_those_of_the_dynamic_manager_and_of_the_ladder():
    manager, dynamic = AdaptiveLossScaleManager(), amp.DynamicLossScaleManager()
    assert manager.get_loss_scale() == dynamic.get_loss_scale()
    assert manager.get_drop_overflow_update() is dynamic.get_drop_overflow_update() is True
    cell = manager.get_update_cell()
    assert type(cell) is AdaptiveLossScaleUpdateCell
    assert (cell.rule.scale_factor, cell.rule.ladder[0], cell.rule.ladder[-1]) == (dynamic.scale_factor, 20, 1000)
    assert cell.state()["scale_window"] == 20


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"scale_factor": 1}, ValueError, "'scale_factor'"),
        ({"scale_window": 20.0}, TypeError, "'scale_window'"),
        ({"max_scale_window": True}, TypeError, "'max_scale_window'"),
        ({"min_scale_window": 0}, ValueError, "'min_scale_window'"),
        ({"hysteresis": 0}, ValueError, "'hysteresis'"),
    ],
)
def test_bad_argument_is_named(arguments, error, message):
    for kind in (AdaptiveLossScaleManager, AdaptiveLossScaler, AdaptiveLossScaleUpdateCell):
        with pytest.raises(error, match=message):
            kind(2**10, **{"scale_factor": 2, "scale_window": 20, **arguments})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"scale_factor": 3}, ValueError, "'scale_factor' must be 2"),
        ({"exchange_rate": 0}, ValueError, "'exchange_rate' must be a number from 0.001 to 1000"),
        ({"scale_window": 20}, TypeError, "scale_window"),
    ],
)
def test_bad_argument_of_the_guided_rule_is_named(arguments, error, message):
    for kind in (GradientGuidedLossScaleManager, GradientGuidedLossScaler, GradientGuidedLossScaleUpdateCell):
        with pytest.raises(error, match=message):
            kind(2**10, **arguments)


@pytest.mark.parametrize("kind", [GradientGuidedLossScaleManager, GradientGuidedLossScaler])
def test_start_that_is_no_power_of_two_gives_one_warning(kind):
    with pytest.warns(UserWarning, match=r"must be a power of two here, but got 1000.0: training starts at 512") as it:
        assert kind(1000).state_dict()["scale"] == 512
    assert len(it) == 1
