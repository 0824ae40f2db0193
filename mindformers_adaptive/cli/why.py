"""Say why a training overflows: in which layer, in which pass, and which setting helps.

Forward and backward passes of the training's own train step are run on a few batches, op by op (PyNative mode). With
--run, the configuration, the last whole checkpoint, the loss scale and a saved batch come from the output folder of a
training. With --config, the weights are those that the training would start from. Possible remedies are tried in the
same passes: a lower loss scale, the layer in float32, and each setting of the YAML file's model_config that computes in
half precision.

examples:
  adaptive-loss-scale why --run output
  adaptive-loss-scale why --config my.yaml --train-dataset-dir my_data
  adaptive-loss-scale why --config my.yaml --checkpoint output/checkpoint/rank_0 --loss-scale 2^16 --plot layers.png
"""

from __future__ import annotations

import argparse

from mindformers_adaptive.cli.console import add_verbose, lines_in_file
from mindformers_adaptive.cli.output import add_output_arguments, integer, print_result, progress_bar, read_scale
from mindformers_adaptive.cli.train import add_yaml_arguments, read_options
from mindformers_adaptive.mindformers.launcher import use_register_path
from mindformers_adaptive.mindformers.run_configuration import read_run
from mindformers_adaptive.plots.canvas import save
from mindformers_adaptive.plots.layers import draw_layers
from mindformers_adaptive.record.run_folder import BATCH_FILE, file_in

__all__ = ["add_arguments", "run"]

# Options for inputs that `why --run` reads from the training's output folder if the options are left out.
_OF_RUN = ("checkpoint", "train_dataset_dir", "loss_scale", "batch", "register_path")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``why``."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--run", metavar="FOLDER", help="the output folder of a training")
    add_yaml_arguments(parser, source)
    parser.add_argument("--train-dataset-dir", help="the data, instead of that in the YAML file")
    parser.add_argument(
        "--checkpoint",
        help="a .ckpt or .safetensors file, or a folder of them; default: what the YAML file says to load",
    )
    parser.add_argument(
        "--loss-scale", type=read_scale, metavar="SCALE", help="loss scale of the training; default: its initial one"
    )
    parser.add_argument("--batches", type=integer(1), default=2, help="number of training batches; default: 2")
    parser.add_argument(
        "--batch",
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
    overrides = read_options(options.options)
    arguments = {} if options.run is None else read_run(options.run)
    named = {name: getattr(options, name) for name in _OF_RUN} | {"config_path": options.config}
    arguments |= {name: value for name, value in named.items() if value is not None}
    if "batch" in arguments:
        arguments["batch"] = file_in(arguments["batch"], BATCH_FILE)
    use_register_path(arguments.pop("register_path", None))
    with lines_in_file("why", verbose=options.verbose) as terminal:
        from mindformers_adaptive.mindformers.overflow_probe import why

        with progress_bar(None, "backward passes", terminal, lines=True) as progress:
            explanation = why(
                batches=options.batches,
                graph=options.graph,
                overrides=overrides,
                progress=progress,
                **arguments,
            )
    more = explanation.details()
    text = f"{explanation}\n{more if options.details or not more else 'More: --details'}"
    print_result(options, explanation.to_dict, lambda: text)
    if options.plot:
        save(draw_layers(explanation), options.plot)
