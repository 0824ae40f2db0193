"""Trainings of a small model with MindFormers' PyNative trainer; tests start this script with a folder and a task.

The script writes the losses, the weights and the trainer's counts of each training to FOLDER/TASK.pickle.
``hyper_parallel_stand_in`` replaces what is not available on a CPU.
"""

import contextlib
import itertools
import math
import os
import pickle
import signal
import sys
from pathlib import Path

import mindspore
import numpy as np
import yaml
from mindspore import Tensor, amp, dataset, nn
from mindspore.mindrecord import FileWriter

from tests.mindformers import hyper_parallel_stand_in

hyper_parallel_stand_in.install()
mindspore.set_context(mode=mindspore.PYNATIVE_MODE, device_target="CPU")

from mindformers.core.lr import ConstantWarmUpLR  # noqa: E402
from mindformers.models import PretrainedConfig, PreTrainedModel  # noqa: E402
from mindformers.parallel_core.transformer_config import TransformerConfig  # noqa: E402
from mindformers.pynative.callback import TrainerCallback  # noqa: E402
from mindformers.pynative.optimizer.adamw import AdamW  # noqa: E402
from mindformers.pynative.trainer.trainer import Trainer as StockTrainer  # noqa: E402
from mindformers.pynative.trainer.trainer import _no_grad  # noqa: E402
from mindformers.pynative.transformers.moe.moe_utils import _MoEAuxLossAutoScaler  # noqa: E402
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister  # noqa: E402

from mindformers_adaptive.cli.program import main as main_of_program  # noqa: E402
from mindformers_adaptive.mindformers.pynative_trainer import make_scaler, trainer_class  # noqa: E402

STEPS, BATCH, FEATURES, SAMPLES = 16, 8, 8, 160
ADAPTIVE = {"type": "AdaptiveLossScale", "loss_scale_value": 2.0**22, "min_scale_window": 2, "max_scale_window": 4}
GUIDED = {"type": "GradientGuidedLossScale", "loss_scale_value": 2.0**22}
OWN = {"type": "RuleLossScaleUpdateCell", "rule": "tests.shared.own_rules.Plain", "loss_scale_value": 2.0**20}


class Config(PretrainedConfig):
    """The configuration that MindFormers needs for a model."""

    model_type = "small"


class Model(PreTrainedModel):
    """Four layers that compute in float16 or float32; the loss is in float32.

    Args:
        dtype (Type): the type in which the layers compute.
        auxiliary (bool): whether the model also has an auxiliary loss, which reaches the gradients through the class
            that MindFormers' experts use.
    """

    config_class = Config

    def __init__(self, dtype=mindspore.float16, auxiliary=False):
        super().__init__(Config())
        sizes = [FEATURES, 32, 32, 16, 1]
        generator = np.random.default_rng(7)
        layers = []
        for before, after in itertools.pairwise(sizes):
            weight = Tensor(generator.normal(0, before**-0.5, (after, before)).astype(np.float32))
            layers += [nn.Dense(before, after, weight_init=weight, bias_init="zeros").to_float(dtype), nn.ReLU()]
        self.layers = nn.SequentialCell(*layers[:-1])
        self.auxiliary = auxiliary
        for parameter in self.trainable_params():
            parameter.requires_grad_(True)
        self.set_grad(True)

    def construct(self, features, target):
        """Return the loss of a batch."""
        output = self.layers(features).astype(mindspore.float32)
        if self.auxiliary:
            output = _MoEAuxLossAutoScaler.apply(output, (self.layers[0].weight ** 2).sum().reshape(1) * 0.125)
        return ((output - target) ** 2).mean()

    def to_empty(self):
        """Do nothing, because the weights of this model exist already."""

    init_states = to_empty

    def get_gpt_transformer_config(self):
        """Return the configuration from which MindFormers' LossCallback computes the number of operations."""
        return TransformerConfig(num_layers=4, hidden_size=32, num_attention_heads=4)


def make_data(batch=BATCH):
    """Return a dataset with enough samples for all steps in one epoch, always in the same order.

    If a second epoch were needed, MindFormers would begin it, in a resumed run, at the sample where the run was
    resumed.
    """
    generator = np.random.default_rng(1)
    features = generator.normal(size=(SAMPLES, FEATURES)).astype(np.float32)
    target = features[:, :1] * 2 - features[:, 1:2]
    pairs = list(zip(features, target, strict=True))
    return dataset.GeneratorDataset(pairs, ["features", "target"], shuffle=False).batch(batch)


