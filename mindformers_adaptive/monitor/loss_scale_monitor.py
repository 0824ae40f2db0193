"""``LossScaleMonitor``: records what loss scaling did in every step, in a file, in TensorBoard and in the log."""

import functools
import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mindformers.tools.logger import logger
from mindspore.train import ModelCheckpoint

from mindformers_adaptive.monitor import reports
from mindformers_adaptive.monitor.recording_callback import RecordingCallback
from mindformers_adaptive.monitor.step_reader import find_reader, read_loss
from mindformers_adaptive.record.diagnosis import Diagnosis
from mindformers_adaptive.record.run_folder import BATCH_FILE
from mindformers_adaptive.record.step import FIELDS, RARE_FIELDS
from mindformers_adaptive.record.symptom import Seen, Sign
from mindformers_adaptive.rules.checks import imported, require_choice, require_flag, require_integer


class LossScaleMonitor(RecordingCallback):
    """Callback that records what loss scaling did in every step.

    It works with ``mindspore.train.Model`` and, after ``register()``, as ``type: LossScaleMonitor`` in the
    ``callbacks`` of a MindFormers YAML file, with any train-step cell that scales its loss. The record is a file of
    JSON lines, one a step, see :class:`mindformers_adaptive.record.writer.RunRecord`:

    ================================ ===========================================================================
    key                              value
    ================================ ===========================================================================
    ``step``                         number of the step, from 1; a resumed run counts on
    ``loss``                         mean of the loss that the train-step cell returns
    ``overflow``                     whether the step overflowed and was skipped
    ``loss_scale``                   the loss scale that the step used
    ``next_loss_scale``              the loss scale for the next step, as in MindFormers' own log line
    ``scale_window, window_index``   window after the step, in steps, and its place on the ladder
    ``growth_num, down_num``         counts of raises and drops after the step
    ``skipped_steps``                overflowed steps so far
    ``largest_gradient``             largest absolute gradient of the step, unscaled and before clipping
    ``gradient_format``              the format that a rule takes it to be in; only where the rule needs it
    ``dropped_by_norm``              whether MindFormers dropped the step for the size of its gradients, with
                                     ``use_skip_data_by_global_norm``; that is no overflow, and the scale stays
    ``gradient_norm``                norm of all gradients, unscaled and before clipping, as MindFormers' train-step
                                     cells return it with ``use_clip_grad``, or in one process with ``local_norm``
    ================================ ===========================================================================

    A value is null where it is unknown: the window of another update cell, the largest gradient where the cell does not
    track it, or the loss of a step inside a sink. The host reads the device every ``every_n_steps`` steps, or once a
    sink. If ``history_size`` of the update cell is at least as large, the record has every step; otherwise one line
    counts those that are missing.

    A run that is resumed from a checkpoint continues the file, and steps that it takes again replace the old ones. A
    new run renames the file of an earlier run; one that starts while another run writes the file takes a file of its
    own. Both names end in the number of a run, by which each run finds its record again. The host reads the device
    before each checkpoint too, so that no checkpoint is ahead of the record.

    Args:
        record_path (str, optional): the file. Default: None, ``loss_scale_record.jsonl`` in the output folder of
            MindFormers, which is ``./output`` unless set otherwise.
        every_n_steps (int): every how many steps the host reads the device, and waits for it. Default: 1, as in
            MindFormers' ``MFLossMonitor``.
        tensorboard_dir (str, optional): a folder for TensorBoard scalars ``loss_scaling/KEY``. Where the YAML file has
            a ``tensorboard`` section, they go beside MindFormers' own instead. Default: None.
        max_consecutive_overflows (int, optional): how many overflows in a row are a collapse, or a fifth as many, at
            least 10, while the loss scale stays the same; None if no number is. Default: 50, because from 2^32, the
            usual start, 32 halvings end at a scale of 1.
        on_collapse (str): ``"warn"``, as MindSpore's own cells train on, ``"stop"`` (training ends as if it were
            done) or ``"raise"``. Default: ``"warn"``.
        on_write_error (str): ``"warn"`` (training goes on, and the record when it can) or ``"raise"``. Default:
            ``"warn"``.
        all_ranks (bool): whether every process writes, each into files with its rank in the name, or only the first.
            Default: False, because loss scaling is the same in all.
        explain (bool): whether, at a loss that is inf or NaN and else at a collapse, the process that writes says which
            layer overflows and what helps, by passes in PyNative mode on the batch of this step. The log has the text;
            beside the record, ``overflow_explanation.json`` has everything and ``overflow_batch.npz`` the batch, until
            the next explanation. With ``every_n_steps`` above 1 only a collapse is explained. Default: False.
        log (Union[Callable, str], optional): a function for another logger, called as ``log(numbers, step)`` with each
            recorded step, such as ``wandb.log``, ``mlflow.log_metrics`` or ``swanlab.log``; in a YAML file its name,
            ``module.function``. ``numbers`` is a dict of floats by ``loss_scaling/KEY``, without those that are
            unknown, inf or NaN; ``overflow`` is 1.0 in a skipped step. If the function raises an error,
            ``on_write_error`` says what happens. Default: None.

    Raises:
        TypeError: if an argument is not of its type.
        ValueError: if an argument is out of its range, or ``log`` names a function that cannot be imported.
        RuntimeError: in training, for a collapse with ``on_collapse="raise"``.
        OSError: in training, for a record that cannot be written with ``on_write_error="raise"``.

    Examples:
        >>> import pathlib, tempfile
        >>> import numpy as np
        >>> from mindspore import dataset, nn, train
        >>> from mindformers_adaptive.record.writer import read_record
        >>> from mindformers_adaptive.wrapper import AdaptiveLossScaleUpdateCell, TrainOneStepWithLossScaleCell
        >>> net = nn.Dense(3, 2)
        >>> optimizer = nn.SGD(net.trainable_params(), learning_rate=0.1)
        >>> update_cell = AdaptiveLossScaleUpdateCell(loss_scale_value=2**12, scale_factor=2, scale_window=20)
        >>> train_step = TrainOneStepWithLossScaleCell(nn.WithLossCell(net, nn.MSELoss()), optimizer, update_cell)
        >>> samples = [(np.full(3, value, np.float32), np.zeros(2, np.float32)) for value in (1, np.inf)]
        >>> data = dataset.GeneratorDataset(samples, ["features", "target"], shuffle=False).batch(1)
        >>> file = pathlib.Path(tempfile.mkdtemp(), "record.jsonl")
        >>> train.Model(train_step).train(1, data, callbacks=[LossScaleMonitor(file)])
        >>> [(line["step"], line["overflow"], line["next_loss_scale"]) for line in read_record(file)]
        [(1, False, 4096.0), (2, True, 2048.0)]
    """

    subject = "Loss scaling"
    file_name = "loss_scale_record.jsonl"

    def __init__(
        self,
        record_path: str | os.PathLike[str] | None = None,
        every_n_steps: int = 1,
        tensorboard_dir: str | os.PathLike[str] | None = None,
        max_consecutive_overflows: int | None = 50,
        on_collapse: str = "warn",
        on_write_error: str = "warn",
        all_ranks: bool = False,
        explain: bool = False,
        log: Callable[[dict[str, float], int], object] | str | None = None,
    ) -> None:
        super().__init__(record_path, tensorboard_dir, all_ranks, on_write_error)
        self._log, self._log_failed = _require_logger(log), False
        self._explain = require_flag("explain", explain)
        self._every_n_steps = require_integer(
            "every_n_steps", every_n_steps, 1, "Give 1 or more; 1 looks at every step.", unit="number of steps"
        )
        if max_consecutive_overflows is not None:
            remedy, unit = "Give 1 or more; null, in Python None, allows any number.", "number of steps"
            require_integer("max_consecutive_overflows", max_consecutive_overflows, 1, remedy, unit=unit)
        self._max_consecutive_overflows = max_consecutive_overflows
        self._on_collapse = require_choice("on_collapse", on_collapse, ("warn", "stop", "raise"))
        self._reader: Any = None
        self._savers: list[Any] = []

    def on_train_begin(self, run_context: Any) -> None:
        """Find the train-step cell that scales the loss and the step to resume from, and open the record.

        Args:
            run_context (RunContext): MindSpore's information about the training.
        """
        params = run_context.original_args()
        self._reader = find_reader(params)
        if self._reader is None:
            logger.warning(
                "LossScaleMonitor records nothing: the network that is trained does not scale its loss. Train it with "
                "a train-step cell that has a scale_sense, such as TrainOneStepWithLossScaleCell or MFTrainOneStepCell."
            )
            return
        # If this monitor has a record, an earlier training in the same process has used the monitor. Then the new
        # training is not a resume, even if it continues the step count.
        is_first_training = self._record is None
        self._open(params, self._reader.update_cell)
        # The host can only see the batch of the current step, and no batch in data-sink mode.
        self._has_batch = self._explain and self._every_n_steps == 1 and not params.dataset_sink_mode
        batch = str(self._record.path.parent / BATCH_FILE) if self._has_batch else ""
        self._way = reports.way_to_the_cause(params.list_callback)
        # The batch of a bad loss and of a collapse is saved.
        self._way_with_batch = reports.way_to_the_cause(params.list_callback, batch)
        self._diagnosis = Diagnosis(self._max_consecutive_overflows, batch)
        self._ahead_of_cell = self._last_step - (self._reader.steps_taken() or 0)
        self._called_at = self._first_step = self._last_step
        self._longest, self._resumes = 0, is_first_training and self._last_step > 0
        self._seen: dict[int, Any] = {}
        # Open the record before the first step, so that an error is reported at once if its folder cannot be written
        # to.
        self._append([])
        self._reader.count_from(self._record.last_skipped_steps if self._last_step else 0)
        self._look_before_saving(run_context)
        # An update cell that follows the largest gradient raises the loss scale without a scale window.
        window = None if self._reader.measures_gradients else self._reader.window[0]
        too_short = reports.too_short_for_window(params, window, self._last_step)
        of_weights = reports.of_weights(self._reader.train_step, self._way) if self._writes else []
        for message in filter(None, (too_short, *of_weights)):
            logger.warning("%s", message)

    def on_train_step_end(self, run_context: Any) -> None:
        """Every ``every_n_steps`` steps, record the steps that were taken since the last recording.

        Args:
            run_context (RunContext): MindSpore's information about the training.
        """
        if self._reader is None:
            return
        called_before = self._called_at
        self._note_call(run_context)
        # A data sink takes several steps per call, so test whether a multiple of every_n_steps was reached or passed.
        if self._called_at // self._every_n_steps > called_before // self._every_n_steps:
            self._look(run_context)

    def on_train_end(self, run_context: Any) -> None:
        """Record the last steps of the run that are not recorded yet, and close the record.

        Args:
            run_context (RunContext): MindSpore's information about the training.
        """
        if self._reader is not None and self._seen:
            self._look(run_context)
        steps = 0 if self._reader is None else self._last_step - self._first_step
        if 0 < steps <= self._longest and self._writes:
            logger.warning("%s", reports.none_applied(steps, self._way))
        super().on_train_end(run_context)

    def _release(self) -> None:
        super()._release()
        for saver in self._savers:
            saver.looks_before_saving.remove(self._look_now)
            if not saver.looks_before_saving:
                # The saver object has a replacement of the method _check_save_ckpt as an attribute. Delete this
                # attribute, so that the method of the saver's class is used again.
                del saver._check_save_ckpt
        self._savers = []

    def _note_call(self, run_context: Any) -> None:
        params = run_context.original_args()
        self._called_at = self._ahead_of_model + params.cur_step_num
        self._seen[self._called_at] = params.net_outputs

    def _look_before_saving(self, run_context: Any) -> None:
        # A run that is killed resumes after its last checkpoint, so record all steps before a checkpoint is saved.
        self._look_now = functools.partial(self._note_and_look, run_context)
        savers = run_context.original_args().list_callback
        self._savers = [saver for saver in savers if isinstance(saver, ModelCheckpoint)]
        for saver in self._savers:
            looks = vars(saver).setdefault("looks_before_saving", [])
            if not looks:
                saver._check_save_ckpt = functools.partial(_look_if_due, saver._check_save_ckpt, looks)
            looks.append(self._look_now)

    def _note_and_look(self, run_context: Any) -> None:
        self._note_call(run_context)
        self._look(run_context, is_saved=True)

    def _will_be_saved(self, params: Any) -> bool:
        """Return whether a checkpoint callback will save the present step, as the last step or because it is due."""
        steps_of_training = (params.get("epoch_num") or 0) * (params.get("batch_num") or 0)
        is_last = 0 < steps_of_training <= params.cur_step_num
        intervals = ((saver, saver._config.save_checkpoint_steps) for saver in self._savers)
        return any(
            is_last or (steps and params.cur_step_num >= saver._last_triggered_step + steps)
            for saver, steps in intervals
        )

    def _look(self, run_context: Any, is_saved: bool = False) -> None:
        window = self._reader.window
        entries = self._read_entries(run_context.original_args().net_outputs)
        if not entries:
            return
        fields = (*FIELDS, *self._reader.recorded)
        names = (*fields, *RARE_FIELDS)
        # Mark the first step after a resume, and the steps that a checkpoint callback saves.
        if self._resumes:
            entries[0]["resumed"], self._resumes = True, False
        if is_saved or self._will_be_saved(run_context.original_args()):
            entries[-1]["saved"] = True
        steps = [Seen.of(entry) for entry in entries]
        for entry, seen in zip(entries, steps, strict=True):
            if seen.is_applied_bad_loss:
                entry["applied_bad_loss"] = True
        self._append([{field: entry[field] for field in names if field in entry} for entry in entries])
        for entry in entries:
            numbers = {f"loss_scaling/{field}": float(entry[field]) for field in fields[1:] if _is_finite(entry[field])}
            for tag, number in numbers.items():
                self._add_scalar(tag, number, entry["step"])
            self._hand_over(numbers, entry["step"])
            window = self._report_window(window, entry)
        # Warn only after the record is written, so that the record is complete when a user looks for the cause.
        self._longest = entries[-1]["consecutive_overflows"] or 0
        for seen in steps:
            for sign in self._diagnosis.feed(seen):
                self._report(sign, seen, run_context)

    def _report(self, sign: Sign, seen: Seen, run_context: Any) -> None:
        """Warn of a sign of something wrong, explain it if asked to, and react to a collapse."""
        is_explained = sign.kind in ("bad loss", "collapse")
        message = reports.message_of(sign, self._way_with_batch if is_explained else self._way)
        if sign.remedy and self._explain and self._writes:
            message += self._explanation(sign, seen, run_context.original_args())
        if sign.kind == "collapse" and self._on_collapse != "warn":
            # All processes see the same overflows, so all of them stop at the same step.
            if self._on_collapse == "raise":
                raise RuntimeError(message)
            message += " Training stops here, because 'on_collapse' is 'stop'."
            run_context.request_stop()
        if self._writes:
            logger.warning("%s", message)

    def _hand_over(self, numbers: dict[str, float], step: int) -> None:
        """Call the function ``log`` with the numbers of a step. A logger that fails stops no training, unless asked."""
        if self._log is None or not self._writes:
            return
        try:
            self._log(numbers, step)
            self._log_failed = False
        except Exception as error:
            if self._on_write_error == "raise":
                raise
            if not self._log_failed:
                logger.warning(
                    "The function 'log' of LossScaleMonitor failed at step %s: %r. Training goes on, and the function "
                    "is called again at the next step. The record has all steps.",
                    step,
                    error,
                )
            self._log_failed = True

    def _read_entries(self, outputs: Any) -> list[dict[str, Any]]:
        """Return the steps since the last call, oldest first, with the losses and gradient norms that the host saw."""
        taken = self._reader.steps_taken()
        step = self._called_at if taken is None else self._ahead_of_cell + taken
        seen, self._seen = self._seen, {}
        if step == self._last_step:
            return []
        went_back = step < self._last_step
        entries: list[dict[str, Any]] = self._reader.read(step, step if went_back else step - self._last_step, outputs)
        if went_back:
            # The training was set back to an earlier state, and takes the steps after that state again.
            self._resume_after = entries[0]["step"] - 1
            self._resumes = True
        # If one call of the network takes several steps, it returns only the loss of the last step.
        if step != self._called_at:
            seen = {step: seen[self._called_at]}
        for entry in entries:
            outputs = seen.get(entry["step"])
            entry["loss"] = read_loss(outputs)
            entry["gradient_norm"] = self._reader.gradient_norm(outputs)
            entry["dropped_by_norm"] = self._reader.dropped_by_norm(entry["overflow"], entry["gradient_norm"])
        self._last_step = step
        return entries

    def _report_window(self, before: tuple[Any, ...], entry: Mapping[str, Any]) -> tuple[Any, ...]:
        after = (entry["scale_window"], entry["window_index"])
        if after != before and self._writes:
            (window, index), (next_window, next_index) = before, after
            places = "" if index is next_index is None else f" (index {index} to {next_index})"
            change = f"the window goes from {window} to {next_window}{places}, at loss scale {entry['next_loss_scale']}"
            logger.info("Loss scaling: at step %s %s.", entry["step"], change)
        return after

    def _explanation(self, sign: Sign, seen: Seen, params: Any) -> str:
        """Return why a step with a bad loss or a collapse overflows, or why that cannot be said; else ""."""
        has_bad_loss = seen.loss is not None and not math.isfinite(seen.loss)
        # A collapse with a bad loss is explained where the loss became bad, if the batch of that step was known.
        wanted = "bad loss" if has_bad_loss and self._has_batch else "collapse"
        if sign.kind != wanted:
            return ""
        batch = None if params.dataset_sink_mode else params.get("train_dataset_element")
        scale = seen.next_loss_scale if seen.loss_scale is None else seen.loss_scale
        folder = self._record.path.parent
        findings = [finding for finding in self._diagnosis.findings() if not finding.is_over]
        return reports.explain_collapse(self._reader.train_step, batch, scale, seen.step, folder, findings)


def _look_if_due(is_due: Callable[..., bool], looks: Iterable[Callable[[], None]], *args: Any, **kwargs: Any) -> bool:
    due = is_due(*args, **kwargs)
    for look in looks if due else []:
        look()
    return due


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _require_logger(log: Any) -> Any:
    """Return the function ``log``, imported if it was given by its name."""
    wanted = "'log' must be a function, in a YAML file 'module.function', but"
    function = imported(log, wanted) if isinstance(log, str) else log
    if function is not None and not callable(function):
        raise TypeError(
            f"'log' must be a function, but got {log!r} of type {type(function).__name__}. Give a function that takes "
            "a dict of numbers and a step, such as wandb.log, or leave 'log' out."
        )
    return function
