"""``LossScaleMonitor`` with the gradient-guided cell: the record has its gradients, and overflows have names."""

import math

import mindspore
import numpy as np
import pytest
from event_files import read_scalars
from mindspore import Parameter, Tensor, nn
from record_checks import assert_follows
from test_loss_scale_monitor import train

from mindformers_adaptive.monitor.loss_scale_monitor import LossScaleMonitor
from mindformers_adaptive.record.step import FIELDS
from mindformers_adaptive.record.writer import read_record
from mindformers_adaptive.rules.guided import GuidedRule
from mindformers_adaptive.wrapper import GradientGuidedLossScaleUpdateCell, TrainOneStepWithLossScaleCell

pytestmark = pytest.mark.usefixtures("graph_mode")

NAMES = ("first", "second", "third", "fourth")
# The sum of the last column of a batch.
LARGEST = (3 + 7 + 11) / 8
# A row of two, a lone one, and a row of three.
OVERFLOWS = [bool(int(digit)) for digit in "00110001000111000"]


class Products(nn.Cell):
    """The sum of four products; only the gradients of some of its Parameters overflow where x is inf."""

    def __init__(self, overflowing=NAMES):
        super().__init__()
        self.weights = mindspore.ParameterTuple([Parameter(Tensor(np.ones(4, np.float32)), name=it) for it in NAMES])
        self.takes_x = [name in overflowing for name in NAMES]

    def construct(self, x, target):
        loss = target.sum()
        finite = x.clip(-1, 1)
        for place in range(len(NAMES)):
            loss = loss + (self.weights[place] * (x if self.takes_x[place] else finite)).sum()
        return loss


def build(overflowing=NAMES, scale=2.0**10, **arguments):
    network = Products(overflowing)
    optimizer = nn.SGD(network.trainable_params(), learning_rate=0.001)
    cell = GradientGuidedLossScaleUpdateCell(scale, **arguments)
    return TrainOneStepWithLossScaleCell(network, optimizer, scale_sense=cell)


def named(messages):
    return [message for message in messages() if "inf or NaN in the gradients" in message]


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
        assert list(line) == [*FIELDS, "gradient_format"]
        assert line["gradient_format"] == "float16"
        assert line["largest_gradient"] == (math.inf if line["overflow"] else LARGEST)
        unknown = [name for name, value in line.items() if value is None]
        assert unknown == ["window_index", "growth_num", "down_num", "gradient_norm"]
        assert line["dropped_by_norm"] is False


def test_the_window_of_the_rule_is_recorded_and_told(path, messages):
    network = build()
    # An overflow that the gradients do not explain moves the window.
    cell = network.loss_scaling_manager
    cell.load_state_dict({**cell.state_dict(), "scale_window": 4000, "cur_iter": 2, "clean_steps": 1})
    monitor = LossScaleMonitor(path)
    train(network, [monitor], [True, False])
    lines = read_record(path)
    assert [(line["step"], line["scale_window"]) for line in lines] == [(2, 4000), (3, 500)]
    # The loss of the other step is inf.
    assert [message for message in messages()[1:] if "The loss of step 2" not in message] == [
        f"Loss scaling: at step 3 the window goes from 4000 to 500, at loss scale {lines[1]['next_loss_scale']}."
    ]


def test_names_are_told_once_a_row_and_recorded_in_each_line(path, messages):
    network = build(("second", "fourth"), track_per_parameter=True, gradient_format="float8_e5m2")
    train(network, [LossScaleMonitor(path)], OVERFLOWS)
    lines = read_record(path)
    assert [line.get("overflowed_parameters") for line in lines] == [
        ["second", "fourth"] if overflow else None for overflow in OVERFLOWS
    ]
    applied = [*FIELDS, "gradient_format"]
    assert [list(line) for line in lines if not line["overflow"]] == [applied] * OVERFLOWS.count(False)
    assert {line["gradient_format"] for line in lines} == {"float8_e5m2"}
    firsts = [step for step in range(1, len(OVERFLOWS)) if OVERFLOWS[step] and not OVERFLOWS[step - 1]]
    assert named(messages) == [
        f"Loss scaling: at loss scale {lines[place]['loss_scale']}, step {place + 1} had inf or NaN in the gradients "
        "of second, fourth."
        for place in firsts
    ]


def test_a_look_at_several_steps_names_those_of_the_last(path, messages):
    cell = {"track_per_parameter": True, "history_size": 4}
    train(build(**cell), [LossScaleMonitor(path, every_n_steps=4)], OVERFLOWS)
    names = {line["step"]: line["overflowed_parameters"] for line in read_record(path) if len(line) > len(FIELDS) + 1}
    assert names == {step: list(NAMES) for step in (4, 8, 12)}
    told = [message.partition("gradients of ")[2] for message in named(messages)]
    assert told == ["first, second, third and 1 more."] * 3


@pytest.mark.parametrize(
    ("keeps", "end"),
    [
        (True, " Step 3 had inf or NaN in the gradients of third."),
        (
            False,
            " To have the Parameters named whose gradients overflow, set track_per_parameter=True in the update cell.",
        ),
    ],
)
def test_a_collapse_names_the_parameters_or_says_how_to_have_them_named(path, keeps, end):
    monitor = LossScaleMonitor(path, max_consecutive_overflows=3, on_collapse="raise")
    with pytest.raises(RuntimeError, match="3 steps in a row have overflowed up to step 3") as error:
        train(build(("third",), track_per_parameter=keeps), [monitor], [True] * 4)
    assert str(error.value).endswith(f"going on from a checkpoint before the overflows began.{end}")
