"""Analyze a recorded run: what happened, as far as its log shows it, and what to change."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mindformers_adaptive.lab.advise import Advice, advise, cause_in, signs_of
from mindformers_adaptive.lab.analysis_text import analysis_text
from mindformers_adaptive.lab.facts import facts_of, verdict
from mindformers_adaptive.lab.scale_path import Phase, changes_of, phases
from mindformers_adaptive.record.diagnosis import diagnose
from mindformers_adaptive.record.run import RecordedRun
from mindformers_adaptive.record.run_folder import EXPLANATION_FILE, ways_of
from mindformers_adaptive.record.scale_summary import summary_of
from mindformers_adaptive.rules.guided import GuidedRule
from mindformers_adaptive.rules.pasting import arguments_of_rule, cell_call, python_value
from mindformers_adaptive.text.files import json_object
from mindformers_adaptive.text.untrusted import printable

_COUNTS_OF_LINES = ("lines_read", "lines_used", "lines_ignored", "lines_superseded")

# Look for a traceback in this many bytes at the end of a log.
_END_OF_LOG = 2**14

# Read at most this many bytes of a file. An explanation of a large model has some hundred kilobytes.
_MOST_BYTES = 2**26
# Show at most this many lines of a summary, and this many characters of a line.
_LINES, _WIDTH = 3, 2000


@dataclass(frozen=True)
class Analysis:
    """The result of :func:`analyze`: what happened in a recorded run, and what to change.

    Attributes:
        run (RecordedRun): the analyzed run.
        verdict (tuple[str, ...]): sentences that say what happened. Each is true of every run that would have written
            this log.
        phases (tuple[Phase, ...]): the path of the loss scale, between the scales that the log states.
        advice (tuple[Advice, ...]): what to change; empty if the run gives no reason for a change.
        guided_start (float, optional): the loss scale at which the guided rule should start; None if the rule need not
            change.
        last_error (str, optional): the last line of the traceback in which the log ends.
        in_python (bool): whether the text gives the settings and other advice as Python, not as YAML. Default: False.
    """

    run: RecordedRun
    verdict: tuple[str, ...]
    phases: tuple[Phase, ...]
    advice: tuple[Advice, ...]
    guided_start: float | None
    last_error: str | None = None
    in_python: bool = False
    _facts: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def scale_sense(self) -> str | None:
        """str, optional: the recommended settings as a section of MindFormers' YAML."""
        if self.guided_start is None:
            return None
        lines = [f"  {name}: {python_value(value)}\n" for name, value in self._arguments.items()]
        return "".join([f"scale_sense:\n  type: {GuidedRule.cell}\n", *lines])

    @property
    def update_cell(self) -> str | None:
        """str, optional: the recommended settings as the call of an update cell's class."""
        return None if self.guided_start is None else cell_call(GuidedRule, self._arguments)

    @property
    def _arguments(self) -> dict[str, Any]:
        return {"loss_scale_value": self.guided_start, **arguments_of_rule(GuidedRule())}

    def to_dict(self) -> dict[str, Any]:
        """Return the analysis of the run as a dict that ``json`` can write. None stands for what the log does not show.

        A number that the log does not give exactly is None, and its bounds are in ``..._at_least`` and ``..._at_most``.
        For ``skipped``, the bounds are ``at_least`` and ``at_most``. ``at_most`` is None if the log does not number all
        of its steps.

        Returns:
            dict with ``verdict`` (sentences), ``log`` (files, format, lines, notes, problems, last_error),
            ``steps``, ``skipped``, ``dropped_by_norm``, ``start_up``, ``loss``, ``loss_scale`` (with ``phases``),
            ``shown_by_gradients``, ``advice``, ``scale_sense`` (the settings as YAML), ``update_cell`` (the settings as
            Python) and ``in_python``.
        """
        run = self.run
        return {
            "verdict": list(self.verdict),
            "log": {
                "name": run.name,
                "files": list(run.files),
                "format": run.log_format,
                **{name: getattr(run, name) for name in _COUNTS_OF_LINES},
                "notes": list(run.notes),
                "problems": list(run.problems),
                "last_error": self.last_error,
            },
            **self._facts,
            "loss_scale": {**self._facts["loss_scale"], "phases": [phase._asdict() for phase in self.phases]},
            "advice": [dataclasses.asdict(advice) for advice in self.advice],
            "scale_sense": self.scale_sense,
            "update_cell": self.update_cell,
            "in_python": self.in_python,
        }

    def text(self, details: bool = False) -> str:
        """Return the analysis of the run as text for a terminal.

        Args:
            details (bool): whether to add all changes of the loss scale. Long lists are cut, and the text says so.
        """
        return analysis_text(self.to_dict(), details)


def analyze(run: RecordedRun, *, in_python: bool | None = None) -> Analysis:
    """Analyze a recorded run: how the loss scale moved, how many steps were skipped, and what to change.

    Args:
        run (RecordedRun): such as :func:`~mindformers_adaptive.record.logs.read_log` returns.
        in_python (bool, optional): whether to give advice as Python instead of YAML. Default: None, for the record of a
            program that trained without a YAML file.

    Returns:
        Analysis, with what the log shows, and what to change.

    Raises:
        ValueError: if the run has no step, or its log states no loss scale.

    Examples:
        >>> import numpy as np
        >>> scale = 2.0 ** np.maximum(32 - np.arange(100), 16)
        >>> analysis = analyze(RecordedRun.of_steps(range(1, 101), scale, np.arange(100) < 16))
        >>> analysis.advice[0].change
        'Start at 2^16 (loss_scale_value: 65536) instead of 2^32.'
    """
    if not len(run):
        raise ValueError(f"The run {run.name!r} must have at least 1 step, but has none. Leave this run out.")
    if not len(run.stated_scales) and not run.is_rounded:
        raise ValueError(
            f"The run {run.name!r} must have a known loss scale, but its log shows no loss scale in any step. Give a "
            "log that contains loss scales."
        )
    if in_python is None:
        in_python = run.is_from_program
    explanation, error = explanation_of(run), last_error(run.files)
    summary, ways = summary_of(run), ways_of(run.files, in_python)
    findings = diagnose(run.seen_steps)
    facts = facts_of(run, summary)
    said = (*explanation, *verdict(run, facts, summary), *signs_of(findings))
    advice, guided_start = advise(run, summary, cause_in(run, findings, ways), ways)
    path = tuple(phases(changes_of(run)))
    return Analysis(run, said, path, tuple(advice), guided_start, error, in_python, facts)


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
