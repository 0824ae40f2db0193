"""A script that trains a network with lazy inline for one step, without loss scaling."""

import mindspore
import numpy as np
from mindspore import Tensor, lazy_inline, nn


class InlinedLate(nn.Cell):
    @lazy_inline
    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(4, 4)

    def construct(self, features):
        return self.dense(features).sum()


if __name__ == "__main__":
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    network = InlinedLate()
    train_step = nn.TrainOneStepCell(network, nn.SGD(network.trainable_params(), 0.1)).set_train()
    train_step(Tensor(np.ones((2, 4), np.float32)))
