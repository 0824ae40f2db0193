"""A step with a bad loss, but finite gradients, changes the weights: the log, the record and the analysis say so."""

import numpy as np
import pytest
from mindspore import nn, ops
from mindspore.train import LambdaCallback

from mindformers_adaptive import LossScaleMonitor
from mindformers_adaptive.lab.analysis import analyze
from mindformers_adaptive.record.logs import read_log
from mindformers_adaptive.record.writer import read_record
from tests.overflow.overflowing import values
from tests.shared.networks import train, train_step_of

FILE, BAD_STEP = "record.jsonl", 3


class Penalized(nn.Cell):
    """A loss with a term that has no gradient, so that a NaN in the term does not reach the weights."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(4, 1)

    def construct(self, x, penalty):
        return (self.dense(x) ** 2).mean() + ops.stop_gradient(penalty.mean())


@pytest.mark.usefixtures("graph_mode", "in_a_folder_of_its_own")
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_log_record_and_analysis_say_that_weights_changed(bad, mindformers_log):
    network, seen, penalty = Penalized(), [], np.zeros((5, 2), np.float32)
    penalty[BAD_STEP - 1] = bad
    keep = LambdaCallback(on_train_step_end=lambda _: seen.append(network.dense.weight.asnumpy().copy()))
    train(train_step_of(network), (values(5, 2, 4), penalty), LossScaleMonitor(FILE), keep)
    assert not np.array_equal(seen[BAD_STEP - 1], seen[BAD_STEP - 2])
    [said] = [line for line in map(str, mindformers_log.messages) if line.startswith("The loss of step ")]
    for part in (f"step {BAD_STEP}", "weights have changed", "checkpoint before", "check_for_nan_in_loss_and_grad"):
        assert part in said
    marked = [line["step"] for line in read_record(FILE) if line.get("applied_bad_loss")]
    assert marked == [BAD_STEP]
    [advice] = analyze(read_log(FILE)).advice
    for part in ("1 of these", "changed the weights", f"before step {BAD_STEP}", "check_for_nan_in_loss_and_grad"):
        assert part in advice.change
