"""The gradient-guided update cell equals its rule bit for bit, and the train-step cells give it what it needs."""

import collections
import math
import random
import warnings

import mindformers.wrapper
import mindspore
import numpy as np
import pytest
from conftest import mindspore_mode
from exported_graph import LossScaleHolder, export_graph
from fp16_networks import TOKENS, PerToken
from mindspore import Parameter, Tensor, nn, ops
from test_exported_graph import control_flow, forbidden_tensors, plain_outputs, undocumented_on_ascend
from test_wrapper import Regression

from mindformers_adaptive import AdaptiveLossScaleUpdateCell, GradientGuidedLossScaleUpdateCell
from mindformers_adaptive.cells.largest_gradient import LargestGradient
from mindformers_adaptive.cells.train_step import LossScaleTrainStep
from mindformers_adaptive.rules.guided import GuidedRule
from mindformers_adaptive.wrapper import MFTrainOneStepCell, TrainOneStepWithLossScaleCell

# Gradients that show nothing, or next to nothing.
SILENT = (0.0, math.inf, math.nan, 1e-39, 2.0**-126, float(np.finfo(np.float32).max))


class Fed(nn.Cell):
    """Owns a loss scale and steps a guided cell with a largest gradient that is given."""

    def __init__(self, update_cell):
        super().__init__(auto_prefix=False)
        self.update_cell = update_cell
        self.loss_scale = Parameter(Tensor(update_cell.get_loss_scale(), mindspore.float32), name="loss_scale")
        update_cell.bind_loss_scale(self.loss_scale)
        self.assign = ops.Assign()

    def construct(self, overflow, largest_gradient):
        self.assign(self.update_cell.largest_gradient, largest_gradient)
        return self.update_cell(self.loss_scale, overflow)


def made_up_steps(seed, steps):
    """Yield ceiling, largest gradient and whether the step overflows at any scale; the ceiling wanders and jumps."""
    numbers = random.Random(seed)
    level = 18.0
    for _ in range(steps):
        level = min(max(level + numbers.gauss(0, 0.4), -3.0), 60.0)
        if numbers.random() < 0.02:
            level += numbers.choice([-9, 9])
        spike = numbers.random() < 0.03
        gradient = 65504 / 2.0**level * 2.0 ** numbers.choice([0, 0, -3, 1.5, numbers.gauss(0, 1)])
        if numbers.random() < 0.1:
            gradient = numbers.choice(SILENT)
        yield 2.0**level, float(np.float32(gradient)), spike


def equal(ours, theirs):
    return ours == theirs or (ours != ours and theirs != theirs)


@pytest.mark.parametrize(("exchange_rate", "start"), [(1.0, 2.0**32), (20.0, 2.0**10), (300.0, 1.0)])
def test_cell_equals_the_rule_in_every_step(mode, exchange_rate, start):
    rule = GuidedRule(exchange_rate)
    state = rule.start(start)
    fed = Fed(GradientGuidedLossScaleUpdateCell(start, exchange_rate=exchange_rate, history_size=7))
    steps = 400 if mode == "graph" else 25
    overflows, history = 0, []
    for number, (ceiling, gradient, spike) in enumerate(made_up_steps(7, steps), start=1):
        overflow = spike or state.loss_scale > ceiling
        before, state = state, rule.step(state, overflow, gradient)
        fed(Tensor(bool(overflow)), Tensor(np.float32(gradient)))
        assert all(map(equal, fed.update_cell.rule_state(), state)), number
        overflows += overflow
        scales = {"loss_scale": before.loss_scale, "next_loss_scale": state.loss_scale, "largest_gradient": gradient}
        counts = {name: getattr(state, name) for name in ("scale_window", "skipped_steps", "consecutive_overflows")}
        history.append({"step": number, "overflow": bool(overflow), **scales, **counts})
    for ours, theirs in zip(fed.update_cell.recent_steps(), history[-7:], strict=True):
        assert ours.keys() == theirs.keys()
        assert all(equal(ours[name], theirs[name]) for name in theirs)
    assert fed.update_cell.state()["cur_iter"] == steps + 1
    assert fed.update_cell.state()["skipped_steps"] == overflows > 0


@pytest.mark.parametrize("bounds", [{"min_loss_scale": 8.0, "max_loss_scale": 2.0**14}, {"min_loss_scale": 2.0**-20}])
def test_scale_stays_within_its_bounds(graph_mode, bounds):
    cell = GradientGuidedLossScaleUpdateCell(2**10, **bounds)
    fed = Fed(cell)
    lowest, highest = bounds["min_loss_scale"], bounds.get("max_loss_scale", 2.0**127)
    for overflow, gradient in [(True, 0.0)] * 6 + [(False, 2.0**-100)] * 3 + [(False, 2.0**60)] * 3:
        fed(Tensor(overflow), Tensor(np.float32(gradient)))
        assert lowest <= float(fed.loss_scale) <= highest
    assert cell.state()["skipped_steps"] == 6


def test_graph_is_one_for_ascend(graph_mode):
    graph = export_graph(LossScaleHolder(GradientGuidedLossScaleUpdateCell(2**16), 2.0**16), Tensor(True))
    assert control_flow(graph) == set()
    assert forbidden_tensors(graph) == set()
    assert plain_outputs(graph) == set()
    assert undocumented_on_ascend(graph) == set()
    # The bound is what it has today; the adaptive cell has at most 30.
    assert 100 < len(graph.kernels) <= 150


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


