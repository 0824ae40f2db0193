"""Replay policies on traces, and compare them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mindformers_adaptive.lab.policies import Policy
from mindformers_adaptive.lab.replay.measures import Measures, measure, overflows, require_steps
from mindformers_adaptive.lab.replay.sweep import replay_side_by_side
from mindformers_adaptive.lab.traces.trace import Trace
from mindformers_adaptive.rules.text_rule import TextRule
from mindformers_adaptive.text.table import text_table

__all__ = ["Comparison", "Replay", "compare", "pareto_front", "replay"]


@dataclass(frozen=True, eq=False)
class Replay:
    """What a policy did on a trace.

    Attributes:
        loss_scale (NDArray): float64 of shape (steps,), the scale that each step used.
        overflow (NDArray): bool of shape (steps,), whether it overflowed.
        scale_window (NDArray, optional): int64 of shape (steps,), the window in force; None for a policy without one.
        measures (Measures): all measures.
        final_state (dict): the policy's state after the last step, with ``loss_scale`` and ``scale_window``.
    """

    loss_scale: NDArray[np.float64]
    overflow: NDArray[np.bool_]
    scale_window: NDArray[np.int64] | None
    measures: Measures
    final_state: dict[str, Any]


def replay(policy: Policy, trace: Trace) -> Replay:
    """Take a policy through a trace, from the state that it is in.

    Where the trace has ``largest_gradient``, the policy is given it for each step that is applied.

    Args:
        policy (Policy): is left in the state after the last step.
        trace (Trace): at least one step.

    Raises:
        ValueError: if the trace has no steps.

    Examples:
        >>> from mindformers_adaptive.lab.policies import make_policy
        >>> trace = Trace.exact("sudden drop", [2.0**16, 2.0**16, 2.0**10, 2.0**10])
        >>> replay(make_policy("fixed", loss_scale_value=2.0**10), trace).measures.headroom_lost
        3.0
    """
    require_steps(trace)
    scales, windows, flags = [float(policy.loss_scale)], [policy.scale_window], []
    gradients = [math.nan] * len(trace) if trace.largest_gradient is None else trace.largest_gradient.tolist()
    for ceiling, gradient in zip(trace.ceiling.tolist(), gradients, strict=True):
        flags.append(overflows(scales[-1], ceiling))
        scales.append(float(policy.step(flags[-1], None if flags[-1] or math.isnan(gradient) else gradient)))
        windows.append(policy.scale_window)
    window = None if windows[0] is None else np.array(windows, np.int64)
    return Replay(
        np.array(scales[:-1]),
        np.array(flags),
        None if window is None else window[:-1],
        measure(trace, scales, window),
        {"loss_scale": scales[-1], "scale_window": windows[-1], **policy.state()},
    )


@dataclass(frozen=True)
class Comparison:
    """The measures of several policies on several traces.

    Attributes:
        traces (tuple[str, ...]): the names of the traces.
        measures (dict[str, tuple[Measures, ...]]): for each policy its measures on each trace.
    """

    traces: tuple[str, ...]
    measures: dict[str, tuple[Measures, ...]]

    def means(self) -> dict[str, dict[str, float | None]]:
        """Return for each policy the mean of each measure over the traces that have it, by name."""
        return {policy: _means(on_traces) for policy, on_traces in self.measures.items()}

    def pareto_front(self) -> list[str]:
        """Return the policies for which no other is better in both skipped steps and headroom, in the mean."""
        means = self.means()
        # An array has nan for None.
        skipped, headroom = np.array([(mean["skipped"], mean["headroom_lost"]) for mean in means.values()], float).T
        front = pareto_front(skipped, headroom)
        return [policy for policy, on_front in zip(means, front.tolist(), strict=True) if on_front]

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each policy and trace and, with several traces, one for the mean; ready for JSON.

        Returns:
            list[dict], with ``policy``, ``trace`` (None in a row of means), ``on_front`` (of the Pareto front of
            the means) and all names of :class:`~mindformers_adaptive.lab.replay.measures.Measures`.
        """
        front, means, rows = self.pareto_front(), self.means(), []
        for policy, on_traces in self.measures.items():
            head = {"policy": policy, "on_front": policy in front}
            named = [(name, measures.as_dict()) for name, measures in zip(self.traces, on_traces, strict=True)]
            rows += [{**head, "trace": name, **measures} for name, measures in named]
            if len(self.traces) > 1:
                rows.append({**head, "trace": None, **means[policy]})
        return rows

    def text(self, each_trace: bool = True) -> str:
        """Return the rows as a table; a ``*`` marks the Pareto front of skipped steps against headroom.

        Args:
            each_trace (bool): with a row for each trace; with several traces there are rows of means in any case.
        """
        rows = [
            {**row, "trace": row["trace"] or "(mean)", "front": "*" if row["on_front"] else ""}
            for row in self.rows()
            if each_trace or len(self.traces) == 1 or row["trace"] is None
        ]
        # The oracle's regret of headroom is the headroom lost. Columns of zeros are left out; but a known share of 0
        # says that every outcome was assumed.
        names = [
            field.name
            for field in fields(Measures)
            if field.name != "headroom_regret"
            and (field.name in ("skipped", "headroom_lost", "known_share") or any(row[field.name] for row in rows))
        ]
        return text_table(["policy", "trace", "front", *names], rows)


