"""How many steps each line of a log stands for, and how many of them were skipped.

A line stands for one step or, in sink mode and where only every k-th step is printed, for several. It states the scale
after its last step and, in MindFormers' logs, the flag of that step. From two such lines, N steps apart, follows:

- Where the scale fell by d factors, at least d steps were skipped. A last step that overflowed is at least one.
- Where it rose by r factors, at least r steps were clean, for a raise follows a clean step. A last step that did not
  overflow is at least one. Any other step may have been skipped without a trace: a raise may follow each drop where the
  window is 1, a tolerated overflow (hysteresis) leaves the scale as it is, and so does one at the floor.

This holds for every rule that changes the scale by one factor and at most once a step: the adaptive one, MindSpore's
and MindFormers' cells, Megatron-LM's, with any window, hysteresis, floor and cap. It does not for the gradient-guided
rule, which has to be given, nor where a run was resumed with another factor or without its scale; so what bounds rest
on is said beside them. The factor is the one between lines that are one step apart. Where no lines are, the bounds are
those of the largest factor of which all scales are powers, times a constant; one change need not fit, because the scale
may have hit a floor of up to 2^14. The guess is 2, where it fits. A printed number of skipped steps is exact, unless a
fall of the scale shows that the log does not count them. A single line may stand for all steps up to its own.

Where the rule of the run is given, every sequence of flags by which it leads to the scales of the log is followed, and
the bounds are the fewest and the most overflows among them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cache, partial
from itertools import accumulate, pairwise, product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mindformers_adaptive.lab.logs.reader import LONGEST_INTERVAL, LogEntry
from mindformers_adaptive.lab.policies import Policy
from mindformers_adaptive.lab.policies.dynamic_rule import DynamicRule

__all__ = ["Interval", "bounds_by_rule", "expand", "infer_scale_factor", "intervals_of"]

_NEAR = 1e-3  # printed scales are rounded
_SAME_BITS = 1e-4  # the same in bits: eight digits are printed, and float32 rounds at each change
_FEWEST_BITS = 0.05  # no scale factor is this near to 1
_LARGEST_FLOOR_BITS = 14.0  # no floor is above 2^14
_PRINTED = 1e-6  # eight digits are printed
_LARGEST_START = 2.0**32

# Following a rule through more states than this, summed over the steps, takes more than about half a minute.
_MOST_STATES = 5e6

_ANY_RULE = (
    "the rule moves the scale by one factor, the same all through the log, down at overflows and up at applied steps "
    "only, and each resume went on with its scale. Guided scaling is no such rule, and one of your own may be none: "
    "name it ('analyze --policy', or read_log(rule=...)). After a resume with other settings, read each part from a "
    "log of its own."
)
_THIS_RULE = "the run followed {!r} with the arguments given, and went on with its whole state wherever it was resumed."

# Counters that have no effect on the scale.
_COUNTERS = ("skipped_steps", "consecutive_overflows")


class Interval(NamedTuple):
    """The steps that one line stands for.

    Attributes:
        entry (LogEntry): the line.
        steps (int): how many there are.
        before (float): the scale before them, nan where it is unknown.
        fewest (int), most (int): how many of them were skipped.
        guess (int): the number of skips to assume.
    """

    entry: LogEntry
    steps: int
    before: float
    fewest: int
    most: int
    guess: int


def infer_scale_factor(entries: Sequence[LogEntry]) -> tuple[float, float]:
    """Return the usual factor of a change, and the largest that the scales of the log allow; inf if that is unknown."""
    pairs = []
    for earlier, later in pairwise(entries):
        before, after = earlier.next_loss_scale, later.next_loss_scale
        if before != after and not later.after_restart and 0 < before < math.inf and 0 < after < math.inf:
            pairs.append((later.step - earlier.step, math.log2(before), math.log2(after)))
    neighbours = Counter(round(2 ** abs(before - after), 3) for steps, before, after in pairs if steps == 1)
    factor = neighbours.most_common(1)[0][0] if neighbours else 1.0
    if factor > 1:
        return factor, factor
    bits = [abs(before - after) for _, before, after in pairs]
    up_to, from_there = (list(accumulate(row, _common_divisor, initial=0.0)) for row in (bits, bits[::-1]))
    divisor = largest = up_to[-1]
    for (steps, before, after), *others in zip(pairs, up_to, from_there[-2::-1], strict=False):
        # A change by way of a floor that is no power of the factor away need not fit the others.
        without = _common_divisor(*others)
        by_way_of_floor = max(before - _LARGEST_FLOOR_BITS, 0.0) + max(after - _LARGEST_FLOOR_BITS, 0.0)
        if by_way_of_floor <= steps * without + _NEAR:
            largest = max(largest, without)
    powers_of_two = abs(divisor - round(divisor)) < _SAME_BITS
    if len(pairs) == 1 and not powers_of_two:
        largest = 0.0
    usual = [1.0] if powers_of_two else []
    fits = (one for one in (*usual, divisor, largest) if all(abs(a - b) <= n * one + _NEAR for n, a, b in pairs))
    return 2.0 ** next(fits, 1.0), 2.0**largest if largest >= _FEWEST_BITS else math.inf


def _common_divisor(first: float, second: float) -> float:
    """The largest number of which two are multiples, nearly."""
    larger, smaller = max(first, second), min(first, second)
    while smaller > _SAME_BITS:
        rest = larger % smaller
        larger, smaller = smaller, 0.0 if smaller - rest < _SAME_BITS else rest
    return larger


def intervals_of(
    entries: Sequence[LogEntry], factor: float, factor_bound: float, first_scale: float, notes: list[str]
) -> list[Interval]:
    """Return what each line says of its steps.

    Args:
        entries (Sequence[LogEntry]): steps strictly increasing, at least one.
        factor (float), factor_bound (float): of :func:`infer_scale_factor`.
        first_scale (float): the scale before step 1, nan where it is unknown.
        notes (list[str]): gets a sentence for what is missing or contradicts itself.
    """
    usual = _usual_stride(entries)
    is_alone = len(entries) == 1 and entries[0].steps is None and usual > 1
    if is_alone:
        notes.append(
            f"{entries[0].where}: the only line, taken to stand for all steps up to {entries[0].step}; it may stand "
            "for the last ones only."
        )
    start = LogEntry(0, "the start", next_loss_scale=first_scale)
    spans = [_span(earlier, entry, usual, notes) for earlier, entry in pairwise([start, *entries])]
    have_lines = any(entry.overflows for entry in entries)
    stated = [max(len(entry.overflows), entry.skips or 0) if have_lines else entry.skips for entry in entries]
    rows = list(zip(entries, spans, stated, strict=True))
    wrong = [
        entry.where
        for entry, (_, before), skips in rows
        if skips is not None and _drops(before, entry.next_loss_scale, factor_bound) > skips
    ]
    if wrong:
        notes.append(
            f"{wrong[0]}: the scale fell although no skipped step is counted, here and on {len(wrong)} line(s) in "
            "all: the printed numbers of skipped steps are not relied on."
        )
    intervals = []
    for entry, (steps, before), skips in rows:
        after = entry.next_loss_scale
        if steps > 1 and max(_drops(before, after, factor), _drops(after, before, factor)) > steps:
            notes.append(
                f"{entry.where}: {steps} steps cannot move the scale from {before:g} to {after:g}; the scale before "
                "them is inferred."
            )
            before = math.nan
        overflowed, clean = entry.overflow is True, entry.overflow is False
        fewest, guess = (
            min(max(skips or 0, _drops(before, after, one), overflowed), steps - clean)
            for one in (factor_bound, factor)
        )
        is_exact = skips == fewest and not wrong and not is_alone
        most = fewest if is_exact else max(steps - max(_drops(after, before, factor_bound), clean), fewest)
        intervals.append(Interval(entry, steps, before, fewest, most, min(max(guess, fewest), most)))
    return intervals


def _span(earlier: LogEntry, entry: LogEntry, usual: int, notes: list[str]) -> tuple[int, float]:
    """How many steps a line stands for, and the scale before them, nan if that is unknown."""
    apart = max(entry.step - earlier.step, 1)
    steps = min(entry.steps or usual, apart, LONGEST_INTERVAL)
    if apart > steps and earlier.step:
        notes.append(
            f"{entry.where}: {apart - steps} step(s) before this line, {earlier.step + 1} to {entry.step - steps}, "
            "are not in the log."
        )
    same = earlier.next_loss_scale == entry.next_loss_scale and earlier.step > 0
    known = same or (apart == steps and not entry.after_restart)
    return steps, earlier.next_loss_scale if known else math.nan


def _drops(before: float, after: float, factor: float) -> int:
    """How many drops at least lead from one scale to another; 0 where it did not fall, or one is unknown."""
    if not 0 < after < before < math.inf:
        return 0
    return max(1, math.ceil(math.log2(before / after) / math.log2(factor) - _NEAR))


def _usual_stride(entries: Sequence[LogEntry]) -> int:
    """The commonest number of steps from one line to the next, the smaller of two as common; of one line, its step."""
    apart = np.diff([entry.step for entry in entries], prepend=[0] if len(entries) == 1 else [])
    strides, counts = np.unique(apart[apart <= LONGEST_INTERVAL], return_counts=True)
    stride = int(strides[np.argmax(counts)]) if len(strides) else min(entries[0].skips or 1, LONGEST_INTERVAL)
    return max(stride, 1)


def bounds_by_rule(policy: Policy, intervals: Sequence[Interval], notes: list[str]) -> list[tuple[int, int]]:
    """Follow every sequence of flags that the lines of a log allow, and count its overflows.

    Args:
        policy (Policy): the rule of the run, with the state before step 1.
        intervals (Sequence[Interval]): the lines, of which the first begins at step 1. After a gap or a restart the
            state is unknown, and the bounds are those of any rule.
        notes (list[str]): gets a sentence where that happens.

    Returns:
        list of tuple: for each line the fewest and the most of the steps up to its last one that may have been skipped.

    Raises:
        ValueError: if the log does not begin at step 1, or no sequence leads to the scales that it states.
    """
    first = intervals[0]
    if first.entry.step != first.steps:
        raise ValueError(
            f"'rule' needs a log that begins at step 1, but {first.entry.where} is at step {first.entry.step}. Leave "
            "the rule out."
        )
    follower = _Follower(policy.rule)
    states = {_without_counters(policy.current): (0, 0)}
    bounds, step = [(0, 0)], 0
    for interval in intervals:
        entry = interval.entry
        has_gap = entry.step - interval.steps != step or entry.after_restart
        if states and (has_gap or follower.followed > _MOST_STATES):
            why = "after a gap or a restart" if has_gap else "because it has too many states"
            notes.append(f"{entry.where}: the rule is not followed from here on, {why}.")
            states = {}
        if states:
            states = follower.follow(states, interval)
            if not states:
                raise ValueError(
                    f"{entry.where}: no sequence of overflows leads the rule {policy.name!r} to loss scale "
                    f"{entry.next_loss_scale:g}. Correct the rule's arguments, its initial loss scale first, or leave "
                    "the rule out."
                )
            bounds.append((min(low for low, _ in states.values()), max(high for _, high in states.values())))
        else:
            bounds.append((bounds[-1][0] + interval.fewest, bounds[-1][1] + interval.most))
        step = entry.step
    return bounds[1:]


class _Follower:
    """Follows a rule through the lines of a log, and counts the states that it came through."""

    def __init__(self, rule: Any) -> None:
        self.after = cache(lambda state, overflow: _without_counters(rule.step(state, overflow)))
        self.followed = 0
        growth: float = getattr(rule, "scale_factor", getattr(rule, "growth_factor", math.inf))
        backoff: float = getattr(rule, "backoff_factor", None) or 1.0 / growth
        # A rule that names no factor may reach any scale.
        self.largest_changes = (math.log2(growth), -math.log2(backoff) if backoff else math.inf)

    def follow(self, states: dict[Any, tuple[int, int]], interval: Interval) -> dict[Any, tuple[int, int]]:
        """Return the states after the steps of a line, each with the fewest and the most overflows that lead to it."""
        entry = interval.entry
        for left in range(interval.steps - 1, -1, -1):
            flags = (False, True) if left or entry.overflow is None else (entry.overflow,)
            reached: dict[Any, tuple[int, int]] = {}
            can_reach = cache(partial(self._can_reach, entry.next_loss_scale, left))
            self.followed += len(states)
            for (state, (low, high)), overflow in product(states.items(), flags):
                after = self.after(state, overflow)
                if can_reach(after.loss_scale):
                    others = reached.get(after, (low + overflow, high + overflow))
                    reached[after] = (min(low + overflow, others[0]), max(high + overflow, others[1]))
            states = reached
        return states

    def _can_reach(self, target: float, steps: int, scale: float) -> bool:
        """Whether so many steps can lead from a scale to another; True where the other is unknown."""
        if math.isnan(target) or math.isclose(scale, target, rel_tol=_PRINTED):
            return True
        if not 0 < scale < math.inf or not 0 < target < math.inf:
            return steps > 0
        bits = math.log2(target / scale)
        return abs(bits) <= steps * self.largest_changes[bits < 0] + _PRINTED


def _without_counters(state: Any) -> Any:
    return state._replace(**{name: 0 for name in _COUNTERS if name in state._fields})


def expand(entries: Sequence[LogEntry], rule: Policy | None, notes: list[str]) -> dict[str, Any]:
    """Return what the lines of a log tell of its steps.

    Args:
        entries (Sequence[LogEntry]): steps strictly increasing, at least one.
        rule (Policy, optional): the rule that the run followed, with the state before step 1.
        notes (list[str]): gets a sentence for what had to be inferred, is missing or contradicts itself.

    Returns:
        dict of arguments for :class:`~mindformers_adaptive.lab.traces.recorded_run.RecordedRun`: all that are about
        steps.

    Raises:
        ValueError: if the lines do not follow the rule.
    """
    factor, factor_bound = infer_scale_factor(entries)
    first_scale = math.nan if rule is None else rule.loss_scale
    one_factor = rule is None or rule.moves_by_one_factor
    if one_factor:
        intervals = intervals_of(entries, factor, factor_bound, first_scale, notes)
    else:
        # What the scale does tells nothing of skipped steps: only flags and counts do.
        factor_bound = math.inf
        intervals = list(map(_by_flag, intervals_of(entries, math.inf, math.inf, first_scale, notes)))
    follows = rule is not None and (one_factor or isinstance(rule.rule, DynamicRule))
    holds_if = ""
    if (one_factor or follows) and not all(map(_is_stated, intervals)):
        holds_if = _ANY_RULE if rule is None else _THIS_RULE.format(rule.name)
    counts = np.array([interval.steps for interval in intervals])
    ends = np.cumsum(counts)
    bounds = np.cumsum([(interval.fewest, interval.most) for interval in intervals], axis=0)
    if rule is not None and follows:
        bounds = np.array(bounds_by_rule(rule, intervals, notes))
    columns: tuple[list[Any], ...] = ([], [], [])
    after = math.nan
    for interval in intervals:
        entry = interval.entry
        if math.isnan(interval.before) and math.isnan(entry.next_loss_scale):
            # A line that names no scale leaves the one that the lines before had led to.
            interval = interval._replace(before=after)
        after = _scale_after(interval, factor)
        flags, scales = _guessed_path(interval, after, factor, one_factor, notes)
        known = entry.placed and interval.fewest == interval.most and interval.fewest in (0, interval.steps)
        of_steps: list[Any] = [flags, scales, [known] * (interval.steps - 1) + [known or entry.overflow is not None]]
        for column, values in zip(columns, of_steps, strict=True):
            column += values
    overflow, loss_scale, position_known = map(np.array, columns)

    def at_last_steps(values: ArrayLike) -> NDArray[np.float64] | None:
        array = np.full(len(overflow), math.nan)
        array[ends - 1] = values
        return _or_none(array)

    return {
        "step": np.arange(len(overflow)) + np.repeat([entry.step for entry in entries] - ends + 1, counts),
        "loss_scale": loss_scale,
        "overflow": overflow,
        "position_known": position_known,
        "loss": at_last_steps([entry.loss for entry in entries]),
        "seconds": _or_none(np.repeat([entry.seconds for entry in entries], counts)),
        "largest_gradient": at_last_steps([entry.largest_gradient for entry in entries]),
        "gradient_format": next((entry.gradient_format for entry in entries if entry.gradient_format), "float16"),
        "overflowed_parameters": tuple(
            entry.overflowed_parameters for entry in entries if entry.overflowed_parameters is not None
        ),
        "dropped_by_norm": tuple(entry.step for entry in entries if entry.dropped_by_norm),
        "next_loss_scale": at_last_steps(
            [math.nan if math.isnan(entry.loss_scale) else entry.next_loss_scale for entry in entries]
        ),
        "scale_window": at_last_steps(
            [entry.scale_window if 1 <= entry.scale_window < math.inf else math.nan for entry in entries]
        ),
        "lines": np.column_stack([ends, bounds]),
        "final_loss_scale": after,
        "scale_factor": factor,
        "factor_bound": factor_bound,
        "moves_by_one_factor": one_factor,
        "holds_if": holds_if,
    }


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
