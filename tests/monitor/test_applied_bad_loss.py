"""A step with a bad loss, but finite gradients, changes the weights: the log, the record and the analysis say so."""

import numpy as np
import pytest
from mindspore import Model, nn, ops, train
from mindspore.dataset import NumpySlicesDataset

from mindformers_adaptive import AdaptiveLossScaleUpdateCell, LossScaleMonitor, wrapper
from mindformers_adaptive.lab.analysis import analyze
from mindformers_adaptive.record.logs import read_log
from mindformers_adaptive.record.writer import read_record
from tests.overflow.overflowing import values

FILE, BAD_STEP = "record.jsonl", 3


class Penalized(nn.Cell):
    """A loss with a term that has no gradient, so that a NaN in the term does not reach the weights."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(4, 1)

    def construct(self, x, penalty):
        return (self.dense(x) ** 2).mean() + ops.stop_gradient(penalty.mean())


def trained(*callbacks, bad=np.nan):
    network = Penalized()
    optimizer = nn.SGD(network.trainable_params(), 0.01)
    scale = AdaptiveLossScaleUpdateCell(2.0**10, 2, 20)
    train_step = wrapper.TrainOneStepWithLossScaleCell(network, optimizer, scale_sense=scale)
    penalty = np.zeros((5, 2), np.float32)
    penalty[BAD_STEP - 1] = bad
    data = NumpySlicesDataset((values(5, 2, 4), penalty), shuffle=False)
    Model(train_step).train(1, data, callbacks=[LossScaleMonitor(FILE), *callbacks], dataset_sink_mode=False)


@pytest.mark.usefixtures("graph_mode", "in_a_folder_of_its_own")
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_log_record_and_analysis_say_that_weights_changed(bad, mindformers_log):
    seen = []
    network_of = lambda context: context.original_args().train_network.network.dense.weight.asnumpy().copy()  # noqa: E731
    trained(train.LambdaCallback(on_train_step_end=lambda context: seen.append(network_of(context))), bad=bad)
    assert not np.array_equal(seen[BAD_STEP - 1], seen[BAD_STEP - 2])
    [said] = [line for line in map(str, mindformers_log.messages) if line.startswith("The loss of step ")]
    for part in (f"step {BAD_STEP}", "weights have changed", "checkpoint before", "check_for_nan_in_loss_and_grad"):
        assert part in said
    marked = [line["step"] for line in read_record(FILE) if line.get("applied_bad_loss")]
    assert marked == [BAD_STEP]
    [advice] = analyze(read_log(FILE)).advice
    for part in ("1 of these", "changed the weights", f"before step {BAD_STEP}", "check_for_nan_in_loss_and_grad"):
        assert part in advice.change
