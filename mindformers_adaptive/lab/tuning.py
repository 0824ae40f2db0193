"""Find the loss-scaling configuration that costs least on recorded or synthetic traces, and say how sure this is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.lab.configuration import Configuration, default_grid, grid
from mindformers_adaptive.lab.measures import FREE_BITS, Measures, cost
from mindformers_adaptive.lab.other_cause import other_cause
from mindformers_adaptive.lab.replay import SweepResult, pareto_front, sweep
from mindformers_adaptive.record.run import RecordedRun
from mindformers_adaptive.record.run_folder import find_command
from mindformers_adaptive.record.scale_summary import bounded_share, bounds_in_words
from mindformers_adaptive.record.thresholds import DECIDED_FROM, TOLERABLE
from mindformers_adaptive.record.trace import Trace, just_below
from mindformers_adaptive.rules import RULES
from mindformers_adaptive.text.table import counted, text_table

__all__ = ["Tuning", "part_to_sweep", "tune"]

# If the log shows for less than this share of the replayed steps whether they overflow, the recommendation is a guess.
_LIKELY_FROM = 0.5
_FOLLOWING = " or ".join(rule.title for rule in RULES.values() if rule.needs_gradients)

_COLUMNS = {
    "configuration": "setting",
    "skipped": "skipped",
    "too_low": "too low",
    "headroom_lost": "bits below",
    "known": "decided (%)",
}

# The measures in the line about the best setting and the run itself.
_SHOWN = ("skipped", "too_low", "headroom_lost")

# Try settings only on this many steps at the end of a trace: more would take minutes, and the run goes on from there.
# No settings can follow from a log that decides less than 90 % of its steps: do not let the user wait for them.
_MOST_STEPS, _MOST_UNDECIDED = 200_000, 2_000

# With "Equally good: ... and 900 more." around them, labels of this many characters fit into a line of 100.
_LABELS_WIDTH = 70

_MORE_NEEDED = (
    "No settings to paste: the log shows for {:.0%} of the replayed steps whether they overflow, and 90% are needed.\n"
    f"Give more logs, or records with largest gradients, as {_FOLLOWING} writes them.\n"
    "A scale to start any training from: {}"
)
_OTHER_CAUSE = "No settings to paste: look at the cause above first."
_NOT_BETTER = "No settings to paste: the run itself did at least as well as the best of them."
_LITTLE_BETTER = "No settings to paste: the best of them saves {}. From 3 saved steps on, settings are recommended."
_AS_ANALYZE = "'analyze' recommends the same settings."
_CHEAPER = "'analyze' recommends other settings, which change the run less and would cost more: {}."
_NOT_TRIED = "'analyze' recommends settings that were not tried here: {}."
_NONE_BY_ANALYZE = "'analyze' recommends none: it tries only longer windows, and the scale that held as the start."


@dataclass(frozen=True)
class Tuning:
    """The result of a search for the loss-scaling configuration that costs least.

    Attributes:
        traces (tuple[Trace, ...]): the traces of the search.
        configurations (tuple[Configuration, ...]): the configurations that were tried.
        sweeps (tuple[SweepResult, ...]): the results of all configurations on each trace.
        costs (NDArray): the cost of each configuration on each trace, float64 of shape (configurations, traces), see
            :func:`~mindformers_adaptive.lab.measures.cost`.
        assumed (dict[str, NDArray]): the costs under other assumptions about the ceilings, by the assumption's name.
        notes (tuple[str, ...]): a sentence on each trace that was swept only in part.
        recorded (tuple[Measures, ...]): the measures of the recorded runs themselves, if all traces come from runs.
        runs (tuple[RecordedRun, ...]): these runs.
        advised (Configuration, optional): the configuration that ``analyze`` recommends for the only run; it is the
            recommended one too unless another one costs less.
        bounded (float): the share of the whole traces' steps with a bound; no configuration has more known steps.
        in_python (bool): whether the text gives the settings as Python, not as YAML. Default: False.
    """

    traces: tuple[Trace, ...]
    configurations: tuple[Configuration, ...]
    sweeps: tuple[SweepResult, ...]
    costs: NDArray[np.float64]
    assumed: dict[str, NDArray[np.float64]]
    notes: tuple[str, ...] = ()
    recorded: tuple[Measures, ...] = ()
    runs: tuple[RecordedRun, ...] = ()
    advised: Configuration | None = None
    bounded: float = 1.0
    in_python: bool = False

    @property
    def best(self) -> int:
        """int: the index of the recommended configuration.

        It has the smallest mean cost of the configurations for which the traces decide at least 90 % of the steps. If
        there is no such configuration, it is the cheapest of all. Of equally cheap configurations ``advised`` is taken,
        or else the one nearest to the ceiling, and of equally near ones the first.
        """
        return int(self._order[0])

    @cached_property
    def _order(self) -> NDArray[np.int64]:
        """Return the indices of the configurations, best first, see :attr:`best`. Uncertain ones come last."""
        undecided, other = self._known_shares < DECIDED_FROM, [each != self.advised for each in self.configurations]
        order: NDArray[np.int64] = np.lexsort([self._below(), other, self.costs.mean(axis=1), undecided])
        return order

    def _below(self) -> NDArray[np.float64]:
        """Return the mean bits of each configuration below the ceiling, over the traces where they can be measured."""
        bits = np.array([result.column("headroom_lost") for result in self.sweeps])
        below: NDArray[np.float64] = np.ma.masked_invalid(bits).mean(axis=0).filled(np.nan)  # type: ignore[no-untyped-call]
        return below

    @property
    def recommended(self) -> Configuration:
        """Configuration: the recommended configuration, see :attr:`best`."""
        return self.configurations[self.best]

    @property
    def settings_to_paste(self) -> str | None:
        """str, optional: the recommended configuration as a section of YAML.

        None if the traces decide less than 90 % of its steps, if it saves at most two skipped steps of the recorded
        runs, or if a log shows a cause outside loss scaling, such as a NaN loss.
        """
        return None if self._without_settings() else self.recommended.scale_sense()

    @property
    def update_cell(self) -> str | None:
        """str, optional: the same settings as the call of an update cell's class, in Python."""
        return None if self._without_settings() else self.recommended.update_cell()

    def _without_settings(self) -> str:
        """Return why there are no settings to paste; "" if there are settings."""
        if any(other_cause(run) for run in self.runs):
            return _OTHER_CAUSE
        if (known := self.known_share(self.best)) < DECIDED_FROM:
            return _MORE_NEEDED.format(known, find_command(self.in_python))
        costs = zip(self.recorded, self.costs[self.best].tolist(), strict=False)
        saved = [(cost(measures) - after) * measures.steps / 1000 for measures, after in costs]
        if not saved or sum(saved) > TOLERABLE:
            return ""
        return _LITTLE_BETTER.format(counted(round(sum(saved)), "step")) if round(sum(saved)) > 0 else _NOT_BETTER

    def known_share(self, index: int) -> float:
        """Return the share of a configuration's steps, over all traces, whose outcome is known and not assumed."""
        return float(self._known_shares[index])

    @cached_property
    def _known_shares(self) -> NDArray[np.float64]:
        each = [result.column("known_share") for result in self.sweeps]
        shares: NDArray[np.float64] = np.average(each, axis=0, weights=[len(trace) for trace in self.traces])
        return np.minimum(shares, self.bounded)

    def certainty(self) -> dict[str, Any]:
        """Return how far the recommendation can be trusted, ready for JSON.

        Returns:
            dict with

            - ``known_share``: the share of the recommended configuration's steps whose outcome is known, not assumed;
            - ``verdict``: ``"known"`` from 0.9 on, ``"likely"`` from 0.5 on, else ``"a guess"``;
            - ``cost``: the recommended configuration's mean, smallest and largest cost over the traces;
            - ``left_out``: for each trace, which configuration the other traces recommend, and how much more it costs
              on this trace than the cheapest configuration; empty with one trace;
            - ``assumed``: for each other assumption about the ceilings, the recommended configuration's mean cost, the
              smallest mean cost, and the configuration with the smallest mean cost.
        """
        known = self.known_share(self.best)
        of_best = self.costs[self.best]
        return {
            "known_share": known,
            "verdict": "known" if known >= DECIDED_FROM else "likely" if known >= _LIKELY_FROM else "a guess",
            "cost": {"mean": float(of_best.mean()), "smallest": float(of_best.min()), "largest": float(of_best.max())},
            "left_out": self._left_out(),
            "assumed": {name: self._under(costs) for name, costs in self.assumed.items()},
        }

    def rows(self, count: int = 10) -> list[dict[str, Any]]:
        """Return the best configurations, ready for JSON. Configurations whose cost is uncertain come last.

        Args:
            count (int): the largest number of configurations. Default: 10.

        Returns:
            list[dict] with ``configuration`` (its label), ``cost``, ``largest_cost`` (of any trace), the means over
            the traces of ``skipped``, ``too_low``, ``headroom_lost`` (None where no trace has it) and ``known_share``,
            and ``on_front``: whether no other configuration is better in both skipped steps and steps that were too
            low.
        """
        skipped, too_low = (
            np.mean([result.column(name) for result in self.sweeps], axis=0) for name in ("skipped", "too_low")
        )
        front, means, below = pareto_front(skipped, too_low), self.costs.mean(axis=1), self._below()
        return [
            {
                "configuration": self.configurations[index].label,
                "cost": float(means[index]),
                "largest_cost": float(self.costs[index].max()),
                "skipped": float(skipped[index]),
                "too_low": float(too_low[index]),
                "headroom_lost": None if np.isnan(below[index]) else float(below[index]),
                "known_share": self.known_share(index),
                "on_front": bool(front[index]),
            }
            for index in self._order[:count].tolist()
        ]

    def text(self, count: int = 0) -> str:
        """Return the recommendation and how certain it is, as text for a terminal.

        Args:
            count (int): how many of the best configurations to list in a table. Default: 0, no table.
        """
        [best, *equally_good] = self.rows(len(self.configurations))
        refusal, known = self._without_settings(), best["known_share"]
        tried = counted(len(self.configurations), "setting") + ", partly assumed" * (known < DECIDED_FROM)
        itself = [f"The run itself: {self._run_itself()}."] if self.recorded else []
        numbers = [f"Best of {tried}: {best['configuration']} ({_lost(best)}).", *itself, *self.notes]
        settings = self.recommended.update_cell() if self.in_python else self.recommended.scale_sense()
        lines = [refusal, "", *numbers] if refusal else [*numbers, "", settings.rstrip(), ""]
        if len(self.runs) == len(self.traces) == 1 and not refusal:
            lines.append(self._beside_analyze())
        same = ("cost", "known_share")
        if equal := [row["configuration"] for row in equally_good if all(row[name] == best[name] for name in same)]:
            shown = next(n for n in (3, 2, 1) if n == 1 or len(", ".join(equal[:n])) <= _LABELS_WIDTH)
            others_left = f" and {len(equal) - shown} more" * (len(equal) > shown)
            lines.append(f"Equally good: {', '.join(equal[:shown])}{others_left}.")
        if DECIDED_FROM <= known < 1:
            share = f"{min(known, 0.99):.0%}"
            lines.append(f"The log shows for {share} of the steps whether they overflow; for the rest this is assumed.")
        more = ["Ceiling: the largest loss scale without overflow. More settings: --rows 10"]
        return "\n".join([*lines, *(self._details(count) if count else more)])

    def _run_itself(self) -> str:
        """Return a text that says what the recorded runs cost, on average; bounds where a log gives only bounds."""
        bounds = [run.skipped_bounds() for run in self.runs]
        is_cut = sum(map(len, self.runs)) > sum(map(len, self.traces))
        if is_cut or any(fewest != most for fewest, most in bounds):
            fewest, most = (sum(ends) / len(bounds) for ends in zip(*bounds, strict=True))
            highest = math.ceil(most) if all(run.is_numbered for run in self.runs) else None
            return f"{bounds_in_words(math.floor(fewest), highest)} skipped"
        rows = [measures.as_dict() for measures in self.recorded]
        return _lost({name: _mean(rows, name) for name in _SHOWN})

    def _beside_analyze(self) -> str:
        """Return a sentence that says whether ``analyze`` recommends the same settings, and if not, why."""
        if self.advised is None:
            return _NONE_BY_ANALYZE
        if self.advised not in self.configurations:
            return _NOT_TRIED.format(self.advised.label)
        if self.recommended == self.advised:
            return _AS_ANALYZE
        index = self.configurations.index(self.advised)
        rows = [result.measures[index].as_dict() for result in self.sweeps]
        return _CHEAPER.format(_lost({name: _mean(rows, name) for name in _SHOWN}))

    def _details(self, count: int) -> list[str]:
        """Return a table of the best settings, and lines that tell how other ceilings or traces change the choice."""
        rows = [{**row, "known": 100 * row["known_share"]} for row in self.rows(count)]
        lines = ["", text_table(_COLUMNS, rows), ""]
        lines.append("Sorted by the steps that are skipped or too low. Decided: the log shows if a step overflows.")
        lines.append(f"Too low: over {FREE_BITS} bits below the ceiling (the largest loss scale without overflow).")
        lines.append("Bits below: below the ceiling, the mean over the steps that are not skipped.")
        certainty = self.certainty()
        for name, under in certainty["assumed"].items():
            if not np.array_equal(self.assumed[name], self.costs):
                lines.append(
                    f"Skipped or too low of 1000 steps, with {name}: {under['cost']:.2f}; at best "
                    f"{under['smallest']:.2f} ({under['best']})."
                )
        for row in certainty["left_out"]:
            lines.append(
                f"Without trace {row['trace']!r}: {row['recommended']}, which costs {row['above_smallest']:.2f} more "
                "on that trace than the best there."
            )
        return lines

    def _left_out(self) -> list[dict[str, Any]]:
        rows = []
        for index, trace in enumerate(self.traces if len(self.traces) > 1 else ()):
            chosen = int(np.argmin(np.delete(self.costs, index, axis=1).mean(axis=1)))
            above = float(self.costs[chosen, index] - self.costs[:, index].min())
            label = self.configurations[chosen].label
            rows.append({"trace": trace.name, "recommended": label, "above_smallest": above})
        return rows

    def _under(self, costs: NDArray[np.float64]) -> dict[str, Any]:
        means = costs.mean(axis=1)
        return {
            "cost": float(means[self.best]),
            "smallest": float(means.min()),
            "best": self.configurations[int(np.argmin(means))].label,
        }


