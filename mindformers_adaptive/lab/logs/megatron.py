"""Megatron-LM's and Megatron-DeepSpeed's lines: one every so many iterations."""

from __future__ import annotations

import re
from itertools import pairwise

from mindformers_adaptive.lab.logs.deepspeed import OverflowLines
from mindformers_adaptive.lab.logs.entries import LARGEST_STEP, LogEntry, Reader
from mindformers_adaptive.lab.logs.lines import LogLines, parse_number, parse_scale

__all__ = ["MegatronReader"]

_ITERATION = re.compile(r"iteration\s+(\d{1,16})/\s*\d+\s*\|")
_LOSS_SCALE = re.compile(r"loss scale:?\s*([-+.\w]+)\s*\|")
_SKIPPED = re.compile(r"number of skipped iterations:?\s*(\d{1,16})\s*\|")
_LOSS = re.compile(r"lm loss:?\s*([-+.\w]+)\s*\|")
_ELAPSED = re.compile(r"elapsed time per iteration \((ms|s)\):?\s*([\d.]+)\s*\|")

# Fields that only Megatron-DeepSpeed prints; there the engine skips the step, and the number printed stays 0.
_COUNT_STAYS_ZERO = re.compile("samples per second:|TFLOPs:")


class MegatronReader(Reader):
    """Reads " iteration 10/ 1000 | ... | loss scale: 8388608.0 | number of skipped iterations: 10 |".

    The scale is the one after the iteration. Where DeepSpeed's lines about overflows stand between two such lines,
    they say how many steps were skipped.
    """

    name = "megatron"
    looked_for = '" iteration N/ M | ... | loss scale: S | number of skipped iterations: K |"'

    def __init__(self) -> None:
        super().__init__()
        self.overflows = OverflowLines()

    @staticmethod
    def is_step_line(text: str) -> bool:
        return "iteration" in text and any(_parse(part, "", True) for part in _parts(text))

    def take(self, text: str, lines: LogLines) -> bool:
        if self.overflows.take(text, lines):
            return True
        parts = _parts(text) if "iteration" in text else []
        used = False
        for part in parts:
            entry = _parse(part, lines.where, lines.complete)
            if entry is None:
                lines.problem("looks like an iteration's line, but its loss scale or skipped iterations cannot be read")
                continue
            used = True
            if self.overflows.pending:
                entry = entry._replace(overflows=tuple(self.overflows.pending))
            if self.timeline.add(entry):
                self.overflows.hand_over()
        return used

    def finish(self) -> list[LogEntry]:
        left = self.overflows.hand_over()
        if left:
            self.timeline.notes.append(
                f"{self.timeline.entries[-1].where if self.timeline.entries else 'The log'}: {len(left)} overflow(s) "
                "after the last iteration's line belong to no step that is in the log and are left out."
            )
        self.timeline.merged += self.overflows.merged
        return self.timeline.entries


def _parts(text: str) -> list[str]:
    """Two lines that were written into each other start two iterations."""
    starts = [match.start() for match in _ITERATION.finditer(text)]
    if len(starts) == 1:
        return [text]
    return [text[start:end] for start, end in pairwise([*starts, len(text)])]


def _parse(text: str, where: str, complete: bool) -> LogEntry | None:
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
        loss=parse_number(loss[1]) if loss else float("nan"),
        seconds=parse_number(elapsed[2]) / (1000.0 if elapsed[1] == "ms" else 1.0) if elapsed else float("nan"),
    )
