"""MindFormers' callbacks for loss scaling: checkpoints have its state, and a skipped step is no anomaly."""

import functools
import math
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mindformers.core.callback import callback as stock
from mindspore import Tensor
from mindspore import dtype as mstype

from mindformers_adaptive.cells.update_cell import RuleUpdateCell
from mindformers_adaptive.mindformers.checkpoint_formats import FILE_NAME, read_sidecar, write_sidecar
from mindformers_adaptive.monitor.step_reader import read_loss, read_overflow
from mindformers_adaptive.rules.state_dict import FORM, RUN, to_integer

# MindFormers before 1.7 does not know the YAML section `checkpoint:`, and has no class CommonInfo.
_CommonInfo = getattr(stock, "CommonInfo", object)
# With the environment variable AITURBO=1, MindSpore hands checkpoints to another service, which stores them elsewhere.
_SAVES_ELSEWHERE = os.getenv("AITURBO") == "1"


class CheckpointMonitor(stock.CheckpointMonitor):
    """MindFormers' ``CheckpointMonitor`` that also saves the loss-scaling state and notices when ``async_save`` fails.

    In MindFormers' ``checkpoint:`` format the callback writes the loss-scaling state to ``loss_scale.json``.

    With ``async_save``, MindFormers regards a checkpoint as complete as soon as the thread or process that writes it
    has ended, even if writing failed, as on a full disk. This class checks that the files of the checkpoint exist. If
    files are missing, it warns at the next step, and training resumes from the last complete checkpoint. In the
    ``checkpoint:`` format, incomplete folders do not count among the ``save_max`` folders that are kept, and a training
    in a single process removes them.

    Arguments and everything else are as in the stock callback. After ``register()`` a YAML file that names
    ``CheckpointMonitor`` gets this class.
    """

    _complete_folders: Any = None
    # Set by the stock class.
    meta_updated: bool

    def _save_megatron_ckpt_file_format(self, cb_params: Any) -> None:
        if cb_params.cur_step_num == self._last_triggered_step:
            return
        # LossScaleMonitor reads the last steps when _check_save_ckpt() is called. At the end of a training, MindFormers
        # does not call this method. So call it here.
        self._check_save_ckpt(cb_params, True)
        update_cell = getattr(cb_params.network, "loss_scaling_manager", None)
        if isinstance(update_cell, RuleUpdateCell):
            # MindFormers saves common_info as common.json in the checkpoint folder, and then marks the checkpoint as
            # complete. So this object saves the loss-scaling state before the mark.
            self.common_info = CommonInfoWithLossScale(cb_params.network)
        if self._config.async_save:
            if self._complete_folders is None:
                # Let _finish_async_save call the function that MindFormers would call at the end of a save.
                call_at_end = self.async_save_manager.add_finalize_fn
                self.async_save_manager.add_finalize_fn = lambda note_step: call_at_end(
                    functools.partial(self._finish_async_save, note_step)
                )
                self._complete_folders = []
            self.async_save_manager.maybe_finalize(wait_finish=True)
            # Empty this list of checkpoint folders, or MindFormers would remove the oldest folder while the newest is
            # still being written.
            self.current_ckpt_step_list: list[str] = []
        super()._save_megatron_ckpt_file_format(cb_params)

    def _finish_async_save(self, note_step: Callable[[], None]) -> None:
        # Rank 0 calls this method when all ranks have ended a save. If the save is complete, this method calls
        # `note_step`, so that a resume starts from the new checkpoint folder.
        for folder in self.current_ckpt_step_list:
            if missing := self._missing_files(Path(folder)):
                _warn_of_failed_save(f"{folder} lacks {', '.join(missing)}")
                if stock.get_real_group_size() == 1:
                    shutil.rmtree(folder, ignore_errors=True)
                return
        try:
            note_step()
        except OSError as error:
            _warn_of_failed_save(f"the number of the checkpoint's step could not be written ({error})")
        self._complete_folders += self.current_ckpt_step_list
        for oldest in self._complete_folders[: -self._config.keep_checkpoint_max]:
            shutil.rmtree(oldest, ignore_errors=True)
            self._complete_folders.remove(oldest)

    def _missing_files(self, folder: Any) -> Any:
        from mindformers.checkpoint.utils import FileType, get_checkpoint_name

        processes = stock.get_real_group_size()
        if _SAVES_ELSEWHERE or (self.need_remove_redundancy and processes > 1):
            # Do not look for missing files: either the checkpoint is stored elsewhere, or the parallel settings decide
            # which process writes which file, so it is not known here which files there must be.
            return []
        kinds = [FileType.MODEL, *([FileType.OPTIMIZER] if self.save_optimizer else [])]
        names = [
            f"{get_checkpoint_name(None, self.origin_prefix, rank, processes, kind)}.safetensors"
            for kind in kinds
            for rank in range(processes)
        ]
        return [name for name in names if not (folder / name).is_file()]

    def record_last_ckpt_to_json(self, epoch: Any, step: Any, ckpt_file: Any) -> None:
        """Note in ``meta.json`` the file to resume from, unless an ``async_save`` failed to write this file."""
        if self._config.async_save and not _SAVES_ELSEWHERE and not Path(self._directory, ckpt_file).is_file():
            _warn_of_failed_save(f"{Path(self._directory, ckpt_file)} is not there")
            return
        super().record_last_ckpt_to_json(epoch, step, ckpt_file)

    def end(self, run_context: Any) -> None:
        """Save the last checkpoint, and note it in ``meta.json`` when it is complete."""
        super().end(run_context)
        # MindFormers before 1.7 can only save checkpoints in the legacy format.
        if getattr(self, "use_legacy_format", True) and self._config.async_save and not self.meta_updated:
            self.record_last_ckpt_to_json(self.last_epoch_num, self.last_step_num_in_epoch, self.last_ckpoint_file)
            self.meta_updated = True


