"""A network that returns four losses like MindFormers' mcore models, which run on a CPU with stand-ins."""

import pytest

pytest.importorskip("mindformers.models.qwen3.modeling_qwen3_train", reason="MindFormers before 1.7 cannot train Qwen3")

from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

from scripts.ascend.mcore import build_qwen3
from scripts.studies.mcore_on_cpu import STAND_INS, mcore_on_cpu, rows

__all__ = ["LOSSES", "STAND_INS", "FourLosses", "build_qwen3", "mcore_on_cpu", "rows"]

# The losses that MindFormers prints with print_separate_loss.
LOSSES = ("lm_loss", "mtp_loss", "aux_loss", "indexer_loss")


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
