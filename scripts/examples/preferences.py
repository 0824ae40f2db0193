"""Direct preference optimisation (DPO) of the demo's Llama in FP16, with MFTrainOneStepCell.

    python scripts/examples/preferences.py
    python scripts/examples/preferences.py --rule guided --record output/loss_scale_record.jsonl

MindFormers builds the network that configs/tiny_llama_cpu_fp16.yaml describes. Each prompt has two answers: the
answer that counts on is preferred to the answer that counts back. DPO compares with the log-probabilities of the model
before the training, so these are calculated first and added to the data as columns.
"""

import argparse
from pathlib import Path

import mindspore
import numpy as np
from mindformers import ContextConfig, MindFormerConfig, init_context
from mindformers.models import build_network
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.dataset import NumpySlicesDataset
from mindspore.train import Model
from tiny_llama import StepTable, make_update_cell

from mindformers_adaptive import LossScaleMonitor
from mindformers_adaptive.wrapper import MFTrainOneStepCell

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "tiny_llama_cpu_fp16.yaml"
STEPS = 16
BETA = 0.1


class AnswerLogProbability(nn.Cell):
    """Returns the log-probability of the answer, the second half of each sample, as float32 of shape (samples,)."""

    def __init__(self, llama):
        super().__init__()
        self.llama = llama

    def construct(self, tokens):
        hidden = self.llama.model(tokens[:, :-1])
        samples, length = tokens.shape
        logits = ops.cast(self.llama.lm_head(hidden), mstype.float32).reshape(samples, length - 1, -1)
        each = ops.gather_elements(ops.log_softmax(logits, -1), 2, tokens[:, 1:].expand_dims(-1))
        return each.squeeze(-1)[:, length // 2 - 1 :].sum(-1)


class PreferenceLoss(nn.Cell):
    """The loss of DPO: the mean of -log sigmoid(beta * (gain of the preferred answer - gain of the other answer)).

    The gain of an answer is its log-probability, minus its log-probability before the training.
    """

    def __init__(self, log_probability):
        super().__init__()
        self.log_probability = log_probability

    def construct(self, preferred, other, preferred_before, other_before):
        gain = self.log_probability(preferred) - preferred_before
        gain_of_other = self.log_probability(other) - other_before
        # softplus(-x) is -log sigmoid(x), and finite for every x.
        return ops.softplus(-BETA * (gain - gain_of_other)).mean()


def pairs(number, length):
    """Return two int32 arrays of shape (number, length) with byte values: the preferred and the other samples."""
    start = np.random.default_rng(2).integers(256, size=(number, 1))
    position, prompt = np.arange(length), length // 2
    back = np.where(position < prompt, position, 2 * prompt - 2 - position)
    return ((start + position) % 256).astype(np.int32), ((start + back) % 256).astype(np.int32)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rule", choices=("adaptive", "guided"), default="adaptive")
    parser.add_argument("--layers", type=int, help="of the model (default: as in the YAML file)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of the training (default: {STEPS})")
    parser.add_argument("--record", help="file for the record of the run, which analyze and plot read")
    arguments = parser.parse_args()
    init_context(use_parallel=False, context_config=ContextConfig(mode=0, device_target="CPU", device_id=0))
    model = MindFormerConfig(str(CONFIG)).model
    model.model_config.num_layers = arguments.layers or model.model_config.num_layers
    mindspore.set_seed(0)
    log_probability = AnswerLogProbability(build_network(model))
    batch_size, length = model.model_config.batch_size, model.model_config.seq_length + 1
    samples = pairs(arguments.steps * batch_size, length)
    before = [
        np.concatenate([log_probability(Tensor(batch)).asnumpy() for batch in np.split(part, arguments.steps)])
        for part in samples
    ]
    columns = ["preferred", "other", "preferred_before", "other_before"]
    dataset = NumpySlicesDataset((*samples, *before), columns, shuffle=False).batch(batch_size)
    network = PreferenceLoss(log_probability)
    optimizer = nn.AdamWeightDecay(network.trainable_params(), learning_rate=1e-4)
    train_network = MFTrainOneStepCell(
        network, optimizer, use_clip_grad=True, max_grad_norm=1.0, scale_sense=make_update_cell(arguments.rule)
    )
    callbacks = [StepTable(), *([LossScaleMonitor(arguments.record)] if arguments.record else [])]
    Model(train_network.set_train()).train(1, dataset, callbacks=callbacks, dataset_sink_mode=False)


if __name__ == "__main__":
    main()
