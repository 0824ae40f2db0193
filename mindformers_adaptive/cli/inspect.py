"""Show the loss-scale state of the newest checkpoint in a file or folder.

PATH is a .ckpt or .safetensors file, a folder of them, a folder with rank_0, rank_1, ..., a folder iteration_N of
MindFormers' `checkpoint:` format, or the folder above it. The exit code is 1 if no checkpoint there has a state.

examples:
  adaptive-loss-scale inspect output/checkpoint
  adaptive-loss-scale inspect output/checkpoint --policy log_max.LogMaxRule
"""

from __future__ import annotations

import argparse
from typing import Any

from mindformers_adaptive.cli.output import add_output_arguments, print_result, read_source, wrong_usage
from mindformers_adaptive.mindformers.checkpoint_reader import newest_state
from mindformers_adaptive.rules import find_rule

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``inspect``."""
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
    """Print the loss-scale state of the newest checkpoint."""
    with wrong_usage("argument --policy: "):
        rules = [find_rule(name) for name in options.policy]
    state = newest_state(options.path, rules)
    print_result(options, lambda: state, lambda: _text(state))


def _text(state: dict[str, Any]) -> str:
    """Return a line for each number in the loss-scale state and for each note. Only ``--json`` prints vectors."""
    values = {name: value for name, value in state.items() if value is not None and not isinstance(value, list)}
    lines = [f"{name}: {_number(value) if isinstance(value, float) else value}" for name, value in values.items()]
    return "\n".join([*lines, *(f"note: {note}" for note in state["notes"])])


def _number(value: float) -> str:
    # Write whole numbers below 1e16 without an exponent, so that powers of two are easy to recognise.
    return f"{value:.0f}" if value.is_integer() and abs(value) < 1e16 else f"{value:.9g}"