def test_gradients_are_measured_before_they_are_clipped(graph_mode):
    largest = []
    for clip in (False, True):
        cell = GradientGuidedLossScaleUpdateCell(2.0**8)
        trained(MFTrainOneStepCell, cell, batches(1), use_clip_grad=clip, max_grad_norm=1e-4)
        largest.append(cell.state()["largest_gradient"])
    assert largest[0] == largest[1] > 1e-4


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
    network = nn.Dense(3, 2)
    optimizer = nn.Momentum(network.trainable_params(), learning_rate=0.1, momentum=0.9)
    step = train_step_class(nn.WithLossCell(network, nn.MSELoss()), optimizer, scale_sense=update_cell).set_train()
    inputs = Tensor(np.ones((4, 3), np.float32)), Tensor(np.zeros((4, 2), np.float32))
    return collections.Counter(export_graph(step, *inputs).kernels)


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


def test_stock_train_step_is_refused():
    network = Regression(mindspore.float16)
    optimizer = nn.Momentum(network.trainable_params(), learning_rate=0.1, momentum=0.9)
    step = nn.TrainOneStepWithLossScaleCell(network, optimizer, GradientGuidedLossScaleUpdateCell(2**16))
    with pytest.raises(TypeError, match=r"needs a train-step cell .* of mindformers_adaptive.wrapper"):
        step.set_train()


def test_killed_and_resumed_is_never_stopped(graph_mode, tmp_path):
    data = list(batches(30, {4, 11, 22}))
    _, _, whole = trained(TrainOneStepWithLossScaleCell, GradientGuidedLossScaleUpdateCell(2**20), data[:12])
    mindspore.save_checkpoint(whole, str(tmp_path / "step.ckpt"))
    steps = [(bool(whole(*map(Tensor, one))[1]), float(whole.scale_sense)) for one in data[12:]]
    assert [overflow for overflow, _ in steps].index(True) == 22 - 12
    _, _, resumed = trained(TrainOneStepWithLossScaleCell, GradientGuidedLossScaleUpdateCell(2**20), [])
    mindspore.load_param_into_net(resumed, mindspore.load_checkpoint(str(tmp_path / "step.ckpt")))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.set_train()
        for one, step in zip(data[12:], steps, strict=True):
            assert (bool(resumed(*map(Tensor, one))[1]), float(resumed.scale_sense)) == step
    ours, theirs = (step.loss_scaling_manager.state() for step in (resumed, whole))
    assert ours == theirs
    for ours, theirs in zip(resumed.weights, whole.weights, strict=True):
        assert np.array_equal(ours.asnumpy(), theirs.asnumpy())


def test_checkpoint_of_the_adaptive_cell_goes_on_with_a_warning(graph_mode, tmp_path):
    _, _, first = trained(TrainOneStepWithLossScaleCell, AdaptiveLossScaleUpdateCell(2**20, 2, 20), batches(6, {0, 1}))
    mindspore.save_checkpoint(first, str(tmp_path / "step.ckpt"))
    cell = GradientGuidedLossScaleUpdateCell(2**10)
    _, _, resumed = trained(TrainOneStepWithLossScaleCell, cell, [])
    mindspore.load_param_into_net(resumed, mindspore.load_checkpoint(str(tmp_path / "step.ckpt")))
    with pytest.warns(UserWarning, match="6 steps but no state of gradient-guided scaling.* afresh at loss scale"):
        resumed.set_train()
    state, earlier = cell.state(), first.loss_scaling_manager.state()
    assert (state["cur_iter"], state["skipped_steps"]) == (7, earlier["skipped_steps"])
    assert 2.0 ** (state["base"] + 1) == float(resumed.scale_sense) == float(first.scale_sense) < 2.0**20


@pytest.fixture(scope="module")
def state_after_training():
    """What ``state_dict()`` of a cell returns after six steps, of which the fourth was skipped."""
    with mindspore_mode("graph"):
        cell = GradientGuidedLossScaleUpdateCell(2**20)
        scales, _, _ = trained(TrainOneStepWithLossScaleCell, cell, batches(6, {3}))
        state = cell.state_dict()
        assert (state["cur_iter"], state["scale"]) == (7, scales[-1])
        return state


def test_state_dict_round_trip(state_after_training):
    state = state_after_training
    cell = GradientGuidedLossScaleUpdateCell(2**3)
    cell.load_state_dict(state)
    assert cell.state_dict() == state
    assert cell.get_loss_scale() == state["scale"]
    with pytest.raises(KeyError, match="The state has no base"):
        cell.load_state_dict({name: value for name, value in state.items() if name != "base"})


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        ({"overflow_rate": [2.0] * 16}, "cannot have"),
        ({"level": math.nan}, "cannot have"),
        ({"scale_window": -4}, "cannot have"),
        ({"skipped_steps": 99}, "no run can reach"),
        ({"cur_iter": 2**31 - 1}, "no run can reach"),
    ],
)
def test_damaged_state_starts_afresh(state_after_training, damage, what):
    cell = GradientGuidedLossScaleUpdateCell(2**3)
    with pytest.warns(UserWarning, match=f"{what}.* starts afresh"):
        cell.load_state_dict({**state_after_training, **damage})
    assert cell.state()["observed_steps"] == 0
    assert 1 <= cell.state()["cur_iter"] <= 2**30


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"exchange_rate": 0}, ValueError, "'exchange_rate' must be a number from 0.001 to 1000"),
        ({"scale_factor": 3}, ValueError, "'scale_factor' must be 2"),
        ({"track_per_parameter": 1}, TypeError, "'track_per_parameter' must be True or False"),
        ({"history_size": -1}, ValueError, "'history_size' must be at least 0"),
        ({"loss_scale_value": "2"}, TypeError, "'loss_scale_value' must be a number"),
        ({"loss_scale_value": Tensor([1.0, 2.0])}, ValueError, "'loss_scale_value' must hold one number"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        GradientGuidedLossScaleUpdateCell(**{"loss_scale_value": 2**16, **arguments})
