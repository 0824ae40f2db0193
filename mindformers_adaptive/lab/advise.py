"""What to change after a recorded run, by what it cost and what other settings would have cost in its place.

Costs are counted in skipped steps; 1000 steps that lose a bit of headroom each count as one, see
:func:`~mindformers_adaptive.lab.measures.cost`. Candidates are replayed on the run's own trace, with
ceilings raised by :func:`~mindformers_adaptive.lab.analysis.raise_ceilings`. Advice is given where that
saves more than two skipped steps, which Megatron-LM and others tolerate anyway. Windows and hysteresis are judged only
where the log knows which steps were skipped, and not for a rule that follows the gradients, which has neither.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.lab.configuration import Configuration, grid
from mindformers_adaptive.lab.measures import (
    DEFAULT_EXCHANGE_RATE,
    LARGEST_LOSS_SCALE,
    SMALLEST_LOSS_SCALE,
    Measures,
    cost,
    measure,
)
from mindformers_adaptive.lab.policies import make_policy
from mindformers_adaptive.lab.replay import replay
from mindformers_adaptive.lab.scale_path import Change
from mindformers_adaptive.lab.tuning import Tuning, tune
from mindformers_adaptive.lab.unused_headroom import shown_by_gradients, shown_in_words
from mindformers_adaptive.record.run import RecordedRun, forward_fill
from mindformers_adaptive.record.run_folder import run_folder_of, why_command
from mindformers_adaptive.record.trace import Trace, consecutive_runs
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.rules.ladder import DEFAULT_MAX_SCALE_WINDOW, DEFAULT_MIN_SCALE_WINDOW
from mindformers_adaptive.text.table import as_power_of_two

__all__ = ["Advice", "advise"]

# Skipped steps that a change has to save more than.
_TOLERABLE = 2.0

# Where Megatron-LM, DeepSpeed and MindFormers start by default.
_LARGEST_START = 2.0**32

# A scale that lies so many bits below what the gradients allow is far below; find() leaves a margin of 2.
_FAR_BELOW = 3

# A scale held if it bore as many consecutive clean steps as MindFormers' smallest window.
_HELD = DEFAULT_MIN_SCALE_WINDOW

# LossScaleMonitor's default for consecutive overflows. At one and the same scale fewer prove it.
_COLLAPSE, _COLLAPSE_AT_ONE_SCALE = 50, 10

# The share of steps that the log has to know for windows and hysteresis to be judged; tune() calls that "known".
_KNOWN = 0.9


@dataclass(frozen=True)
class Advice:
    """Something to change.

    Attributes:
        rule (str): "start lower", "start higher", "larger window", "smaller window", "moving window", "more
            hysteresis", "less hysteresis", "short run", "collapse" or
            "bad loss".
        change (str): what to change.
        reason (str): why, with figures.
        figures (dict): the figures by name, ready for JSON.
        settings (dict): the cell's arguments that make the change; those for windows are in the tuning.
    """

    rule: str
    change: str
    reason: str
    figures: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


def advise(run: RecordedRun, trace: Trace, changes: Sequence[Change]) -> tuple[list[Advice], Tuning | None]:
    """Return what to change, and the settings that follow from it.

    Args:
        run (RecordedRun): at least one step, and a known loss scale.
        trace (Trace): of this run, with raised ceilings.
        changes (Sequence[Change]): its :func:`~mindformers_adaptive.lab.scale_path.changes_of`.

    Returns:
        tuple of the advice, empty where the run gives no reason for any, and the tuning of the recommended settings,
        None where there is no advice or no setting would help.
    """
    collapse, (start, scale) = _collapse(run), _start(run, trace)
    recorded, usable = _measured(trace, scale), scale[(scale >= 1.0) & (scale <= LARGEST_LOSS_SCALE)]
    # Of a rule that follows the gradients nothing is said: it has neither window nor hysteresis.
    follows_gradients = run.largest_gradient is not None
    never_rose = [] if start or collapse else _never_rose(run, scale, changes)
    advice = [*_bad_loss(run), *collapse, *start, *never_rose]
    advice += [] if follows_gradients else _short_run(run, changes)
    if collapse or follows_gradients or not len(usable):
        return advice, None
    if not start:
        advice += _unseen_start(run, float(usable[0]))
    settings = {
        "loss_scale_value": float(usable[0]),
        "scale_factor": min(run.scale_factor, 1.0 / SMALLEST_LOSS_SCALE),
        "min_loss_scale": min([1.0, *scale[scale >= SMALLEST_LOSS_SCALE].tolist()]),
    }
    windows = [change.clean_steps for change in changes if change.clean_steps is not None]
    tuning, is_known = None, run.position_known.mean() >= _KNOWN
    if is_known and windows:
        on_windows, tuning = _windows(trace, recorded, max(windows), settings)
        advice += on_windows
        if tuning is not None:
            windows = list(_windows_of(tuning.recommended))
    if is_known:
        on_hysteresis = _hysteresis(run, trace, recorded if tuning is None else None, windows, settings)
        advice += on_hysteresis
        for one in on_hysteresis:
            settings |= one.settings
            tuning = tuning and tune([trace], [tried.replace(**one.settings) for tried in tuning.configurations])
    if not advice or tuning is not None:
        return advice, tuning
    # The windows that cost least on the trace; the defaults where it does not show what windows cost.
    shows_windows = is_known and len(trace) >= DEFAULT_MAX_SCALE_WINDOW
    return advice, tune(
        [trace], _configurations(settings) if shows_windows else [Configuration("adaptive", **settings)]
    )


def _measured(trace: Trace, scale: NDArray[np.float64]) -> Measures:
    """The measures of scales, one for each step, of which the last one stays."""
    return measure(trace, np.append(scale, scale[-1]))


def _lost(measures: Measures) -> float:
    """Total cost, in equivalent skipped steps."""
    return cost(measures) * measures.steps / 1000.0


def _in_words(measures: Measures) -> str:
    bits = 0.0 if math.isnan(measures.headroom_lost) else measures.headroom_lost
    return f"{measures.skipped} skipped step{'' if measures.skipped == 1 else 's'} and {bits:.1f} bits of headroom"


def _collapse(run: RecordedRun) -> list[Advice]:
    """The advice to look at the model, where consecutive overflows show that no scale helps."""
    places = np.flatnonzero(run.position_known)
    step, scale = run.step[places], run.loss_scale[places]
    for first, last in consecutive_runs(np.flatnonzero(run.overflow[places])).tolist():
        length = last - first + 1
        stays = bool((scale[last - _COLLAPSE_AT_ONE_SCALE + 1 : last + 1] == scale[last]).all())
        if length < _COLLAPSE and not (length >= _COLLAPSE_AT_ONE_SCALE and stays):
            continue
        is_row = step[last] - step[first] == last - first
        loss_is_bad = run.loss is not None and bool(np.isinf(run.loss[places[first : last + 1]]).any())
        is_held = stays and not loss_is_bad and bool(scale[last] > 1)
        look = "Lower what holds the scale, min_loss_scale, hysteresis or a fixed scale. If that does not help, look"
        advice = Advice(
            "collapse",
            f"{look if is_held else 'Look'} at the model and the data, not at the loss scaling: learning rate, "
            "warm-up, gradient clipping, float32 for softmax and normalization, NaN or inf in data and weights. "
            f"Find the layer and a remedy:\n{why_command(run_folder_of(*run.files))}",
            (f"{length} steps in a row" if is_row else f"All {length} steps that the log shows")
            + f" were skipped, {step[first]} to {step[last]}"
            + (f", with the scale at {as_power_of_two(float(scale[last]))} to the last" if stays and is_row else "")
            + ("; the loss itself was inf" if loss_is_bad else "")
            + (". A lower one may fit." if is_held else ". A step that overflows at all of these would at others too."),
            {"steps": length, "first_step": int(step[first]), "last_step": int(step[last])},
        )
        return [advice]
    return []


def _bad_loss(run: RecordedRun) -> list[Advice]:
    """The advice to look for the layer, where the loss itself is inf or NaN, whatever it is multiplied by."""
    places = np.flatnonzero(np.isinf(run.loss)) if run.loss is not None else np.empty(0, np.int64)
    if run.loss is None or not len(places):
        return []
    first, known = int(run.step[places[0]]), int(np.count_nonzero(~np.isnan(run.loss)))
    return [
        Advice(
            "bad loss",
            f"Find the layer that makes the loss inf or NaN, and a remedy:\n{why_command(run_folder_of(*run.files))}",
            f"The loss was inf or NaN in {len(places)} of the {known} steps that show it, the first of them step "
            f"{first}. This is the loss before scaling: no loss scale can help.",
            {"steps": len(places), "first_step": first},
        )
    ]


def _short_run(run: RecordedRun, changes: Sequence[Change]) -> list[Advice]:
    """The advice for a run that is shorter than its window, in which the scale cannot rise."""
    steps, window = int(run.step[-1]), math.inf if run.scale_window is None else float(np.nanmin(run.scale_window))
    if run.step[0] != 1 or not steps < window < math.inf or any(change.kind == "raise" for change in changes):
        return []
    change = f"Start from the scale that 'find' recommends, or take a window below {steps} steps."
    reason = f"The run ({steps} steps) is shorter than the window ({window:g}): the scale can never rise."
    return [Advice("short run", change, reason, {"steps": steps, "window": int(window)})]


def _never_rose(run: RecordedRun, scale: NDArray[np.float64], changes: Sequence[Change]) -> list[Advice]:
    """The advice to start higher, where a scale that never rose stayed far below what the gradients allowed."""
    shown, highest = shown_by_gradients(run), float(scale.max())
    if shown is None or any(change.kind in ("raise", "rise", "overflow rise") for change in changes):
        return []
    better = 2.0 ** math.floor(math.log2(shown["lowest"]))
    if not SMALLEST_LOSS_SCALE <= highest * 2.0**_FAR_BELOW <= better <= LARGEST_LOSS_SCALE:
        return []
    bits = math.log2(shown["lowest"] / highest)
    change = f"{_start_at(better, highest)} Or let it rise: a fixed scale does not, nor one whose window is longer."
    reason = (
        f"The scale never rose above {as_power_of_two(highest)}, and {shown_in_words(shown)}: {bits:.1f} bits more, as "
        "far as these gradients show. What is between the layers may overflow earlier."
    )
    return [Advice("start higher", change, reason, {**shown, "bits": bits}, {"loss_scale_value": better})]


def _start(run: RecordedRun, trace: Trace) -> tuple[list[Advice], NDArray[np.float64]]:
    """Judge the scale that the run first held, or climbed to before any overflow, as the scale to start from.

    With the advice comes what the run would have used with it: that scale until it was reached, then the same.
    """
    scale = forward_fill(run.loss_scale)
    clean = consecutive_runs(np.flatnonzero(~run.overflow)).tolist()
    held = (
        first
        for first, last in clean
        if last - first + 1 >= _HELD or last == len(run) - 1 or scale[first : last + 2].max() > scale[first]
    )
    reached = next(held, 0)
    if reached == 0 and clean and clean[0][0] == 0:
        reached = int(np.argmax(scale[: clean[0][1] + 1]))
    shown = trace.largest_gradient is not None and not run.overflow[reached]
    # Gradients show what the first steps bear; a scale that follows them begins well below.
    lowest = float(trace.ceiling[reached : reached + _HELD].min()) if shown else 0.0
    better, first = 2.0 ** math.floor(math.log2(lowest)) if lowest > 0 else float(scale[reached]), float(scale[0])
    if better == first or not SMALLEST_LOSS_SCALE <= better <= LARGEST_LOSS_SCALE:
        return [], scale
    from_there = np.append(np.full(reached, better), scale[reached:])
    saved = _lost(_measured(trace, scale)) - _lost(_measured(trace, from_there))
    if saved <= _TOLERABLE:
        return [], scale
    change = _start_at(better, None if math.isnan(run.loss_scale[0]) else first)
    figures = {"scale": better, "reached_at": int(run.step[reached]), "saves": saved}
    if better < first:
        place = f"{as_power_of_two(better)}, from step {run.step[reached]} on"
        what = f"gradients allowed {place}" if shown else f"{place}, was the first scale that held"
        rule, reason = "start lower", _why_lower(run, reached, what, figures)
    else:
        raises = figures["raises"] = int((np.diff(scale[: reached + 1]) > 0).sum())
        figures["headroom_lost"] = float(np.log2(better / scale[:reached]).sum())
        rule = "start higher"
        reason = (
            f"{raises} raises without an overflow led to {as_power_of_two(better)}, at step {run.step[reached]}. The "
            f"headroom lost on the way is worth {saved:.0f} skipped steps, at {1000 / DEFAULT_EXCHANGE_RATE:.0f} bits "
            "for a step."
        )
    return [Advice(rule, change, reason, figures, {"loss_scale_value": better})], from_there


def _unseen_start(run: RecordedRun, scale: float) -> list[Advice]:
    """The advice for a log whose first line stands for several steps: what they started from is not in it."""
    steps = int(run.line_ends()[0])
    fewest, most = run.skipped_bounds(steps)
    drops = math.log(_LARGEST_START / scale, run.scale_factor) if 0 < scale < _LARGEST_START else 0
    if run.step[0] != 1 or not math.isnan(run.loss_scale[0]) or min(most, drops) <= _TOLERABLE:
        return []
    change = f"If the run started above {as_power_of_two(scale)}: {_start_at(scale, None)}"
    reason = (
        f"The first line of the log stands for steps 1 to {steps}. It does not show the scale that they started from, "
        f"nor which of them were skipped: at least {fewest} and at most {most}."
    )
    figures = {"scale": scale, "reached_at": int(run.step[steps - 1])}
    figures |= {"saves_skipped_steps": fewest, "saves_at_most": most}
    return [Advice("start lower", change, reason, figures, {"loss_scale_value": scale})]


def _why_lower(run: RecordedRun, reached: int, what: str, figures: dict[str, Any]) -> str:
    """The reason for a lower start; adds its figures."""
    ends = run.line_ends()
    # Where a line stands for several steps, what is known of them is known at its end.
    end = reached if reached in ends else int(ends[np.searchsorted(ends, reached)])
    fewest, most = run.skipped_bounds(end)
    known = int((run.overflow & run.position_known)[:end].sum())
    figures |= {"saves_skipped_steps": fewest, "saves_at_most": most, "known": known}
    inferred = "" if known == fewest else f" ({fewest - known} of them inferred)"
    count = f"{fewest}{inferred}" if fewest == most else f"At least {fewest}{inferred} and at most {most}"
    reason = f"{count} steps were skipped before {what}. If they could have used it too, starting there avoids them."
    if run.step[0] == 1:
        return reason
    return (
        f"{reason} The log begins at step {run.step[0]}: if the run was resumed there without its loss scale, resume "
        "the loss scale too."
    )


def _start_at(scale: float, instead_of: float | None) -> str:
    value = int(scale) if scale.is_integer() else scale
    instead = "" if instead_of is None else f" instead of {as_power_of_two(instead_of)}"
    return f"Start at {as_power_of_two(scale)} (loss_scale_value: {value}){instead}."


def _hysteresis(
    run: RecordedRun, trace: Trace, recorded: Measures | None, windows: Sequence[int], settings: dict[str, Any]
) -> list[Advice]:
    """Judge the other hysteresis, 1 or 2, at these windows and within the scales that the run used.

    ``recorded`` is what the run itself cost, or None where its windows are to be changed.
    """
    scale = run.loss_scale
    next_is_known = (np.diff(run.step) == 1) & run.position_known[:-1] & run.position_known[1:]
    # At the smallest scale an overflow is not tolerated: there is nothing lower.
    tolerated = run.overflow[:-1] & (scale[1:] == scale[:-1]) & (scale[:-1] > np.nanmin(scale)) & next_is_known
    in_vain = int((tolerated & run.overflow[1:]).sum())
    first, last = consecutive_runs(np.flatnonzero(run.overflow)).T
    single = int((first == last).sum())
    if tolerated.any():
        grounds, hysteresis, rule, change = in_vain, 1, "less hysteresis", "Do not tolerate overflows: hysteresis: 1."
        reason = f"After {in_vain} of {tolerated.sum()} tolerated overflows, the next step overflowed too."
    else:
        grounds, hysteresis, rule, change = single, 2, "more hysteresis", "Tolerate single overflows: hysteresis: 2."
        reason = f"{single} overflows were single steps."
    if grounds <= _TOLERABLE:
        return []
    never = len(run) + 1
    of_run = {"min_scale_window": min(windows, default=never), "max_scale_window": max(windows, default=never)}
    of_run["max_loss_scale"] = max(min(float(np.nanmax(scale)), LARGEST_LOSS_SCALE), settings["loss_scale_value"])
    before, after = (
        replay(make_policy("adaptive", **settings, **of_run, hysteresis=one), trace).measures
        for one in (3 - hysteresis, hysteresis)
    )
    if tolerated.any() and recorded is not None:
        before = recorded
    saved = _lost(before) - _lost(after)
    if saved <= _TOLERABLE:
        return []
    reason += f" With the same windows, the change costs {_in_words(after)} instead of {_in_words(before)}."
    figures = {"single": single, "tolerated": int(tolerated.sum()), "in_vain": in_vain, "saves": saved}
    return [Advice(rule, change, reason, figures, {"hysteresis": hysteresis})]


def _windows(
    trace: Trace, recorded: Measures, largest: int, settings: dict[str, Any]
) -> tuple[list[Advice], Tuning | None]:
    """Judge larger windows than the largest of the run, smaller ones, and those on both sides of it."""
    tried = _configurations(settings)
    all_tried = tune([trace], tried, assumptions={})
    costs = all_tried.costs[:, 0] * len(trace) / 1000.0
    rules = np.array([_direction(one, largest) for one in tried])
    # Other windows have to save as much as usual settings pay: one skipped step in 1000, see cost().
    worth = max(_TOLERABLE, DEFAULT_EXCHANGE_RATE / 1000.0 * len(trace))
    cheapest = {rule: float(costs[rules == rule].min(initial=math.inf)) for rule in _DIRECTIONS}
    rule = min(_DIRECTIONS, key=lambda one: cheapest[one] + (worth if one == "moving window" else 0.0))
    saved = _lost(recorded) - cheapest[rule]
    if saved <= worth:
        return [], None
    tuning = tune([trace], [tried[place] for place in np.flatnonzero(rules == rule)])
    after = tuning.sweeps[0].measures[tuning.best]
    smallest_of_best, largest_of_best = _windows_of(tuning.recommended)
    reason = (
        f"With windows up to {largest}, the run cost {_in_words(recorded)}. Windows from {smallest_of_best} to "
        f"{largest_of_best} would have cost {_in_words(after)}; {1000 / DEFAULT_EXCHANGE_RATE:.0f} steps "
        "that lose a bit count as one skipped step."
    )
    figures = {"largest_window": largest, "skipped": recorded.skipped, "skipped_instead": after.skipped, "saves": saved}
    return [Advice(rule, _DIRECTIONS[rule].format(largest), reason, figures)], tuning


_DIRECTIONS = {
    "larger window": "Let the window be larger than {} steps.",
    "smaller window": "Let the window be smaller than {} steps.",
    "moving window": "Let the window move: smaller than {0} steps after drops, and larger where the scale is steady.",
}


def _windows_of(configuration: Configuration) -> tuple[int, int]:
    """The smallest and the largest window."""
    return configuration.rule.min_scale_window, configuration.rule.max_scale_window


def _direction(configuration: Configuration, window: int) -> str:
    """On which side of a window the windows of a configuration are; "" for that window itself."""
    smallest, largest = _windows_of(configuration)
    if smallest >= window:
        return "larger window" if largest > window else ""
    return "smaller window" if largest <= window else "moving window"


def _configurations(settings: dict[str, Any]) -> list[Configuration]:
    """The windows to try; of those that cost the same, the nearest to the defaults come first."""
    largest, smallest = (
        sorted(AdaptiveRule.tried["min_scale_window"], key=lambda tried: abs(math.log(tried / window)))
        for window in (DEFAULT_MAX_SCALE_WINDOW, DEFAULT_MIN_SCALE_WINDOW)
    )
    fixed = {name: [value] for name, value in settings.items()}
    return grid("adaptive", **fixed, max_scale_window=largest, min_scale_window=smallest)
