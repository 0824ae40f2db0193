"""MindFormers' mcore models on a CPU.

Stand-ins replace only the operators that have no CPU kernel: RmsNorm, FlashAttentionScore, Outer and the backward pass
of Embedding; with experts also TopkExt, the dispatch of tokens and the grouped matrix products. Everything else is
MindFormers' own.
"""

import contextlib

import numpy as np
from mindformers.core.context.build_context import MFContextOperator
from mindformers.parallel_core.training_graph.base_models.common.embeddings import rotary_pos_embedding
from mindformers.parallel_core.training_graph.transformer import flash_attention, norm
from mindformers.tools.register import MindFormerConfig
from mindspore import dtype as mstype
from mindspore import mint, nn, ops

from scripts.ascend.mcore import BATCH, SEQ_LENGTH, VOCABULARY


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


class TopkOnCpu(nn.Cell):
    """Returns the largest elements along the last axis, and their places."""

    def construct(self, values, count):
        return ops.topk(values, count)

    def recompute(self, *_):
        return self


def experts_on_cpu(self, tokens, probs, routing_map, w1, w2, _=None):
    """Give every token to every expert, and multiply the outputs by the router's weights: 0 for experts not chosen."""
    w1 = ops.reshape(w1, (-1, self.hidden_size, self.moe_ffn_hidden_size * 2))
    w2 = ops.reshape(w2, (-1, self.moe_ffn_hidden_size, self.hidden_size))
    output = 0.0
    for expert in range(self.num_local_experts):
        gate, hidden = ops.split(ops.matmul(tokens, w1[expert]), self.moe_ffn_hidden_size, -1)
        weight = (probs * ops.cast(ops.equal(routing_map, expert), probs.dtype)).sum(-1, keepdims=True)
        hidden = gate * ops.sigmoid(gate) * hidden
        output = output + ops.matmul(hidden, w2[expert]) * ops.cast(weight, tokens.dtype)
    return output


# The operators of mcore models that a CPU lacks, with their stand-ins.
STAND_INS = (
    (norm, "FusedRMSNorm", norm.RMSNorm),
    (flash_attention, "FlashAttentionScore", FlashAttentionScoreOnCpu),
    (rotary_pos_embedding, "Outer", OuterOnCpu),
    (mint.nn.functional, "embedding", embedding_on_cpu),
)


def stand_ins_of_experts():
    """Return the stand-ins that models with experts need in addition."""
    from mindformers.parallel_core.training_graph.transformer.moe import ffn, router

    return (router, "TopkExt", TopkOnCpu), (ffn.FFNGroupedGEMM, "forward_func", experts_on_cpu)


@contextlib.contextmanager
def mcore_on_cpu(stand_ins=STAND_INS):
    """Make MindFormers use its mcore classes, with stand-ins for the operators that a CPU lacks."""
    originals = [(module, operator, getattr(module, operator)) for module, operator, _ in stand_ins]
    for module, operator, stand_in in stand_ins:
        setattr(module, operator, stand_in)
    if MFContextOperator.get_mf_ctx_instance() is None:
        MFContextOperator(MindFormerConfig(run_mode="train", model={"model_config": {}}))
    context = MFContextOperator.get_mf_ctx_instance()
    context.set_context(use_legacy=False)
    try:
        yield
    finally:
        context.set_context(use_legacy=True)
        for module, operator, original in originals:
            setattr(module, operator, original)


def rows(steps):
    """Return a batch of token sequences for each step; each sequence counts up from a random token."""
    starts = np.random.default_rng(0).integers(VOCABULARY, size=(steps, BATCH, 1))
    tokens = ((starts + np.arange(SEQ_LENGTH + 1)) % VOCABULARY).astype(np.int32)
    return [(row[:, :-1], row[:, 1:], np.ones((BATCH, SEQ_LENGTH), np.float32)) for row in tokens]
