"""Advice after a recorded run: a cause outside loss scaling, a state to resume, a start, or another rule.

Each piece of advice rests on what the log states, and nothing is replayed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mindformers_adaptive.lab.measures import LARGEST_LOSS_SCALE, SMALLEST_LOSS_SCALE
from mindformers_adaptive.record.diagnosis import diagnose
from mindformers_adaptive.record.run import RecordedRun
from mindformers_adaptive.record.run_folder import Ways, ways_of
from mindformers_adaptive.record.scale_summary import Held, ScaleSummary
from mindformers_adaptive.record.symptom import Finding
from mindformers_adaptive.record.thresholds import HELD, STUCK, TOLERABLE
from mindformers_adaptive.text.table import as_power_of_two, counted

# Steps are skipped again and again if after the start more than this share of them was skipped, in at least so many
# places. Dynamic scaling with a window of 1000 skips about 1 of 1000 steps wherever the ceiling stays where it is.
_AGAIN_SHARE, _AGAIN_PLACES = 2 / 1000, 3

# A restart has lost the loss scale if the scale is more than this many times as large as before it.
_LOST = 4.0


@dataclass(frozen=True)
class Advice:
    """One piece of advice: what to change after a run, and why.

    Attributes:
        rule (str): the kind of advice: "start lower", "take guided" or "restart"; or, if the loss scaling
            is not the cause, a kind of :class:`~mindformers_adaptive.record.symptom.Finding` or "scale of 1".
        change (str): what to change.
        reason (str): why to change it, with figures.
        figures (dict): the figures of the reason by name, ready for JSON.
    """

    rule: str
    change: str
    reason: str
    figures: dict[str, Any] = field(default_factory=dict)


def other_cause(run: RecordedRun) -> Advice | None:
    """Return the advice for a run whose problem is not its loss scaling; None if the loss scaling may be the cause.

    Args:
        run (RecordedRun): a run with at least one step.
    """
    return cause_in(run, diagnose(run.seen_steps), ways_of(run.files, in_python=False))


def cause_in(run: RecordedRun, findings: Sequence[Finding], ways: Ways) -> Advice | None:
    """Return the advice of :func:`other_cause`.

    Args:
        run (RecordedRun): a run with at least one step.
        findings (Sequence[Finding]): what is wrong in the steps of the run, the likeliest cause first.
        ways (Ways): the next steps.
    """
    to_the_layer = f"Find the layer and a remedy:\n{ways.why}"
    for finding in findings:
        # A loss that jumped and fell back does not keep the loss scaling from being the cause.
        if not (finding.kind == "loss jump" and finding.is_over):
            return Advice(finding.kind, f"{finding.remedy} {to_the_layer}", finding.text, finding.figures)
    if not len(run.stated_scales) or not (run.stated_scales == 1.0).all():
        return None
    skipped = run.skipped_bounds[0]
    if skipped >= STUCK:
        reason = f"At least {counted(skipped, 'step')} overflowed, and each line of the log has a loss scale of 1."
        return Advice("collapse", to_the_layer, reason, {"steps": skipped})
    return Advice(
        "scale of 1",
        "Is this a run in BF16? Then there is nothing to change: BF16 needs no loss scaling. If it is in FP16, "
        f"find a loss scale to start from: {ways.find}",
        "The loss scale was 1 on each line of the log.",
        {"steps": len(run)},
    )


def signs_of(findings: Sequence[Finding]) -> list[str]:
    """Return the sentences on what else was found in a run, beside the likeliest cause, which is an advice.

    Args:
        findings (Sequence[Finding]): as for :func:`cause_in`.
    """
    # The facts of a run have the number of bad losses already, and the collapse.
    later = (each for each in findings[1:] if each.kind not in ("bad loss", "collapse"))
    jumps = (each for each in findings[:1] if each.kind == "loss jump" and each.is_over)
    return [f"{each.text} {each.remedy}" for each in (*jumps, *later)]


def advise(
    run: RecordedRun, summary: ScaleSummary, cause: Advice | None, ways: Ways
) -> tuple[list[Advice], float | None]:
    """Return advice for a recorded run, and the loss scale at which the guided rule should start.

    Args:
        run (RecordedRun): a run with at least one step and a stated loss scale.
        summary (ScaleSummary): where its loss scale went.
        cause (Advice, optional): the advice if something other than the loss scaling is the cause.
        ways (Ways): the next steps, for a YAML file or a Python program.

    Returns:
        tuple of the advice (an empty list if the run gives no reason for advice) and the loss scale (None if
        the rule need not change).
    """
    if lost := _lost_state(run):
        return [lost], None
    if cause is not None:
        return [cause], None
    start = summary.held
    advice = _lower_start(run, ways, start)
    if (again := _skips_again(run, start)) is None:
        return advice, None
    scale = advice[0].figures["scale"] if advice else (summary.settled or (start.scale or start.highest or 0.0,))[0]
    scale = _power_of_two_up_to(scale)
    return [*advice, again], scale if 1.0 <= scale <= LARGEST_LOSS_SCALE else None


def _lost_state(run: RecordedRun) -> Advice | None:
    """Advise resuming the state of the loss scale if a restart lost it: the scale jumps up, and steps are skipped."""
    scales = np.where(np.isnan(run.used), run.after, run.used)
    # The lowest scale that the log states of the stretch before; after a restart, of the last one that states any.
    before = np.append(run.start, np.fmin(run.used, run.after)[:-1])
    known = np.flatnonzero(~np.isnan(before))
    if not len(known):
        return None
    last = before[known[np.maximum(np.searchsorted(known, np.arange(len(before)), side="right") - 1, 0)]]
    last = np.where(np.asarray(run.restarted), last, before)
    is_single = (run.lengths == 1) & run.follows
    jumps = (scales > _LOST * last) & (last > 0) & (is_single | np.asarray(run.restarted)) & run.skipped
    for index in np.flatnonzero(jumps).tolist():
        applied = np.flatnonzero(~run.skipped[index:])
        end = index + int(applied[0]) if len(applied) else len(run.first)
        skipped = int(run.lengths[index:end].sum())
        if skipped <= TOLERABLE:
            continue
        step, scale = int(run.first[index]), as_power_of_two(float(last[index]))
        restarted = "The run was restarted there" if np.asarray(run.restarted)[index] else "So it is after a restart"
        return Advice(
            "restart",
            f"Resume the state of the loss scale with the training, so that it goes on at {scale}: see resuming.md "
            "(docs/en/resuming.md).",
            f"The loss scale was {scale} before step {step}, and at least {as_power_of_two(float(scales[index]))} in "
            f"it. {skipped} steps were skipped until the scale was down again. {restarted} without the state of the "
            "loss scale.",
            {"step": step, "scale": float(last[index]), "skipped": skipped},
        )
    return None


def _lower_start(run: RecordedRun, ways: Ways, start_up: Held) -> list[Advice]:
    """Return advice to start at the scale that held, if more than two steps were skipped before."""
    fewest, most = start_up.shown_before
    # A loss scale that is not a power of two would round FP16 gradients.
    better = 0.0 if start_up.scale is None else _power_of_two_up_to(start_up.scale)
    starts = run.first_loss_scales
    if start_up.before == len(run.first) or better < SMALLEST_LOSS_SCALE or fewest <= TOLERABLE:
        return []
    if starts is not None and not better < starts[1]:
        return []
    at_least = "" if fewest == most else "At least "
    start = " to ".join(as_power_of_two(scale) for scale in sorted(set(starts or ())))
    resumed = ""
    if run.first[0] > 1:
        resumed = f" The log begins at step {run.first[0]}: if the run was resumed there, resume its loss scale too."
    scale = as_power_of_two(float(start_up.scale or better))
    reason = f"From step {start_up.from_step} on, {scale} held: {HELD} steps in a row were not skipped."
    if scale != as_power_of_two(better):
        reason += f" {as_power_of_two(better)} is the power of two below it."
    if start_up.highest is not None and start_up.highest > float(start_up.scale or better):
        reason += f" Scales up to {as_power_of_two(start_up.highest)} held later, after they or lower ones overflowed."
    return [
        Advice(
            "start lower",
            f"Start at {as_power_of_two(better)} ({ways.sets.format('loss_scale_value', f'{better:.15g}')})"
            + f" instead of {start}." * bool(start)
            + "." * (not start),
            f"{at_least}{counted(fewest, 'step')} {'was' if fewest == 1 else 'were'} skipped before step "
            f"{run.first[start_up.before]}. {reason}{resumed}",
            {
                "scale": better,
                "reached_at": start_up.from_step,
                "saves_skipped_steps": fewest,
                "saves_at_most": most,
            },
        )
    ]


def _skips_again(run: RecordedRun, start_up: Held) -> Advice | None:
    """Return advice to take the guided rule if steps were skipped again and again after a scale had held."""
    if not start_up.answer or run.columns.get("largest_gradient") is not None:
        return None
    after = slice(start_up.before, None)
    steps = int(run.lengths[after].sum())
    skipped = run.skipped_bounds[0] - start_up.shown_before[1]
    some = run.fewest[after] > 0
    places = int((some & ~np.append(False, some[:-1])).sum())
    if skipped <= TOLERABLE or places < _AGAIN_PLACES or skipped <= _AGAIN_SHARE * steps:
        return None
    windows = run.columns.get("scale_window")
    is_adaptive = windows is not None and len(np.unique(windows[~np.isnan(windows)])) > 1
    second = "use dynamic scaling with a window of 1000"
    if is_adaptive:
        second = "use adaptive scaling, which comes back up sooner"
    is_exact = all(low == high for low, high in (run.skipped_bounds, start_up.shown_before))
    at_least = "" if is_exact else "at least "
    return Advice(
        "take guided",
        "Take gradient-guided scaling: gradients tell it how high the loss scale may be, so it rarely skips.",
        f"After a scale had held, {at_least}{skipped:,} of {steps:,} steps were skipped, in {places:,} places. Without "
        f"a train step of this package, {second}.",
        {"skipped": skipped, "steps": steps, "places": places},
    )


def _power_of_two_up_to(scale: float) -> float:
    """Round a loss scale down to a power of two, allowing for rounding in logs, which print only eight digits."""
    return 2.0 ** math.floor(math.log2(scale * (1 + 1e-6))) if 0 < scale < math.inf else scale
