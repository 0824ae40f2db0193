"""Train, fine-tune, evaluate or predict with MindFormers and adaptive loss scaling.

The options have the names of MindFormers' run_mindformer.py; each sets a key of the YAML file.

examples:
  adaptive-loss-scale train --config my.yaml --epochs 1 --train-dataset-dir my_data
  adaptive-loss-scale train --config my.yaml --options runner_wrapper.scale_sense.margin=8
"""

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from mindformers_adaptive.cli.console import add_verbose, is_one_of_several, lines_in_file, show_training
from mindformers_adaptive.cli.output import UsageError, integer, read_value, wrong_usage
from mindformers_adaptive.mindformers import launcher
from mindformers_adaptive.mindformers.keys import value_at
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.rules.description import all_arguments
from mindformers_adaptive.text.untrusted import read_yaml

# The tasks whose results MindFormers prints.
_WITH_RESULT = ("eval", "predict")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``train``."""
    add_yaml_arguments(parser)
    for option, key, kind, text in _OPTIONS:
        metavar = "BOOL" if kind is _true_or_false else option.upper().replace("-", "_")
        alone: dict[str, Any] = {"nargs": "?", "const": True} if kind is _true_or_false_or_name else {}
        parser.add_argument(f"--{option}", dest=key, type=kind, metavar=metavar, help=f"{text} (sets {key})", **alone)
    add_verbose(parser)


def run(options: argparse.Namespace) -> None:
    """Run the task of the YAML file. An error that stops a training is printed with its traceback."""
    overrides = read_overrides(options)
    folder = _value_of(options, overrides, "output_dir") or "output"
    # Each of several processes has a log file already, and a result of an evaluation or a prediction is for the user.
    shows_all = options.verbose or is_one_of_several() or _value_of(options, overrides, "run_mode") in _WITH_RESULT
    try:
        with contextlib.ExitStack() as stack:
            callbacks: list[Any] = []
            if not shows_all:
                callbacks = stack.enter_context(show_training(stack.enter_context(lines_in_file("train", folder))))
            config = launcher.load_config(options.config, overrides, options.register_path, may_add=OPTION_KEYS)
            launcher.launch(config, callbacks)
    except Exception as error:
        if not launcher.had_begun(error):
            raise
        # Print the traceback of an error in a training: nobody wants to repeat a long training to learn where it
        # failed.
        traceback.print_exc()
        sys.exit(1)


def _value_of(options: argparse.Namespace, overrides: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key from the command line or the YAML file, before MindFormers loads the file."""
    with contextlib.suppress(ValueError):
        return overrides.get(key, value_at(read_yaml(options.config), key))
    return None


def read_overrides(options: argparse.Namespace) -> dict[str, Any]:
    """Return the values that override the YAML file, by dotted key. Values of ``--options`` override other options."""
    overrides = {key: getattr(options, key) for key in OPTION_KEYS if getattr(options, key) is not None}
    if launcher.NUM_SAMPLES in overrides:
        overrides[launcher.EVAL_NUM_SAMPLES] = overrides[launcher.NUM_SAMPLES]
    return {**overrides, **options.overrides}


def add_yaml_arguments(parser: argparse.ArgumentParser, source: Any = None) -> None:
    """Add ``--config``, ``--register-path`` and ``--options``; add ``--config`` to the group ``source``, if any."""
    required = source is None
    (source or parser).add_argument("--config", type=_yaml_file, required=required, help="the YAML file of MindFormers")
    parser.add_argument(
        "--register-path", type=_folder, metavar="FOLDER", help="folder with further classes for auto_register"
    )
    parser.add_argument(
        "--options",
        nargs="+",
        action=_Overrides,
        dest="overrides",
        type=read_option,
        default={},
        metavar="KEY.SUB=VALUE",
        help="set any key of the YAML file, after all other arguments",
    )
    keys = {name: f"runner_wrapper.scale_sense.{name}" for name in all_arguments(AdaptiveRule)}
    parser.set_defaults(similar={f"--{name.replace('_', '-')}": f"--options {key}=" for name, key in keys.items()})


