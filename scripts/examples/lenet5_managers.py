"""Train LeNet5 with each kind of loss scaling in MindSpore, and with adaptive loss scaling, on any device.

python scripts/examples/lenet5_managers.py --amp_level O3 --epochs 10
"""

import argparse

import mindspore
from lenet5 import LeNet5, create_dataset
from mindspore import nn
from mindspore.amp import DynamicLossScaleManager, FixedLossScaleManager
from mindspore.train import Callback, Model

from mindformers_adaptive import AdaptiveLossScaleManager, FixedScaleTrainOneStepCell, enable_loss_scale_on_cpu
from mindformers_adaptive.text.table import as_power_of_two


def fixed_skipping_overflows(network, loss_fn, amp_level):
    """A fixed scale; a step that overflows is skipped."""
    manager = FixedLossScaleManager(2.0**24)
    return Model(network, loss_fn, momentum(network), amp_level=amp_level, loss_scale_manager=manager)


def fixed_divided_by_the_optimizer(network, loss_fn, amp_level):
    """A fixed scale; no step is skipped, and the optimizer divides the gradients."""
    manager = FixedLossScaleManager(1024.0, drop_overflow_update=False)
    optimizer = momentum(network, loss_scale=1024.0)
    return Model(network, loss_fn, optimizer, amp_level=amp_level, loss_scale_manager=manager)


def fixed_for_any_optimizer(network, loss_fn, amp_level):
    """A fixed scale with an optimizer that does not divide the gradients; the train-step cell divides them."""
    optimizer = nn.AdamWeightDecay(network.trainable_params(), learning_rate=0.001)
    # This adds mixed precision and the loss function; without loss_scale_manager=None level O2 brings its own manager.
    unscaled = mindspore.amp.build_train_network(network, optimizer, loss_fn, amp_level, loss_scale_manager=None)
    return Model(FixedScaleTrainOneStepCell(unscaled.network, optimizer, loss_scale=1024.0))


def dynamic(network, loss_fn, amp_level):
    """A scale that follows the overflows, with one fixed window."""
    manager = DynamicLossScaleManager(init_loss_scale=2**24, scale_factor=2, scale_window=20)
    return Model(network, loss_fn, momentum(network), amp_level=amp_level, loss_scale_manager=manager)


def adaptive(network, loss_fn, amp_level):
    """A scale that follows the overflows, with a window that follows the scale."""
    manager = AdaptiveLossScaleManager(init_loss_scale=2**24, scale_factor=2, scale_window=20)
    return Model(network, loss_fn, momentum(network), amp_level=amp_level, loss_scale_manager=manager)


WAYS = [fixed_skipping_overflows, fixed_divided_by_the_optimizer, fixed_for_any_optimizer, dynamic, adaptive]


def momentum(network, **options):
    return nn.Momentum(network.trainable_params(), learning_rate=0.01, momentum=0.9, **options)


class StepRecorder(Callback):
    """Keeps the loss of every step and, if steps can be skipped, its overflow flag and the loss scale after it."""

    def __init__(self):
        self.losses, self.overflows, self.loss_scales = [], [], []

    def on_train_step_end(self, run_context):
        outputs = run_context.original_args().net_outputs
        loss, *scaling = outputs if isinstance(outputs, tuple) else (outputs,)
        self.losses.append(float(loss.asnumpy()))
        if scaling:
            self.overflows.append(bool(scaling[0].asnumpy()))
            self.loss_scales.append(float(scaling[1].asnumpy()))


def train(way, amp_level, epochs, batch_size=32):
    """Train from the same weights on the same data, 32 steps an epoch; return the StepRecorder."""
    mindspore.set_seed(0)
    recorder = StepRecorder()
    model = way(LeNet5(), nn.SoftmaxCrossEntropyWithLogits(reduction="mean"), amp_level)
    data = create_dataset(samples=32 * batch_size, batch_size=batch_size)
    model.train(epochs, data, callbacks=[recorder], dataset_sink_mode=False)
    return recorder


def table(amp_level, epochs):
    """Yield the lines of the comparison."""
    yield f"{'LeNet5, ' + amp_level:<34}{'steps':>6}{'skipped':>9}{'first loss':>12}{'last loss':>11}{'last scale':>12}"
    for way in WAYS:
        run = train(way, amp_level, epochs)
        last_scale = as_power_of_two(run.loss_scales[-1]) if run.loss_scales else "fixed"
        skipped = sum(run.overflows) if run.overflows else "never"
        name = way.__name__.replace("_", " ")
        yield (
            f"{name:<34}{len(run.losses):>6}{skipped:>9}{run.losses[0]:>12.4f}{run.losses[-1]:>11.4f}{last_scale:>12}"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--amp_level", default="O2", choices=["O0", "O1", "O2", "O3", "auto"])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--mode", default="graph", choices=["graph", "pynative"])
    arguments = parser.parse_args()
    mindspore.set_context(mode=mindspore.GRAPH_MODE if arguments.mode == "graph" else mindspore.PYNATIVE_MODE)
    # The one line that a CPU needs; it changes no result on other devices.
    enable_loss_scale_on_cpu()
    for line in table(arguments.amp_level, arguments.epochs):
        print(line, flush=True)


if __name__ == "__main__":
    main()
