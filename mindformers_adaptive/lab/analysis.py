"""Analyze a recorded run: what happened, what other policies would have done, and what to change."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.lab.advise import advise
from mindformers_adaptive.lab.analysis_text import analysis_text
from mindformers_adaptive.lab.configuration import Configuration
from mindformers_adaptive.lab.facts import facts_of, verdict
from mindformers_adaptive.lab.measures import LARGEST_LOSS_SCALE, Measures, measure, require_steps
from mindformers_adaptive.lab.other_cause import Advice, findings_of, last_error, signs_of
from mindformers_adaptive.lab.policies import Policy, make_policy
from mindformers_adaptive.lab.replay import compare
from mindformers_adaptive.lab.scale_path import Phase, changes_of, phases
from mindformers_adaptive.record.explanation_file import explanation_of
from mindformers_adaptive.record.run import RecordedRun
from mindformers_adaptive.record.trace import Trace
from mindformers_adaptive.rules import RULES
from mindformers_adaptive.text.table import as_power_of_two

__all__ = ["Analysis", "analyze"]

# A rule that follows the gradients is replayed only if the largest gradient is known for at least this share of the
# steps. Below it, nearly all gradients would be missing from the replay.
_FEWEST_SHOWN = 0.01

_COUNTS_OF_LINES = ("lines_read", "lines_used", "lines_ignored", "lines_superseded")


@dataclass(frozen=True)
class Analysis:
    """The result of :func:`analyze`: what happened in a recorded run, and what to change.

    Attributes:
        run (RecordedRun): the analyzed run.
        phases (tuple[Phase, ...]): the path of the loss scale.
        advice (tuple[Advice, ...]): what to change; empty if the run gives no reason for a change.
        settings (Configuration, optional): the settings that follow from the advice; None if no settings are known to
            be better.
        in_python (bool): whether the text gives the settings and other advice as Python, not as YAML. Default: False.
    """

    run: RecordedRun
    phases: tuple[Phase, ...]
    advice: tuple[Advice, ...]
    settings: Configuration | None
    # The rows of the run itself and, if there are settings, of these settings; and a function that replays the other
    # policies, which takes long for a long run.
    _known_rows: tuple[dict[str, Any], ...] = field(repr=False)
    _replay: Callable[[], dict[str, tuple[Measures, ...]]] = field(repr=False, compare=False)
    in_python: bool = False

    @cached_property
    def outcomes(self) -> tuple[dict[str, Any], ...]:
        """tuple[dict, ...]: a row for the run itself and for each policy, which is replayed on the first reading.

        The rows are ready for JSON. ``policy`` is the name of the row. ``skipped``, ``too_low``, ``headroom_lost``
        (bits) and ``known_share`` hold for the ceilings that
        :meth:`~mindformers_adaptive.record.run.RecordedRun.to_trace` assumes by default. ``fewest_skipped`` and
        ``most_skipped`` also cover the ceilings of each of ``run.assumptions``.
        """
        replayed = (_row(name, measures) for name, measures in self._replay().items())
        return (self._known_rows[0], *replayed, *self._known_rows[1:])

    @property
    def scale_sense(self) -> str | None:
        """str, optional: the recommended settings as a section of MindFormers' YAML, with the reasons as comments."""
        return None if self.settings is None else self.settings.scale_sense(self._notes())

    @property
    def update_cell(self) -> str | None:
        """str, optional: the recommended settings as the call of an update cell's class, with the reasons."""
        return None if self.settings is None else self.settings.update_cell(self._notes())

    def _notes(self) -> dict[str, str]:
        return {advice.argument: advice.note for advice in self.advice if advice.argument}

    def to_dict(self) -> dict[str, Any]:
        """Return the analysis of the run as a dict that ``json`` can write. None stands for an unknown value.

        A number that the log does not give exactly is None, and its bounds are in ``..._at_least`` and ``..._at_most``.
        For ``skipped``, the bounds are ``at_least`` and ``at_most``. ``at_most`` is None if the log does not number all
        of its steps.

        Returns:
            dict with ``verdict`` (sentences), ``log`` (files, format, lines, notes, problems, last_error),
            ``steps``, ``skipped``, ``dropped_by_norm``, ``start_up``, ``loss``, ``loss_scale`` (with ``phases``),
            ``shown_by_gradients``, ``outcomes``, ``advice``, ``scale_sense`` (the settings as YAML),
            ``update_cell`` (the settings as Python), ``in_python`` and ``certainty``, with ``known_share``: the
            share of the steps of the replayed settings that the log decides.
        """
        return self._to_dict(self.outcomes)

    def _to_dict(self, outcomes: tuple[dict[str, Any], ...]) -> dict[str, Any]:
        run, facts = self.run, facts_of(self.run)
        facts["loss_scale"]["phases"] = [phase._asdict() for phase in self.phases]
        return {
            "verdict": [*explanation_of(run), *verdict(run, facts), *signs_of(findings_of(run))],
            "log": {
                "name": run.name,
                "files": list(run.files),
                "format": run.log_format,
                **{name: getattr(run, name) for name in _COUNTS_OF_LINES},
                "notes": list(run.notes),
                "problems": list(run.problems),
                "last_error": last_error(run.files),
            },
            **facts,
            "outcomes": list(outcomes),
            "advice": [dataclasses.asdict(advice) for advice in self.advice],
            "scale_sense": self.scale_sense,
            "update_cell": self.update_cell,
            "in_python": self.in_python,
            "certainty": None if self.settings is None else {"known_share": outcomes[-1]["known_share"]},
        }

    def text(self, details: bool = False) -> str:
        """Return the analysis of the run as text for a terminal.

        Args:
            details (bool): whether to add all changes of the loss scale and all replays. Long lists are cut, and the
                text says so.
        """
        return analysis_text(self._to_dict(self.outcomes if details else self._known_rows), details)


