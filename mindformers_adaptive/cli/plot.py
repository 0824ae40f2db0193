"""Draw runs side by side, gradients, weights, or a sweep over loss scales, as a PNG or SVG file.

A single run is drawn by 'analyze --plot'.

examples:
  adaptive-loss-scale plot output/gradient_ranges.jsonl gradients.png
  adaptive-loss-scale plot run_64 run_512 comparison.png
  adaptive-loss-scale plot ranges.json histograms.png --loss-scales 64 512
  adaptive-loss-scale plot ranges.json underflow.png --underflow
  adaptive-loss-scale plot output/gradient_ranges.jsonl weights.png --of weights --modules lm_head
  adaptive-loss-scale plot step_700.json step_800.json norm.png --of weights --axis linear
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindformers_adaptive.cli.output import (
    UsageError,
    add_pattern_argument,
    print_text,
    read_picture,
    read_scale,
    read_source,
)
from mindformers_adaptive.gradients.selection import KINDS
from mindformers_adaptive.plots.canvas import save
from mindformers_adaptive.plots.gradient_records import draw_gradient_records, is_gradient_record
from mindformers_adaptive.plots.gradients import AXES, draw_sweeps, draw_underflow
from mindformers_adaptive.plots.report import GRADIENTS, gradients_beside
from mindformers_adaptive.plots.runs import draw_runs
from mindformers_adaptive.record.logs import read_log
from mindformers_adaptive.record.run_folder import RECORD, record_in
from mindformers_adaptive.record.writer import read_record
from mindformers_adaptive.text.files import json_object, refuse_pipe

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``plot``."""
    parser.add_argument(
        "sources",
        nargs="+",
        type=read_source,
        action=_SourcesAndPicture,
        metavar="FILE",
        help="records of LossScaleMonitor, output folders with such a record, training logs, records of "
        "GradientRangeMonitor, or files that 'find --output' wrote. Several of a kind are drawn side by side; runs "
        f"with their gradients, from records given in the same order or found beside the runs as {GRADIENTS}. Last "
        "comes the .png or .svg file to write; default: the name of the first file, with .png",
    )
    add_pattern_argument(parser)
    parser.add_argument(
        "--loss-scales",
        nargs="+",
        type=read_scale,
        metavar="SCALE",
        help="for a sweep: the scales to draw histograms at; default: the lowest and the highest that did not overflow",
    )
    parser.add_argument(
        "--underflow", action="store_true", help="for a sweep: draw the share that underflows at each scale instead"
    )
    parser.add_argument(
        "--of",
        choices=KINDS,
        default="gradients",
        help="what to draw of a sweep, or of records of gradients; default: gradients",
    )
    parser.add_argument(
        "--axis",
        choices=AXES,
        default=AXES[0],
        help="for gradients: magnitudes by powers of two, or values with their signs on a linear axis; default: log2",
    )
    parser.add_argument(
        "--modules",
        nargs="+",
        default=[],
        metavar="MODULE",
        help="for gradients: draw only these modules, Parameters or layers, one row each; a name may have *",
    )


