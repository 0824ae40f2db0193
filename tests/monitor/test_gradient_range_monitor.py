"""Test that ``GradientRangeMonitor`` records the right values, and does not change the training."""

import functools
import json
import re

import mindspore
import numpy as np
import pytest
from mindspore import Model, Parameter, Tensor, dataset, nn
from mindspore import dtype as mstype
from mindspore.train import LambdaCallback

from mindformers_adaptive.gradients.ranges import gradient_ranges
from mindformers_adaptive.mindformers.trainer import MeanOverMicroBatches
from mindformers_adaptive.monitor.gradient_range_monitor import GradientRangeMonitor
from mindformers_adaptive.record.writer import read_record
from mindformers_adaptive.rules.state_dict import RUN
from mindformers_adaptive.wrapper import AdaptiveLossScaleUpdateCell, TrainOneStepWithLossScaleCell
from tests.monitor.event_files import read_scalars
from tests.shared.networks import GraphOnly, HalfPrecisionSum, resettable, rows, seeded_train_step

pytestmark = pytest.mark.slow

# Train for few steps. After five calls, MindSpore's dropout on a CPU measures how fast it runs, and may change
# its number of threads. Its random numbers depend on the number of threads, so runs would differ.
STEPS = 3


def batches(steps=STEPS):
    inputs, targets = rows(count=4 * steps)
    return dataset.NumpySlicesDataset((inputs, targets), shuffle=False).batch(4)


def train(step, *callbacks):
    """Train for a few steps; return the outputs of each step and the Parameters after the last step."""
    outputs = []

    def keep(run_context):
        loss, overflow, loss_scale = run_context.original_args().net_outputs
        outputs.append((loss.asnumpy().item(), bool(overflow), float(loss_scale)))

    keeping = LambdaCallback(on_train_step_end=keep)
    Model(step).train(1, batches(), callbacks=[*callbacks, keeping], dataset_sink_mode=False)
    return outputs, {value.name: value.asnumpy().tobytes() for value in step.get_parameters() if value.name != RUN}


def watch(tmp_path, network, data, *callbacks, every_n_steps=1, tensorboard_dir=None, **arguments):
    """Train a train-step cell or a Model with GradientRangeMonitor; return the lines of its gradient record."""
    file = tmp_path / "record.jsonl"
    monitor = GradientRangeMonitor(every_n_steps, record_path=file, tensorboard_dir=tensorboard_dir, **arguments)
    model = network if isinstance(network, Model) else Model(network)
    model.train(1, data, callbacks=[*callbacks, monitor], dataset_sink_mode=False)
    return read_record(file) if file.exists() else None


@pytest.mark.filterwarnings("ignore:The loss of one batch")
def test_training_takes_the_same_steps_with_it(mode, tmp_path):
    step = seeded_train_step(listed_dropout=True)
    reset = resettable(step)
    monitor = GradientRangeMonitor(1, [1, 2**30], tmp_path / "record.jsonl", tmp_path, layers=["Dense"])
    with_it = train(step, monitor)
    assert with_it == train(reset())
    assert [line["step"] for line in read_record(tmp_path / "record.jsonl")] == [1, 2, 3]


@functools.cache
def compiled_sum_step():
    network = HalfPrecisionSum(2)
    optimizer = nn.SGD(network.trainable_params(), 0.25)
    return resettable(TrainOneStepWithLossScaleCell(network, optimizer, AdaptiveLossScaleUpdateCell(2**10, 2, 20)))


def sum_step():
    """Return a train step of ``HalfPrecisionSum`` at its start, at a loss scale of 2^10; it is compiled only once."""
    return compiled_sum_step()()


def sum_training(tmp_path, x, **arguments):
    """Train a network at a loss scale of 2^10. Row i of ``x`` is the gradient of step i; return the gradient record."""
    data = dataset.NumpySlicesDataset(x, shuffle=False).batch(1)
    return watch(tmp_path, sum_step(), data, tensorboard_dir=tmp_path, **arguments)


