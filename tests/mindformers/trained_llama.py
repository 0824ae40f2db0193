"""A smaller copy of the demo's Llama, and data for it, for trainings by MindFormers' Python API."""

import mindspore
import numpy as np
from mindformers import LlamaConfig, LlamaForCausalLM
from mindformers.tools.register import MindFormerConfig
from mindspore.dataset import NumpySlicesDataset

from tests.conftest import CONFIG

BATCH_SIZE, SEQ_LENGTH, BATCHES = 4, 32, 32
# The model learns to count up to this number, and then again from 0.
TOKENS = 15
SIZES = {"batch_size": BATCH_SIZE, "seq_length": SEQ_LENGTH, "num_layers": 1, "num_heads": 2}
SIZES |= {"hidden_size": 32, "multiple_of": 16}


def build_model():
    """Return a stock Llama of one layer that computes in FP16; the weights are the same each time."""
    mindspore.set_seed(0)
    section = MindFormerConfig(str(CONFIG)).model.model_config
    return LlamaForCausalLM(LlamaConfig(**{**section, **SIZES, "vocab_size": TOKENS + 1, "pad_token_id": TOKENS}))


def build_dataset():
    """Return batches of samples. The tokens of a sample count up from a random token.

    A sample has one token more than the model reads, because each token is the label of the token before.
    """
    starts = np.random.default_rng(0).integers(TOKENS, size=(BATCHES * BATCH_SIZE, 1))
    samples = ((starts + np.arange(SEQ_LENGTH + 1)) % TOKENS).astype(np.int32)
    return NumpySlicesDataset(samples, ["input_ids"], shuffle=False).batch(BATCH_SIZE)
