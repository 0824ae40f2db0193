"""The update cell as users meet it: arguments, Parameters, state, and its place in MindSpore's own train-step cell."""

import mindformers.wrapper
import numpy as np
import pytest
from mindspore import Tensor, nn

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
    net = nn.Dense(3, 2)
    optimizer = nn.Momentum(net.trainable_params(), learning_rate=0.1, momentum=0.9)
    update_cell = AdaptiveLossScaleUpdateCell(1024, 2, 20, hysteresis=hysteresis)
    step = stock(nn.WithLossCell(net, nn.MSELoss()), optimizer, scale_sense=update_cell)
    step.ascend_910b_target, step.enable_allfinite = True, False
    features, target = np.ones((4, 3), np.float32), Tensor(np.zeros((4, 2), np.float32))
    overflows = [bool(step(Tensor(features * scale), target)[1]) for scale in (1, np.inf, np.inf, 1)]
    assert overflows == [False, True, True, False]
    assert float(step.scale_sense) == (256 if hysteresis == 1 else 512)
    assert update_cell.state()["skipped_steps"] == 2
