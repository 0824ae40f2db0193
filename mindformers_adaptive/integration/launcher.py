"""The launcher: MindFormers' trainer from a YAML file and a command line, with adaptive loss scaling registered."""

import os
import sys
import warnings
from pathlib import Path

from mindformers_adaptive.integration.launch_options import NUM_SAMPLES, parse_arguments
from mindformers_adaptive.integration.resume_workarounds import (
    offer_barrier_on_cpu,
    offer_newest_iteration,
    offer_single_process_safetensors,
)

__all__ = ["load_config", "main", "set_key"]

RUN_MODES = ("train", "finetune", "eval", "predict")


def main(arguments=None, program="run_mindformer.py"):
    """Run the task that a YAML file and the command line describe.

    Args:
        arguments (list[str], optional): the command line without the program's name. Default: None, ``sys.argv``.
        program (str): the program's name, for its help. Default: "run_mindformer.py".
    """
    _run(load_config(parse_arguments(arguments, program)))


def load_config(options):
    """Register the plugin, load the YAML file and apply the command line to it.

    Args:
        options (argparse.Namespace): what
            :func:`mindformers_adaptive.integration.launch_options.parse_arguments` returned.

    Returns:
        MindFormerConfig, ready for ``build_context`` and ``Trainer``.

    Raises:
        ValueError: if ``run_mode`` is not one of train, finetune, eval and predict, or a key leads nowhere.
    """
    from mindformers.tools.register import MindFormerConfig

    from mindformers_adaptive.integration.registration import register

    _offer_register_path(options.register_path)
    register()
    # MindFormers fills in its template by the run mode, so it has to know it while it reads the file.
    run_mode = {key: value for key, value in {**options.named, **options.free}.items() if key == "run_mode"}
    config = MindFormerConfig(options.config, **run_mode)
    for key, value in options.named.items():
        set_key(config, key, value)
    if NUM_SAMPLES in options.named and config.eval_dataset and config.eval_dataset.data_loader:
        config.eval_dataset.data_loader.num_samples = options.named[NUM_SAMPLES]
    for key, value in options.free.items():
        if not set_key(config, key, value):
            warnings.warn(f"--options: '{key}' was not in {options.config}; it is added, as {value!r}.", stacklevel=2)
    if config.run_mode not in RUN_MODES:
        raise ValueError(
            f"'run_mode' must be one of {', '.join(RUN_MODES)}, but got {config.run_mode!r}. Set it in the YAML file "
            "or with --run_mode."
        )
    _stay_out_of_sink_mode_on_cpu(config)
    return config


def set_key(config, key, value):
    """Set one key of a loaded YAML file.

    Args:
        config (MindFormerConfig): the loaded file; changed in place.
        key (str): the way to the key with dots between, a number for a place in a list: ``callbacks.0.type``.
        value (object): the new value.

    Returns:
        bool, whether the key was there before, be it null. Where it was not, it is added, with the sections on the way.

    Raises:
        ValueError: if the way leads through something that is neither a section nor a place in a list.
    """
    *sections, last = key.split(".")
    node = config
    for section in sections:
        if _look_up(node, section, key) is None:
            node[_key_or_place(node, section)] = type(config)()
        node = _look_up(node, section, key)
    was_there = _look_up(node, last, key) is not None or last in node
    # MindFormers reads the keys of a section as attributes, which a plain dict does not have.
    node[_key_or_place(node, last)] = type(config)(**value) if isinstance(value, dict) else value
    return was_there


def _look_up(node, name, key):
    if isinstance(node, dict):
        return node.get(name)
    if isinstance(node, list) and name.isdigit() and int(name) < len(node):
        return node[int(name)]
    raise ValueError(
        f"'{key}' leads to nothing in the YAML file: there is no {name!r} in {node!r}. Name a section by its key and a "
        "place in a list by its number, from 0."
    )


def _key_or_place(node, name):
    return int(name) if isinstance(node, list) else name


def _offer_register_path(register_path):
    if register_path is None:
        return
    folder = str(Path(register_path).resolve())
    os.environ["REGISTER_PATH"] = folder
    if folder not in sys.path:
        sys.path.append(folder)


def _stay_out_of_sink_mode_on_cpu(config):
    runner = config.runner_config
    if runner and runner.sink_mode and config.context and config.context.device_target == "CPU":
        runner.sink_mode = False
        warnings.warn(
            "'runner_config.sink_mode' must be False on CPU: MindSpore cannot sink data there, and MindFormers would "
            "train sink_size times too long. False is used.",
            stacklevel=3,
        )


def _run(config):
    from mindformers.core.context import build_context
    from mindformers.trainer import Trainer

    try:
        from mindformers.utils.file_utils import set_output_path
    except ImportError:  # before MindFormers 1.8
        from mindformers.tools.utils import set_output_path

    set_output_path(config.output_dir)
    build_context(config)
    offer_barrier_on_cpu(config)
    offer_single_process_safetensors(config)
    offer_newest_iteration(config)
    trainer = Trainer(config)
    if config.run_mode in ("train", "finetune"):
        trainer.train()
    elif config.run_mode == "eval":
        trainer.evaluate(eval_checkpoint=config.load_checkpoint)
    else:
        trainer.predict(
            predict_checkpoint=config.load_checkpoint,
            input_data=config.input_data,
            batch_size=config.predict_batch_size,
        )


if __name__ == "__main__":
    main()
