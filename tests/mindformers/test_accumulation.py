"""Gradient accumulation on a CPU, by the launcher or by ``Trainer``, gives the same training as one large batch."""

import re

import numpy as np
import pytest
from mindformers.tools.register import MindFormerConfig
from mindformers.trainer.base_trainer import BaseTrainer
from mindspore import nn

from mindformers_adaptive import LossScaleMonitor
from mindformers_adaptive.gradients.batch_file import save_batch
from mindformers_adaptive.mindformers.keys import ACCUMULATION, micro_batches_of
from mindformers_adaptive.mindformers.launcher import launch, load_config, set_key
from mindformers_adaptive.mindformers.overflow_probe import training_of_file
from mindformers_adaptive.mindformers.run_configuration import OverflowCase
from mindformers_adaptive.mindformers.trainer import (
    Trainer,
    accumulate,
    take_accumulation_steps,
)
from mindformers_adaptive.mindformers.training_probe import TrainingSource, probe
from mindformers_adaptive.record.writer import read_record
from mindformers_adaptive.wrapper import AdaptiveLossScaleUpdateCell, MFTrainOneStepCell
from tests.conftest import CONFIG
from tests.mindformers.trained_llama import build_dataset, build_model
from tests.mindformers.training_runs import SMALL_MODEL, as_options, training_arguments

SAMPLES, BATCH, MICRO_BATCHES = 48, 8, 2
STEPS = SAMPLES // BATCH
# The expected relative accuracy: FP16 numbers have 11 significant bits.
ACCURACY = 2.0**-10

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("graph_mode", "registry_put_back", "in_a_folder_of_its_own")]


def options(corpus, steps, **changes):
    return {
        **SMALL_MODEL,
        "model.model_config.multiple_of": 16,
        "runner_config.batch_size": BATCH // steps,
        ACCUMULATION: steps,
        "train_dataset.data_loader.dataset_dir": str(corpus),
        "train_dataset.data_loader.num_samples": SAMPLES,
        "lr_schedule.warmup_steps": 2,
        "lr_schedule.total_steps": STEPS,
        **changes,
    }


def record_of_launch(corpus, steps, name, **changes):
    monitor = {"type": "LossScaleMonitor", "record_path": name}
    changed = options(corpus, steps, **{"output_dir": "output", "callbacks": [monitor], **changes})
    launch(load_config(CONFIG, changed, may_add=changed))
    return read_record(name)


def test_the_launcher_takes_the_steps_of_the_large_batch(corpus):
    scaling = {"runner_wrapper.scale_sense.loss_scale_value": 2**8}
    whole = record_of_launch(corpus, 1, "whole.jsonl", **scaling)
    losses = [line["loss"] for line in whole]
    # The loss falls by much more than ACCURACY, so the losses of a different training would not pass as equal.
    assert losses[0] - losses[-1] > 20 * ACCURACY * losses[0]
    # All samples have equally many tokens, so a loss per token is the same training. The test of Trainer below has the
    # loss per sample.
    cut = record_of_launch(corpus, MICRO_BATCHES, "cut.jsonl", calculate_per_token_loss=True, **scaling)
    assert [line["step"] for line in cut] == [line["step"] for line in whole] == list(range(1, STEPS + 1))
    assert {line["overflow"] for line in (*whole, *cut)} == {False}
    np.testing.assert_allclose([line["loss"] for line in cut], losses, rtol=ACCURACY)


def trainer(steps, callbacks=(), **arguments):
    scaling = {"scale_sense": "AdaptiveLossScaleUpdateCell", "loss_scale_value": 2**10}
    settings = training_arguments(gradient_accumulation_steps=steps, learning_rate=0.01, **scaling)
    return Trainer(settings, train_dataset=build_dataset().take(STEPS), callbacks=list(callbacks), **arguments)


def test_trainer_takes_the_steps_of_the_large_batch():
    losses = []
    for steps in (1, 2):
        path = f"record_{steps}.jsonl"
        trainer(steps, [LossScaleMonitor(record_path=path)], model=build_model()).train()
        losses.append([line["loss"] for line in read_record(path)])
    assert len(losses[0]) == STEPS
    np.testing.assert_allclose(losses[1], losses[0], rtol=ACCURACY)
    assert losses[0][0] - losses[0][-1] > 20 * ACCURACY * losses[0][0]


def test_batches_that_cannot_be_cut_are_refused_at_once():
    with pytest.raises(ValueError, match=r"cut into 3 micro-batches.* but its batches have 4 samples"):
        trainer(3, model=build_model()).train()


def test_a_wrapper_of_the_user_accumulates_as_it_was_made():
    model = build_model()
    update_cell = AdaptiveLossScaleUpdateCell(1024, 2, 20)
    optimizer = nn.SGD(model.trainable_params(), learning_rate=0.1)
    with_wrapper = trainer(2, wrapper=MFTrainOneStepCell(model, optimizer, scale_sense=update_cell))
    # Trainer.train() calls _init_model() before it builds anything. _init_model() gives the expected warning, so call
    # only this method.
    with pytest.warns(UserWarning, match=r"must be 1 with 'wrapper'.*but got 2: no gradients are accumulated"):
        with_wrapper._init_model(is_train=True)
    assert with_wrapper.config.runner_config.batch_size == 4


