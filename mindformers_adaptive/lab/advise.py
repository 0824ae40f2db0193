"""Advice after a recorded run: a loss scale to start from, scale windows to use, or a cause outside loss scaling.

Settings are recommended only if the log decides for at least 90 % of the replayed steps whether they are skipped. The
replay must also save more than two skipped steps, whatever is assumed about the other steps. A step whose scale is more
than 16 bits below the ceiling counts as a skipped one, see :func:`~mindformers_adaptive.lab.measures.cost`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mindformers_adaptive.lab.configuration import Configuration, grid
from mindformers_adaptive.lab.facts import StartUp, start_up_of
from mindformers_adaptive.lab.measures import LARGEST_LOSS_SCALE, SMALLEST_LOSS_SCALE, Measures, cost
from mindformers_adaptive.lab.other_cause import Advice, other_cause
from mindformers_adaptive.lab.replay import replay_side_by_side, sweep
from mindformers_adaptive.lab.scale_path import Change
from mindformers_adaptive.lab.tuning import part_to_sweep
from mindformers_adaptive.record.run import RecordedRun
from mindformers_adaptive.record.run_folder import Ways, ways_of
from mindformers_adaptive.record.thresholds import DECIDED_FROM, HELD, TOLERABLE
from mindformers_adaptive.record.trace import Trace
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.rules.ladder import DEFAULT_MAX_SCALE_WINDOW, DEFAULT_MIN_SCALE_WINDOW
from mindformers_adaptive.text.table import as_power_of_two, counted

__all__ = ["Settings", "advise"]


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
    if (cause := other_cause(run, in_python)) is not None:
        return [cause], None
    scale, start_up = run.filled_loss_scale, start_up_of(run)
    start = _lower_start(run, ways, start_up, TOLERABLE)
    first = float(start[0].figures["scale"] if start else scale[0])
    # A run that records largest gradients uses a rule that follows these gradients. Such a rule has no scale window, so
    # do not recommend settings of the adaptive rule.
    if run.column("largest_gradient") is not None or not 1.0 <= first <= LARGEST_LOSS_SCALE:
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
    is_better = saved > TOLERABLE and measures[0].known_share >= DECIDED_FROM
    return Settings(configuration, measures) if is_better else None


def _short_run(run: RecordedRun, ways: Ways, changes: Sequence[Change]) -> list[Advice]:
    """Return advice if the run is shorter than the scale window, so that the loss scale can never rise."""
    steps, windows = int(run.step[-1]), run.column("scale_window")
    window = math.inf if windows is None else float(np.nanmin(windows))
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
    reason, note = _why_it_held(run, start_up, better)
    return [
        Advice(
            "start lower",
            f"Start at {as_power_of_two(better)} ({ways.sets.format('loss_scale_value', f'{better:.15g}')}){instead}.",
            f"{at_least}{counted(start_up.fewest, 'step')} {'was' if start_up.fewest == 1 else 'were'} skipped before "
            f"a scale held, that is, had {HELD} steps in a row without overflow. {reason}{resumed}",
            {
                "scale": better,
                "reached_at": start_up.first_step,
                "saves_skipped_steps": start_up.fewest,
                "saves_at_most": start_up.most,
            },
            "loss_scale_value",
            f"was {start}; " * bool(start) + note,
        )
    ]


def _why_it_held(run: RecordedRun, start_up: StartUp, better: float) -> tuple[str, str]:
    """Return a reason to start at the scale ``better``, and a note for YAML. Both say which higher scales are left out.

    A higher scale is left out if it, or a scale below it, overflowed before it held, or if it did not hold long enough.
    """
    held, best = float(start_up.scale or better), as_power_of_two(better)
    reason = f"{as_power_of_two(held)} is the highest scale that held before it or a lower one overflowed, from step "
    reason += f"{start_up.first_step} on."
    note = f"{best} is the highest that held {HELD} steps"
    highest = float(np.max(run.filled_loss_scale, initial=0.0, where=run.position_known & ~run.overflow))
    if as_power_of_two(held) != best:
        reason, note = f"{reason} {best} is the power of two below it.", f"{as_power_of_two(held)} held {HELD} steps"
    elif start_up.highest is not None and start_up.highest > held:
        reason += f" Scales up to {as_power_of_two(start_up.highest)} held later, after they or lower ones overflowed."
        note = f"{best} held {HELD} steps, and higher ones overflowed first"
    elif highest > held:
        reason += f" Scales up to {as_power_of_two(highest)} had fewer steps in a row."
    return reason, note


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
    swept = zip(configurations, sweep(configurations, part_to_sweep(trace)).measures, strict=True)
    costs = [(cost(measures), each) for each, measures in swept if measures.known_share >= DECIDED_FROM]
    return min(costs, key=lambda row: row[0], default=(0.0, None))[1]


def _larger_window(
    raised_after: Sequence[int], recorded: Measures, settings: Settings, start: Sequence[Advice]
) -> list[Advice]:
    """Return advice to use larger scale windows if they save skipped steps, and not at the cost of steps too low."""
    rule, after = settings.configuration.rule, settings.measures[0]
    # Do not count the steps skipped at the start of the run: the advice to start lower already avoids these skips.
    before = recorded.skipped - sum(advice.figures["saves_skipped_steps"] for advice in start)
    if before - after.skipped <= max(TOLERABLE, after.too_low - recorded.too_low):
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
