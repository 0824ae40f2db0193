"""The progress bar of a training shows step, loss, loss scale and skipped steps, with any update cell."""

import numpy as np
import pytest
from mindspore import Model, nn
from mindspore.dataset import NumpySlicesDataset

from mindformers_adaptive import AdaptiveLossScaleUpdateCell, wrapper
from mindformers_adaptive.monitor.training_progress import TrainingProgress
from tests.shared.networks import Dense

pytestmark = pytest.mark.usefixtures("graph_mode", "in_a_folder_of_its_own")


@pytest.mark.parametrize("cell", [AdaptiveLossScaleUpdateCell, nn.DynamicLossScaleUpdateCell])
def test_text_beside_the_bar_is_that_of_the_step(cell):
    totals, moves = [], []

    def open_bar(total):
        totals.append(total)
        # The bar is drawn in every third step only.
        return lambda step, text: moves.append((step, text() if step % 3 == 0 else None))

    dense, steps = Dense(), 6
    train_step = wrapper.TrainOneStepWithLossScaleCell(
        dense.network, dense.optimizer(), scale_sense=cell(2.0**16, 2, 20)
    )
    features, target = (np.repeat(each.asnumpy()[:1], steps, axis=0) for each in Dense.batch())
    features[:4] = np.inf
    data = NumpySlicesDataset((features, target), shuffle=False).batch(1)
    Model(train_step).train(1, data, callbacks=[TrainingProgress(open_bar)], dataset_sink_mode=False)
    assert totals == [steps]
    assert [step for step, _ in moves] == [1, 2, 3, 4, 5, 6]
    assert moves[2][1].partition(", ")[2] == "loss scale 2^13, skipped 3"
    loss, scale, skipped = moves[5][1].split(", ")
    assert float(loss.removeprefix("loss ")) > 0
    assert (scale, skipped) == ("loss scale 2^12", "skipped 4")