def _warn_of_failed_save(problem: object) -> None:
    warnings.warn(
        f"A checkpoint was not saved: {problem}. Look for the error in the log; the disk may be full. A resume starts "
        "from the last complete checkpoint.",
        stacklevel=3,
    )


class CommonInfoWithLossScale(_CommonInfo):  # type: ignore[misc, valid-type]
    """The content of ``common.json``, which is saved together with a file for the loss-scaling state.

    MindFormers saves all attributes in ``__dict__``. The train step is in a slot, so it is not saved.
    """

    __slots__ = ("_train_step",)

    def __init__(self, train_step: Any) -> None:
        super().__init__()
        self._train_step = train_step

    def save_common(self, common_filename: str) -> None:
        update_cell = self._train_step.loss_scaling_manager
        state = {**update_cell.state(), RUN: update_cell.run_number, FORM: update_cell.form}
        write_sidecar(Path(common_filename).parent, state.pop("loss_scale"), state)
        super().save_common(common_filename)


class CommonInfo(_CommonInfo):  # type: ignore[misc, valid-type]
    """MindFormers' ``CommonInfo`` that restores the loss scale as a Tensor, as other checkpoint formats do.

    MindFormers takes a plain number for a loss scale that the user has set.
    """

    @classmethod
    def load_common(cls, common_filename: str) -> Any:
        info = super().load_common(common_filename)
        if info.loss_scale is not None:
            info.loss_scale = Tensor(info.loss_scale, mstype.float32)
        return info


