"""Connect the callbacks that monitor loss scaling to MindFormers' PyNative trainer."""

from __future__ import annotations

import contextlib
from typing import Any

from mindspore.train import RunContext
from mindspore.train.callback import _InternalCallbackParam

from mindformers_adaptive.monitor.collapse_watch import CollapseWatch
from mindformers_adaptive.monitor.loss_scale_monitor import LossScaleMonitor

__all__ = ["ConnectedMonitor", "connect", "release"]


def connect(callbacks: Any, train_step: Any) -> Any:
    """Return the callbacks of MindFormers' PyNative trainer, with loss-scaling monitors connected to the train step.

    Args:
        callbacks (list): the trainer's callbacks, which may include :class:`LossScaleMonitor`.
        train_step (object): has the loss scale as ``scale_sense`` and the update cell as ``loss_scaling_manager``.

    Returns:
        list, in the order of ``callbacks``, except that the monitors and a new :class:`CollapseWatch` come before
        callbacks that save checkpoints, so that no checkpoint is ahead of a record.
    """
    savers = [callback for callback in callbacks if hasattr(callback, "save_path")]
    monitors = [callback for callback in callbacks if isinstance(callback, LossScaleMonitor)]
    connected = [ConnectedMonitor(monitor, train_step, monitors) for monitor in (*monitors, CollapseWatch())]
    without_monitors = [callback for callback in callbacks if callback not in monitors]
    first_saver = next(
        (index for index, callback in enumerate(without_monitors) if callback in savers), len(without_monitors)
    )
    return [*without_monitors[:first_saver], *connected, *without_monitors[first_saver:]]


def release(callbacks: Any) -> None:
    """Close the files of all connected monitors, even if the training failed."""
    for callback in callbacks:
        if isinstance(callback, ConnectedMonitor):
            callback.close()


class ConnectedMonitor:
    """Connects a callback written for ``mindspore.train.Model`` to MindFormers' PyNative trainer.

    Args:
        monitor (Callback): the callback.
        train_step (object): as in :func:`connect`.
        monitors (list): all monitors of the training.

    Raises:
        ValueError: if the monitor is to explain a collapse, which needs a network of the graph-mode trainer.
    """

    def __init__(self, monitor: Any, train_step: Any, monitors: Any) -> None:
        if getattr(monitor, "_explain", False):
            raise ValueError(
                "'explain' of LossScaleMonitor must be False with the PyNative trainer, but is True: the passes that "
                "explain a collapse need a train-step cell. Leave it out."
            )
        self.monitor = monitor
        params = _InternalCallbackParam()
        params.update(train_network=train_step, network=None, list_callback=[*monitors], dataset_sink_mode=False)
        self._params, self._context, self._open = params, RunContext(params), contextlib.ExitStack()

    def on_train_begin(self, args: Any, state: Any, **kwargs: Any) -> None:
        """Tell the monitor at which step the training begins."""
        self._params.update(cur_step_num=state.global_step, epoch_num=1, batch_num=state.max_steps)
        self._open.enter_context(self.monitor)
        self.monitor.on_train_begin(self._context)

    def on_step_end(self, args: Any, state: Any, loss: Any = None, grad_norm: Any = None, **kwargs: Any) -> None:
        """Tell the monitor that a step has ended, and end the training if the monitor requests that."""
        self._params.update(cur_step_num=state.global_step, net_outputs=(loss, None, None, None, grad_norm))
        self.monitor.on_train_step_end(self._context)
        if self._context.get_stop_requested():
            state.max_steps = state.global_step

    def on_train_end(self, args: Any, state: Any, **kwargs: Any) -> None:
        """Tell the monitor that the training has ended."""
        self.monitor.on_train_end(self._context)

    def close(self) -> None:
        """Close the files that the monitor has opened. Further calls do nothing."""
        self._open.close()

    def on_begin(self, args: Any, state: Any, **kwargs: Any) -> None:
        """Do nothing: loss-scaling monitors do not use this event of the trainer."""

    on_end = on_epoch_begin = on_epoch_end = on_step_begin = on_begin
