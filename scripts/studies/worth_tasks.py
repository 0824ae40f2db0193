"""The training tasks on which loss scaling is tried: networks in FP16 or FP32, data, and measures of the result."""

import copy
import functools
import pydoc_data.topics
from dataclasses import dataclass
from pathlib import Path

import mindspore
import numpy as np
import yaml
from mindformers.core.lr import build_lr
from mindformers.core.optim import build_optim
from mindformers.models import build_network
from mindformers.tools.register import MindFormerConfig
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from mindformers_adaptive.wrapper import MFTrainOneStepCell, NoLossScaleUpdateCell, TrainOneStepWithLossScaleCell
from scripts.demo.prepare_corpus import cut_into_samples, read_standard_library

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "tiny_llama_cpu_fp16.yaml"
LORA = {"pet_type": "lora", "lora_rank": 8, "lora_alpha": 16, "lora_dropout": 0.0, "target_modules": ".*w[qkvo]"}

POINTS = 1024
WIDTH = 24


@dataclass(frozen=True)
class Data:
    """The training data of one seed, and held-out data to measure the result.

    Attributes:
        batch (Callable): returns the inputs of the network, a tuple of Tensors, for the number of a step, from 0.
        held_out (list[tuple]): inputs that are not used for training.
        variance (float): the variance of the held-out targets; 1.0 if the measure is a loss.
    """

    batch: object
    held_out: list
    variance: float = 1.0


def batches(samples, order, size):
    """Return a function that gives the batch of a step. The samples come in the given order, again and again."""

    def batch(step):
        rows = np.take(order, range(step * size, (step + 1) * size), mode="wrap")
        return tuple(Tensor(array[rows]) for array in samples)

    return batch


class Task:
    """A training task, and how its result is measured: by a loss, unless a subclass has another measure.

    A task has a ``name``, a text ``about`` it for the report, the number of ``steps``, and ``look_every``, the number
    of steps between two measurements of a run.
    """

    train_step_cell = TrainOneStepWithLossScaleCell
    measure = "loss"
    higher_is_better = False

    def network(self, dtype, seed):
        """Return the network with its loss function. ``seed`` initializes the weights."""
        mindspore.set_seed(seed)
        return self.new_network(dtype).set_train()

    def train_step(self, network, update_cell):
        """Return the train-step cell; its first two outputs are the loss and the overflow flag."""
        return self.train_step_cell(network, self.optimizer(network), scale_sense=update_cell).set_train()

    def quality(self, network, data):
        """Return the mean loss on the held-out data."""
        return float(np.mean([float(network(*inputs)) for inputs in data.held_out]))


class Branches(nn.Cell):
    """A small network with one output or several; returns the weighted squared error of its outputs.

    A Dense layer computes 24 values from the 2 inputs. For each output, two Dense layers follow (24 to 24, 24 to 1).
    After each layer but the last there is a tanh. Each output is multiplied by a factor.

    Args:
        dtype (mindspore.dtype): the dtype in which the Dense layers compute; factors and loss are float32.
        factors (Sequence[float]): the factor of each output.
        zero_last (bool): whether the last layers start at 0. Default: False.

    Inputs:
        - **points** (Tensor) - float32 of shape (points, 2).
        - **targets** (Tensor) - float32 of shape (points, outputs).
        - **weights** (Tensor) - the weights of the outputs in the loss, float32 of shape (outputs,).
    """

    def __init__(self, dtype, factors, zero_last=False):
        super().__init__()
        zeros = {"weight_init": "zeros", "bias_init": "zeros"} if zero_last else {}
        self.first = nn.Dense(2, WIDTH).to_float(dtype)
        self.middle = nn.CellList([nn.Dense(WIDTH, WIDTH).to_float(dtype) for _ in factors])
        self.last = nn.CellList([nn.Dense(WIDTH, 1, **zeros).to_float(dtype) for _ in factors])
        self.outputs = len(factors)
        self.factors = Tensor(factors, mstype.float32)

    def construct(self, points, targets, weights):
        shared = ops.tanh(self.first(points))
        outputs = ()
        for number in range(self.outputs):
            hidden = ops.tanh(self.middle[number](shared))
            outputs += (ops.cast(self.last[number](hidden), mstype.float32),)
        # Do not concatenate a single Tensor, because MindSpore prints a message about it.
        together = ops.concat(outputs, 1) if self.outputs > 1 else outputs[0]
        errors = ops.square(together * self.factors - targets)
        return (errors * weights).sum(1).mean()


