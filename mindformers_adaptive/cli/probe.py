"""Measure the ranges of gradients and weights at several loss scales, with the model and data of a YAML file.

examples:
  adaptive-loss-scale probe --config my.yaml --train-dataset-dir my_data --loss-scales 64 512 2^16
  adaptive-loss-scale probe --config my.yaml --checkpoint output/checkpoint/rank_0 --plot ranges.png
  adaptive-loss-scale probe --config my.yaml --checkpoint my.ckpt --loss-scales 2^16 --gradients npu.safetensors
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from typing import Any

from mindformers_adaptive.cli.console import add_verbose, lines_in_file
from mindformers_adaptive.cli.output import (
    UsageError,
    add_output_arguments,
    integer,
    print_result,
    progress_bar,
    read_scale,
)
from mindformers_adaptive.cli.train import add_yaml_arguments, read_options
from mindformers_adaptive.gradients.recommendation import judge, table_of_groups
from mindformers_adaptive.gradients.report import loss_division
from mindformers_adaptive.gradients.selection import select
from mindformers_adaptive.mindformers.launcher import use_register_path
from mindformers_adaptive.plots.canvas import save
from mindformers_adaptive.plots.gradients import draw_histograms
from mindformers_adaptive.rules.formats import FORMATS

__all__ = ["add_arguments", "add_sweep_arguments", "run", "sweep"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``probe``."""
    add_sweep_arguments(parser, "draw histograms at the lowest and the highest scale that fits; 'plot' has more")
    parser.add_argument("--loss-scales", nargs="+", type=read_scale, metavar="SCALE", help="default: 2^0 2^4 ... 2^32")
    parser.add_argument(
        "--layers",
        nargs="+",
        default=[],
        metavar="LAYER",
        help="also measure the outputs of these layers and their gradients: names, classes, or patterns with *",
    )
    parser.add_argument("--parameters", type=read_scale, metavar="SCALE", help="show each Parameter at this loss scale")
    parser.add_argument("--output", type=_new_file, metavar="FILE", help="write everything to this JSON file")
    parser.add_argument(
        "--gradients",
        type=_new_file,
        metavar="FILE",
        help="write the gradients as the optimizer takes them, the mean of the batches, to this .safetensors file, "
        "for 'diff'; with a single loss scale",
    )


def _new_file(text: str) -> str:
    # Check the path of the output file before the sweep over loss scales, which may take long.
    if os.path.isdir(text) or not os.path.isdir(os.path.dirname(text) or "."):
        raise UsageError(f"must name a file in an existing folder, but got {text!r}")
    return text


def add_sweep_arguments(parser: argparse.ArgumentParser, picture: str = "") -> None:
    """Declare the input and output arguments of a sweep over loss scales; ``picture`` is the help of ``--plot``."""
    add_yaml_arguments(parser)
    parser.add_argument("--train-dataset-dir", help="the data, instead of that in the YAML file")
    parser.add_argument("--checkpoint", help="a .ckpt or .safetensors file, or a folder of them; default: new weights")
    parser.add_argument("--batches", type=integer(1), default=4, help="number of batches or micro-batches; default: 4")
    parser.add_argument(
        "--gradient-format", choices=FORMATS, default="float16", help="format of the gradients; default: float16"
    )
    add_output_arguments(parser, picture)
    add_verbose(parser)


def run(options: argparse.Namespace) -> None:
    """Sweep over loss scales. Print tables of the gradients, and how much of them is lost at the lowest loss scale."""
    from mindformers_adaptive.gradients.ranges import DEFAULT_LOSS_SCALES

    scales, parameters_at = options.loss_scales or DEFAULT_LOSS_SCALES, options.parameters
    if parameters_at is not None and parameters_at not in scales:
        raise UsageError(f"'--parameters' must be one of the loss scales of the sweep, but got {parameters_at:g}.")
    if options.gradients and (len(scales) > 1 or not options.gradients.endswith(".safetensors")):
        raise UsageError("'--gradients' needs a .safetensors file and one loss scale, such as --loss-scales 2^16.")
    sums: dict[str, Any] = {}

    def add_up(_: float, gradients: Mapping[str, Any]) -> None:
        for name, gradient in gradients.items():
            sums[name] = sums.get(name, 0) + gradient

    ranges = sweep("probe", options, scales, options.layers, add_up if options.gradients else None)

    def tables() -> Iterator[str]:
        if division := loss_division(ranges.micro_batches):
            yield f"Each batch was measured {division}, as the training does it."
        yield ranges.table()
        lowest = judge(ranges, ranges.loss_scales[0])
        if lowest.groups:
            yield table_of_groups([judge(ranges, scale) for scale in ranges.fitting_scales])
            yield str(lowest)
        if parameters_at is not None:
            yield ranges.table(parameters_at)
        if options.layers:
            yield ranges.output_table()
        if options.layers and any(layer_ranges.parameters for layer_ranges in ranges.activation_gradients[0]):
            scale = parameters_at or (ranges.fitting_scales or scales)[-1]
            yield f"gradients of these outputs\n{select(ranges, 'activation_gradients').table(scale)}"

    print_result(options, ranges.to_dict, lambda: "\n\n".join(tables()))
    if options.output:
        ranges.save(options.output)
    if options.gradients:
        from mindformers_adaptive.mindformers.checkpoint_arrays import save_arrays

        save_arrays(options.gradients, {name: each / len(ranges.batches) for name, each in sums.items()})
    if options.plot:
        save(draw_histograms(ranges), options.plot)


def sweep(command: str, options: argparse.Namespace, loss_scales, layers=(), observe=None):  # type: ignore[no-untyped-def]
    """Sweep over loss scales with a progress bar, and return gradient ranges."""
    overrides = read_options(options.options)
    use_register_path(options.register_path)
    with lines_in_file(command, verbose=options.verbose) as terminal:
        from mindformers_adaptive.mindformers.training_probe import TrainingSource, probe

        passes = options.batches * len(loss_scales) * (2 if layers else 1)
        with progress_bar(passes, "backward passes", terminal, lines=True) as progress:
            return probe(
                TrainingSource(options.config, options.checkpoint, options.train_dataset_dir, overrides),
                loss_scales,
                options.batches,
                layers=layers,
                progress=progress,
                observe=observe,
                gradient_format=options.gradient_format,
            )
