"""Causes outside loss scaling that the log of a run shows, such as a NaN loss, and the advice for each of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.record.run import RecordedRun
from mindformers_adaptive.record.run_folder import Ways, ways_of
from mindformers_adaptive.record.symptoms import AGAINST_BAD_LOSS, low_scale_of
from mindformers_adaptive.record.thresholds import HELD
from mindformers_adaptive.record.trace import consecutive_runs
from mindformers_adaptive.text.table import as_power_of_two, counted

__all__ = ["Advice", "other_cause"]

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


def other_cause(run: RecordedRun, in_python: bool = False) -> Advice | None:
    """Return the advice for a run whose problem is not its loss scaling; None if the loss scaling may be the cause.

    Args:
        run (RecordedRun): a run with at least one step.
        in_python (bool): whether to give advice as Python instead of YAML. Default: False.
    """
    ways = ways_of(run.files, in_python)
    for causes in (_bad_loss, _collapse, _bad_gradients, _scale_of_one, _low_scale, _late_streak):
        for advice in causes(run, ways):
            return advice
    return None


def _bad_loss(run: RecordedRun, ways: Ways) -> Iterator[Advice]:
    """Advise searching for the faulty layer if the loss was inf or NaN even before the loss scale was applied."""
    loss = run.column("loss")
    if loss is not None and (bad := np.isinf(loss)).any():
        why = "This is the loss before scaling: no loss scale can help."
        applied = run.step[bad & run.position_known & ~run.overflow]
        applied = applied[~np.isin(applied, run.steps_where("dropped_by_norm"))]
        if len(applied):
            why += (
                f" {len(applied)} of these steps were not skipped and changed the weights: go back to a checkpoint "
                f"before step {applied[0]}. {AGAINST_BAD_LOSS}"
            )
        yield _to_the_layer(run, ways, "loss", loss, bad, why)


def _bad_gradients(run: RecordedRun, ways: Ways) -> Iterator[Advice]:
    """Advise searching for the faulty layer if gradients were inf or NaN in applied steps, or at a loss scale of 1."""
    if (norm := run.column("gradient_norm")) is None:
        return
    bad, dropped = np.isinf(norm), np.isin(run.step, run.steps_where("dropped_by_norm"))
    bad_and_applied = bad & run.position_known & ~run.overflow & ~dropped
    if _is_always_one(run) and (bad & ~bad_and_applied).any():
        yield _to_the_layer(run, ways, "gradients", norm, bad, "The loss scale was 1: no loss scale can help.")
    elif bad_and_applied.any():
        why = "These steps were not skipped, so the weights may be inf or NaN since then."
        yield _to_the_layer(run, ways, "gradients", norm, bad_and_applied, why)


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
        held = "min_loss_scale" if run.column("largest_gradient") is not None else "min_loss_scale, hysteresis"
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
        for name, values in (("loss", run.column("loss")), ("gradient norm", run.column("gradient_norm"))):
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
