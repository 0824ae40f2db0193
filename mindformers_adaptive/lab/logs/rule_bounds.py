"""How many steps a known rule can have skipped, if it led to the scales and flags of a log."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mindformers_adaptive.lab.logs.intervals import Interval
from mindformers_adaptive.lab.policies import Policy

__all__ = ["bounds_by_rule"]

# Following more states than this, summed over the steps, takes more than about half a minute.
_MOST_STATES = 5e6

_PRINTED = 1e-6  # eight digits are printed

# Counters that have no effect on the scale.
_COUNTERS = ("skipped_steps", "consecutive_overflows")


def bounds_by_rule(policy: Policy, intervals: Sequence[Interval], notes: list[str]) -> list[tuple[int, int, int]]:
    """Follow every sequence of flags that the lines of a log allow, and count its overflows.

    Args:
        policy (Policy): the rule of the run, with the state before step 1.
        intervals (Sequence[Interval]): the lines, of which the first begins at step 1. After a gap or a restart the
            state is unknown, and the bounds are those of any rule.
        notes (list[str]): gets a sentence where that happens.

    Returns:
        list of tuple: for each line the number of steps up to its last one, and the fewest and the most of them that
        may have been skipped.

    Raises:
        ValueError: if the log does not begin at step 1, or no sequence leads to the scales that it states.
    """
    first = intervals[0]
    if first.entry.step != first.steps:
        raise ValueError(
            f"'rule' needs a log that begins at step 1, but {first.entry.where} is at step {first.entry.step}. Leave "
            "the rule out."
        )
    successors = _Successors(policy.rule)
    states = {_without_counters(policy.current): (0, 0)}
    lines, step = [(0, 0, 0)], 0
    for interval in intervals:
        entry = interval.entry
        taken, fewest, most = lines[-1]
        if states and (entry.step - interval.steps != step or entry.after_restart):
            notes.append(f"{entry.where}: the rule is not followed from here on, after a gap or a restart.")
            states = {}
        if states and successors.followed > _MOST_STATES:
            notes.append(f"{entry.where}: the rule is not followed from here on, because it has too many states.")
            states = {}
        bounds = (fewest + interval.fewest, most + interval.most)
        if states:
            states = _follow(states, interval, successors)
            if not states:
                raise ValueError(
                    f"{entry.where}: no sequence of overflows leads the rule {policy.name!r} to loss scale "
                    f"{entry.next_loss_scale:g}. Correct the rule's arguments, its initial loss scale first, or leave "
                    "the rule out."
                )
            bounds = (min(low for low, _ in states.values()), max(high for _, high in states.values()))
        lines.append((taken + interval.steps, *bounds))
        step = entry.step
    return lines[1:]


class _Successors(dict[Any, tuple[Any, Any]]):
    """The states after a clean step and after an overflow, by the state before."""

    def __init__(self, rule: Any) -> None:
        super().__init__()
        self.rule = rule
        self.followed = 0
        growth: float = getattr(rule, "scale_factor", getattr(rule, "growth_factor", math.inf))
        backoff: float = getattr(rule, "backoff_factor", None) or 1.0 / growth
        # A rule that names no factor may reach any scale.
        self.largest_changes = (math.log2(growth), -math.log2(backoff) if backoff else math.inf)

    def __missing__(self, state: Any) -> tuple[Any, Any]:
        clean, overflowed = (_without_counters(self.rule.step(state, overflow)) for overflow in (False, True))
        self[state] = (clean, overflowed)
        return clean, overflowed

    def can_reach(self, target: float, scale: float, steps: int) -> bool:
        """Whether so many steps can lead from a scale to another; True where the other is unknown."""
        if math.isnan(target) or math.isclose(scale, target, rel_tol=_PRINTED):
            return True
        if not 0 < scale < math.inf or not 0 < target < math.inf:
            return steps > 0
        bits = math.log2(target / scale)
        return abs(bits) <= steps * self.largest_changes[bits < 0] + _PRINTED


def _follow(
    states: dict[Any, tuple[int, int]], interval: Interval, successors: _Successors
) -> dict[Any, tuple[int, int]]:
    """The states after the steps of a line, each with the fewest and the most overflows that lead to it."""
    entry = interval.entry
    for left in range(interval.steps - 1, -1, -1):
        flags = (False, True) if left or entry.overflow is None else (entry.overflow,)
        reached: dict[Any, tuple[int, int]] = {}
        possible: dict[float, bool] = {}
        successors.followed += len(states)
        for state, (low, high) in states.items():
            for overflow in flags:
                after = successors[state][overflow]
                scale = after.loss_scale
                if scale not in possible:
                    possible[scale] = successors.can_reach(entry.next_loss_scale, scale, left)
                if possible[scale]:
                    others = reached.get(after, (low + overflow, high + overflow))
                    reached[after] = (min(low + overflow, others[0]), max(high + overflow, others[1]))
        states = reached
    return states


def _without_counters(state: Any) -> Any:
    return state._replace(**{name: 0 for name in _COUNTERS if name in state._fields})
