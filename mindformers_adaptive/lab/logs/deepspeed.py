"""DeepSpeed's lines: one for an overflow, and one every so many steps with the number of skipped ones."""

from __future__ import annotations

import re
from itertools import pairwise

from mindformers_adaptive.lab.logs.entries import LARGEST_STEP, LONGEST_INTERVAL, LogEntry, Overflow, Reader
from mindformers_adaptive.lab.logs.lines import LogLines, parse_scale

__all__ = ["DeepSpeedReader", "OverflowLines"]

_ATTEMPT = re.compile(
    r"Attempted loss\s+scale:\s*([-+.\w]+?),\s*"
    r"(?:reducing to\s+([-+.\w]+?)|but hysteresis is\s+(\d+)\.\s*Reducing hysteresis to\s+(\d+))[,.]?(?=\s|$)",
    re.IGNORECASE,
)
_RANK = re.compile(r"\brank (\d+)", re.IGNORECASE)
_SOURCE = re.compile(r"\[(\w+)\.py:\d+")
_PROGRESS = re.compile(r"(?<!\w)step=(\d+), skipped=(\d+)(?=,|\s|$)")


class OverflowLines:
    """Groups the lines "OVERFLOW! ... Attempted loss scale" of several ranks and sources into skipped steps.

    A step's overflow is printed by every rank, or by rank 0 from more than one source file. So a line belongs to the
    same skipped step as the one before, if both name the same scales and this rank has not yet printed the line from
    this source file.
    """

    def __init__(self) -> None:
        self.pending: list[Overflow] = []
        self.merged = 0
        self._printed_by: set[tuple[str, str]] = set()

    def take(self, text: str, lines: LogLines) -> bool:
        """Take a line, if it is one about an overflow."""
        if "Attempted loss" not in text:
            return False
        overflow = _parse_attempt(text, lines.complete)
        if overflow is None:
            lines.problem("looks like a line about an overflow, but its loss scales cannot be read")
            return False
        source, rank = _SOURCE.findall(text), _RANK.findall(text)
        printer = (source[-1] if source else "", rank[-1] if rank else "")
        if self.pending and self._printed_by and overflow == self.pending[-1] and printer not in self._printed_by:
            self.merged += 1
        else:
            self.pending.append(overflow)
            self._printed_by = set()
        self._printed_by.add(printer)
        return True

    def hand_over(self) -> tuple[Overflow, ...]:
        """Return the skipped steps since the last call, and start anew."""
        taken, self.pending, self._printed_by = tuple(self.pending), [], set()
        return taken


class DeepSpeedReader(Reader):
    """Reads DeepSpeed's own lines.

    ``step=10, skipped=6`` counts from the start of the run. Overflows after the last such line, or in a log without
    any, are taken for steps that follow each other: how many steps were applied between them is not in the log.
    """

    name = "deepspeed"
    looked_for = '"... Attempted loss scale: A, reducing to B" and "step=N, skipped=M"'

    def __init__(self) -> None:
        super().__init__()
        self.overflows = OverflowLines()
        self._last_where = ""

    @staticmethod
    def is_step_line(text: str) -> bool:
        return ("Attempted loss" in text and _parse_attempt(text, True) is not None) or bool(_progress(text, True))

    def take(self, text: str, lines: LogLines) -> bool:
        if self.overflows.take(text, lines):
            self._last_where = lines.where
            return True
        if "skipped=" not in text:
            return False
        progress = _progress(text, lines.complete)
        if progress is None:
            if "step=" in text:
                lines.problem("looks like a line with the number of skipped steps, but cannot be read")
            return False
        step, skipped = progress
        entry = LogEntry(step, lines.where, skips=skipped, overflows=tuple(self.overflows.pending))
        if self.timeline.add(entry):
            self.overflows.hand_over()
        return True

    def finish(self) -> list[LogEntry]:
        entries = _skips_since_the_line_before(self.timeline.entries)
        left = self.overflows.hand_over()
        if left:
            last = entries[-1].step if entries else 0
            count = len(left)
            entries.append(
                LogEntry(last + count, self._last_where, skips=count, overflows=left, steps=count, placed=False)
            )
            self.timeline.notes.append(
                f"{self._last_where}: {count} overflow(s) up to here follow no line that names a step; they are "
                "counted as steps that follow each other, and applied steps between them are not in the log."
            )
        self.timeline.merged += self.overflows.merged
        return entries


def _skips_since_the_line_before(entries: list[LogEntry]) -> list[LogEntry]:
    """Turn the skips since the start of the run into those since the line before."""
    result: list[LogEntry] = []
    strides = [later.step - earlier.step for earlier, later in pairwise(entries)]
    for place, entry in enumerate(entries):
        if place == 0 and entry.step <= min(strides, default=LONGEST_INTERVAL):
            steps, skips = entry.step, entry.skips
        elif place == 0 or entry.after_restart:
            steps, skips = None, None
        else:
            earlier = entries[place - 1]
            steps, skips = entry.step - earlier.step, (entry.skips or 0) - (earlier.skips or 0)
            if not 0 <= skips <= steps:
                skips = None
        result.append(entry._replace(steps=steps or None, skips=skips))
    return result


def _parse_attempt(text: str, complete: bool) -> Overflow | None:
    match = _ATTEMPT.search(text)
    # The number at the end of a cut line may have lost digits.
    if match is None or (not complete and match.end() == len(text)):
        return None
    scale = parse_scale(match[1])
    reduced = scale if match[2] is None else parse_scale(match[2])
    if scale is None or reduced is None or reduced > scale:
        return None
    return Overflow(scale, reduced)


def _progress(text: str, complete: bool) -> tuple[int, int] | None:
    match = _PROGRESS.search(text) if "skipped=" in text else None
    if match is None or len(match[1]) > 16 or len(match[2]) > 16 or (not complete and match.end() == len(text)):
        return None
    step, skipped = int(match[1]), int(match[2])
    return (step, skipped) if skipped <= step <= LARGEST_STEP else None
