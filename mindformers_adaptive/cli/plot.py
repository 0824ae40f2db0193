"""Draw the record or the log of a run, or a sweep over loss scales, as a PNG or SVG file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from mindformers_adaptive.cli.output import UsageError, read_scale

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES = """\
examples:
  adaptive-loss-scale plot output/loss_scale_record.jsonl run.png
  adaptive-loss-scale plot ranges.json histograms.png --loss-scales 64 512
  adaptive-loss-scale plot ranges.json underflow.png --underflow
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "source",
        metavar="FILE",
        help="a record of LossScaleMonitor, a training log, or what 'probe --output' wrote",
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
    """Draw the file as what it is."""
    from mindformers_adaptive.plots.canvas import save

    sweep = _read_sweep(Path(options.source))
    if sweep is None and (options.loss_scales or options.underflow):
        raise UsageError("arguments --loss-scales and --underflow are for what 'probe --output' wrote")
    figure = _draw_run(options.source) if sweep is None else _draw_sweep(sweep, options)
    print(f"written: {save(figure, options.picture)}")


def _read_sweep(file: Path) -> dict[str, Any] | None:
    """The sweep that a JSON file holds, or None where it is none."""
    try:
        content = json.loads(file.read_bytes())
    except ValueError:
        return None
    return content if isinstance(content, dict) and "loss_scales" in content else None


def _draw_sweep(sweep: dict[str, Any], options: argparse.Namespace):  # type: ignore[no-untyped-def]
    from mindformers_adaptive.plots.gradients import draw_histograms, draw_underflow

    if options.underflow:
        return draw_underflow(sweep)
    scales = options.loss_scales and [read_scale("--loss-scales", text) for text in options.loss_scales]
    return draw_histograms(sweep, scales)


def _draw_run(file: str):  # type: ignore[no-untyped-def]
    from mindformers_adaptive.lab.logs import read_log
    from mindformers_adaptive.monitor.record import read_record
    from mindformers_adaptive.plots.record import draw_record, draw_run

    try:
        record = read_record(file)
    except ValueError:
        return draw_run(read_log(file))
    return draw_record(record)
