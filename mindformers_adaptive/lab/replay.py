"""Replay loss-scaling rules on traces, and compare the results."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.lab.measures import (
    FREE_BITS,
    LARGEST_LOSS_SCALE,
    Measures,
    measure,
    overflow_flags,
    overflows,
    require_steps,
)
from mindformers_adaptive.lab.running_rule import RunningRule
from mindformers_adaptive.record.thresholds import DECIDED_FROM
from mindformers_adaptive.record.trace import Trace
from mindformers_adaptive.rules.lanes import Lanes
from mindformers_adaptive.rules.rule import Rule
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
        final_state (dict): the rule's state after the last step, with ``loss_scale`` and ``scale_window``.
    """

    loss_scale: NDArray[np.float64]
    overflow: NDArray[np.bool_]
    scale_window: NDArray[np.int64] | None
    measures: Measures
    final_state: dict[str, Any]


def replay(running: RunningRule, trace: Trace) -> Replay:
    """Replay a rule on a trace, starting from its present state.

    If the trace has ``largest_gradient``, the rule gets it for each applied step.

    Args:
        running (RunningRule): is left in the state after the last step.
        trace (Trace): at least one step.

    Returns:
        Replay, with the loss scale, window and overflow flag of each step, the measures and the last state.

    Raises:
        ValueError: if the trace has no steps.

    Examples:
        >>> from mindformers_adaptive.lab.running_rule import start_rule
        >>> trace = Trace.exact("sudden drop", [2.0**16, 2.0**16, 2.0**10, 2.0**10])
        >>> replay(start_rule("fixed", loss_scale_value=2.0**10), trace).measures.headroom_lost
        3.0
    """
    if isinstance(getattr(running, "rule", None), Rule):
        scales, windows = _replay_lane(running, trace)
    else:
        scales, windows = _replay_step_by_step(running, trace)
    return Replay(
        scales[:-1],
        overflow_flags(scales[:-1], trace.ceiling),
        None if windows is None else windows[:-1],
        measure(trace, scales, windows),
        {"loss_scale": running.loss_scale, "scale_window": running.scale_window, **running.state()},
    )


def _replay_lane(running: RunningRule, trace: Trace) -> tuple[NDArray[np.float64], NDArray[np.int64] | None]:
    """Return the loss scales and the windows of each step and after the last step, from a replay in a lane."""
    require_steps(trace)
    lanes, steps = Lanes(running.rule, [running.current]), len(trace)
    limits = np.minimum(trace.ceiling, LARGEST_LOSS_SCALE)
    gradients = np.full(steps, math.nan) if trace.largest_gradient is None else trace.largest_gradient
    scales = np.empty((steps + 1, 1))
    windows = None if lanes.scale_window is None else np.empty((steps + 1, 1), np.int64)
    with lanes.watching():
        for step in range(steps + 1):
            if step:
                # Find overflows as overflow_flags() does. No check for a scale of 0 is needed, because a rule keeps the
                # scale above 0.
                lanes.advance(~(scales[step - 1] <= limits[step - 1]), gradients[step - 1 : step])
            scales[step] = lanes.loss_scale
            if windows is not None:
                windows[step] = lanes.scale_window
    [running.current] = lanes.states()
    return scales[:, 0], None if windows is None else windows[:, 0]


def _replay_step_by_step(running: RunningRule, trace: Trace) -> tuple[NDArray[np.float64], NDArray[np.int64] | None]:
    scales, windows = [float(running.loss_scale)], [running.scale_window]
    gradients = [math.nan] * len(trace) if trace.largest_gradient is None else trace.largest_gradient.tolist()
    for ceiling, gradient in zip(trace.ceiling.tolist(), gradients, strict=True):
        overflow = overflows(scales[-1], ceiling)
        scales.append(float(running.step(overflow, None if overflow or math.isnan(gradient) else gradient)))
        windows.append(running.scale_window)
    return np.array(scales), None if windows[0] is None else np.array(windows, np.int64)


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
            there = {name: [row[name] for row in rows if row[name] is not None] for name in rows[0]}
            means[rule] = {name: sum(values) / len(values) if values else None for name, values in there.items()}
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

    def text(self, each_trace: bool = False, details: bool = False) -> str:
        """Return a text table of skipped steps, steps too low and more for each rule, sorted by the sum of both.

        Args:
            each_trace (bool): whether to add a row for each trace; with several traces, rows of means are always shown.
            details (bool): whether to add a second table with the measures that the first table leaves out.
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
        tables = [_table(_COLUMNS, rows), *([_table(_MORE_COLUMNS, rows)] if details else [])]
        low = f" or over {FREE_BITS} bits too low" * any(row["too_low"] for row in rows)
        lines = [self._winners(low, list(dict.fromkeys(row["rule"] for row in rows)))]
        if len(set(self.starts.values())) == 1:
            lines.append(f"All rules start at {rows[0]['start']}.")
        notes = f"Sorted by the steps that are skipped{low}. Ceiling: the largest loss scale without overflow.\n"
        notes += f"Bits below: below the ceiling, on average; down to {FREE_BITS}, FP16 loses next to nothing. "
        notes += "Too low: more."
        return "\n\n".join(["\n".join(lines), *tables, notes])

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
                f"and {DECIDED_FROM:.0%} are needed. The table assumes the rest (--ceilings)."
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
}
_MORE_COLUMNS = {
    "rule": "rule",
    "trace": "trace",
    "longest_skip_run": "most skips in a row",
    "seconds_lost": "time lost (s)",
    "scale_changes": "scale changes",
    "window_changes": "window changes",
    "known": "decided (%)",
}


def _table(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a text table without columns whose values are all equal. The columns in ``always`` are never left out."""
    always = {"rule", "skipped", "too_low", "headroom_lost", "known"}
    differing = {key for key in columns if len({row[key] for row in rows}) > 1}
    return text_table({key: columns[key] for key in columns if key in always | differing}, rows)


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
