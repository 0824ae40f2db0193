"""Find out why a training overflows that a MindFormers YAML file or a function of a Python program describes."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from mindspore import Tensor, nn
from mindspore import dtype as mstype

from mindformers_adaptive.gradients.backward import to_numpy
from mindformers_adaptive.gradients.batch_file import read_batch
from mindformers_adaptive.gradients.report import loss_division
from mindformers_adaptive.mindformers.keys import value_at
from mindformers_adaptive.mindformers.run_configuration import OverflowCase
from mindformers_adaptive.mindformers.training_probe import TrainingSource, load_weights
from mindformers_adaptive.overflow.explain import explain_overflow
from mindformers_adaptive.overflow.explanation import Explanation
from mindformers_adaptive.rules.checks import imported

_SECTION = "model.model_config"

# Settings of MindFormers' legacy and mcore models that let a part of the model compute in float32 instead of float16
# or bfloat16. compute_dtype, which sets the dtype of the whole model, is the last resort.
_DTYPES = ["softmax_compute_type", "softmax_compute_dtype", "layernorm_compute_type", "layernorm_compute_dtype"]
_DTYPES += ["rotary_dtype", "residual_dtype", "embedding_init_type", "moe_router_dtype", "router_dense_type"]
_LAST = ["compute_dtype"]
_SWITCHES = ["fp32_residual_connection"]

_NARROW = ("float16", "fp16", "bfloat16", "bf16")


class NetworkAndBatches(NamedTuple):
    """What it takes to explain an overflow: a network with the weights to measure, and batches of its training.

    Attributes:
        network (Cell): the train-step cell, or a network that returns its loss.
        batches (list): the batches, or micro-batches if a step of the training adds up several.
        measured (str): the weights and batches, in words.
        micro_batches (int): see :func:`~mindformers_adaptive.mindformers.keys.micro_batches_of`. Default: 1.
        settings (Mapping[str, Callable]): changes to try, as in
            :func:`mindformers_adaptive.overflow.explain.explain_overflow`. Default: none.
    """

    network: Any
    batches: list[Any]
    measured: str
    micro_batches: int = 1
    settings: Mapping[str, Any] = MappingProxyType({})


def explain_case(case: OverflowCase, progress: Callable[[int], object] | None = None) -> Explanation:
    """Say in which layer a training overflows, and which change helps.

    The passes are made by the train-step cell that a training would use, with the weights that it would start from. If
    they overflow, each setting of the YAML file's ``model_config`` that makes a part of the model compute in half
    precision is tried in float32.

    Args:
        case (OverflowCase): the training.
        progress (Callable, optional): called with the number of backward passes done. Default: None.

    Returns:
        Explanation.

    Raises:
        ValueError: if the checkpoint has none of the network's weights, the YAML file has no data, the loss scale is
            not above 0, there is no such function, it does not return a Cell, or the batch file is damaged.
        FileNotFoundError: if there is no such file, or no checkpoint in the folder.
        PyNativeError: if the model cannot run in PyNative mode, or with ``graph`` in graph mode.
    """
    training = _of_program(case) if case.network else training_of_file(case)
    explanation = explain_overflow(
        training.network,
        training.batches,
        case.loss_scale,
        settings=training.settings,
        graph=case.graph,
        progress=progress,
        micro_batches=training.micro_batches,
    )
    return dataclasses.replace(explanation.after(case.findings), measured=training.measured)


def training_of_file(case: OverflowCase) -> NetworkAndBatches:
    """Build the training that the YAML file of a case describes."""
    saved = None if case.batch is None else read_batch(case.batch)
    source = TrainingSource(str(case.config), case.checkpoint, case.train_dataset_dir, case.overrides)
    built = source.build_at_start()
    dataset, network = built.dataset, built.train_step.network
    rows = saved and list(_micro_batches(saved, dataset.get_batch_size()))
    rows = rows or list(itertools.islice(dataset.create_tuple_iterator(num_epochs=1), case.batches))
    if not rows:
        raise ValueError("The training data must have at least one batch, but has none. Make the batches smaller.")
    settings = {
        f"{key}: {value}": functools.partial(
            _with_weights_of, network, source.with_values({f"{_SECTION}.{key}": value})
        )
        for key, value in _worth_trying(network, value_at(source.read_file(), _SECTION) or {})
    }
    division = loss_division(built.micro_batches)
    measured = [built.weights, f"batch {case.batch}" if saved else "", f"each batch {division}" if division else ""]
    return NetworkAndBatches(built.train_step, rows, ", ".join(filter(None, measured)), built.micro_batches, settings)


def _of_program(case: OverflowCase) -> NetworkAndBatches:
    """Build the network of a Python program."""
    function = str(case.network)
    rows = [tuple(map(Tensor, read_batch(str(case.batch))))]
    # A colon between module and function is common too.
    build = imported(function.replace(":", "."), "'network' must be 'module.function', whose function returns it, but")
    try:
        network = build()
    except Exception as error:
        message = f"'network' {function} raised {error!r}. Call the function in Python to see where."
        raise ValueError(message) from error
    if not isinstance(network, nn.Cell):
        raise ValueError(
            f"'network' must name a function that returns a train-step cell, or a network that returns its loss, but "
            f"{function} returned {network!r} of type {type(network).__name__}. Return the Cell."
        )
    weights = f"weights that {function} gives"
    if case.checkpoint is not None:
        inner = network.network if isinstance(network, nn.TrainOneStepCell) else network
        weights = f"weights of {load_weights(inner, case.checkpoint)} (--checkpoint)"
    return NetworkAndBatches(network, rows, f"{weights}, batch {case.batch}")


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


def _with_weights_of(network: Any, source: TrainingSource) -> Any:
    """Return the train-step cell of a changed training, with the weights of ``network``."""
    import warnings

    with warnings.catch_warnings():
        # Ignore the warning that a changed value adds a key that the YAML file does not have.
        warnings.simplefilter("ignore")
        train_step = source.build().train_step
    weights = {weight.name: weight for weight in network.get_parameters()}
    for weight in train_step.network.get_parameters():
        if weight.name in weights:
            weight.set_data(Tensor(to_numpy(weights[weight.name]), mstype.float32).astype(weight.dtype))
    return train_step
