"""An update cell belongs to one train-step cell, even if several models train with this train-step cell.

A copy of an update cell belongs to no train-step cell.
"""

import copy

import pytest
from mindspore.train import Model

from mindformers_adaptive import (
    AdaptiveLossScaleManager,
    AdaptiveLossScaler,
    AdaptiveLossScaleUpdateCell,
    GradientGuidedLossScaleUpdateCell,
    RuleLossScaleUpdateCell,
)
from mindformers_adaptive.wrapper import MFTrainOneStepCell, TrainOneStepWithLossScaleCell
from tests.shared.networks import Dense, batches

CELLS = {
    "adaptive": lambda: AdaptiveLossScaleUpdateCell(2.0**12, 2, 20),
    "guided": lambda: GradientGuidedLossScaleUpdateCell(2.0**12),
    "rule": lambda: RuleLossScaleUpdateCell("adaptive", 2.0**12),
}
REFUSED = r"already scales the loss of another train step.*Make an update cell for each.*load_state_dict"


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("second", [TrainOneStepWithLossScaleCell, MFTrainOneStepCell])
def test_second_train_step_is_refused_first_keeps_its_scale(kind, second):
    cell = CELLS[kind]()
    first = Dense().train_step(cell)
    with pytest.raises(ValueError, match=REFUSED):
        Dense().train_step(cell, second)
    first.set_sense_scale(first.scale_sense * 0 + 64)
    assert cell.state()["loss_scale"] == 64


def test_the_cell_of_a_scaler_or_a_manager_is_refused_elsewhere():
    with pytest.raises(ValueError, match=REFUSED):
        Dense().train_step(AdaptiveLossScaler(2.0**12).update_cell)
    manager = AdaptiveLossScaleManager(2.0**12)
    Dense().train_step(manager.get_update_cell())
    with pytest.raises(ValueError, match=REFUSED):
        Dense().train_step(manager.update_cell)
    # Each call of get_update_cell() returns a new cell.
    Dense().train_step(manager.get_update_cell())


def test_the_same_train_step_goes_on(graph_mode):
    dense, cell = Dense(), CELLS["adaptive"]()
    step = dense.train_step(cell)
    cell.bind_loss_scale(step.scale_sense)
    # Build two models around the train-step cell, and train each model twice.
    for _ in range(2):
        model = Model(step)
        for _ in range(2):
            model.train(1, batches(2), dataset_sink_mode=False)
    assert cell.state()["cur_iter"] == 9
    step.set_train()(*dense.batch(overflow=True))
    assert cell.state()["loss_scale"] == float(step.scale_sense) == 2.0**11


def test_a_copy_belongs_to_no_train_step(graph_mode):
    cell = CELLS["guided"]()
    step = Dense().train_step(cell).set_train()
    step(*Dense.batch(overflow=True))
    other = copy.deepcopy(cell)
    second = Dense().train_step(other)
    other.load_state_dict(cell.state_dict())
    assert float(second.scale_sense) == float(step.scale_sense)
    assert other.state() == cell.state()
    second.set_train()(*Dense.batch(overflow=True))
    assert other.state()["skipped_steps"] == 2
    assert cell.state()["skipped_steps"] == 1
    with pytest.raises(ValueError, match=REFUSED):
        Dense().train_step(other)
