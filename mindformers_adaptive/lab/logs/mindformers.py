"""Lines that MindFormers prints, and those of the record of ``LossScaleMonitor``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import numpy as np

from mindformers_adaptive.lab.logs.reader import LARGEST_STEP, LogEntry, LogLines, Reader, parse_number, parse_scale
from mindformers_adaptive.text.files import json_object

__all__ = ["JsonlReader", "MindFormersReader"]

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

    def finish(self) -> list[LogEntry]:
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
    return LogEntry(int(match[1]), where, loss=parse_number(match[2]))


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
    return LogEntry(
        step,
        where,
        next_loss_scale=float(np.float32(scale)),
        overflow=None if match[6] is None else match[6] == "True",
        loss=parse_number(match[4]),
        # Up to 0.7 the time is that of the whole call, which in sink mode is more than one step.
        seconds=parse_number(match[5]) / 1000.0 if "per_step_time" in text else math.nan,
    )


class JsonlReader(Reader):
    """Reads {"step": 1, "overflow": false, "loss_scale": 65536.0, "next_loss_scale": 65536.0, ...}.

    ``step``, ``overflow`` and ``loss_scale`` (used in the step) must be there, the last two may be null;
    ``next_loss_scale``, ``loss``, ``seconds``, ``scale_window``, ``largest_gradient``, ``gradient_format``,
    ``overflowed_parameters`` and ``dropped_by_norm`` are used where they are, and other keys are ignored.
    {"missing_steps": 3, "first_step": 5, "last_step": 7} says that steps were not recorded.
    """

    name = "jsonl"
    looked_for = 'JSON objects, one a line, with "step", "overflow" and "loss_scale"'

    @classmethod
    def parse(cls, text: str, where: str, complete: bool) -> Iterator[LogEntry | str]:
        if '"step"' in text or '"missing_steps"' in text:
            yield _entry_of(json_object(text), where) or (
                "looks like a step's record, but is no JSON object with step, overflow and loss_scale"
            )

    def take(self, text: str, lines: LogLines) -> bool:
        record = json_object(text) if '"missing_steps"' in text else {}
        if "missing_steps" not in record:
            return super().take(text, lines)
        span = f"{record.get('first_step', '?')} to {record.get('last_step', '?')}"
        self.notes.append(f"{lines.where}: {record['missing_steps']} step(s) were not recorded ({span}).")
        return True


def _entry_of(record: dict[str, object], where: str) -> LogEntry | None:
    step, overflow, loss_scale = record.get("step"), record.get("overflow"), parse_scale(record.get("loss_scale"))
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= LARGEST_STEP:
        return None
    # null is what could not be known; another value that is none, or no value at all, is a torn record.
    unknown = {key for key in ("overflow", "loss_scale") if key in record and record[key] is None}
    if not (isinstance(overflow, bool) or "overflow" in unknown) or not (loss_scale or "loss_scale" in unknown):
        return None
    names = record.get("overflowed_parameters")
    return LogEntry(
        step,
        where,
        next_loss_scale=parse_scale(record.get("next_loss_scale")) or math.nan,
        loss_scale=loss_scale or math.nan,
        overflow=overflow if isinstance(overflow, bool) else None,
        steps=1,
        overflowed_parameters=tuple(map(str, names)) if isinstance(names, list) else None,
        dropped_by_norm=record.get("dropped_by_norm") is True,
        loss=parse_number(record.get("loss")),
        seconds=parse_number(record.get("seconds")),
        largest_gradient=parse_number(record.get("largest_gradient")),
        scale_window=parse_number(record.get("scale_window")),
        gradient_format=record.get("gradient_format"),
    )
