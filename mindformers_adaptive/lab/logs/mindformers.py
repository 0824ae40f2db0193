"""Lines that MindFormers prints."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

import numpy as np

from mindformers_adaptive.lab.logs.reader import (
    LARGEST_STEP,
    LogEntry,
    LogLines,
    Reader,
    parse_loss,
    parse_number,
    parse_scale,
)

__all__ = ["MindFormersReader"]

_STEP = re.compile(
    r"^\s*(\d{1,9})/\s*\d+\],\s*step:\[\s*(\d{1,16})/\s*(\d{1,16})\],\s*loss:\s*\[?\s*([-+.\w]+)"
    r".*?time:\s*([\d.]+)\s*ms,"
    r"(?:.*?overflow cond:\s*\[?\s*(True|False)\s*\]?,)?"
    r".*?loss_scale:\s*\[?\s*([-+.\w]+)\s*\]?(?=,|\s*$)"
)
# Version 2.0's PyNative trainer counts steps over all epochs and prints neither overflow nor scale.
_WITHOUT_SCALE = re.compile(r"\{ step:\[\s*(\d{1,16})/\s*\d+\],.*?\bloss:\s*([-+.\w/]+).*\}$")
# Other monitors name a step too, but go on without a comma: "step:[ 5/ 10] local_norm: 0.5".
_OTHER_MONITOR = re.compile(r"step:\[\s*\d+/\s*\d+\]\s+\w")
_WHOLE_SCALE = re.compile(r"[.e]|inf|nan|unavailable")
_NORM = re.compile(r"(?:global|grad)_norm:\s*\[?\s*([-+.\w]+)\s*\]?(?=,|\s*$)")
_START = "Epoch:["


class MindFormersReader(Reader):
    """Reads "{ Epoch:[ 1/ 1], step:[ 8/ 32], loss: ..., overflow cond: True, loss_scale: 524288.0, ... }".

    The scale is the one after the step's update, printed as float32 with 8 digits (268435460.0 for 2^28), so reading
    it as float32 restores it. In sink mode, or with ``per_print_times``, a line stands for several steps, and its flag
    is that of the last one.
    """

    name = "mindformers"
    looked_for = '"Epoch:[ E/ N], step:[ S/ M], loss: L, ... time: Tms, ... overflow cond: B, loss_scale: S"'

    def __init__(self) -> None:
        super().__init__()
        self._without_scale = 0

    @classmethod
    def parse(cls, text: str, where: str, complete: bool) -> Iterator[LogEntry | str]:
        if "step:[" not in text:
            return
        # Two lines that were written into each other start twice.
        for part in text.split(_START)[1:] or [text]:
            entry = _parse(part, where, complete) if _START in text else _parse_without_scale(part, where)
            if entry is not None:
                yield entry
            elif not _OTHER_MONITOR.search(part):
                yield "looks like a step's line, but its step, overflow or loss scale cannot be read"

    def take(self, text: str, lines: LogLines) -> bool:
        used = super().take(text, lines)
        self._without_scale += used and _START not in text
        return used

    def finish(self) -> Sequence[LogEntry]:
        if self._without_scale:
            self.notes.append(
                f"{self.entries[-1].where}: {self._without_scale} line(s) up to here are of a trainer that prints no "
                "loss scale; nothing is known of their steps."
            )
        return super().finish()


def _parse_without_scale(text: str, where: str) -> LogEntry | None:
    match = _WITHOUT_SCALE.search(text)
    if match is None or int(match[1]) > LARGEST_STEP:
        return None
    norm = _NORM.search(text)
    return LogEntry(int(match[1]), where, loss=parse_loss(match[2]), gradient_norm=parse_number(norm and norm[1]))


def _parse(text: str, where: str, complete: bool) -> LogEntry | None:
    match = _STEP.search(text)
    if match is None or (match[6] is None and "overflow cond" in text):
        return None
    # The number at the end of a cut line may have lost digits, and what NumPy prints has a point or an exponent.
    if (not complete and match.end() == len(text)) or _WHOLE_SCALE.search(match[7]) is None:
        return None
    scale = math.nan if match[7] in ("unavailable", "nan") else parse_scale(match[7])
    epoch, steps_per_epoch = int(match[1]), int(match[3])
    step = max(epoch - 1, 0) * steps_per_epoch + int(match[2])
    if scale is None or step > LARGEST_STEP:
        return None
    norm = _NORM.search(text) if complete else None
    return LogEntry(
        step,
        where,
        next_loss_scale=float(np.float32(scale)),
        overflow=None if match[6] is None else match[6] == "True",
        loss=parse_loss(match[4]),
        # Up to 0.7 the time is that of the whole call, which in sink mode is more than one step.
        seconds=parse_number(match[5]) / 1000.0 if "per_step_time" in text else math.nan,
        gradient_norm=parse_number(norm and norm[1]),
    )
