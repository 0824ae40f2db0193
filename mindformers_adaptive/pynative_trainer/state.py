"""The state of a loss scaler in the checkpoints of MindFormers' PyNative trainer."""

import functools
import warnings

from mindspore import Tensor
from mindspore import dtype as mstype

from mindformers_adaptive.checkpoint.callback import CommonInfoWithLossScale
from mindformers_adaptive.checkpoint.reader import FILE_NAME, read_sidecar
from mindformers_adaptive.rules.saved_state import repair_loss_scale

__all__ = ["restore", "take_down"]


def take_down(create_common_info, train_step):
    """Make the method of a ``CheckpointCallback`` that returns what to save as ``common.json`` save the state too.

    Args:
        create_common_info (function): takes the state of the trainer, and returns MindFormers' ``CommonInfo``.
        train_step (object): has the update cell as ``loss_scaling_manager``.

    Returns:
        function, likewise.
    """

    @functools.wraps(create_common_info)
    def create(state):
        info = CommonInfoWithLossScale(train_step)
        vars(info).update(vars(create_common_info(state)))
        return info

    return create


def restore(scaler, folder):
    """Go on from the state that a checkpoint has in ``loss_scale.json``, or say that it has none.

    Args:
        scaler (RuleLossScaler): changed, unless there is nothing to go on from.
        folder (str): the checkpoint of one step.

    Warns:
        UserWarning: if there is no such file, or it cannot be used; loss scaling starts afresh then.

    Examples:
        >>> import tempfile
        >>> from mindformers_adaptive import AdaptiveLossScaler
        >>> from mindformers_adaptive.checkpoint.reader import write_sidecar
        >>> scaler, folder = AdaptiveLossScaler(2.0**16), tempfile.mkdtemp()
        >>> write_sidecar(folder, 512.0, {**scaler.state(), "cur_iter": 8})
        >>> restore(scaler, folder)
        >>> scaler.state()["loss_scale"], scaler.state()["cur_iter"]
        (512.0, 8)
    """
    try:
        found = read_sidecar(folder)
        if found is None:
            raise ValueError(f"{folder} has no {FILE_NAME}: the training that saved it scaled no loss")
        loss_scale, state = found
        loss_scale = repair_loss_scale(scaler.rule, loss_scale, "loss_scale")
        scaler.scale_value.set_data(Tensor(loss_scale, mstype.float32))
        scaler.update_cell.restore(state)
    except (TypeError, ValueError) as error:
        warnings.warn(f"{str(error).rstrip('.')}. Loss scaling starts afresh.", stacklevel=2)
