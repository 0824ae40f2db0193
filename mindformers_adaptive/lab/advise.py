"""Advice after a recorded run: a loss scale to start from, scale windows to use, or a cause outside loss scaling.

Settings are recommended only if the log decides for at least 90 % of the replayed steps whether they are skipped. The
replay must also save more than two skipped steps, whatever is assumed about the other steps. A step whose scale is more
than 16 bits below the ceiling counts as a skipped one, see :func:`~mindformers_adaptive.lab.measures.cost`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.lab.configuration import Configuration, grid
from mindformers_adaptive.lab.facts import StartUp, start_up_of
from mindformers_adaptive.lab.measures import LARGEST_LOSS_SCALE, SMALLEST_LOSS_SCALE, Measures, cost
from mindformers_adaptive.lab.replay import replay_side_by_side, sweep
from mindformers_adaptive.lab.scale_path import Change
from mindformers_adaptive.lab.tuning import MOST_STEPS_SWEPT
from mindformers_adaptive.record.definitions import DECIDED_FROM, HELD
from mindformers_adaptive.record.run import RecordedRun
from mindformers_adaptive.record.run_folder import Ways, ways_of
from mindformers_adaptive.record.symptoms import AGAINST_BAD_LOSS, low_scale_of
from mindformers_adaptive.record.trace import Trace, consecutive_runs
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.rules.ladder import DEFAULT_MAX_SCALE_WINDOW, DEFAULT_MIN_SCALE_WINDOW
from mindformers_adaptive.text.table import as_power_of_two, counted

__all__ = ["Advice", "Settings", "advise"]

# Advise a change only if it saves more skipped steps than this. Users of Megatron-LM and other systems tolerate two
# skipped steps anyway.
_TOLERABLE = 2.0

# How many consecutive overflows count as a collapse of the loss scale: LossScaleMonitor's default number, or fewer if
# the scale stays the same.
_COLLAPSE, _COLLAPSE_AT_ONE_SCALE = 50, 10

# At least this many overflows in a row, after a scale that had held, are a late streak if the loss or the norm of the
# gradients is at least three times as large afterwards. A rise of the ceilings' noise costs one or two steps.
_LATE_STREAK, _MUCH_WORSE = 5, 3.0


@dataclass(frozen=True)
class Advice:
    """One piece of advice: what to change after a run, and why.

    Attributes:
        rule (str): the kind of advice: "start lower", "larger window" or "short run"; or, if the loss scaling is not
            the cause, "bad loss", "bad gradients", "collapse", "late streak", "low scale" or "scale of 1".
        change (str): what to change.
        reason (str): why to change it, with figures.
        figures (dict): the figures of the reason by name, ready for JSON.
        argument (str): the argument of the update cell that the advice changes; "" if it changes no argument.
        note (str): the reason in a few words, for a comment behind that argument in the YAML text.
    """

    rule: str
    change: str
    reason: str
    figures: dict[str, Any] = field(default_factory=dict)
    argument: str = ""
    note: str = ""


class Settings(NamedTuple):
    """Recommended loss-scaling settings, and the measures of a replay with these settings.

    Attributes:
        configuration (Configuration): the settings.
        measures (tuple[Measures, ...]): the measures of the replay of these settings on each trace.
    """

    configuration: Configuration
    measures: tuple[Measures, ...]


def advise(
    run: RecordedRun,
    traces: Sequence[Trace],
    recorded: Sequence[Measures],
    changes: Sequence[Change],
    in_python: bool = False,
) -> tuple[list[Advice], Settings | None]:
    """Return advice for a recorded run, and the settings that follow from the advice.

    Args:
        run (RecordedRun): a run with at least one step and a known loss scale.
        traces (Sequence[Trace]): traces of this run. The first trace has the ceilings to judge by; the other traces
            have ceilings that are assumed in other ways.
        recorded (Sequence[Measures]): the measures of the run itself on each trace.
        changes (Sequence[Change]): its :func:`~mindformers_adaptive.lab.scale_path.changes_of`.
        in_python (bool): whether the training is a Python program without a YAML file. Default: False.

    Returns:
        tuple of the advice (an empty list if the run gives no reason for advice) and the settings (None if no settings
        are known to be better than the run's).
    """
    ways = ways_of(run.files, in_python)
    searches = (_bad_loss, _collapse, _bad_gradients, _scale_of_one, _low_scale, _late_streak)
    elsewhere = [advice for search in searches for advice in search(run, ways)]
    if elsewhere:
        return elsewhere[:1], None
    scale, start_up = run.filled_loss_scale, start_up_of(run)
    start = _lower_start(run, ways, start_up, _TOLERABLE)
    first = float(start[0].figures["scale"] if start else scale[0])
    # A run that records largest gradients uses a rule that follows these gradients. Such a rule has no scale window, so
    # do not recommend settings of the adaptive rule.
    if run.largest_gradient is not None or not 1.0 <= first <= LARGEST_LOSS_SCALE:
        return start, None
    smallest = float(scale[scale >= SMALLEST_LOSS_SCALE].min())
    arguments = {
        "loss_scale_value": first,
        "scale_factor": min(run.scale_factor, 1.0 / SMALLEST_LOSS_SCALE),
        "min_loss_scale": min(1.0, 2.0 ** math.floor(math.log2(smallest))),
    }
    raised_after = [change.clean_steps for change in changes if change.clean_steps is not None]
    if not (start or raised_after):
        return _short_run(run, ways, changes), None
    larger = _accepted(_larger_windows(traces[0], arguments, max(raised_after, default=0)), traces, recorded)
    window = []
    if larger is not None and raised_after and run.position_known.mean() >= DECIDED_FROM:
        window = _larger_window(raised_after, recorded[0], larger, start)
    if window and larger is not None and not start and (lower := _lower_start(run, ways, start_up, 0)):
        from_first, configuration = larger, larger.configuration
        arguments |= {name: configuration.arguments[name] for name in ("min_scale_window", "max_scale_window")}
        arguments |= {"scale_window": configuration.arguments["scale_window"]}
        arguments["loss_scale_value"] = lower[0].figures["scale"]
        larger = _accepted(Configuration("adaptive", **arguments), traces, recorded)
        if larger is None or cost(larger.measures[0]) > cost(from_first.measures[0]):
            larger, start = from_first, [_same_start(first, arguments["loss_scale_value"])]
        else:
            start = lower
    if window or not start:
        return [*start, *window], larger if window else None
    arguments["min_scale_window"] = max(DEFAULT_MIN_SCALE_WINDOW, min(raised_after, default=0))
    arguments["max_scale_window"] = max(DEFAULT_MAX_SCALE_WINDOW, max(raised_after, default=0))
    as_before = _accepted(Configuration("adaptive", **arguments), traces, recorded)
    settings = [each for each in (as_before, larger) if each is not None]
    return start, min(settings, key=lambda each: cost(each.measures[0]), default=None)


def _accepted(
    configuration: Configuration | None, traces: Sequence[Trace], recorded: Sequence[Measures]
) -> Settings | None:
    """Return settings and replay if the replay costs clearly less than the run, else None.

    The log must also show, for most steps of the replay with the settings, whether the step overflows.
    """
    if configuration is None:
        return None
    rules, starts = [configuration.rule] * len(traces), [configuration.start] * len(traces)
    measures = tuple(each for each, _ in replay_side_by_side(rules, starts, traces))
    saved = min(cost(old) - cost(new) for new, old in zip(measures, recorded, strict=True)) * recorded[0].steps / 1000
    is_better = saved > _TOLERABLE and measures[0].known_share >= DECIDED_FROM
    return Settings(configuration, measures) if is_better else None


def _bad_loss(run: RecordedRun, ways: Ways) -> Iterator[Advice]:
    """Advise searching for the faulty layer if the loss was inf or NaN even before the loss scale was applied."""
    if run.loss is not None and np.isinf(run.loss).any():
        why = "This is the loss before scaling: no loss scale can help."
        applied = run.step[np.isinf(run.loss) & run.position_known & ~run.overflow]
        applied = applied[~np.isin(applied, run.dropped_by_norm)]
        if len(applied):
            why += (
                f" {len(applied)} of these steps were not skipped and changed the weights: go back to a checkpoint "
                f"before step {applied[0]}. {AGAINST_BAD_LOSS}"
            )
        yield _to_the_layer(run, ways, "loss", run.loss, np.isinf(run.loss), why)


def _bad_gradients(run: RecordedRun, ways: Ways) -> Iterator[Advice]:
    """Advise searching for the faulty layer if gradients were inf or NaN in applied steps, or at a loss scale of 1."""
    if run.gradient_norm is None:
        return
    bad = np.isinf(run.gradient_norm)
    bad_and_applied = bad & run.position_known & ~run.overflow & ~np.isin(run.step, run.dropped_by_norm)
    if _is_always_one(run) and (bad & ~bad_and_applied).any():
        yield _to_the_layer(
            run, ways, "gradients", run.gradient_norm, bad, "The loss scale was 1: no loss scale can help."
        )
    elif bad_and_applied.any():
        why = "These steps were not skipped, so the weights may be inf or NaN since then."
        yield _to_the_layer(run, ways, "gradients", run.gradient_norm, bad_and_applied, why)


def _to_the_layer(
    run: RecordedRun, ways: Ways, what: str, values: NDArray[np.float64], bad: NDArray[np.bool_], why: str
) -> Advice:
    """Return the advice to search for the layer that makes the loss or the gradients inf or NaN in some steps."""
    steps, first = int(bad.sum()), int(run.step[np.argmax(bad)])
    known = counted(int(np.count_nonzero(~np.isnan(values))), "step")
    said = "loss" if what == "loss" else "norm of the gradients"
    return Advice(
        f"bad {what}",
        f"Find the layer that makes the {what} inf or NaN, and a remedy:\n{ways.why}",
        f"The {said} was inf or NaN in {steps} of the {known} for which the log states it, first in "
        f"step {first}. {why}",
        {"steps": steps, "first_step": first},
    )


def _collapse(run: RecordedRun, ways: Ways) -> Iterator[Advice]:
    """Advise checking the model if many consecutive overflows show that no loss scale helps."""
    positions = np.flatnonzero(run.position_known)
    step, scale = run.step[positions], run.loss_scale[positions]
    for first, last in consecutive_runs(np.flatnonzero(run.overflow[positions])).tolist():
        length = last - first + 1
        stays = bool((scale[last - _COLLAPSE_AT_ONE_SCALE + 1 : last + 1] == scale[last]).all())
        if length < _COLLAPSE and not (length >= _COLLAPSE_AT_ONE_SCALE and stays):
            continue
        in_a_row = step[last] - step[first] == last - first
        held = "min_loss_scale" if run.largest_gradient is not None else "min_loss_scale, hysteresis"
        lower = f"Lower {held} or a fixed scale first. " if stays and scale[last] > 1 else ""
        yield Advice(
            "collapse",
            lower + _look_at_the_model(ways),
            (f"{counted(length, 'step')} in a row" if in_a_row else f"All {length} steps that the log shows")
            + f" were skipped, from step {step[first]} to {step[last]}"
            + (f", the last of them at {as_power_of_two(float(scale[last]))}" if stays and in_a_row else "")
            + (". A lower scale may fit." if lower else ". No loss scale helps there."),
            {"steps": length, "first_step": int(step[first]), "last_step": int(step[last])},
        )
        return


def _look_at_the_model(ways: Ways) -> str:
    return (
        "Look at the model and the data: learning rate, warm-up, gradient clipping, float32 for softmax and "
        "normalization, NaN or inf in data and weights. Find the layer and a remedy:\n"
        f"{ways.why}"
    )


def _scale_of_one(run: RecordedRun, ways: Ways) -> Iterator[Advice]:
    """If the loss scale was always 1, advise checking the model after many overflows, else ask if it is in BF16."""
    if not _is_always_one(run):
        return
    skipped = run.skipped_bounds()[0]
    if skipped >= _COLLAPSE_AT_ONE_SCALE:
        reason = f"At least {counted(skipped, 'step')} overflowed at a loss scale of 1. No loss scale helps there."
        yield Advice("collapse", _look_at_the_model(ways), reason, {"steps": skipped})
    else:
        yield Advice(
            "scale of 1",
            "Is this a run in BF16? Then there is nothing to change: BF16 needs no loss scaling. If it is in FP16, "
            f"find a loss scale to start from: {ways.find}",
            "The loss scale was 1 in every step.",
            {"steps": len(run)},
        )


def _low_scale(run: RecordedRun, ways: Ways) -> Iterator[Advice]:
    """Advise searching for the cause if the scale fell to an unusually low one. A lower start would only hide it."""
    if low_scale_of(run):
        change = f"Find the layer whose values or gradients are large, and a remedy:\n{ways.why}"
        yield Advice("low scale", change, "A lower start would skip fewer steps, but the cause would remain.")


def _late_streak(run: RecordedRun, ways: Ways) -> Iterator[Advice]:
    """Advise looking at the model if overflows in a row, after a scale had held, left a much worse loss or norm."""
    applied = run.position_known & ~run.overflow
    for first, last in consecutive_runs(np.flatnonzero(run.overflow & run.position_known)).tolist():
        before, after = slice(max(first - HELD, 0), first), slice(last + 1, last + 1 + HELD)
        if last - first + 1 < _LATE_STREAK or first < HELD or not applied[before].all() or not applied[after].any():
            continue
        changes = []
        for name, values in (("loss", run.loss), ("gradient norm", run.gradient_norm)):
            if values is None or not (np.isfinite(values[before]).any() and np.isfinite(values[after]).any()):
                continue
            old, new = (float(np.median(part[np.isfinite(part)])) for part in (values[before], values[after]))
            if new >= _MUCH_WORSE * old > 0:
                changes.append(f"the {name} rose from {old:.3g} to {new:.3g}")
        if changes:
            steps = {"steps": last - first + 1, "first_step": int(run.step[first]), "last_step": int(run.step[last])}
            yield Advice(
                "late streak",
                _look_at_the_model(ways),
                f"After {HELD} or more steps without overflow, {steps['steps']} steps in a row were skipped, from step "
                f"{steps['first_step']} to {steps['last_step']}. Over these steps {' and '.join(changes)}. A loss "
                "scale does not cause that: look at the updates and the data before these steps.",
                steps,
            )
            return


def _is_always_one(run: RecordedRun) -> bool:
    return bool((run.filled_loss_scale == 1.0).all())


def _short_run(run: RecordedRun, ways: Ways, changes: Sequence[Change]) -> list[Advice]:
    """Return advice if the run is shorter than the scale window, so that the loss scale can never rise."""
    steps, window = int(run.step[-1]), math.inf if run.scale_window is None else float(np.nanmin(run.scale_window))
    if run.step[0] != 1 or not steps < window < math.inf or any(change.kind == "raise" for change in changes):
        return []
    change = f"Find a loss scale to start from: {ways.find}"
    reason = f"The run ({steps} steps) is shorter than the window ({window:g} steps): the scale can never rise."
    return [Advice("short run", change, reason, {"steps": steps, "window": int(window)})]


def _lower_start(run: RecordedRun, ways: Ways, start_up: StartUp, tolerable: float) -> list[Advice]:
    """Return advice to start at a lower, safe loss scale, if more than ``tolerable`` first steps were skipped."""
    first = float(run.filled_loss_scale[0])
    # A loss scale that is not a power of two would round FP16 gradients.
    better = 0.0 if start_up.scale is None else _power_of_two_up_to(start_up.scale)
    is_lower = better <= first if math.isnan(run.loss_scale[0]) else better < first
    if not (better >= SMALLEST_LOSS_SCALE and is_lower) or start_up.fewest <= tolerable:
        return []
    at_least = "" if start_up.fewest == start_up.most else "At least "
    start = " to ".join(as_power_of_two(scale) for scale in sorted(set(run.first_loss_scales() or ())))
    instead = f" instead of {start}" if start else ""
    resumed = ""
    if run.step[0] > 1:
        resumed = f" The log begins at step {run.step[0]}: if the run was resumed there, resume its loss scale too."
    return [
        Advice(
            "start lower",
            f"Start at {as_power_of_two(better)} ({ways.sets.format('loss_scale_value', f'{better:.15g}')}){instead}.",
            f"{at_least}{counted(start_up.fewest, 'step')} {'was' if start_up.fewest == 1 else 'were'} skipped before "
            f"a scale held. {as_power_of_two(better)} is the "
            f"highest power of two that held below every scale that had overflowed, from step {start_up.first_step} on."
            f"{resumed}",
            {
                "scale": better,
                "reached_at": start_up.first_step,
                "saves_skipped_steps": start_up.fewest,
                "saves_at_most": start_up.most,
            },
            "loss_scale_value",
            f"was {start}; " * bool(start) + f"{as_power_of_two(better)} is the highest that held",
        )
    ]


def _same_start(first: float, lower: float) -> Advice:
    """Return advice to keep a start that overflowed, because the replay from a lower start costs more."""
    same, low = as_power_of_two(first), as_power_of_two(lower)
    reason = f"{same} overflowed in the first steps, but the replay from {low} costs more."
    return Advice("start", f"Start at {same} as before.", reason, {"scale": first}, "loss_scale_value", reason)


def _power_of_two_up_to(scale: float) -> float:
    """Round a loss scale down to a power of two, allowing for rounding in logs, which print only eight digits."""
    return 2.0 ** math.floor(math.log2(scale * (1 + 1e-6))) if 0 < scale < math.inf else scale


def _larger_windows(trace: Trace, arguments: dict[str, Any], largest: int) -> Configuration | None:
    """Return the cheapest settings whose scale windows exceed ``largest``; None if the log is not enough to judge any.

    The log must show, for most steps of a replay with the settings, whether the step overflows.
    """
    tried = [window for window in AdaptiveRule.tried["min_scale_window"] if window > largest]
    if not tried:
        return None
    # Sort the scale windows by distance from the default window. If several settings cost the same, min() takes the
    # first of them, which is the nearest to the default.
    ordered = [
        sorted(tried, key=lambda window: abs(math.log(window / default)))
        for default in (DEFAULT_MAX_SCALE_WINDOW, DEFAULT_MIN_SCALE_WINDOW)
    ]
    fixed = {name: [value] for name, value in arguments.items()}
    configurations = grid("adaptive", **fixed, max_scale_window=ordered[0], min_scale_window=ordered[1])
    swept = zip(configurations, sweep(configurations, trace.last(MOST_STEPS_SWEPT)).measures, strict=True)
    costs = [(cost(measures), each) for each, measures in swept if measures.known_share >= DECIDED_FROM]
    return min(costs, key=lambda row: row[0], default=(0.0, None))[1]


def _larger_window(
    raised_after: Sequence[int], recorded: Measures, settings: Settings, start: Sequence[Advice]
) -> list[Advice]:
    """Return advice to use larger scale windows if they save skipped steps, and not at the cost of steps too low."""
    rule, after = settings.configuration.rule, settings.measures[0]
    # Do not count the steps skipped at the start of the run: the advice to start lower already avoids these skips.
    before = recorded.skipped - sum(advice.figures["saves_skipped_steps"] for advice in start)
    if before - after.skipped <= max(_TOLERABLE, after.too_low - recorded.too_low):
        return []
    used, better = (
        f"{low} steps" if low == high else f"{low} to {high} steps"
        for low, high in ((min(raised_after), max(raised_after)), (rule.min_scale_window, rule.max_scale_window))
    )
    bits = after.headroom_lost - recorded.headroom_lost
    lower = f", with the scale {bits:.1f} bits lower on average" if bits >= 0.05 else ""
    figures = {"largest_window": max(raised_after), "skipped": before, "skipped_instead": after.skipped}
    return [
        Advice(
            "larger window",
            f"Use windows of {better}.",
            f"With windows of {used}, {counted(before, 'step')} were skipped{' after the start' * bool(start)}. "
            f"Windows of {better} would have skipped {after.skipped}{lower}.",
            {**figures, "saves": before - after.skipped},
            "min_scale_window",
            f"windows of {used} cost {counted(before, 'skipped step')}",
        )
    ]
