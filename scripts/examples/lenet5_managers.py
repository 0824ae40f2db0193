"""Train LeNet5 with each kind of loss scaling in MindSpore, and with adaptive loss scaling, on any device.

python scripts/examples/lenet5_managers.py
"""

import mindspore
from lenet5 import LeNet5, create_dataset
from mindspore import nn
from mindspore.amp import DynamicLossScaleManager, FixedLossScaleManager
from mindspore.train import Callback, Model

from mindformers_adaptive import AdaptiveLossScaleManager, FixedScaleTrainOneStepCell, enable_loss_scale_in_model
from mindformers_adaptive.text.table import as_power_of_two

AMP_LEVEL, EPOCHS = "O2", 2


def fixed_skipping_overflows(network, loss_fn):
    """Use a fixed loss scale, and skip a step that overflows."""
    manager = FixedLossScaleManager(2.0**24)
    return Model(network, loss_fn, momentum(network), amp_level=AMP_LEVEL, loss_scale_manager=manager)


def fixed_divided_by_the_optimizer(network, loss_fn):
    """Use a fixed loss scale and skip no step. The optimizer divides the gradients."""
    manager = FixedLossScaleManager(1024.0, drop_overflow_update=False)
    optimizer = momentum(network, loss_scale=1024.0)
    return Model(network, loss_fn, optimizer, amp_level=AMP_LEVEL, loss_scale_manager=manager)


def fixed_for_any_optimizer(network, loss_fn):
    """Use a fixed loss scale. The optimizer does not divide the gradients, so the train-step cell divides them."""
    optimizer = nn.AdamWeightDecay(network.trainable_params(), learning_rate=0.001)
    # build_train_network() adds mixed precision and the loss function. Pass loss_scale_manager=None, because level O2
    # otherwise adds a loss-scale manager.
    unscaled = mindspore.amp.build_train_network(network, optimizer, loss_fn, AMP_LEVEL, loss_scale_manager=None)
    return Model(FixedScaleTrainOneStepCell(unscaled.network, optimizer, loss_scale=1024.0))


def dynamic(network, loss_fn):
    """Use a dynamic loss scale: an overflow lowers it, and a fixed window of steps without overflow raises it."""
    manager = DynamicLossScaleManager(init_loss_scale=2**24, scale_factor=2, scale_window=20)
    return Model(network, loss_fn, momentum(network), amp_level=AMP_LEVEL, loss_scale_manager=manager)


def adaptive(network, loss_fn):
    """Use an adaptive loss scale: a dynamic loss scale whose window of steps adapts to the overflows."""
    manager = AdaptiveLossScaleManager(init_loss_scale=2**24, scale_factor=2, scale_window=20)
    return Model(network, loss_fn, momentum(network), amp_level=AMP_LEVEL, loss_scale_manager=manager)


WAYS = [fixed_skipping_overflows, fixed_divided_by_the_optimizer, fixed_for_any_optimizer, dynamic, adaptive]


def momentum(network, **options):
    return nn.Momentum(network.trainable_params(), learning_rate=0.01, momentum=0.9, **options)


class StepRecorder(Callback):
    """Records the loss of every step and, if steps can be skipped, the overflow flag and the next loss scale."""

    def __init__(self):
        self.losses, self.overflows, self.loss_scales = [], [], []

    def on_train_step_end(self, run_context):
        outputs = run_context.original_args().net_outputs
        loss, *scaling = outputs if isinstance(outputs, tuple) else (outputs,)
        self.losses.append(float(loss.asnumpy()))
        if scaling:
            self.overflows.append(bool(scaling[0].asnumpy()))
            self.loss_scales.append(float(scaling[1].asnumpy()))


def train(way, steps_of_an_epoch=-1):
    """Train from fixed initial weights on fixed data; return the StepRecorder. -1: the steps of all data."""
    mindspore.set_seed(0)
    recorder = StepRecorder()
    model = way(LeNet5(), nn.SoftmaxCrossEntropyWithLogits(reduction="mean"))
    batches = create_dataset(samples=512, batch_size=16).take(steps_of_an_epoch)
    model.train(EPOCHS, batches, callbacks=[recorder], dataset_sink_mode=False)
    return recorder


def main():
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    # Only a CPU needs this line, which changes no result on other devices.
    enable_loss_scale_in_model()
    print(f"{'LeNet5, ' + AMP_LEVEL:<34} steps  skipped  first loss  last loss  last scale", flush=True)
    for way in WAYS:
        run = train(way)
        name, (first, *_, last) = way.__name__.replace("_", " "), run.losses
        last_scale = as_power_of_two(run.loss_scales[-1]) if run.loss_scales else "fixed"
        skipped = sum(run.overflows) if run.overflows else "never"
        print(f"{name:<34}{len(run.losses):>6}{skipped:>9}{first:>12.4f}{last:>11.4f}{last_scale:>12}", flush=True)


if __name__ == "__main__":
    main()
