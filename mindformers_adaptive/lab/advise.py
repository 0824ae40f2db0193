"""What to change after a recorded run: where to start, which windows to use, or to look elsewhere.

Settings are recommended only where the log decides at least 90 % of the steps of their replay, and where that replay
saves more than two skipped steps, whatever is assumed of the other steps. Costs are counted in skipped steps; 1000
steps that lose a bit of headroom count as one, see :func:`~mindformers_adaptive.lab.measures.cost`.
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
from mindformers_adaptive.lab.measures import (
    DEFAULT_EXCHANGE_RATE,
    LARGEST_LOSS_SCALE,
    SMALLEST_LOSS_SCALE,
    Measures,
    cost,
)
from mindformers_adaptive.lab.replay import replay_side_by_side, sweep
from mindformers_adaptive.lab.scale_path import Change
from mindformers_adaptive.lab.tuning import DECIDED_FROM, MOST_STEPS_SWEPT
from mindformers_adaptive.record.run import RecordedRun, forward_fill
from mindformers_adaptive.record.run_folder import run_folder_of, why_command
from mindformers_adaptive.record.trace import Trace, consecutive_runs
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.rules.ladder import DEFAULT_MAX_SCALE_WINDOW, DEFAULT_MIN_SCALE_WINDOW
from mindformers_adaptive.text.table import as_power_of_two, counted

__all__ = ["Advice", "Settings", "advise"]

# A change has to save more skipped steps than this; Megatron-LM and others tolerate two anyway.
_TOLERABLE = 2.0

# LossScaleMonitor's default for consecutive overflows. At one and the same scale fewer prove it.
_COLLAPSE, _COLLAPSE_AT_ONE_SCALE = 50, 10


@dataclass(frozen=True)
class Advice:
    """Something to change.

    Attributes:
        rule (str): "start lower", "larger window", "short run", or where the loss scaling is not the cause, "bad loss",
            "bad gradients", "collapse" or "scale of 1".
        change (str): what to change.
        reason (str): why, with figures.
        figures (dict): the figures by name, ready for JSON.
        argument (str): the argument of the cell that makes the change; "" if there is none.
        note (str): the reason in a few words, for a comment behind that argument.
    """

    rule: str
    change: str
    reason: str
    figures: dict[str, Any] = field(default_factory=dict)
    argument: str = ""
    note: str = ""


class Settings(NamedTuple):
    """Settings that the advice leads to.

    Attributes:
        configuration (Configuration): the settings.
        measures (tuple[Measures, ...]): of their replay, on each trace.
    """

    configuration: Configuration
    measures: tuple[Measures, ...]


def advise(
    run: RecordedRun, traces: Sequence[Trace], recorded: Sequence[Measures], changes: Sequence[Change]
) -> tuple[list[Advice], Settings | None]:
    """Return what to change, and the settings that follow from it.

    Args:
        run (RecordedRun): at least one step, and a known loss scale.
        traces (Sequence[Trace]): of this run, the first with the ceilings to judge by, the others with ceilings
            assumed in other ways.
        recorded (Sequence[Measures]): what the run itself did on each trace.
        changes (Sequence[Change]): its :func:`~mindformers_adaptive.lab.scale_path.changes_of`.

    Returns:
        tuple of the advice, empty where the run gives no reason for any, and the settings; None where none are known
        to be better.
    """
    elsewhere = [*_bad_loss(run), *_collapse(run), *_bad_gradients(run), *_scale_of_one(run)]
    if elsewhere:
        return elsewhere[:1], None
    scale, start_up = forward_fill(run.loss_scale), start_up_of(run)
    start = _lower_start(run, start_up)
    first = float(start[0].figures["scale"] if start else scale[0])
    # A rule that follows the gradients has neither window nor settings of the adaptive cell.
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
        return _short_run(run, changes), None
    larger = _accepted(_larger_windows(traces[0], arguments, max(raised_after, default=0)), traces, recorded)
    window = []
    if larger is not None and raised_after and run.position_known.mean() >= DECIDED_FROM:
        window = _larger_window(raised_after, recorded[0], larger, start)
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
    """Return settings if the log decides most of their steps and they save enough on every trace."""
    if configuration is None:
        return None
    rules, starts = [configuration.rule] * len(traces), [configuration.start] * len(traces)
    measures = tuple(each for each, _ in replay_side_by_side(rules, starts, traces))
    saved = min(cost(old) - cost(new) for new, old in zip(measures, recorded, strict=True)) * recorded[0].steps / 1000
    is_better = saved > _TOLERABLE and measures[0].known_share >= DECIDED_FROM
    return Settings(configuration, measures) if is_better else None


def _bad_loss(run: RecordedRun) -> Iterator[Advice]:
    """Advise to look for the layer, where the loss itself is inf or NaN, whatever it is multiplied by."""
    if run.loss is not None and np.isinf(run.loss).any():
        why = "This is the loss before scaling: no loss scale can help."
        yield _to_the_layer(run, "loss", run.loss, np.isinf(run.loss), why)


def _bad_gradients(run: RecordedRun) -> Iterator[Advice]:
    """Advise to look for the layer, where gradients were inf or NaN in applied steps, or at a scale of 1 throughout."""
    if run.gradient_norm is None:
        return
    bad = np.isinf(run.gradient_norm)
    bad_and_applied = bad & run.position_known & ~run.overflow & ~np.isin(run.step, run.dropped_by_norm)
    if _is_always_one(run) and (bad & ~bad_and_applied).any():
        yield _to_the_layer(run, "gradients", run.gradient_norm, bad, "The loss scale was 1: no loss scale can help.")
    elif bad_and_applied.any():
        why = "These steps were not skipped, so the weights may be inf or NaN since then."
        yield _to_the_layer(run, "gradients", run.gradient_norm, bad_and_applied, why)


def _to_the_layer(run: RecordedRun, what: str, values: NDArray[np.float64], bad: NDArray[np.bool_], why: str) -> Advice:
    """Return the advice to look for the layer that makes the loss or the gradients inf or NaN in some steps."""
    steps, first = int(bad.sum()), int(run.step[np.argmax(bad)])
    known = counted(int(np.count_nonzero(~np.isnan(values))), "step")
    said = "loss" if what == "loss" else "norm of the gradients"
    return Advice(
        f"bad {what}",
        f"Find the layer that makes the {what} inf or NaN, and a remedy:\n{why_command(run_folder_of(*run.files))}",
        f"The {said} was inf or NaN in {steps} of {known}, first in step {first}. {why}",
        {"steps": steps, "first_step": first},
    )


def _collapse(run: RecordedRun) -> Iterator[Advice]:
    """Advise to look at the model, where consecutive overflows show that no scale helps."""
    positions = np.flatnonzero(run.position_known)
    step, scale = run.step[positions], run.loss_scale[positions]
    for first, last in consecutive_runs(np.flatnonzero(run.overflow[positions])).tolist():
        length = last - first + 1
        stays = bool((scale[last - _COLLAPSE_AT_ONE_SCALE + 1 : last + 1] == scale[last]).all())
        if length < _COLLAPSE and not (length >= _COLLAPSE_AT_ONE_SCALE and stays):
            continue
        in_a_row = step[last] - step[first] == last - first
        lower = "Lower min_loss_scale, hysteresis or a fixed scale first. " if stays and scale[last] > 1 else ""
        yield Advice(
            "collapse",
            lower + _look_at_the_model(run),
            (f"{length} steps in a row" if in_a_row else f"All {length} steps that the log shows")
            + f" were skipped, from step {step[first]} to {step[last]}"
            + (f", the last of them at {as_power_of_two(float(scale[last]))}" if stays and in_a_row else "")
            + (". A lower scale may fit." if lower else ". No loss scale helps there."),
            {"steps": length, "first_step": int(step[first]), "last_step": int(step[last])},
        )
        return


def _look_at_the_model(run: RecordedRun) -> str:
    return (
        "Look at the model and the data: learning rate, warm-up, gradient clipping, float32 for softmax and "
        "normalization, NaN or inf in data and weights. Find the layer and a remedy:\n"
        f"{why_command(run_folder_of(*run.files))}"
    )


def _scale_of_one(run: RecordedRun) -> Iterator[Advice]:
    """Advise to look at the model where steps overflow at a scale of 1; otherwise ask whether the run is in BF16."""
    if not _is_always_one(run):
        return
    skipped = run.skipped_bounds()[0]
    if skipped >= _COLLAPSE_AT_ONE_SCALE:
        reason = f"At least {counted(skipped, 'step')} overflowed at a loss scale of 1. No loss scale helps there."
        yield Advice("collapse", _look_at_the_model(run), reason, {"steps": skipped})
    else:
        yield Advice(
            "scale of 1",
            "Is this a run in BF16? Then there is nothing to change: BF16 needs no loss scaling. If it is in FP16, let "
            "'find' name a loss scale to start from: adaptive-loss-scale find --config FILE",
            "The loss scale was 1 in every step.",
            {"steps": len(run)},
        )


def _is_always_one(run: RecordedRun) -> bool:
    return bool((forward_fill(run.loss_scale) == 1.0).all())


def _short_run(run: RecordedRun, changes: Sequence[Change]) -> list[Advice]:
    """The advice for a run that is shorter than its window, in which the scale cannot rise."""
    steps, window = int(run.step[-1]), math.inf if run.scale_window is None else float(np.nanmin(run.scale_window))
    if run.step[0] != 1 or not steps < window < math.inf or any(change.kind == "raise" for change in changes):
        return []
    change = "Start from the scale that 'find' recommends: adaptive-loss-scale find --config FILE"
    reason = f"The run ({steps} steps) is shorter than the window ({window:g} steps): the scale can never rise."
    return [Advice("short run", change, reason, {"steps": steps, "window": int(window)})]


def _lower_start(run: RecordedRun, start_up: StartUp) -> list[Advice]:
    """The advice to start from the highest scale that held, where more than two steps were skipped before."""
    first = float(forward_fill(run.loss_scale)[0])
    # In FP16, a scale that is no power of two rounds the gradients.
    better = 0.0 if start_up.scale is None else _power_of_two_up_to(start_up.scale)
    if not SMALLEST_LOSS_SCALE <= better < first or start_up.fewest <= _TOLERABLE:
        return []
    at_least = "" if start_up.fewest == start_up.most else "At least "
    instead = "" if math.isnan(run.loss_scale[0]) else f" instead of {as_power_of_two(first)}"
    resumed = ""
    if run.step[0] > 1:
        resumed = f" The log begins at step {run.step[0]}: if the run was resumed there, resume its loss scale too."
    return [
        Advice(
            "start lower",
            f"Start at {as_power_of_two(better)} (loss_scale_value: {better:.15g}){instead}.",
            f"{at_least}{start_up.fewest} steps were skipped before a scale held. {as_power_of_two(better)} is the "
            f"highest power of two that held, from step {start_up.first_step} on.{resumed}",
            {
                "scale": better,
                "reached_at": start_up.first_step,
                "saves_skipped_steps": start_up.fewest,
                "saves_at_most": start_up.most,
            },
            "loss_scale_value",
            f"was {as_power_of_two(first)}; {as_power_of_two(better)} is the highest that held",
        )
    ]


def _power_of_two_up_to(scale: float) -> float:
    """Return the largest power of two that is not above a scale; logs print eight digits of one."""
    return 2.0 ** math.floor(math.log2(scale * (1 + 1e-6))) if 0 < scale < math.inf else scale


def _larger_windows(trace: Trace, arguments: dict[str, Any], largest: int) -> Configuration | None:
    """Return the settings that cost least of those that the log decides, with windows above the largest of the run."""
    tried = [window for window in AdaptiveRule.tried["min_scale_window"] if window > largest]
    if not tried:
        return None
    # Of settings that cost the same, those nearest to the defaults come first.
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
    """The advice for larger windows, where they save more skipped steps than usual settings pay, see cost()."""
    rule, after = settings.configuration.rule, settings.measures[0]
    # A lower start alone saves the steps of the start-up.
    before = recorded.skipped - sum(advice.figures["saves_skipped_steps"] for advice in start)
    if before - after.skipped <= max(_TOLERABLE, DEFAULT_EXCHANGE_RATE / 1000 * recorded.steps):
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
