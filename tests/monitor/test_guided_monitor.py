"""Test ``LossScaleMonitor`` with the gradient-guided cell: the record has the largest gradients."""

import math

import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn
from test_loss_scale_monitor import train

from mindformers_adaptive.monitor.loss_scale_monitor import LossScaleMonitor
from mindformers_adaptive.record.step import FIELDS
from mindformers_adaptive.record.writer import read_record
from mindformers_adaptive.rules.guided import GuidedRule
from mindformers_adaptive.wrapper import GradientGuidedLossScaleUpdateCell, TrainOneStepWithLossScaleCell
from tests.monitor.event_files import read_scalars
from tests.shared.records import assert_follows

pytestmark = pytest.mark.usefixtures("graph_mode")

# The gradient of weight j is the sum of column j of the batch. In a batch without inf, the largest sum is the last
# column's.
LARGEST = (3 + 7 + 11) / 8
# The steps that overflow: two steps in a row, a single step, and three steps in a row.
OVERFLOWS = [bool(int(digit)) for digit in "00110001000111000"]


class Products(nn.Cell):
    """A network that returns the sum of weight times x; the gradient of the weight overflows where x is inf."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(np.ones(4, np.float32)), name="weight")

    def construct(self, x, target):
        return target.sum() + (self.weight * x).sum()


def build(**arguments):
    network = Products()
    optimizer = nn.SGD(network.trainable_params(), learning_rate=0.001)
    cell = GradientGuidedLossScaleUpdateCell(2.0**10, **arguments)
    return TrainOneStepWithLossScaleCell(network, optimizer, scale_sense=cell)


@pytest.mark.parametrize("every_n_steps", [1, 6])
def test_record_is_the_rule_with_the_gradients(path, tmp_path, every_n_steps):
    history_size = every_n_steps if every_n_steps > 1 else 0
    monitor = LossScaleMonitor(path, every_n_steps, tensorboard_dir=tmp_path / "scalars")
    train(build(history_size=history_size), [monitor], OVERFLOWS)
    lines = read_record(path)
    applied = [step for step, overflow in enumerate(OVERFLOWS, start=1) if not overflow]
    assert read_scalars(tmp_path / "scalars")["loss_scaling/largest_gradient"] == dict.fromkeys(applied, LARGEST)
    assert [line["step"] for line in lines] == list(range(1, len(OVERFLOWS) + 1))
    assert [line["overflow"] for line in lines] == OVERFLOWS
    rule = GuidedRule()
    assert_follows(rule, rule.start(2.0**10), lines)
    for line in lines:
        assert list(line) == [*FIELDS, "current_margin", "gradient_format"]
        assert line["gradient_format"] == "float16"
        assert line["largest_gradient"] == (math.inf if line["overflow"] else LARGEST)
        unknown = [name for name, value in line.items() if value is None]
        assert unknown == ["scale_window", "window_index", "growth_num", "down_num", "gradient_norm"]
        assert line["dropped_by_norm"] is False
