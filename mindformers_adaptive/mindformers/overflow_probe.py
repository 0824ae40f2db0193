"""Find out why a training that a MindFormers YAML file describes overflows, and which setting in the file helps."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import Tensor
from mindspore import dtype as mstype

from mindformers_adaptive.gradients.backward import to_numpy
from mindformers_adaptive.gradients.batch_file import read_batch
from mindformers_adaptive.gradients.report import loss_division
from mindformers_adaptive.mindformers.keys import value_at
from mindformers_adaptive.mindformers.launcher import load_config
from mindformers_adaptive.mindformers.training_probe import build_training, build_training_at_start
from mindformers_adaptive.overflow.explain import explain_overflow
from mindformers_adaptive.overflow.explanation import Explanation
from mindformers_adaptive.rules.checks import require_integer

__all__ = ["DEFAULT_BATCHES", "why"]

# Each batch costs up to three passes in PyNative mode, and a model that overflows does so with almost any batch. So two
# batches are enough.
DEFAULT_BATCHES = 2

_SECTION = "model.model_config"

# Settings of MindFormers' legacy and mcore models that let a part of the model compute in float32 instead of float16
# or bfloat16. compute_dtype, which sets the dtype of the whole model, is the last resort.
_DTYPES = ["softmax_compute_type", "softmax_compute_dtype", "layernorm_compute_type", "layernorm_compute_dtype"]
_DTYPES += ["rotary_dtype", "residual_dtype", "embedding_init_type", "moe_router_dtype", "router_dense_type"]
_LAST = ["compute_dtype"]
_SWITCHES = ["fp32_residual_connection"]

_NARROW = ("float16", "fp16", "bfloat16", "bf16")


def why(
    config_path: str | Path,
    checkpoint: str | Path | None = None,
    train_dataset_dir: str | Path | None = None,
    loss_scale: float | None = None,
    batches: int = DEFAULT_BATCHES,
    *,
    batch: str | Path | None = None,
    graph: bool = False,
    overrides: Mapping[str, Any] | None = None,
    failure: str = "",
    progress: Callable[[int], object] | None = None,
) -> Explanation:
    """Say why the training that a YAML file describes overflows, in which layer, and which setting in the file helps.

    The passes are made by the train-step cell that a training would use, with the weights that it would start from, as
    in :func:`mindformers_adaptive.overflow.explain.explain_overflow`. If they overflow, each setting of the file's
    ``model_config`` that makes a part of the model compute in half precision is tried in float32.

    Args:
        config_path (str): the YAML file.
        checkpoint (str, optional): a ``.ckpt`` or ``.safetensors`` file, or a folder, whose newest checkpoint is taken.
            Default: None, the checkpoint that the YAML file says to load.
        train_dataset_dir (str, optional): the training data, instead of those that the YAML file names. Default: None.
        loss_scale (float, optional): the loss scale of the training. Default: None, its initial loss scale.
        batches (int): how many batches of the training data. Default: 2.
        batch (str, optional): a file of one batch, as ``LossScaleMonitor(explain=True)`` writes it, to be used instead
            of the training data. Default: None.
        failure (str): which steps of the training had a loss that is inf or NaN, in words. Where the passes have finite
            losses, the explanation says that it is not about that failure. Default: "".
        graph (bool): as in :func:`mindformers_adaptive.overflow.explain.explain_overflow`. Default: False.
        overrides (dict, optional): values by dotted key that replace values of the YAML file. Default: None.
        progress (Callable, optional): called with the number of backward passes done. Default: None.

    Returns:
        Explanation.

    Raises:
        TypeError: if ``batches`` is not an integer, or ``loss_scale`` not a number.
        ValueError: if ``batches`` is below 1, the loss scale not above 0, the checkpoint has none of the network's
            weights, or the file has no data.
        FileNotFoundError: if there is no such file, or no checkpoint in the folder.
        PyNativeError: if the model cannot run in PyNative mode, or with ``graph`` in graph mode.
    """
    require_integer("batches", batches, 1, f"The default is {DEFAULT_BATCHES}.", unit="number of batches")
    saved = None if batch is None else read_batch(batch)
    training = build_training_at_start(config_path, checkpoint, train_dataset_dir, overrides)
    dataset, network = training.dataset, training.train_step.network
    rows = saved and list(_micro_batches(saved, dataset.get_batch_size()))
    rows = rows or list(itertools.islice(dataset.create_tuple_iterator(num_epochs=1), batches))
    if not rows:
        raise ValueError("The training data must have at least one batch, but has none. Make the batches smaller.")
    one_process = {**(overrides or {}), "use_parallel": False}
    written = load_config(config_path, one_process, may_add=tuple(one_process))
    settings = {
        f"{key}: {value}": functools.partial(
            _with_setting, network, config_path, train_dataset_dir, {**(overrides or {}), f"{_SECTION}.{key}": value}
        )
        for key, value in _worth_trying(network, value_at(written, _SECTION) or {})
    }
    division = loss_division(training.micro_batches)
    measured = f"{training.weights}, batch {batch}" if batch else training.weights
    explanation = explain_overflow(
        training.train_step,
        rows,
        loss_scale,
        settings=settings,
        graph=graph,
        progress=progress,
        micro_batches=training.micro_batches,
    )
    measured = f"{measured}, each batch {division}" if division else measured
    return dataclasses.replace(explanation, measured=measured, failure=failure)


def _micro_batches(batch: Sequence[Any], size: int) -> Iterator[tuple[Any, ...]]:
    """Split a saved batch, which holds all micro-batches of a step, and yield its micro-batches."""
    rows = {values.shape[:1] for values in batch}
    can_split = len(rows) == 1 and () not in rows and not next(iter(rows))[0] % size
    parts = [np.split(values, len(values) // size) if can_split else [values] for values in batch]
    yield from (tuple(map(Tensor, columns)) for columns in zip(*parts, strict=True))


def _worth_trying(network: Any, section: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the key and value of each setting that would make a part of the model compute in float32."""
    config = next((cell.config for _, cell in network.cells_and_names() if hasattr(cell, "config")), None)

    def is_narrow(key: str) -> bool:
        value = section.get(key) if getattr(config, key, None) is None else getattr(config, key)
        name = str(value).lower().rpartition(".")[2]
        return name in _NARROW

    yield from ((key, "float32") for key in _DTYPES if is_narrow(key))
    yield from ((key, True) for key in _SWITCHES if getattr(config, key, section.get(key)) is False)
    yield from ((key, "float32") for key in _LAST if is_narrow(key))


def _with_setting(
    network: Any, config_path: str | Path, train_dataset_dir: str | Path | None, overrides: Mapping[str, Any]
) -> Any:
    """Return the train-step cell of the training with changed settings, and with the weights of ``network``."""
    import warnings

    with warnings.catch_warnings():
        # Ignore the warning that `overrides` adds a key that the YAML file does not have.
        warnings.simplefilter("ignore")
        train_step = build_training(config_path, train_dataset_dir, overrides).train_step
    weights = {weight.name: weight for weight in network.get_parameters()}
    for weight in train_step.network.get_parameters():
        if weight.name in weights:
            weight.set_data(Tensor(to_numpy(weights[weight.name]), mstype.float32).astype(weight.dtype))
    return train_step
