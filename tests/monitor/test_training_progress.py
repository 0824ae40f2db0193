"""The progress bar of a training shows step, loss, loss scale and skipped steps, with any update cell."""

import numpy as np
import pytest
from mindspore import nn

from mindformers_adaptive import AdaptiveLossScaleUpdateCell
from mindformers_adaptive.monitor.training_progress import TrainingProgress
from tests.shared.networks import Dense, train

pytestmark = pytest.mark.usefixtures("graph_mode", "in_a_folder_of_its_own")


@pytest.mark.parametrize("cell", [AdaptiveLossScaleUpdateCell, nn.DynamicLossScaleUpdateCell])
def test_text_beside_the_bar_is_that_of_the_step(cell):
    totals, moves = [], []

    def open_bar(total):
        totals.append(total)
        # The bar is drawn in every third step only.
        return lambda step, text: moves.append((step, text() if step % 3 == 0 else None))

    features = np.ones((6, 1, 4), np.float32)
    features[:4] = np.inf
    columns = features, np.zeros((6, 1, 2), np.float32)
    train(Dense().train_step(cell(2.0**16, 2, 20)), columns, TrainingProgress(open_bar))
    assert totals == [6]
    assert [step for step, _ in moves] == [1, 2, 3, 4, 5, 6]
    assert moves[2][1].partition(", ")[2] == "loss scale 2^13, skipped 3"
    loss, scale, skipped = moves[5][1].split(", ")
    assert float(loss.removeprefix("loss ")) > 0
    assert (scale, skipped) == ("loss scale 2^12", "skipped 4")