def read_option(text: str) -> tuple[str, Any]:
    """Return the dotted key and the value of a word after ``--options``.

    Raises:
        UsageError: if the word is not of the form ``key.sub=value``.

    Examples:
        >>> read_option("runner_wrapper.scale_sense.loss_scale_value=2^16")
        ('runner_wrapper.scale_sense.loss_scale_value', 65536.0)
    """
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise UsageError(f"{text!r} must have the form key.sub=value, as in optimizer.eps=1e-8")
    with wrong_usage(f"{text!r}: "):
        return key, read_value(value)


class _Overrides(argparse.Action):
    """Keeps the words after ``--options`` as values that override the YAML file, by dotted key."""

    def __call__(self, _: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        namespace.overrides = namespace.overrides | dict(values)


def _yaml_file(text: str) -> str:
    with wrong_usage():
        return launcher.require_yaml_file(text)


def _folder(text: str) -> str:
    if not os.path.isdir(text):
        raise UsageError(f"there is no folder {text!r} (current folder: {os.getcwd()}); correct the path")
    return text


def _true_or_false(text: str) -> bool:
    value = read_value(text.lower())
    if value not in (True, False):
        raise UsageError(f"must be true or false, but got {text!r}")
    return bool(value)


def _true_or_false_or_name(text: str) -> bool | str:
    return _true_or_false(text) if text.lower() in ("true", "false") else text


# Each option of the command: its name on the command line, its key in the YAML file, its type and its help.
_OPTIONS: tuple[tuple[str, str, Callable[[str], Any], str], ...] = (
    ("run-mode", "run_mode", str, "what to do: train, finetune, eval or predict"),
    ("mode", "context.mode", integer(0, 1), "0 compiles the train step as a graph, 1 runs it op by op (PyNative)"),
    ("device-target", "context.device_target", str, "Ascend, GPU or CPU"),
    ("device-id", "context.device_id", integer(0), "which device of this machine"),
    ("use-parallel", "use_parallel", _true_or_false, "run as one of several processes that train together"),
    ("seed", "seed", integer(0, 2**32 - 1), "seed of all random numbers"),
    ("output-dir", "output_dir", str, "folder for logs, checkpoints and strategies"),
    ("epochs", "runner_config.epochs", integer(1), "number of passes over the data"),
    ("batch-size", "runner_config.batch_size", integer(1), "samples per step"),
    ("sink-mode", "runner_config.sink_mode", _true_or_false, "feed the data on the device, several steps a call"),
    (
        "gradient-accumulation-steps",
        "runner_config.gradient_accumulation_steps",
        integer(1),
        "batches accumulated in one step",
    ),
    ("train-dataset-dir", "train_dataset.data_loader.dataset_dir", str, "file or folder of the training data"),
    ("eval-dataset-dir", "eval_dataset.data_loader.dataset_dir", str, "file or folder of the evaluation data"),
    ("num-samples", launcher.NUM_SAMPLES, integer(0), "use only so many samples of the training and evaluation data"),
    ("do-eval", "do_eval", _true_or_false, "evaluate while training"),
    ("load-checkpoint", "load_checkpoint", str, "checkpoint to load, a file or a folder"),
    ("resume-training", "resume_training", _true_or_false_or_name, "resume from the last checkpoint or this file"),
    ("auto-trans-ckpt", "auto_trans_ckpt", _true_or_false, "rearrange the checkpoint for this parallel setting"),
    ("transform-process-num", "transform_process_num", integer(1), "processes that rearrange the checkpoint"),
    ("src-strategy-path-or-dir", "src_strategy_path_or_dir", str, "strategy that the checkpoint was saved with"),
    ("strategy-load-checkpoint", "parallel.strategy_ckpt_load_file", str, "parallel strategy file to load"),
    ("only-save-strategy", "only_save_strategy", _true_or_false, "write the strategy files and stop"),
    ("remote-save-url", "remote_save_url", str, "where to copy the outputs to"),
    ("profile", "profile", _true_or_false, "record a profile"),
    ("do-sample", "model.model_config.do_sample", _true_or_false, "sample when predicting"),
    ("trust-remote-code", "trust_remote_code", _true_or_false, "let a tokenizer run code of its own"),
    ("predict-data", "input_data", str, "text, or file of text, to predict from"),
    ("predict-batch-size", "predict_batch_size", integer(1), "samples per prediction"),
)
OPTION_KEYS = [key for _, key, _, _ in _OPTIONS]