def test_probe_measures_micro_batches_as_the_training_does(corpus):
    whole, parts = {}, {}

    def add_to(sums):
        return lambda _, gradients: sums.update({name: sums.get(name, 0) + each for name, each in gradients.items()})

    probe(TrainingSource(CONFIG, overrides=options(corpus, 1)), [2.0**8], 1, observe=add_to(whole))
    source = TrainingSource(CONFIG, overrides=options(corpus, MICRO_BATCHES))
    ranges = probe(source, [2.0**8], MICRO_BATCHES, observe=add_to(parts))
    for name, gradient in whole.items():
        np.testing.assert_allclose(parts[name] / MICRO_BATCHES, gradient, atol=2.0**-8 * np.abs(gradient).max())
    # The loss of each micro-batch was divided by their number before the backward pass.
    assert ranges.micro_batches == MICRO_BATCHES
    scaled, unscaled = ranges.overall(2.0**8).norm, ranges.overall(2.0**8, unscaled=True).norm
    assert scaled == pytest.approx(unscaled * 2.0**8 / MICRO_BATCHES)


STAGES = {"parallel_config.pipeline_stage": 2, "parallel_config.micro_batch_num": 8}
SEMI_AUTO = {"use_parallel": True, "parallel.parallel_mode": 1, "parallel_config.data_parallel": 4}


@pytest.mark.parametrize(
    ("target", "changes", "micro_batches"),
    [
        ("CPU", {}, 1),
        ("CPU", {ACCUMULATION: 3}, 3),
        ("CPU", {ACCUMULATION: 3, "calculate_per_token_loss": True}, 1),
        ("Ascend", {ACCUMULATION: 3}, 1),
        ("Ascend", {**SEMI_AUTO, "parallel.parallel_mode": 0, **STAGES}, 1),
        ("Ascend", {**SEMI_AUTO, ACCUMULATION: 3}, 12),
        ("Ascend", {**SEMI_AUTO, **STAGES, ACCUMULATION: 3}, 32),
        ("Ascend", {**SEMI_AUTO, **STAGES, "calculate_per_token_loss": True}, 1),
        ("Ascend", {**SEMI_AUTO, **STAGES, "use_parallel": False}, 1),
    ],
)
def test_who_divides_before_the_backward_pass(target, changes, micro_batches):
    config = MindFormerConfig(str(CONFIG))
    for key, value in changes.items():
        set_key(config, key, value)
    assert micro_batches_of(config, config.use_parallel, target) == micro_batches


def test_find_and_why_say_that_they_measure_a_micro_batch(corpus, run_program):
    # `find` and `why` measure a configuration with pipeline stages in one process.
    changes = {**SMALL_MODEL, **STAGES, **SEMI_AUTO, "parallel_config.data_parallel": 1}
    said = r"one of 8 micro-batches\b.* divided by 8 "
    guided = {"runner_wrapper.scale_sense": "{type: GradientGuidedLossScale, loss_scale_value: 65536, margin: 8}"}
    words = ["--config", CONFIG, "--train-dataset-dir", corpus, "--batches", 1]
    code, printed, _ = run_program("find", *words, *as_options({**changes, **guided}))
    assert code == 0
    assert re.search(said, printed)
    # The section to paste has as many lines as the section of the configuration.
    assert "type: GradientGuidedLossScale\n" in printed
    assert "window" not in printed
    assert len([line for line in printed.splitlines() if not line.startswith(" ")]) <= 9
    case = OverflowCase(config=CONFIG, train_dataset_dir=corpus, overrides=changes, batches=1)
    assert re.search(said, training_of_file(case).measured)


def test_a_saved_batch_is_cut_into_its_micro_batches(corpus):
    rows = [np.arange(BATCH * 33, dtype=np.int32).reshape(BATCH, 33) % 256]
    save_batch("batch.npz", rows)
    case = OverflowCase(config=CONFIG, overrides=options(corpus, 2), batch="batch.npz")
    batches = training_of_file(case).batches
    np.testing.assert_array_equal([columns[0].asnumpy() for columns in batches], np.split(rows[0], 2))


def test_the_model_and_evaluation_see_micro_batches(corpus):
    config = load_config(CONFIG, options(corpus, MICRO_BATCHES))
    config.eval_dataset, config.eval_dataset_task = MindFormerConfig(), MindFormerConfig(dataset_config={})
    base = BaseTrainer()
    accumulate(base, take_accumulation_steps(config))
    base.set_config(config, is_full_config=True)
    # MindFormers calls _reset_dataset_batch_size() once for each dataset, for training and for evaluation.
    for _ in range(2):
        base._reset_dataset_batch_size()
        assert (config.train_dataset.batch_size, config.eval_dataset.batch_size) == (BATCH, BATCH // MICRO_BATCHES)
    assert config.runner_config.mini_batch_size == BATCH // MICRO_BATCHES
