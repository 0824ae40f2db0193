"""What a callback writes: a record, and scalars and histograms for TensorBoard."""

import math
from pathlib import Path

from mindformers.tools.logger import logger
from mindformers.tools.utils import get_output_root_path, get_real_rank
from mindformers.utils.tensorboard import get_tensorboard_writer
from mindspore.train import Callback
from tensorboardX import SummaryWriter

from mindformers_adaptive.monitor.arguments import require_choice, require_path
from mindformers_adaptive.monitor.record import RunRecord
from mindformers_adaptive.rules.checks import require_flag

__all__ = ["MonitorOutput", "RecordingCallback"]


class RecordingCallback(Callback):
    """A callback with a :class:`MonitorOutput`, which is closed however a training ends."""

    _entered = 0

    def __enter__(self):
        self._entered += 1
        return self

    def __exit__(self, *error):
        # Model.fit enters and leaves its callbacks in the midst of a training too, to evaluate.
        self._entered -= 1
        if self._entered == 0:
            self._release()

    def on_train_end(self, run_context):
        """Close what was opened."""
        self._release()

    def _release(self):
        self._output.close()


class MonitorOutput:
    """The record and the TensorBoard writer of a callback, in one process.

    Args:
        subject (str): what is recorded, for the messages.
        file_name (str): the record's name in MindFormers' output folder.
        record_path (str, optional): the record, if it is to be another file.
        tensorboard_dir (str, optional): a folder for TensorBoard where the YAML file has no ``tensorboard`` section.
        all_ranks (bool): whether every process writes, each into files of its own, or only the first one.
        on_write_error (str): ``"warn"`` or ``"raise"``. Default: ``"warn"``.
        every_step (bool): whether the record has a line for steps that are missing. Default: True.

    Attributes:
        writes (bool): whether this process writes.
        record (RunRecord): the record.
        writer (tensorboardX.SummaryWriter, optional): the writer; None if there is none.
    """

    def __init__(
        self, subject, file_name, record_path, tensorboard_dir, all_ranks, on_write_error="warn", every_step=True
    ):
        self._subject, self._file_name = subject, file_name
        self._record_path = require_path("record_path", record_path)
        self._tensorboard_dir = require_path("tensorboard_dir", tensorboard_dir)
        self._all_ranks = require_flag("all_ranks", all_ranks)
        self._on_write_error = require_choice("on_write_error", on_write_error, ("warn", "raise"))
        self._every_step = every_step
        self.writes, self.record, self.writer = False, None, None

    def open(self, last_step):
        """Start to write the steps after ``last_step``, the last one before a resume, or 0."""
        rank = get_real_rank()
        self.writes = self._all_ranks or rank == 0
        path, folder = self._record_path or Path(get_output_root_path(), self._file_name), self._tensorboard_dir
        if self._all_ranks:
            path = path.with_name(f"{path.stem}_rank_{rank}{path.suffix}")
            folder = folder and folder / f"rank_{rank}"
        self.record, self._failed = RunRecord(path, self._every_step), False
        self.restart(last_step)
        # Where the YAML file has a tensorboard section, MindFormers has a writer already.
        self.writer, self._owns_writer = get_tensorboard_writer() if self.writes else None, False
        if self.writes and self.writer is None and folder is not None:
            self._open_writer(folder, last_step + 1)

    def restart(self, last_step):
        """Take the steps after ``last_step`` out of the record before the next line is written."""
        self._last_step, self._is_resumed = last_step, False

    def append(self, entries):
        """Write the entries to the record, if this process writes; a failure is reported as ``on_write_error`` says."""
        if not self.writes:
            return
        try:
            if not self._is_resumed:
                self._resume()
            self.record.append(entries)
        except OSError as error:
            self._report_failure(error)
        else:
            if self._failed and entries:
                logger.warning("The record %s is written again, from step %s.", self.record.path, entries[0]["step"])
                self._failed = False

    def add_scalar(self, tag, value, step):
        """Write a number for TensorBoard; None, inf and NaN have no place in a curve."""
        if self.writer is not None and value is not None and math.isfinite(value):
            self.writer.add_scalar(tag, float(value), step)

    def close(self):
        """Close what was opened; calling it again does nothing."""
        if self.record is not None:
            self.record.close()
        if self.writer is not None and self._owns_writer:
            self.writer.close()
        self.writer = None

    def _open_writer(self, folder, first_step):
        try:
            self.writer, self._owns_writer = SummaryWriter(str(folder), purge_step=first_step), True
        except OSError as error:
            if self._on_write_error == "raise":
                raise
            logger.warning("Nothing will be written to 'tensorboard_dir' %s: %s.", folder, error)

    def _resume(self):
        for note in self.record.resume(self._last_step):
            logger.warning("%s", note)
        logger.info("%s is recorded in %s from step %s.", self._subject, self.record.path, self._last_step + 1)
        self._is_resumed = True

    def _report_failure(self, error):
        message = (
            f"The record {self.record.path} cannot be written: {error}. It ends at step {self.record.last_step}. Make "
            "room on the disk, or give another 'record_path'."
        )
        if self._on_write_error == "raise":
            raise OSError(f"{message} Training stops, because 'on_write_error' is 'raise'.") from error
        if not self._failed:
            logger.warning("%s Training goes on; the record goes on as soon as it can.", message)
        self._failed = True
