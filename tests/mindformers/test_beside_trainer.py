"""Adaptive loss scaling works together with evaluation, monitors, recomputation and LoRA of MindFormers' trainer."""

from typing import ClassVar

import numpy as np
import pytest
from mindformers.tools.logger import get_logger
from mindformers.tools.register import MindFormerRegister
from mindspore.train import Callback

from mindformers_adaptive.mindformers.launcher import launch, load_config
from mindformers_adaptive.record.writer import read_record
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from tests.conftest import CONFIG, write_corpus
from tests.mindformers.training_runs import SMALL_MODEL
from tests.monitor.event_files import read_scalars
from tests.shared.records import assert_follows
from tests.shared.versions import BEFORE_1_7

pytestmark = pytest.mark.slow

STEPS, START = 20, 2.0**22
WINDOWS = {"max_scale_window": 8, "min_scale_window": 4}


class Weights(Callback):
    """Remembers all weights of the network after each step."""

    seen: ClassVar[list] = []

    def on_train_begin(self, run_context):
        type(self).seen = []
        self.on_train_step_end(run_context)

    def on_train_step_end(self, run_context):
        network = run_context.original_args().train_network.network
        self.seen.append({weight.name: weight.asnumpy().copy() for weight in network.get_parameters()})


@pytest.fixture
def run(corpus, tmp_path, monkeypatch, graph_mode, registry_put_back):
    """Return a function that trains with changed values of the YAML file; it returns the record and the weights."""
    monkeypatch.chdir(tmp_path)
    MindFormerRegister.register_cls(Weights, module_type="callback", alias="Weights")

    def train(name, callbacks=(), **changes):
        changes = {
            "output_dir": str(tmp_path / "output"),
            **SMALL_MODEL,
            "model.model_config.multiple_of": 16,
            "runner_config.batch_size": 2,
            **{f"runner_wrapper.scale_sense.{key}": value for key, value in WINDOWS.items()},
            "runner_wrapper.scale_sense.loss_scale_value": START,
            "runner_wrapper.scale_sense.scale_window": 4,
            "train_dataset.data_loader.dataset_dir": str(corpus),
            "train_dataset.data_loader.num_samples": 2 * STEPS,
            "lr_schedule.total_steps": STEPS,
            # Without warm-up, the first applied step changes the weights. With warm-up, its learning rate would be 0.
            "lr_schedule.warmup_steps": 0,
            "callbacks": [
                {"type": "MFLossMonitor"},
                # The folder for TensorBoard is for files without a section ``tensorboard``.
                {"type": "LossScaleMonitor", "record_path": name, "tensorboard_dir": str(tmp_path / f"{name}.board")},
                {"type": "Weights"},
                *callbacks,
            ],
            **{key.replace("__", "."): value for key, value in changes.items()},
        }
        launch(load_config(CONFIG, changes, may_add=changes))
        return read_record(name), Weights.seen

    return train


def assert_follows_the_rule(lines):
    rule = AdaptiveRule(**WINDOWS)
    assert assert_follows(rule, rule.start(START, 4), lines).skipped_steps >= 2
    assert len(lines) == STEPS


@pytest.mark.skipif(
    BEFORE_1_7,
    reason="MindFormers before 1.7 writes dumps with its monitor, which MindSpore does not on a CPU",
)
# MindFormers' perplexity metric causes this warning of NumPy.
@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
def test_evaluation_monitors_and_recompute_change_no_step(run, tmp_path, caplog):
    plain, plain_weights = run("plain.jsonl")
    assert_follows_the_rule(plain)
    # Add this log handler only now, because each launch creates MindFormers' log anew.
    get_logger().addHandler(caplog.handler)
    # In evaluation, a Llama takes as many tokens as its sequence length; in training, it takes one token more.
    samples = write_corpus(tmp_path / "samples", samples=8, seq_length=31)
    dataset = {
        "data_loader": {"type": "MindDataset", "dataset_dir": str(samples), "shuffle": False, "num_samples": 8},
        "input_columns": ["input_ids"],
        "drop_remainder": True,
        "batch_size": 2,
        "repeat": 1,
    }
    everything, weights = run(
        "everything.jsonl",
        do_eval=True,
        eval_step_interval=10,
        eval_dataset=dataset,
        eval_dataset_task={"type": "CausalLanguageModelDataset", "dataset_config": dataset},
        metric={"type": "PerplexityMetric"},
        tensorboard={"tensorboard_dir": str(tmp_path / "board")},
        check_for_nan_in_loss_and_grad=True,
        monitor_config={
            "monitor_on": True,
            "dump_path": "",
            "step_interval": 1,
            "weight_state_format": ["log", "tensorboard"],
            "optimizer_state_format": ["log"],
        },
        runner_wrapper__local_norm=True,
        recompute_config={"recompute": True},
    )
    get_logger().removeHandler(caplog.handler)
    assert everything == plain
    for before, after in zip(plain_weights, weights, strict=True):
        for name, value in before.items():
            np.testing.assert_array_equal(after[name], value)
    # The output shows that evaluation, local norms, monitor and TensorBoard were really at work.
    assert "PerplexityMetric" in caplog.text
    assert "local_norm" in caplog.text
    scalars = read_scalars(tmp_path / "board" / "rank_0")
    assert "loss_scaling/loss_scale" in scalars
    assert [folder.name for folder in tmp_path.glob("*.board")] == ["plain.jsonl.board"]
    assert "weight_norm" in scalars


def test_lora_trains_its_own_weights_only(run):
    pet = {"pet_type": "lora", "lora_rank": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": ".*wq|.*wv"}
    lines, weights = run("lora.jsonl", model__model_config__pet_config=pet)
    assert_follows_the_rule(lines)
    for line, before, after in zip(lines, weights[:-1], weights[1:], strict=True):
        changed = {name for name in before if not np.array_equal(before[name], after[name])}
        assert (changed == set()) is line["overflow"]
        assert all("lora" in name for name in changed)
