"""``LossScaleMonitor``: what loss scaling did in every step, in a file, in TensorBoard and in the log."""

import math
from pathlib import Path

from mindformers.tools.logger import logger
from mindformers.tools.utils import get_output_root_path, get_real_rank
from mindspore.train import Callback

from mindformers_adaptive.monitor.arguments import require_choice, require_count, require_path
from mindformers_adaptive.monitor.collapse import CollapseDetector
from mindformers_adaptive.monitor.record import FIELDS, RunRecord
from mindformers_adaptive.monitor.step_reader import StepReader, find_train_step, read_loss, steps_before_resume
from mindformers_adaptive.monitor.tensorboard import open_writer

__all__ = ["FILE_NAME", "TAG", "LossScaleMonitor"]

FILE_NAME = "loss_scale_record.jsonl"

# A scalar for TensorBoard is named by this and the key of the record.
TAG = "loss_scaling"


class LossScaleMonitor(Callback):
    """Callback that records what loss scaling did in every step.

    It works with ``mindspore.train.Model`` and, after ``register()``, as ``type: LossScaleMonitor`` in the
    ``callbacks`` of a MindFormers YAML file, with any train-step cell that scales its loss. The record is a file of
    JSON lines, one a step, see :class:`mindformers_adaptive.monitor.record.RunRecord`:

    ================================ ===========================================================================
    key                              meaning
    ================================ ===========================================================================
    ``step``                         number of the step, from 1, which goes on when a run is resumed
    ``loss``                         mean of what the train-step cell returns as its loss
    ``overflow``                     whether the step overflowed and was skipped
    ``loss_scale``                   the loss scale that the step used
    ``next_loss_scale``              that for the next step, which MindFormers' own log line shows
    ``scale_window, window_index``   window in force after the step, in steps, and its place on the ladder
    ``growth_num, down_num``         raises and drops counted after the step
    ``skipped_steps``                overflowed steps so far
    ================================ ===========================================================================

    A value is null where it cannot be known: the windows of another update cell, or the loss of a step inside a sink.
    With ``history_size`` of ``AdaptiveLossScaleUpdateCell`` at least as large as the ``sink_size``, or as
    ``look_every``, every step is recorded although the host does not see every step; steps that nobody saw leave one
    line that counts them.

    A run that is resumed from a checkpoint goes on in the same file, and steps that it takes again replace those that
    are there. A new run keeps an older file under another name. In the list of callbacks of a ``Model`` the monitor
    should come before the one that saves checkpoints, so that no checkpoint is ahead of the record. With
    ``look_every`` above 1, save at multiples of it.

    Args:
        record_path (str, optional): the file. Default: None, ``loss_scale_record.jsonl`` in the output folder of
            MindFormers, which is ``./output`` unless set otherwise.
        look_every (int): how many steps apart the host looks at the device, which waits for it. Default: 1, as in
            MindFormers' ``MFLossMonitor``.
        tensorboard_dir (str, optional): a folder for TensorBoard scalars ``loss_scaling/KEY``, if MindFormers has none:
            where the YAML file has a ``tensorboard`` section, they go beside MindFormers' own. Default: None.
        max_consecutive_overflows (int, optional): how many overflows in a row are a collapse; None for any number.
            Default: 50, because from 2^32, the usual start, 32 halvings end at a scale of 1.
        on_collapse (str): ``"warn"``, ``"stop"`` (training ends as if it were done) or ``"raise"``. Default:
            ``"warn"``, as MindSpore's own cells train on.
        on_write_error (str): ``"warn"`` (training goes on, and the record when it can) or ``"raise"``. Default:
            ``"warn"``, because a full disk is no reason to lose a training.
        all_ranks (bool): whether every process writes, each its own file with its rank in the name, or the first one
            only. Default: False, because loss scaling is the same in all.

    Raises:
        TypeError: if an argument is not of its type.
        ValueError: if an argument is out of its range.
        RuntimeError: in training, for a collapse with ``on_collapse="raise"``.
        OSError: in training, for a record that cannot be written with ``on_write_error="raise"``.

    Examples:
        >>> import tempfile
        >>> import numpy as np
        >>> from mindspore import dataset, nn
        >>> from mindspore.train import Model
        >>> from mindformers_adaptive.monitor.record import read_record
        >>> from mindformers_adaptive.wrapper import AdaptiveLossScaleUpdateCell, TrainOneStepWithLossScaleCell
        >>> net = nn.Dense(3, 2)
        >>> optimizer = nn.Momentum(net.trainable_params(), learning_rate=0.1, momentum=0.9)
        >>> update_cell = AdaptiveLossScaleUpdateCell(loss_scale_value=2**12, scale_factor=2, scale_window=20)
        >>> train_step = TrainOneStepWithLossScaleCell(nn.WithLossCell(net, nn.MSELoss()), optimizer, update_cell)
        >>> samples = [(np.full(3, value, np.float32), np.zeros(2, np.float32)) for value in (1, np.inf)]
        >>> data = dataset.GeneratorDataset(samples, ["features", "target"], shuffle=False).batch(1)
        >>> file = Path(tempfile.mkdtemp(), "record.jsonl")
        >>> Model(train_step).train(1, data, callbacks=[LossScaleMonitor(file)])
        >>> [(line["step"], line["overflow"], line["next_loss_scale"]) for line in read_record(file)]
        [(1, False, 4096.0), (2, True, 2048.0)]
    """

    def __init__(
        self,
        record_path=None,
        look_every=1,
        tensorboard_dir=None,
        max_consecutive_overflows=50,
        on_collapse="warn",
        on_write_error="warn",
        all_ranks=False,
    ):
        super().__init__()
        self._record_path = require_path("record_path", record_path)
        self._look_every = require_count("look_every", look_every, "1 looks at every step")
        self._tensorboard_dir = require_path("tensorboard_dir", tensorboard_dir)
        if max_consecutive_overflows is not None:
            max_consecutive_overflows = require_count(
                "max_consecutive_overflows", max_consecutive_overflows, "None allows any number"
            )
        self._collapse = CollapseDetector(max_consecutive_overflows)
        self._on_collapse = require_choice("on_collapse", on_collapse, ("warn", "stop", "raise"))
        self._on_write_error = require_choice("on_write_error", on_write_error, ("warn", "raise"))
        if not isinstance(all_ranks, bool):
            raise TypeError(
                f"'all_ranks' must be True or False, but got {all_ranks!r} of type {type(all_ranks).__name__}. Leave "
                "it out for False."
            )
        self._all_ranks = all_ranks
        self._reader = None
        self._looked_at = 0

    def on_train_begin(self, run_context):
        """Find the loss scaling, and the step to go on from."""
        params = run_context.original_args()
        train_step = find_train_step(params.get("train_network"), params.get("network"))
        if train_step is None:
            self._reader = None
            logger.warning(
                "LossScaleMonitor records nothing: the network that is trained scales no loss. Train it with a "
                "train-step cell that has a scale_sense, such as TrainOneStepWithLossScaleCell or MFTrainOneStepCell."
            )
            return
        self._reader = StepReader(train_step)
        self._looked_at = self._resumed_at = self._last_step_before(params)
        self._ahead_of_model = self._looked_at - params.cur_step_num
        self._ahead_of_cell = self._looked_at - (self._reader.steps_taken() or 0)
        self._called_at, self._losses = self._looked_at, {}
        rank = get_real_rank()
        self._writes = self._all_ranks or rank == 0
        self._record = RunRecord(self._file_of(rank))
        self._is_resumed = self._failed = False
        self._writer, self._writer_is_ours = self._open_writer()
        # Before the first step, so that a folder that cannot be written to is told of at once.
        self._write([])
        self._reader.count_from(self._record.last_skipped_steps if self._looked_at else 0)

    def on_train_step_end(self, run_context):
        """Record the steps since the last look, if the host is to look now."""
        if self._reader is None:
            return
        params = run_context.original_args()
        called_before, self._called_at = self._called_at, self._ahead_of_model + params.cur_step_num
        outputs = params.net_outputs
        self._losses[self._called_at] = outputs[0] if isinstance(outputs, tuple | list) else outputs
        # A sink may step over a multiple.
        if self._called_at // self._look_every > called_before // self._look_every:
            self._look(run_context)

    def on_train_end(self, run_context):
        """Record the steps since the last look."""
        if self._reader is None:
            return
        if self._losses:
            self._look(run_context)
        if self._writer_is_ours:
            self._writer.close()

    def _last_step_before(self, params):
        """Return the number of the step before the first.

        The update cell's count comes back with its state.
        """
        by_model = params.cur_step_num + steps_before_resume(params)
        # A cell without a count goes on where this monitor has left it.
        by_cell = self._reader.steps_taken()
        return max(by_model, self._looked_at if by_cell is None else by_cell)

    def _file_of(self, rank):
        path = Path(get_output_root_path(), FILE_NAME) if self._record_path is None else self._record_path
        return path.with_name(f"{path.stem}_rank_{rank}{path.suffix}") if self._all_ranks else path

    def _look(self, run_context):
        window = self._reader.window
        entries = self._read_entries(run_context.original_args().net_outputs)
        if not entries:
            return
        self._write([{field: entry[field] for field in FIELDS} for entry in entries])
        self._write_scalars(entries)
        for entry in entries:
            window = self._report_window(window, entry)
        # After the record, which is then complete for whoever looks for the cause.
        for message in filter(None, map(self._collapse.check, entries)):
            self._react_to_collapse(message, run_context)

    def _read_entries(self, outputs):
        """Return the steps since the last look, oldest first, with the losses that the host has been given."""
        taken = self._reader.steps_taken()
        step = self._called_at if taken is None else self._ahead_of_cell + taken
        losses, self._losses = self._losses, {}
        if step == self._looked_at:
            return []
        went_back = step < self._looked_at
        entries = self._reader.read(step, step if went_back else step - self._looked_at, outputs)
        if went_back:
            # The training was set back to an earlier state: the steps since then are taken again.
            self._resumed_at, self._is_resumed = entries[0]["step"] - 1, False
        # Where a call of the network takes several steps, its loss is that of the last.
        if step != self._called_at:
            losses = {step: losses[self._called_at]}
        for entry in entries:
            entry["loss"] = read_loss(losses.get(entry["step"]))
        self._looked_at = step
        return entries

    def _report_window(self, before, entry):
        after = (entry["scale_window"], entry["window_index"])
        if after != before and self._writes:
            logger.info(
                "Loss scaling: at step %s the window goes from %s to %s (index %s to %s), at loss scale %s.",
                entry["step"],
                *(value for pair in zip(before, after, strict=True) for value in pair),
                entry["next_loss_scale"],
            )
        return after

    def _react_to_collapse(self, message, run_context):
        # Overflows are the same in all processes, so all of them stop at the same step.
        if self._on_collapse == "raise":
            raise RuntimeError(message)
        if self._on_collapse == "stop":
            message += " Training stops here, as on_collapse is 'stop'."
            run_context.request_stop()
        if self._writes:
            logger.warning("%s", message)

    def _write(self, entries):
        if not self._writes:
            return
        try:
            if not self._is_resumed:
                self._resume()
            self._record.append(entries)
        except OSError as error:
            self._react_to_write_error(
                f"The record {self._record.path} cannot be written: {error}. It ends at step {self._record.last_step}. "
                "Make room on the disk, or give another 'record_path'.",
                error,
            )
        else:
            if self._failed and entries:
                logger.warning("The record %s is written again, from step %s.", self._record.path, entries[0]["step"])
                self._failed = False

    def _resume(self):
        for note in self._record.resume(self._resumed_at):
            logger.warning("%s", note)
        logger.info("Loss scaling is recorded in %s from step %s.", self._record.path, self._resumed_at + 1)
        self._is_resumed = True

    def _open_writer(self):
        if not self._writes:
            return None, False
        try:
            return open_writer(self._tensorboard_dir, purge_step=self._resumed_at + 1)
        except OSError as error:
            if self._on_write_error == "raise":
                raise
            logger.warning("There will be no scalars in 'tensorboard_dir' %s: %s.", self._tensorboard_dir, error)
            return None, False

    def _write_scalars(self, entries):
        if self._writer is None:
            return
        for entry in entries:
            for field in FIELDS[1:]:
                # What is not known or not finite has no point in a curve.
                if entry[field] is not None and math.isfinite(entry[field]):
                    self._writer.add_scalar(f"{TAG}/{field}", float(entry[field]), global_step=entry["step"])

    def _react_to_write_error(self, message, error):
        if self._on_write_error == "raise":
            raise OSError(f"{message} Training stops, because 'on_write_error' is 'raise'.") from error
        if not self._failed:
            logger.warning("%s Training goes on; the record goes on as soon as it can.", message)
        self._failed = True
