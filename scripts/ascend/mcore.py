"""A tiny Qwen3 model, built from MindFormers' own mcore classes."""

import mindspore
from mindformers.models.qwen3.configuration_qwen3 import Qwen3Config
from mindformers.models.qwen3.modeling_qwen3_train import TrainingQwen3ForCausalLM
from mindformers.wrapper.wrapper import DataOrderWrapperCell

__all__ = ["BATCH", "SEQ_LENGTH", "VOCABULARY", "build_qwen3"]

BATCH, SEQ_LENGTH, VOCABULARY = 2, 16, 64


def build_qwen3(calculate_per_token_loss=False):
    """Return a Qwen3 of two layers that computes in FP16 and takes ``input_ids``, ``labels`` and ``loss_mask``."""
    mindspore.set_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=32,
        seq_length=SEQ_LENGTH,
        compute_dtype="fp16",
        params_dtype="fp32",
        layernorm_compute_dtype="fp32",
        softmax_compute_dtype="fp32",
        rotary_dtype="fp32",
        hidden_dropout=0.0,
        calculate_per_token_loss=calculate_per_token_loss,
    )
    return DataOrderWrapperCell(["input_ids", "labels", "loss_mask"], TrainingQwen3ForCausalLM(config))
