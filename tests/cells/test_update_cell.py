"""The update cell as users meet it: arguments, Parameters, state, and its place in MindSpore's own train-step cell."""

import mindformers.wrapper
import pytest
from dense_network import Dense
from mindspore import nn

from mindformers_adaptive.cells.adaptive_update_cell import AdaptiveLossScaleUpdateCell


def test_takes_the_call_of_mindformers_documentation():
    cell = AdaptiveLossScaleUpdateCell(1, 2, 20, 1000, 20)
    assert cell.get_loss_scale() == 1.0
    assert cell.rule.ladder == (20, 30, 40, 50, 100, 200, 500, 1000)


@pytest.mark.parametrize("hysteresis", [1, 2])
def test_parameters_have_the_names_of_mindformers_own_cell_and_some_more(hysteresis):
    from mindformers.wrapper import AdaptiveLossScaleUpdateCell as MindFormersUpdateCell

    stock = set(MindFormersUpdateCell(1024, 2, 20).parameters_dict())
    more = {"skipped_steps", "consecutive_overflows", *["hysteresis_budget"][: hysteresis - 1]}
    assert "list_index" in stock
    assert set(AdaptiveLossScaleUpdateCell(1024, 2, 20, hysteresis=hysteresis).parameters_dict()) == stock | more


@pytest.mark.parametrize("stock", [nn.TrainOneStepWithLossScaleCell, mindformers.wrapper.MFTrainOneStepCell])
@pytest.mark.parametrize("hysteresis", [1, 2])
def test_works_in_the_stock_train_step_cells(mode, stock, hysteresis):
    """Told to take its IsFinite branch, a stock cell runs on CPU; that branch is the one of Ascend 910B."""
    update_cell = AdaptiveLossScaleUpdateCell(1024, 2, 20, hysteresis=hysteresis)
    step = Dense().train_step(update_cell, stock)
    step.ascend_910b_target, step.enable_allfinite = True, False
    overflows = [bool(step(*Dense.batch(overflow))[1]) for overflow in (False, True, True, False)]
    assert overflows == [False, True, True, False]
    assert float(step.scale_sense) == (256 if hysteresis == 1 else 512)
    assert update_cell.state()["skipped_steps"] == 2
