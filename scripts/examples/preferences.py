"""Direct preference optimisation (DPO) of a tiny Llama in FP16, with MFTrainOneStepCell.

    python scripts/examples/preferences.py
    python scripts/examples/preferences.py --rule guided

Of two answers to a prompt, the one that counts on is preferred to the one that counts back. The log-probabilities of
the model before the training, to which DPO compares, are calculated beforehand and come with the data.
"""

import argparse

import numpy as np
from mindformers import ContextConfig, init_context
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.dataset import NumpySlicesDataset
from mindspore.train import Model
from tiny_llama import BATCH_SIZE, SEQ_LENGTH, STEPS, StepTable, build_model, make_update_cell

from mindformers_adaptive.wrapper import MFTrainOneStepCell

PROMPT = SEQ_LENGTH // 2
BETA = 0.1


class AnswerLogProbability(nn.Cell):
    """The log-probability of each sample's tokens after the prompt, float32 of shape (samples,)."""

    def __init__(self, llama):
        super().__init__()
        self.llama = llama

    def construct(self, tokens):
        hidden = self.llama.model(tokens[:, :-1])
        logits = ops.cast(self.llama.lm_head(hidden), mstype.float32).reshape(tokens.shape[0], SEQ_LENGTH, -1)
        each = ops.gather_elements(ops.log_softmax(logits, -1), 2, tokens[:, 1:].expand_dims(-1))
        return each.squeeze(-1)[:, PROMPT - 1 :].sum(-1)


class PreferenceLoss(nn.Cell):
    """-log sigmoid(beta * (gain of the preferred answer - gain of the other)), the mean over the pairs."""

    def __init__(self, log_probability):
        super().__init__()
        self.log_probability = log_probability

    def construct(self, preferred, other, preferred_before, other_before):
        gain = self.log_probability(preferred) - preferred_before
        gain_of_other = self.log_probability(other) - other_before
        # softplus(-x) is -log sigmoid(x), and finite for every x.
        return ops.softplus(-BETA * (gain - gain_of_other)).mean()


def pairs():
    """Return the preferred samples and the others, int32 of shape (pairs, tokens)."""
    start = np.random.default_rng(2).integers(15, size=(STEPS * BATCH_SIZE, 1))
    place = np.arange(SEQ_LENGTH + 1)
    back = np.where(place < PROMPT, place, 2 * PROMPT - 2 - place)
    return ((start + place) % 15).astype(np.int32), ((start + back) % 15).astype(np.int32)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rule", choices=("adaptive", "guided"), default="adaptive")
    rule = parser.parse_args().rule
    init_context(use_parallel=False, context_config=ContextConfig(mode=0, device_target="CPU", device_id=0))
    log_probability = AnswerLogProbability(build_model())
    samples = pairs()
    before = [
        np.concatenate([log_probability(Tensor(batch)).asnumpy() for batch in np.split(one, STEPS)]) for one in samples
    ]
    columns = ["preferred", "other", "preferred_before", "other_before"]
    dataset = NumpySlicesDataset((*samples, *before), columns, shuffle=False).batch(BATCH_SIZE)
    network = PreferenceLoss(log_probability)
    optimizer = nn.AdamWeightDecay(network.trainable_params(), learning_rate=1e-3)
    train_network = MFTrainOneStepCell(
        network, optimizer, use_clip_grad=True, max_grad_norm=1.0, scale_sense=make_update_cell(rule)
    )
    Model(train_network.set_train()).train(1, dataset, callbacks=[StepTable()], dataset_sink_mode=False)


if __name__ == "__main__":
    main()
