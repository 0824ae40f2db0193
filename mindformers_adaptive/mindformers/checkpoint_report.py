"""What a checkpoint holds of loss scaling, as a report for people and for machines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindformers_adaptive.mindformers import checkpoint_reader as reader
from mindformers_adaptive.rules import RULES
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.rules.fields import STEP_FIELDS
from mindformers_adaptive.rules.rule import Rule
from mindformers_adaptive.rules.saved_state import own_keys
from mindformers_adaptive.text.table import align
from mindformers_adaptive.text.untrusted import printable

# What fits beside the numbers.
_LONGEST_NOTE = 20

__all__ = ["build_report", "report_text", "why_no_state"]


def build_report(path: str | Path, rules: Sequence[type[Rule]] = ()) -> dict[str, Any]:
    """Read a checkpoint file or folder.

    Args:
        path (str): the file or folder.
        rules (Sequence[type]): classes of rules of one's own, whose states may be there. Default: none.

    Returns:
        dict: ``path``; ``found``, whether there is any state; ``checkpoints``, a list of dicts with ``file`` (relative
        to ``path``), ``rank``, ``kind``, ``notes`` and the state by attribute name, None for what the checkpoint does
        not have; ``notes``, a list of str, which says why if the path cannot be read.
    """
    try:
        checkpoints = reader.read_checkpoints(path, rules)
    except OSError as error:
        return {"path": str(path), "found": False, "checkpoints": [], "notes": [f"cannot be read: {error}"]}
    notes = [*_note_kinds(path, checkpoints), *_note_latest(path, checkpoints), *_note_ranks(checkpoints)]
    return {
        "path": str(path),
        "found": any(checkpoint.holds_state for checkpoint in checkpoints),
        "checkpoints": [
            {
                "file": _name_below(path, checkpoint),
                "rank": checkpoint.rank,
                "kind": checkpoint.kind,
                **checkpoint.values,
                "notes": checkpoint.problems,
            }
            for checkpoint in checkpoints
        ],
        "notes": notes,
    }


def report_text(report: dict[str, Any]) -> str:
    """Return a report with at least one checkpoint as a table with its notes."""
    checkpoints = report["checkpoints"]
    names = [name for name in checkpoints[0] if name in _columns(checkpoints)]
    lines, below = [["file", *names, "note"]], dict[str, int]()
    all_notes = [note for checkpoint in checkpoints for note in checkpoint["notes"]]
    for checkpoint in checkpoints:
        # A long note that several have stands below the table, once.
        notes = [
            f"({below.setdefault(note, len(below) + 1)})"
            if len(note) > _LONGEST_NOTE and all_notes.count(note) > 1
            else note
            for note in checkpoint["notes"]
        ]
        lines.append([checkpoint["file"], *(_cell(checkpoint[name]) for name in names), "; ".join(notes)])
    lines = [[printable(cell) for cell in line] for line in lines]
    told = [*(f"({number}) {note}" for note, number in below.items()), *report["notes"]]
    return "\n".join([align(lines, to_the_left=(0, len(names) + 1)), *map(printable, told)])


def why_no_state(report: dict[str, Any]) -> str:
    """Return a sentence on why a report has no state."""
    unreadable = [checkpoint["file"] for checkpoint in report["checkpoints"] if checkpoint["kind"] == "unreadable"]
    if unreadable:
        reason = f"unreadable: {', '.join(unreadable)}"
    elif report["checkpoints"]:
        reason = f"{len(report['checkpoints'])} checkpoints read, and they hold no state"
    else:
        reason = "; ".join(report["notes"]) or "no checkpoint there"
    return printable(f"No state of loss scaling in {report['path']}: {reason.removesuffix('.')}.")


def _note_kinds(path: str | Path, checkpoints: list[reader.Checkpoint]) -> list[str]:
    files_of: dict[str, list[str]] = {}
    for checkpoint in checkpoints:
        files_of.setdefault(checkpoint.kind, []).append(_name_below(path, checkpoint))
    if len(files_of) == 1:
        return [f"state: {kind}" for kind in files_of]
    return [f"state of {', '.join(files)}: {kind}" for kind, files in files_of.items()]


def _note_latest(path: str | Path, checkpoints: list[reader.Checkpoint]) -> list[str]:
    """Mark the checkpoint that MindFormers would resume from; return notes if there is no such checkpoint."""
    tracker = Path(path) / "latest_checkpointed_iteration.txt"
    if not tracker.is_file():
        return []
    try:
        latest = int(tracker.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return [f"{tracker.name} cannot be used: {reader.one_line(error)}"]
    folder = f"iteration_{latest:08d}"
    for checkpoint in checkpoints:
        if checkpoint.path.name == folder:
            checkpoint.problems.insert(0, "latest")
            return []
    return [f"the latest iteration should be {latest}, but there is no folder {folder}"]


def _note_ranks(checkpoints: list[reader.Checkpoint]) -> list[str]:
    """Mark the checkpoints that differ from the first rank's at their step; return a note on all ranks."""
    first_of: dict[str | int, reader.Checkpoint] = {}
    verdict = ""
    for checkpoint in checkpoints:
        if checkpoint.rank is None or checkpoint.unreadable:
            continue
        name = re.sub(r"rank_\d+", "rank", checkpoint.path.name)
        first = first_of.setdefault(name if checkpoint.step is None else checkpoint.step, checkpoint)
        if first.rank == checkpoint.rank:
            continue
        pairs = {name: (checkpoint.values[name], first.values[name]) for name in checkpoint.values}
        # By text, because NaN is not equal to itself.
        listed = [
            f"{name} {_cell(own)}, not {_cell(its)}" for name, (own, its) in pairs.items() if str(own) != str(its)
        ]
        if listed:
            checkpoint.problems.append(f"differs from rank_{first.rank}: {', '.join(listed)}")
            verdict = "they differ, see the notes of the files"
        verdict = verdict or "they agree wherever several saved the same step"
    return [f"ranks: {verdict}"] if verdict else []


def _columns(checkpoints: list[dict[str, Any]]) -> set[str]:
    """The names to show: all that a checkpoint has, and what the update cells of their kinds have; no vectors."""
    kinds = {checkpoint["kind"] for checkpoint in checkpoints}
    rules = [rule for rule in RULES.values() if any(kind.startswith(rule.name) for kind in kinds)]
    if not rules and kinds & {"none", "unreadable", "loss scale only", "dynamic (no window)"}:
        rules = [AdaptiveRule]
    usual = {"step_num", "global_step", "loss_scale"} | {field.name for field in STEP_FIELDS}
    usual |= {key for rule in rules for key in own_keys(rule)} - {"hysteresis_budget"}
    there = {name for one in checkpoints for name, value in one.items() if value is not None}
    vectors = {name for one in checkpoints for name, value in one.items() if isinstance(value, list)}
    return (usual | there) - vectors - {"file", "rank", "kind", "notes"}


def _cell(value: float | list[float] | None) -> str:
    if not isinstance(value, float):
        return "-" if value is None else str(value)
    if not value.is_integer():
        return f"{value:.9g}"
    # A power of two is easier to recognise without an exponent, as long as it is short.
    return str(int(value)) if abs(value) < 1e16 else str(value)


def _name_below(path: str | Path, checkpoint: reader.Checkpoint) -> str:
    root = Path(path).resolve()
    return checkpoint.path.name if root == checkpoint.path else str(checkpoint.path.relative_to(root))
