"""Start MindFormers' trainer with adaptive loss scaling from a YAML file, whose keys can be overridden."""

import os
import sys
import traceback
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindformers_adaptive.mindformers.configuration_check import check_config
from mindformers_adaptive.mindformers.cpu_limits import check_cpu
from mindformers_adaptive.mindformers.keys import value_at
from mindformers_adaptive.record.run_folder import CONFIG_FILE, file_in
from mindformers_adaptive.text.files import refuse_pipe
from mindformers_adaptive.text.untrusted import read_yaml

NUM_SAMPLES = "train_dataset.data_loader.num_samples"
EVAL_NUM_SAMPLES = "eval_dataset.data_loader.num_samples"

_RUN_MODES = ("train", "finetune", "eval", "predict")

# The start of the keys whose spelling check_config() checks.
_CHECKED = ("runner_wrapper.", "callbacks.")

# If the 'base_config' of a YAML file leads to more files than this number, one of them must lead back to itself.
_MOST_FILES = 30

# An error whose traceback passes through these modules was raised during the steps of a training, an evaluation or a
# prediction.
_AT_WORK = ("mindspore.train.model", "mindformers.generation.text_generator")


def load_config(
    path: str | Path,
    overrides: Mapping[str, Any] | None = None,
    register_path: str | None = None,
    may_add: Collection[str] = (),
) -> Any:
    """Register this package with MindFormers, load a YAML file and override some of its keys.

    Args:
        path (str): the YAML file.
        overrides (Mapping, optional): values by dotted key, as in ``{"optimizer.betas.1": 0.99}``, set in this order;
            see :func:`set_key`. A limit on evaluation samples has no effect if there are no evaluation data. Default:
            None.
        register_path (str, optional): folder of further classes for ``auto_register``. Default: None.
        may_add (Collection[str]): keys that the file need not have. Adding any other key gives a warning, except in
            ``runner_wrapper`` and ``callbacks``, whose keys are checked. Default: ().

    Returns:
        MindFormerConfig, ready for :func:`launch`.

    Raises:
        FileNotFoundError: if there is no such file.
        TypeError: if the file, or a file that its ``base_config`` leads to, does not hold keys, or
            :func:`mindformers_adaptive.mindformers.configuration_check.check_config` raises it.
        ValueError: for the same reasons, and by :func:`mindformers_adaptive.mindformers.cpu_limits.check_cpu`; and if
            the file's name does not end in .yaml or .yml, it is not YAML, its ``base_config`` leads back to it,
            ``run_mode`` is not one of train, finetune, eval and predict, or a key is unknown or cannot be set.
    """
    path = require_yaml_file(path)
    _check_files(path)
    import mindspore
    from mindformers.tools.register import MindFormerConfig

    from mindformers_adaptive.mindformers.registration import register

    use_register_path(register_path)
    register()
    overrides = dict(overrides or {})
    # MindFormers chooses a configuration template by the run mode, so it must know the run mode while it reads the YAML
    # file.
    run_mode = {key: value for key, value in overrides.items() if key == "run_mode"}
    try:
        config = MindFormerConfig(path, **run_mode)
    except KeyError as error:
        # MindFormers raises KeyError if a section has an unknown key or lacks a key. Name the file in the error too.
        raise ValueError(f"{path}: {error.args[0]}") from error
    order = _order_in_file(path, config.callbacks or [])
    in_file_order = config.callbacks = [config.callbacks[position] for position in order]
    for key, value in overrides.items():
        if key == EVAL_NUM_SAMPLES and not (config.eval_dataset and config.eval_dataset.data_loader):
            continue
        if not (set_key(config, key, value) or key in (*may_add, EVAL_NUM_SAMPLES) or key.startswith(_CHECKED)):
            warnings.warn(
                f"'{key}' was not in {path}; it is added, as {value!r}. Check the spelling of the key.", stacklevel=2
            )
    if config.run_mode not in _RUN_MODES:
        raise ValueError(
            f"'run_mode' must be one of {', '.join(_RUN_MODES)}, but got {config.run_mode!r}. Set it in the YAML file "
            "or with --run-mode."
        )
    target = value_at(config, "context.device_target") or mindspore.get_context("device_target")
    if config.run_mode in ("train", "finetune") and target == "CPU":
        check_cpu(config)
    check_config(config)
    if config.callbacks is in_file_order:
        config.callbacks = [in_file_order[order.index(position)] for position in range(len(order))]
    return config


def _order_in_file(path: str, callbacks: list[Any]) -> list[int]:
    """Return the positions of the callbacks in the order of the YAML file.

    MindFormers puts its MFLossMonitor first, but --options and messages count the callbacks as the user sees them.
    """
    from mindformers.tools.register import MindFormerConfig

    order: list[int] = []
    for written in MindFormerConfig._file2dict(path).get("callbacks") or []:
        same = [position for position, callback in enumerate(callbacks) if callback["type"] == written["type"]]
        order += [position for position in same if position not in order][:1]
    return order + [position for position in range(len(callbacks)) if position not in order]


