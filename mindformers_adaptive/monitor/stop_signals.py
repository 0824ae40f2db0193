"""A report when SIGTERM or SIGINT stops a process."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

__all__ = ["StopSignals"]


class StopSignals:
    """Calls a function when SIGTERM or SIGINT arrives, and then the handler that was there before.

    Python runs handlers between two steps of the interpreter: the report, and the end of the process, wait until the
    call of MindSpore that is under way returns.

    Args:
        report (Callable): called with the signal's name.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._process = 0
        self._previous: dict[int, Callable[[int, FrameType | None], object] | int] = {}

    def install(self) -> None:
        """Put the handlers in place. In any other than the main thread this does nothing."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._process = os.getpid()
        for number in (signal.SIGTERM, signal.SIGINT):
            previous = signal.getsignal(number)
            # None is a handler that was not set from Python and could not be restored.
            if previous not in (None, signal.SIG_IGN, self._handle):
                self._previous[number] = previous
                signal.signal(number, self._handle)

    def restore(self) -> None:
        """Put the previous handlers back, unless others have taken the place of these."""
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # A process that was forked meanwhile, to load data, is none of the run.
        if os.getpid() == self._process:
            self._report(signal.Signals(number).name)
        previous = self._previous[number]
        if callable(previous):
            previous(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
