"""Callbacks of training runs: ``HoldAfter`` pauses a run at a step, ``PlantedOverflow`` makes a process overflow."""

import os
import time

import numpy as np
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindspore import Tensor, get_context
from mindspore.train import Callback


@MindFormerRegister.register(MindFormerModuleType.CALLBACK)
class HoldAfter(Callback):
    """Pauses a training after ``steps`` steps until the test kills it, or makes a file ``go_on`` in its current folder.

    Args:
        steps (int): the number of steps before the pause.
    """

    def __init__(self, steps):
        super().__init__()
        self._left = steps

    def on_train_begin(self, _):
        """Print two settings of the section ``context`` as MindSpore has them."""
        print(f"In the run: mode {get_context('mode')}, graphs in {os.getenv('MS_DEV_SAVE_GRAPHS_PATH')}", flush=True)

    def on_train_step_begin(self, _):
        """After ``steps`` steps, wait for the file or for the signal that ends the run."""
        while self._left == 0 and not os.path.exists("go_on"):
            time.sleep(0.1)
        self._left -= 1


@MindFormerRegister.register(MindFormerModuleType.CALLBACK)
class PlantedOverflow(Callback):
    """Makes chosen steps overflow: sets a weight to inf in only one process, and restores the weight after the step.

    If such a step is not skipped, the other weights become NaN, so that tests notice it.

    Args:
        rank (int): the rank of the process.
        steps (list[int]): the steps that overflow, from 1, as the update cell counts them.
    """

    def __init__(self, rank, steps):
        super().__init__()
        self._steps = set(steps) if int(os.environ.get("RANK_ID", "0")) == rank else set()
        self._before = None

    def on_train_step_begin(self, run_context):
        step = run_context.original_args().train_network.loss_scaling_manager
        if int(step.cur_iter.asnumpy()) in self._steps:
            self._weight = next(iter(run_context.original_args().train_network.weights))
            self._before = self._weight.asnumpy().copy()
            self._weight.set_data(Tensor(np.full_like(self._before, np.inf)))

    def on_train_step_end(self, run_context):
        if self._before is not None:
            self._weight.set_data(Tensor(self._before))
            self._before = None
