"""The lines of Megatron-LM, DeepSpeed, and Megatron-DeepSpeed, which prints those of both.

Megatron-LM prints one line every so many iterations; DeepSpeed one for an overflow, and one every so many steps with
the number of skipped ones.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from mindformers_adaptive.lab.logs.reader import (
    LARGEST_STEP,
    LONGEST_INTERVAL,
    LogEntry,
    Overflow,
    Reader,
    parse_loss,
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
_PROGRESS = re.compile(r"(?<!\w)step=(\d{1,16}), skipped=(\d{1,16})(?=,|\s|$)")

_ITERATION = re.compile(r"iteration\s+(\d{1,16})/\s*\d+\s*\|")
_LOSS_SCALE = re.compile(r"loss scale:?\s*([-+.\w]+)\s*\|")
_SKIPPED = re.compile(r"number of skipped iterations:?\s*(\d{1,16})\s*\|")
_LOSS = re.compile(r"lm loss:?\s*([-+.\w]+)\s*\|")
_NORM = re.compile(r"grad norm:?\s*([-+.\w]+)\s*\|")
_ELAPSED = re.compile(r"elapsed time per iteration \((ms|s)\):?\s*([\d.]+)\s*\|")

# Fields that only Megatron-DeepSpeed prints; there the engine skips the step, and the number printed stays 0.
_COUNT_STAYS_ZERO = re.compile("samples per second:|TFLOPs:")


class _OverflowReader(Reader):
    """Groups the lines "OVERFLOW! ... Attempted loss scale" of several ranks and sources into skipped steps.

    A step's overflow is printed by every rank, or by rank 0 from more than one source file. So a line belongs to the
    same skipped step as the one before, if both name the same scales and this rank has not yet printed the line from
    this source file.

    Attributes:
        overflows (list[Overflow]): the skipped steps since the last entry, by the last line on each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.overflows: list[Overflow] = []
        self._printed_by: set[tuple[str, str]] = set()

    @staticmethod
    @abstractmethod
    def parse_step(text: str, where: str, complete: bool) -> Iterable[LogEntry | str]:
        """Return what a line without a readable overflow says, as :meth:`parse` does."""

    @classmethod
    def parse(cls, text: str, where: str, complete: bool) -> Iterator[LogEntry | Overflow | str]:
        overflow = _parse_overflow(text, where, complete) if "Attempted loss" in text else None
        if overflow is not None:
            yield overflow
        if not isinstance(overflow, Overflow):
            yield from cls.parse_step(text, where, complete)

    def add(self, entry: LogEntry | Overflow) -> bool:
        """Take an entry, with the skipped steps before it, or a line about one of these."""
        if isinstance(entry, LogEntry):
            is_new = super().add(entry._replace(overflows=tuple(self.overflows)))
            if is_new:
                self.overflows, self._printed_by = [], set()
            return is_new
        is_new = not self.overflows or entry[:2] != self.overflows[-1][:2] or entry.printer in self._printed_by
        if is_new:
            self.overflows.append(entry)
            self._printed_by = set()
        else:
            self.overflows[-1] = entry
            self.merged += 1
        self._printed_by.add(entry.printer)
        return is_new


class MegatronReader(_OverflowReader):
    """Reads ``iteration 10/ 1000 | ... | loss scale: 8388608.0 | number of skipped iterations: 10 |``.

    The scale is the one after the iteration. Where DeepSpeed's lines about overflows stand between two such lines,
    they say how many steps were skipped.
    """

    name = "megatron"
    looked_for = '" iteration N/ M | ... | loss scale: S | number of skipped iterations: K |"'
    printed_with = ("deepspeed",)

    @staticmethod
    def parse_step(text: str, where: str, complete: bool) -> Iterator[LogEntry | str]:
        # Two lines that were written into each other speak of an iteration each.
        starts = [match.start() for match in _ITERATION.finditer(text)]
        for start, end in pairwise([*starts, len(text)]):
            yield _parse_iteration(text if len(starts) == 1 else text[start:end], where, complete) or (
                "looks like an iteration's line, but its loss scale or skipped iterations cannot be read"
            )

    def finish(self) -> Sequence[LogEntry]:
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

    @staticmethod
    def parse_step(text: str, where: str, complete: bool) -> Iterator[LogEntry | str]:
        if "skipped=" in text and "step=" in text:
            yield _parse_progress(text, where, complete) or (
                "looks like a line with the number of skipped steps, but cannot be read"
            )

    @classmethod
    def is_step_line(cls, text: str) -> bool:
        return any(not isinstance(said, str) for said in cls.parse(text, "", True))

    def finish(self) -> Sequence[LogEntry]:
        entries = _skips_since_the_line_before(self.entries)
        if count := len(self.overflows):
            step, left = count + (entries[-1].step if entries else 0), tuple(self.overflows)
            where = left[-1].where
            entries.append(LogEntry(step, where, skips=count, overflows=left, steps=count, placed=False))
            self.notes.append(
                f"{where}: {count} overflow(s) up to here follow no line that names a step; they are "
                "counted as steps that follow each other, and applied steps between them are not in the log."
            )
        super().finish()
        return entries


def _skips_since_the_line_before(entries: list[LogEntry]) -> list[LogEntry]:
    """Turn the skips since the start of the run into those since the line before."""
    strides = [later.step - earlier.step for earlier, later in pairwise(entries)]
    start = LogEntry(0, "the start", skips=0)
    result = []
    for earlier, entry in pairwise([start, *entries]):
        steps, skips = entry.step - earlier.step, (entry.skips or 0) - (earlier.skips or 0)
        is_far = steps > min(strides, default=LONGEST_INTERVAL)
        if is_far if earlier is start else entry.after_restart:
            result.append(entry._replace(skips=None))
        else:
            result.append(entry._replace(steps=steps or None, skips=skips if 0 <= skips <= steps else None))
    return result


def _parse_overflow(text: str, where: str, complete: bool) -> Overflow | str:
    match = _ATTEMPT.search(text)
    scale = None if match is None or _is_cut(match, complete) else parse_scale(match[1])
    reduced = scale if match is None or match[2] is None else parse_scale(match[2])
    if scale is None or reduced is None or reduced > scale:
        return "looks like a line about an overflow, but its loss scales cannot be read"
    source, rank = ((found.findall(text) or [""])[-1] for found in (_SOURCE, _RANK))
    return Overflow(scale, reduced, where, (source, rank))


def _parse_progress(text: str, where: str, complete: bool) -> LogEntry | None:
    match = _PROGRESS.search(text)
    if match is None or _is_cut(match, complete):
        return None
    step, skipped = int(match[1]), int(match[2])
    return LogEntry(step, where, skips=skipped) if skipped <= step <= LARGEST_STEP else None


def _is_cut(match: re.Match[str], complete: bool) -> bool:
    return not complete and match.end() == len(match.string)


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
    loss, elapsed, norm = (pattern.search(text) for pattern in (_LOSS, _ELAPSED, _NORM))
    return LogEntry(
        int(iteration[1]),
        where,
        next_loss_scale=scale,
        skips=skips,
        loss=parse_loss(loss and loss[1]),
        seconds=parse_number(elapsed and elapsed[2]) / (1000.0 if elapsed and elapsed[1] == "ms" else 1.0),
        gradient_norm=parse_number(norm and norm[1]),
    )
