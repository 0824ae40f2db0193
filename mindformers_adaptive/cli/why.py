"""Say why a training overflows: in which layer, in which pass, and which setting helps.

Forward and backward passes of the training's own train step are run on a few batches, op by op (PyNative mode). With
--run, the configuration, the last whole checkpoint, the loss scale and a saved batch come from the output folder of a
training. With --config, the weights are those that the training would start from. Possible remedies are tried in the
same passes: a lower loss scale, the layer in float32, and each setting of the YAML file's model_config that computes in
half precision. For a Python program without a YAML file, --network names a function that returns the train-step cell;
the loss scale and the batch come from the record that LossScaleMonitor with explain=True wrote.

examples:
  adaptive-loss-scale why --run output
  adaptive-loss-scale why --record output --network my_training.build
  adaptive-loss-scale why --config my.yaml --train-dataset-dir my_data
  adaptive-loss-scale why --config my.yaml --checkpoint my.ckpt --loss-scale 2^16 --plot layers.png
"""

import argparse
import dataclasses

from mindformers_adaptive.cli.console import add_verbose, lines_in_file
from mindformers_adaptive.cli.output import (
    UsageError,
    add_output_arguments,
    integer,
    print_answer,
    progress_bar,
    read_scale,
    read_source,
)
from mindformers_adaptive.cli.train import add_yaml_arguments
from mindformers_adaptive.mindformers.launcher import use_register_path
from mindformers_adaptive.mindformers.run_configuration import OverflowCase, read_program_run, read_run
from mindformers_adaptive.plots.canvas import save
from mindformers_adaptive.plots.layers import draw_layers
from mindformers_adaptive.record.run_folder import BATCH_FILE, file_in


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``why``."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--run", metavar="FOLDER", help="the output folder of a training")
    source.add_argument(
        "--network",
        metavar="MODULE.FUNCTION",
        help="a function without arguments that returns the train-step cell, or a network that returns its loss",
    )
    add_yaml_arguments(parser, source)
    parser.add_argument(
        "--record",
        type=read_source,
        help="with --network: the record of the training, for its loss scale and the batch that was saved beside it",
    )
    parser.add_argument("--train-dataset-dir", help="the data, instead of that in the YAML file")
    parser.add_argument(
        "--checkpoint",
        help="a .ckpt or .safetensors file, or a folder of them; default: what the YAML file says to load",
    )
    parser.add_argument(
        "--loss-scale", type=read_scale, metavar="SCALE", help="loss scale of the training; default: its initial one"
    )
    parser.add_argument("--batches", type=integer(1), help="number of training batches; default: 2")
    parser.add_argument(
        "--batch",
        type=_batch_file,
        metavar="FILE",
        help="a batch that LossScaleMonitor saved, overflow_batch.npz or its folder, instead of the data",
    )
    parser.add_argument(
        "--graph",
        action="store_true",
        help="run the passes in graph mode, which shows layers but no operators: for a model that fails op by op",
    )
    text = "also print the layers closest to overflow, and what was tried and does not help"
    parser.add_argument("--details", action="store_true", help=text)
    add_output_arguments(parser, "draw the largest value of each layer, in the forward and the backward pass")
    add_verbose(parser)


def run(options: argparse.Namespace) -> None:
    """Run forward and backward passes, and print which layer overflows and which change helps."""
    case = _case(options)
    use_register_path(case.register_path)
    with lines_in_file("why", verbose=options.verbose) as terminal:
        from mindformers_adaptive.mindformers.overflow_probe import explain_case

        with progress_bar(None, "backward passes", terminal, lines=True) as progress:
            explanation = explain_case(case, progress)
    print_answer(options, explanation)
    if options.plot:
        save(draw_layers(explanation), options.plot)


def _case(options: argparse.Namespace) -> OverflowCase:
    """Return what the command line gives and what a training has left; the command line comes first."""
    if options.network is None and options.record is not None:
        raise UsageError("'--record' is for '--network'. With a YAML file give --run FOLDER.")
    if options.network is not None and (options.overrides or options.train_dataset_dir):
        raise UsageError("'--options' and '--train-dataset-dir' are for '--config'. '--network' needs none of them.")
    left = {}
    if options.run is not None:
        left = read_run(options.run)
    elif options.record is not None:
        left = read_program_run(options.record)
    typed = {field.name: getattr(options, field.name, None) for field in dataclasses.fields(OverflowCase)}
    case = OverflowCase(**left | {name: value for name, value in typed.items() if value is not None})
    if case.network is not None and case.batch is None:
        raise UsageError(
            f"'--network' needs a batch: there is no {BATCH_FILE} beside the record. Give --batch FILE; "
            "LossScaleMonitor with explain=True saves the batch of an overflow."
        )
    return case


def _batch_file(text: str) -> str:
    return file_in(text, BATCH_FILE)
