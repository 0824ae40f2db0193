"""Analyze a recorded run: what happened, as far as its log shows it, and what to change."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from mindformers_adaptive.lab.advise import advise
from mindformers_adaptive.lab.analysis_text import analysis_text
from mindformers_adaptive.lab.configuration import Configuration
from mindformers_adaptive.lab.facts import facts_of, verdict
from mindformers_adaptive.lab.other_cause import Advice, cause_in, explanation_of, findings_of, last_error, signs_of
from mindformers_adaptive.lab.scale_path import Phase, changes_of, phases
from mindformers_adaptive.record.run import RecordedRun
from mindformers_adaptive.record.run_folder import ways_of
from mindformers_adaptive.record.scale_summary import summary_of

__all__ = ["Analysis", "analyze"]

_COUNTS_OF_LINES = ("lines_read", "lines_used", "lines_ignored", "lines_superseded")


@dataclass(frozen=True)
class Analysis:
    """The result of :func:`analyze`: what happened in a recorded run, and what to change.

    Attributes:
        run (RecordedRun): the analyzed run.
        verdict (tuple[str, ...]): sentences that say what happened. Each is true of every run that would have written
            this log.
        phases (tuple[Phase, ...]): the path of the loss scale, between the scales that the log states.
        advice (tuple[Advice, ...]): what to change; empty if the run gives no reason for a change.
        settings (Configuration, optional): the settings to use; None if the rule need not change.
        last_error (str, optional): the last line of the traceback in which the log ends.
        in_python (bool): whether the text gives the settings and other advice as Python, not as YAML. Default: False.
    """

    run: RecordedRun
    verdict: tuple[str, ...]
    phases: tuple[Phase, ...]
    advice: tuple[Advice, ...]
    settings: Configuration | None
    last_error: str | None = None
    in_python: bool = False
    _facts: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def scale_sense(self) -> str | None:
        """str, optional: the recommended settings as a section of MindFormers' YAML."""
        return None if self.settings is None else self.settings.scale_sense()

    @property
    def update_cell(self) -> str | None:
        """str, optional: the recommended settings as the call of an update cell's class."""
        return None if self.settings is None else self.settings.update_cell()

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
    summary, ways = summary_of(run), ways_of(run.files, in_python)
    findings = findings_of(run)
    cause, explanation = cause_in(run, findings, ways, summary.stayed), explanation_of(run)
    facts = facts_of(run, summary)
    said = (*explanation, *verdict(run, facts, summary), *signs_of(findings))
    advice, settings = advise(run, summary, cause, ways)
    path = tuple(phases(changes_of(run)))
    return Analysis(run, said, path, tuple(advice), settings, last_error(run.files), in_python, facts)
