"""The record of ``LossScaleMonitor``, and others of its form: one JSON object a line."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.lab.logs.columns import LogColumns
from mindformers_adaptive.lab.logs.expansion import run_of_entries
from mindformers_adaptive.lab.logs.reader import (
    LARGEST_STEP,
    LONGEST_INTERVAL,
    LogEntry,
    LogLines,
    Reader,
    parse_number,
    parse_scale,
)
from mindformers_adaptive.lab.recorded_run import RecordedRun
from mindformers_adaptive.text.files import json_object

__all__ = ["JsonlReader", "run_of_record"]

# As this package writes a line of a step. Other lines, and other orders of the keys, are left to the parser of JSON,
# which takes several times as long.
_NUMBER, _FLAG = r'(-?\d[-+.\deE]*|null|"(?:nan|-?inf)")', "(true|false|null)"
_COUNT, _OTHER = r"(?:\d+|null)", r'(?:-?\d[-+.\deE]*|null|true|false|"[^"\\\n]*")'
_LINES = re.compile(
    rf'^\{{(?:"run": \d+, )?"step": (\d{{1,15}}), "loss": {_NUMBER}, "overflow": {_FLAG}, "loss_scale": {_NUMBER}, '
    rf'"next_loss_scale": {_NUMBER}, "scale_window": {_NUMBER}, "window_index": (?:-?\d+|null), '
    rf'"growth_num": {_COUNT}, "down_num": {_COUNT}, "skipped_steps": (\d{{1,15}}|null), '
    rf'"largest_gradient": {_NUMBER}, "dropped_by_norm": {_FLAG}'
    rf'(?:, "gradient_norm": {_NUMBER})?((?:, "\w+": {_OTHER})*?)'
    rf'(?:, "gradient_format": "([^"\\\n]*)")?\}}\n',
    re.MULTILINE,
)
# Keys that are read, and that no line has twice.
_READ = "step loss overflow loss_scale next_loss_scale scale_window skipped_steps largest_gradient dropped_by_norm"
_READ += " gradient_norm seconds gradient_format missing_steps"
_READ_AT_THE_END = re.compile("|".join(f'"{name}"' for name in _READ.split()))
_FLAGS = {"true": 1, "false": 0, "null": -1}
_WORDS = {"": math.nan, "null": math.nan, '"nan"': math.nan, '"inf"': math.inf, '"-inf"': -math.inf}
# A loss that is NaN is known.
_LOSSES = {**_WORDS, '"nan"': math.inf}

# Of so many lines, one that has to be looked at more closely is not looked for.
_FEW_LINES = 8

# Lines for steps that were not recorded get a note each, up to so many.
_GAPS_NAMED = 3

# Longer gaps are left out where there would be more steps in all: beyond any training.
_MOST_STEPS = 10**7


class _Numbers(dict[str, float]):
    """Numbers by their texts, of which few are different."""

    def __missing__(self, text: str) -> float:
        self[text] = number = _number(text)
        return number


class _Scales(dict[str, "float | None"]):
    """Loss scales by their texts: nan for null, None for what is no scale."""

    def __missing__(self, text: str) -> float | None:
        self[text] = scale = math.nan if text == "null" else parse_scale(_number(text))
        return scale


class JsonlReader(Reader):
    """Reads {"step": 1, "overflow": false, "loss_scale": 65536.0, "next_loss_scale": 65536.0, ...}.

    ``step``, ``overflow`` and ``loss_scale`` (used in the step) must be there, the last two may be null;
    ``next_loss_scale``, ``loss``, ``seconds``, ``scale_window``, ``largest_gradient``, ``gradient_norm``,
    ``gradient_format`` and ``dropped_by_norm`` are used where they are, and other keys are ignored.
    {"missing_steps": 3, "first_step": 5, "last_step": 7} says that steps were not recorded. Where the lines count
    ``skipped_steps``, it is known how many of those were skipped.
    """

    name = "jsonl"
    looked_for = 'JSON objects, one a line, with "step", "overflow" and "loss_scale"'

    def __init__(self) -> None:
        super().__init__()
        self.entries = LogColumns()
        self._numbers, self._scales = _Numbers(), _Scales()
        # By the last step of each gap that is stated its first one, and where.
        self._missing: dict[int, tuple[int, str]] = {}
        self._gaps = 0

    @classmethod
    def parse(cls, text: str, where: str, complete: bool) -> Iterator[LogEntry | str]:
        if '"step"' in text or '"missing_steps"' in text:
            yield _entry_of(json_object(text), where) or (
                "looks like a step's line, but is no JSON object with step, overflow and loss_scale"
            )

    def left_over(self, lines: LogLines) -> Iterator[str]:
        for block in lines.blocks():
            yield from self._left_of(block, lines)

    def _left_of(self, block: Sequence[bytes], lines: LogLines) -> Iterator[str]:
        if self._take_own(block, lines):
            self.taken_together += len(block)
            lines.pass_over(block)
        elif len(block) <= _FEW_LINES:
            yield from lines.texts(block)
        else:
            half = len(block) // 2
            yield from self._left_of(block[:half], lines)
            yield from self._left_of(block[half:], lines)

    def take(self, text: str, lines: LogLines) -> bool:
        record = json_object(text) if '"missing_steps"' in text else {}
        if "missing_steps" not in record:
            return super().take(text, lines)
        if not _is_gap(record):
            lines.problems.append(
                f"{lines.where}: looks like a line for steps that were not recorded, but does not count those from "
                "first_step to last_step"
            )
            return False
        self.take_gap(record, lines.where)
        return True

    def _take_own(self, block: Sequence[bytes], lines: LogLines) -> bool:
        """Take lines that this package wrote; False, with none taken, where one has to be looked at more closely."""
        try:
            found = _LINES.findall(b"".join(block).decode("utf-8"))
            if len(found) != len(block):
                return False
            step, loss, overflow, scale, after, window, skipped, gradient, dropped, norm, others, formats = zip(
                *found, strict=True
            )
            columns: dict[str, list[Any]] = {
                "step": list(map(int, step)),
                "skipped_so_far": [-1 if text == "null" else int(text) for text in skipped],
                "overflow": [_FLAGS[text] for text in overflow],
                "dropped_by_norm": [text == "true" for text in dropped],
                "next_loss_scale": [self._scales[text] for text in after],
                "loss_scale": [self._scales[text] for text in scale],
                "loss": [_LOSSES[text] if text in _LOSSES else float(text) for text in loss],
                "largest_gradient": [_WORDS[text] if text in _WORDS else float(text) for text in gradient],
                "scale_window": [self._numbers[text] for text in window],
                "gradient_norm": [_WORDS[text] if text in _WORDS else float(text) for text in norm],
            }
        except ValueError:
            return False
        steps = [self.entries.last_step, *columns["step"]]
        if not all(map(operator.lt, steps, columns["step"])):
            return False
        if None in columns["loss_scale"] or None in columns["next_loss_scale"]:
            return False
        if any(map(_READ_AT_THE_END.search, filter(None, others))):
            return False
        self.entries.append_lines(lines.file, lines.number + 1, columns, formats)
        return True

    def add(self, entry: LogEntry) -> bool:
        if entry.step <= self.entries.last_step:
            self._missing = {last: told for last, told in self._missing.items() if last < entry.step}
        return super().add(entry)

    def take_gap(self, record: Mapping[str, Any], where: str) -> None:
        """Take a line for steps that were not recorded."""
        first, last = record.get("first_step"), record.get("last_step")
        if type(first) is int and type(last) is int and self.entries.last_step < first <= last <= LARGEST_STEP:
            self._missing[last] = first, where
        self._gaps += 1
        if self._gaps <= _GAPS_NAMED:
            span = f"{record.get('first_step', '?')} to {record.get('last_step', '?')}"
            self.notes.append(f"{where}: {record['missing_steps']} step(s) were not recorded ({span}).")

    def finish(self) -> Sequence[LogEntry]:
        entries: Any = super().finish()
        if len(formats := self.entries.named_formats) > 1:
            names = [one if isinstance(one, str) else repr(one)[:80] for _, one in formats]
            self.notes.append(
                f"The lines name several formats of gradients, {', '.join(names)}: the first one is taken for all. "
                "Read each part from a file of its own."
            )
        if self._gaps > _GAPS_NAMED:
            self.notes.append(f"{self._gaps} lines in all say that steps were not recorded.")
        return self._with_gaps(entries) if len(entries) else entries

    def _with_gaps(self, entries: LogColumns) -> LogColumns:
        """The entries, with one for each gap between them of which the file knows something."""
        step, skipped = entries.array("step"), entries.array("skipped_so_far")
        gaps = np.diff(step, prepend=0) - 1
        _tell_flags(entries, skipped, gaps)
        room, places, added, counted = _MOST_STEPS - len(step), [], [], [0, 0]
        for place in np.flatnonzero(gaps > 0).tolist():
            gap, entry, stated = int(gaps[place]), entries[place], self._stated(step, place)
            # A record may begin at the step from which a run was resumed, and knows nothing of those before.
            skips = None if place == 0 and stated < gap else _skips_since(skipped, place, entry, gap + 1)
            gap = gap if skips is not None else stated if place == 0 or stated == gap else 0
            if not 0 < gap <= (LONGEST_INTERVAL if skips is None else max(room, LONGEST_INTERVAL)):
                continue
            room -= gap
            if skips is not None:
                counted = [counted[0] + gap, counted[1] + skips - (entry.overflow is True)]
            told: dict[str, Any] = {} if skips is None else {"is_exact": True}
            if entry.overflow is None or math.isnan(entry.loss_scale):
                # Its own step cannot be told from those before it.
                entries.of["steps"][place], entries.of["loss_scale"][place] = gap + 1, math.nan
                entries.sparse[place] = {**entries.sparse.get(place, {}), **told, "skips": skips}
                continue
            skips = None if skips is None else skips - entry.overflow
            places.append(place)
            added.append(_gap(entry.step - 1, gap, entry.where, entry.loss_scale, skips=skips, **told))
        last = entries.last_step
        if (end := max(self._missing, default=0)) > last and self._missing[end][0] == last + 1:
            places.append(len(entries))
            added.append(_gap(end, min(end - last, LONGEST_INTERVAL), self._missing[end][1], math.nan))
        if counted[0]:
            self.notes.append(
                f"{counted[0]} step(s) have no line of their own; the lines after them count {counted[1]} skipped ones "
                "among them."
            )
        return entries.with_inserted(places, added) if places else entries

    def _stated(self, step: Any, place: int) -> int:
        """How many steps right before an entry lines say that they were not recorded."""
        end = last = int(step[place]) - 1
        before = int(step[place - 1]) if place else 0
        while last > before and last in self._missing:
            last = self._missing[last][0] - 1
        return end - max(last, before)


def _tell_flags(entries: LogColumns, skipped: NDArray[np.int64], gaps: NDArray[np.int64]) -> None:
    """Where a line does not name the flag of the one step since the line before, set it by the counts of both."""
    more = np.diff(skipped, prepend=0)
    is_counted = (skipped >= 0) & (np.append(0, skipped[:-1]) >= 0) & (more >= 0) & (more <= 1)
    told = is_counted & (gaps == 0) & (entries.array("overflow") < 0) & ~entries.array("after_restart").astype(bool)
    entries.array("overflow")[told] = more[told]


def _is_gap(record: Mapping[str, Any]) -> bool:
    """Whether a line counts steps that were not recorded, of which it may name the first and the last."""
    number, first, last = (record.get(name) for name in ("missing_steps", "first_step", "last_step"))
    if not isinstance(number, int) or number <= 0 or isinstance(number, bool):
        return False
    if first is None and last is None:
        return number <= LARGEST_STEP
    return (
        type(first) is int and type(last) is int and 0 <= first <= last <= LARGEST_STEP and number == last - first + 1
    )


def _gap(step: int, steps: int, where: str, scale: float, **told: Any) -> LogEntry:
    return LogEntry(step, where, next_loss_scale=scale, steps=steps, has_line=False, **told)


def _skips_since(skipped: Any, place: int, entry: LogEntry, steps: int) -> int | None:
    """How many steps were skipped since the line before an entry, by the counts of both; None if that is unknown."""
    before, here = int(skipped[place - 1]) if place else 0, int(skipped[place])
    if entry.after_restart or before < 0 or here < 0:
        return None
    least, most = int(entry.overflow is True), steps - (entry.overflow is False)
    return here - before if least <= here - before <= most else None


def run_of_record(lines: Sequence[Mapping[str, Any]]) -> RecordedRun:
    """Return the run that the lines of a record tell of.

    Args:
        lines (Sequence[Mapping]): as :func:`mindformers_adaptive.monitor.record.read_record` returns them.

    Returns:
        RecordedRun, without a name and files.

    Raises:
        TypeError: if a line is not a mapping, or a value is neither a number nor None.
        ValueError: if there is no step, or the record is not one of loss scales.
    """
    if not isinstance(lines, Sequence) or not all(isinstance(line, Mapping) for line in lines):
        raise TypeError(
            f"'record' must be a list of lines, each a dict, but got {str(lines)[:80]!r} of type "
            f"{type(lines).__name__}. Read the file with mindformers_adaptive.monitor.record.read_record."
        )
    steps = [line for line in lines if "missing_steps" not in line]
    if steps and not any("overflow" in line for line in steps):
        raise ValueError(
            f"The lines of a record must have 'overflow', but the first has {', '.join(map(str, steps[0]))}. Give the "
            "record of LossScaleMonitor; draw_gradient_records draws that of GradientRangeMonitor."
        )
    reader = JsonlReader()
    for number, line in enumerate(lines, start=1):
        where = f"line {number}"
        if "missing_steps" in line:
            reader.take_gap(line, where)
            continue
        for name in ("step", "loss", "overflow", "loss_scale", "next_loss_scale", "scale_window", "largest_gradient"):
            _require_number(name, line.get(name))
        for name in ("loss_scale", "next_loss_scale"):
            scale = parse_number(line.get(name))
            if math.isfinite(scale) and scale > 0 and parse_scale(scale) is None:
                raise ValueError(f"'{name}' must be a number of float32, but got {scale} on {where}.")
        entry = _entry_of({"overflow": None, "loss_scale": None, **line}, where)
        # A scale that no step can have used, as one of 0, is unknown.
        unknown = {name: None for name in ("loss_scale", "next_loss_scale") if not parse_scale(line.get(name))}
        entry = entry or _entry_of({**line, **unknown}, where)
        if entry is not None:
            reader.add(entry)
    entries = reader.finish()
    if not entries:
        raise ValueError(
            "There must be at least 1 step to draw, but there is none. Let the run take a step, or check that the "
            "file is the record of this run."
        )
    return run_of_entries(entries, None, JsonlReader.name)


def _require_number(name: str, value: object) -> None:
    try:
        np.float64(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(
            f"'{name}' must be a number or None in each line of the record, but: {error}. Read the file with "
            "mindformers_adaptive.monitor.record.read_record."
        ) from error


def _entry_of(record: Mapping[str, Any], where: str) -> LogEntry | None:
    step, overflow, loss_scale = record.get("step"), record.get("overflow"), parse_scale(record.get("loss_scale"))
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= LARGEST_STEP:
        return None
    # null is what could not be known; another value that is none, or no value at all, is a torn line.
    unknown = {key for key in ("overflow", "loss_scale") if key in record and record[key] is None}
    if not (isinstance(overflow, bool) or "overflow" in unknown) or not (loss_scale or "loss_scale" in unknown):
        return None
    skipped = record.get("skipped_steps")
    is_count = isinstance(skipped, int) and not isinstance(skipped, bool) and 0 <= skipped <= LARGEST_STEP
    return LogEntry(
        step,
        where,
        next_loss_scale=parse_scale(record.get("next_loss_scale")) or math.nan,
        loss_scale=loss_scale or math.nan,
        overflow=overflow if isinstance(overflow, bool) else None,
        steps=1,
        dropped_by_norm=record.get("dropped_by_norm") is True,
        loss=_loss(parse_number(record.get("loss")), record.get("loss")),
        seconds=_seconds(parse_number(record.get("seconds"))),
        largest_gradient=parse_number(record.get("largest_gradient")),
        scale_window=parse_number(record.get("scale_window")),
        gradient_norm=parse_number(record.get("gradient_norm")),
        gradient_format=record.get("gradient_format"),
        skipped_so_far=skipped if is_count else None,
    )


def _number(text: str) -> float:
    """The number that a text of JSON is; that of null is nan."""
    return _WORDS[text] if text in _WORDS else float(text)


def _loss(number: float, given: object) -> float:
    """A loss; inf where it was stated to be NaN, for nan is one that is not known."""
    return math.inf if math.isnan(number) and (isinstance(given, float) or given in ("nan", '"nan"')) else number


def _seconds(number: float) -> float:
    """How long a step took; nan for what no step can have taken."""
    return number if 0.0 <= number < math.inf else math.nan
