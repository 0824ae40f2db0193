"""Loss scaling of MindFormers' mcore models: a tiny Qwen3 learns in FP16, and overflow in any loss skips the step."""

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, dataset, nn
from mindspore.train import LambdaCallback, Model

from mindformers_adaptive.gradients.ranges import GradientSweep, find_loss_scale
from mindformers_adaptive.monitor.loss_scale_monitor import LossScaleMonitor
from mindformers_adaptive.record.writer import read_record
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.wrapper import (
    AdaptiveLossScaleUpdateCell,
    GradientGuidedLossScaleUpdateCell,
    MFTrainOneStepCell,
)
from tests.conftest import ROOT, mindspore_mode
from tests.mindformers.mcore_on_cpu import LOSSES, STAND_INS, FourLosses, build_qwen3, mcore_on_cpu, rows
from tests.shared.printed import forget_printed
from tests.shared.records import assert_follows

# MindFormers 1.6.0 has no such models.
parameter_register = pytest.importorskip("mindformers.utils.parameter_register").parameter_register

START, STEPS = 2.0**24, 30
WINDOWS = {"max_scale_window": 4, "min_scale_window": 2}

# Run these tests in one pytest worker, because they share a training.
pytestmark = pytest.mark.xdist_group("mcore")


@pytest.mark.parametrize("page", ["compatibility", "contributing"])
def test_a_page_says_how_many_operators_have_stand_ins(page):
    said = " ".join((ROOT / "docs" / "en" / f"{page}.md").read_text(encoding="utf-8").split())
    number = ["no", "one", "two", "three", "four", "five", "six"][len(STAND_INS)]
    assert f"{number} operators that a CPU lacks" in said


