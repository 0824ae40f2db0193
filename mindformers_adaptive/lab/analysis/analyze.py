"""What happened in a recorded run, what other policies would have done in it, and what to change."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.lab.analysis.advice import Advice
from mindformers_adaptive.lab.analysis.advise import advise
from mindformers_adaptive.lab.analysis.evidence import facts_of, raise_ceilings
from mindformers_adaptive.lab.analysis.scale_path import Phase, changes_of, phases
from mindformers_adaptive.lab.analysis.text import analysis_text
from mindformers_adaptive.lab.policies import Policy, make_policy
from mindformers_adaptive.lab.replay.configuration import Configuration
from mindformers_adaptive.lab.replay.measures import LARGEST_LOSS_SCALE, measure, require_steps
from mindformers_adaptive.lab.replay.simulate import replay
from mindformers_adaptive.lab.replay.tune import Tuning
from mindformers_adaptive.lab.traces.recorded_run import RecordedRun, forward_fill
from mindformers_adaptive.lab.traces.trace import Trace
from mindformers_adaptive.text.power_of_two import as_power_of_two

__all__ = ["Analysis", "analyze"]


@dataclass(frozen=True)
class Analysis:
    """What :func:`analyze` returns.

    Attributes:
        run (RecordedRun): what was analyzed.
        phases (tuple[Phase, ...]): the path of the loss scale.
        outcomes (tuple[dict, ...]): a row for the run itself and for each policy that was replayed on it, ready for
            JSON: ``policy``, ``skipped``, ``headroom_lost`` (bits) and ``known_share`` with the ceilings that gradients
            show, or where none are known with interpolated ones, raised by
            :func:`~mindformers_adaptive.lab.analysis.evidence.raise_ceilings`; and ``fewest_skipped`` and
            ``most_skipped`` with
            these and the ceilings of each of ``run.assumptions``.
        advice (tuple[Advice, ...]): what to change; empty if the run gives no reason for anything.
        tuning (Tuning, optional): the settings that follow the advice, with how sure they are; None without any.
    """

    run: RecordedRun
    phases: tuple[Phase, ...]
    outcomes: tuple[dict[str, Any], ...]
    advice: tuple[Advice, ...]
    tuning: Tuning | None

    def to_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON: None stands for what is not known.

        Returns:
            dict with ``log`` (files, format, lines, notes and problems), ``steps``, ``skipped``, ``dropped_by_norm``,
            ``start_up``, ``loss_scale`` (with ``phases``), ``overflowed_parameters``, ``outcomes``, ``advice``,
            ``scale_sense`` (the YAML section as text) and ``certainty``, see
            :meth:`~mindformers_adaptive.lab.replay.tune.Tuning.certainty`. ``overflowed_parameters`` has
            ``known_steps``, of how many skipped steps they are known, ``steps_without``, in how many of those no
            gradient of a Parameter overflowed, and ``counts``, in how many each did, by name, the most frequent first.
        """
        run, facts = self.run, facts_of(self.run)
        return {
            "log": {
                "name": run.name,
                "files": list(run.files),
                "format": run.log_format,
                "lines_read": run.lines_read,
                "lines_used": run.lines_used,
                "lines_ignored": run.lines_ignored,
                "lines_superseded": run.lines_superseded,
                "notes": list(run.notes),
                "problems": list(run.problems),
            },
            **facts,
            "loss_scale": {**facts["loss_scale"], "phases": [phase._asdict() for phase in self.phases]},
            "outcomes": list(self.outcomes),
            "advice": [dataclasses.asdict(advice) for advice in self.advice],
            "scale_sense": None if self.tuning is None else self.tuning.recommended.scale_sense(),
            "certainty": None if self.tuning is None else self.tuning.certainty(),
        }

    def text(self) -> str:
        """Return the analysis for a terminal."""
        return analysis_text(self.to_dict(), self.phases)


def analyze(run: RecordedRun, *, progress: Callable[[int], None] | None = None) -> Analysis:
    """Analyze a recorded run.

    Policies are replayed from the run's first loss scale on. Advice is given where other settings would have cost less
    on the run's own trace, see :func:`~mindformers_adaptive.lab.analysis.advise.advise`. With advice come the settings
    to use: the windows that cost least there, or the defaults where the run has fewer steps than the largest default
    window, 1000, and no advice is on windows.

    Args:
        run (RecordedRun): such as :func:`~mindformers_adaptive.lab.logs.read_log` returns.
        progress (Callable, optional): called with the number of replays done. Default: None.

    Raises:
        ValueError: if the run has no step, or the loss scale of none is known.

    Examples:
        >>> flags = np.arange(100) < 16
        >>> scale = 2.0 ** np.maximum(32 - np.arange(100), 16)
        >>> analysis = analyze(RecordedRun("run", (), "jsonl", np.arange(1, 101), scale, flags, np.full(100, True)))
        >>> analysis.advice[0].change
        'Start at 2^16 (loss_scale_value: 65536) instead of 2^32.'
    """
    trace = run.to_trace()
    if trace.largest_gradient is None:
        trace = raise_ceilings(trace)
    require_steps(trace)
    if np.isnan(run.loss_scale).all():
        raise ValueError(f"The run {run.name!r} must have a known loss scale, but has none. Give a log that names it.")
    changes = changes_of(run)
    advice, tuning = advise(run, trace, changes)
    recommended = None if tuning is None else tuning.recommended
    rows = _outcome_rows(run, trace, recommended, progress)
    return Analysis(run, tuple(phases(changes)), tuple(rows), tuple(advice), tuning)


def _outcome_rows(
    run: RecordedRun, trace: Trace, recommended: Configuration | None, progress: Callable[[int], None] | None
) -> list[dict[str, Any]]:
    """What the run and some policies from its first scale on do, under each assumption about the ceilings."""
    used = forward_fill(run.loss_scale)
    policies = _policies(used, trace.largest_gradient is not None)
    if recommended is not None:
        policies["as advised"] = partial(make_policy, recommended.policy, **recommended.arguments)
    traces = [trace, *(run.to_trace(assume) for assume in run.assumptions)]
    rows: list[dict[str, Any]] = []
    for name, make in {"as recorded": None, **policies}.items():
        measures = []
        for assumed in traces:
            measures.append(replay(make(), assumed).measures if make else measure(assumed, np.append(used, used[-1])))
            if progress is not None:
                progress(len(rows) * len(traces) + len(measures))
        named = {key: measures[0].as_dict()[key] for key in ("skipped", "headroom_lost", "known_share")}
        fewest, most = min(one.skipped for one in measures), max(one.skipped for one in measures)
        if make is None:
            fewest, most = run.skipped_bounds()
            named = named if fewest == most else {**named, "skipped": None, "headroom_lost": None}
        rows.append({"policy": name, **named, "fewest_skipped": fewest, "most_skipped": most})
    return rows


def _policies(used: NDArray[np.float64], gradients: bool) -> dict[str, Callable[[], Policy]]:
    """Policies from the first scale that all can start from: known, and within the floor and the numbers they have."""
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
    if gradients:
        at_power = 2.0 ** math.floor(math.log2(start))
        policies[f"guided from {as_power_of_two(at_power)}"] = partial(make_policy, "guided", loss_scale_value=at_power)
    return policies
