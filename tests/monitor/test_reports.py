"""Test what the log says before the first step, and why an explanation that was asked for is refused."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from mindspore import Model, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.dataset import NumpySlicesDataset

from mindformers_adaptive import AdaptiveLossScaleUpdateCell, LossScaleMonitor, wrapper
from mindformers_adaptive.monitor.collapse_watch import CollapseWatch
from mindformers_adaptive.monitor.reports import explain_collapse
from mindformers_adaptive.record.writer import read_record
from tests.overflow.overflowing import Autoencoder, planted, values

pytestmark = pytest.mark.usefixtures("graph_mode", "in_a_folder_of_its_own")


def warnings_of(network, mindformers_log, callback):
    optimizer = nn.Adam(network.trainable_params(), 0.001)
    scale = AdaptiveLossScaleUpdateCell(2.0**10, 2, 20)
    train_step = wrapper.TrainOneStepWithLossScaleCell(network, optimizer, scale_sense=scale)
    mindformers_log.clear()
    data = NumpySlicesDataset((values(22, 4, 16),), shuffle=False)
    Model(train_step).train(1, data, callbacks=[callback], dataset_sink_mode=False)
    lines = [record.getMessage() for record in mindformers_log.records if record.levelname == "WARNING"]
    return [line for line in lines if "weight stands out" in line or "weights are in" in line]


@pytest.mark.parametrize("callback", [LossScaleMonitor, CollapseWatch])
def test_weights_that_hinder_a_training_are_told_at_its_start(callback, mindformers_log):
    assert warnings_of(Autoencoder(), mindformers_log, callback()) == []
    network = Autoencoder()
    # The tanh after this layer keeps its outputs small, so that no step overflows.
    with planted(network, {"encoder.weight": 4000.0}):
        [outlier] = warnings_of(network, mindformers_log, callback())
    assert "encoder.weight has a weight of" in outlier
    assert "adaptive-loss-scale why" in outlier
    network = Autoencoder()
    for weight in network.get_parameters():
        weight.set_dtype(mstype.float16)
    first = warnings_of(network, mindformers_log, callback())[0]
    assert "in FP16: encoder.weight and 3 more Parameters" in first
    assert "param_init_type: float32" in first


REFUSED = {
    "no batch": (None, 1024.0, "data-sink mode"),
    "inf": ((values(4, 16),), np.inf, "loss scale is inf"),
    "no scale": ((values(4, 16),), None, "loss scale is None"),
    "error": ((values(3, 5),), 1024.0, "could not be explained: "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_explanation_that_is_refused_says_why(case, tmp_path):
    batch, loss_scale, reason = REFUSED[case]
    batch = batch and tuple(map(Tensor, batch))
    assert reason in explain_collapse(Autoencoder(), batch, loss_scale, 7, tmp_path)


def test_a_training_goes_on_where_no_explanation_is_given(mindformers_log, monkeypatch):
    monkeypatch.setattr("mindformers_adaptive.overflow.explain._explain", lambda *args: 1 / 0)
    network = Autoencoder()
    optimizer = nn.SGD(network.trainable_params(), 0.001)
    scale = AdaptiveLossScaleUpdateCell(2.0**10, 2, 20)
    train_step = wrapper.TrainOneStepWithLossScaleCell(network, optimizer, scale_sense=scale)
    batches = values(12, 4, 16)
    batches[:4] = np.nan
    data = NumpySlicesDataset((batches,), shuffle=False)
    monitor = LossScaleMonitor("record.jsonl", max_consecutive_overflows=3, explain=True)
    Model(train_step).train(1, data, callbacks=[monitor], dataset_sink_mode=False)
    log = "\n".join(record.getMessage() for record in mindformers_log.records)
    assert "could not be explained: ZeroDivisionError" in log
    assert [step["step"] for step in read_record("record.jsonl")] == list(range(1, 13))


class NormInHalf(nn.Cell):
    """A layer, and a norm in FP16 whose gradient overflows, because the values that it divides by are small."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(4, 4, "ones").to_float(mstype.float16)

    def construct(self, x):
        hidden = self.dense(x) * 1e-3
        normed = hidden * ops.rsqrt((hidden * hidden).mean(-1, keep_dims=True))
        return (normed.astype(mstype.float32) ** 2).mean()


def test_norms_in_fp16_are_told_after_ten_overflows(mindformers_log):
    network = NormInHalf()
    optimizer = nn.SGD(network.trainable_params(), 0.001)
    scale = AdaptiveLossScaleUpdateCell(4.0, 2, 20)
    train_step = wrapper.TrainOneStepWithLossScaleCell(network, optimizer, scale_sense=scale)
    data = NumpySlicesDataset((np.abs(values(20, 4, 4)) + 0.5,), shuffle=False)
    Model(train_step).train(1, data, callbacks=[LossScaleMonitor(explain=True)], dataset_sink_mode=False)
    [collapse] = [line for line in map(str, mindformers_log.messages) if "collapsed" in line]
    for part in ("step 1 to step 12", "last 10 ", "a normalization in FP16", "layernorm_compute_type"):
        assert part in collapse
    assert re.search(r"Why it overflows:\nThe backward pass .* at a loss scale of 2\^0: .* Rsqrt", collapse)
    assert re.search(r"What helps.*: .*Rsqrt .*in float32", collapse)


def test_a_bad_loss_that_comes_back_is_explained_again(mindformers_log):
    network = Autoencoder()
    optimizer = nn.SGD(network.trainable_params(), 0.001)
    scale = AdaptiveLossScaleUpdateCell(2.0**10, 2, 20)
    train_step = wrapper.TrainOneStepWithLossScaleCell(network, optimizer, scale_sense=scale)
    batches = values(8, 4, 16)
    batches[[1, 5, 6, 7]] = np.nan
    data = NumpySlicesDataset((batches,), shuffle=False)
    Model(train_step).train(1, data, callbacks=[LossScaleMonitor("r.jsonl", explain=True)], dataset_sink_mode=False)
    lines = [line for line in map(str, mindformers_log.messages) if line.startswith(("The loss of", "The loss was"))]
    first, over, second, broken = lines
    assert first.startswith("The loss of step 2 is nan")
    assert "step 2 only" in over
    assert second.startswith("The loss of step 6 is nan")
    assert "2 times in this training" in second
    assert all("the batch itself has inf" in line for line in (first, second))
    assert "finite in step 5" in broken
    assert json.loads(Path("overflow_explanation.json").read_text())["step"] == 6
