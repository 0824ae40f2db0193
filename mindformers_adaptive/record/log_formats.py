"""Parsers for the lines of training logs. To add a format, add a class here and put it into ``FORMATS``."""

import math
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Protocol

import msgspec
import numpy as np

from mindformers_adaptive.record.step import LARGEST_STEP, LogLine, Step, step_of
from mindformers_adaptive.text.files import json_object

_RECORD_DECODER = msgspec.json.Decoder(Step, strict=False)

# The source of a line that names the step of an overflow; its scales follow on other lines.
NAMED = "named"

# If a log line has these fields, it is from Megatron-DeepSpeed, whose number of skipped iterations stays 0.
_COUNT_STAYS_ZERO = re.compile("samples per second:|TFLOPs:")


class LogFormat(Protocol):
    """The format of the log lines of one program.

    Attributes:
        name (str): the name of the format.
        example (str): what a line of a step looks like, for messages.
        start (Pattern, optional): matches where a log line starts, to split lines that were written into each other.
        every_step (bool): whether each log line is about one step, and not about all steps since the line before.
        repeats_first_line (bool): whether the training prints the first step in a separate line, and counts this step
            again in the next line.
        names_overflows (bool): whether a line may name the step of an overflow, and lines about other steps are rare.
        lists_overflows (bool): whether each overflow has a line of its own wherever one has.
        printed_with (tuple[str, ...]): names of other formats whose lines appear in the same log.
    """

    name: str
    example: str
    start: re.Pattern[str] | None = None
    every_step: bool = False
    repeats_first_line: bool = False
    names_overflows: bool = False
    lists_overflows: bool = False
    printed_with: tuple[str, ...] = ()

    def parse(self, line: str) -> Step | None:
        """Return what a log line states about steps, or None if the line is about something else.

        Raises:
            ValueError: if the line looks like the line of a step but cannot be read.
        """


class Record(LogFormat):
    """The format of the record that LossScaleMonitor writes."""

    name = "jsonl"
    example = '{"step": N, "overflow": B, "loss_scale": S, "next_loss_scale": S, ...}, one a line'
    every_step = True

    def parse(self, line: str) -> Step | None:
        if '"step"' in line:
            try:
                return _RECORD_DECODER.decode(line)
            except (msgspec.MsgspecError, RecursionError):
                content = json_object(line)
            step = step_of(content) if content else "the line is not a complete JSON object"
            if isinstance(step, Step):
                return step
            raise ValueError(step)
        return missing_steps(json_object(line)) if '"missing_steps"' in line else None

    @staticmethod
    def parse_all(lines: Sequence[str]) -> list[Step] | None:
        """Return the steps of several lines, which is faster than one by one; None if a line states no step."""
        try:
            steps: list[Step] = _RECORD_DECODER.decode_lines("\n".join(lines))
        except (msgspec.MsgspecError, RecursionError, UnicodeError):
            return None
        return steps if len(steps) == len(lines) else None


def missing_steps(content: dict[str, object]) -> LogLine:
    """Return a record line for missing steps as a LogLine; raise ValueError if its step numbers are invalid."""
    number, first, last = (content.get(name) for name in ("missing_steps", "first_step", "last_step"))
    if not (type(number) is type(first) is type(last) is int and 0 < first <= last <= LARGEST_STEP):
        raise ValueError("'missing_steps', 'first_step' or 'last_step' is missing or is not a valid number")
    if number == last - first + 1:
        return LogLine(step=last, steps=number)
    raise ValueError(f"'missing_steps' must be {last - first + 1} for the steps {first} to {last}, but is not")


