"""Test ``Trainer``: its examples train a Llama with adaptive scaling, and it trains the cell passed as ``wrapper``."""

import itertools
import re

import mindformers.wrapper
import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore.amp import DynamicLossScaleManager
from mindspore.train import LambdaCallback

from mindformers_adaptive import LossScaleMonitor
from mindformers_adaptive.mindformers.launcher import load_config
from mindformers_adaptive.mindformers.trainer import Trainer
from mindformers_adaptive.record.step import FIELDS
from mindformers_adaptive.record.writer import read_record
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.rules.guided import GuidedRule
from mindformers_adaptive.wrapper import AdaptiveLossScaleUpdateCell, MFTrainOneStepCell
from tests.conftest import CONFIG, ROOT
from tests.mindformers.trained_llama import build_dataset, build_model
from tests.mindformers.training_runs import training_arguments
from tests.shared.networks import Dense
from tests.shared.records import assert_follows

EXAMPLES = ROOT / "scripts" / "examples"
STEPS = 32

COLUMNS = ("step", "loss", "overflow", "loss_scale", "next_loss_scale", "scale_window", "global_norm")


def rows_of(printed):
    """Parse the table of steps that an example prints; return each row as a record line, with the key "global_norm"."""
    number = r"(-?[\d.]+|nan|inf)"
    pattern = rf"^ *(\d+) +{number} +(True|False) +{number} +{number} +(\d+) +{number}$"
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in re.findall(pattern, printed, re.MULTILINE)]
    return [
        dict.fromkeys(FIELDS)
        | {name: text == "True" if name == "overflow" else float(text) for name, text in row.items()}
        for row in rows
    ]


def assert_follows_the_rule(rows):
    rule = AdaptiveRule(max_scale_window=4, min_scale_window=1)
    assert_follows(rule, rule.start(2.0**24, scale_window=1), rows)
    for row in rows:
        # These runs clip gradients, so each step has the norm of all gradients. The norm is finite unless the step
        # overflowed.
        assert np.isfinite(row["global_norm"]) != row["overflow"]
    assert {row["overflow"] for row in rows} == {True, False}
    assert len({row["scale_window"] for row in rows}) > 1
    assert rows[-1]["loss"] < rows[0]["loss"]


@pytest.mark.slow
def test_example_follows_the_rule_on_real_overflows(run_forked):
    rows = rows_of(run_forked(EXAMPLES / "mindformers_trainer.py").stdout)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert_follows_the_rule(rows)


@pytest.mark.slow
def test_trainer_with_a_wrapper_follows_the_rule_and_resumes(run_forked, tmp_path):
    example = EXAMPLES / "mindformers_trainer_wrapper.py"
    cached = {"MS_COMPILER_CACHE_ENABLE": "1", "MS_COMPILER_CACHE_PATH": str(tmp_path / "compiled")}
    rows = rows_of(run_forked(example, **cached).stdout)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert_follows_the_rule(rows)

    finished = run_forked(example, "CKP_rank_0-1_16.ckpt", **cached)
    resumed = [row | {"step": row["step"] + 16} for row in rows_of(finished.stdout)]
    assert resumed == rows[16:]
    restored = re.findall("Loss scaling goes on from: loss_scale (.*?), .*cur_iter (.*?),", finished.stdout)
    assert restored == [(str(rows[16]["loss_scale"]), "17")]


def build_train_step(model, cell=MFTrainOneStepCell, max_grad_norm=1.0):
    optimizer = nn.SGD(model.trainable_params(), learning_rate=1.0)
    update_cell = AdaptiveLossScaleUpdateCell(1024, 2, 20)
    return cell(model, optimizer, use_clip_grad=True, max_grad_norm=max_grad_norm, scale_sense=update_cell)


@pytest.mark.slow
@pytest.mark.usefixtures("graph_mode", "in_a_folder_of_its_own")
def test_the_cell_itself_is_trained_with_optimizer_and_clipping():
    train_step = build_train_step(build_model(), max_grad_norm=0.01)
    cells, weights = [], []

    def remember(run_context):
        cells.append(run_context.original_args().train_network)
        weights.append(np.concatenate([weight.asnumpy().ravel() for weight in train_step.weights]))

    remembering = LambdaCallback(on_train_begin=remember, on_train_step_end=remember)
    # The optimizer and the clipping in these training arguments differ from those in the train-step cell, so Trainer
    # must ignore them. Sink mode does not exist on a CPU, so Trainer must turn it off.
    arguments = training_arguments(optim="AdamW", learning_rate=5.0, max_grad_norm=100.0, sink_mode=True)
    trainer = Trainer(
        arguments,
        wrapper=train_step,
        train_dataset=build_dataset().take(2),
        callbacks=[remembering, LossScaleMonitor(record_path="record.jsonl")],
    )
    with pytest.warns(UserWarning, match="'runner_config.sink_mode' must be False on CPU"):
        trainer.train()
    assert trainer.config.runner_config.sink_mode is False
    assert [entry["step"] for entry in read_record("record.jsonl")] == [1, 2]
    assert cells == [train_step] * 3
    for before, after in itertools.pairwise(weights):
        np.testing.assert_allclose(np.linalg.norm(after - before), 0.01, rtol=0.01)
    assert train_step.loss_scaling_manager.state()["cur_iter"] == 3