def test_record_is_of_the_weights_and_the_batch_of_the_step(graph_mode, tmp_path):
    x = np.array([[1.0, 2.0], [4.0, 8.0]], np.float32)
    first, second = sum_training(tmp_path, x, loss_scales=[1, 2**14], gradient_format="float8_e5m2")
    assert first["gradient_format"] == second["gradient_format"] == "float8_e5m2"
    assert [scale["loss_scale"] for scale in first["loss_scales"]] == [1, 2**10, 2**14]
    assert [scale["overflowed_batches"] for scale in first["loss_scales"]] == [0, 0, 0]
    assert [scale["overflowed_batches"] for scale in second["loss_scales"]] == [0, 0, 1]
    assert second["loss_scales"][1]["overall"]["largest"] == 8 * 2**10
    # The weights were 1. The first step subtracts the learning rate, a quarter, times the gradients 1 and 2.
    assert second["weights"]["parameters"]["weight"]["largest"] == 0.75
    expected = gradient_ranges(HalfPrecisionSum(2), x[:1], [1, 2**10, 2**14], gradient_format="float8_e5m2").to_dict()
    # Convert the expected values through JSON, which turns tuples into lists.
    assert first == json.loads(json.dumps({"step": 1, "loss_scale": 2**10, **expected}))


def test_outputs_of_layers_are_named_as_their_parameters(graph_mode, tmp_path):
    network = nn.SequentialCell(nn.Dense(8, 2, "ones", has_bias=False))
    model = Model(network, nn.MSELoss(), nn.SGD(network.trainable_params(), 0.1))
    data = dataset.NumpySlicesDataset((np.ones((8, 8), np.float32), np.zeros((8, 2), np.float32))).batch(4)
    [line] = watch(tmp_path, model, data, every_n_steps=2, tensorboard_dir=tmp_path, layers=["Dense"])
    # MindSpore's Model wraps the network and its loss in a cell, in which the network's name is _backbone. The names of
    # layers and weights in the record do not begin with _backbone.
    weight = line["weights"]["parameters"]["0.weight"]["largest"]
    [(name, output)] = line["outputs"].items()
    assert name == "0"
    assert (output["size"], output["largest"]) == (8, pytest.approx(8 * weight))
    events = read_scalars(tmp_path)
    assert events[f"{name}/output/norm"][2] == pytest.approx(output["norm"])
    assert events[f"{name}/output"][2].num == 8
    # All targets are 0, so MSELoss is the mean of 8 squared outputs, and an output's gradient is 2/8 of the output.
    [at_scale] = line["activation_gradients"]
    assert (at_scale["loss_scale"], [*at_scale["layers"]]) == (1, ["0"])
    assert at_scale["layers"]["0"]["norm"] == pytest.approx(output["norm"] / 4)
    assert events[f"{name}/output/grad/norm"][2] == pytest.approx(output["norm"] / 4)
    assert events[f"{name}/output/grad"][2].num == 8


