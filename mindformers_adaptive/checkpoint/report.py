"""The command that prints the state of loss scaling in a checkpoint.

adaptive-loss-scale inspect PATH [--json]
"""

import argparse
import json
import math
import sys
from pathlib import Path

from mindformers_adaptive.checkpoint.reader import (
    FIELDS,
    differences_between_ranks,
    latest_iteration,
    read_checkpoints,
)

__all__ = ["build_report", "main"]

_DESCRIPTION = """\
Print the state of loss scaling in a checkpoint: a .ckpt or .safetensors file, a folder of them, a folder with rank_0,
rank_1, ..., a folder iteration_N of MindFormers' `checkpoint:` format, or the folder above it. One row a checkpoint,
the newest last; '-' is what a checkpoint does not have."""

_EPILOG = """\
example:
  adaptive-loss-scale inspect output/checkpoint

exit codes: 0 state found; 1 none found, or PATH cannot be read; 2 wrong usage."""


def main(arguments=None):
    """Run the command.

    Args:
        arguments (list[str], optional): the command line without the program's name. Default: None, ``sys.argv``.

    Returns:
        int, the exit code: 0 if state was found, 1 if none was.
    """
    options = _parse_arguments(arguments)
    try:
        report = build_report(options.path)
    except OSError as error:
        report = {"path": options.path, "found": False, "checkpoints": [], "notes": [f"cannot be read: {error}"]}
    if options.json:
        print(json.dumps(report, indent=2, allow_nan=False))
    elif report["checkpoints"]:
        print(_as_text(report))
    if report["found"]:
        return 0
    print(_why_nothing_was_found(report), file=sys.stderr)
    return 1


def build_report(path):
    """Read a checkpoint file or folder.

    Args:
        path (str): the file or folder.

    Returns:
        dict that JSON can hold: ``path``; ``found``, whether there is any state; ``checkpoints``, a list of dicts with
        ``file`` (seen from ``path``), ``rank``, ``kind``, ``notes`` and the state by attribute name, None for what the
        checkpoint does not have and a string for a loss scale that is not finite; ``notes``, a list of str.

    Raises:
        OSError: if there is no such path, or the folder cannot be read.
    """
    checkpoints = read_checkpoints(path)
    notes_of = {checkpoint: list(checkpoint.problems) for checkpoint in checkpoints}
    notes = _note_kinds(path, checkpoints)
    notes += _note_latest(path, checkpoints, notes_of)
    notes += _note_ranks(checkpoints, notes_of)
    return {
        "path": str(path),
        "found": any(checkpoint.holds_state for checkpoint in checkpoints),
        "checkpoints": [
            {
                "file": _name_below(path, checkpoint),
                "rank": checkpoint.rank,
                "kind": checkpoint.kind,
                **{name: _for_json(checkpoint.values[name]) for name in FIELDS},
                "notes": notes_of[checkpoint],
            }
            for checkpoint in checkpoints
        ],
        "notes": notes,
    }


def _parse_arguments(arguments):
    parser = argparse.ArgumentParser(
        prog="adaptive-loss-scale inspect",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", metavar="PATH", help="the checkpoint file or folder")
    parser.add_argument(
        "--json", action="store_true", help="print JSON; a loss scale that is not finite is the string inf or nan"
    )
    options = parser.parse_args(arguments)
    if not options.path:
        parser.error("argument PATH: must name a file or folder, but is empty")
    return options


def _note_kinds(path, checkpoints):
    files_of = {}
    for checkpoint in checkpoints:
        files_of.setdefault(checkpoint.kind, []).append(_name_below(path, checkpoint))
    if len(files_of) == 1:
        return [f"state: {kind}" for kind in files_of]
    return [f"state of {', '.join(files)}: {kind}" for kind, files in files_of.items()]


def _note_latest(path, checkpoints, notes_of):
    """LogEntry the checkpoint that MindFormers would resume from; return notes if there is none."""
    try:
        latest = latest_iteration(path)
    except ValueError as error:
        return [str(error)]
    if latest is None:
        return []
    folder = f"iteration_{latest:08d}"
    for checkpoint in checkpoints:
        if checkpoint.path.name == folder:
            notes_of[checkpoint].insert(0, "latest")
            return []
    return [f"the latest iteration is said to be {latest}, but there is no folder {folder}"]


def _note_ranks(checkpoints, notes_of):
    """LogEntry the checkpoints that differ from the first rank's at their step; return notes on all ranks."""
    compared = differences_between_ranks(checkpoints)
    for checkpoint, first, differences in compared:
        if differences:
            listed = ", ".join(f"{name} {_cell(ours)}, not {_cell(its)}" for name, (ours, its) in differences.items())
            notes_of[checkpoint].append(f"differs from rank_{first.rank}: {listed}")
    if not compared:
        return []
    if any(differences for *_, differences in compared):
        return ["ranks: they differ, see the notes of the files"]
    return ["ranks: they agree wherever several saved the same step"]


def _as_text(report):
    shown = [name for name in FIELDS if name != "hysteresis_budget" or _any_has(report, name)]
    rows = [["file", *shown, "note"]]
    for checkpoint in report["checkpoints"]:
        rows.append([checkpoint["file"], *(_cell(checkpoint[name]) for name in shown), "; ".join(checkpoint["notes"])])
    return "\n".join([*_align(rows), *report["notes"]])


def _any_has(report, name):
    return any(checkpoint[name] is not None for checkpoint in report["checkpoints"])


def _align(rows):
    """Names to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *numbers, last in rows:
        padded = [number.rjust(width) for number, width in zip(numbers, widths[1:-1], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *padded, last]).rstrip())
    return lines


def _cell(value):
    if value is None:
        return "-"
    # A power of two is easier to recognise without an exponent, as long as it is short.
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 1e16 else str(value)


def _for_json(value):
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _name_below(path, checkpoint):
    root = Path(path).resolve()
    return checkpoint.path.name if root == checkpoint.path else str(checkpoint.path.relative_to(root))


def _why_nothing_was_found(report):
    unreadable = [checkpoint["file"] for checkpoint in report["checkpoints"] if checkpoint["kind"] == "unreadable"]
    if unreadable:
        reason = f"unreadable: {', '.join(unreadable)}"
    elif report["checkpoints"]:
        reason = f"{len(report['checkpoints'])} looked through, none has any"
    else:
        reason = "; ".join(report["notes"]) or "no checkpoint there"
    return f"No state of loss scaling in {report['path']}: {reason}."


if __name__ == "__main__":
    sys.exit(main())