def use_register_path(folder: str | None) -> None:
    """Let ``auto_register`` and ``import`` look for classes in a folder, unless the folder is None."""
    if folder is not None:
        folder = os.environ["REGISTER_PATH"] = str(Path(folder).resolve())
        if folder not in sys.path:
            sys.path.append(folder)


def require_yaml_file(path: str | Path) -> str:
    """Return the path of a YAML file as text, or raise FileNotFoundError or ValueError.

    For the output folder of a training, return the configuration that the training has saved in the folder.
    """
    path = file_in(path, CONFIG_FILE)
    if not Path(path).is_file():
        if Path(path).exists():
            refuse_pipe(path)
        raise FileNotFoundError(f"there is no file {str(path)!r} (current folder: {Path.cwd()})")
    if not str(path).endswith(("yaml", "yml")):
        # MindFormers would ignore a configuration file whose name does not end in .yaml or .yml.
        raise ValueError(f"the name of a YAML file must end in .yaml or .yml, but got {str(path)!r}. Rename the file")
    return str(path)


def _check_files(path: str) -> None:
    """Check a YAML file, and the files that its ``base_config`` leads to, before MindFormers reads them."""
    waiting, read = [path], 0
    while waiting:
        file = waiting.pop()
        if (read := read + 1) > _MOST_FILES:
            raise ValueError(
                f"'base_config' must lead to at most {_MOST_FILES} files, but from {path} it leads to more, such as "
                f"{file}. Check whether the 'base_config' of one of these files leads back to the same file."
            )
        content = read_yaml(file)
        if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
            raise TypeError(
                f"{file} must hold keys of MindFormers, but holds {str(content)[:80]!r}. Write lines such as 'seed: 0' "
                "and 'runner_config:'."
            )
        if isinstance(content.get("training"), Mapping):
            raise ValueError(
                f"{file} must be for MindFormers' graph-mode trainer, but has the section 'training' of MindFormers' "
                "PyNative trainer, which this package does not support. Write the file with 'runner_config' and "
                "'runner_wrapper', where 'context.mode: 1' trains in PyNative mode, or scale the loss in a training "
                "loop of your own with AdaptiveLossScaler."
            )
        bases = content.get("base_config", [])
        for base in bases if isinstance(bases, list) else [bases]:
            if not isinstance(base, str):
                raise TypeError(
                    f"{file}: 'base_config' must name a YAML file, but got {base!r}. Give the path of a YAML file, or "
                    "remove the key."
                )
            waiting.append(require_yaml_file(os.path.join(os.path.dirname(file), base)))


def set_key(config: Any, key: str, value: Any) -> bool:
    """Set one key of a loaded YAML file.

    Args:
        config (MindFormerConfig): the loaded file; changed in place.
        key (str): the path to the key, joined by dots, with numbers for positions in lists: ``callbacks.0.type``.
        value (object): the new value.

    Returns:
        bool, whether the key existed before, even with the value null. A missing key is added, with the missing
        sections above it.

    Raises:
        ValueError: if the path leads through something that is neither a section nor a place in a list, or a key of
            a section is no text.
    """
    *sections, last = key.split(".")
    node = config
    for section in sections:
        position = _place(node, section, key)
        if isinstance(node, dict) and node.get(position) is None:
            node[position] = type(config)()
        node = node[position]
    position = _place(node, last, key)
    was_there = isinstance(node, list) or position in node
    if isinstance(value, dict) and not all(isinstance(name, str) for name in value):
        raise ValueError(
            f"{key!r} must be a section whose keys are names, but got {value!r}. Put keys that are numbers in quotes."
        )
    # MindFormers reads the keys of a section as attributes, which a plain dict does not have.
    node[position] = type(config)(**value) if isinstance(value, dict) else value
    return was_there


def had_begun(error: BaseException) -> bool:
    """Return whether an error was raised during the steps of a training, an evaluation or a prediction."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    # An error that a callback raises before the first step counts as bad input, like the trainer's own early errors.
    if any(frame.f_code.co_name in ("begin", "on_train_begin", "on_eval_begin") for frame in frames):
        return False
    return any(frame.f_globals.get("__name__") in _AT_WORK for frame in frames)


def launch(config: Any, callbacks: Sequence[Any] = ()) -> None:
    """Run the task that a loaded YAML file describes.

    Args:
        config (MindFormerConfig): what :func:`load_config` returned.
        callbacks (Sequence[Callback]): callbacks of a training beside those in the file. Default: none.
    """
    from mindformers.core.context import build_context

    from mindformers_adaptive.mindformers.trainer import LaunchedTrainer

    try:
        from mindformers.utils.file_utils import set_output_path
    except ImportError:  # MindFormers before 1.8 has it elsewhere
        from mindformers.tools.utils import set_output_path

    set_output_path(config.output_dir)
    build_context(config)
    trainer = LaunchedTrainer(config, callbacks=list(callbacks))
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


def _place(node: Any, name: str, key: str) -> str | int:
    if isinstance(node, dict):
        return name
    if isinstance(node, list) and name.isdigit() and int(name) < len(node):
        return int(name)
    raise ValueError(
        f"'{key}' leads to nothing in the YAML file: there is no {name!r} in {node!r}. Name a section by its key, and "
        "an entry of a list by its number, counted from 0."
    )
