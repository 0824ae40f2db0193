"""The lines of Megatron-LM, DeepSpeed, and Megatron-DeepSpeed, which prints those of both.

Megatron-LM prints one line every so many iterations; DeepSpeed one for an overflow, and one every so many steps with
the number of skipped ones.
"""

from __future__ import annotations

import re
from itertools import pairwise

from mindformers_adaptive.lab.logs.reader import (
    LARGEST_STEP,
    LONGEST_INTERVAL,
    LogEntry,
    LogLines,
    Overflow,
    Reader,
    parse_number,
    parse_scale,
)

__all__ = ["DeepSpeedReader", "MegatronReader"]

_ATTEMPT = re.compile(
    r"Attempted loss\s+scale:\s*([-+.\w]+?),\s*"
    r"(?:reducing to\s+([-+.\w]+?)|but hysteresis is\s+(\d+)\.\s*Reducing hysteresis to\s+(\d+))[,.]?(?=\s|$)",
    re.IGNORECASE,
)
_RANK = re.compile(r"\brank (\d+)", re.IGNORECASE)
_SOURCE = re.compile(r"\[(\w+)\.py:\d+")
_PROGRESS = re.compile(r"(?<!\w)step=(\d+), skipped=(\d+)(?=,|\s|$)")

_ITERATION = re.compile(r"iteration\s+(\d{1,16})/\s*\d+\s*\|")
_LOSS_SCALE = re.compile(r"loss scale:?\s*([-+.\w]+)\s*\|")
_SKIPPED = re.compile(r"number of skipped iterations:?\s*(\d{1,16})\s*\|")
_LOSS = re.compile(r"lm loss:?\s*([-+.\w]+)\s*\|")
_ELAPSED = re.compile(r"elapsed time per iteration \((ms|s)\):?\s*([\d.]+)\s*\|")

# Fields that only Megatron-DeepSpeed prints; there the engine skips the step, and the number printed stays 0.
_COUNT_STAYS_ZERO = re.compile("samples per second:|TFLOPs:")


class _OverflowReader(Reader):
    """Groups the lines "OVERFLOW! ... Attempted loss scale" of several ranks and sources into skipped steps.

    A step's overflow is printed by every rank, or by rank 0 from more than one source file. So a line belongs to the
    same skipped step as the one before, if both name the same scales and this rank has not yet printed the line from
    this source file.

    Attributes:
        overflows (list[Overflow]): the skipped steps since the last entry.
    """

    def __init__(self) -> None:
        super().__init__()
        self.overflows: list[Overflow] = []
        self._printed_by: set[tuple[str, str]] = set()

    def add(self, entry: LogEntry) -> bool:
        """Take an entry, with the skipped steps before it."""
        is_new = super().add(entry._replace(overflows=tuple(self.overflows)))
        if is_new:
            self.overflows, self._printed_by = [], set()
        return is_new

    def take_overflow(self, text: str, lines: LogLines) -> bool:
        """Take a line, if it is one about an overflow."""
        if "Attempted loss" not in text:
            return False
        overflow = _parse_attempt(text, lines.complete)
        if overflow is None:
            lines.problem("looks like a line about an overflow, but its loss scales cannot be read")
            return False
        source, rank = _SOURCE.findall(text), _RANK.findall(text)
        printer = (source[-1] if source else "", rank[-1] if rank else "")
        if self.overflows and overflow == self.overflows[-1] and printer not in self._printed_by:
            self.merged += 1
        else:
            self.overflows.append(overflow)
            self._printed_by = set()
        self._printed_by.add(printer)
        return True


class MegatronReader(_OverflowReader):
    """Reads " iteration 10/ 1000 | ... | loss scale: 8388608.0 | number of skipped iterations: 10 |".

    The scale is the one after the iteration. Where DeepSpeed's lines about overflows stand between two such lines,
    they say how many steps were skipped.
    """

    name = "megatron"
    looked_for = '" iteration N/ M | ... | loss scale: S | number of skipped iterations: K |"'
    printed_with = ("deepspeed",)

    @staticmethod
    def is_step_line(text: str) -> bool:
        return any(_parse_iteration(part, "", True) for part in _iterations(text))

    def take(self, text: str, lines: LogLines) -> bool:
        if self.take_overflow(text, lines):
            return True
        used = False
        for part in _iterations(text):
            entry = _parse_iteration(part, lines.where, lines.complete)
            if entry is None:
                lines.problem("looks like an iteration's line, but its loss scale or skipped iterations cannot be read")
            else:
                used = True
                self.add(entry)
        return used

    def finish(self) -> list[LogEntry]:
        if self.overflows:
            self.notes.append(
                f"{self.entries[-1].where if self.entries else 'The log'}: {len(self.overflows)} overflow(s) after the "
                "last iteration's line belong to no step that is in the log and are left out."
            )
        return super().finish()


