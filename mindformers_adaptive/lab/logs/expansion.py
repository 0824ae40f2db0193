"""From the lines of a log to the arrays of a run: a value for each step, however many steps a line stands for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mindformers_adaptive.lab.dynamic_rule import DynamicRule
from mindformers_adaptive.lab.logs.columns import LogColumns
from mindformers_adaptive.lab.logs.intervals import Interval, bounds_by_rule, infer_scale_factor, intervals_of
from mindformers_adaptive.lab.logs.reader import LogEntry
from mindformers_adaptive.lab.policies import Policy
from mindformers_adaptive.lab.recorded_run import RecordedRun
from mindformers_adaptive.rules.formats import FLOAT16, Format, find_format

__all__ = ["run_of_entries"]

_NEAR = 1e-3  # printed scales are rounded
_LARGEST_START = 2.0**32

_ANY_RULE = (
    "the rule moves the scale by one factor, the same all through the log, down at overflows and up at applied steps "
    "only, and each resume went on with its scale. A rule that follows the gradients is none, nor may be one of your "
    "own: name it ('analyze --policy', or read_log(rule=...)). After a resume with other settings, read each part from "
    "a log of its own."
)
_THIS_RULE = "the run followed {!r} with the arguments given, and went on with its whole state wherever it was resumed."


def run_of_entries(entries: Sequence[LogEntry], rule: Policy | None, log_format: str) -> RecordedRun:
    """Return the run that the lines of a log tell of.

    Args:
        entries (Sequence[LogEntry]): steps strictly increasing, at least one.
        rule (Policy, optional): the rule that the run followed, with the state before step 1.
        log_format (str): of the log.

    Returns:
        RecordedRun without a name and files, and with notes on what had to be inferred, is missing or contradicts
        itself.

    Raises:
        ValueError: if the lines do not follow the rule.
    """
    columns, notes = LogColumns.holding(entries), list[str]()
    factor, factor_bound = infer_scale_factor(columns)
    first_scale = math.nan if rule is None else rule.loss_scale
    one_factor = rule is None or rule.moves_by_one_factor
    follows = rule is not None and (one_factor or isinstance(rule.rule, DynamicRule))
    # Of a line that says all of its one step nothing is left to infer.
    places = np.arange(len(columns)) if follows else np.flatnonzero(~_says_all(columns))
    # Where the rule has another factor, what the scale does tells nothing of skipped steps: only flags and counts do.
    factors = (factor, factor_bound) if one_factor else (math.inf, math.inf)
    factor_bound = factors[1]
    intervals = intervals_of(columns, *factors, first_scale, notes, places.tolist())
    if not one_factor:
        intervals = list(map(_by_flag, intervals))
    holds_if = ""
    if (one_factor or follows) and not all(map(_is_stated, intervals)):
        holds_if = _ANY_RULE if rule is None else _THIS_RULE.format(rule.name)
    counts = np.ones(len(columns), np.int64)
    counts[places] = [interval.steps for interval in intervals]
    ends = np.cumsum(counts)
    bounds = np.repeat((columns.array("overflow") == 1).astype(np.int64)[:, np.newaxis], 2, axis=1)
    bounds[places] = np.reshape([(interval.fewest, interval.most) for interval in intervals], (-1, 2))
    bounds = np.cumsum(bounds, axis=0)
    if rule is not None and follows:
        bounds = _narrowed(bounds, np.array(bounds_by_rule(rule, intervals, notes)), entries, rule.name, notes)
    loss_scale, overflow, known, final = _steps_of(columns, places, intervals, ends, factor, one_factor, notes)

    def at_last_steps(values: ArrayLike) -> NDArray[np.float64] | None:
        array = np.full(len(overflow), math.nan)
        array[ends - 1] = values
        return _or_none(array)

    scale_window, stated_scale = columns.array("scale_window"), columns.array("loss_scale")
    is_window = (scale_window >= 1) & (scale_window < math.inf)
    has_line = columns.array("has_line").astype(bool)
    return RecordedRun(
        name="",
        files=(),
        log_format=log_format,
        step=np.arange(int(ends[-1])) + np.repeat(columns.array("step") - ends + 1, counts),
        loss_scale=loss_scale,
        overflow=overflow,
        position_known=known,
        loss=at_last_steps(columns.array("loss")),
        seconds=_or_none(np.repeat(columns.array("seconds"), counts)),
        scale_factor=factor,
        notes=tuple(notes),
        lines=np.column_stack([ends, bounds]),
        final_loss_scale=final,
        factor_bound=factor_bound,
        largest_gradient=at_last_steps(columns.array("largest_gradient")),
        gradient_norm=at_last_steps(columns.array("gradient_norm")),
        dropped_by_norm=tuple(columns.array("step")[columns.array("dropped_by_norm") == 1].tolist()),
        next_loss_scale=at_last_steps(np.where(np.isnan(stated_scale), math.nan, columns.array("next_loss_scale"))),
        scale_window=at_last_steps(np.where(is_window, scale_window, math.nan)),
        moves_by_one_factor=one_factor,
        holds_if=holds_if,
        gradient_format=_format_of(columns),
        without_line=None if has_line.all() else _without_line(ends, has_line),
    )


def _format_of(columns: LogColumns) -> Format:
    """The first format of gradients that a line names, or raise ValueError with the place of the line."""
    for place, named in columns.named_formats:
        try:
            return find_format(named)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{columns.where(place)}: {error}") from error
    return FLOAT16


def _says_all(columns: LogColumns) -> NDArray[np.bool_]:
    """Whether each line names the flag and the scales of one step, which follows the one before."""
    follows = np.diff(columns.array("step"), prepend=columns.array("step")[0] - 1) == 1
    scales = [columns.array(name) for name in ("loss_scale", "next_loss_scale")]
    is_one_step = (columns.array("steps") == 1) & (columns.array("overflow") >= 0)
    says_all: NDArray[np.bool_] = is_one_step & follows & ~np.isnan(scales).any(axis=0)
    return says_all


def _narrowed(
    stated: NDArray[np.int64], followed: NDArray[np.int64], entries: Sequence[LogEntry], rule: str, notes: list[str]
) -> NDArray[np.int64]:
    """The bounds that follow from a rule, within those that the log states; these, with a note, on a contradiction."""
    fewest, most = np.maximum(stated[:, 0], followed[:, 0]), np.minimum(stated[:, 1], followed[:, 1])
    contradicts = np.flatnonzero(fewest > most)
    if len(contradicts):
        first = int(contradicts[0])
        by_log, by_rule = (_range_text(*bounds[first].tolist()) for bounds in (stated, followed))
        notes.append(
            f"{entries[first].where}: by the log {by_log} steps were skipped up to here, by the rule {rule!r} "
            f"{by_rule}. The log counts, here and on {len(contradicts)} line(s) in all; the run may have followed "
            "another rule."
        )
    return np.where((fewest <= most)[:, np.newaxis], np.column_stack([fewest, most]), stated)


def _range_text(fewest: int, most: int) -> str:
    return f"{fewest}" if fewest == most else f"{fewest} to {most}"


def _without_line(ends: NDArray[np.int64], has_line: NDArray[np.bool_]) -> NDArray[np.bool_]:
    without = np.full(ends[-1], True)
    without[ends[has_line] - 1] = False
    return without


def _steps_of(
    columns: LogColumns,
    places: NDArray[np.int64],
    intervals: Sequence[Interval],
    ends: NDArray[np.int64],
    factor: float,
    one_factor: bool,
    notes: list[str],
) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], float]:
    """The scale, the flag and whether it is known of each step, and the scale after the last."""
    total, scales = int(ends[-1]), columns.array("next_loss_scale")
    overflow, loss_scale, known = np.zeros(total, bool), np.full(total, math.nan), np.full(total, True)
    alone = np.full(len(columns), True)
    alone[places] = False
    overflow[ends[alone] - 1] = columns.array("overflow")[alone] == 1
    loss_scale[ends[alone] - 1] = columns.array("loss_scale")[alone]
    after, last = math.nan, -1
    for place, interval in zip(places.tolist(), intervals, strict=True):
        entry = interval.entry
        if place - 1 != last:
            after = float(scales[place - 1])
        if math.isnan(interval.before) and math.isnan(entry.next_loss_scale):
            # A line that names no scale leaves the one that the lines before had led to.
            interval = interval._replace(before=after)
        after, last = _scale_after(interval, factor), place
        flags, path = _guessed_path(interval, after, factor, one_factor, notes)
        is_known = entry.placed and interval.fewest == interval.most and interval.fewest in (0, interval.steps)
        row = slice(int(ends[place]) - interval.steps, int(ends[place]))
        overflow[row], loss_scale[row], known[row] = flags, path, is_known
        known[row.stop - 1] = is_known or entry.overflow is not None
    final = after if last == len(columns) - 1 else float(scales[-1])
    return loss_scale, overflow, known, final


def _or_none(array: NDArray[np.float64]) -> NDArray[np.float64] | None:
    return None if np.isnan(array).all() else array


def _has_count(entry: LogEntry) -> bool:
    return entry.skips is not None or bool(entry.overflows)


def _is_stated(interval: Interval) -> bool:
    """Whether the log itself says how many steps were skipped, and nothing has to be taken of the rule."""
    is_one_step = interval.steps == 1 and interval.entry.overflow is not None
    return interval.fewest == interval.most and (is_one_step or _has_count(interval.entry))


def _by_flag(interval: Interval) -> Interval:
    if _has_count(interval.entry):
        return interval
    overflowed, clean = interval.entry.overflow is True, interval.entry.overflow is False
    return interval._replace(fewest=int(overflowed), most=interval.steps - clean, guess=int(overflowed))


def _scale_after(interval: Interval, factor: float) -> float:
    entry = interval.entry
    if not math.isnan(entry.next_loss_scale):
        return entry.next_loss_scale
    if not entry.overflows:
        return interval.before
    unlisted = max(interval.guess - len(entry.overflows), 0)
    return entry.overflows[-1].next_loss_scale / factor**unlisted


def _guessed_path(
    interval: Interval, after: float, factor: float, one_factor: bool, notes: list[str]
) -> tuple[list[bool], list[float]]:
    """Which steps of an interval overflowed, and the scale that each used, as far as that is a guess."""
    entry, steps, before, count = interval.entry, interval.steps, interval.before, interval.guess
    last_overflowed = entry.overflow is True
    first = count - last_overflowed
    overflow = [True] * first + [False] * (steps - count) + [True] * last_overflowed
    if not math.isnan(entry.loss_scale):
        return overflow, [entry.loss_scale] * steps
    if entry.overflows:
        return overflow, _listed_scales(interval, after, factor, notes)
    low, high = (before / factor, before) if count else (before, before * factor)
    follows = not one_factor or math.isnan(before) or low * (1 - _NEAR) <= after <= high * (1 + _NEAR)
    jumps = steps == 1 and not follows
    if jumps or (math.isnan(before) and not math.isnan(after)):
        why = f"the scale {after:g} does not follow from {before:g} on the line before, " if jumps else ""
        why += "as after a restart, or where a rule that was not named moves otherwise; " if jumps else ""
        which = f"step {entry.step}" if steps == 1 else f"steps {entry.step - steps + 1} to {entry.step}"
        notes.append(f"{entry.where}: {why}the scale used in {which} is inferred from the one after.")
        if steps > 1 and interval.fewest != interval.most:
            at_last = after * factor if last_overflowed else after
            return overflow, [math.nan] * (steps - 1) + [at_last if entry.overflow is not None else math.nan]
        highest = max(_LARGEST_START, after)
        left = accumulate(
            reversed(overflow), lambda scale, over: min(scale * factor, highest) if over else scale, initial=after
        )
        return overflow, list(left)[:0:-1]
    if not (0 < before < math.inf and 0 < after < math.inf):
        return overflow, [before] * steps
    fall = round(math.log2(before / after) / math.log2(factor)) if before != after else 0
    if entry.is_exact and not -(steps - count) <= fall <= count:
        # A rule with other factors led from one scale to the other, by a way that is not known.
        return overflow, [before] + [math.nan] * (steps - 1)
    raised_before = int(fall <= 0 < count and count + 1 - fall <= steps)
    drops = max(fall, raised_before)
    tolerated = count - min(drops, count)
    # Whether each step overflowed, and by how many factors it changed the scale.
    path = [(True, 0)] * tolerated + [(True, -1)] * (count - tolerated)
    at_end = [path.pop()] if last_overflowed else []
    raises = min(drops - fall, steps - count)
    front = min(raised_before, raises) if path else 0
    path = [(False, 1)] * front + path + [(False, 0)] * (steps - count - raises) + [(False, 1)] * (raises - front)
    overflow, changes = map(list, zip(*path, *at_end, strict=True))
    return overflow, [before * factor**exponent for exponent in accumulate(changes[:-1], initial=0)]


def _listed_scales(interval: Interval, after: float, factor: float, notes: list[str]) -> list[float]:
    """The scales where the skipped steps have lines of their own, and the applied ones follow."""
    entry, count = interval.entry, interval.guess
    listed = [overflow.loss_scale for overflow in entry.overflows[:count]]
    unlisted = count - len(listed)
    if unlisted:
        notes.append(
            f"{entry.where}: {unlisted} of {count} skipped steps have no line of their own; the scale is taken to have "
            "gone on falling."
        )
    falling = [entry.overflows[-1].next_loss_scale / factor**place for place in range(unlisted)]
    return [*listed, *falling, *[after] * (interval.steps - count)]
