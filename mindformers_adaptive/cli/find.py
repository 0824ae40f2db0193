"""Find the loss scale that a training should start from, and print the settings to paste.

With --loss-scales, --layers or --parameters, print instead the ranges of gradients at several loss scales, and how much
of them is lost.

examples:
  adaptive-loss-scale find --config my.yaml --train-dataset-dir my_data
  adaptive-loss-scale find --config my.yaml --loss-scales 64 512 2^16 --plot ranges.png
  adaptive-loss-scale find --config my.yaml --loss-scales 2^16 --gradients npu.safetensors
"""

import argparse
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from mindformers_adaptive.cli.console import add_verbose, lines_in_file
from mindformers_adaptive.cli.output import (
    UsageError,
    add_output_arguments,
    integer,
    print_answer,
    print_result,
    progress_bar,
    read_scale,
)
from mindformers_adaptive.cli.train import add_yaml_arguments
from mindformers_adaptive.gradients import recommendation
from mindformers_adaptive.gradients.report import loss_division
from mindformers_adaptive.gradients.selection import select
from mindformers_adaptive.mindformers.keys import value_at
from mindformers_adaptive.mindformers.launcher import use_register_path
from mindformers_adaptive.plots.canvas import save
from mindformers_adaptive.plots.gradients import draw_sweeps
from mindformers_adaptive.rules.formats import FORMATS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``find``."""
    add_yaml_arguments(parser)
    parser.add_argument("--train-dataset-dir", help="the data, instead of that in the YAML file")
    parser.add_argument("--checkpoint", help="a .ckpt or .safetensors file, or a folder of them; default: new weights")
    parser.add_argument("--batches", type=integer(1), default=4, help="number of batches or micro-batches; default: 4")
    parser.add_argument(
        "--gradient-format",
        choices=FORMATS,
        default="float16",
        metavar="FORMAT",
        help=f"format of the gradients: {', '.join(FORMATS)}; default: float16",
    )
    text = "powers of two to stay below the largest scale that does not overflow (default: 2, in 8-bit formats 4)"
    parser.add_argument("--margin", type=integer(0), metavar="N", help=text)
    parser.add_argument("--details", action="store_true", help="also print what each group of Parameters loses")
    ranges = parser.add_argument_group("ranges of gradients")
    ranges.add_argument(
        "--loss-scales",
        nargs="+",
        type=read_scale,
        metavar="SCALE",
        help="measure at these loss scales; default: every power of two up to 2^32, or every fourth for ranges",
    )
    ranges.add_argument(
        "--layers",
        nargs="+",
        default=[],
        metavar="LAYER",
        help="also measure the outputs of these layers and their gradients: names, classes, or patterns with *",
    )
    ranges.add_argument("--parameters", type=read_scale, metavar="SCALE", help="show each Parameter at this loss scale")
    ranges.add_argument("--output", type=_new_file, metavar="FILE", help="write everything to this JSON file")
    ranges.add_argument(
        "--gradients",
        type=_new_file,
        metavar="FILE",
        help="write the gradients as the optimizer takes them, the mean of the batches, to this .safetensors file, "
        "for 'diff'; with a single loss scale",
    )
    add_output_arguments(parser, "draw histograms at the lowest and the highest scale that fits; 'plot' has more")
    add_verbose(parser)


def _new_file(text: str) -> str:
    # Check the path of the output file before the sweep over loss scales, which may take long.
    if os.path.isdir(text) or not os.path.isdir(os.path.dirname(text) or "."):
        raise UsageError(f"must name a file in an existing folder, but got {text!r}")
    return text


def run(options: argparse.Namespace) -> None:
    """Run backward passes at several loss scales. Print the loss scale to start from, or the ranges of the gradients.

    Raises:
        RuntimeError: if no loss scale can be recommended.
    """
    from mindformers_adaptive.gradients.ranges import DEFAULT_LOSS_SCALES

    shows_ranges = bool(options.loss_scales or options.layers or options.parameters)
    scales = options.loss_scales or (DEFAULT_LOSS_SCALES if shows_ranges else recommendation.EVERY_POWER)
    if options.parameters is not None and options.parameters not in scales:
        raise UsageError(f"'--parameters' must be one of the loss scales of the sweep, but got {options.parameters:g}.")
    if options.gradients and (len(scales) > 1 or not options.gradients.endswith(".safetensors")):
        raise UsageError("'--gradients' needs a .safetensors file and one loss scale, such as --loss-scales 2^16.")
    sums: dict[str, Any] = {}

    def add_up(_: float, gradients: Mapping[str, Any]) -> None:
        for name, gradient in gradients.items():
            sums[name] = sums.get(name, 0) + gradient

    ranges, config = _sweep(options, list(scales), add_up if options.gradients else None)
    _write_files(options, ranges, sums)
    if shows_ranges:
        print_result(options, ranges.to_dict, lambda: "\n\n".join(_tables(options, ranges)))
        return
    start = recommendation.recommend_loss_scale(ranges, options.margin, learning_rate_in(config))
    start = replace(start, scale_sense=_moving_scale(config))
    print_answer(options, start)
    if start.loss_scale_value is None:
        raise RuntimeError("no loss scale can be recommended")


def _sweep(options: argparse.Namespace, loss_scales: list[float], observe: Any) -> tuple[Any, Any]:
    """Run the backward passes with a progress bar. Return the gradient ranges and the configuration."""
    use_register_path(options.register_path)
    with lines_in_file("find", verbose=options.verbose) as terminal:
        from mindformers_adaptive.mindformers.training_probe import TrainingSource, probe

        passes = options.batches * len(loss_scales) * (2 if options.layers else 1)
        with progress_bar(passes, "backward passes", terminal, lines=True) as progress:
            source = TrainingSource(options.config, options.checkpoint, options.train_dataset_dir, options.overrides)
            ranges = probe(
                source,
                loss_scales,
                options.batches,
                layers=options.layers,
                progress=progress,
                observe=observe,
                gradient_format=options.gradient_format,
            )
        return ranges, source.read_file()


def _write_files(options: argparse.Namespace, ranges: Any, sums: Mapping[str, Any]) -> None:
    if options.output:
        ranges.save(options.output)
    if options.gradients:
        from mindformers_adaptive.mindformers.checkpoint_arrays import save_arrays

        save_arrays(options.gradients, {name: each / len(ranges.batches) for name, each in sums.items()})
    if options.plot:
        save(draw_sweeps({"": ranges}), options.plot)


def _tables(options: argparse.Namespace, ranges: Any) -> Iterator[str]:
    if division := loss_division(ranges.micro_batches):
        yield f"Each batch was measured {division}, as the training does it."
    yield ranges.table()
    lowest = recommendation.judge(ranges, ranges.loss_scales[0])
    if lowest.groups:
        yield recommendation.table_of_groups([recommendation.judge(ranges, scale) for scale in ranges.fitting_scales])
        yield str(lowest)
    if options.parameters is not None:
        yield ranges.table(options.parameters)
    if options.layers:
        yield ranges.output_table()
    if options.layers and any(layer_ranges.parameters for layer_ranges in ranges.activation_gradients[0]):
        scale = options.parameters or (ranges.fitting_scales or ranges.loss_scales)[-1]
        yield f"gradients of these outputs\n{select(ranges, 'activation_gradients').table(scale)}"


def _moving_scale(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the section ``scale_sense`` of a configuration, or None for a fixed scale or no scale."""
    section = value_at(config, "runner_wrapper.scale_sense")
    is_moving = isinstance(section, Mapping) and section.get("type") != "FixedLossScaleUpdateCell"
    return dict(section) if is_moving else None


def learning_rate_in(config: Mapping[str, Any]) -> float | None:
    """Return the learning rate of a configuration before any schedule, or None if it gives none."""
    rates = [value_at(config, key) for key in ("lr_schedule.learning_rate", "optimizer.learning_rate")]
    return next((float(rate) for rate in rates if isinstance(rate, int | float) and rate > 0), None)
