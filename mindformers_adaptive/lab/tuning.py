"""Find the configuration of loss scaling that costs least on recorded or made-up traces, and say how sure that is."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.lab.configuration import Configuration, default_grid, grid
from mindformers_adaptive.lab.measures import DEFAULT_EXCHANGE_RATE, cost
from mindformers_adaptive.lab.replay import SweepResult, pareto_front, sweep
from mindformers_adaptive.lab.trace import Trace, just_below
from mindformers_adaptive.rules import RULES
from mindformers_adaptive.rules.checks import require_number
from mindformers_adaptive.text.table import text_table

__all__ = ["MOST_STEPS_SWEPT", "Tuning", "tune"]

# Shares of outcomes that are known, from which on a recommendation is called likely and known. They are a judgement:
# below the first, most of what was counted was assumed.
_LIKELY_FROM = 0.5
_KNOWN_FROM = 0.9
_FOLLOWING = " or ".join(rule.title for rule in RULES.values() if rule.signals)

# A sweep of 900 settings over more steps takes minutes. Settings are for the run that goes on, so the last steps count.
MOST_STEPS_SWEPT = 200_000

_NO_SETTINGS = (
    "No settings to paste: what is known of the traces does not carry any. Give more of them, or records with largest "
    f"gradients, as {_FOLLOWING} writes them; 'find' names a start for any training.\n"
)


@dataclass(frozen=True)
class Tuning:
    """What a search found.

    Attributes:
        traces (tuple[Trace, ...]): what was tried on.
        configurations (tuple[Configuration, ...]): what was tried.
        sweeps (tuple[SweepResult, ...]): on each trace.
        exchange_rate (float): see :func:`~mindformers_adaptive.lab.measures.cost`.
        costs (NDArray): float64 of shape (configurations, traces), see
            :func:`~mindformers_adaptive.lab.measures.cost`.
        assumed (dict[str, NDArray]): the costs under other assumptions about the ceilings, by the assumption's name.
        notes (tuple[str, ...]): which traces were swept in part only.
    """

    traces: tuple[Trace, ...]
    configurations: tuple[Configuration, ...]
    sweeps: tuple[SweepResult, ...]
    exchange_rate: float
    costs: NDArray[np.float64]
    assumed: dict[str, NDArray[np.float64]]
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> int:
        """The place of the configuration with the smallest mean cost over the traces; of equals the first."""
        return int(np.argmin(self.costs.mean(axis=1)))

    @property
    def recommended(self) -> Configuration:
        """The configuration with the smallest mean cost over the traces."""
        return self.configurations[self.best]

    @property
    def settings_to_paste(self) -> str | None:
        """The recommended configuration as a section of YAML; None where it is a guess."""
        return None if self.known_share(self.best) < _LIKELY_FROM else self.recommended.scale_sense()

    def known_share(self, place: int) -> float:
        """Return the share of a configuration's steps whose outcome the traces know, over all traces."""
        steps = [len(trace) for trace in self.traces]
        return float(np.average([result.measures[place].known_share for result in self.sweeps], weights=steps))

    def certainty(self) -> dict[str, Any]:
        """Return how far the recommendation can be trusted, ready for JSON.

        Returns:
            dict with

            - ``known_share``: the share of the recommended configuration's steps whose outcome is known, not assumed;
            - ``verdict``: ``"known"`` from 0.9 on, ``"likely"`` from 0.5 on, else ``"a guess"``;
            - ``cost``: the recommended configuration's mean, smallest and largest cost over the traces;
            - ``left_out``: for each trace, which configuration the other traces recommend, and its cost on this one
              above the smallest there; empty with one trace;
            - ``assumed``: for each other assumption about the ceilings the recommended configuration's mean cost, the
              smallest of all, and which configuration has it.
        """
        known = self.known_share(self.best)
        of_best = self.costs[self.best]
        return {
            "known_share": known,
            "verdict": "known" if known >= _KNOWN_FROM else "likely" if known >= _LIKELY_FROM else "a guess",
            "cost": {"mean": float(of_best.mean()), "smallest": float(of_best.min()), "largest": float(of_best.max())},
            "left_out": self._left_out(),
            "assumed": {name: self._under(costs) for name, costs in self.assumed.items()},
        }

    def rows(self, count: int = 10) -> list[dict[str, Any]]:
        """Return the configurations of the smallest mean cost, best first, ready for JSON.

        Args:
            count (int): at most so many. Default: 10.

        Returns:
            list[dict] with ``configuration`` (its label), ``cost``, ``largest_cost`` (of any trace), the means over
            the traces of ``skipped``, ``headroom_lost`` (None where no trace has it) and ``known_share``, and
            ``on_front``: whether no other configuration is better in both skipped steps and headroom.
        """
        skipped = np.mean([result.column("skipped") for result in self.sweeps], axis=0)
        # The mean of those traces that have one.
        headroom = np.array([result.column("headroom_lost") for result in self.sweeps])
        headroom = np.ma.masked_invalid(headroom).mean(axis=0).filled(np.nan)  # type: ignore[no-untyped-call]
        front = pareto_front(skipped, headroom)
        means = self.costs.mean(axis=1)
        return [
            {
                "configuration": self.configurations[place].label,
                "cost": float(means[place]),
                "largest_cost": float(self.costs[place].max()),
                "skipped": float(skipped[place]),
                "headroom_lost": None if np.isnan(headroom[place]) else float(headroom[place]),
                "known_share": self.known_share(place),
                "on_front": bool(front[place]),
            }
            for place in np.argsort(means, kind="stable")[:count].tolist()
        ]

    def text(self, count: int = 10) -> str:
        """Return the best configurations as a table, the recommendation and how sure it is, for a terminal."""
        certainty = self.certainty()
        names = ["configuration", "front", "cost", "largest_cost", "skipped", "headroom_lost", "known_share"]
        marked_rows = [{**row, "front": "*" if row["on_front"] else ""} for row in self.rows(count)]
        lines = [
            f"{len(self.configurations)} configurations on {len(self.sweeps)} trace(s); cost: skipped steps in 1000, "
            f"and {self.exchange_rate:g} for each bit of headroom lost",
            *self.notes,
            "",
            text_table(names, marked_rows),
            "",
            self.settings_to_paste or _NO_SETTINGS,
            f"How sure: {certainty['verdict']}. The traces know the outcome of {certainty['known_share']:.1%} of the "
            "recommended configuration's steps; of the others it is assumed.",
            f"Its cost on the traces: {certainty['cost']['smallest']:.2f} to {certainty['cost']['largest']:.2f}.",
        ]
        for name, under in certainty["assumed"].items():
            if not np.array_equal(self.assumed[name], self.costs):
                lines.append(
                    f"With {name}: {under['cost']:.2f}; the smallest is {under['smallest']:.2f} ({under['best']})."
                )
        for row in certainty["left_out"]:
            lines.append(
                f"Without trace {row['trace']!r}: {row['recommended']}, which costs {row['above_smallest']:.2f} more "
                "on that trace than the best there."
            )
        return "\n".join(lines)

    def _left_out(self) -> list[dict[str, Any]]:
        rows = []
        for place, trace in enumerate(self.traces if len(self.traces) > 1 else ()):
            chosen = int(np.argmin(np.delete(self.costs, place, axis=1).mean(axis=1)))
            above = float(self.costs[chosen, place] - self.costs[:, place].min())
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
    exchange_rate: float = DEFAULT_EXCHANGE_RATE,
    assumptions: Mapping[str, Sequence[Trace]] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Tuning:
    """Try configurations on traces and recommend the one of the smallest mean cost.

    Of a trace with more than ``MOST_STEPS_SWEPT`` steps only the last ones are swept, and the notes say so.

    Args:
        traces (Sequence[Trace]): at least one; each counts the same, however long it is.
        configurations (Sequence[Configuration], optional): what to try, of any rules, see
            :func:`~mindformers_adaptive.lab.configuration.grid`. Default: None, the default grid of the
            adaptive rule.
        exchange_rate (float): see :func:`~mindformers_adaptive.lab.measures.cost`. Default: 1.0.
        assumptions (Mapping, optional): by a name for it, the same traces with ceilings assumed in another way; the
            configurations' costs on them show what the assumption matters. Default: None, the lowest and the highest
            ceilings that each trace's bounds allow. Where nothing bounds a ceiling from above, the highest is
            infinity, and then only skipped steps cost.
        progress (Callable, optional): called with the number of traces done, each assumption's counted too.
            Default: None.

    Returns:
        Tuning, with the recommended configuration, how sure it is, and the costs of all.

    Raises:
        TypeError: if ``exchange_rate`` is not a number.
        ValueError: if there is no trace or no configuration, a trace has no steps, or ``exchange_rate`` is negative
            or not finite.

    Examples:
        >>> trace = Trace.exact("calm", [2.0**20] * 5000)
        >>> tuning = tune([trace], [Configuration.dynamic(50), Configuration.dynamic(2000)])
        >>> tuning.recommended.label
        'dynamic 2000'
    """
    rate = require_number(
        "exchange_rate",
        exchange_rate,
        "a finite number of at least 0",
        lambda number: number >= 0,
        "Give the skipped steps in 1000 that a bit of headroom is worth.",
    )
    if len(traces) == 0:
        raise ValueError("'traces' must have at least 1 trace, but got none. There is nothing to tune on.")
    tried = grid("adaptive", **default_grid("adaptive")) if configurations is None else configurations
    notes = tuple(
        f"Only the last {MOST_STEPS_SWEPT:,} of the {len(trace):,} steps of {trace.name} were swept."
        for trace in traces
        if len(trace) > MOST_STEPS_SWEPT
    )
    traces = [trace.last(MOST_STEPS_SWEPT) for trace in traces]
    done, numbers = progress or (lambda _: None), itertools.count(1)
    sweeps = []
    for trace in traces:
        sweeps.append(sweep(tried, trace))
        done(next(numbers))
    if assumptions is None:
        assumptions = {
            "the lowest possible ceilings": [replace(one, ceiling=one.lower_bound) for one in traces],
            "the highest possible ceilings": [replace(one, ceiling=just_below(one.upper_bound)) for one in traces],
        }

    def swept(others: Sequence[Trace]) -> Iterator[SweepResult]:
        for trace, found, assumed_trace in zip(traces, sweeps, others, strict=True):
            other = assumed_trace.last(MOST_STEPS_SWEPT)
            # Reuse the sweep if both assumptions give the same ceilings.
            yield found if np.array_equal(trace.ceiling, other.ceiling) else sweep(tried, other)
            done(next(numbers))

    assumed = {name: _costs(swept(others), rate) for name, others in assumptions.items()}
    return Tuning(tuple(traces), tuple(tried), tuple(sweeps), rate, _costs(sweeps, rate), assumed, notes)


def _costs(sweeps: Iterable[SweepResult], exchange_rate: float) -> NDArray[np.float64]:
    """The costs of configurations, float64 of shape (configurations, traces)."""
    return np.array([[cost(one, exchange_rate) for one in result.measures] for result in sweeps]).T
