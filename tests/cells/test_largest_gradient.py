"""The train-step cells hand the largest gradient of each step to an update cell that asks for it."""

import collections
import math

import mindspore
import numpy as np
import pytest
from dense_network import Dense
from fp16_networks import TOKENS, PerToken
from graph_checks import control_flow, forbidden_tensors, undocumented_on_ascend
from mindspore import Tensor, nn
from versions import NEEDS_LOSS_PER_TOKEN

from mindformers_adaptive import AdaptiveLossScaleUpdateCell, GradientGuidedLossScaleUpdateCell
from mindformers_adaptive.cells.detection import LargestGradient
from mindformers_adaptive.cells.train_step import LossScaleTrainStep
from mindformers_adaptive.wrapper import MFTrainOneStepCell, TrainOneStepWithLossScaleCell
from scripts.benchmarks.exported_graph import export_graph


class Pass(nn.Cell):
    """The pass over two gradients."""

    def __init__(self, update_cell, is_divided=True):
        super().__init__(auto_prefix=False)
        self.update_cell = update_cell
        update_cell.declare_signal(["first", "second"])
        self.measure = LargestGradient(update_cell, is_divided=is_divided)
        if update_cell.largest_per_parameter is not None:
            # Only for the export, which takes no Parameter that belongs to no cell.
            self.insert_param_to_cell("largest_per_parameter", update_cell.largest_per_parameter)

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


def test_with_pipeline_stages_each_gradient_comes_to_its_place(mode):
    cell, plain = (GradientGuidedLossScaleUpdateCell(2**16, track_per_parameter=True) for _ in range(2))
    mindspore.set_auto_parallel_context(pipeline_stages=2)
    try:
        step = Pass(cell, is_divided=False)
    finally:
        mindspore.reset_auto_parallel_context()
    for gradients in (([3.0, -4.0], [2.0]), ([1.0, np.nan], [-5.0]), ([0.5], [np.inf, 1.0])):
        gradients = [Tensor(gradient, mindspore.float32) for gradient in gradients]
        overflows = [bool(one(*gradients)) for one in (step, Pass(plain, is_divided=False))]
        assert overflows == [not np.isfinite(plain.largest_per_parameter.asnumpy()).all()] * 2
        np.testing.assert_array_equal(cell.largest_per_parameter.asnumpy(), plain.largest_per_parameter.asnumpy())
        assert (
            cell.state()["largest_gradient"]
            == plain.state()["largest_gradient"]
            == plain.largest_per_parameter.asnumpy().max()
        )
    assert step.measure.in_stages
    # The name of before.
    assert cell.each_largest is cell.largest_per_parameter


@pytest.mark.parametrize("train_step_class", [TrainOneStepWithLossScaleCell, MFTrainOneStepCell])
def test_training_follows_the_gradients(mode, train_step_class):
    dense, cell = Dense(), GradientGuidedLossScaleUpdateCell(2.0**32, track_per_parameter=True)
    step, state = dense.train_step(cell, train_step_class).set_train(), cell.rule.start(2.0**32)
    for overflow in (True, False, False, True, False):
        assert bool(step(*Dense.batch(overflow))[1]) is overflow
        gradient = cell.state()["largest_gradient"]
        assert math.isinf(gradient) if overflow else 0 < gradient < 65504
        assert bool(cell.overflowed_parameters()) is overflow
        state = cell.rule.step(state, overflow, gradient)
        assert float(step.scale_sense) == state.loss_scale
    step(*Dense.batch(overflow=True))
    assert cell.overflowed_parameters() == [weight.name for weight in step.weights]


@NEEDS_LOSS_PER_TOKEN
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
    assert float(cell.largest_per_parameter.asnumpy()[0]) == cell.state()["largest_gradient"]


class WithItsOwnDetection(TrainOneStepWithLossScaleCell):
    """A train step that keeps its own detection, as all do on an Ascend."""

    def get_overflow_status(self, status, compute_output):
        return self.get_overflow_status_on_cpu(status, compute_output)


def test_the_largest_gradient_is_measured_beside_a_detection_of_its_own(mode):
    cell = GradientGuidedLossScaleUpdateCell(2.0**8)
    step = Dense().train_step(cell, WithItsOwnDetection).set_train()
    for overflow in (False, True):
        assert bool(step(*Dense.batch(overflow))[1]) is overflow
        gradient = cell.state()["largest_gradient"]
        assert math.isinf(gradient) if overflow else 0 < gradient < 65504


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
    # Of each of the two gradients the magnitudes are had once, and nothing else looks at it; one more is the rule's.
    assert (guided["Abs"], guided["IsFinite"], adaptive["IsFinite"]) == (2 + 1, 0, 0)