def compare(
    policies: Mapping[str, Callable[[], Policy]],
    traces: Sequence[Trace],
    *,
    progress: Callable[[int], None] | None = None,
) -> Comparison:
    """Replay each policy on each trace.

    Args:
        policies (Mapping): by name, what makes the policy in its first state. It is called once for each trace.
        traces (Sequence[Trace]): at least one.
        progress (Callable, optional): called with the number of replays done; there are policies * traces.
            Default: None.

    Raises:
        ValueError: if there is no policy or no trace, or a trace has no steps.

    Examples:
        >>> from functools import partial
        >>> from mindformers_adaptive.lab.policies import make_policy
        >>> policies = {name: partial(make_policy, name) for name in ("adaptive", "torch")}
        >>> comparison = compare(policies, [Trace.exact("calm", [2.0**16] * 3000)])
        >>> print(comparison.text())  # doctest: +SKIP
    """
    for name, given in (("policies", policies), ("traces", traces)):
        if len(given) == 0:
            raise ValueError(f"'{name}' must have at least 1 entry, but got none. There is nothing to compare.")
    numbers = itertools.count(1)

    def measured(make: Callable[[], Policy]) -> Iterator[Measures]:
        made = [make() for _ in traces]
        rules: list[Any] = [policy.rule for policy in made]
        states = [policy.current for policy in made]
        # A text takes as long for many runs as for one.
        if isinstance(rules[0], TextRule) and len({len(trace) for trace in traces}) == 1:
            found = (measures for measures, _ in replay_side_by_side(rules, states, traces))
        else:
            found = (replay(policy, trace).measures for policy, trace in zip(made, traces, strict=True))
        for measures in found:
            yield measures
            if progress is not None:
                progress(next(numbers))

    names = tuple(trace.name for trace in traces)
    return Comparison(names, {name: tuple(measured(make)) for name, make in policies.items()})


def pareto_front(skipped: ArrayLike, headroom: ArrayLike) -> NDArray[np.bool_]:
    """Return which of several results no other one beats: is at least as good in both and better in one.

    Args:
        skipped (ArrayLike): shape (results,).
        headroom (ArrayLike): shape (results,); nan, no step to measure by, counts as worse than any number.

    Returns:
        NDArray, bool of shape (results,).

    Examples:
        >>> pareto_front([1, 2, 3, 1], [5.0, 1.0, 2.0, 5.0]).tolist()
        [True, True, False, True]
    """
    first = np.asarray(skipped, np.float64)
    second = np.nan_to_num(np.asarray(headroom, np.float64), nan=np.inf, posinf=np.inf)
    front = np.zeros(first.shape, np.bool_)
    best = math.inf
    # Sorted by the first and then the second, a result is beaten by an earlier one or by none.
    order = np.lexsort((second, first))
    previous = None
    for place in order.tolist():
        point = (first[place], second[place])
        front[place] = point[1] < best or point == previous or previous is None
        if front[place]:
            best, previous = point[1], point
    return front


def _means(on_traces: Sequence[Measures]) -> dict[str, float | None]:
    rows = [measures.as_dict() for measures in on_traces]
    means: dict[str, float | None] = {}
    for name in rows[0]:
        there = [float(value) for value in (row[name] for row in rows) if value is not None]
        means[name] = sum(there) / len(there) if there else None
    return means