class _MindFormers(LogFormat):
    """MindFormers prints the loss scale after the step, as float32 with 8 digits: 268435460.0 is 2^28."""

    name = "mindformers"
    example = "Epoch:[ E/ N], step:[ S/ M], loss: L, per_step_time: Tms, overflow cond: B, loss_scale: S"
    start = re.compile(r"(?=Epoch:\[)")
    # The comma at the end of this pattern excludes the log lines of other monitors, which also name a step.
    step = re.compile(r"Epoch:\[\s*(\d{1,9})/\s*\d+\],\s*step:\[\s*(\d{1,16})/\s*(\d{1,16})\],")
    flag = re.compile(r"overflow cond:\s*\[?\s*(True|False)\s*\]?\s*(?:,|$)")
    # NumPy prints each number with a point or an exponent. A loss scale with neither was cut off.
    scale = re.compile(r"loss_scale:\s*\[?\s*([-+\w]*[.e][-+.\w]*|inf)\s*\]?\s*(?:,|$)")
    loss = re.compile(r"\bloss:\s*\[?\s*([-+.\w]+)")
    norm = re.compile(r"(?:global|grad)_norm:\s*\[?\s*([-+.\w]+)\s*\]?\s*(?:,|$)")
    dropped = re.compile(r"is_skip:\s*\[?\s*True")
    # The PyNative trainer of MindFormers 2.0 numbers steps over all epochs, and prints neither overflow nor scale.
    without_scale = re.compile(r"\{ step:\[\s*(\d{1,16})/\s*\d+\],.*\}$")

    def parse(self, line: str) -> Step | None:
        if "step:[" not in line:
            return LogLine(dropped_by_norm=True) if self.dropped.search(line) else None
        values: dict[str, Any] = {"loss": _number(self.loss, line), "gradient_norm": _number(self.norm, line)}
        match = self.step.search(line)
        if match is None:
            match = self.without_scale.search(line)
            return None if match is None else LogLine(step=_step(match[1]), **values)
        flag, scale = self.flag.search(line), _number(self.scale, line)
        if flag is None and scale is None:
            raise ValueError("the line shows neither 'overflow cond' nor 'loss_scale' in a readable form")
        epoch, step, steps_per_epoch = map(int, match.groups())
        return LogLine(
            step=_step(max(epoch - 1, 0) * steps_per_epoch + step),
            overflow=None if flag is None else flag[1] == "True",
            next_loss_scale=None if scale is None else float(np.float32(scale)),
            **values,
        )


class _MindSpore(LogFormat):
    name = "mindspore"
    example = "epoch: E, ..., step: N, outputs are (LOSS, OVERFLOW, LOSS_SCALE)"
    step = re.compile(r"\bstep:?\s*(\d{1,16}),?\s*outputs are\b")
    value = re.compile(r"value=\s*([-+.\w]+)\s*\)")

    def parse(self, line: str) -> Step | None:
        match = self.step.search(line)
        if match is None:
            return None
        values = self.value.findall(line, match.end())
        if len(values) < 3 or values[1] not in ("True", "False"):
            raise ValueError("'outputs are' must be followed by a loss, an overflow flag and a loss scale, but is not")
        loss, scale = _as_number(values[0]), _as_number(values[2])
        return LogLine(
            step=_step(match[1]), overflow=values[1] == "True", loss=loss, next_loss_scale=_nearest_power(scale)
        )


class _Megatron(LogFormat):
    """Megatron-LM prints the loss scale after the iteration, with one decimal place."""

    name = "megatron"
    example = " iteration N/ M | ... | loss scale: S | number of skipped iterations: K |"
    start = re.compile(r"(?=\biteration\s+\d+/)")
    repeats_first_line = True
    printed_with = ("deepspeed",)
    step = re.compile(r"\biteration\s+(\d{1,16})/\s*\d+\s*\|")
    scale = re.compile(r"loss scale:?\s*([-+.\w]+)\s*\|")
    skipped = re.compile(r"number of skipped iterations:?\s*(\d{1,16})\s*\|")
    # GPT-NeoX prints lm_loss instead of "lm loss".
    loss = re.compile(r"lm[ _]loss:?\s*([-+.\w]+)\s*\|")
    norm = re.compile(r"grad[ _]norm:?\s*([-+.\w]+)\s*\|")

    def parse(self, line: str) -> Step | None:
        match = self.step.search(line)
        if match is None:
            return None
        scale, skipped = self.scale.search(line), self.skipped.search(line)
        value = None if scale is None else _as_number(scale[1])
        count = None if skipped is None else int(skipped[1])
        if value is None and count is None:
            raise ValueError("the line shows no readable loss scale and no readable number of skipped iterations")
        return LogLine(
            step=_step(match[1]),
            next_loss_scale=value,
            rounding=0.0 if scale is None or value is None else _half_digit(scale[1]),
            skipped_since=None if count == 0 and _COUNT_STAYS_ZERO.search(line) else count,
            loss=_number(self.loss, line),
            gradient_norm=_number(self.norm, line),
        )