@pytest.fixture(autouse=True, scope="module")
def _mcore(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch, mindspore_mode("graph"):
        # MindFormers writes its logs to the current folder.
        monkeypatch.chdir(tmp_path_factory.mktemp("mcore"))
        with mcore_on_cpu():
            yield


def build_train_step(network, loss_scale=START, **arguments):
    schedule = nn.CosineDecayLR(0.001, 0.02, 40)
    optimizer = nn.Adam(network.trainable_params(), schedule)
    update_cell = AdaptiveLossScaleUpdateCell(loss_scale, 2, 2, **WINDOWS)
    return MFTrainOneStepCell(network, optimizer, use_clip_grad=True, scale_sense=update_cell, **arguments)


def train(train_step, batches, record):
    """Train, and return all Parameters of the train-step cell before the first step and after each step."""
    states = []

    def remember(_):
        states.append({name: value.asnumpy().copy() for name, value in train_step.parameters_dict().items()})

    remembering = LambdaCallback(on_train_begin=remember, on_train_step_end=remember)
    data = dataset.GeneratorDataset(batches, ["input_ids", "labels", "loss_mask"], shuffle=False)
    Model(train_step).train(1, data, callbacks=[remembering, LossScaleMonitor(record)])
    return states


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Train a real tiny Qwen3; return the train-step cell, all Parameters after each step, and the run record."""
    train_step = build_train_step(build_qwen3(num_hidden_layers=1))
    record = tmp_path_factory.mktemp("qwen3") / "record.jsonl"
    states = train(train_step, rows(STEPS), record)
    return train_step, states, read_record(record)


@pytest.mark.slow
def test_qwen3_learns_in_fp16_by_the_rule(run):
    _, _, lines = run
    rule = AdaptiveRule(**WINDOWS)
    assert_follows(rule, rule.start(START, 2), lines)
    assert len(lines) == STEPS
    # Steps overflow at the start, and again later, after a raise of the loss scale.
    assert lines[-1]["skipped_steps"] >= 6
    assert any(line["overflow"] for line in lines[15:])
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5


@pytest.mark.slow
def test_skipped_step_of_qwen3_changes_only_loss_scaling(run):
    train_step, states, lines = run
    of_cell = {*train_step.loss_scaling_manager.parameters_dict(), "scale_sense"}
    for before, after, line in zip(states[:-1], states[1:], lines, strict=True):
        changed = {name for name in before if not np.array_equal(before[name], after[name])}
        assert (changed - of_cell == set()) is line["overflow"]
    assert int(states[-1]["global_step"][0]) == STEPS - lines[-1]["skipped_steps"]


@pytest.mark.slow
def test_qwen3_resumes_as_if_it_had_never_stopped(run, tmp_path):
    _, states, lines = run
    resumed = build_train_step(build_qwen3(num_hidden_layers=1))
    mindspore.load_param_into_net(resumed, {name: Parameter(value) for name, value in states[15].items()})
    # The update cell's count of steps is restored too, so the record continues with step 16.
    later = train(resumed, rows(STEPS)[15:], tmp_path / "record.jsonl")
    lines_after = [line for line in read_record(tmp_path / "record.jsonl") if "step" in line]
    assert lines_after == lines[15:]
    for name, value in states[-1].items():
        np.testing.assert_array_equal(later[-1][name], value)


@pytest.mark.slow
def test_find_agrees_with_qwen3(run):
    _, _, lines = run
    # All steps before the first applied step were skipped. So the first applied step uses the initial weights.
    first_applied = next(line for line in lines if not line["overflow"])
    batch = rows(STEPS)[first_applied["step"] - 1]
    recommendation = find_loss_scale(build_train_step(build_qwen3(num_hidden_layers=1)), batch)
    assert recommendation.ceiling in (first_applied["loss_scale"], 2 * first_applied["loss_scale"])


@pytest.fixture(scope="module", params=[False, True], ids=["loss per batch", "loss per token"])
def four_losses(request):
    """Return a train step at the loss scale 2^10, which is compiled once for all tests."""
    forget_printed(LOSSES)
    arguments = {"calculate_per_token_loss": request.param, "print_separate_loss": True}
    return build_train_step(FourLosses(request.param), 2.0**10, **arguments).set_train()


def test_an_overflow_in_any_of_the_four_losses_skips_the_step(four_losses):
    train_step = four_losses
    rule = AdaptiveRule(**WINDOWS)
    state = rule.start(2.0**10, 2)
    # In FP16, the gradient of each weight is the factor of the weight times the loss scale: at 2^10, a factor of 2^7
    # overflows and a factor of 2^3 does not.
    for number in range(9):
        factors = np.full(4, 8.0, np.float32)
        wrong = number // 2 if number % 2 else None
        if wrong is not None:
            factors[wrong] = 2.0**17 / state.loss_scale
        before = [weight.asnumpy().copy() for weight in train_step.weights]
        loss, overflow, loss_scale, *_ = train_step(Tensor(factors))
        # Only the gradient is too large. Each loss is finite, and so are the losses that MindFormers prints.
        assert np.isfinite(loss.asnumpy()).all()
        assert np.isfinite([parameter_register.get(name).asnumpy().item() for name in LOSSES]).all()
        state = rule.step(state, wrong is not None)
        assert (bool(overflow), float(loss_scale)) == (wrong is not None, state.loss_scale), LOSSES[wrong or 0]
        for weight, value in zip(train_step.weights, before, strict=True):
            assert np.array_equal(weight.asnumpy(), value) is (wrong is not None)
    assert state.skipped_steps == 4


def test_the_guided_cell_sees_the_gradient_that_overflows():
    network = FourLosses(per_token=True)
    optimizer = nn.SGD(network.trainable_params(), 0.01)
    update_cell = GradientGuidedLossScaleUpdateCell(2.0**10)
    arguments = {"use_clip_grad": True, "calculate_per_token_loss": True}
    train_step = MFTrainOneStepCell(network, optimizer, scale_sense=update_cell, **arguments).set_train()
    train_step(Tensor(np.float32([8, 4, 2, 1])))
    # The largest gradient is measured before the gradients are divided by the number of tokens.
    assert update_cell.state()["largest_gradient"] == 8.0


def test_sweep_measures_the_steps_norm_and_leaves_prints_alone(four_losses):
    train_step = four_losses
    factors = Tensor(np.float32([8, 4, 2, 1]))
    train_step(factors)
    printed = {name: value.asnumpy().copy() for name, value in parameter_register.items()}
    ranges = GradientSweep(train_step)(factors, [1, 2.0**6])
    assert {name: value.asnumpy() for name, value in parameter_register.items()} == printed
    # Without experts there is no auxiliary loss.
    assert all(printed[name] != 0 for name in LOSSES if name != "aux_loss")
    *_, norm = train_step(factors)
    for scale in ranges.loss_scales:
        assert ranges.overall(scale, unscaled=True).norm == pytest.approx(float(norm), rel=1e-5)
