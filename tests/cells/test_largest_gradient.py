"""The train-step cells hand the largest gradient of each step to an update cell that asks for it."""

import collections
import functools
import math
import re

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from mindformers_adaptive import AdaptiveLossScaleUpdateCell, GradientGuidedLossScaleUpdateCell
from mindformers_adaptive.cells.detection import LargestGradient, has_inf_or_nan
from mindformers_adaptive.cells.train_step import LossScaleTrainStep
from mindformers_adaptive.wrapper import MFTrainOneStepCell, TrainOneStepWithLossScaleCell
from tests.cells.graph_checks import control_flow, forbidden_tensors, undocumented_on_ascend
from tests.shared.exported_graph import export_graph
from tests.shared.networks import TOKENS, Dense, PerToken
from tests.shared.versions import NEEDS_LOSS_PER_TOKEN

pytestmark = pytest.mark.slow


class Pass(nn.Cell):
    """Runs ``LargestGradient`` on two gradients."""

    def __init__(self, update_cell):
        super().__init__(auto_prefix=False)
        self.update_cell = update_cell
        update_cell.declare_signal()
        self.measure = LargestGradient(update_cell, is_divided=True)

    def construct(self, first, second):
        return self.measure((first, second))


def test_pass_over_the_gradients_is_one_for_ascend(graph_mode):
    cell = GradientGuidedLossScaleUpdateCell(2**16)
    gradients = Tensor(np.ones((3, 2), np.float16)), Tensor(np.ones(4, np.float32))
    network = Pass(cell)
    # On an Ascend, the pass has other kernels than on a CPU.
    network.measure.on_cpu = False
    graph = export_graph(network, *gradients)
    assert control_flow(graph) == set()
    # Only the gradient itself is FP16, because the graph casts the gradient before it computes anything.
    assert forbidden_tensors(graph) == {("FLOAT16", "first")}
    assert undocumented_on_ascend(graph) == set()


class Looked(nn.Cell):
    """An embedding table with sparse gradients: only the rows that are looked up have a gradient."""

    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingLookup(10, 4, target="CPU", sparse=True)

    def construct(self, rows):
        return self.table(rows).mean()


@pytest.mark.parametrize("train_step_class", [TrainOneStepWithLossScaleCell, MFTrainOneStepCell])
def test_sparse_gradients_are_refused_before_anything_compiles(graph_mode, train_step_class):
    network = Looked()
    optimizer = nn.LazyAdam(network.trainable_params())
    step = train_step_class(network, optimizer, scale_sense=GradientGuidedLossScaleUpdateCell(2.0**10))
    with pytest.raises(ValueError, match=r"gradient of 'table' must be dense.*sparse=False"):
        step.set_train()


@pytest.mark.parametrize(
    ("train_step_class", "mode"),
    [(TrainOneStepWithLossScaleCell, "pynative"), (MFTrainOneStepCell, "graph")],
    indirect=["mode"],
)
def test_training_follows_the_gradients(mode, train_step_class):
    dense, cell = Dense(), GradientGuidedLossScaleUpdateCell(2.0**32)
    step, state = dense.train_step(cell, train_step_class).set_train(), cell.rule.start(2.0**32)
    for overflow in (True, False, False, True, False):
        assert bool(step(*Dense.batch(overflow))[1]) is overflow
        gradient = cell.state()["largest_gradient"]
        assert math.isinf(gradient) if overflow else 0 < gradient < 65504
        state = cell.rule.step(state, overflow, gradient)
        assert float(step.scale_sense) == state.loss_scale


@NEEDS_LOSS_PER_TOKEN
@pytest.mark.parametrize(("clip", "mode"), [(False, "graph"), (True, "graph"), (True, "pynative")], indirect=["mode"])
def test_overflowing_gradient_is_measured_with_a_loss_per_token(mode, clip):
    network = PerToken()
    optimizer = nn.SGD(network.trainable_params(), learning_rate=0.01)
    cell = GradientGuidedLossScaleUpdateCell(2.0**8)
    arguments = {"calculate_per_token_loss": True, "use_clip_grad": clip, "max_grad_norm": 1e-4}
    step = MFTrainOneStepCell(network, optimizer, scale_sense=cell, **arguments).set_train()
    inputs = np.random.default_rng(0).standard_normal((TOKENS, 8)).astype(np.float16)
    # The gradient of the weight before the division by the number of tokens, in FP16 as in the backward pass.
    largest = np.abs(inputs.astype(np.float32).sum(axis=0)).max()
    _, overflow, *_ = step(Tensor(inputs))
    assert not bool(overflow)
    assert cell.state()["largest_gradient"] == pytest.approx(largest, rel=1e-2)


