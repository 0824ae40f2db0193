"""The base class of callbacks that write a record of a run, and scalars and histograms for TensorBoard."""

import errno
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mindformers.tools.logger import logger
from mindformers.tools.utils import get_output_root_path, get_real_rank
from mindformers.utils.tensorboard import get_tensorboard_writer
from mindspore.train import Callback
from tensorboardX import SummaryWriter

from mindformers_adaptive.monitor.step_reader import last_step_before
from mindformers_adaptive.record.writer import RunRecord, new_run
from mindformers_adaptive.rules.checks import require_choice, require_flag, with_type

_FULL = dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "Make room on the disk, or give")
_READ_ONLY = dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "Allow this user to write there, or give")
# The remedy in the error message for each errno of a failed write. Each message also recommends another path.
_REMEDIES = _FULL | _READ_ONLY

# The bins of TensorBoard's histograms end just above 9e19. Leave larger values out, because the writer rejects an array
# that has no value inside the bins.
_LARGEST_BIN = 9e19


class RecordingCallback(Callback):
    """Callback with a record file and a TensorBoard writer. Both are closed even if the training fails.

    A subclass calls ``_open`` when a training begins, and sets ``subject``, the recorded quantity, for messages;
    ``file_name``, the record's name in MindFormers' output folder; and ``every_step``, as in :class:`RunRecord`.

    Args:
        record_path (str, optional): the file of the record; None for ``file_name`` in the output folder.
        tensorboard_dir (str, optional): a folder for TensorBoard where the YAML file has no ``tensorboard`` section.
        all_ranks (bool): whether every process writes, each into files of its own, or only the first one.
        on_write_error (str): ``"warn"`` or ``"raise"``. Default: ``"warn"``.

    Raises:
        TypeError: if an argument is not of its type.
        ValueError: if an argument is out of its range.
    """

    subject = file_name = ""
    every_step = True

    def __init__(
        self,
        record_path: str | os.PathLike[str] | None,
        tensorboard_dir: str | os.PathLike[str] | None,
        all_ranks: bool,
        on_write_error: str = "warn",
    ) -> None:
        super().__init__()
        self._record_path = _require_path("record_path", record_path)
        self._tensorboard_dir = _require_path("tensorboard_dir", tensorboard_dir)
        self._all_ranks = require_flag("all_ranks", all_ranks)
        self._on_write_error = require_choice("on_write_error", on_write_error, ("warn", "raise"))
        # Whether this process writes a record and TensorBoard files, and the object that writes the TensorBoard files.
        self._writes, self._writer = False, None
        self._record: Any = None
        self._update_cell: Any = None
        self._resume_after: int | None = None
        self._last_step = self._entered = 0

    def __enter__(self) -> Any:
        self._entered += 1
        return self

    def __exit__(self, *error: object) -> None:
        # Model.fit calls __enter__ and __exit__ not only for the training, but also for each evaluation within the
        # training. So close the files only at the outermost __exit__.
        self._entered -= 1
        if self._entered == 0:
            self._release()

    def on_train_end(self, run_context: Any) -> None:
        """Close the record and the TensorBoard writer.

        Args:
            run_context (RunContext): MindSpore's information about the training.
        """
        self._release()

    def _open(self, params: Any, update_cell: Any) -> None:
        """Prepare the record and the TensorBoard writer for a training; MindSpore gives ``params`` to a callback."""
        self._last_step = last_step_before(params, update_cell, self._last_step)
        self._ahead_of_model = self._last_step - params.cur_step_num
        rank = get_real_rank()
        self._writes = self._all_ranks or rank == 0
        path, folder = self._record_path or Path(get_output_root_path(), self.file_name), self._tensorboard_dir
        if self._all_ranks:
            path = path.with_name(f"{path.stem}_rank_{rank}{path.suffix}")
            folder = folder and folder / f"rank_{rank}"
        # An update cell of another package has no number that identifies the run, so do not read or set its run number.
        self._update_cell = update_cell if hasattr(update_cell, "run_number") else None
        # Only a new run gets a run number. A resumed run has the number from its checkpoint, or has no number.
        if self._update_cell is not None and self._writes and not self._last_step and not self._update_cell.run_number:
            self._update_cell.run_number = new_run()
        self._record, self._failed = RunRecord(path, self.every_step), False
        # A resumed run takes the steps after the checkpoint again. So the lines of these steps are removed from the
        # record before the next line is written.
        self._resume_after = self._last_step
        # If the YAML file has a tensorboard section, MindFormers has created a writer already.
        self._writer, self._owns_writer = get_tensorboard_writer() if self._writes else None, False
        if not self._writes or self._writer is not None or folder is None:
            return
        try:
            self._writer, self._owns_writer = SummaryWriter(str(folder), purge_step=self._last_step + 1), True
        except OSError as error:
            if self._on_write_error == "raise":
                raise
            logger.warning("'tensorboard_dir' %s cannot be written: %s. Give another folder.", folder, error)

    def _append(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Write entries to the record, if this process writes; report a failure as ``on_write_error`` says."""
        if not self._writes:
            return
        try:
            if self._resume_after is not None:
                run = 0 if self._update_cell is None else self._update_cell.run_number
                for note in self._record.resume(self._resume_after, run):
                    logger.warning("%s", note)
                if self._record.run != run:
                    self._update_cell.run_number = self._record.run
                first_step, self._resume_after = self._resume_after + 1, None
                logger.info("%s is recorded in %s from step %s.", self.subject, self._record.path, first_step)
            self._record.append(entries)
            if self._failed and entries:
                path, first_step = self._record.path, entries[0]["step"]
                logger.warning("The record %s can be written again, and continues at step %s.", path, first_step)
                self._failed = False
        except OSError as error:
            message = (
                f"The record {self._record.path} cannot be written: {error}. It ends at step {self._record.last_step}. "
                f"{_REMEDIES.get(error.errno or 0, 'Give')} another 'record_path'."
            )
            if self._on_write_error == "raise":
                raise OSError(f"{message} Training stops, because 'on_write_error' is 'raise'.") from error
            if not self._failed:
                logger.warning("%s Training goes on. The record continues as soon as it can be written.", message)
            self._failed = True

    def _add_scalar(self, tag: str, value: float | None, step: int) -> None:
        """Write a number for TensorBoard, unless it is None, inf or NaN, which a curve cannot show."""
        if self._writer is not None and value is not None and math.isfinite(value):
            self._writer.add_scalar(tag, float(value), step)

    def _add_histogram(self, tag: str, array: Any, step: int) -> None:
        """Write a histogram of the values that lie within TensorBoard's bins, if there are any."""
        if self._writer is not None:
            # TensorBoard's writer sums the values and their squares in their dtype, and FP16 sums overflow.
            values = np.asarray(array, np.float64)
            values = values[np.abs(values) < _LARGEST_BIN]
            if values.size:
                self._writer.add_histogram(tag, values, step)

    def _release(self) -> None:
        """Close the record and the TensorBoard writer. Further calls do nothing."""
        if self._record is not None:
            self._record.close()
        if self._writer is not None and self._owns_writer:
            self._writer.close()
        self._writer = None


def _require_path(name: str, value: Any) -> Path | None:
    """Return a path as a Path, or None if it was left out."""
    if value is not None and not isinstance(value, str | os.PathLike):
        raise TypeError(
            f"'{name}' must be a path, but got {with_type(value)}. Give the path as text, or leave '{name}' out."
        )
    if value == "":
        raise ValueError(f"'{name}' must be a path, but got ''. Give a file or folder, or leave '{name}' out.")
    return None if value is None else Path(value)
