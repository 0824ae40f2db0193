"""This package's own record of a run: one JSON object a step."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

from mindformers_adaptive.lab.logs.reader import LARGEST_STEP, LogEntry, LogLines, Reader, parse_number

__all__ = ["JsonlReader"]


class JsonlReader(Reader):
    """Reads {"step": 1, "overflow": false, "loss_scale": 65536.0, "next_loss_scale": 65536.0, ...}.

    ``step``, ``overflow`` and ``loss_scale`` (used in the step) must be there, the last two may be null;
    ``next_loss_scale``, ``loss``, ``seconds``, ``scale_window``, ``largest_gradient``, ``overflowed_parameters`` and
    ``dropped_by_norm`` are used where they are, and other keys are ignored.
    {"missing_steps": 3, "first_step": 5, "last_step": 7} says that steps were not recorded.
    """

    name = "jsonl"
    looked_for = 'JSON objects, one a line, with "step", "overflow" and "loss_scale"'

    @classmethod
    def parse(cls, text: str, where: str, complete: bool) -> Iterator[LogEntry | str]:
        if '"step"' in text or '"missing_steps"' in text:
            yield _entry_of(_json_object(text), where) or (
                "looks like a step's record, but is no JSON object with step, overflow and loss_scale"
            )

    def take(self, text: str, lines: LogLines) -> bool:
        record = _json_object(text) if '"missing_steps"' in text else {}
        if "missing_steps" not in record:
            return super().take(text, lines)
        span = f"{record.get('first_step', '?')} to {record.get('last_step', '?')}"
        self.notes.append(f"{lines.where}: {record['missing_steps']} step(s) were not recorded ({span}).")
        return True


def _json_object(text: str) -> dict[str, object]:
    """The JSON object that a line is; an empty one where it is none."""
    try:
        record = json.loads(text) if text.startswith("{") and text.endswith("}") else None
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _entry_of(record: dict[str, object], where: str) -> LogEntry | None:
    step, overflow, loss_scale = record.get("step"), record.get("overflow"), parse_number(record.get("loss_scale"))
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= LARGEST_STEP:
        return None
    # null is what could not be known; another value that is none, or no value at all, is a torn record.
    unknown = {key for key in ("overflow", "loss_scale") if key in record and record[key] is None}
    if not (isinstance(overflow, bool) or "overflow" in unknown) or not (loss_scale > 0 or "loss_scale" in unknown):
        return None
    next_loss_scale, names = parse_number(record.get("next_loss_scale")), record.get("overflowed_parameters")
    return LogEntry(
        step,
        where,
        next_loss_scale=next_loss_scale if next_loss_scale > 0 else math.nan,
        loss_scale=loss_scale,
        overflow=overflow if isinstance(overflow, bool) else None,
        steps=1,
        overflowed_parameters=tuple(map(str, names)) if isinstance(names, list) else None,
        dropped_by_norm=record.get("dropped_by_norm") is True,
        loss=parse_number(record.get("loss")),
        seconds=parse_number(record.get("seconds")),
        largest_gradient=parse_number(record.get("largest_gradient")),
        scale_window=parse_number(record.get("scale_window")),
    )
