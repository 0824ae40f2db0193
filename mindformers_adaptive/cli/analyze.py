"""Say what the loss scale did in a run, from its log: the skipped steps, the path of the scale, what to change.

examples:
  adaptive-loss-scale analyze output
  adaptive-loss-scale analyze output/log/rank_0/info.log
  adaptive-loss-scale analyze megatron_day_1.log megatron_day_2.log --plot run.png
"""

import argparse

from mindformers_adaptive.cli.output import (
    add_output_arguments,
    add_pattern_argument,
    add_python_argument,
    print_result,
    read_source,
)
from mindformers_adaptive.lab.analysis import analyze
from mindformers_adaptive.plots.canvas import save
from mindformers_adaptive.plots.runs import draw_runs
from mindformers_adaptive.record.log_formats import FORMATS
from mindformers_adaptive.record.logs import read_log
from mindformers_adaptive.record.run_folder import record_in


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``analyze``."""
    parser.add_argument(
        "logs",
        nargs="+",
        type=read_source,
        metavar="LOG",
        help="the log or record of one run, or its output folder; several files in order of writing",
    )
    parser.add_argument(
        "--format", choices=tuple(FORMATS), help="format of the log; default: the one that its lines match"
    )
    add_pattern_argument(parser)
    add_python_argument(parser)
    parser.add_argument(
        "--details",
        action="store_true",
        help="print all changes of the scale too, and what was read of the log",
    )
    add_output_arguments(parser, "draw loss, loss scale and skipped steps to this PNG or SVG file")


def run(options: argparse.Namespace) -> None:
    """Read the log, and print the analysis of the run; with ``--plot``, also draw the run."""
    recorded = read_log([*map(record_in, options.logs)], options.format, options.pattern)
    analysis = analyze(recorded, in_python=options.python)
    print_result(options, analysis.to_dict, lambda: analysis.text(options.details))
    if options.plot:
        save(draw_runs({"" if recorded.log_format == "jsonl" else recorded.name: recorded}), options.plot)
