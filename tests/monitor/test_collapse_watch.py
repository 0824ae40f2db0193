"""Test that a training with only skipped steps or a NaN loss gives warnings, also without LossScaleMonitor."""

import re

import numpy as np
import pytest
from mindspore import nn

from mindformers_adaptive import AdaptiveLossScaleUpdateCell, LossScaleMonitor, register
from mindformers_adaptive.lab.analysis import analyze
from mindformers_adaptive.monitor.collapse_watch import CollapseWatch
from mindformers_adaptive.plots.runs import draw_runs
from mindformers_adaptive.record.logs import read_log
from mindformers_adaptive.record.writer import read_record
from tests.shared.networks import Dense, train

pytestmark = pytest.mark.usefixtures("graph_mode", "in_a_folder_of_its_own")


def train_on(value, steps, *callbacks, cell=AdaptiveLossScaleUpdateCell):
    columns = np.full((steps, 1, 4), value, np.float32), np.zeros((steps, 1, 2), np.float32)
    train(Dense().train_step(cell(2.0**16, 2, 20)), columns, *callbacks)


@pytest.mark.parametrize("cell", [AdaptiveLossScaleUpdateCell, nn.DynamicLossScaleUpdateCell])
def test_a_bad_loss_and_a_collapse_are_told_without_the_monitor(cell, mindformers_log):
    train_on(np.inf, 55, CollapseWatch(), cell=cell)
    lines = [record.getMessage() for record in mindformers_log.records if record.filename == "collapse_watch.py"]
    assert [line.partition(",")[0].partition(":")[0] for line in lines] == [
        "The loss of step 1 is nan" if "is nan" in lines[0] else "The loss of step 1 is inf",
        "Loss scaling has collapsed",
        "Loss scaling has collapsed",
        "Loss scaling",
    ]
    # From 2^16, the loss scale is 1 from step 17 on.
    seen = 30 if cell is AdaptiveLossScaleUpdateCell else 26
    assert all(part in lines[1] for part in (f"{seen} steps in a row", f" step {seen},", "at a loss scale of 2^0"))
    assert "50 steps in a row" in lines[2]
    assert all(part in lines[3] for part in ("all 55 steps", "overflowed"))
    assert all("adaptive-loss-scale why --config" in line for line in (lines[0], lines[1], lines[3]))


def test_good_training_or_one_with_a_monitor_is_not_told_of(mindformers_log):
    train_on(0.5, 12, CollapseWatch())
    train_on(np.inf, 3, LossScaleMonitor("record.jsonl"), CollapseWatch())
    assert not [record for record in mindformers_log.records if record.filename == "collapse_watch.py"]
    of_first_loss = re.compile(r"The loss of step 1 is (inf|nan), .*no loss scale")
    [first] = [record for record in mindformers_log.records if of_first_loss.match(record.getMessage())]
    assert first.filename == "loss_scale_monitor.py"
    # The analysis and the picture of the run record also report that the loss is inf or NaN.
    [advice, *_] = analyze(read_log("record.jsonl")).advice
    assert (advice.rule, advice.figures["first_step"]) == ("bad loss", 1)
    assert "adaptive-loss-scale why" in advice.change
    title = draw_runs({"": read_record("record.jsonl")}).get_suptitle()
    assert "loss inf or NaN in 3 steps, first 1" in title


def test_registered():
    register()
    from mindformers.tools.register import MindFormerRegister

    assert MindFormerRegister.get_cls("callback", "CollapseWatch") is CollapseWatch