class DeepSpeedReader(_OverflowReader):
    """Reads DeepSpeed's own lines.

    ``step=10, skipped=6`` counts from the start of the run. Overflows after the last such line, or in a log without
    any, are taken for steps that follow each other: how many steps were applied between them is not in the log.
    """

    name = "deepspeed"
    looked_for = '"... Attempted loss scale: A, reducing to B" and "step=N, skipped=M"'

    def __init__(self) -> None:
        super().__init__()
        self._last_where = ""

    @staticmethod
    def is_step_line(text: str) -> bool:
        return _parse_attempt(text, True) is not None or _parse_progress(text, True) is not None

    def take(self, text: str, lines: LogLines) -> bool:
        if self.take_overflow(text, lines):
            self._last_where = lines.where
            return True
        progress = _parse_progress(text, lines.complete)
        if progress is None:
            if "skipped=" in text and "step=" in text:
                lines.problem("looks like a line with the number of skipped steps, but cannot be read")
            return False
        step, skipped = progress
        self.add(LogEntry(step, lines.where, skips=skipped))
        return True

    def finish(self) -> list[LogEntry]:
        entries = _skips_since_the_line_before(self.entries)
        count = len(self.overflows)
        if count:
            step, left = count + (entries[-1].step if entries else 0), tuple(self.overflows)
            entries.append(LogEntry(step, self._last_where, skips=count, overflows=left, steps=count, placed=False))
            self.notes.append(
                f"{self._last_where}: {count} overflow(s) up to here follow no line that names a step; they are "
                "counted as steps that follow each other, and applied steps between them are not in the log."
            )
        super().finish()
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
    match = _ATTEMPT.search(text) if "Attempted loss" in text else None
    # The number at the end of a cut line may have lost digits.
    if match is None or (not complete and match.end() == len(text)):
        return None
    scale = parse_scale(match[1])
    reduced = scale if match[2] is None else parse_scale(match[2])
    if scale is None or reduced is None or reduced > scale:
        return None
    return Overflow(scale, reduced)


def _parse_progress(text: str, complete: bool) -> tuple[int, int] | None:
    match = _PROGRESS.search(text) if "skipped=" in text else None
    if match is None or len(match[1]) > 16 or len(match[2]) > 16 or (not complete and match.end() == len(text)):
        return None
    step, skipped = int(match[1]), int(match[2])
    return (step, skipped) if skipped <= step <= LARGEST_STEP else None


def _iterations(text: str) -> list[str]:
    """The parts of a line that speak of an iteration each: two lines that were written into each other have two."""
    starts = [match.start() for match in _ITERATION.finditer(text)]
    return [text] if len(starts) == 1 else [text[start:end] for start, end in pairwise([*starts, len(text)])]


def _parse_iteration(text: str, where: str, complete: bool) -> LogEntry | None:
    iteration, printed_scale = _ITERATION.search(text), _LOSS_SCALE.search(text)
    scale = None if printed_scale is None else parse_scale(printed_scale[1])
    if iteration is None or scale is None or int(iteration[1]) > LARGEST_STEP:
        return None
    count = _SKIPPED.search(text)
    skips = None if count is None else int(count[1])
    if skips is None and ("number of" in text or not complete):
        return None
    if skips == 0 and _COUNT_STAYS_ZERO.search(text):
        skips = None
    loss, elapsed = _LOSS.search(text), _ELAPSED.search(text)
    return LogEntry(
        int(iteration[1]),
        where,
        next_loss_scale=scale,
        skips=skips,
        loss=parse_number(loss and loss[1]),
        seconds=parse_number(elapsed and elapsed[2]) / (1000.0 if elapsed and elapsed[1] == "ms" else 1.0),
    )
