"""Draw the record or the log of a run, runs side by side, their gradients, or a sweep, as a PNG or SVG file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindformers_adaptive.cli.output import UsageError, read_scale
from mindformers_adaptive.lab.logs import read_log
from mindformers_adaptive.monitor.record import read_record
from mindformers_adaptive.plots.canvas import save
from mindformers_adaptive.plots.gradient_record import draw_gradient_records, is_gradient_record
from mindformers_adaptive.plots.gradients import draw_histograms, draw_underflow
from mindformers_adaptive.plots.runs import draw_runs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES = """\
examples:
  adaptive-loss-scale plot output/loss_scale_record.jsonl run.png
  adaptive-loss-scale plot output/gradient_ranges.jsonl gradients.png
  adaptive-loss-scale plot run_64/loss_scale_record.jsonl run_512/loss_scale_record.jsonl comparison.png
  adaptive-loss-scale plot ranges.json histograms.png --loss-scales 64 512
  adaptive-loss-scale plot ranges.json underflow.png --underflow
"""

# What GradientRangeMonitor calls its file; the module that says so needs MindSpore.
_GRADIENTS = "gradient_ranges.jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="FILE",
        help="records of LossScaleMonitor or training logs, records of GradientRangeMonitor, or one file that "
        "'probe --output' wrote. Several runs are drawn side by side, with the gradients whose records are given in "
        f"the same order or lie beside the runs as {_GRADIENTS}",
    )
    parser.add_argument("picture", metavar="PICTURE", help="the .png or .svg file to write")
    parser.add_argument(
        "--loss-scales",
        nargs="+",
        metavar="SCALE",
        help="of a sweep: whose histograms to draw; default: the lowest and the highest that did not overflow",
    )
    parser.add_argument(
        "--underflow", action="store_true", help="of a sweep: draw the share that underflows at each scale instead"
    )


def run(options: argparse.Namespace) -> None:
    """Draw the files as what they are."""
    sweeps = [_read_sweep(Path(source)) for source in options.sources]
    [sweep, *others] = sweeps
    if sweep is None and (options.loss_scales or options.underflow):
        raise UsageError("arguments --loss-scales and --underflow are for what 'probe --output' wrote")
    if others and any(sweeps):
        raise UsageError("a file that 'probe --output' wrote is drawn alone, but several files are given")
    figure = _draw_runs(options.sources) if sweep is None else _draw_sweep(sweep, options)
    print(f"written: {save(figure, options.picture)}")


def _read_sweep(file: Path) -> dict[str, Any] | None:
    """Return the sweep that a JSON file holds, or None if the file is not a sweep."""
    try:
        content = json.loads(file.read_bytes())
    except ValueError:
        return None
    # A record of gradients with a single line is JSON too.
    return content if isinstance(content, dict) and "loss_scales" in content and "step" not in content else None


def _draw_sweep(sweep: dict[str, Any], options: argparse.Namespace) -> Figure:
    if options.underflow:
        return draw_underflow(sweep)
    scales = options.loss_scales and [read_scale("--loss-scales", text) for text in options.loss_scales]
    return draw_histograms(sweep, scales)


def _draw_runs(sources: Sequence[str]) -> Figure:
    read = {source: _read_run(source) for source in sources}
    gradients = {file: one for file, one in read.items() if isinstance(one, list) and is_gradient_record(one)}
    runs = {file: one for file, one in read.items() if file not in gradients}
    if not runs:
        return draw_gradient_records(dict(zip(_names(list(gradients)), gradients.values(), strict=True)))
    if len(read) == 1:
        [only] = runs.values()
        return draw_runs({"" if isinstance(only, list) else only.name: only})
    if gradients and len(gradients) != len(runs):
        raise UsageError(f"{len(gradients)} records of gradients are given for {len(runs)} runs: give one for each run")
    names = dict(zip(runs, _names(list(runs)), strict=True))
    measured = dict(zip(names.values(), gradients.values(), strict=True)) if gradients else _gradients_beside(names)
    return draw_runs({names[file]: one for file, one in runs.items()}, measured)


def _read_run(file: str) -> Any:
    """Return the lines of a record, or the run that another log holds."""
    try:
        return read_record(file)
    except ValueError:
        return read_log(file)


def _gradients_beside(names: dict[str, str]) -> dict[str, Any]:
    """Return by the runs' names the records of gradients in their folders, unless several runs share a folder."""
    files = {name: Path(file).with_name(_GRADIENTS) for file, name in names.items()}
    beside = list(files.values())
    return {name: read_record(file) for name, file in files.items() if beside.count(file) == 1 and file.is_file()}


def _names(files: Sequence[str]) -> list[str]:
    """Return what tells files apart: their paths without the folders and the file name that all of them share.

    Examples:
        >>> _names(["runs/64/record.jsonl", "runs/512/record.jsonl"]), _names(["a/64.jsonl", "a/512.jsonl"])
        (['64', '512'], ['64.jsonl', '512.jsonl'])
    """
    paths = [Path(file).parts for file in files]
    if len(paths) == 1:
        return [paths[0][-1]]
    start = _shared(paths)
    end = _shared([path[:start:-1] for path in paths])
    return ["/".join(path[start : len(path) - end]) or str(file) for path, file in zip(paths, files, strict=True)]


def _shared(paths: Sequence[Sequence[str]]) -> int:
    """Return how many first parts all paths have in common."""
    return sum(1 for _ in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False)))
