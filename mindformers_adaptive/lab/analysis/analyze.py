"""What happened in a recorded run, what other policies would have done in it, and what to change."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mindformers_adaptive.lab.analysis.advice import Advice, advise
from mindformers_adaptive.lab.analysis.evidence import facts_of, lifted
from mindformers_adaptive.lab.analysis.scale_path import Phase, changes_of, phases
from mindformers_adaptive.lab.analysis.text import analysis_text
from mindformers_adaptive.lab.policies import Policy, make_policy
from mindformers_adaptive.lab.replay.configuration import Configuration
from mindformers_adaptive.lab.replay.measures import (
    LARGEST_LOSS_SCALE,
    SMALLEST_LOSS_SCALE,
    Measures,
    cost,
    measure,
    require_steps,
)
from mindformers_adaptive.lab.replay.simulate import replay
from mindformers_adaptive.lab.replay.tune import DEFAULT_GRID, Tuning, tune
from mindformers_adaptive.lab.traces.recorded_run import ASSUMPTIONS, RecordedRun
from mindformers_adaptive.lab.traces.trace import Trace
from mindformers_adaptive.rule.ladder import DEFAULT_MAX_SCALE_WINDOW, DEFAULT_MIN_SCALE_WINDOW
from mindformers_adaptive.text.power_of_two import as_power_of_two

__all__ = ["Analysis", "analyze"]


@dataclass(frozen=True)
class Analysis:
    """What :func:`analyze` found.

    Attributes:
        run (RecordedRun): what was analyzed.
        phases (tuple[Phase, ...]): the path of the loss scale.
        outcomes (tuple[dict, ...]): a row for the run itself and for each policy that was replayed on it, ready for
            JSON: ``policy``, ``skipped``, ``headroom_lost`` (bits) and ``known_share`` with ceilings interpolated and
            :func:`~mindformers_adaptive.lab.analysis.evidence.lifted`, and ``fewest_skipped`` and ``most_skipped`` with
            these and the ceilings of each of ``ASSUMPTIONS``.
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
            dict with ``log`` (files, format, lines, notes and problems), ``steps``, ``skipped``, ``start_up``,
            ``loss_scale`` (with ``phases``), ``outcomes``, ``advice``, ``scale_sense`` (the YAML section as text) and
            ``certainty``, see :meth:`~mindformers_adaptive.lab.replay.tune.Tuning.certainty`.
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

    Policies are replayed from the run's first loss scale on. With advice come the settings that follow it, with the
    windows that cost least on the run's own trace, see :func:`~mindformers_adaptive.lab.replay.measures.cost`; the
    defaults if no advice is on windows and the run has less than 1000 steps, the largest default window. Advice on
    windows is given only if they cost less there than the run did.

    Args:
        run (RecordedRun): such as :func:`~mindformers_adaptive.lab.logs.read_log` returns.
        progress (Callable, optional): called with the number of replays done. Default: None.

    Raises:
        ValueError: if the run has no step, or the loss scale of none is known.

    Examples:
        >>> flags = np.arange(100) < 16
        >>> scale = 2.0 ** np.maximum(32 - np.arange(100), 16)
        >>> found = analyze(RecordedRun("run", (), "jsonl", np.arange(1, 101), scale, flags, np.full(100, True)))
        >>> found.advice[0].change
        'Start at 2^16 (loss_scale_value: 65536) instead of 2^32.'
    """
    trace = lifted(run.to_trace())
    require_steps(trace)
    if np.isnan(run.loss_scale).all():
        raise ValueError(f"The run {run.name!r} must have a known loss scale, but has none. Give a log that names it.")
    changes = changes_of(run)
    start = _start(run)
    advice = tuple(advise(run, changes))
    tuning = _tuning(run, trace, advice, start)
    if any(map(_is_on_windows, advice)) and not _is_better(tuning, run, trace):
        advice = tuple(one for one in advice if not _is_on_windows(one))
        tuning = _tuning(run, trace, advice, start)
    rows = _outcome_rows(run, trace, start, None if tuning is None else tuning.recommended, progress)
    return Analysis(run, tuple(phases(changes)), tuple(rows), advice, tuning)


def _is_on_windows(advice: Advice) -> bool:
    return advice.rule in ("larger window", "smaller window")


def _tuning(run: RecordedRun, trace: Trace, advice: tuple[Advice, ...], start: float | None) -> Tuning | None:
    """The windows that follow the advice and cost least on the trace; of equals the nearest to the defaults.

    A run shorter than the largest default window is no reason for others: it shows little of what windows cost.
    """
    if not advice or any(one.rule == "collapse" for one in advice):
        return None
    settings: dict[str, Any] = {
        "scale_factor": run.scale_factor,
        "min_loss_scale": min([1.0, *run.loss_scale[run.loss_scale >= SMALLEST_LOSS_SCALE].tolist()]),
    }
    for one in advice:
        settings |= one.settings
    settings.setdefault("loss_scale_value", start)
    if settings["loss_scale_value"] is None:
        return None
    limits = {one.rule: one.figures["largest_window"] for one in advice if _is_on_windows(one)}
    if not limits and len(run) < DEFAULT_MAX_SCALE_WINDOW:
        return tune([trace], [Configuration(**settings)])
    windows = itertools.product(_nearest(DEFAULT_MAX_SCALE_WINDOW), _nearest(DEFAULT_MIN_SCALE_WINDOW))
    pairs = [(smallest, largest) for largest, smallest in windows if _follows(limits, smallest, largest)]
    tried = [Configuration(min_scale_window=pair[0], max_scale_window=pair[1], **settings) for pair in pairs]
    return tune([trace], tried) if tried else None


def _follows(limits: dict[str, int], smallest: int, largest: int) -> bool:
    """Whether windows follow the advice; a window that was both too small and too large has to move."""
    above, below = limits.get("larger window", 0), limits.get("smaller window", math.inf)
    if len(limits) == 2:
        return smallest < below and largest > above
    return above < smallest <= largest < below


def _nearest(window: int) -> list[Any]:
    """The windows that are tried, the nearest to one of them first."""
    return sorted(DEFAULT_GRID["min_scale_window"], key=lambda tried: abs(math.log(tried / window)))


def _is_better(tuning: Tuning | None, run: RecordedRun, trace: Trace) -> bool:
    """Whether what was found costs less on the trace than the run itself did."""
    return tuning is not None and bool(tuning.costs.min() < cost(_recorded(run, trace)))


def _policy_of(configuration: Configuration) -> Policy:
    return make_policy("adaptive", **dataclasses.asdict(configuration))


def _recorded(run: RecordedRun, trace: Trace) -> Measures:
    """The measures of the run itself; an unknown scale counts as the one known before it, or else after."""
    known = np.flatnonzero(~np.isnan(run.loss_scale))
    before = np.searchsorted(known, np.arange(len(run)), side="right") - 1
    scale = run.loss_scale[known[np.maximum(before, 0)]]
    return measure(trace, np.append(scale, scale[-1]))


def _outcome_rows(
    run: RecordedRun,
    trace: Trace,
    start: float | None,
    configuration: Configuration | None,
    progress: Callable[[int], None] | None,
) -> list[dict[str, Any]]:
    """What the run and some policies from its first scale on do, under each assumption about the ceilings."""
    policies: dict[str, Callable[[Trace], Measures]] = {"as recorded": partial(_recorded, run)}
    made = {} if start is None else _policies(start)
    if configuration is not None:
        made["as advised"] = partial(_policy_of, configuration)
    policies |= {name: partial(_measures_of, make) for name, make in made.items()}
    traces = [trace, *(run.to_trace(assume) for assume in ASSUMPTIONS)]
    rows: list[dict[str, Any]] = []
    for name, measures_on in policies.items():
        found = []
        for assumed in traces:
            found.append(measures_on(assumed))
            if progress is not None:
                progress(len(rows) * len(traces) + len(found))
        shown = {key: found[0].as_dict()[key] for key in ("skipped", "headroom_lost", "known_share")}
        skipped = [one.skipped for one in found]
        rows.append({"policy": name, **shown, "fewest_skipped": min(skipped), "most_skipped": max(skipped)})
    return rows


def _start(run: RecordedRun) -> float | None:
    """The first scale that policies can start from: known, and within the floor and the numbers that they all have."""
    usable = run.loss_scale[(run.loss_scale >= 1.0) & (run.loss_scale <= LARGEST_LOSS_SCALE)]
    return float(usable[0]) if len(usable) else None


def _policies(start: float) -> dict[str, Callable[[], Policy]]:
    at_start = f"from {as_power_of_two(start)}"
    return {
        f"adaptive 20-1000 {at_start}": partial(make_policy, "adaptive", loss_scale_value=start),
        f"dynamic 20 {at_start}": partial(make_policy, "dynamic", init_loss_scale=start, scale_window=20),
        f"dynamic 1000 {at_start}": partial(make_policy, "dynamic", init_loss_scale=start, scale_window=1000),
        f"megatron {at_start}": partial(make_policy, "megatron", initial_scale=start),
    }


def _measures_of(make: Callable[[], Policy], trace: Trace) -> Measures:
    return replay(make(), trace).measures
