"""Causes outside loss scaling that a run shows, such as a NaN loss: the advice for each, and a saved explanation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mindformers_adaptive.record.diagnosis import Finding, diagnose
from mindformers_adaptive.record.run import RecordedRun
from mindformers_adaptive.record.run_folder import EXPLANATION_FILE, Ways, ways_of
from mindformers_adaptive.record.scale_summary import summary_of
from mindformers_adaptive.record.thresholds import STUCK
from mindformers_adaptive.text.files import json_object
from mindformers_adaptive.text.table import counted
from mindformers_adaptive.text.untrusted import printable

__all__ = ["Advice", "cause_in", "explanation_of", "findings_of", "last_error", "other_cause", "signs_of"]

# Look for a traceback in this many bytes at the end of a log.
_END_OF_LOG = 2**14

# Read at most this many bytes of a file. An explanation of a large model has some hundred kilobytes.
_MOST_BYTES = 2**26
# Show at most this many lines of a summary, and this many characters of a line.
_LINES, _WIDTH = 3, 2000


@dataclass(frozen=True)
class Advice:
    """One piece of advice: what to change after a run, and why.

    Attributes:
        rule (str): the kind of advice: "start lower", "take guided", "restart" or "short run"; or, if the loss scaling
            is not the cause, a kind of :class:`~mindformers_adaptive.record.symptom.Finding` or "scale of 1".
        change (str): what to change.
        reason (str): why to change it, with figures.
        figures (dict): the figures of the reason by name, ready for JSON.
    """

    rule: str
    change: str
    reason: str
    figures: dict[str, Any] = field(default_factory=dict)


def findings_of(run: RecordedRun) -> list[Finding]:
    """Return what is wrong in the steps of a run, the likeliest cause first."""
    return diagnose(run.seen_steps)


def other_cause(run: RecordedRun) -> Advice | None:
    """Return the advice for a run whose problem is not its loss scaling; None if the loss scaling may be the cause.

    Args:
        run (RecordedRun): a run with at least one step.
    """
    return cause_in(run, findings_of(run), ways_of(run.files, in_python=False), summary_of(run).stayed)


def cause_in(run: RecordedRun, findings: Sequence[Finding], ways: Ways, stayed: bool | None) -> Advice | None:
    """Return the advice of :func:`other_cause`.

    Args:
        run (RecordedRun): a run with at least one step.
        findings (Sequence[Finding]): what :func:`findings_of` returned for the run.
        ways (Ways): the next steps.
        stayed (bool, optional): whether the loss scale was the same in every step, None if that is not shown.
    """
    to_the_layer = f"Find the layer and a remedy:\n{ways.why}"
    for finding in findings:
        # A loss that jumped and fell back does not keep the loss scaling from being the cause.
        if not (finding.kind == "loss jump" and finding.is_over):
            return Advice(finding.kind, f"{finding.remedy} {to_the_layer}", finding.text, finding.figures)
    if not (run.stated_scales == 1.0).all():
        return None
    skipped = run.skipped_bounds[0]
    if skipped >= STUCK:
        reason = f"At least {counted(skipped, 'step')} overflowed at a loss scale of 1. No loss scale helps there."
        if not stayed:
            reason = f"At least {counted(skipped, 'step')} overflowed, and each line of the log has a loss scale of 1."
        return Advice("collapse", to_the_layer, reason, {"steps": skipped})
    return Advice(
        "scale of 1",
        "Is this a run in BF16? Then there is nothing to change: BF16 needs no loss scaling. If it is in FP16, "
        f"find a loss scale to start from: {ways.find}",
        f"The loss scale was 1 {'in every step' if stayed else 'on each line of the log'}.",
        {"steps": len(run)},
    )


def signs_of(findings: Sequence[Finding]) -> list[str]:
    """Return the sentences on what else was found in a run, beside the likeliest cause, which is an advice.

    Args:
        findings (Sequence[Finding]): what :func:`findings_of` returned.
    """
    # The facts of a run have the number of bad losses already, and the collapse.
    later = (each for each in findings[1:] if each.kind not in ("bad loss", "collapse"))
    jumps = (each for each in findings[:1] if each.kind == "loss jump" and each.is_over)
    return [f"{each.text} {each.remedy}" for each in (*jumps, *later)]


def last_error(files: Sequence[str]) -> str | None:
    """Return the last line of the traceback in which the last log file ends; None if it does not end in a traceback.

    Args:
        files (Sequence[str]): the files of a run, in order of writing. A file that cannot be read has no traceback.
    """
    path = Path(files[-1]) if files else None
    if path is None or not path.is_file():
        return None
    try:
        with path.open("rb") as log:
            log.seek(max(path.stat().st_size - _END_OF_LOG, 0))
            text = log.read(_END_OF_LOG).decode("utf-8", "replace")
    except OSError:
        return None
    _, traceback, after = text.rpartition("Traceback (most recent call last):")
    lines = [line for line in after.splitlines() if line.strip()]
    # After a traceback comes one line that is not indented: the error. More such lines show that the run went on.
    errors = [line for line in lines if not line[0].isspace()]
    return errors[0].rstrip(". ")[:200] if traceback and len(errors) == 1 else None


def explanation_of(run: RecordedRun) -> list[str]:
    """Return the sentences of the explanation that lies beside the record of a run; an empty list if there is none.

    An explanation that names a step is left out unless that step of the run overflowed or had a bad loss: it is from an
    earlier run in the same folder.

    Args:
        run (RecordedRun): a run.
    """
    files = (Path(file).with_name(EXPLANATION_FILE) for file in run.files)
    file = next((file for file in files if file.is_file()), None)
    if file is None or run.log_format != "jsonl":
        return []
    try:
        content = json_object(file.read_text(encoding="utf-8").strip()) if file.stat().st_size <= _MOST_BYTES else {}
    except (OSError, ValueError):
        return []
    lines, step = content.get("summary") or [content.get("headline")], content.get("step")
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        return []
    if step is None:
        return [f"{printable(line[:_WIDTH]).rstrip('.')}." for line in lines[:_LINES]]
    loss = run.columns.get("loss")
    is_bad = run.skipped if loss is None else run.skipped | np.isinf(loss)
    if step not in run.last[is_bad].tolist():
        return []
    first, *later = (f"{printable(line[:_WIDTH]).rstrip('.')}." for line in lines[:_LINES])
    return [f"Step {step} was explained. {first}", *later]
