"""The scheduler by which the processes of :class:`launched.ForkedCluster` find each other, and nothing else."""

import mindspore
from mindspore.communication import init

mindspore.set_context(device_target="CPU")
init()