class _SourcesAndPicture(argparse.Action):
    """Take the last of several words for the picture to write, unless it is a file that could be drawn."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        last = Path(values[-1])
        first = Path(values[0])
        # A folder is named after its record.
        namespace.picture = f"{Path(RECORD).stem if first.is_dir() else first.stem}.png"
        if len(values) > 1 and (last.suffix.lower() in (".png", ".svg") or not last.exists()):
            try:
                namespace.picture = read_picture(values.pop())
            except UsageError as error:
                parser.error(f"argument PICTURE: {error}")
        namespace.sources = values


def run(options: argparse.Namespace) -> None:
    """Draw what the files hold: runs, records of gradients, or sweeps over loss scales."""
    read = {str(file): _read(str(file), options.pattern) for file in map(record_in, options.sources)}
    sweeps = {file: content for file, content in read.items() if isinstance(content, dict)}
    if not sweeps and (options.loss_scales or options.underflow):
        raise UsageError("arguments --loss-scales and --underflow need a file that 'find --output' wrote")
    chosen = {"kind": options.of, "modules": options.modules, "axis": options.axis}
    if chosen != {"kind": "gradients", "modules": [], "axis": AXES[0]} and (
        options.underflow or not all(isinstance(content, dict) or _is_gradients(content) for content in read.values())
    ):
        raise UsageError(
            "arguments --of, --modules and --axis can be used only for sweeps and records of gradients, and not with "
            "--underflow: leave them out"
        )
    if sweeps and len(sweeps) < len(read):
        raise UsageError("files that 'find --output' wrote cannot be drawn with other files: draw them separately")
    if options.underflow and len(sweeps) > 1:
        raise UsageError("argument --underflow needs a single file that 'find --output' wrote, but got several")
    try:
        if not sweeps:
            figure = _draw_runs(read, chosen, options.picture)
        elif options.underflow:
            figure = draw_underflow(next(iter(sweeps.values())))
        else:
            names = tell_apart(sweeps) if len(sweeps) > 1 else dict.fromkeys(sweeps, "")
            named = {names[file]: sweep for file, sweep in sweeps.items()}
            figure = draw_sweeps(named, options.loss_scales, **chosen)
        save(figure, options.picture)
    except (ArithmeticError, TypeError) as error:
        raise ValueError(
            f"{', '.join(read)} must hold numbers that can be drawn, but drawing failed: {error}. Correct the numbers."
        ) from error
    print_text(f"written: {options.picture}")


def _read(file: str, pattern: str | None) -> Any:
    """Return what a file holds: a sweep over loss scales, the lines of a record of gradients, or a run."""
    refuse_pipe(file)
    if pattern is not None:
        return read_log(file, pattern=pattern)
    with open(file, encoding="utf-8-sig", errors="replace") as lines:
        start = lines.readline().strip()
    first = json_object(start)
    # Do not load a run's record, which has a line for each step, as a whole: the record of a run of months would not
    # fit into memory.
    if start.startswith(("{", "[")) and "step" not in first:
        with contextlib.suppress(ValueError, RecursionError):
            content = json.loads(Path(file).read_bytes())
            if isinstance(content, dict) and "loss_scales" in content and "step" not in content:
                return content
    return read_record(file) if "loss_scales" in first else read_log(file)


def _is_gradients(content: Any) -> bool:
    return isinstance(content, list) and is_gradient_record(content)


def _draw_runs(read: Mapping[str, Any], chosen: Mapping[str, Any], picture: str) -> Figure:
    gradients = {file: content for file, content in read.items() if _is_gradients(content)}
    runs = {file: content for file, content in read.items() if file not in gradients}
    names = tell_apart(runs or gradients)
    if not runs:
        return draw_gradient_records({names[file]: record for file, record in gradients.items()}, **chosen)
    if len(read) == 1:
        [file] = read
        raise UsageError(f"one run is drawn by 'analyze': adaptive-loss-scale analyze {file} --plot {picture}")
    if not gradients:
        measured = gradients_beside({names[file]: file for file in runs})
    elif len(gradients) == len(runs):
        measured = dict(zip(names.values(), gradients.values(), strict=True))
    else:
        raise UsageError(f"{len(gradients)} records of gradients are given for {len(runs)} runs: give one for each run")
    return draw_runs({names[file]: run for file, run in runs.items()}, measured)


def tell_apart(files: Iterable[str]) -> dict[str, str]:
    """Return a short name for each file: its path without the leading and trailing parts that all the paths share.

    Examples:
        >>> tell_apart(["runs/64/record.jsonl", "runs/512/record.jsonl"])
        {'runs/64/record.jsonl': '64', 'runs/512/record.jsonl': '512'}
        >>> tell_apart(["a/64.jsonl", "a/512.jsonl"])
        {'a/64.jsonl': '64.jsonl', 'a/512.jsonl': '512.jsonl'}
    """
    paths = {file: Path(os.path.abspath(file)).parts for file in files}
    start = _shared([*paths.values()])
    end = _shared([parts[:start:-1] for parts in paths.values()])
    return {file: "/".join(parts[start : len(parts) - end]) or parts[-1] for file, parts in paths.items()}


def _shared(paths: Iterable[Sequence[str]]) -> int:
    """Return how many leading parts all the paths have in common."""
    return sum(1 for _ in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False)))
