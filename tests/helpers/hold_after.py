"""A callback with which a run waits to be stopped: how far it gets does not depend on how busy the machine is."""

import time

from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindspore import Callback


@MindFormerRegister.register(MindFormerModuleType.CALLBACK)
class HoldAfter(Callback):
    """Stays where it is after so many steps of this run, when all callbacks have seen the last of them.

    Args:
        steps (int): how many.
    """

    def __init__(self, steps):
        super().__init__()
        self._left = steps

    def on_train_step_begin(self, _):
        """Wait for a signal if all steps are taken."""
        while self._left == 0:
            time.sleep(0.1)
        self._left -= 1