def make_config(folder, section, accumulation=1, max_norm=1e9, steps=STEPS, **checkpoint):
    """Return the contents of a YAML file for the PyNative trainer, as a dictionary."""
    training = {"steps": steps, "global_batch_size": BATCH, "local_batch_size": BATCH // accumulation}
    training |= {"max_norm": max_norm} | ({} if section is None else {"loss_scale": section})
    return {
        "training": training,
        "context": {"device_target": "CPU", "mode": 1},
        "lr_scheduler": {"type": "ConstantWarmUpLR", "learning_rate": 0.01, "warmup_steps": 4, "total_steps": STEPS},
        "optimizer": {"type": "AdamW"},
        "train_dataset": {"dataloader": {"type": "MindDataset"}},
        "model": {"model_type": "small", "architectures": "Model", "compute_dtype": "float16"},
        "checkpoint": {"save_path": str(folder / "checkpoint"), "save_interleaved_steps": 6, **checkpoint},
        "callbacks": [{"type": "LossScaleMonitor", "record_path": str(folder / "record.jsonl")}],
    }


class Seen(TrainerCallback):
    """Stores the loss, gradient norm and loss scale of each step, and the number of steps skipped so far."""

    def __init__(self):
        self.steps = []

    def on_step_end(self, args, state, loss=None, grad_norm=None, **kwargs):
        """Store the loss, gradient norm and loss scale of the ended step, and the number of steps skipped so far."""
        scale, skipped = (getattr(state, name, 0) for name in ("loss_scale", "skipped_steps"))
        self.steps.append((float(loss), float(grad_norm), scale, skipped))


def make_optimizer(model):
    """Return MindFormers' AdamW, and its learning-rate schedule, which rises over the first updates."""
    schedule = ConstantWarmUpLR(learning_rate=0.01, warmup_steps=6, total_steps=STEPS)
    return AdamW(model.trainable_params(), schedule, betas=(0.9, 0.95), weight_decay=0.01), schedule


def train(folder, section, dtype=mindspore.float16, auxiliary=False, callbacks=(), **config):
    """Train, and return losses, loss scales and weights. If ``section`` is None, use MindFormers' own trainer."""
    folder.mkdir(parents=True, exist_ok=True)
    model, seen = Model(dtype, auxiliary), Seen()
    optimizer, schedule = make_optimizer(model)
    config = make_config(folder, section, **config)
    trainer_type = StockTrainer if section is None else trainer_class()
    if section is None:
        del config["callbacks"]
    trainer = trainer_type(
        config=config,
        model=model,
        train_dataset=batches(config),
        optimizer=optimizer,
        lr_scheduler=schedule,
        callbacks=[seen, *callbacks],
    )
    trainer.train()
    seen_and_weights = {
        "steps": np.array(seen.steps),
        "updates": int(optimizer.global_step.asnumpy()[0]),
        **weights_of(model),
    }
    if section is not None:
        seen_and_weights |= {"decisions": trainer.scaler.state()["cur_iter"] - 1, "state": trainer.state.save_to_dict()}
    return seen_and_weights


def batches(config):
    """Return the dataset, cut into micro-batches unless the trainer cuts batches itself, as in MindFormers 2.0.0."""
    cuts_itself = hasattr(StockTrainer, "_split_micro_batch")
    return make_data(config["training"]["global_batch_size" if cuts_itself else "local_batch_size"])


def weights_of(model):
    """Return the weights of the model by name, as arrays."""
    return {f"weight {name}": parameter.asnumpy().copy() for name, parameter in model.parameters_and_names()}


def plain_loop(section, accumulation=1):
    """Train in a plain loop instead of MindFormers' trainer, with the same scaler, optimizer and data."""
    scaler, model = make_scaler(section), Model()
    optimizer, _ = make_optimizer(model)
    samples = itertools.cycle([*make_data(BATCH // accumulation).create_tuple_iterator()])
    steps = []
    for _ in range(STEPS):
        sense, loss = Tensor([1.0]) * float(scaler.scale_value.asnumpy()), 0.0
        for _ in range(accumulation):
            micro_loss = model(*next(samples)) / accumulation
            micro_loss.backward(sense)
            loss += micro_loss
        with _no_grad():
            gradients = scaler.unscale(tuple(parameter.grad for parameter in optimizer.parameters))
            grads_finite = amp.all_finite(gradients)
            if grads_finite:
                optimizer(gradients)
            scaler.adjust(grads_finite, gradients)
        for parameter in optimizer.parameters:
            parameter.grad = None
        steps.append((float(loss), math.nan, float(scaler.scale_value.asnumpy()), scaler.state()["skipped_steps"]))
    return {"steps": np.array(steps), **weights_of(model)}


class Kill(TrainerCallback):
    """Kills the process at the end of a step, after all other callbacks.

    Args:
        step (int): the number of the step.
    """

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, **kwargs):
        """Kill the process with SIGKILL at the end of the chosen step."""
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def all_trainings(folder):
    """Run the trainings that can share one process; yield the name and the results of each training."""
    float32 = {"dtype": mindspore.float32}
    for name, section in {"adaptive": ADAPTIVE, "guided": GUIDED, "own": OWN}.items():
        yield name, train(folder / name, section)
        yield f"{name} loop", plain_loop(section)
    yield "accumulated", train(folder / "accumulated", ADAPTIVE, accumulation=4)
    yield "accumulated loop", plain_loop(ADAPTIVE, accumulation=4)
    for name, section in {"stock": None, "one": 1.0, "scaled": 1024.0}.items():
        yield f"{name} float32", train(folder / f"{name}32", section, auxiliary=True, **float32)
    for name, section in {"stock": None, "scaled": 1024.0}.items():
        yield f"{name} clipped", train(folder / f"{name}c", section, max_norm=0.5, **float32)
        with mul_in_place():
            yield f"{name} clipped in place", train(folder / f"{name}m", section, max_norm=0.5, **float32)


@contextlib.contextmanager
def mul_in_place():
    """Make ``Tensor.mul_`` work in place on a CPU, by means of ``copy_``."""
    stock = Tensor.mul_
    Tensor.mul_ = lambda self, other: self.copy_(self * other)
    try:
        yield
    finally:
        Tensor.mul_ = stock


class Built(Model):
    """The model as MindFormers builds it from a YAML file: its weights have no memory at first."""

    def __init__(self, config):
        super().__init__()

    def init_states(self):
        """Allocate memory for the weights of the model, and set them to their initial values."""
        for parameter, other in zip(self.get_parameters(), Model().get_parameters(), strict=True):
            parameter.set_data(Tensor(other.asnumpy()))


def launch(folder):
    """Train with the command-line program, from a YAML file alone."""
    MindFormerRegister.register_cls(Config, MindFormerModuleType.CONFIG, legacy=False, search_names="small")
    MindFormerRegister.register_cls(Built, MindFormerModuleType.MODELS, legacy=False, search_names="Built")
    samples = make_data(SAMPLES).create_dict_iterator(output_numpy=True)
    columns = {name: {"type": "float32", "shape": [size]} for name, size in (("features", FEATURES), ("target", 1))}
    writer = FileWriter(str(folder / "samples.mindrecord"))
    writer.add_schema(columns)
    [batch] = samples
    writer.write_raw_data([{name: batch[name][number] for name in columns} for number in range(SAMPLES)])
    writer.commit()
    config = make_config(folder, ADAPTIVE)
    config["model"]["architectures"] = "Built"
    loader = {"type": "MindDataset", "dataset_files": str(folder / "samples.mindrecord"), "column_names": [*columns]}
    config["train_dataset"] = {"dataloader": loader, "num_parallel_workers": 1}
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return main_of_program(["train", "--config", str(folder / "run.yaml"), "--options", "training.steps=8"])


def main(folder, task):
    """Run the trainings of a task, and write the results to a file named after the task."""
    folder = Path(folder)
    if task == "killed":
        train(folder / "killed", ADAPTIVE, callbacks=[Kill(10)])
    elif task == "launched":
        (folder / task).mkdir()
        sys.exit(launch(folder / task))
    if task == "resumed":
        trainings = {"resumed": train(folder / "killed", ADAPTIVE, load_path=str(folder / "killed" / "checkpoint"))}
    else:
        trainings = dict(all_trainings(folder))
    (folder / f"{task}.pickle").write_bytes(pickle.dumps(trainings))


if __name__ == "__main__":
    main(*sys.argv[1:])
