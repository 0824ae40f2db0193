"""The analysis of a run as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from mindformers_adaptive.lab.analysis.scale_path import PATH_HEADING, Phase, as_range, path_line
from mindformers_adaptive.text.table import as_power_of_two, text_table

__all__ = ["analysis_text"]

# What fits on a screen.
_RANGES_SHOWN, _PHASES_SHOWN, _PROBLEMS_SHOWN, _PARAMETERS_SHOWN = 20, 30, 10, 10
_WIDTH = 110


def analysis_text(analysis: Mapping[str, Any], path: Sequence[Phase]) -> str:
    """Return an analysis as text; long lists are cut, and the text says so.

    Args:
        analysis (Mapping): :meth:`Analysis.to_dict() <mindformers_adaptive.lab.analysis.analyze.Analysis.to_dict>`.
        path (Sequence[Phase]): the phases of the loss scale.
    """
    parts = [
        _log(analysis),
        [*_steps(analysis), *_overflowed(analysis)],
        _path(path),
        _outcomes(analysis),
        _advice(analysis),
    ]
    return "\n\n".join("\n".join(part) for part in parts)


def _log(analysis: Mapping[str, Any]) -> list[str]:
    log = analysis["log"]
    lines = [
        f"Log       {log['name']} ({log['format']}): {log['lines_read']} lines read, {log['lines_used']} used, "
        f"{log['lines_ignored']} ignored, {len(log['problems'])} of them look like a step's and cannot be read"
    ]
    if log["lines_superseded"]:
        lines.append(
            f"          {log['lines_superseded']} of the used lines were superseded by later ones; see the notes"
        )
    for kind in ("problems", "notes"):
        lines += [f"  {entry}" for entry in _cut(log[kind], _PROBLEMS_SHOWN, f"  ... and {{}} more {kind}")]
    return lines


def _steps(analysis: Mapping[str, Any]) -> list[str]:
    steps, skipped, start, scale = (analysis[key] for key in ("steps", "skipped", "start_up", "loss_scale"))
    dropped = analysis["dropped_by_norm"]
    ranges = [as_range(first, last) for first, last in skipped["ranges"]]
    where = ", ".join(_cut(ranges, _RANGES_SHOWN, "and {} more")) or "none"
    share = f"{skipped['at_least'] / steps['count']:.1%}"
    if skipped["count"] is None:
        share += f" to {skipped['at_most'] / steps['count']:.1%}"
    lines = [
        f"Steps     {steps['count']} ({steps['first']} to {steps['last']}), of which "
        f"{_between(skipped['at_least'], skipped['at_most'])} ({share}) were skipped for an overflow",
        f"          {skipped['known']} known at their position, {skipped['inferred']} inferred; known: {where}",
    ]
    if skipped["at_most"]:
        before, in_first = (
            _between(start[f"{name}_at_least"], start[f"{name}_at_most"])
            for name in ("before_first_applied", "skipped_in_first_steps")
        )
        lines.append(
            f"          {before} before the first applied step, {in_first} in the first {start['first_steps']}"
        )
    if skipped["longest_run_steps"]:
        longest = as_range(*skipped["longest_run_steps"])
        lines.append(f"          longest run of known skips: {skipped['longest_run']} ({longest})")
    if dropped["count"]:
        spans = [as_range(first, last) for first, last in dropped["ranges"]]
        lines.append(
            f"Dropped   {dropped['count']} without an overflow, for the size of their gradients: "
            f"{', '.join(_cut(spans, _RANGES_SHOWN, 'and {} more'))}"
        )
    if skipped["seconds_lost"] is not None:
        lines.append(
            f"Time      {skipped['seconds_lost']:.1f} s lost in {skipped['steps_with_seconds']} skipped step(s) of "
            "known time"
        )
    first, final, smallest, largest = (_power(scale[name]) for name in ("first", "final", "smallest", "largest"))
    return [*lines, f"Scale     {first} at first, {final} at the end; between {smallest} and {largest}"]


def _overflowed(analysis: Mapping[str, Any]) -> list[str]:
    """Whose gradients overflowed, the most frequent first."""
    overflowed = analysis["overflowed_parameters"]
    known, without, counts = overflowed["known_steps"], overflowed["steps_without"], overflowed["counts"]
    if not known:
        return []
    named = [f"{name} ({count})" for name, count in counts.items()]
    lines = [
        f"Overflow  known of {known} skipped step(s): in so many of them the gradient of each Parameter overflowed"
    ]
    listed = ", ".join(_cut(named, _PARAMETERS_SHOWN, "and {} more Parameter(s)"))
    lines += textwrap.wrap(listed, _WIDTH, initial_indent=" " * 10, subsequent_indent=" " * 10)
    if without:
        lines.append(f"          in {without} of them none did: something else overflowed")
    return lines


def _between(fewest: int, most: int) -> str:
    return str(fewest) if fewest == most else f"at least {fewest} and at most {most}"


def _path(path: Sequence[Phase]) -> list[str]:
    if not path:
        return ["The loss scale did not change."]
    lines = list(map(path_line, path))
    if len(lines) > _PHASES_SHOWN:
        half = _PHASES_SHOWN // 2
        lines[half:-half] = [f"   ... {len(lines) - 2 * half} rows ..."]
    return [PATH_HEADING, *lines]


def _outcomes(analysis: Mapping[str, Any]) -> list[str]:
    columns = ["policy", "skipped", "fewest_skipped", "most_skipped", "headroom_lost", "known_share"]
    return [
        "What other policies would have done in this run. At scales the run did not use, an outcome is known only",
        "where the log bounds the ceiling, and assumed elsewhere; 'fewest' and 'most' span the assumptions.",
        "",
        text_table(columns, analysis["outcomes"]),
    ]


def _advice(analysis: Mapping[str, Any]) -> list[str]:
    if not analysis["advice"]:
        lines = ["Nothing to change: the log gives no reason for it."]
        if analysis["skipped"]["count"] is None:
            lines.append("It does not show every step, so windows and hysteresis could not be judged.")
        return lines
    lines = ["What to change"]
    for number, advice in enumerate(analysis["advice"], start=1):
        lines += textwrap.wrap(f"{number}. {advice['change']}", _WIDTH, subsequent_indent="   ")
        lines += textwrap.wrap(advice["reason"], _WIDTH, initial_indent="   ", subsequent_indent="   ")
    if analysis["scale_sense"] is not None:
        certainty = analysis["certainty"]
        lines += [
            "",
            "For MindFormers' YAML, under runner_wrapper. The windows cost least in this run, or are the defaults",
            f"where the run does not show what windows cost. How it would have done: "
            f"{certainty['verdict']}, the log knows {certainty['known_share']:.0%} of its steps.",
            "",
            analysis["scale_sense"].rstrip(),
        ]
    return lines


def _cut(entries: Sequence[str], at_most: int, rest: str) -> list[str]:
    left = len(entries) - at_most
    return [*entries[:at_most], rest.format(left)] if left > 0 else list(entries)


def _power(scale: float | str | None) -> str:
    return "unknown" if scale is None else as_power_of_two(float(scale))
