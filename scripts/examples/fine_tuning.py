"""Pre-train a tiny Llama, then fine-tune all its weights on answers only: SFT with a masked loss.

    python scripts/examples/fine_tuning.py
    python scripts/examples/fine_tuning.py --rule guided

The fine-tuning starts with a new loss scale, because the ceiling of the pre-training says nothing about the ceiling of
the fine-tuning.
"""

import argparse

import mindspore
import numpy as np
from mindformers import ContextConfig, init_context
from mindspore import nn
from mindspore.dataset import GeneratorDataset
from mindspore.train import Model
from tiny_llama import BATCH_SIZE, SEQ_LENGTH, STEPS, StepTable, build_dataset, build_model, make_update_cell

from mindformers_adaptive.wrapper import MFTrainOneStepCell

# LlamaConfig's ignore_token_id: a label with this value does not count in the loss.
IGNORED = -100
PROMPT = SEQ_LENGTH // 2


def answers():
    """Return prompts that count up, with answers that count down; labels of tokens in a prompt are ignored."""

    def samples():
        for start in np.random.default_rng(1).integers(15, size=STEPS * BATCH_SIZE):
            up = start + np.arange(PROMPT)
            down = up[-1] - np.arange(1, SEQ_LENGTH + 2 - PROMPT)
            tokens = (np.concatenate([up, down]) % 15).astype(np.int32)
            labels = tokens.copy()
            labels[:PROMPT] = IGNORED
            yield tokens, labels

    return GeneratorDataset(samples, column_names=["input_ids", "labels"], shuffle=False).batch(BATCH_SIZE)


def train(model, dataset, rule, learning_rate):
    optimizer = nn.AdamWeightDecay(model.trainable_params(), learning_rate)
    manager = make_update_cell(rule)
    network = MFTrainOneStepCell(model, optimizer, use_clip_grad=True, max_grad_norm=1.0, scale_sense=manager)
    Model(network.set_train()).train(1, dataset, callbacks=[StepTable()], dataset_sink_mode=False)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rule", choices=("adaptive", "guided"), default="adaptive")
    rule = parser.parse_args().rule
    init_context(use_parallel=False, context_config=ContextConfig(mode=0, device_target="CPU", device_id=0))
    pre_trained = build_model()
    train(pre_trained, build_dataset(), rule, learning_rate=3e-3)
    mindspore.save_checkpoint(pre_trained, "pre_trained.ckpt")
    model = build_model()
    # This checkpoint has only the weights. A checkpoint of a whole training would also have the loss-scaling state.
    mindspore.load_param_into_net(model, mindspore.load_checkpoint("pre_trained.ckpt"))
    train(model, answers(), rule, learning_rate=1e-3)


if __name__ == "__main__":
    main()
