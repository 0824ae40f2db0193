"""The example scripts train with each way of loss scaling, and the loss scale follows the rule on real overflows."""

import ast
import re

import numpy as np
import pytest
from lenet5 import LeNet5, create_dataset
from mindspore import DynamicLossScaleManager, Model, nn
from mindspore.train.callback import LossMonitor

from mindformers_adaptive.record.logs import read_log
from mindformers_adaptive.record.writer import read_record
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.text.table import as_power_of_two
from scripts.examples import lenet5_managers
from tests.conftest import ROOT
from tests.shared.pages import figure

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "scripts" / "examples"
SYNCHRONOUS = ROOT / "tests" / "scripts" / "synchronous.py"


def path_of(rule, loss_scale, window, overflows):
    state = rule.start(loss_scale, window)
    for overflow in overflows:
        state = rule.step(state, overflow)
        yield state.loss_scale, state.scale_window


RULES = {lenet5_managers.dynamic: AdaptiveRule(2, 20, 20), lenet5_managers.adaptive: AdaptiveRule(2, 1000, 20)}


@pytest.mark.parametrize("way", lenet5_managers.WAYS, ids=lambda way: way.__name__)
def test_scale_follows_the_rule(graph_mode, scaling_on_cpu, way):
    # A step is slow, so only adaptive scaling takes all steps of the page. No step changes a fixed scale.
    steps = 64 if way is lenet5_managers.adaptive else 10 if way in RULES else 4
    run = lenet5_managers.train(way, steps // lenet5_managers.EPOCHS)
    assert len(run.losses) == steps
    assert np.isfinite(run.losses).all()
    if way in RULES:
        assert any(run.overflows)
        assert run.loss_scales == [scale for scale, _ in path_of(RULES[way], 2.0**24, 20, run.overflows)]
    elif way is lenet5_managers.fixed_skipping_overflows:
        # A fixed scale of 2^24 is too large: every step overflows and is skipped.
        assert all(run.overflows)
        assert run.loss_scales == [2.0**24] * steps
    else:
        # If the skipping of overflowed steps is switched off, the train-step cell returns no overflow flag.
        assert run.overflows == []
    assert_row_of_the_page(way, run)


def assert_row_of_the_page(way, run):
    """Assert that a run agrees with the documentation; losses may differ by 0.002, as they do between machines."""
    lines = figure("lenet5")["printed"]
    [row] = [re.split(r"\s{2,}", line) for line in lines if line.startswith(way.__name__.replace("_", " ") + "  ")]
    assert run.losses[0] == pytest.approx(float(row[3]), abs=0.002)
    if way is not lenet5_managers.dynamic:
        is_every_step_skipped = bool(run.overflows) and all(run.overflows)
        skipped = row[1] if is_every_step_skipped else str(sum(run.overflows)) if run.overflows else "never"
        scale = as_power_of_two(run.loss_scales[-1]) if run.loss_scales else "fixed"
        assert [skipped, scale] == [row[2], row[5]]
    if len(run.losses) == int(row[1]):
        assert run.losses[-1] == pytest.approx(float(row[4]), abs=0.002)


@pytest.mark.filterwarnings("ignore:'scale_factor' of DynamicLossScaleManager is 3000")
def test_program_of_mindspores_guide_runs_after_the_one_line(graph_mode, scaling_on_cpu):
    network = LeNet5()
    loss = nn.SoftmaxCrossEntropyWithLogits(reduction="mean")
    optimizer = nn.Momentum(network.trainable_params(), learning_rate=0.01, momentum=0.9)
    before = network.fc3.weight.asnumpy().copy()
    metrics = {"Accuracy": nn.Accuracy()}
    # MindSpore's guide passes these arguments by position: an initial loss scale of 4 and a scale factor of 3000.
    manager = DynamicLossScaleManager(4, 3000)
    model = Model(network, loss, optimizer, metrics=metrics, amp_level="O0", loss_scale_manager=manager)
    model.train(epoch=1, train_dataset=create_dataset(samples=8, batch_size=4), callbacks=[LossMonitor()])
    assert not np.array_equal(network.fc3.weight.asnumpy(), before)


def test_functional_example_follows_the_rule(run_forked):
    printed = run_forked(EXAMPLES / "functional_training.py").stdout
    rows = re.findall(r"^ *(\d+) +[\d.]+ +(True|False) +2\^(\d+) +(\d+)$", printed, re.MULTILINE)
    assert [int(step) for step, *_ in rows] == list(range(1, 33))
    overflows = [overflow == "True" for _, overflow, _, _ in rows]
    printed_path = [(2.0 ** int(exponent), int(window)) for _, _, exponent, window in rows]
    assert printed_path == list(path_of(AdaptiveRule(2, 8, 1), 2.0**24, 1, overflows))
    assert set(overflows) == {True, False}
    assert len({window for _, window in printed_path}) > 1


def test_block_of_mindformers_page_trains_by_the_rule(run_forked, tmp_path):
    finished = run_forked(EXAMPLES / "mindformers_trainer_from_wrapper.py")
    (tmp_path / "console.log").write_text(finished.stdout + finished.stderr)
    run = read_log(tmp_path / "console.log")
    # The example trains for three epochs of 64 samples, in batches of 4. No step overflows, because the loss scale
    # starts at 1.
    assert (len(run), run.log_format) == (48, "mindformers")
    loss = run.column("loss")
    assert loss[-1] < loss[0]
    expected = [
        1.0,
        *(scale for scale, _ in path_of(AdaptiveRule(2, 1000, 20), 1.0, 20, run.most.astype(bool).tolist())),
    ]
    assert run.used.tolist() == expected[:-1]
    assert set(expected) == {1.0, 2.0, 4.0}
    state = ast.literal_eval(finished.stdout.splitlines()[-1])
    assert (state["scale_window"], state["growth_num"], state["skipped_steps"]) == (20, 2, 0)


STEP = re.compile(r"^ *(\d+) +([\d.]+) +(True|False) +(\d+) +(\d+) +(\d+) +[\d.a-z]+$", re.MULTILINE)


def rows_of_trainings(printed):
    """Return, for each training that printed a StepTable, the rows: loss, overflow, scale, next scale, scale window."""
    trainings = []
    for step, loss, overflow, *numbers in STEP.findall(printed):
        if step == "1":
            trainings.append([])
        trainings[-1].append((float(loss), overflow == "True", *map(int, numbers)))
    return trainings


def mean_of_applied(rows):
    return np.mean([loss for loss, overflow, *_ in rows if not overflow])


def assert_learns_by_the_adaptive_rule(rows, share):
    """Assert that a training of 32 steps follows the rule, and that its loss falls to ``share`` of the first loss."""
    overflows = [overflow for _, overflow, *_ in rows]
    assert (len(rows), set(overflows)) == (32, {True, False})
    path = [(next_scale, window) for *_, next_scale, window in rows]
    assert path == list(path_of(AdaptiveRule(2, 4, 1), 2.0**24, 1, overflows))
    assert mean_of_applied(rows[-5:]) < share * rows[0][0]


def test_all_weights_are_fine_tuned_with_a_masked_loss(run_forked):
    pre_training, fine_tuning = rows_of_trainings(run_forked(EXAMPLES / "fine_tuning.py").stdout)
    assert_learns_by_the_adaptive_rule(pre_training, 0.5)
    assert_learns_by_the_adaptive_rule(fine_tuning, 0.5)
    # Fine-tuning begins with the trained weights, and with its own loss scale.
    assert fine_tuning[0][0] != pytest.approx(pre_training[0][0], rel=0.1)
    assert fine_tuning[0][2] == 2**24


def test_preferences_are_learned_with_the_guided_rule(run_forked, tmp_path):
    options = ["--rule", "guided", "--layers", 1, "--steps", 8, "--record", "record.jsonl"]
    printed = run_forked(EXAMPLES / "preferences.py", *options).stdout
    [rows] = rows_of_trainings(printed)
    assert len(rows) == 8
    # At the first step, the probability of the preferred and of the other answer has not changed, so the loss is log 2.
    assert rows[0][0] == pytest.approx(np.log(2), abs=1e-3)
    assert mean_of_applied(rows[-3:]) < 0.05
    overflows = [overflow for _, overflow, *_ in rows]
    assert 0 < sum(overflows) == overflows.index(False) <= 3
    assert [line["overflow"] for line in read_record(tmp_path / "record.jsonl")] == overflows


@pytest.mark.parametrize("rule", ["adaptive", "guided"])
def test_a_policy_is_learned_although_its_rewards_spike(run_forked, tmp_path, rule):
    options = ["--rule", rule, "--steps", 100, "--record", "record.jsonl"]
    printed = run_forked(SYNCHRONOUS, EXAMPLES / "policy_gradient.py", *options).stdout
    rows = re.findall(r"^ *(\d+) +([\d.]+) +(True|False) +(True|False) +2\^(\d+)$", printed, re.MULTILINE)
    assert [int(step) for step, *_ in rows] == list(range(1, 101))
    overflows = {int(step): overflow == "True" for step, _, _, overflow, _ in rows}
    right = [float(share) for _, share, *_ in rows]
    assert right[0] < 0.5 < 0.9 < np.mean(right[-20:])
    spikes = [int(step) for step, _, spike, *_ in rows if spike == "True"]
    assert spikes == [50, 100]
    # The guided rule keeps a margin, so a spike need not overflow.
    assert rule == "guided" or all(overflows[step] for step in spikes)
    scales = [2.0 ** int(exponent) for *_, exponent in rows]
    record = read_record(tmp_path / "record.jsonl")
    assert [line["next_loss_scale"] for line in record] == scales
    assert {line["step"]: line["overflow"] for line in record} == overflows
    if rule == "adaptive":
        expected = path_of(AdaptiveRule(2, 40, 5), 2.0**24, 5, overflows.values())
        assert scales == [scale for scale, _ in expected]
    else:
        # Apart from the spikes, the rule skips few steps of a noisy training, and it recovers after each spike.
        assert sum(overflows.values()) <= len(spikes) + 8