@dataclass(frozen=True)
class Regression(Task):
    """Trains the network :class:`Branches` on all points at once, and measures R² of the last output.

    Attributes:
        name (str): the name of the task.
        about (str): what is trained, for the report.
        factors, zero_last: as in :class:`Branches`.
        targets (tuple[float], optional): the largest value of each output's targets. Default: None, the factors.
        weights (tuple[float]): the weights of the outputs in the loss.
        steps (int): the number of steps.
        learning_rate (float): the learning rate of Adam.
        beta2 (float): the ``beta2`` of Adam. Default: 0.999, as in MindSpore.
        burst (tuple): the first step of a burst, the step after its last, and the factor by which it multiplies the
            weight of the first output. Default: no step.
    """

    name: str
    about: str
    factors: tuple = (1.0,)
    targets: tuple | None = None
    weights: tuple = (1.0,)
    steps: int = 400
    learning_rate: float = 3e-3
    zero_last: bool = False
    beta2: float = 0.999
    burst: tuple = (0, 0, 1.0)

    measure = "R²"
    higher_is_better = True
    look_every = 10

    def new_network(self, dtype):
        return Branches(dtype, self.factors, self.zero_last)

    def optimizer(self, network):
        # The default eps of 1e-8 would hide small gradients from Adam, whatever the loss scale.
        return nn.Adam(network.trainable_params(), self.learning_rate, beta2=self.beta2, eps=1e-15)

    def data(self, seed):
        """Return the training and held-out data of this seed."""
        random = np.random.default_rng(seed)
        # Half of the points are held out.
        points = random.uniform(-1.0, 1.0, (2 * POINTS, 2))
        # The last output is hard to learn; any outputs before it are easier.
        easy = np.cos(4.0 * points[:, 0] + points[:, 1])
        hard = np.sin(4.0 * points[:, 0]) * np.cos(3.0 * points[:, 1])
        columns = [easy] * (len(self.factors) - 1) + [hard]
        targets = np.stack(columns, axis=1) * np.array(self.targets or self.factors)
        halves = zip(*(np.split(each.astype(np.float32), 2) for each in (points, targets)), strict=True)
        train, held_out = (tuple(map(Tensor, half)) for half in halves)
        first, end, factor = self.burst
        usual = Tensor(self.weights, mstype.float32)
        of_burst = Tensor((self.weights[0] * factor, *self.weights[1:]), mstype.float32)

        def batch(step):
            return (*train, of_burst if first <= step < end else usual)

        only_the_last = Tensor(np.eye(len(self.factors))[-1], mstype.float32)
        return Data(batch, [(*held_out, only_the_last)], float(targets[POINTS:, -1].var()))

    def quality(self, network, data):
        """Return R² of the network's last output column on the held-out data."""
        return 1.0 - float(network(*data.held_out[0])) / data.variance


SMALL_TASKS = {
    "damped": Regression(
        "damped output", "an output that is multiplied by 3e-3, as by a small residual factor", factors=(3e-3,)
    ),
    "zero": Regression(
        "zero-initialised last layer",
        "small targets, 1e-3, with a last layer that starts at 0 and a learning rate of 3e-5",
        targets=(1e-3,),
        steps=300,
        learning_rate=3e-5,
        zero_last=True,
    ),
    "auxiliary": Regression(
        "small auxiliary loss",
        "two outputs, of which the second has a weight of 1e-4 in the loss",
        factors=(1.0, 1.0),
        weights=(1.0, 1e-4),
    ),
    "moving": Regression(
        "moving ceiling",
        "two outputs, the second multiplied by 1e-3; the loss of the first weighs 2^12 times as much in steps 201-300",
        factors=(1.0, 1e-3),
        weights=(1.0, 1.0),
        steps=600,
        beta2=0.95,
        burst=(200, 300, 2.0**12),
    ),
}


class ConvolutionsWithLoss(nn.Cell):
    """Two convolutions with batch normalisation and a dense layer; returns the cross entropy of ten classes.

    Args:
        dtype (mindspore.dtype): the dtype in which convolutions and dense layer compute; the rest is float32.

    Inputs:
        - **images** (Tensor) - float32 of shape (images, 1, 8, 8).
        - **labels** (Tensor) - int32 of shape (images,).
    """

    def __init__(self, dtype):
        super().__init__()
        layers = []
        for inputs, outputs in ((1, 16), (16, 32)):
            layers += [nn.Conv2d(inputs, outputs, 3, pad_mode="same").to_float(dtype), nn.BatchNorm2d(outputs)]
            layers += [nn.ReLU(), nn.MaxPool2d(2, 2)]
        self.layers = nn.SequentialCell(*layers, nn.Flatten(), nn.Dense(32 * 2 * 2, 10).to_float(dtype))
        self.loss = nn.CrossEntropyLoss()

    def construct(self, images, labels):
        return self.loss(ops.cast(self.layers(images), mstype.float32), labels)


