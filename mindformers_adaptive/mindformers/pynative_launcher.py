"""Start MindFormers' PyNative trainer, with loss scaling if the YAML file has a section ``training.loss_scale``."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from mindformers_adaptive.mindformers.launcher import require_yaml_file, set_key, use_register_path
from mindformers_adaptive.mindformers.pynative_section import check_config, is_for_pynative_trainer, read_config
from mindformers_adaptive.text.untrusted import read_yaml

__all__ = ["is_for", "launch", "load_config"]

_IN_BOTH = ("run_mode", "context.mode", "context.device_target")


def is_for(path: str | Path, mode: int | None = None) -> bool:
    """Return whether a YAML file is for MindFormers' PyNative trainer; False for a file that cannot be read.

    Args:
        path (str): the file.
        mode (int, optional): the ``context.mode`` to be used instead of the file's. Default: None.

    Raises:
        ValueError: as in :func:`mindformers_adaptive.mindformers.pynative_section.is_for_pynative_trainer`.
    """
    try:
        content = read_yaml(path)
    except ValueError:
        return False
    return is_for_pynative_trainer(content, mode)


def load_config(
    path: str | Path,
    overrides: Mapping[str, Any] | None = None,
    register_path: str | None = None,
    may_add: Collection[str] = (),
) -> dict[str, Any]:
    """Load a YAML file for the PyNative trainer, override some of its keys, and check its loss-scaling settings.

    Args:
        path (str): the YAML file.
        overrides (Mapping, optional): values by dotted key, set in this order. Default: None.
        register_path (str, optional): folder of further classes, which can be imported from then on. Default: None.
        may_add (Collection[str]): keys that options set for the graph-mode trainer; most of them are refused, because
            the PyNative trainer has other keys. Default: ().

    Returns:
        dict, ready for :func:`launch`.

    Raises:
        FileNotFoundError: if there is no such file.
        TypeError: as in :func:`mindformers_adaptive.mindformers.pynative_section.check_config`.
        ValueError: for the same reasons; if ``run_mode`` is not train, or a key is one of the graph-mode trainer or
            cannot be set.
    """
    path = require_yaml_file(path)
    config, section = read_config(path)
    config = copy.deepcopy({**config, "training": {**config["training"], "loss_scale": section}})
    use_register_path(register_path)
    for key, value in (overrides or {}).items():
        if key in may_add and key not in _IN_BOTH:
            raise ValueError(
                f"'{key}' is a key of MindFormers' graph-mode trainer, but {path} is for its PyNative trainer. Set the "
                "corresponding key of the PyNative trainer with --options, such as training.steps."
            )
        if not set_key(config, key, value) and not key.startswith("training.loss_scale"):
            warnings.warn(f"'{key}' was not in {path}; it is added, as {value!r}.", stacklevel=2)
    if (run_mode := config.get("run_mode", "train")) != "train":
        raise ValueError(
            f"'run_mode' must be train with the PyNative trainer, but got {run_mode!r}. Set it to train. "
            "To predict, which needs no loss scaling, use MindFormers' own run_mindformer.py."
        )
    check_config(*read_config(config))
    return config


def launch(config: dict[str, Any]) -> None:
    """Run the training that a loaded YAML file describes.

    Args:
        config (dict): what :func:`load_config` returned.

    Raises:
        ImportError: if MindFormers is older than 2.0.0, or hyper-parallel is not installed.
    """
    import mindspore

    from mindformers_adaptive.mindformers.pynative_trainer import stock_trainer, trainer_class

    without_section, section = read_config(config)
    stock = stock_trainer()
    target = config.get("context", {}).get("device_target", "Ascend")
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE, device_target=target)
    trainer = stock.Trainer(config=without_section) if section is None else trainer_class()(config=config)
    trainer.train()
