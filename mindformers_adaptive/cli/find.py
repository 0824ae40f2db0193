"""Find the loss scale that a training should start from, and print the YAML to paste.

example:
  adaptive-loss-scale find --config my.yaml --train-dataset-dir my_data
"""

from __future__ import annotations

import argparse

from mindformers_adaptive.cli.output import integer, print_result
from mindformers_adaptive.cli.probe import add_sweep_arguments, sweep
from mindformers_adaptive.gradients import recommendation

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_sweep_arguments(parser)
    text = "how many powers of two to stay below the largest scale that does not overflow"
    parser.add_argument("--margin", type=integer(0), default=recommendation.DEFAULT_MARGIN, help=text)


def run(options: argparse.Namespace) -> None:
    """Sweep over every power of two up to 2^32, and print the recommendation.

    Raises:
        RuntimeError: if no loss scale can be recommended.
    """
    found = recommendation.recommend_loss_scale(sweep(options, recommendation.EVERY_POWER), options.margin)
    print_result(options, found.to_dict, found.__str__)
    if found.loss_scale_value is None:
        raise RuntimeError("no loss scale can be recommended")
