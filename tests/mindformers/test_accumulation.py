"""Gradient accumulation on a CPU, in the launcher and in ``Trainer``: the same training as with the large batch."""

import numpy as np
import pytest
from mindformers.tools.register import MindFormerConfig
from mindformers.trainer.base_trainer import BaseTrainer
from mindspore import nn

from mindformers_adaptive import LossScaleMonitor
from mindformers_adaptive.mindformers.launcher import launch, load_config
from mindformers_adaptive.mindformers.trainer import (
    MeanOverMicroBatches,
    Trainer,
    accumulate,
    take_accumulation_steps,
)
from mindformers_adaptive.mindformers.training_probe import build_training
from mindformers_adaptive.record.writer import read_record
from mindformers_adaptive.wrapper import AdaptiveLossScaleUpdateCell, MFTrainOneStepCell
from scripts.examples.tiny_llama import build_dataset, build_model
from tests.conftest import CONFIG
from tests.mindformers.training_runs import SMALL_MODEL, training_arguments

SAMPLES, BATCH, MICRO_BATCHES = 48, 8, 4
STEPS = SAMPLES // BATCH
# FP16 has 11 bits.
ACCURACY = 2.0**-10

pytestmark = pytest.mark.usefixtures("graph_mode", "registry_put_back", "in_a_folder_of_its_own")


def options(corpus, steps, **changes):
    return {
        **SMALL_MODEL,
        "model.model_config.multiple_of": 16,
        "runner_config.batch_size": BATCH // steps,
        "runner_config.gradient_accumulation_steps": steps,
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


@pytest.mark.parametrize("per_token", [False, True])
def test_the_launcher_takes_the_steps_of_the_large_batch(corpus, per_token):
    changes = {"calculate_per_token_loss": per_token, "runner_wrapper.scale_sense.loss_scale_value": 2**8}
    whole = record_of_launch(corpus, 1, "whole.jsonl", **changes)
    cut = record_of_launch(corpus, MICRO_BATCHES, "cut.jsonl", **changes)
    assert [line["step"] for line in cut] == [line["step"] for line in whole] == list(range(1, STEPS + 1))
    assert {line["overflow"] for line in (*whole, *cut)} == {False}
    losses = [line["loss"] for line in whole]
    np.testing.assert_allclose([line["loss"] for line in cut], losses, rtol=ACCURACY)
    # The loss falls by more than that, so another training would not pass.
    assert losses[0] - losses[-1] > 20 * ACCURACY * losses[0]


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


def test_batches_that_cannot_be_cut_are_refused_before_anything_compiles():
    with pytest.raises(ValueError, match=r"cut into 3 micro batches.* but its batches have 4 samples"):
        trainer(3, model=build_model()).train()


def test_a_wrapper_of_the_user_accumulates_as_it_was_made():
    model = build_model()
    update_cell = AdaptiveLossScaleUpdateCell(1024, 2, 20)
    optimizer = nn.SGD(model.trainable_params(), learning_rate=0.1)
    with_wrapper = trainer(2, wrapper=MFTrainOneStepCell(model, optimizer, scale_sense=update_cell))
    # What train() does before it builds anything.
    with pytest.warns(UserWarning, match=r"must be 1 with 'wrapper'.*but got 2: nothing is accumulated"):
        with_wrapper._init_model(is_train=True)
    assert with_wrapper.config.runner_config.batch_size == 4


def test_probe_and_find_measure_the_accumulated_gradients(corpus):
    train_step, dataset = build_training(CONFIG, None, options(corpus, MICRO_BATCHES))
    assert isinstance(train_step.network, MeanOverMicroBatches)
    assert (train_step.network.micro_batches, dataset.get_batch_size()) == (MICRO_BATCHES, BATCH)


def test_the_model_and_evaluation_see_micro_batches(corpus):
    config = load_config(CONFIG, options(corpus, MICRO_BATCHES))
    config.eval_dataset, config.eval_dataset_task = MindFormerConfig(), MindFormerConfig(dataset_config={})
    base = BaseTrainer()
    accumulate(base, take_accumulation_steps(config))
    base.set_config(config, is_full_config=True)
    # Once for each data set that is made.
    for _ in range(2):
        base._reset_dataset_batch_size()
        assert (config.train_dataset.batch_size, config.eval_dataset.batch_size) == (BATCH, BATCH // MICRO_BATCHES)
    assert config.runner_config.mini_batch_size == BATCH // MICRO_BATCHES
