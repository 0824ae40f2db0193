"""The lab's rules named after MindSpore's classes take the same steps as these classes on random overflows."""

import numpy as np
import pytest
from mindspore import amp, nn

from mindformers_adaptive.lab.running_rule import start_rule
from tests.shared.every_rule import Owned

# Tuples of initial loss scale, factor and window. The loss scales reach their minimum and inf. For the factors 3 and 7,
# division rounds differently from multiplication by the reciprocal.
SETTINGS = [(65536.0, 2, 3), (1024.0, 3, 2), (2.0, 3, 4), (10.0, 7, 1), (2.0**126, 2, 5)]


def random_overflows(steps, rates=(0.02, 0.1, 0.3, 0.7)):
    """Return overflow flags in stretches with different rates, from few overflows to mostly overflows."""
    random = np.random.default_rng(0)
    return (random.random(steps) < np.repeat(rates, steps // len(rates))).tolist()


def test_dynamic_is_the_update_cell(graph_mode):
    cells = [Owned(nn.DynamicLossScaleUpdateCell(*setting)) for setting in SETTINGS]
    rules = [start_rule("dynamic", **named("loss_scale_value", setting)) for setting in SETTINGS]
    for overflow in random_overflows(200):
        for cell, running in zip(cells, rules, strict=True):
            cell.step(overflow)
            assert float(cell.scale_sense) == running.step(overflow)


@pytest.mark.parametrize("factor", [2, 4])
def test_dynamic_is_the_rule_of_the_manager(factor):
    # MindSpore's manager computes with Python numbers, so it differs from the rule where float32 rounds or overflows.
    for scale, _, window in SETTINGS[:3]:
        manager = amp.DynamicLossScaleManager(scale, factor, window)
        running = start_rule("dynamic", init_loss_scale=scale, scale_factor=factor, scale_window=window)
        for overflow in random_overflows(400, rates=(0.3, 0.4, 0.5, 0.7)):
            manager.update_loss_scale(overflow)
            assert running.step(overflow) == manager.get_loss_scale()


def test_dynamic_has_the_defaults_of_the_manager():
    manager, running = amp.DynamicLossScaleManager(), start_rule("dynamic")
    assert (running.loss_scale, running.scale_window) == (manager.get_loss_scale(), manager.scale_window)
    assert running.step(True) == manager.get_loss_scale() / manager.scale_factor


def test_fixed_is_the_fixed_manager():
    manager, running = amp.FixedLossScaleManager(), start_rule("fixed")
    assert {running.step(True), running.step(False), running.loss_scale} == {manager.get_loss_scale()}


def named(scale_name, setting):
    return dict(zip((scale_name, "scale_factor", "scale_window"), setting, strict=True))