class TwoParts(nn.Cell):
    """Returns two Tensors as a tuple: the sum of the inputs of a sample, and 100 times this sum."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(4, 1, "ones", has_bias=False)

    def construct(self, x):
        total = self.dense(x)
        return total, 100.0 * total


class SumOfParts(nn.Cell):
    def __init__(self):
        super().__init__()
        self.parts = TwoParts()

    def construct(self, x):
        small, large = self.parts(x)
        return small.mean() + 8.0 * large.mean()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_parts_of_a_tuple_are_one_histogram_per_micro_batch(graph_mode, tmp_path, micro_batches):
    network = SumOfParts()
    cut = MeanOverMicroBatches(network, micro_batches) if micro_batches > 1 else network
    step = TrainOneStepWithLossScaleCell(cut, nn.SGD(network.trainable_params(), 0.0), Tensor(4.0, mstype.float32))
    inputs = np.repeat(np.arange(1, 9, dtype=np.float32), 4).reshape(8, 4)
    data = dataset.NumpySlicesDataset((inputs,), shuffle=False).batch(8)
    [line] = watch(tmp_path, step, data, tensorboard_dir=tmp_path, layers=["TwoParts"])
    values = [np.concatenate([part.sum(1), 100.0 * part.sum(1)]) for part in np.split(inputs, micro_batches)]
    [output] = line["outputs"].values()
    exponents = np.frexp(np.concatenate(values))[1] - 1
    assert output["histogram"] == {str(each): int(np.sum(exponents == each)) for each in np.unique(exponents)}
    events = read_scalars(tmp_path)
    tags = [tag for tag in events if re.search(r"/output(_mbs\d+)?$", tag)]
    assert tags == (["parts/output"] if micro_batches == 1 else ["parts/output_mbs0", "parts/output_mbs1"])
    histograms = [events[tag][1] for tag in tags]
    assert [(each.min, each.max, each.num) for each in histograms] == [(v.min(), v.max(), v.size) for v in values]
    # The gradients of both parts are in one histogram too: 1/8 of the first part, 8/8 of the second.
    gradients = events["parts/output/grad"][1]
    assert (gradients.num, gradients.min, gradients.max) == (16, 1 / 8, 1)


@pytest.mark.parametrize(("dtype", "large", "last"), [(mstype.float16, 6e4, 6e4), (mstype.float32, 5e19, 1e25)])
def test_histograms_of_large_arrays_are_finite(graph_mode, tmp_path, caplog, dtype, large, last):
    """The histogram of a weight is finite, although its sum in FP16 or its sum of squares in FP32 would be inf.

    TensorBoard has no histogram bin above 1e20, so the histogram leaves out the weight's element of 1e25.
    """
    network = HalfPrecisionSum(101)
    network.weight = Parameter(Tensor([large] * 100 + [last], dtype), name="weight")
    step = TrainOneStepWithLossScaleCell(network, nn.SGD(network.trainable_params(), 0.0), Tensor(1.0, mstype.float32))
    data = dataset.NumpySlicesDataset(np.zeros((1, 101), np.float32)).batch(1)
    watch(tmp_path, step, data, tensorboard_dir=tmp_path)
    histogram = read_scalars(tmp_path)["weight"][1]
    assert "Inf found" not in caplog.text
    assert histogram.num == (101 if last == large else 100)
    assert histogram.sum == pytest.approx(histogram.num * large, rel=1e-3)
    assert histogram.sum_squares == pytest.approx(histogram.num * large**2, rel=1e-3)


def test_layers_without_a_measure_do_not_stop_the_training(graph_mode, tmp_path, mindformers_log):
    network = GraphOnly()
    step = TrainOneStepWithLossScaleCell(network, nn.SGD(network.trainable_params(), 0.1), Tensor(4.0, mstype.float32))
    lines = watch(tmp_path, step, dataset.NumpySlicesDataset(np.ones((3, 4), np.float32)).batch(1), layers=["Dense"])
    warnings = [line for line in mindformers_log.text.splitlines() if "a kernel is missing" in line]
    assert ["without 'layers'" in line for line in warnings] == [True]
    assert [(line["outputs"], line["activation_gradients"]) for line in lines] == [({}, [])] * 3


def ones(steps):
    return dataset.NumpySlicesDataset(np.ones((steps, 2), np.float32)).batch(1)


def test_a_resumed_run_has_each_step_once(graph_mode, tmp_path):
    checkpoint = str(tmp_path / "3.ckpt")

    def save_and_fail(run_context):
        """Save a checkpoint after step 3, and end the training by an error after step 5."""
        params = run_context.original_args()
        if params.cur_step_num == 3:
            mindspore.save_checkpoint(params.train_network, checkpoint)
        if params.cur_step_num == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watch(tmp_path, sum_step(), ones(8), LambdaCallback(on_train_step_end=save_and_fail))
    assert [line["step"] for line in read_record(tmp_path / "record.jsonl")] == [1, 2, 3, 4, 5]
    resumed = sum_step()
    mindspore.load_checkpoint(checkpoint, resumed)
    assert [line["step"] for line in watch(tmp_path, resumed, ones(5))] == [1, 2, 3, 4, 5, 6, 7, 8]
    # A new training keeps the old record under another file name.
    assert [line["step"] for line in watch(tmp_path, sum_step(), ones(2))] == [1, 2]
    assert len(read_record(next(tmp_path.glob("record_*.jsonl")))) == 8


def test_tensorboard_has_histograms_and_norms_without_the_scale(graph_mode, tmp_path):
    sum_training(tmp_path, np.array([[3.0, 4.0], [3.0, 2.0**-30]], np.float32), loss_scales=[1])
    events = read_scalars(tmp_path)
    assert events.keys() == {
        *("weight", "weight/norm", "weight/grad", "weight/grad/norm"),
        *("gradients/norm", "gradients/largest", "gradients/smallest"),
        *("gradients/zeros_share", "gradients/infs_and_nans_share", "gradients/underflowed_share"),
    }
    assert events["weight/grad/norm"][1] == events["gradients/norm"][1] == 5
    assert events["weight/norm"][1] == pytest.approx(np.sqrt(2))
    assert (events["gradients/largest"][1], events["gradients/smallest"][1]) == (4, 3)
    assert (events["gradients/zeros_share"][1], events["gradients/zeros_share"][2]) == (0, 0.5)
    assert (events["weight/grad"][1].min, events["weight/grad"][1].max, events["weight/grad"][1].num) == (3, 4, 2)
    assert (events["weight"][1].min, events["weight"][2].max) == (1, 0.25)


def test_gradients_that_overflow_are_left_out_of_the_histogram(graph_mode, tmp_path):
    lines = sum_training(tmp_path, np.array([[1.0, np.inf], [np.inf, np.inf]], np.float32))
    events = read_scalars(tmp_path)
    assert [events["gradients/infs_and_nans_share"][step] for step in (1, 2)] == [0.5, 1]
    assert events["weight/grad"][1].num == 1
    assert 2 not in events["weight/grad"]
    assert [line["loss_scales"][0]["overflowed_batches"] for line in lines] == [1, 1]


def test_a_model_without_loss_scaling_is_looked_at_at_scale_1(graph_mode, tmp_path):
    network = nn.Dense(8, 2)
    model = Model(network, nn.MSELoss(), nn.SGD(network.trainable_params(), 0.1))
    lines = watch(tmp_path, model, batches(4), every_n_steps=2)
    assert [line["loss_scales"][0]["loss_scale"] for line in lines] == [1, 1]
    assert not list(tmp_path.glob("events.*"))


def test_a_loss_scale_of_inf_is_said_once(graph_mode, tmp_path, mindformers_log):
    network = HalfPrecisionSum(2)
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    step = TrainOneStepWithLossScaleCell(network, optimizer, Tensor(np.inf, mstype.float32))
    assert watch(tmp_path, step, ones(3)) is None
    assert len(re.findall("GradientRangeMonitor .*no gradients .*loss scale is inf", mindformers_log.text)) == 1


def test_data_sink_mode_is_said_once(graph_mode, tmp_path, mindformers_log):
    # Imitate data-sink mode, which does not run on a CPU. In this mode, MindSpore sets these parameters for callbacks.
    sink_mode = LambdaCallback(
        on_train_begin=lambda run: run.original_args().update(dataset_sink_mode=True),
        on_train_step_begin=lambda run: run.original_args().update(train_dataset_element=()),
    )
    assert watch(tmp_path, sum_step(), ones(3), sink_mode) is None
    said = "GradientRangeMonitor .* data-sink mode .*'runner_config.sink_mode'"
    assert len(re.findall(said, mindformers_log.text)) == 1


def test_a_network_without_a_train_step_is_refused(tmp_path):
    class Stepless(nn.Cell):
        def construct(self, x, target):
            return x.sum()

    with pytest.raises(ValueError, match=r"GradientRangeMonitor must .*nn\.TrainOneStepCell.* is a Stepless"):
        watch(tmp_path, Stepless(), batches())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"every_n_steps": 0}, ValueError, "'every_n_steps' must be at least 1"),
        ({"every_n_steps": 1.0}, TypeError, "'every_n_steps' must be an integer"),
        ({"loss_scales": [-1]}, ValueError, "'loss_scales' must be finite and above 0"),
        ({"loss_scales": 2}, TypeError, "'loss_scales' must be a list"),
        ({"layers": "Dense"}, TypeError, "'layers' must be a list .*got 'Dense'"),
    ],
)
def test_bad_input_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        GradientRangeMonitor(**arguments)
