"""Find the loss scale that a training should start from, and print the YAML to paste."""

from __future__ import annotations

import argparse

from mindformers_adaptive.cli.output import print_result
from mindformers_adaptive.cli.probe import add_sweep_arguments, sweep
from mindformers_adaptive.gradients.recommendation import (
    DEFAULT_MARGIN,
    EVERY_POWER,
    check_margin,
    recommend_loss_scale,
)

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES = """\
example:
  adaptive-loss-scale find --config my.yaml --train-dataset-dir my_data
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_sweep_arguments(parser)
    parser.add_argument(
        "--margin",
        type=int,
        default=DEFAULT_MARGIN,
        help="how many powers of two to stay below the largest scale that does not overflow",
    )


def run(options: argparse.Namespace) -> None:
    """Sweep over every power of two up to 2^32, and print the recommendation.

    Raises:
        RuntimeError: if no loss scale can be recommended.
    """
    check_margin(options.margin)
    recommendation = recommend_loss_scale(sweep(options, EVERY_POWER), options.margin)
    print_result(options, recommendation.to_dict, recommendation.__str__)
    if recommendation.loss_scale_value is None:
        raise RuntimeError("no loss scale can be recommended")
