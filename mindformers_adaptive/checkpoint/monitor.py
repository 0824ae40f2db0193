"""MindFormers' ``CheckpointMonitor`` with the state of loss scaling, and functions that restore that state."""

import functools
import warnings
from pathlib import Path

from mindformers.core.callback import callback as stock
from mindspore import Tensor
from mindspore import dtype as mstype

from mindformers_adaptive.cells.update_cell import AdaptiveLossScaleUpdateCell
from mindformers_adaptive.checkpoint.sidecar import read_sidecar, write_sidecar

__all__ = ["CheckpointMonitor", "CommonInfo", "restores_sidecar"]

# MindFormers before 1.7 has no `checkpoint:` format.
_CommonInfo = getattr(stock, "CommonInfo", object)


class CheckpointMonitor(stock.CheckpointMonitor):
    """MindFormers' ``CheckpointMonitor``, which in the ``checkpoint:`` format writes ``loss_scale.json`` too.

    Arguments and everything else are those of the stock callback. After ``register()`` a YAML file that names
    ``CheckpointMonitor`` gets this one.
    """

    def _save_megatron_ckpt_file_format(self, cb_params):
        update_cell = getattr(cb_params.network, "loss_scaling_manager", None)
        if isinstance(update_cell, AdaptiveLossScaleUpdateCell):
            # MindFormers saves it as common.json, into the folder of this step, before it calls the step complete.
            self.common_info = _CommonInfoWithLossScale(cb_params.network)
        super()._save_megatron_ckpt_file_format(cb_params)


class _CommonInfoWithLossScale(_CommonInfo):
    """What MindFormers saves as ``common.json``; it saves all attributes, so this one keeps its own in a slot."""

    __slots__ = ("_train_step",)

    def __init__(self, train_step):
        super().__init__()
        self._train_step = train_step

    def save_common(self, common_filename):
        loss_scale = float(self._train_step.scale_sense.asnumpy())
        write_sidecar(Path(common_filename).parent, loss_scale, self._train_step.loss_scaling_manager.state())
        super().save_common(common_filename)


class CommonInfo(_CommonInfo):
    """MindFormers' ``CommonInfo``, whose loss scale is a Tensor when it was restored, as in MindFormers' other formats.

    A number is a loss scale that the user has set.
    """

    @classmethod
    def load_common(cls, common_filename):
        info = super().load_common(common_filename)
        if info.loss_scale is not None:
            info.loss_scale = Tensor(info.loss_scale, mstype.float32)
        return info


def restores_sidecar(load_checkpoint):
    """Make a function that loads MindFormers' ``checkpoint:`` format restore ``loss_scale.json`` too.

    Args:
        load_checkpoint (function): takes ``checkpoint``, the folder of one step, ``network`` and ``optimizer``.

    Returns:
        function, with the same arguments.
    """

    @functools.wraps(load_checkpoint)
    def load_checkpoint_and_sidecar(checkpoint, network, optimizer=None, *args, **kwargs):
        load_checkpoint(checkpoint, network, optimizer, *args, **kwargs)
        update_cell = getattr(optimizer, "loss_scaling_manager", None)
        if isinstance(update_cell, AdaptiveLossScaleUpdateCell):
            _restore(update_cell, checkpoint)

    load_checkpoint_and_sidecar.restores_sidecar = True
    return load_checkpoint_and_sidecar


def _restore(update_cell, folder):
    # With optimizer state the Parameters have come back already, as a part of it.
    if update_cell.state()["cur_iter"] > 1:
        return
    try:
        content = read_sidecar(folder)
    except ValueError as error:
        warnings.warn(f"{error}. The ladder starts afresh.", stacklevel=3)
        return
    if content is not None:
        # MindFormers restores the loss scale itself.
        update_cell.load_state_dict({**update_cell.state_dict(), **content[1]})
