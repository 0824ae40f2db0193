"""The trainings of harm.py: a train step in FP16, and its batches."""

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass

import mindspore
import numpy as np
from mindspore import Tensor, nn
from mindspore import dtype as mstype

from mindformers_adaptive.wrapper import AdaptiveLossScaleUpdateCell, MFTrainOneStepCell, TrainOneStepWithLossScaleCell
from scripts.studies.reporting import ROOT
from scripts.studies.worth_tasks import task_of

# The examples import each other from their own folder.
sys.path.append(str(ROOT / "scripts" / "examples"))

LLAMA = {"steps": 400, "seq_length": 32}
START = 2.0**16
# The stand-ins of mcore models stay until the process of their training exits.
UNTIL_EXIT = contextlib.ExitStack()


@dataclass(frozen=True)
class Training:
    """A training whose gradients are measured.

    Attributes:
        train_step (Cell): trains in FP16 with adaptive scaling.
        batch (Callable): returns the inputs of the train step, a tuple of Tensors, for the number of a step, from 0.
    """

    train_step: nn.Cell
    batch: Callable


def update_cell(micro_batches=1):
    # The loss of a micro-batch is divided by their number, so that its loss scale has to be larger by this factor.
    return AdaptiveLossScaleUpdateCell(START * micro_batches, 2, 20)


def of_task(key, micro_batches=1):
    """Return a training of worth_it.py, whose loss is divided by the number of micro-batches."""
    task = task_of(key, LLAMA)
    network = task.network(mstype.float16, 0)
    divided = network if micro_batches == 1 else Divided(network, micro_batches).set_train()
    return Training(task.train_step(divided, update_cell(micro_batches)), task.data(0).batch)


class Divided(nn.Cell):
    """Returns the loss of a network divided by the number of micro-batches."""

    def __init__(self, network, micro_batches):
        super().__init__(auto_prefix=False)
        self.network = network
        self.micro_batches = micro_batches

    def construct(self, *inputs):
        return self.network(*inputs) / self.micro_batches


def lenet5():
    """Return the training of the LeNet5 example, with mixed precision of level O2."""
    from lenet5 import LeNet5, create_dataset

    mindspore.set_seed(0)
    network, loss = LeNet5(), nn.SoftmaxCrossEntropyWithLogits(reduction="mean")
    optimizer = nn.Momentum(network.trainable_params(), learning_rate=0.01, momentum=0.9)
    unscaled = mindspore.amp.build_train_network(network, optimizer, loss, "O2", loss_scale_manager=None)
    batches = list(create_dataset().create_tuple_iterator())
    train_step = TrainOneStepWithLossScaleCell(unscaled.network, optimizer, scale_sense=update_cell())
    return Training(train_step.set_train(), lambda step: tuple(batches[step % len(batches)]))


def policy_gradient():
    """Return the training of the policy-gradient example. Its rewards are 4096 times as high in one step of 50."""
    import policy_gradient as example

    class PolicyLoss(nn.Cell):
        def __init__(self, policy):
            super().__init__(auto_prefix=False)
            self.policy = policy

        def construct(self, states, actions, advantages):
            return example.policy_loss(self.policy, states, actions, advantages)

    mindspore.set_seed(0)
    policy = example.make_policy()
    network = PolicyLoss(policy)
    optimizer = nn.Adam(policy.trainable_params(), learning_rate=1e-2)
    train_step = MFTrainOneStepCell(network, optimizer, use_clip_grad=True, scale_sense=update_cell())

    def batch(step):
        _, *inputs = example.sampled(policy, np.random.default_rng(step), (step + 1) % example.SPIKE_EVERY == 0)
        return tuple(inputs)

    return Training(train_step.set_train(), batch)


def preferences():
    """Return the training of the example for direct preference optimisation (DPO), with new prompts in each step."""
    import preferences as example
    from mindformers import MindFormerConfig
    from mindformers.models import build_network

    mindspore.set_seed(0)
    model = MindFormerConfig(str(example.CONFIG)).model
    log_probability = example.AnswerLogProbability(build_network(model))
    size, length = model.model_config.batch_size, model.model_config.seq_length + 1
    prompts = example.pairs(example.STEPS * size, length)
    split = [np.split(part, example.STEPS) for part in prompts]
    batches = [tuple(map(Tensor, pair)) for pair in zip(*split, strict=True)]
    batches = [(*pair, *(Tensor(log_probability(tokens).asnumpy()) for tokens in pair)) for pair in batches]
    network = example.PreferenceLoss(log_probability)
    optimizer = nn.AdamWeightDecay(network.trainable_params(), learning_rate=1e-4)
    train_step = MFTrainOneStepCell(network, optimizer, use_clip_grad=True, scale_sense=update_cell())
    return Training(train_step.set_train(), lambda step: batches[step % len(batches)])


def mcore(builder):
    """Return the training of a tiny mcore model, with stand-ins for the operators that a CPU lacks."""
    from scripts.ascend import mcore as models
    from scripts.studies.mcore_on_cpu import STAND_INS, mcore_on_cpu, rows, stand_ins_of_experts

    UNTIL_EXIT.enter_context(mcore_on_cpu((*STAND_INS, *stand_ins_of_experts())))
    network = getattr(models, builder)()
    optimizer = nn.Adam(network.trainable_params(), 1e-3)
    train_step = MFTrainOneStepCell(network, optimizer, use_clip_grad=True, scale_sense=update_cell())
    batches = [tuple(map(Tensor, batch)) for batch in rows(512)]
    return Training(train_step.set_train(), lambda step: batches[step])
