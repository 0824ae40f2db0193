"""Replay loss-scaling rules on traces, and compare the results."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.lab.measures import FREE_BITS, Measures, measure, overflows
from mindformers_adaptive.lab.running_rule import RunningRule
from mindformers_adaptive.record.thresholds import DECIDED_FROM
from mindformers_adaptive.record.trace import Trace
from mindformers_adaptive.text.table import as_power_of_two, text_table


@dataclass(frozen=True, eq=False)
class Replay:
    """The loss scales, overflows and measures of a rule that was replayed on a trace.

    Attributes:
        loss_scale (NDArray): float64 of shape (steps,), the scale that each step used.
        overflow (NDArray): bool of shape (steps,), whether the step overflowed.
        scale_window (NDArray, optional): int64 of shape (steps,), the window in each step; None for a rule without a
            window.
        measures (Measures): all measures of the replay.
    """

    loss_scale: NDArray[np.float64]
    overflow: NDArray[np.bool_]
    scale_window: NDArray[np.int64] | None
    measures: Measures


def replay(running: RunningRule, trace: Trace) -> Replay:
    """Replay a rule on a trace, starting from its present state.

    If the trace has ``largest_gradient``, the rule gets it for each applied step.

    Args:
        running (RunningRule): is left in the state after the last step.
        trace (Trace): at least one step.

    Returns:
        Replay, with the loss scale, overflow flag and window of each step, and the measures.

    Raises:
        ValueError: if the trace has no steps.

    Examples:
        >>> from mindformers_adaptive.lab.running_rule import start_rule
        >>> trace = Trace.exact("sudden drop", [2.0**16, 2.0**16, 2.0**10, 2.0**10])
        >>> replay(start_rule("fixed", loss_scale_value=2.0**10), trace).measures.headroom_lost
        3.0
    """
    scales, flags, windows = [], [], []
    gradients = [math.nan] * len(trace) if trace.largest_gradient is None else trace.largest_gradient.tolist()
    for ceiling, gradient in zip(trace.ceiling.tolist(), gradients, strict=True):
        scales.append(running.loss_scale)
        flags.append(overflows(running.loss_scale, ceiling))
        windows.append(running.scale_window)
        running.step(flags[-1], None if flags[-1] or math.isnan(gradient) else gradient)
    has_window = running.scale_window is not None
    return Replay(
        np.array(scales), np.array(flags), np.array(windows, np.int64) if has_window else None, measure(trace, scales)
    )


@dataclass(frozen=True)
class Comparison:
    """The results of replaying several rules on several traces, such as the number of skipped steps.

    Attributes:
        traces (tuple[str, ...]): the names of the traces.
        measures (dict[str, tuple[Measures, ...]]): for each rule, its measures on each trace.
        starts (dict[str, float]): for each rule the loss scale that it starts from.
    """

    traces: tuple[str, ...]
    measures: dict[str, tuple[Measures, ...]]
    starts: dict[str, float]

    def means(self) -> dict[str, dict[str, float | None]]:
        """Return, for each rule and measure, the mean over the traces for which the measure is known (not None)."""
        means: dict[str, dict[str, float | None]] = {}
        for rule, on_traces in self.measures.items():
            rows: list[dict[str, Any]] = [measures.as_dict() for measures in on_traces]
            known = {name: [row[name] for row in rows if row[name] is not None] for name in rows[0]}
            means[rule] = {name: sum(values) / len(values) if values else None for name, values in known.items()}
        return means

    def rows(self) -> list[dict[str, Any]]:
        """Return a row of measures for each rule and trace and, with several traces, a row of means; ready for JSON.

        Returns:
            list[dict], with ``rule``, ``start`` (the initial loss scale), ``trace`` (None in a row of means) and all
            names of :class:`~mindformers_adaptive.lab.measures.Measures`.
        """
        means, rows = self.means(), []
        for rule, on_traces in self.measures.items():
            head = {"rule": rule, "start": self.starts[rule]}
            named = [(name, measures.as_dict()) for name, measures in zip(self.traces, on_traces, strict=True)]
            rows += [{**head, "trace": name, **measures} for name, measures in named]
            if len(self.traces) > 1:
                rows.append({**head, "trace": None, **means[rule]})
        return rows

    def text(self, each_trace: bool = False) -> str:
        """Return a text table of skipped steps, steps too low and more for each rule, sorted by the sum of both.

        Args:
            each_trace (bool): whether to add a row for each trace; with several traces, rows of means are always shown.
        """
        rows = [
            {
                **row,
                "trace": row["trace"] or "(mean)",
                "start": as_power_of_two(row["start"]),
                "known": 100 * row["known_share"],
            }
            for row in self.rows()
            if each_trace or len(self.traces) == 1 or row["trace"] is None
        ]
        rows.sort(key=lambda row: (row["skipped"] + row["too_low"], row["skipped"], row["headroom_lost"] or 0.0))
        # A column whose values are all equal is left out, but for the measures by which rules are compared.
        shown = {key for key in _COLUMNS if len({row[key] for row in rows}) > 1} | _ALWAYS
        table = text_table({key: header for key, header in _COLUMNS.items() if key in shown}, rows)
        low = f" or over {FREE_BITS} bits too low" * any(row["too_low"] for row in rows)
        lines = [self._winners(low, list(dict.fromkeys(row["rule"] for row in rows)))]
        if len(set(self.starts.values())) == 1:
            lines.append(f"All rules start at {rows[0]['start']}.")
        notes = f"Sorted by the steps that are skipped{low}. Ceiling: the largest loss scale without overflow.\n"
        notes += f"Bits below: below the ceiling, on average; down to {FREE_BITS}, FP16 loses next to nothing. "
        notes += "Too low: more."
        return "\n\n".join(["\n".join(lines), table, notes])

    def _winners(self, low: str, order: Sequence[str]) -> str:
        """Return a sentence that names the rules with the fewest bad steps, if the logs show enough of each rule."""
        shares = {
            name: sum(measures.known_share * measures.steps for measures in on_traces) / sum(m.steps for m in on_traces)
            for name, on_traces in self.measures.items()
        }
        name, share = min(shares.items(), key=lambda pair: pair[1])
        if share < DECIDED_FROM:
            return (
                f"No rule is named best: of the steps of {name}, the log shows for {share:.0%} whether they overflow, "
                f"and {DECIDED_FROM:.0%} are needed. The table assumes the rest."
            )
        bad = {name: (mean["skipped"] or 0) + (mean["too_low"] or 0) for name, mean in self.means().items()}
        fewest = [name for name in order if bad[name] == min(bad.values())]
        names = f"{', '.join(fewest[:3])}{' and others' * (len(fewest) > 3)}"
        return f"Fewest steps skipped{low}: {'the same for all rules' if len(fewest) == len(bad) > 1 else names}."


_COLUMNS = {
    "rule": "rule",
    "trace": "trace",
    "start": "start",
    "skipped": "skipped",
    "steps_to_first_applied": "of them at the start",
    "too_low": "too low",
    "headroom_lost": "bits below",
    "known": "decided (%)",
}
_ALWAYS = {"rule", "skipped", "too_low", "headroom_lost"}


def compare(
    rules: Mapping[str, Callable[[], RunningRule]],
    traces: Sequence[Trace],
    *,
    progress: Callable[[int], None] | None = None,
) -> Comparison:
    """Replay each loss-scaling rule on each trace, and return the measures of all replays.

    Args:
        rules (Mapping): for each rule name, a function that makes the rule in its first state. It is called once
            per trace, and once more for the initial loss scale.
        traces (Sequence[Trace]): at least one.
        progress (Callable, optional): called with the number of replays done; there are rules * traces.
            Default: None.

    Returns:
        Comparison, with the measures of each rule on each trace.

    Raises:
        ValueError: if there is no rule or no trace, or a trace has no steps.

    Examples:
        >>> from mindformers_adaptive.lab.running_rule import start_rule
        >>> compare({"torch": lambda: start_rule("torch")}, [Trace.exact("calm", [2.0**16] * 3000)]).starts["torch"]
        65536.0
    """
    for name, entries in (("rules", rules), ("traces", traces)):
        if len(entries) == 0:
            raise ValueError(f"'{name}' must have at least 1 entry, but got none. Give at least 1 rule and 1 trace.")
    numbers = itertools.count(1)

    def measured(make: Callable[[], RunningRule], trace: Trace) -> Measures:
        measures = replay(make(), trace).measures
        if progress is not None:
            progress(next(numbers))
        return measures

    names = tuple(trace.name for trace in traces)
    starts = {name: float(make().loss_scale) for name, make in rules.items()}
    measures = {name: tuple(measured(make, trace) for trace in traces) for name, make in rules.items()}
    return Comparison(names, measures, starts)
