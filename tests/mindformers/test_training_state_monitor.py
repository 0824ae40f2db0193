"""Test this package's ``TrainingStateMonitor``, and steps that MindFormers drops because of a large gradient norm.

MindFormers' own monitor ends trainings that overflow at the start; this package's monitor lets them continue.
"""

import math
import re

import mindformers.core.callback
import numpy as np
import pytest
from mindformers.tools.register import MindFormerConfig
from mindspore import dataset, nn
from mindspore.train import LambdaCallback, Model

from mindformers_adaptive.lab.analysis import analyze
from mindformers_adaptive.mindformers.callbacks import TrainingStateMonitor
from mindformers_adaptive.monitor.loss_scale_monitor import LossScaleMonitor
from mindformers_adaptive.record.logs import read_log
from mindformers_adaptive.record.writer import read_record
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.wrapper import AdaptiveLossScaleUpdateCell, MFTrainOneStepCell
from tests.shared.networks import HalfPrecisionSum
from tests.shared.records import assert_follows

pytestmark = pytest.mark.usefixtures("graph_mode", "in_a_folder_of_its_own")

STOCK = mindformers.core.callback.TrainingStateMonitor
# In FP16, each element of the weight's gradient is the input value of the step times the loss scale. With the input
# value SPIKE, loss scales from 2^32 down to 2^14 overflow, and 2^13 does not. The unscaled gradient then has 4 elements
# with the value 4, so its norm is 8, which is THRESHOLD.
START, OVERFLOWS_AT_START = 2.0**32, 19
THRESHOLD = 8.0
SPIKE = 4.0
SIZE = 4
SEARCH = [SPIKE] * OVERFLOWS_AT_START


def train(values, monitor, record=None, drops=False):
    """Train one step for each value, with all features equal to the value.

    Return the weight and the optimizer's step count after each step, and the error that ended the training.
    """
    seen = []

    def remember(_):
        seen.append((train_step.weights[0].asnumpy().tolist(), int(optimizer.global_step.asnumpy()[0])))

    network = HalfPrecisionSum(SIZE)
    optimizer = nn.Momentum(network.trainable_params(), learning_rate=0.001, momentum=0.9)
    train_step = MFTrainOneStepCell(
        network,
        optimizer,
        use_clip_grad=True,
        scale_sense=AdaptiveLossScaleUpdateCell(START, 2, 20),
        use_skip_data_by_global_norm=drops,
        global_norm_spike_threshold=THRESHOLD,
    )
    rows = [(np.full(SIZE, value, np.float32),) for value in values]
    callbacks = [LambdaCallback(on_train_step_end=remember)]
    # The monitor comes last, because it may end the training.
    callbacks += [monitor] if record is None else [LossScaleMonitor(record), monitor]
    try:
        Model(train_step).train(1, dataset.GeneratorDataset(rows, ["x"], shuffle=False), callbacks=callbacks)
    except (RuntimeError, ValueError) as error:
        return seen, str(error)
    return seen, None


def spike_monitor(kind, **config):
    section = MindFormerConfig(global_norm_spike_threshold=THRESHOLD, global_norm_spike_count_threshold=10, **config)
    return kind(100, section, use_skip_data_by_global_norm=not config.get("check_for_global_norm"))


def nan_monitor(kind):
    return kind(100, check_for_nan_in_loss_and_grad=True)


@pytest.mark.parametrize(
    ("make_monitor", "stock_ends_at", "error_of_stock"),
    [(nan_monitor, 1, "global_norm"), (spike_monitor, 10, "10 consecutive")],
)
@pytest.mark.parametrize("kind", [STOCK, TrainingStateMonitor])
def test_the_overflows_of_the_start_are_no_anomaly(kind, make_monitor, stock_ends_at, error_of_stock):
    seen, error = train([*SEARCH, 1.0], make_monitor(kind), drops=make_monitor is spike_monitor)
    if kind is STOCK:
        assert (len(seen), error_of_stock in error) == (stock_ends_at, True)
    else:
        assert (len(seen), error) == (20, None)


def test_nan_loss_at_a_scale_that_held_ends_the_training():
    clean = [*SEARCH, *[1.0] * 22]
    seen, error = train([*clean, np.nan, 1.0], nan_monitor(TrainingStateMonitor))
    assert len(seen) == len(clean) + 1
    parts = (f"loss of step {len(seen)} is nan", "'check_for_nan_in_loss_and_grad' to False")
    assert all(part in error for part in parts)


def test_ten_spikes_of_the_norm_still_end_the_training():
    values = [*SEARCH, *[SPIKE] * 5, np.inf, *[SPIKE] * 6]
    seen, error = train(values, spike_monitor(TrainingStateMonitor), drops=True)
    assert (len(seen), "10 consecutive" in error) == (OVERFLOWS_AT_START + 11, True)


def test_overflow_does_not_end_what_a_norm_should_end():
    seen, error = train([*SEARCH, 1.0, SPIKE], spike_monitor(TrainingStateMonitor, check_for_global_norm=True))
    assert (len(seen), "TREError" in error) == (21, True)


def test_steps_dropped_by_norm_leave_the_scale_alone():
    values = [*SEARCH, 1.0, SPIKE, SPIKE, *[1.0] * 15, SPIKE, 1.0, SPIKE, 1.0]
    dropped, overflowed_again = [21, 22, 38], 40
    seen, _ = train(values, TrainingStateMonitor(100), "record.jsonl", drops=True)
    lines = read_record("record.jsonl")
    assert [line["step"] for line in lines if line["dropped_by_norm"]] == dropped
    assert {line["dropped_by_norm"] for line in lines} == {True, False}
    # Each of the 4 elements of the gradient is the input value of the step, so the gradient norm is twice this value.
    applied = [
        (line["gradient_norm"], value) for line, value in zip(lines, values, strict=True) if not line["overflow"]
    ]
    assert [norm for norm, _ in applied] == [2 * value for _, value in applied]
    assert not any(math.isfinite(line["gradient_norm"]) for line in lines if line["overflow"])
    assert [line["step"] for line in lines if line["overflow"]] == [*range(1, OVERFLOWS_AT_START + 1), overflowed_again]
    # A step that is dropped because of a large gradient norm did not overflow, so the rule counts it as clean. So the
    # rule raises the loss scale 20 steps after the overflows at the start. The next step has the input value SPIKE, and
    # overflows.
    rule = AdaptiveRule()
    assert_follows(rule, rule.start(START), lines)
    for step in dropped:
        assert seen[step - 1] == seen[step - 2]
    # Neither an overflowed nor a dropped step advances the schedule of the learning rate.
    assert seen[-1][1] == len(values) - OVERFLOWS_AT_START - 1 - len(dropped)

    analysis = analyze(read_log("record.jsonl"))
    assert analysis.to_dict()["dropped_by_norm"] == {"count": 3, "ranges": [(21, 22), (38, 38)]}
    assert analysis.to_dict()["skipped"]["count"] == OVERFLOWS_AT_START + 1
    assert re.search(r"Dropped +3 .*gradient norm: 21-22, 38\n", analysis.text(details=True))


def test_dropping_by_a_norm_that_is_not_calculated_is_refused():
    network = HalfPrecisionSum(SIZE)
    with pytest.raises(ValueError, match=r"'use_clip_grad' must be True with 'use_skip_data_by_global_norm'"):
        MFTrainOneStepCell(
            network,
            nn.SGD(network.trainable_params()),
            scale_sense=AdaptiveLossScaleUpdateCell(START, 2, 20),
            use_skip_data_by_global_norm=True,
        )
