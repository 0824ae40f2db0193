"""An analysis in words, for a terminal; long lists are cut, and the text says so."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from mindformers_adaptive.lab.scale_path import Phase, as_range, path_lines
from mindformers_adaptive.lab.unused_headroom import shown_in_words
from mindformers_adaptive.text.table import as_power_of_two, counted, text_table

__all__ = ["analysis_text"]

# What fits on a screen.
_RANGES_SHOWN, _PHASES_SHOWN, _PROBLEMS_SHOWN = 20, 30, 10
_WIDTH = 110
_INDENTED: dict[str, Any] = {"initial_indent": " " * 10, "subsequent_indent": " " * 10}

_JUMP = (
    "A jump is a change of the scale that no step explains: the run was restarted with another scale, or steps are "
    "missing. In a log that does not state what each step did, it may also be one that no rule with one factor makes: "
    "if the run followed another rule, name it ('analyze --policy', or read_log(rule=...))."
)


def analysis_text(analysis: Mapping[str, Any]) -> str:
    """Return what :meth:`~mindformers_adaptive.lab.analysis.Analysis.to_dict` returned as text."""
    parts = [_log(analysis["log"]), _steps(analysis)]
    parts += [_path(analysis["loss_scale"]["phases"]), _outcomes(analysis["outcomes"]), _advice(analysis)]
    return "\n\n".join("\n".join(part) for part in parts)


def _log(log: Mapping[str, Any]) -> list[str]:
    read, damaged = counted(log["lines_read"], "line"), counted(len(log["problems"]), "damaged line")
    lines = [
        f"Log       {log['name']} ({log['format']}): {read} read, {log['lines_used']} used, "
        f"{log['lines_ignored']} ignored, {damaged}"
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
    shown = analysis["shown_by_gradients"]
    dropped = analysis["dropped_by_norm"]
    share = f"{skipped['at_least'] / steps['count']:.1%}"
    if skipped["count"] is None:
        share += f" to {skipped['at_most'] / steps['count']:.1%}"
    before, in_first = _between(start, "before_first_applied_"), _between(start, "skipped_in_first_steps_")
    first, final, smallest, largest = (
        "unknown" if scale[name] is None else as_power_of_two(float(scale[name]))
        for name in ("first", "final", "smallest", "largest")
    )
    lines = [
        f"Steps     {steps['count']} ({steps['first']} to {steps['last']}), of which {_between(skipped)} ({share}) "
        "were skipped for an overflow",
        f"          {skipped['known']} known at their position, {skipped['inferred']} inferred; known: "
        f"{_listed(skipped)}",
        skipped["holds_if"] and textwrap.fill(f"These counts hold if {skipped['holds_if']}", _WIDTH, **_INDENTED),
        skipped["at_most"]
        and f"          {before} before the first applied step, {in_first} in the first {start['first_steps']}",
        skipped["longest_run"]
        and f"          longest run of known skips: {skipped['longest_run']} "
        f"({as_range(*skipped['longest_run_steps'])})",
        dropped["count"]
        and f"Dropped   {dropped['count']} without an overflow, because of their gradient norm: {_listed(dropped)}",
        skipped["seconds_lost"] is not None
        and f"Time      {skipped['seconds_lost']:.1f} s lost in {skipped['steps_with_seconds']} skipped step(s) of "
        "known time",
        f"Scale     {first} at first, {final} at the end; between {smallest} and {largest}",
        shown and textwrap.fill(f"Gradients {shown_in_words(shown)}", _WIDTH, subsequent_indent=" " * 10),
    ]
    return list(filter(None, lines))


def _between(numbers: Mapping[str, Any], name: str = "") -> str:
    fewest, most = numbers[f"{name}at_least"], numbers[f"{name}at_most"]
    return str(fewest) if fewest == most else f"at least {fewest} and at most {most}"


def _listed(steps: Mapping[str, Any]) -> str:
    return ", ".join(_cut([as_range(*one) for one in steps["ranges"]], _RANGES_SHOWN, "and {} more")) or "none"


def _path(phases: Sequence[Mapping[str, Any]]) -> list[str]:
    if not phases:
        return ["The loss scale did not change."]
    heading, *lines = path_lines([Phase(**phase) for phase in phases])
    if len(lines) > _PHASES_SHOWN:
        half = _PHASES_SHOWN // 2
        lines[half:-half] = [f"   ... {len(lines) - 2 * half} rows ..."]
    if any(phase["kind"] == "jump" for phase in phases):
        lines += textwrap.wrap(_JUMP, _WIDTH, initial_indent="   ", subsequent_indent="   ")
    return [heading, *lines]


def _outcomes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    columns = ["policy", "skipped", "fewest_skipped", "most_skipped", "headroom_lost", "known_share"]
    return [
        "What other policies would have done in this run. At scales the run did not use, an outcome is known only",
        "where the log bounds the ceiling, and assumed elsewhere; 'fewest' and 'most' span the assumptions.",
        "",
        text_table(columns, rows),
    ]


def _advice(analysis: Mapping[str, Any]) -> list[str]:
    if not analysis["advice"]:
        lines = ["Nothing to change: the log gives no reason for it."]
        if analysis["skipped"]["count"] is None:
            lines.append("It does not show every step, so windows and hysteresis could not be judged.")
        return lines
    lines = ["What to change"]
    for number, advice in enumerate(analysis["advice"], start=1):
        change, *commands = advice["change"].split("\n")
        lines += textwrap.wrap(f"{number}. {change}", _WIDTH, subsequent_indent="   ")
        # Whole, so that it can be pasted.
        lines += [f"   {command}" for command in commands]
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