def restores_sidecar(load_checkpoint: Callable[..., None]) -> Callable[..., None]:
    """Wrap a function that loads MindFormers' ``checkpoint:`` format, so that it also restores ``loss_scale.json``.

    Args:
        load_checkpoint (function): takes ``checkpoint`` (the folder of one step), ``network`` and ``optimizer``.

    Returns:
        function, with the same arguments.
    """

    @functools.wraps(load_checkpoint)
    def load_checkpoint_and_sidecar(
        checkpoint: Any, network: Any, optimizer: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        load_checkpoint(checkpoint, network, optimizer, *args, **kwargs)
        update_cell = getattr(optimizer, "loss_scaling_manager", None)
        if not isinstance(update_cell, RuleUpdateCell):
            return
        try:
            _load_sidecar(update_cell, checkpoint)
        except ValueError as error:
            if update_cell.state()["cur_iter"] == 1:
                warnings.warn(f"{error}. Loss scaling starts afresh.", stacklevel=2)

    load_checkpoint_and_sidecar.restores_sidecar = True  # type: ignore[attr-defined]
    return load_checkpoint_and_sidecar


def _load_sidecar(update_cell: Any, folder: Any) -> None:
    if (sidecar := read_sidecar(folder)) is None:
        return
    try:
        if update_cell.state()["cur_iter"] == 1:
            # MindFormers restores the loss scale itself; load_state() restores the rest of the loss-scaling state.
            update_cell.load_state(sidecar[1])
            return
        # The loss-scaling state was restored with the optimizer's Parameters. But with several devices, MindFormers may
        # not restore RUN (the number of the run) and FORM (a checksum of the state's fields), which no graph uses. So
        # set these two Parameters from loss_scale.json.
        for name in (RUN, FORM):
            if name in sidecar[1]:
                getattr(update_cell, name).set_data(Tensor(to_integer(name, sidecar[1][name]), mstype.int32))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{Path(folder, FILE_NAME)} cannot be used: {str(error).rstrip('.')}") from error


class TrainingStateMonitor(stock.TrainingStateMonitor):
    """``mindformers.core.callback.TrainingStateMonitor`` that does not report skipped steps as anomalies.

    The arguments are those in the stock class. In a step that overflowed, the norm of the gradients is inf or NaN
    because the loss scale was too large; the step is skipped, and the loss scale falls. So in such a step

    - ``check_for_nan_in_loss_and_grad`` checks the loss only. A loss that is inf or NaN ends the training, as with the
      stock class: the loss scale cannot cause it, because it multiplies only the gradients.
    - ``use_skip_data_by_global_norm`` and ``check_for_global_norm`` do not count the norm as a spike. Consecutive
      spikes before this step still count.

    All other steps are checked as in MindFormers' own class.

    Raises:
        ValueError: in training, for a loss that is inf or NaN, with ``check_for_nan_in_loss_and_grad``.

    Examples:
        >>> from mindformers.tools.register import MindFormerRegister
        >>> from mindformers_adaptive import register
        >>> register()
        >>> MindFormerRegister.get_cls("callback", "TrainingStateMonitor") is TrainingStateMonitor
        True
    """

    # Set by the stock class.
    check_for_nan_in_loss_and_grad: bool

    def abnormal_global_norm_check(self, cb_params: Any) -> None:
        """Check the gradient norm of a step as MindFormers' own class does, unless the step overflowed."""
        if not _overflowed(cb_params.net_outputs):
            super().abnormal_global_norm_check(cb_params)

    def on_train_step_end(self, run_context: Any) -> None:
        """Check a step as MindFormers' own class does. If the step overflowed, check only its loss for inf and NaN."""
        checks = self.check_for_nan_in_loss_and_grad
        params = run_context.original_args()
        overflowed = _overflowed(params.net_outputs)
        self.check_for_nan_in_loss_and_grad = checks and not overflowed
        try:
            super().on_train_step_end(run_context)
        finally:
            self.check_for_nan_in_loss_and_grad = checks
        loss = read_loss(params.net_outputs[0]) if checks and overflowed else None
        if loss is not None and not math.isfinite(loss):
            raise ValueError(
                f"The loss of step {params.cur_step_num} is {loss}. No loss scale causes this, so training ends here. "
                "Check the data of this step and the weights. To skip such a step and go on, set "
                "'check_for_nan_in_loss_and_grad' to False."
            )


def _overflowed(outputs: Any) -> bool:
    # With three or more outputs, the second output is the overflow flag. A user's network with only two outputs may
    # return something else beside its loss, so do not take its second output for the flag.
    return isinstance(outputs, tuple | list) and len(outputs) > 2 and bool(read_overflow(outputs))
