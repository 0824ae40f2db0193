"""``TrainingProgress``: shows step, loss, loss scale and skipped steps of a training in a progress bar."""

from collections.abc import Callable
from typing import Any

from mindformers.tools.utils import get_real_rank
from mindspore.train import Callback

from mindformers_adaptive.monitor.step_reader import find_reader, last_step_before, read_loss
from mindformers_adaptive.text.table import as_power_of_two


class TrainingProgress(Callback):
    """Callback that shows step, loss, loss scale and skipped steps of a training in a progress bar.

    Reading them waits for the device. So they are read only when the bar is drawn, or in every step if the update cell
    does not count skipped steps itself.

    Args:
        open_bar (Callable): called with the number of steps of the training. Returns a function to be called after each
            step with the number of the step and a function that returns the text beside the bar.
    """

    def __init__(self, open_bar: Callable[[int], Callable[..., None]]) -> None:
        super().__init__()
        self._open_bar = open_bar
        self._move: Callable[..., None] | None = None

    def on_train_begin(self, run_context: Any) -> None:
        """Open the bar in the first process.

        Args:
            run_context (RunContext): MindSpore's information about the training.
        """
        if get_real_rank() != 0:
            return
        params = run_context.original_args()
        self._reader = find_reader(params)
        self._shown = last_step_before(params, getattr(self._reader, "update_cell", None), 0)
        self._ahead_of_model = self._shown - params.cur_step_num
        self._move = self._open_bar((params.get("epoch_num") or 0) * (params.get("batch_num") or 0))

    def on_train_step_end(self, run_context: Any) -> None:
        """Move the bar to the last step.

        Args:
            run_context (RunContext): MindSpore's information about the training.
        """
        if self._move is None:
            return
        params = run_context.original_args()
        step = self._ahead_of_model + params.cur_step_num
        if self._reader is None or self._reader.counts_overflows:
            self._move(step, lambda: self._describe(step, params.net_outputs))
            return
        text = self._describe(step, params.net_outputs)
        self._move(step, lambda: text)

    def _describe(self, step: int, outputs: Any) -> str:
        loss = read_loss(outputs)
        words = [] if loss is None else [f"loss {loss:.4g}"]
        if self._reader is not None:
            [*_, last] = self._reader.read(step, max(step - self._shown, 1), outputs)
            words.append(f"loss scale {as_power_of_two(last['next_loss_scale'])}")
            if last["skipped_steps"] is not None:
                words.append(f"skipped {last['skipped_steps']}")
        self._shown = step
        return ", ".join(words)