class WithItsOwnDetection(TrainOneStepWithLossScaleCell):
    """A train-step cell that keeps its own overflow detection, as all train-step cells do on Ascend."""

    def get_overflow_status(self, status, compute_output):
        return self.get_overflow_status_on_cpu(status, compute_output)


def test_largest_gradient_is_measured_beside_its_own_detection(graph_mode):
    cell = GradientGuidedLossScaleUpdateCell(2.0**8)
    step = Dense().train_step(cell, WithItsOwnDetection).set_train()
    for overflow in (False, True):
        assert bool(step(*Dense.batch(overflow))[1]) is overflow
        gradient = cell.state()["largest_gradient"]
        assert math.isinf(gradient) if overflow else 0 < gradient < 65504


class CheckedOnCpu(nn.TrainOneStepWithLossScaleCell):
    """MindSpore's train-step cell with only the overflow detection that a CPU needs from this package."""

    get_overflow_status = LossScaleTrainStep.get_overflow_status_on_cpu


def kernels_of(train_step_class, update_cell):
    """Return how often each kernel occurs in the compiled graph of a train step."""
    step = Dense().train_step(update_cell, train_step_class).set_train()
    return collections.Counter(export_graph(step, *Dense.batch()).kernels)


def test_graph_with_another_cell_is_what_it_was(graph_mode):
    adaptive, guided = (
        kernels_of(TrainOneStepWithLossScaleCell, cell)
        for cell in (AdaptiveLossScaleUpdateCell(2**8, 2, 20), GradientGuidedLossScaleUpdateCell(2**8))
    )
    assert adaptive == kernels_of(CheckedOnCpu, AdaptiveLossScaleUpdateCell(2**8, 2, 20))
    of_the_pass = ("Abs", "ReduceMax", "AllGather", "AllReduce")
    assert [adaptive[name] for name in of_the_pass] == [0, 0, 0, 0]
    # The graph has one Abs for each of the two gradients, and no other pass over the gradients.
    assert (guided["Abs"], guided["IsFinite"], adaptive["IsFinite"]) == (2, 0, 0)


def test_clipping_and_measuring_share_their_sums(graph_mode, tmp_path):
    clipping = functools.partial(MFTrainOneStepCell, use_clip_grad=True)
    step = Dense().train_step(GradientGuidedLossScaleUpdateCell(2.0**10), clipping).set_train()
    mindspore.set_context(save_graphs=2, save_graphs_path=str(tmp_path))
    try:
        step(*Dense.batch())
    finally:
        mindspore.set_context(save_graphs=0)
    (graph,) = tmp_path.rglob("*_validate_*.ir")
    kernels = re.findall(r"(Square|L2Loss|Abs)\(", graph.read_text(encoding="utf-8"))
    # The loss has one square. Each of the two gradients is squared once, for its norm and to detect a NaN.
    assert collections.Counter(kernels) == {"Square": 3, "Abs": 2}


class OwnDetection(TrainOneStepWithLossScaleCell):
    """A train-step cell that looks for overflows itself, as the cells of some libraries do."""

    def construct(self, *inputs):
        loss = self.network(*inputs)
        sens = ops.ones_like(loss) * ops.cast(self.scale_sense, loss.dtype)
        grads = self.grad(self.network, self.weights)(*inputs, sens)
        grads = self.hyper_map(ops.partial(ops.mul, ops.reciprocal(self.scale_sense)), grads)
        overflow = self.process_loss_scale(has_inf_or_nan(grads))
        if not overflow:
            loss = ops.depend(loss, self.optimizer(grads))
        return loss, overflow, self.scale_sense


def test_a_train_step_that_never_measures_gets_one_warning(graph_mode):
    step = Dense().train_step(GradientGuidedLossScaleUpdateCell(2.0**8), OwnDetection).set_train()
    for _ in range(4):
        step(*Dense.batch())
    with pytest.warns(UserWarning, match=r"still 0 after 5 steps.*OwnDetection.*self\.get_overflow_status\("):
        step(*Dense.batch())
    # The tests turn warnings into errors, so these steps must not repeat the warning.
    for _ in range(6):
        step(*Dense.batch())


def test_a_train_step_that_overflows_at_first_gets_no_warning(graph_mode):
    step = Dense().train_step(GradientGuidedLossScaleUpdateCell(2.0**8)).set_train()
    # The tests turn warnings into errors, so these steps must not warn.
    for number in range(8):
        step(*Dense.batch(overflow=number < 6))
