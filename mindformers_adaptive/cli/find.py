"""Find the loss scale that a training should start from, and print the YAML to paste.

example:
  adaptive-loss-scale find --config my.yaml --train-dataset-dir my_data
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mindformers_adaptive.cli.output import integer, print_result
from mindformers_adaptive.cli.probe import add_sweep_arguments, sweep
from mindformers_adaptive.cli.train import read_options, value_of_key
from mindformers_adaptive.gradients import recommendation

__all__ = ["add_arguments", "read_learning_rate", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``find``."""
    add_sweep_arguments(parser)
    text = "powers of two to stay below the largest scale that does not overflow (default: 2, in 8-bit formats 4)"
    parser.add_argument("--margin", type=integer(0), metavar="N", help=text)
    parser.add_argument("--details", action="store_true", help="also print what each group of Parameters loses")


def run(options: argparse.Namespace) -> None:
    """Try every power of two up to 2^32 as the loss scale, and print the loss scale to start from.

    Raises:
        RuntimeError: if no loss scale can be recommended.
    """
    ranges = sweep("find", options, recommendation.EVERY_POWER)
    start = recommendation.recommend_loss_scale(ranges, options.margin, read_learning_rate(options))
    start = replace(start, scale_sense=_moving_scale(options))

    def text() -> str:
        more = start.details()
        return f"{start}\n{more if options.details or not more else 'More: --details'}"

    print_result(options, start.to_dict, text)
    if start.loss_scale_value is None:
        raise RuntimeError("no loss scale can be recommended")


def _moving_scale(options: argparse.Namespace) -> dict[str, Any] | None:
    """Return the section ``scale_sense`` with the values of ``--options``, or None for a fixed scale or no scale."""
    key, overrides = "runner_wrapper.scale_sense", read_options(options.options)
    section = value_of_key(options, overrides, key)
    if not isinstance(section, Mapping) or section.get("type") == "FixedLossScaleUpdateCell":
        return None
    return {
        **section,
        **{name.removeprefix(f"{key}."): value for name, value in overrides.items() if name.startswith(f"{key}.")},
    }


def read_learning_rate(options: argparse.Namespace) -> float | None:
    """Return the learning rate, before any schedule, from ``--options`` or the YAML file; None if neither gives it."""
    overrides = read_options(options.options)
    keys = ("lr_schedule.learning_rate", "optimizer.learning_rate")
    rates = [value_of_key(options, overrides, key) for key in keys]
    return next((float(rate) for rate in rates if isinstance(rate, int | float) and rate > 0), None)
