"""Write the analysis of a run as text for a terminal: the verdict, what to change, and optional details."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from mindformers_adaptive.lab.scale_path import Phase, as_range, path_lines
from mindformers_adaptive.record.run_folder import find_command
from mindformers_adaptive.record.scale_summary import bounds_in_words
from mindformers_adaptive.record.thresholds import HELD
from mindformers_adaptive.text.table import as_power_of_two, counted

# Show at most this many step ranges, phases and problems, and wrap lines of text at this width in characters.
_RANGES_SHOWN, _PHASES_SHOWN, _PROBLEMS_SHOWN = 20, 30, 10
_WIDTH = 100

# What comes before settings to paste.
PASTE = "Paste these settings under runner_wrapper:"
PASTE_IN_PYTHON = "Make the update cell with these settings:"

_JUMP = (
    "A jump is a change of the scale that no step explains: the run was restarted with another scale, or steps are "
    "missing. In a log that does not state what each step did, the rule may also move the scale by another factor."
)


def analysis_text(analysis: Mapping[str, Any], details: bool) -> str:
    """Return an analysis as text, given the dict of :meth:`~mindformers_adaptive.lab.analysis.Analysis.to_dict`."""
    first, *sentences = analysis["verdict"]
    parts = [[first, *_wrapped(" ".join(sentences))]]
    if error := analysis["log"]["last_error"]:
        parts.append(_wrapped(f"The log ends in a traceback: {error}. Look there first for why the run stopped."))
    parts += _advice(analysis)
    if details:
        parts += [_log(analysis["log"]), _steps(analysis)]
        parts += [_path(analysis["loss_scale"]["phases"])]
    else:
        # After settings to paste, other lines begin anew.
        parts += [[]] * bool(analysis["scale_sense"])
        if problems := len(analysis["log"]["problems"]):
            parts[-1].append(f"{counted(problems, 'line')} of the log could not be read: --details")
        parts[-1].append("All changes of the scale: --details. A picture: --plot run.png. Other rules: compare.")
    return "\n\n".join("\n".join(part) for part in parts)


def _advice(analysis: Mapping[str, Any]) -> list[list[str]]:
    advice = analysis["advice"]
    if not advice:
        return [[line for text in without_advice(analysis) for line in _wrapped(text)]]
    parts = [[*_change(each["change"]), *_wrapped(each["reason"])] for each in advice]
    if settings := analysis["update_cell"] if analysis["in_python"] else analysis["scale_sense"]:
        parts[-1].append(PASTE_IN_PYTHON if analysis["in_python"] else PASTE)
        parts.append([settings.rstrip()])
    return parts


def without_advice(analysis: Mapping[str, Any]) -> list[str]:
    """Return paragraphs about a run that needs no change, or whose log is too short to tell."""
    skipped, start = analysis["skipped"], analysis["start_up"]
    if skipped["at_most"] and analysis["steps"]["count"] < HELD and not start["a_scale_held"]:
        return [
            f"Too few steps to judge: a loss scale counts as held after {HELD} steps without overflow. Overflows "
            "in the first steps are normal: each one halves the scale until a scale holds."
        ]
    if skipped["at_least"] and start["a_scale_held"] is False:
        return [
            f"No loss scale has held: no {HELD} steps in a row were without overflow.",
            f"Measure a scale to start from: {find_command(analysis['in_python'])}",
        ]
    if start["a_scale_held"] is None:
        return ["The log does not show whether a loss scale has held: it leaves open which steps were skipped."]
    lines = ["The log shows nothing that should be changed."]
    if skipped["count"] is not None and skipped["count"] == start["before_scale_held"]:
        lines.append("No step was skipped after the start: no rule would do better. Keep yours.")
    return lines


def _change(change: str) -> list[str]:
    """Return advice as lines of text. A shell command gets a separate, unwrapped line, so that it can be pasted."""
    text, *commands = change.split("\n")
    return [*_wrapped(text), *(f"  {command}" for command in commands)]


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
    skipped, scale = analysis["skipped"], analysis["loss_scale"]
    steps, dropped = analysis["steps"], analysis["dropped_by_norm"]
    lines = [
        f"Steps     {steps['first']} to {steps['last']}"
        if skipped["at_most"] is not None
        else f"Steps     at least {steps['count']}",
        f"Skipped   {bounds_in_words(skipped['at_least'], skipped['at_most'])}",
        *_wrapped(f"          the log names {_listed(skipped)}", " " * 10),
        dropped["count"]
        and f"Dropped   {dropped['count']} without an overflow, because of their gradient norm: {_listed(dropped)}",
        f"Scale     {scales_in_words(scale)}",
    ]
    return list(filter(None, lines))


def scales_in_words(scale: Mapping[str, Any]) -> str:
    """Return a text with the first, the final, the lowest and the highest loss scale that the log states."""
    first, final, last, smallest, largest, low, high = (
        as_power_of_two(scale[name]) if isinstance(scale[name], float) else str(scale[name] or "unknown")
        for name in ("first", "final", "last_stated", "smallest", "largest", "first_at_least", "first_at_most")
    )
    if scale["first"] is None and scale["first_at_least"] is not None:
        first = f"{low} to {high}"
    end = f"{last} on the last line" if scale["final"] is None else f"{final} at the end"
    return f"{first} at first, {end}; the lines state {smallest} to {largest}"


def _listed(steps: Mapping[str, Any]) -> str:
    return ", ".join(_cut([as_range(*ends) for ends in steps["ranges"]], _RANGES_SHOWN, "and {} more")) or "none"


def _path(phases: Sequence[Mapping[str, Any]]) -> list[str]:
    if not phases:
        return ["The log states no change of the loss scale."]
    heading, *lines = path_lines([Phase(**phase) for phase in phases])
    if len(lines) > _PHASES_SHOWN:
        half = _PHASES_SHOWN // 2
        lines[half:-half] = [f"   ... {len(lines) - 2 * half} rows ..."]
    if any(phase["kind"] == "jump" for phase in phases):
        lines += _wrapped(_JUMP)
    return [heading, *lines]


def _wrapped(text: str | None, indent: str = "") -> list[str]:
    return textwrap.wrap(text or "", _WIDTH, subsequent_indent=indent)


def _cut(entries: Sequence[str], at_most: int, ending: str) -> list[str]:
    left = len(entries) - at_most
    return [*entries[:at_most], ending.format(left)] if left > 0 else list(entries)
