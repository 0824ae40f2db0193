"""MindFormers' mcore models on a CPU, and a network that returns four losses like these models.

Stand-ins replace only the operators that have no CPU kernel: RmsNorm, FlashAttentionScore, Outer and the backward pass
of Embedding. Everything else is MindFormers' own.
"""

import contextlib

import mindspore
import numpy as np
import pytest

pytest.importorskip("mindformers.models.qwen3.modeling_qwen3_train", reason="MindFormers before 1.7 cannot train Qwen3")

from mindformers.core.context.build_context import MFContextOperator
from mindformers.models.qwen3.configuration_qwen3 import Qwen3Config
from mindformers.models.qwen3.modeling_qwen3_train import TrainingQwen3ForCausalLM
from mindformers.parallel_core.training_graph.base_models.common.embeddings import rotary_pos_embedding
from mindformers.parallel_core.training_graph.transformer import flash_attention, norm
from mindformers.tools.register import MindFormerConfig
from mindformers.wrapper.wrapper import DataOrderWrapperCell
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore import dtype as mstype

# The shape of a batch of tokens, and the number of different tokens.
BATCH, SEQ_LENGTH, VOCABULARY = 2, 16, 64
# The losses that MindFormers prints with print_separate_loss.
LOSSES = ("lm_loss", "mtp_loss", "aux_loss", "indexer_loss")


def build_qwen3(**options):
    """Return a Qwen3 of two layers in FP16, with inputs ``input_ids``, ``labels`` and ``loss_mask``."""
    mindspore.set_seed(0)
    sizes = {"vocab_size": VOCABULARY, "seq_length": SEQ_LENGTH, "max_position_embeddings": 32, "hidden_size": 32}
    sizes |= {"intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    # Compute in FP16, but keep weights, normalisation, softmax and rotary embedding in FP32.
    single = ("params_dtype", "layernorm_compute_dtype", "softmax_compute_dtype", "rotary_dtype")
    dtypes = {**dict.fromkeys(single, "fp32"), "compute_dtype": "fp16"}
    config = Qwen3Config(**sizes, **dtypes, head_dim=16, hidden_dropout=0.0, **options)
    return DataOrderWrapperCell(["input_ids", "labels", "loss_mask"], TrainingQwen3ForCausalLM(config))


class OuterOnCpu(nn.Cell):
    """Computes the outer product of two vectors."""

    def construct(self, first, second):
        return ops.reshape(first, (-1, 1)) * second

    def shard(self, *_):
        return self


def embedding_on_cpu(ids, weight):
    return ops.gather(weight, ids, 0)


class FlashAttentionScoreOnCpu(nn.Cell):
    """Attention over (batch, heads, sequence, width), no dropout; a mask of 1 hides a key, and the softmax is FP32."""

    def __init__(self, head_num, scale_value, keep_prob, input_layout, **_):
        super().__init__()
        assert (keep_prob, input_layout) == (1.0, "BNSD"), "This stand-in supports only the layout BNSD without dropout"
        self.scale = scale_value
        self.matmul, self.matmul_transposed = ops.BatchMatMul(), ops.BatchMatMul(transpose_b=True)
        self.softmax, self.cast = ops.Softmax(), ops.Cast()

    def construct(self, query, key, value, alibi_mask, dropout_mask, padding_mask, mask, prefix):
        groups = query.shape[1] // key.shape[1]
        key, value = ops.repeat_elements(key, groups, 1), ops.repeat_elements(value, groups, 1)
        scores = self.cast(self.matmul_transposed(query, key), mstype.float32) * self.scale
        scores = scores - self.cast(mask, mstype.float32) * 10000.0
        return 0, 0, 0, self.matmul(self.cast(self.softmax(scores), query.dtype), value)


# The operators of mcore models that a CPU lacks, with their stand-ins.
STAND_INS = (
    (norm, "FusedRMSNorm", norm.RMSNorm),
    (flash_attention, "FlashAttentionScore", FlashAttentionScoreOnCpu),
    (rotary_pos_embedding, "Outer", OuterOnCpu),
    (mint.nn.functional, "embedding", embedding_on_cpu),
)


@contextlib.contextmanager
def mcore_on_cpu(monkeypatch):
    """Make MindFormers use its mcore classes, with stand-ins for the operators that a CPU lacks."""
    for module, operator, stand_in in STAND_INS:
        monkeypatch.setattr(module, operator, stand_in)
    if MFContextOperator.get_mf_ctx_instance() is None:
        MFContextOperator(MindFormerConfig(run_mode="train", model={"model_config": {}}))
    context = MFContextOperator.get_mf_ctx_instance()
    context.set_context(use_legacy=False)
    yield
    context.set_context(use_legacy=True)


def rows(steps):
    """Return a batch of token sequences for each step; each sequence counts up from a random token."""
    starts = np.random.default_rng(0).integers(VOCABULARY, size=(steps, BATCH, 1))
    tokens = ((starts + np.arange(SEQ_LENGTH + 1)) % VOCABULARY).astype(np.int32)
    return [(row[:, :-1], row[:, 1:], np.ones((BATCH, SEQ_LENGTH), np.float32)) for row in tokens]


class FourLosses(nn.Cell):
    """Returns four losses as mcore models do, each an FP16 weight times an input, so that each can overflow alone."""

    def __init__(self, per_token=False):
        super().__init__(auto_prefix=False)
        self.model = build_qwen3().network
        self.per_token = per_token
        for name in LOSSES:
            # MindFormers' callback prints losses from Parameters that are named like the losses. So the weights of
            # this network need other names.
            setattr(self, name, Parameter(Tensor([0.5], mstype.float32), name=f"weight_of_{name}"))
        self.tokens = Tensor([4.0], mstype.float32)
        self.cast = ops.Cast()

    def get_gpt_transformer_config(self):
        return self.model.get_gpt_transformer_config()

    def trainable_params(self, recurse=True):
        return [getattr(self, name) for name in LOSSES]

    def loss(self, weight, factor):
        product = self.cast(weight, mstype.float16) * self.cast(factor, mstype.float16)
        return self.cast(product, mstype.float32)

    def construct(self, factors):
        lm_loss = self.loss(self.lm_loss, factors[0:1])
        mtp_loss = self.loss(self.mtp_loss, factors[1:2])
        aux_loss = self.loss(self.aux_loss, factors[2:3])
        indexer_loss = self.loss(self.indexer_loss, factors[3:4])
        if self.per_token:
            return lm_loss, self.tokens, mtp_loss, self.tokens, aux_loss, indexer_loss
        return lm_loss, mtp_loss, aux_loss, indexer_loss
