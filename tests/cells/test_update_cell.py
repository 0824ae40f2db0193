"""The update cell's arguments, Parameters and state, and its use in MindSpore's own train-step cells."""

import mindformers.wrapper
import pytest
from mindspore import Tensor, nn

from mindformers_adaptive.cells.update_cells import AdaptiveLossScaleUpdateCell
from tests.shared.networks import Dense


@pytest.mark.parametrize("hysteresis", [1, 2])
def test_parameters_have_the_names_of_mindformers_own_cell(hysteresis):
    from mindformers.wrapper import AdaptiveLossScaleUpdateCell as MindFormersUpdateCell

    stock = set(MindFormersUpdateCell(1024, 2, 20).parameters_dict())
    more = {
        "skipped_steps",
        "consecutive_overflows",
        "loss_scaling_run",
        "loss_scaling_form",
        *["hysteresis_budget"][: hysteresis - 1],
    }
    assert "list_index" in stock
    assert set(AdaptiveLossScaleUpdateCell(1024, 2, 20, hysteresis=hysteresis).parameters_dict()) == stock | more


@pytest.mark.parametrize(
    ("stock", "hysteresis", "mode"),
    [(nn.TrainOneStepWithLossScaleCell, 1, "pynative"), (mindformers.wrapper.MFTrainOneStepCell, 2, "graph")],
    indirect=["mode"],
)
def test_works_in_the_stock_train_step_cells(mode, stock, hysteresis):
    """On a CPU, MindSpore's train-step cell has to take its branch for Ascend 910B, which uses IsFinite."""
    update_cell = AdaptiveLossScaleUpdateCell(1024, 2, 20, hysteresis=hysteresis)
    step = Dense().train_step(update_cell, stock)
    step.ascend_910b_target, step.enable_allfinite = True, False
    overflows = [bool(step(*Dense.batch(overflow))[1]) for overflow in (False, True, True, False)]
    assert overflows == [False, True, True, False]
    assert float(step.scale_sense) == (256 if hysteresis == 1 else 512)
    assert update_cell.state()["skipped_steps"] == 2


def test_cell_that_does_not_know_its_loss_scale_says_so(graph_mode):
    update_cell = AdaptiveLossScaleUpdateCell(1024, 2, 20)
    step = Dense().train_step(update_cell, nn.TrainOneStepWithLossScaleCell)
    assert update_cell.state_dict()["scale"] == 1024.0
    update_cell(step.scale_sense, Tensor(True))
    # MindSpore's train-step cell does not pass its loss scale to the update cell, not even in set_train(), so
    # state_dict() raises an error.
    step.set_train()
    assert "loss_scale" not in update_cell.state()
    with pytest.raises(RuntimeError, match=r"bind_loss_scale\(train_step.scale_sense\)"):
        update_cell.state_dict()
    update_cell.bind_loss_scale(step.scale_sense)
    assert update_cell.state_dict()["scale"] == 512.0


def test_the_number_of_a_run_goes_on_with_a_restored_state():
    cell = AdaptiveLossScaleUpdateCell(1024, 2, 20)
    cell.load_state({**cell.state(), "loss_scaling_run": 7})
    assert cell.run_number == 7