class Digits(Task):
    """Classification of 1797 handwritten digits of 8 times 8 pixels, from scikit-learn; a third of them is held out."""

    name = "handwritten digits"
    about = "two convolutions with batch normalisation"
    look_every = 20
    steps = 100

    # The network stays in training mode, so the held-out images are normalised by their own batch statistics.
    new_network = ConvolutionsWithLoss

    def optimizer(self, network):
        return nn.Adam(network.trainable_params(), 1e-3)

    def data(self, seed):
        """Return the data of this seed; the held-out images are the same for all seeds."""
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        samples = mixed((pixels / 16).astype(np.float32).reshape(-1, 1, 8, 8)), mixed(labels.astype(np.int32))
        held_out = len(labels) // 3
        order = np.random.default_rng(seed).permutation(len(labels) - held_out) + held_out
        return Data(batches(samples, order, size=32), [tuple(Tensor(array[:held_out]) for array in samples)])


class Llama(Task):
    """The demo's training of a Llama, with the samples in another order for each seed.

    Args:
        steps (int): the number of steps.
        **changes: values of the model's section in the YAML file, such as ``seq_length``, the bytes of a sample.
    """

    name = "the demo's Llama"
    look_every = 30
    held_out_batches = 8

    def __init__(self, steps, **changes):
        self.steps = steps
        self.config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
        self.model = self.config["model"]["model_config"]
        self.model.update(changes)
        self.about = f"bytes of Python's standard library, {self.model['seq_length']} a sample"
        max_norm = self.config["runner_wrapper"]["max_grad_norm"]
        self.train_step_cell = functools.partial(MFTrainOneStepCell, use_clip_grad=True, max_grad_norm=max_norm)

    def new_network(self, dtype):
        self.model["compute_dtype"] = "float16" if dtype == mstype.float16 else "float32"
        return build_network(MindFormerConfig(**copy.deepcopy(self.config["model"])))

    def optimizer(self, network):
        schedule = build_lr({**self.config["lr_schedule"], "total_steps": self.steps})
        return build_optim(self.config["optimizer"], {"params": network.trainable_params(), "learning_rate": schedule})

    def data(self, seed):
        """Return the data of this seed; the held-out samples are the same for all seeds."""
        size = self.model["batch_size"]
        samples = mixed(cut_into_samples(self.text(), self.model["seq_length"] + 1))
        samples, held_out = np.split(samples, [-self.held_out_batches * size])
        order = np.random.default_rng(seed).permutation(len(samples))
        held_out = np.split(held_out, self.held_out_batches)
        return Data(batches([samples], order, size), [(Tensor(rows),) for rows in held_out])

    text = staticmethod(read_standard_library)


class Lora(Llama):
    """A training of LoRA adapters on Python's help texts, after a first training of the demo's whole model in FP32.

    Args:
        steps (int): the number of steps of each of the two trainings.
        **changes: as for :class:`Llama`.
    """

    name = "LoRA of the demo's Llama"

    def __init__(self, steps, **changes):
        super().__init__(steps, **changes, pet_config=LORA)
        self.base = Llama(steps, **changes)
        self.about = f"trained before in FP32; help texts of Python, {self.model['seq_length']} bytes a sample"

    def network(self, dtype, seed):
        """Return the model with the weights of the first training, and with adapters that ``seed`` initializes."""
        network = super().network(dtype, seed)
        for weight in network.get_parameters():
            if not weight.requires_grad:
                weight.set_data(Tensor(self._trained[weight.name]))
        return network

    @functools.cached_property
    def _trained(self):
        """The weights of the model after its first training, arrays by name."""
        network, data = self.base.network(mstype.float32, 0), self.base.data(0)
        train_step = self.base.train_step(network, NoLossScaleUpdateCell())
        for step in range(self.steps):
            train_step(*data.batch(step))
        return {weight.name: weight.asnumpy().copy() for weight in network.get_parameters()}

    @staticmethod
    def text():
        """Return the help texts of Python's language reference as training data: uint8 of shape (bytes,)."""
        return np.frombuffer("\n".join(pydoc_data.topics.topics.values()).encode(), np.uint8)


def task_of(key, llama):
    """Return the training task with the given key; ``llama`` holds the arguments of the Llama tasks."""
    if key in SMALL_TASKS:
        return SMALL_TASKS[key]
    return Digits() if key == "digits" else {"llama": Llama, "lora": Lora}[key](**llama)


def mixed(samples):
    """Return the samples in a fixed random order, so that the held-out samples at the end are of all kinds."""
    return samples[np.random.default_rng(0).permutation(len(samples))]