@pytest.mark.slow
@pytest.mark.usefixtures("graph_mode", "in_a_folder_of_its_own")
def test_arguments_that_name_the_guided_cell_train_by_its_rule():
    arguments = training_arguments(
        scale_sense="GradientGuidedLossScaleUpdateCell", loss_scale_value=2**30, loss_scale_window=50
    )
    record = LossScaleMonitor(record_path="record.jsonl")
    with pytest.warns(UserWarning, match="'loss_scale_window' 50 is not used.* has no"):
        trainer = Trainer(arguments, model=build_model(), train_dataset=build_dataset().take(6), callbacks=[record])
    trainer.train()
    lines = read_record("record.jsonl")
    rule = GuidedRule()
    assert_follows(rule, rule.start(2.0**30), lines)
    assert {line["overflow"] for line in lines} == {True, False}


FIXED = [1024, {"type": "FixedLossScaleUpdateCell", "loss_scale_value": 1024}, {"type": "NoLossScaleUpdateCell"}]


@pytest.mark.usefixtures("registry_put_back", "in_a_folder_of_its_own")
@pytest.mark.parametrize("scale_sense", [*FIXED, None], ids=str)
def test_only_a_moving_scale_is_taken_from_a_checkpoint(scale_sense):
    changes = {} if scale_sense is None else {"runner_wrapper.scale_sense": scale_sense}
    trainer, dense = Trainer(load_config(CONFIG, changes)), Dense()
    trainer._check_config_rules()
    # On a resume, MindFormers writes the loss scale of the checkpoint into the configuration.
    section, restored = trainer.config.runner_wrapper, Tensor(8.0)
    if hasattr(section.scale_sense, "loss_scale_value"):
        section.scale_sense.loss_scale_value = restored
    else:
        section.scale_sense = restored
    trainer.trainer.set_config(trainer.config, is_full_config=True)
    train_step = trainer.trainer.create_model_wrapper(dense.network, dense.optimizer())
    expected = 8 if scale_sense is None else 1 if scale_sense == FIXED[-1] else 1024
    assert float(train_step.scale_sense.asnumpy()) == expected


class NotOfMindFormers(nn.Cell):
    """A network of one weight that uses nothing of MindFormers."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(np.ones((8, 1), np.float32)), name="weight")
        self.matmul = ops.MatMul()

    def construct(self, features):
        return self.matmul(features.astype(mindspore.float16), self.weight.astype(mindspore.float16)).mean()


@pytest.mark.usefixtures("in_a_folder_of_its_own")
def test_a_wrapper_that_is_no_train_step_cell_is_refused():
    for wrapper, message in (
        (
            DynamicLossScaleManager(),
            r"must be a train-step cell, .* of type Dynamic.* get_update_cell\(\) of a loss-sca",
        ),
        ("MFTrainOneStepCell", "must be a train-step cell, but got 'MFTrainOneStepCell' of type str"),
        (NotOfMindFormers(), "must be a train-step cell, but got NotOfMindFormers"),
        (build_train_step(NotOfMindFormers()), "must train a model of MindFormers, but its network is NotOf"),
    ):
        with pytest.raises(TypeError, match=message):
            Trainer(training_arguments(), wrapper=wrapper)


@pytest.mark.usefixtures("in_a_folder_of_its_own")
def test_wrapper_that_conflicts_with_arguments_is_refused():
    model, other = build_model(), build_model()
    train_step = build_train_step(model)
    for arguments, message in (
        ({"model": other}, "'model' must be the same LlamaForCausalLM object as in 'wrapper', .* of type LlamaFor"),
        ({"model": "glm4_9b"}, "'model' must be the same LlamaForCausalLM object as in 'wrapper', .* of type str"),
        ({"optimizers": nn.SGD(model.trainable_params())}, "'optimizers' must be the same SGD object as in 'wrapper'"),
        ({"reset_model": True}, "'wrapper'.*reset_model=True.*use_past=False"),
        ({"wrapper": build_train_step(other, mindformers.wrapper.MFTrainOneStepCell)}, "able to detect an overflow"),
    ):
        with pytest.raises(ValueError, match=message):
            Trainer(training_arguments(), **{"wrapper": train_step, **arguments})
    trainer = Trainer(training_arguments(), model=model, optimizers=train_step.optimizer, wrapper=train_step)
    assert (trainer.model, trainer.optimizers) == (model, train_step.optimizer)