def analyze(
    run: RecordedRun, *, in_python: bool | None = None, progress: Callable[[int], None] | None = None
) -> Analysis:
    """Analyze a recorded run: how the loss scale moved, what other policies would have done, and what to change.

    Policies are replayed from the run's first loss scale on. Advice never costs more than the run itself did, see
    :func:`~mindformers_adaptive.lab.advise.advise`. With advice come the settings to use, where the log decides at
    least 90 % of their steps.

    Args:
        run (RecordedRun): such as :func:`~mindformers_adaptive.record.logs.read_log` returns.
        in_python (bool, optional): whether to give advice as Python instead of YAML. Default: None, for the record of a
            program that trained without a YAML file.
        progress (Callable, optional): called with the number of replays done. Default: None.

    Returns:
        Analysis, with the path of the loss scale, what other policies would have done, and what to change.

    Raises:
        ValueError: if the run has no step, or no step has a known loss scale.

    Examples:
        >>> flags = np.arange(100) < 16
        >>> scale = 2.0 ** np.maximum(32 - np.arange(100), 16)
        >>> analysis = analyze(RecordedRun("run", (), "jsonl", np.arange(1, 101), scale, flags, np.full(100, True)))
        >>> analysis.advice[0].change
        'Start at 2^16 (loss_scale_value: 65536) instead of 2^32.'
    """
    trace = run.to_trace()
    require_steps(trace)
    if np.isnan(run.filled_loss_scale).all():
        raise ValueError(
            f"The run {run.name!r} must have a known loss scale, but its log shows no loss scale in any step. Give a "
            "log that contains loss scales."
        )
    changes, used = changes_of(run), run.filled_loss_scale
    # Make a trace for each assumption about the ceilings. Only the ceilings are new arrays, and the traces share all
    # other arrays: copies of these would not fit into memory for a long run.
    ceilings = (run.to_trace(assume).ceiling for assume in run.assumptions[1:])
    traces = [trace, *(dataclasses.replace(trace, ceiling=ceiling) for ceiling in ceilings)]
    recorded = tuple(measure(assumed, np.append(used, used[-1])) for assumed in traces)
    if in_python is None:
        in_python = run.is_from_program
    advice, settings = advise(run, traces, recorded, changes, in_python)
    rows = [_row_of_run(run, recorded)]
    if settings is not None:
        rows.append(_row("as advised", settings.measures))

    def replay() -> dict[str, tuple[Measures, ...]]:
        policies = _policies(used, trace)
        return dict(compare(policies, traces, progress=progress).measures) if policies else {}

    chosen = None if settings is None else settings.configuration
    return Analysis(run, tuple(phases(changes)), tuple(advice), chosen, tuple(rows), replay, in_python)


def _row(policy: str, measures: Sequence[Measures]) -> dict[str, Any]:
    """Return the measures on the first trace as a row, and the fewest and most steps skipped on a trace."""
    numbers, skipped = measures[0].as_dict(), [each.skipped for each in measures]
    row = {key: numbers[key] for key in ("skipped", "too_low", "headroom_lost", "known_share")}
    return {"policy": policy, **row, "fewest_skipped": min(skipped), "most_skipped": max(skipped)}


def _row_of_run(run: RecordedRun, measures: Sequence[Measures]) -> dict[str, Any]:
    # Take the skipped steps of the run itself from the log. They are exact unless a log line stands for several steps.
    fewest, most = run.skipped_bounds()
    row = _row("as recorded", measures)
    row |= {"fewest_skipped": fewest, "most_skipped": most if run.is_numbered else None}
    return row if fewest == most else {**row, "skipped": None, "too_low": None, "headroom_lost": None}


def _policies(used: NDArray[np.float64], trace: Trace) -> dict[str, Callable[[], Policy]]:
    """Return policies by name. All start at the run's first loss scale that is at least 1 and finite in float32."""
    usable = used[(used >= 1.0) & (used <= LARGEST_LOSS_SCALE)]
    if not len(usable):
        return {}
    start = float(usable[0])
    at_start = f"from {as_power_of_two(start)}"
    policies: dict[str, Callable[[], Policy]] = {
        f"adaptive 20-1000 {at_start}": partial(make_policy, "adaptive", loss_scale_value=start),
        f"dynamic 20 {at_start}": partial(make_policy, "dynamic", init_loss_scale=start, scale_window=20),
        f"dynamic 1000 {at_start}": partial(make_policy, "dynamic", init_loss_scale=start, scale_window=1000),
        f"megatron {at_start}": partial(make_policy, "megatron", initial_scale=start),
    }
    at_power = 2.0 ** math.floor(math.log2(start))
    shown = 0.0 if trace.largest_gradient is None else float((~np.isnan(trace.largest_gradient)).mean())
    for name, rule in RULES.items():
        if shown >= _FEWEST_SHOWN and rule.needs_gradients:
            start_at = {"loss_scale_value": at_power, "gradient_format": trace.gradient_format}
            policies[f"{name} from {as_power_of_two(at_power)}"] = partial(make_policy, name, **start_at)
    return policies
