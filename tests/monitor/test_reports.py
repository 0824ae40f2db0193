"""Test what the log says before the first step, and why an explanation that was asked for is refused."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from mindformers_adaptive import AdaptiveLossScaleUpdateCell, LossScaleMonitor
from mindformers_adaptive.monitor.collapse_watch import CollapseWatch
from mindformers_adaptive.monitor.reports import explain_collapse
from mindformers_adaptive.record.writer import read_record
from tests.overflow.overflowing import Autoencoder, planted, values
from tests.shared.networks import train, train_step_of

pytestmark = pytest.mark.usefixtures("graph_mode", "in_a_folder_of_its_own")


def warnings_of(train_step, callback, mindformers_log):
    mindformers_log.clear()
    train(train_step, [values(2, 4, 16)], callback)
    lines = [record.getMessage() for record in mindformers_log.records if record.levelname == "WARNING"]
    return [line for line in lines if "weight stands out" in line or "weights are in" in line]


def test_weights_that_hinder_a_training_are_told_at_its_start(mindformers_log):
    network, in_half = Autoencoder(), Autoencoder()
    for weight in in_half.get_parameters():
        weight.set_dtype(mstype.float16)
    train_step, train_step_in_half = train_step_of(network), train_step_of(in_half)
    for callback in (LossScaleMonitor, CollapseWatch):
        assert warnings_of(train_step, callback(), mindformers_log) == []
        # The tanh after this layer keeps its outputs small, so that no step overflows.
        with planted(network, {"encoder.weight": 4000.0}):
            [outlier] = warnings_of(train_step, callback(), mindformers_log)
        assert "encoder.weight has a weight of" in outlier
        assert "adaptive-loss-scale why" in outlier
        first = warnings_of(train_step_in_half, callback(), mindformers_log)[0]
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
    batches = values(12, 4, 16)
    batches[:4] = np.nan
    monitor = LossScaleMonitor("record.jsonl", max_consecutive_overflows=3, explain=True)
    train(train_step_of(Autoencoder()), [batches], monitor)
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
    train_step = train_step_of(NormInHalf(), update_cell=AdaptiveLossScaleUpdateCell(4.0, 2, 20))
    train(train_step, [np.abs(values(20, 4, 4)) + 0.5], LossScaleMonitor(explain=True))
    [collapse] = [line for line in map(str, mindformers_log.messages) if "collapsed" in line]
    for part in ("step 1 to step 12", "last 10 ", "a normalization in FP16", "layernorm_compute_type"):
        assert part in collapse
    assert re.search(r"Why it overflows:\nThe backward pass .* at a loss scale of 2\^0: .* Rsqrt", collapse)
    assert re.search(r"What helps.*: .*Rsqrt .*in float32", collapse)


def test_a_bad_loss_that_comes_back_is_explained_again(mindformers_log):
    batches = values(8, 4, 16)
    batches[[1, 5, 6, 7]] = np.nan
    train(train_step_of(Autoencoder()), [batches], LossScaleMonitor("r.jsonl", explain=True))
    lines = [line for line in map(str, mindformers_log.messages) if line.startswith(("The loss of", "The loss was"))]
    first, over, second, broken = lines
    assert first.startswith("The loss of step 2 is nan")
    assert "step 2 only" in over
    assert second.startswith("The loss of step 6 is nan")
    assert "2 times in this training" in second
    assert all("the batch itself has inf" in line for line in (first, second))
    assert "finite in step 5" in broken
    assert json.loads(Path("overflow_explanation.json").read_text())["step"] == 6