class _DeepSpeed(LogFormat):
    """The format of DeepSpeed's logs. ``skipped`` counts from the start of the run; overflow lines name no step."""

    name = "deepspeed"
    example = "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: A, reducing to B, or step=N, skipped=M"
    start = re.compile(r"(?=\[\d{4}-\d\d-\d\d )")
    names_overflows = True
    # The fused and the unfused optimizer count iterations from 0, and print raises too.
    named = re.compile(r"(?<!No )Grad overflow on iteration:?\s+(\d{1,16})(?=\s|$)", re.I)
    clean = re.compile(r"No Grad overflow for\s+(\d{1,16})\s+iterations", re.I)
    overflow = re.compile(
        r"overflow(?:!| detected).*skipping step|Attempted loss|Reducing dynamic loss scale from", re.I
    )
    attempted = re.compile(
        r"(?:Attempted loss\s+scale:|(?:Reducing|Increasing) dynamic loss scale from)\s*([-+.\w]+)(?=,|\s+to\b)", re.I
    )
    reduced = re.compile(r"(?:reducing to|loss scale from\s+\S+\s+to)\s+([-+.\w]+)", re.I)
    step = re.compile(r"(?<!\w)step=(\d{1,16}), skipped=(\d{1,16})(?=,|\s|$)")
    source, rank = re.compile(r"\[(\w+)\.py:\d+"), re.compile(r"\brank (\d+)", re.I)
    moment = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")

    def parse(self, line: str) -> Step | None:
        if "rad overflow" in line:
            if clean := self.clean.search(line):
                return LogLine(overflow=False, steps=int(clean[1]))
            if named := self.named.search(line):
                return LogLine(step=_step(int(named[1]) + 1), overflow=True, source=NAMED)
        if "Increasing dynamic loss scale from" in line:
            before, raised = _number(self.attempted, line), _number(self.reduced, line)
            return LogLine(overflow=False, loss_scale=before, next_loss_scale=raised) if before and raised else None
        if self.overflow.search(line):
            scale, after = _number(self.attempted, line), _number(self.reduced, line)
            if after is None and "but hysteresis" in line:
                after = scale
            # If a log line was cut, its last number, the new loss scale, may lack digits. One overflow at most halves
            # the loss scale, so ignore a new loss scale out of this range.
            if scale is None or (after is not None and not scale / 2 <= after <= scale):
                after = None
            printed = [pattern.findall(line)[-1:] for pattern in (self.source, self.rank, self.moment)]
            source, rank, moment = map("".join, printed)
            return LogLine(
                overflow=True, loss_scale=scale, next_loss_scale=after, source=source, rank=rank, moment=moment
            )
        if "skipped=" not in line or "step=" not in line:
            return None
        match = self.step.search(line)
        if match is None or int(match[2]) > int(match[1]):
            raise ValueError("the line must have 'step=N, skipped=M' with whole numbers and M at most N, but does not")
        return LogLine(step=_step(match[1]), skipped_steps=int(match[2]))


FORMATS: dict[str, LogFormat] = {
    log_format.name: log_format for log_format in (Record(), _MindFormers(), _MindSpore(), _Megatron(), _DeepSpeed())
}


def _step(text: str | int) -> int:
    if int(text) > LARGEST_STEP:
        raise ValueError(f"the step number must be at most 2^53, but is {text}")
    return int(text)


def _number(pattern: re.Pattern[str], line: str) -> float | None:
    match = pattern.search(line)
    return None if match is None else _as_number(match[1])


def _as_number(text: str) -> float | None:
    try:
        return float(text.rstrip(".,"))
    except ValueError:
        return None


def _half_digit(text: str) -> float:
    """Return the largest rounding error of a printed number: half a unit of the last digit."""
    exponent = Decimal(text).as_tuple().exponent
    # A number such as 1e400 is beyond float64: it is read as inf, which has no rounding error.
    return 0.5 * 10.0**exponent if isinstance(exponent, int) and exponent < 300 else 0.0


def _nearest_power(scale: float | None) -> float | None:
    """Return the power of two that a log has rounded to ``scale``, or else ``scale`` itself.

    The log is assumed to print loss scales with six digits.
    """
    if scale is None or not 0 < scale < math.inf:
        return scale
    power = 2.0 ** round(math.log2(scale))
    return power if math.isclose(scale, power, rel_tol=1e-5) else scale
