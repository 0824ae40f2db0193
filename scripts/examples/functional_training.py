"""Functional training of LeNet5 with AdaptiveLossScaler, compiled with mindspore.jit.

python scripts/examples/functional_training.py
"""

import math

import mindspore
from lenet5 import LeNet5, create_dataset
from mindspore import amp, nn

from mindformers_adaptive import AdaptiveLossScaler

mindspore.set_seed(0)
network = amp.auto_mixed_precision(LeNet5(), "O3")
loss_fn = nn.SoftmaxCrossEntropyWithLogits(reduction="mean")
optimizer = nn.Momentum(network.trainable_params(), learning_rate=0.01, momentum=0.9)
# Scale windows of 1 to 8 steps, instead of the usual 20 to 1000, so that the window changes within a few steps.
scaler = AdaptiveLossScaler(scale_value=2**24, scale_window=1, max_scale_window=8, min_scale_window=1)


def scaled_loss(data, label):
    return scaler.scale(loss_fn(network(data).astype(mindspore.float32), label))


value_and_grad = mindspore.value_and_grad(scaled_loss, None, optimizer.parameters)


@mindspore.jit
def train_step(data, label):
    loss, grads = value_and_grad(data, label)
    grads = scaler.unscale(grads)
    grads_finite = amp.all_finite(grads)
    if grads_finite:
        optimizer(grads)
    loss = scaler.unscale(loss)
    scaler.adjust(grads_finite)
    return loss, grads_finite


print("step     loss  overflow   next loss scale   window")
for step, (data, label) in enumerate(create_dataset(samples=128, batch_size=4), start=1):
    loss, grads_finite = train_step(data, label)
    overflow = not bool(grads_finite)
    state = scaler.state()
    scale = f"2^{math.log2(state['loss_scale']):g}"
    print(f"{step:4} {float(loss):8.4f} {overflow!s:>9} {scale:>17} {state['scale_window']:8}")
