"""Show the state of loss scaling that a checkpoint holds: one row per checkpoint, the newest last.

PATH is a .ckpt or .safetensors file, a folder of them, a folder with rank_0, rank_1, ..., a folder iteration_N of
MindFormers' `checkpoint:` format, or the folder above it. In the table, '-' marks what a checkpoint does not have. The
exit code is 1 if no state was found, or PATH cannot be read.

examples:
  adaptive-loss-scale inspect output/checkpoint
  adaptive-loss-scale inspect output/checkpoint --policy log_max.LogMaxRule
"""

from __future__ import annotations

import argparse

from mindformers_adaptive.cli.output import add_output_arguments, print_result, read_source, wrong_usage
from mindformers_adaptive.mindformers.checkpoint_report import build_report, report_text, why_no_state
from mindformers_adaptive.rules import find_rule

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("path", type=read_source, metavar="PATH", help="the checkpoint file or folder")
    parser.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="MODULE.CLASS",
        help="a rule of your own whose state may be there, such as log_max.LogMaxRule; may be given several times",
    )
    add_output_arguments(parser)


def run(options: argparse.Namespace) -> None:
    """Read the checkpoints, and print their state.

    Raises:
        RuntimeError: if no state was found.
    """
    with wrong_usage("argument --policy: "):
        rules = [find_rule(name) for name in options.policy]
    report = build_report(options.path, rules)
    if options.json or report["checkpoints"]:
        print_result(options, lambda: report, lambda: report_text(report))
    if not report["found"]:
        raise RuntimeError(why_no_state(report))
