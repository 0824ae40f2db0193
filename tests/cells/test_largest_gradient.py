"""The train-step cells hand the largest gradient of each step to an update cell that asks for it."""

import collections
import math

import mindformers.wrapper
import mindspore
import numpy as np
import pytest
from dense_network import Dense
from exported_graph import export_graph
from fp16_networks import TOKENS, PerToken, Regression
from graph_checks import control_flow, forbidden_tensors, undocumented_on_ascend
from mindspore import Tensor, nn

from mindformers_adaptive import AdaptiveLossScaleUpdateCell, GradientGuidedLossScaleUpdateCell
from mindformers_adaptive.cells.detection import LargestGradient
from mindformers_adaptive.cells.train_step import LossScaleTrainStep
from mindformers_adaptive.wrapper import MFTrainOneStepCell, TrainOneStepWithLossScaleCell


class Pass(nn.Cell):
    """The pass over two gradients."""

    def __init__(self, update_cell):
        super().__init__(auto_prefix=False)
        self.update_cell = update_cell
        update_cell.declare_signal(["first", "second"])
        self.measure = LargestGradient(update_cell, is_divided=True)
        if update_cell.each_largest is not None:
            # Only for the export, which takes no Parameter that belongs to no cell.
            self.insert_param_to_cell("each_largest", update_cell.each_largest)

    def construct(self, first, second):
        return self.measure((first, second))


@pytest.mark.parametrize("keeps", [False, True])
def test_pass_over_the_gradients_is_one_for_ascend(graph_mode, keeps):
    cell = GradientGuidedLossScaleUpdateCell(2**16, track_per_parameter=keeps)
    gradients = Tensor(np.ones((3, 2), np.float16)), Tensor(np.ones(4, np.float32))
    graph = export_graph(Pass(cell), *gradients)
    assert control_flow(graph) == set()
    # The gradient itself; it is cast first.
    assert forbidden_tensors(graph) == {("FLOAT16", "first")}
    assert undocumented_on_ascend(graph) == set()


def trained(train_step_class, update_cell, batches, **arguments):
    """Train a small network; return the scale after each step, what was skipped, and the train-step cell."""
    mindspore.set_seed(1)
    network = Regression(mindspore.float16)
    optimizer = nn.Momentum(network.trainable_params(), learning_rate=0.01, momentum=0.9)
    step = train_step_class(network, optimizer, scale_sense=update_cell, **arguments).set_train()
    step.seen_gradients = []
    scales, skipped = [], []
    for inputs, target in batches:
        outputs = step(Tensor(inputs), Tensor(target))
        skipped.append(bool(outputs[1]))
        scales.append(float(step.scale_sense))
        if isinstance(update_cell, GradientGuidedLossScaleUpdateCell):
            step.seen_gradients.append(update_cell.state()["largest_gradient"])
    return scales, skipped, step


def batches(steps, spike_at=()):
    numbers = np.random.default_rng(0)
    for number in range(steps):
        inputs = numbers.standard_normal((4, 8)).astype(np.float32)
        yield inputs * (np.float32(np.inf) if number in spike_at else 1), np.zeros((4, 4), np.float32)


@pytest.mark.parametrize("train_step_class", [TrainOneStepWithLossScaleCell, MFTrainOneStepCell])
def test_training_follows_the_gradients(mode, train_step_class):
    cell = GradientGuidedLossScaleUpdateCell(2.0**32, track_per_parameter=True)
    spikes = {20} if mode == "graph" else {8}
    scales, skipped, step = trained(train_step_class, cell, batches(40 if mode == "graph" else 12, spikes))
    start = skipped.index(False)
    assert 1 <= start <= 6
    assert {number for number, flag in enumerate(skipped) if flag and number > start} == spikes
    rule = cell.rule
    state = rule.start(2.0**32)
    for flag, scale, gradient in zip(skipped, scales, step.seen_gradients, strict=True):
        state = rule.step(state, flag, gradient)
        assert scale == state.loss_scale
        assert flag or 0 < gradient < 65504
    # A lone spike is gone in the step after it.
    assert abs(math.log2(scales[max(spikes) + 1] / scales[max(spikes) - 1])) <= 1
    assert cell.overflowed_parameters() == []
    inputs, target = next(batches(1, {0}))
    step(Tensor(inputs), Tensor(target))
    assert cell.overflowed_parameters() == [weight.name for weight in step.weights]


@pytest.mark.skipif(
    not hasattr(mindformers.wrapper.MFTrainOneStepCell, "grads_for_legacy"), reason="an older version of MindFormers"
)
@pytest.mark.parametrize("clip", [False, True])
def test_with_a_loss_per_token_the_gradient_that_overflows_is_measured(mode, clip):
    network = PerToken()
    optimizer = nn.SGD(network.trainable_params(), learning_rate=0.01)
    cell = GradientGuidedLossScaleUpdateCell(2.0**8, track_per_parameter=True)
    arguments = {"calculate_per_token_loss": True, "use_clip_grad": clip, "max_grad_norm": 1e-4}
    step = MFTrainOneStepCell(network, optimizer, scale_sense=cell, **arguments).set_train()
    inputs = np.random.default_rng(0).standard_normal((TOKENS, 8)).astype(np.float16)
    # What the weight gets before it is divided by the number of tokens, in FP16 as the backward pass has it.
    largest = np.abs(inputs.astype(np.float32).sum(axis=0)).max()
    _, overflow, *_ = step(Tensor(inputs))
    assert not bool(overflow)
    assert cell.state()["largest_gradient"] == pytest.approx(largest, rel=1e-2)
    assert float(cell.each_largest.asnumpy()[0]) == cell.state()["largest_gradient"]


class CheckedOnCpu(nn.TrainOneStepWithLossScaleCell):
    """The stock cell with the detection that a CPU needs, and nothing else of this package."""

    get_overflow_status = LossScaleTrainStep.get_overflow_status_on_cpu


def kernels_of(train_step_class, update_cell):
    """The kernels of a whole train step, as often as each occurs."""
    step = Dense().train_step(update_cell, train_step_class).set_train()
    return collections.Counter(export_graph(step, *Dense.batch()).kernels)


def test_the_graph_of_a_train_step_with_another_cell_is_what_it_was(graph_mode):
    adaptive, guided = (
        kernels_of(TrainOneStepWithLossScaleCell, cell)
        for cell in (AdaptiveLossScaleUpdateCell(2**8, 2, 20), GradientGuidedLossScaleUpdateCell(2**8))
    )
    assert adaptive == kernels_of(CheckedOnCpu, AdaptiveLossScaleUpdateCell(2**8, 2, 20))
    of_the_pass = ("Abs", "ReduceMax", "AllGather", "AllReduce")
    assert [adaptive[name] for name in of_the_pass] == [0, 0, 0, 0]
    # Of each of the two gradients the magnitudes are had once, and nothing else looks at it.
    assert (guided["Abs"], guided["IsFinite"], adaptive["IsFinite"]) == (2, 0, 0)
