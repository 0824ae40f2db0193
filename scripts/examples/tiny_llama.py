"""Shared by the examples in this folder: a tiny Llama for a CPU, data, and a table of the training steps."""

import mindspore
import numpy as np
from mindformers.models.llama import LlamaConfig, LlamaForCausalLM
from mindspore.dataset import GeneratorDataset
from mindspore.train import Callback

from mindformers_adaptive.wrapper import AdaptiveLossScaleUpdateCell, GradientGuidedLossScaleUpdateCell

BATCH_SIZE = 4
SEQ_LENGTH = 32
STEPS = 32


def build_model():
    """Return MindFormers' Llama with one layer, which computes in FP16 and can run on a CPU."""
    mindspore.set_seed(0)
    config = LlamaConfig(
        batch_size=BATCH_SIZE,
        seq_length=SEQ_LENGTH,
        hidden_size=32,
        num_layers=1,
        num_heads=2,
        vocab_size=16,
        pad_token_id=15,
        compute_dtype="float16",
        param_init_type="float32",
        # The last three arguments are needed on a CPU.
        use_flash_attention=False,
        use_rope_slice=True,
        fused_rms_norm=False,
    )
    return LlamaForCausalLM(config)


def build_dataset():
    """Return samples that count up from a random token, modulo 15. A sample has one token more than the model reads."""

    def samples():
        starts = np.random.default_rng(0).integers(15, size=STEPS * BATCH_SIZE)
        for start in starts:
            yield ((start + np.arange(SEQ_LENGTH + 1)) % 15).astype(np.int32)

    return GeneratorDataset(samples, column_names=["input_ids"], shuffle=False).batch(BATCH_SIZE)


def make_update_cell(rule):
    """Return the update cell of a rule, "adaptive" or "guided"."""
    if rule == "guided":
        return GradientGuidedLossScaleUpdateCell(2**24)
    # Scale windows of 1 to 4 steps, instead of the usual 20 to 1000, so that the window changes within a few steps.
    return AdaptiveLossScaleUpdateCell(2**24, 2, scale_window=1, max_scale_window=4, min_scale_window=1)


class StepTable(Callback):
    """Collects a table row for each training step, and prints the table of all steps when the training ends.

    ``loss_scale`` is the scale that the step used; ``next_loss_scale`` and ``scale_window`` are values after it.
    """

    def __init__(self):
        super().__init__()
        self.rows = []
        self.loss_scale = None

    def on_train_begin(self, run_context):
        self.loss_scale = float(run_context.original_args().train_network.scale_sense.asnumpy())

    def on_train_step_end(self, run_context):
        params = run_context.original_args()
        loss, overflow, next_loss_scale, _, global_norm = (float(output) for output in params.net_outputs)
        # 0 stands for a rule without a scale window.
        window = params.train_network.loss_scaling_manager.state().get("scale_window", 0)
        self.rows.append(
            f"{params.cur_step_num:4} {loss:8.4f} {bool(overflow)!s:>9} {self.loss_scale:12.0f} "
            f"{next_loss_scale:17.0f} {window:14} {global_norm:13.4f}"
        )
        self.loss_scale = next_loss_scale

    def on_train_end(self, run_context):
        print("step     loss  overflow   loss_scale   next_loss_scale   scale_window   global_norm")
        print("\n".join(self.rows))
