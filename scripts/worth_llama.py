"""The demo's Llama as a task: the model, optimizer and text of configs/tiny_llama_cpu_fp16.yaml."""

import functools
from pathlib import Path

import mindspore
import numpy as np
import yaml
from mindformers.core.lr import CosineWithWarmUpLR
from mindformers.core.optim import AdamW
from mindformers.models.llama import LlamaConfig, LlamaForCausalLM
from mindspore import Tensor
from mindspore import dtype as mstype
from prepare_corpus import cut_into_samples, read_standard_library
from worth_tasks import Data

from mindformers_adaptive.wrapper import MFTrainOneStepCell

__all__ = ["CONFIG", "Llama"]

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "tiny_llama_cpu_fp16.yaml"
HELD_OUT_BATCHES = 8


class Llama:
    """The demo's training, with samples drawn anew for each seed.

    Args:
        steps (int): how many.
        seq_length (int, optional): bytes of a sample. Default: None, as in the YAML file.
    """

    name = "the demo's Llama"
    measure = "loss"
    higher_is_better = False
    look_every = 30

    def __init__(self, steps, seq_length=None):
        self.config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
        self.model = self.config["model"]["model_config"]
        self.model.pop("type")
        self.steps = steps
        if seq_length is not None:
            self.model["seq_length"] = seq_length
        self.about = f"bytes of Python's standard library, {self.model['seq_length']} a sample"

    def network(self, dtype, seed):
        """Return the model with its loss and the weights of this seed."""
        mindspore.set_seed(seed)
        compute_dtype = "float16" if dtype == mstype.float16 else "float32"
        return LlamaForCausalLM(LlamaConfig(**{**self.model, "compute_dtype": compute_dtype})).set_train()

    def train_step(self, network, update_cell):
        """Return the train-step cell; its first two outputs are the loss and the overflow flag."""
        schedule, optimizer = dict(self.config["lr_schedule"]), dict(self.config["optimizer"])
        schedule.pop("type")
        optimizer.pop("type")
        learning_rate = CosineWithWarmUpLR(**{**schedule, "total_steps": self.steps})
        optimizer = AdamW(network.trainable_params(), learning_rate, **optimizer)
        max_norm = self.config["runner_wrapper"]["max_grad_norm"]
        return MFTrainOneStepCell(
            network, optimizer, use_clip_grad=True, max_grad_norm=max_norm, scale_sense=update_cell
        ).set_train()

    def data(self, seed):
        """Return the Data of this seed; the last part of the text is held out, the same for all seeds."""
        samples, size = text(self.model["seq_length"] + 1), self.model["batch_size"]
        held_out = samples[-HELD_OUT_BATCHES * size :]
        held_out = [(Tensor(rows),) for rows in np.split(held_out, HELD_OUT_BATCHES)]
        order = np.random.default_rng(seed).permutation(len(samples) - HELD_OUT_BATCHES * size)

        def batch(step):
            return (Tensor(samples[np.take(order, range(step * size, (step + 1) * size), mode="wrap")]),)

        return Data(batch, held_out)

    def quality(self, network, data):
        """Return the mean loss on text that was not trained on."""
        return float(np.mean([float(network(*inputs)) for inputs in data.held_out]))


@functools.cache
def text(length):
    """Samples of so many bytes, int32, mixed once, so that what is held out is of all modules."""
    samples = cut_into_samples(read_standard_library(), length)
    return samples[np.random.default_rng(0).permutation(len(samples))]
