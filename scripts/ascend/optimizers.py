"""MindFormers' optimizers with changing learning rates, averaged weights, and groups of weights."""

from mindformers.core import optim
from mindspore import nn

# A learning rate reaches its minimum after this many steps.
DECAY_STEPS = 30


def schedule(learning_rate=0.01):
    return nn.CosineDecayLR(learning_rate / 10, learning_rate, DECAY_STEPS)


def averaging(network):
    """Return MindFormers' AdamW that replaces the weights every few steps by an exponential average of the weights."""
    return optim.PmaAdamW(
        network.trainable_params(), schedule(), fused_num=2, interleave_step=3, fused_algo="ema", ema_alpha=0.2
    )


def grouped(network):
    """Return an optimizer with separate learning rates for biases and other weights."""
    weights = [weight for weight in network.trainable_params() if "bias" not in weight.name]
    biases = [weight for weight in network.trainable_params() if "bias" in weight.name]
    groups = [{"params": weights, "lr": schedule()}, {"params": biases, "lr": schedule(0.1)}]
    return optim.AdamW([*groups, {"order_params": network.trainable_params()}], schedule())
