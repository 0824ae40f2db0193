"""How many steps each line of a log stands for, and how many of them were skipped.

A line stands for one step or, in sink mode and where only every k-th step is printed, for several. It states the scale
after its last step and, in MindFormers' logs, the flag of that step. From two such lines, N steps apart, follows:

- Where the scale fell by d factors, at least d steps were skipped. A last step that overflowed is at least one.
- Where it rose by r factors, at least r steps were clean, for a raise follows a clean step. A last step that did not
  overflow is at least one. Any other step may have been skipped without a trace: a raise may follow each drop where the
  window is 1, a tolerated overflow (hysteresis) leaves the scale as it is, and so does one at the floor.

This holds for every rule that changes the scale by one factor and at most once a step: the adaptive one, MindSpore's
and MindFormers' cells, Megatron-LM's, with any window, hysteresis, floor and upper bound. It does not for a rule that
follows the gradients, which has to be given, nor where a run was resumed with another factor or without its scale; so
what bounds rest on is said beside them. The factor is the one between lines that are one step apart. Where no lines
are, the bounds are those of the largest factor of which all scales are powers, times a constant; one change need not
fit, because the scale may have hit a floor of up to 2^14. The guess is 2, where it fits. A printed number of skipped
steps is exact, unless a fall of the scale shows that the log does not count them. A single line may stand for all steps
up to its own.

Where the rule of the run is given, every sequence of flags by which it leads to the scales of the log is followed, and
the bounds are the fewest and the most overflows among them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cache, partial
from itertools import accumulate, product
from typing import Any, NamedTuple

import numpy as np

from mindformers_adaptive.lab.logs.columns import LogColumns
from mindformers_adaptive.lab.logs.reader import LONGEST_INTERVAL, LogEntry
from mindformers_adaptive.lab.policies import Policy

__all__ = ["Interval", "bounds_by_rule", "infer_scale_factor", "intervals_of"]

_NEAR = 1e-3  # printed scales are rounded
_SAME_BITS = 1e-4  # the same in bits: eight digits are printed, and float32 rounds at each change
_FEWEST_BITS = 0.05  # no scale factor is this near to 1
_LARGEST_FLOOR_BITS = 14.0  # no floor is above 2^14
_PRINTED = 1e-6  # eight digits are printed
# Following a rule through more states than this, summed over the steps, takes more than about half a minute.
_MOST_STATES = 5e6

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
    columns = LogColumns.holding(entries)
    step, scale, restarted = (columns.array(name) for name in ("step", "next_loss_scale", "after_restart"))
    before, after = scale[:-1], scale[1:]
    change = (before != after) & (before > 0) & (before < math.inf) & (after > 0) & (after < math.inf)
    at = np.flatnonzero(change & ~restarted[1:].astype(bool))
    rows = np.diff(step)[at], np.log2(before[at]), np.log2(after[at])
    pairs = list(zip(*(row.tolist() for row in rows), strict=True))
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
    entries: Sequence[LogEntry],
    factor: float,
    factor_bound: float,
    first_scale: float,
    notes: list[str],
    places: Sequence[int] | None = None,
) -> list[Interval]:
    """Return what lines say of their steps.

    Args:
        entries (Sequence[LogEntry]): steps strictly increasing, at least one.
        factor (float), factor_bound (float): of :func:`infer_scale_factor`.
        first_scale (float): the scale before step 1, nan where it is unknown.
        notes (list[str]): gets a sentence for what is missing or contradicts itself.
        places (Sequence[int], optional): of which entries. Default: None, of all.
    """
    usual = _usual_stride(entries)
    is_alone = len(entries) == 1 and entries[0].steps is None and usual > 1
    if is_alone:
        notes.append(
            f"{entries[0].where}: the only line, taken to stand for all steps up to {entries[0].step}; it may stand "
            "for the last ones only."
        )
    start = LogEntry(0, "the start", next_loss_scale=first_scale)
    at = range(len(entries)) if places is None else places
    told = [entries[place] for place in at]
    spans = [
        _span(entries[place - 1] if place else start, entry, usual, notes)
        for place, entry in zip(at, told, strict=True)
    ]
    have_lines = any(entry.overflows for entry in told)
    stated = [max(len(entry.overflows), entry.skips or 0) if have_lines else entry.skips for entry in told]
    rows = list(zip(told, spans, stated, strict=True))
    wrong = [
        entry.where
        for entry, (_, before), skips in rows
        if skips is not None and not entry.is_exact and _drops(before, entry.next_loss_scale, factor_bound) > skips
    ]
    if wrong:
        notes.append(
            f"{wrong[0]}: the scale fell although no skipped step is counted, here and on {len(wrong)} line(s) in "
            "all: the printed numbers of skipped steps are not relied on."
        )
    intervals = []
    for entry, (steps, before), skips in rows:
        after = entry.next_loss_scale
        changes = max(_drops(before, after, factor), _drops(after, before, factor))
        if steps > 1 and changes > steps and not entry.is_exact:
            notes.append(
                f"{entry.where}: {steps} steps cannot move the scale from {before:g} to {after:g}; the scale before "
                "them is inferred."
            )
            before = math.nan
        if entry.is_exact and skips is not None:
            intervals.append(Interval(entry, steps, before, skips, skips, skips))
            continue
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
    steps = min(entry.steps or usual, apart, apart if entry.is_exact else LONGEST_INTERVAL)
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
    steps = LogColumns.holding(entries).array("step")
    apart = np.diff(steps, prepend=[0] if len(entries) == 1 else [])
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
