"""The command line of the launcher.

An option that MindFormers' ``run_mindformer.py`` has too sets the same key of the YAML file, and
``--options key.sub=value`` sets any other.
"""

import argparse
import re
from pathlib import Path

import yaml

__all__ = ["NUM_SAMPLES", "parse_arguments"]

# The key of --num_samples, which limits the evaluation data too.
NUM_SAMPLES = "train_dataset.data_loader.num_samples"


def parse_arguments(arguments=None, program="run_mindformer.py"):
    """Parse the command line.

    Args:
        arguments (list[str], optional): the command line without the program's name. Default: None, ``sys.argv``.
        program (str): the program's name, for its help. Default: "run_mindformer.py".

    Returns:
        argparse.Namespace, with ``config`` and ``register_path`` (str or None), ``named`` and ``free``: dicts from
        dotted YAML key to value, of the options with a name and of those behind ``--options``.
    """
    parser = _build_parser(program)
    parsed = parser.parse_args(arguments)
    if not Path(parsed.config).is_file():
        parser.error(f"argument --config: there is no file {parsed.config!r}, seen from {Path.cwd()}")
    if not parsed.config.endswith(("yaml", "yml")):
        # MindFormers would take no notice of the file.
        parser.error(f"argument --config: the name of a YAML file must end in .yaml or .yml, but got {parsed.config!r}")
    named = {key: getattr(parsed, name) for name, key, _, _ in _OPTIONS if getattr(parsed, name) is not None}
    free = {}
    for text in parsed.options:
        key, equals, value = text.partition("=")
        if not equals or not all(key.split(".")):
            parser.error(f"argument --options: {text!r} must have the form key.sub=value, as in optimizer.eps=1e-8")
        try:
            free[key] = _parse_value(value)
        except ValueError as error:
            parser.error(f"argument --options: {text!r}: {error}")
    return argparse.Namespace(config=parsed.config, register_path=parsed.register_path, named=named, free=free)


class _OptionLoader(yaml.SafeLoader):
    """YAML in which 1e-4 is a number; YAML 1.1 wants 1.0e-4, but on a command line everybody means the number."""


_OptionLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("+-.0123456789")
)


def _parse_value(text):
    try:
        return yaml.load(text, Loader=_OptionLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"{text!r} is not a value in YAML; put brackets, braces and colons in quotes") from error


def _true_or_false(text):
    value = _parse_value(text.lower())
    if value not in (True, False):
        raise argparse.ArgumentTypeError(f"must be true or false, but got {text!r}")
    return bool(value)


def _true_or_false_or_name(text):
    return _true_or_false(text) if text.lower() in ("true", "false") else text


# name on the command line, key in the YAML file, type, help
_OPTIONS = (
    ("run_mode", "run_mode", str, "what to do: train, finetune, eval or predict"),
    ("mode", "context.mode", int, "0 compiles the train step as a graph, 1 runs it op by op (PyNative)"),
    ("device_target", "context.device_target", str, "Ascend, GPU or CPU"),
    ("device_id", "context.device_id", int, "which device of this machine"),
    ("use_parallel", "use_parallel", _true_or_false, "run as one of several processes that train together"),
    ("seed", "seed", int, "seed of all random numbers"),
    ("output_dir", "output_dir", str, "folder for logs, checkpoints and strategies"),
    ("epochs", "runner_config.epochs", int, "how often to go through the data"),
    ("batch_size", "runner_config.batch_size", int, "samples a step"),
    ("sink_mode", "runner_config.sink_mode", _true_or_false, "feed the data on the device, several steps a call"),
    (
        "gradient_accumulation_steps",
        "runner_config.gradient_accumulation_steps",
        int,
        "small batches added up to one step",
    ),
    ("train_dataset_dir", "train_dataset.data_loader.dataset_dir", str, "file or folder of the training data"),
    ("eval_dataset_dir", "eval_dataset.data_loader.dataset_dir", str, "file or folder of the evaluation data"),
    ("num_samples", NUM_SAMPLES, int, "use only so many samples of the training data, and of the evaluation data"),
    ("do_eval", "do_eval", _true_or_false, "evaluate while training"),
    ("load_checkpoint", "load_checkpoint", str, "checkpoint to load, a file or a folder"),
    (
        "resume_training",
        "resume_training",
        _true_or_false_or_name,
        "go on from the checkpoint: true, or the name of its file",
    ),
    ("auto_trans_ckpt", "auto_trans_ckpt", _true_or_false, "rearrange the checkpoint for this parallel setting"),
    ("transform_process_num", "transform_process_num", int, "processes that rearrange the checkpoint"),
    ("src_strategy_path_or_dir", "src_strategy_path_or_dir", str, "strategy that the checkpoint was written under"),
    ("strategy_load_checkpoint", "parallel.strategy_ckpt_load_file", str, "parallel strategy file to load"),
    ("only_save_strategy", "only_save_strategy", _true_or_false, "write the strategy files and stop"),
    ("remote_save_url", "remote_save_url", str, "where to copy the outputs to"),
    ("profile", "profile", _true_or_false, "record a profile"),
    ("do_sample", "model.model_config.do_sample", _true_or_false, "sample when predicting"),
    ("trust_remote_code", "trust_remote_code", _true_or_false, "let a tokenizer run code of its own"),
    ("predict_data", "input_data", str, "text, or file of text, to predict from"),
    ("predict_batch_size", "predict_batch_size", int, "samples a prediction"),
)


def _build_parser(program):
    parser = argparse.ArgumentParser(
        prog=program,
        description="Train, fine-tune, evaluate or predict with MindFormers and adaptive loss scaling.",
        epilog=f"example: {program} --config configs/tiny_llama_cpu_fp16.yaml --epochs 1 "
        "--options runner_wrapper.scale_sense.max_scale_window=200",
    )
    parser.add_argument("--config", required=True, help="the YAML file, seen from the working folder")
    for name, key, kind, text in _OPTIONS:
        metavar = "BOOL" if kind is _true_or_false else None
        parser.add_argument(f"--{name}", type=kind, metavar=metavar, help=f"{text} (sets {key})")
    parser.add_argument("--register_path", help="folder of further classes for auto_register")
    parser.add_argument(
        "--options",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY.SUB=VALUE",
        help="set any key of the YAML file; they have the last word over the options with a name",
    )
    return parser
