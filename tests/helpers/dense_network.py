"""A small network that overflows when it is told to."""

import numpy as np
from mindspore import Tensor, dataset, nn
from mindspore import dtype as mstype

from mindformers_adaptive.wrapper import TrainOneStepWithLossScaleCell


class Dense:
    """One dense layer, in FP16 if asked for, a loss, and batches; with an inf they overflow at every loss scale."""

    def __init__(self, fp16=False):
        self.layer = nn.Dense(4, 2, weight_init="ones", bias_init="zeros")
        if fp16:
            self.layer.to_float(mstype.float16)
        self.loss_fn = nn.MSELoss()
        self.network = nn.WithLossCell(self.layer, self.loss_fn)

    def optimizer(self, name="Momentum", **options):
        if name == "Momentum":
            options = {"momentum": 0.9, **options}
        return getattr(nn, name)(self.layer.trainable_params(), learning_rate=0.01, **options)

    def train_step(self, update_cell, cell=TrainOneStepWithLossScaleCell):
        """Return a train-step cell around an update cell."""
        return cell(self.network, self.optimizer(), scale_sense=update_cell)

    def weight(self):
        return self.layer.weight.asnumpy().copy()

    @staticmethod
    def batch(overflow=False):
        features = np.arange(12, dtype=np.float32).reshape(3, 4) / 8
        features[0, 0] = np.inf if overflow else features[0, 0]
        return Tensor(features), Tensor(np.zeros((3, 2), np.float32))


def batches(count, overflows=()):
    """Return a dataset of so many batches; those of the given numbers overflow at every loss scale."""
    both = [Dense.batch(number in overflows) for number in range(count)]
    rows = [np.concatenate([one.asnumpy() for one in each]) for each in zip(*both, strict=True)]
    return dataset.NumpySlicesDataset(tuple(rows), shuffle=False).batch(3)