def tune(
    traces: Sequence[Trace],
    configurations: Sequence[Configuration] | None = None,
    *,
    assumptions: Mapping[str, Sequence[Trace]] | None = None,
    recorded: Sequence[Measures] = (),
    runs: Sequence[RecordedRun] = (),
    advised: Configuration | None = None,
    in_python: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Tuning:
    """Try loss-scaling configurations on traces, and recommend the configuration with the smallest mean cost.

    Of a long trace only the last steps are swept, and the notes say so: 200,000 of them, or 2,000 if the trace has
    bounds at less than 90 % of its steps, so that no settings can follow from it.

    Args:
        traces (Sequence[Trace]): at least one; each counts the same, however long it is.
        configurations (Sequence[Configuration], optional): what to try, of any rules, see
            :func:`~mindformers_adaptive.lab.configuration.grid`. Default: None, the default grid of the
            adaptive rule.
        assumptions (Mapping, optional): by name, the same traces with ceilings assumed in another way. Their costs show
            how much the assumption matters. Default: None, the lowest and the highest ceilings that each trace's bounds
            allow. Where nothing bounds a ceiling from above, the highest is infinity, and then only skipped steps cost.
        recorded (Sequence[Measures]): what the recorded runs of all traces did; settings are recommended only if they
            cost less. Default: none, the traces do not come from runs.
        runs (Sequence[RecordedRun]): these runs. Default: none.
        advised (Configuration, optional): what ``analyze`` recommends for the only run. Default: None.
        in_python (bool): whether the text gives the settings as Python instead of YAML. Default: False.
        progress (Callable, optional): called with the number of traces done, each assumption's counted too.
            Default: None.

    Returns:
        Tuning, with the recommended configuration, how sure it is, and the costs of all.

    Raises:
        ValueError: if there is no trace or no configuration, or a trace has no steps.

    Examples:
        >>> trace = Trace.exact("calm", [2.0**20] * 5000)
        >>> tuning = tune([trace], [Configuration.dynamic(50), Configuration.dynamic(2000)])
        >>> tuning.recommended.label
        'dynamic 2000'
    """
    if len(traces) == 0:
        raise ValueError("'traces' must have at least 1 trace, but got none. Give the trace of a run.")
    tuning_grid = grid("adaptive", **default_grid("adaptive")) if configurations is None else configurations
    whole, traces = traces, [part_to_sweep(trace) for trace in traces]
    notes = tuple(
        f"Only the last {len(part):,} of the {len(trace):,} steps of {trace.name} were replayed."
        for trace, part in zip(whole, traces, strict=True)
        if len(part) < len(trace)
    )
    done, numbers = progress or (lambda _: None), itertools.count(1)
    sweeps = []
    for trace in traces:
        sweeps.append(sweep(tuning_grid, trace))
        done(next(numbers))
    if assumptions is None:
        lowest = [replace(trace, ceiling=trace.lower_bound) for trace in traces]
        highest = [replace(trace, ceiling=just_below(trace.upper_bound)) for trace in traces]
        assumptions = {"the lowest possible ceilings": lowest, "the highest possible ceilings": highest}

    def swept(assumed_traces: Sequence[Trace]) -> Iterator[SweepResult]:
        for trace, result, assumed_trace in zip(traces, sweeps, assumed_traces, strict=True):
            other = assumed_trace.last(len(trace))
            # If an assumption about the ceilings leaves a trace's ceilings unchanged, reuse the sweep over that trace.
            yield result if np.array_equal(trace.ceiling, other.ceiling) else sweep(tuning_grid, other)
            done(next(numbers))

    assumed = {name: _costs(swept(traces_assumed)) for name, traces_assumed in assumptions.items()}
    bounded = float(np.average([bounded_share(trace) for trace in whole], weights=[len(trace) for trace in whole]))
    swept_once = tuple(traces), tuple(tuning_grid), tuple(sweeps), _costs(sweeps), assumed
    return Tuning(*swept_once, notes, tuple(recorded), tuple(runs), advised, bounded, in_python)


def part_to_sweep(trace: Trace) -> Trace:
    """Return the last steps of a trace, as many as a sweep replays."""
    return trace.last(_MOST_STEPS if bounded_share(trace) >= DECIDED_FROM else _MOST_UNDECIDED)


def _costs(sweeps: Iterable[SweepResult]) -> NDArray[np.float64]:
    """Return the cost of each configuration on each trace, float64 of shape (configurations, traces)."""
    return np.array([[cost(measures) for measures in result.measures] for result in sweeps]).T


def _lost(row: Mapping[str, Any]) -> str:
    """Return a text that says how many steps were skipped, how many too low, and the bits below the ceiling."""
    skipped, too_low, bits = (row[name] for name in _SHOWN)
    if bits is None:
        return f"{skipped:g} skipped"
    low = f"{too_low:g} more than {FREE_BITS} bits too low, " * bool(too_low)
    return f"{skipped:g} skipped, {low}{bits:.1f} bits below the ceiling"


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Return the mean of a measure over the rows of a table, leaving out None; None if no row has a number."""
    values = [row[name] for row in rows if row[name] is not None]
    return sum(values) / len(values) if values else None
