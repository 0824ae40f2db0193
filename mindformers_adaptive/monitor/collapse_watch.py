"""``CollapseWatch``: warns of a training whose steps are all skipped, if it has no ``LossScaleMonitor``."""

from typing import Any

from mindformers.tools.logger import logger
from mindformers.tools.utils import get_real_rank
from mindspore.train import Callback

from mindformers_adaptive.monitor import reports
from mindformers_adaptive.monitor.loss_scale_monitor import LossScaleMonitor
from mindformers_adaptive.monitor.step_reader import StepReader, find_reader, read_loss
from mindformers_adaptive.record.diagnosis import Diagnosis
from mindformers_adaptive.record.symptom import Seen

# Update cells of this package count overflows on the device, so the host need not wait for every step, only for every
# tenth step.
_EVERY = 10


class CollapseWatch(Callback):
    """Callback that warns of a bad loss, and of whatever else is wrong in the steps that the host sees.

    ``Trainer`` and the launcher add this callback. It only writes these warnings to the log, and does nothing if the
    training has a :class:`mindformers_adaptive.monitor.loss_scale_monitor.LossScaleMonitor`.

    Args:
        run_folder (str, optional): the output folder, if the configuration of the training was written there.
    """

    def __init__(self, run_folder: str | None = None) -> None:
        super().__init__()
        self.run_folder = run_folder

    def on_train_begin(self, run_context: Any) -> None:
        """Find the train-step cell that scales the loss.

        Args:
            run_context (RunContext): MindSpore's information about the training.
        """
        params = run_context.original_args()
        has_monitor = any(isinstance(callback, LossScaleMonitor) for callback in params.list_callback)
        self._reader = None if has_monitor or get_real_rank() != 0 else find_reader(params)
        if self._reader is None:
            return
        self._way = reports.way_to_the_cause([self])
        for message in reports.of_weights(self._reader.train_step, self._way):
            logger.warning("%s", message)
        self._diagnosis = Diagnosis()
        self._every = _EVERY if self._reader.counts_overflows else 1
        self._first = self._last = params.cur_step_num
        self._longest = 0

    def on_train_step_end(self, run_context: Any) -> None:
        """Check for overflows after the first and every tenth step, or every step if the update cell cannot count them.

        Args:
            run_context (RunContext): MindSpore's information about the training.
        """
        step = run_context.original_args().cur_step_num
        # A data sink takes several steps per call, so test whether a multiple of self._every was reached or passed.
        if self._reader is not None and (self._last == self._first or step // self._every > self._last // self._every):
            self._look(self._reader, run_context.original_args())

    def on_train_end(self, run_context: Any) -> None:
        """Check the loss and the overflows of the last step, and warn if no step of the training was applied.

        Args:
            run_context (RunContext): MindSpore's information about the training.
        """
        if self._reader is None:
            return
        if run_context.original_args().cur_step_num > self._last:
            self._look(self._reader, run_context.original_args())
        steps = self._last - self._first
        if 0 < steps <= self._longest:
            logger.warning("%s", reports.none_applied(steps, self._way))
        self._reader = None

    def _look(self, reader: StepReader, params: Any) -> None:
        step, outputs = params.cur_step_num, params.net_outputs
        [*_, last] = reader.read(step, step - self._last, outputs)
        self._last = step
        last["loss"] = read_loss(outputs)
        self._longest = last["consecutive_overflows"] or 0
        for sign in self._diagnosis.feed(Seen.of(last)):
            logger.warning("%s", reports.message_of(sign, self._way))
