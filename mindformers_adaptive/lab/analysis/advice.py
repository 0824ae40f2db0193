"""What a recorded run gives reason to change, each rule with its reason and its figures.

A rule speaks only where the log shows what it needs: steps whose place is only inferred count for nothing but the
start. Prices are those of :func:`~mindformers_adaptive.lab.replay.measures.cost`: one bit of headroom at 1000 steps is
worth one skipped step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mindformers_adaptive.lab.analysis.evidence import (
    HELD,
    RaiseOutcome,
    climb,
    raise_outcomes,
    rows_of_flags,
    start_of_run,
)
from mindformers_adaptive.lab.analysis.scale_path import Change
from mindformers_adaptive.lab.replay.measures import DEFAULT_EXCHANGE_RATE, LARGEST_LOSS_SCALE, SMALLEST_LOSS_SCALE
from mindformers_adaptive.lab.traces.recorded_run import RecordedRun
from mindformers_adaptive.rule.adaptive_rule import COUNTER_LIMIT
from mindformers_adaptive.text.power_of_two import as_power_of_two

__all__ = ["Advice", "advise"]

# Three of a kind, the number on which the rule itself acts, are no chance.
_FEWEST = COUNTER_LIMIT

# LossScaleMonitor's default for overflows in a row. At one and the same scale fewer prove it: Megatron-LM and the
# other systems tolerate 2.
_COLLAPSE, _COLLAPSE_AT_ONE_SCALE = 50, 10

_STEPS_FOR_A_BIT = 1000.0 / DEFAULT_EXCHANGE_RATE


@dataclass(frozen=True)
class Advice:
    """Something to change.

    Attributes:
        rule (str): "start lower", "start higher", "larger window", "smaller window", "more hysteresis", "less
            hysteresis" or "collapse".
        change (str): what to change.
        reason (str): why, with figures.
        figures (dict): the figures by name, ready for JSON.
        settings (dict): arguments of the cell that do so; windows are chosen later, by replays.
    """

    rule: str
    change: str
    reason: str
    figures: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


def advise(run: RecordedRun, changes: Sequence[Change]) -> list[Advice]:
    """Return what the run gives reason to change; nothing where it gives none.

    Args:
        run (RecordedRun): at least one step.
        changes (Sequence[Change]): its :func:`~mindformers_adaptive.lab.analysis.scale_path.changes_of`.
    """
    outcomes = raise_outcomes(run, changes)
    found = [
        _collapse(run),
        _start_lower(run),
        _start_higher(run),
        _larger_window(outcomes),
        _smaller_window(run, changes),
        _more_hysteresis(run, outcomes),
        _less_hysteresis(run),
    ]
    return [advice for advice in found if advice is not None]


def _collapse(run: RecordedRun) -> Advice | None:
    """Return the advice to look at the model, where overflows in a row show that no scale helps; else None."""
    scale = run.loss_scale
    for first, last in rows_of_flags(run.overflow):
        length, stays = (
            last - first + 1,
            bool((scale[last - _COLLAPSE_AT_ONE_SCALE + 1 : last + 1] == scale[last]).all()),
        )
        if length < _COLLAPSE and not (length >= _COLLAPSE_AT_ONE_SCALE and stays):
            continue
        figures = {"steps": length, "first_step": int(run.step[first]), "last_step": int(run.step[last])}
        loss_is_bad = run.loss is not None and bool(np.isinf(run.loss[first : last + 1]).any())
        return Advice(
            "collapse",
            "Look at the model and the data, not at the loss scaling: learning rate, warm-up, gradient clipping, "
            "float32 for softmax and normalization, NaN or inf in data and weights.",
            f"{length} steps in a row were skipped, {figures['first_step']} to {figures['last_step']}"
            + (f", with the scale at {as_power_of_two(float(scale[last]))} to the last" if stays else "")
            + ("; the loss itself was inf" if loss_is_bad else "")
            + ". A step that overflows at each of these scales would at others too.",
            figures,
        )
    return None


def _start_lower(run: RecordedRun) -> Advice | None:
    start = start_of_run(run)
    if start.scale is None or start.skipped < _FEWEST or not SMALLEST_LOSS_SCALE <= start.scale < run.loss_scale[0]:
        return None
    inferred = "" if start.known == start.skipped else f" ({start.skipped - start.known} of them inferred)"
    where = (
        ""
        if run.step[0] == 1
        else (
            f" The log begins at step {run.step[0]}: if the run was resumed there, its loss scale was not, and to "
            "resume that too costs nothing."
        )
    )
    return Advice(
        "start lower",
        _start_at(start.scale, float(run.loss_scale[0])),
        f"{start.skipped} steps{inferred} were skipped before {as_power_of_two(start.scale)}, from step {start.step} "
        f"on, was the first scale that held ({start.bore} clean steps in a row at least). Taken that the steps before "
        f"could bear what those after could, starting there saves them.{where}",
        {"scale": start.scale, "saves_skipped_steps": start.skipped, "known": start.known, "held_from": start.step},
        {"loss_scale_value": start.scale},
    )


def _start_higher(run: RecordedRun) -> Advice | None:
    clean = int(np.argmax(run.overflow)) if run.overflow.any() else len(run)
    scale = run.loss_scale[:clean]
    raises, bits, top = climb(scale, run.position_known[:clean])
    if raises < _FEWEST or bits < _STEPS_FOR_A_BIT or top > LARGEST_LOSS_SCALE:
        return None
    reached = int(run.step[int(np.argmax(scale == top))])
    return Advice(
        "start higher",
        _start_at(top, float(scale[0])),
        f"{raises} raises without an overflow led to {as_power_of_two(top)}, at step {reached}; below it {bits:.0f} "
        f"bits of headroom were lost, as much as {bits / _STEPS_FOR_A_BIT:.0f} skipped steps are worth.",
        {"scale": top, "raises": raises, "reached_at": reached, "headroom_lost": bits},
        {"loss_scale_value": top},
    )


def _larger_window(outcomes: Sequence[RaiseOutcome]) -> Advice | None:
    fails = np.array([outcome.overflow_after is not None for outcome in outcomes], np.int64)
    # From which raise on most fail: two of three.
    most = 3 * np.cumsum(fails[::-1])[::-1] >= 2 * np.arange(len(fails), 0, -1)
    first = int(np.argmax(most & (fails == 1))) if len(fails) else 0
    last, failed = outcomes[first:], int(fails[first:].sum())
    if failed < _FEWEST or not most[first]:
        return None
    window = max(outcome.window for outcome in last)
    within = sorted(outcome.overflow_after for outcome in last if outcome.overflow_after is not None)
    steps = last[-1].step + (last[-1].overflow_after or last[-1].window) - last[0].step + last[0].window
    # Twice what usual settings pay for knowing that there is not one bit more.
    if failed / steps <= 2.0 / _STEPS_FOR_A_BIT:
        return None
    return Advice(
        "larger window",
        f"Let the window be larger than {window} steps.",
        f"{failed} of the last {len(last)} raises, steps {last[0].step} to {last[-1].step}, were followed by an "
        f"overflow before the scale had borne as many steps as before the raise, half of them within "
        f"{within[len(within) // 2]}, all within {within[-1]}. So 1 of {steps / failed:.0f} steps was skipped to "
        f"find out that the scale was as high as it can be; usual settings pay 1 of {_STEPS_FOR_A_BIT:.0f} for that.",
        {
            "raises": len(last),
            "failed": failed,
            "half_within": within[len(within) // 2],
            "all_within": within[-1],
            "steps": steps,
            "largest_window": window,
        },
    )


def _smaller_window(run: RecordedRun, changes: Sequence[Change]) -> Advice | None:
    windows = [change.before[1] or 0 for change in changes if change.kind == "raise"]
    window = max(windows, default=0)
    if not run.overflow.any() or window < 2:
        return None
    bits, steps, raises, longest = 0.0, 0, 0, 0
    # Before the first overflow a higher start helps, and not a window.
    for first, last in rows_of_flags(~run.overflow):
        if first > 0:
            climbed, lost, top = climb(run.loss_scale[first : last + 1], run.position_known[first : last + 1])
            if climbed >= _FEWEST:
                below = int((run.loss_scale[first : last + 1] < top).sum())
                bits, steps, raises, longest = bits + lost, steps + below, raises + climbed, max(longest, below)
    # Half the window gains half of these bits, and at most doubles the raises that fail, which are 1 in a window.
    if bits / 2 <= len(run) / window * _STEPS_FOR_A_BIT:
        return None
    return Advice(
        "smaller window",
        f"Let the window be smaller than {window} steps.",
        f"For {steps} steps, {longest} of them in a row, the scale was below what it was raised to without an "
        f"overflow, in {raises} raises: {bits / len(run):.1f} bits of headroom in the mean of all steps. Half the "
        "window would have lost half of that, for at most "
        f"{math.ceil(len(run) / window)} skipped steps more.",
        {"steps": steps, "longest": longest, "raises": raises, "headroom_lost": bits, "largest_window": window},
    )


def _more_hysteresis(run: RecordedRun, outcomes: Sequence[RaiseOutcome]) -> Advice | None:
    """Single overflows at a scale that held before them and again once it was back."""
    scale, rows = run.loss_scale, rows_of_flags(run.overflow)
    single, below = 0, 0
    for (first, last), (following, _) in itertools.zip_longest(rows, rows[1:], fillvalue=(len(run), 0)):
        held = first >= HELD and not run.overflow[first - HELD : first].any()
        if first != last or not held or not (scale[first - HELD : first] == scale[first]).all():
            continue
        back = last + 1 + np.flatnonzero(scale[last + 1 : following] >= scale[first])[:1]
        if len(back) == 0 or following - back[0] < HELD or back[0] == last + 1:
            continue
        if (
            run.position_known[first - HELD : back[0] + HELD].all()
            and (scale[back[0] : back[0] + HELD] == scale[first]).all()
        ):
            single, below = single + 1, below + int(back[0]) - last - 1
    failed = sum(outcome.overflow_after is not None for outcome in outcomes)
    if single < _FEWEST or below / _STEPS_FOR_A_BIT <= failed:
        return None
    return Advice(
        "more hysteresis",
        "Tolerate single overflows: hysteresis: 2.",
        f"{single} overflows were single steps at a scale that had held for {HELD} steps before them and held as long "
        f"once it was back; until then {below} steps were taken at a lower scale. The price is one skipped step more "
        f"for each raise that fails, and {failed} did.",
        {"single_overflows": single, "steps_below": below, "failed_raises": failed},
        {"hysteresis": 2},
    )


def _less_hysteresis(run: RecordedRun) -> Advice | None:
    """Tolerated overflows, that is at a scale that the next step used again: did it help ever?"""
    known = run.position_known[:-1] & run.position_known[1:] & (np.diff(run.step) == 1)
    tolerated = run.overflow[:-1] & (run.loss_scale[1:] == run.loss_scale[:-1]) & known
    # At the smallest scale an overflow is not tolerated: there is nothing lower.
    tolerated &= run.loss_scale[:-1] > np.nanmin(run.loss_scale, initial=math.inf)
    helped, count = int((tolerated & ~run.overflow[1:]).sum()), int(tolerated.sum())
    if count < _FEWEST or helped:
        return None
    return Advice(
        "less hysteresis",
        "Do not tolerate overflows: hysteresis: 1.",
        f"{count} overflows were tolerated, and each time the next step overflowed at the same scale: {count} steps "
        "were skipped for nothing.",
        {"tolerated": count, "saves_skipped_steps": count},
        {"hysteresis": 1},
    )


def _start_at(scale: float, instead_of: float) -> str:
    value = int(scale) if scale.is_integer() else scale
    return f"Start at {as_power_of_two(scale)} (loss_scale_value: {value}) instead of {as_power_of_two(instead_of)}."
