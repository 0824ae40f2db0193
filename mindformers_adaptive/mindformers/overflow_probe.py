"""Find out why a training overflows that a MindFormers YAML file or a function of a Python program describes."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import Tensor, nn
from mindspore import dtype as mstype

from mindformers_adaptive.gradients.backward import to_numpy
from mindformers_adaptive.gradients.batch_file import read_batch
from mindformers_adaptive.gradients.report import loss_division
from mindformers_adaptive.mindformers.keys import value_at
from mindformers_adaptive.mindformers.training_probe import TrainingSource, load_weights
from mindformers_adaptive.overflow.explain import explain_overflow
from mindformers_adaptive.overflow.explanation import Explanation
from mindformers_adaptive.record.symptom import Finding
from mindformers_adaptive.rules.checks import imported, require_integer

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


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What it takes to explain an overflow: a network with the weights to measure, and batches of its training.

    Attributes:
        network (Cell): the train-step cell, or a network that returns its loss.
        batches (list): the batches, or micro-batches if a step of the training adds up several.
        loss_scale (float, optional): the loss scale of the training; None for the one of the train-step cell.
        micro_batches (int): see :func:`~mindformers_adaptive.mindformers.keys.micro_batches_of`. Default: 1.
        settings (Mapping[str, Callable]): changes to try, as in
            :func:`mindformers_adaptive.overflow.explain.explain_overflow`. Default: none.
        measured (str): the weights and batches, in words. Default: "".
        findings (Sequence[Finding]): what the steps of the training show. Default: nothing.
    """

    network: Any
    batches: list[Any]
    loss_scale: float | None = None
    micro_batches: int = 1
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    measured: str = ""
    findings: Sequence[Finding] = ()

    def explain(self, graph: bool = False, progress: Callable[[int], object] | None = None) -> Explanation:
        """Say in which layer the training overflows, and which change helps.

        Args:
            graph (bool), progress (Callable, optional): as in
                :func:`mindformers_adaptive.overflow.explain.explain_overflow`. Default: False, None.

        Returns:
            Explanation.

        Raises:
            ValueError: if the loss scale is not above 0.
            PyNativeError: if the model cannot run in PyNative mode, or with ``graph`` in graph mode.
        """
        explanation = explain_overflow(
            self.network,
            self.batches,
            self.loss_scale,
            settings=self.settings,
            graph=graph,
            progress=progress,
            micro_batches=self.micro_batches,
        )
        return dataclasses.replace(explanation.after(self.findings), measured=self.measured)


def measurement_of_file(
    source: TrainingSource,
    loss_scale: float | None = None,
    batches: int = DEFAULT_BATCHES,
    batch: str | Path | None = None,
    findings: Sequence[Finding] = (),
) -> Measurement:
    """Build the training that a YAML file describes, and return what an explanation of its overflows needs.

    The passes are made by the train-step cell that a training would use, with the weights that it would start from. If
    they overflow, each setting of the file's ``model_config`` that makes a part of the model compute in half precision
    is tried in float32.

    Args:
        source (TrainingSource): the YAML file, the checkpoint and the data.
        loss_scale (float, optional): the loss scale of the training. Default: None, its initial loss scale.
        batches (int): how many batches of the training data. Default: 2.
        batch (str, optional): a file of one batch, as ``LossScaleMonitor(explain=True)`` writes it, to be used instead
            of the training data. Default: None.
        findings (Sequence[Finding]): as in :class:`Measurement`. Default: nothing.

    Returns:
        Measurement.

    Raises:
        TypeError: if ``batches`` is not an integer.
        ValueError: if ``batches`` is below 1, the checkpoint has none of the network's weights, or the file has no
            data.
        FileNotFoundError: if there is no such file, or no checkpoint in the folder.
    """
    require_integer("batches", batches, 1, f"The default is {DEFAULT_BATCHES}.", unit="number of batches")
    saved = None if batch is None else read_batch(batch)
    training = source.build_at_start()
    dataset, network = training.dataset, training.train_step.network
    rows = saved and list(_micro_batches(saved, dataset.get_batch_size()))
    rows = rows or list(itertools.islice(dataset.create_tuple_iterator(num_epochs=1), batches))
    if not rows:
        raise ValueError("The training data must have at least one batch, but has none. Make the batches smaller.")
    settings = {
        f"{key}: {value}": functools.partial(
            _with_weights_of, network, source.with_values({f"{_SECTION}.{key}": value})
        )
        for key, value in _worth_trying(network, value_at(source.read_file(), _SECTION) or {})
    }
    division = loss_division(training.micro_batches)
    measured = [training.weights, f"batch {batch}" if batch else "", f"each batch {division}" if division else ""]
    return Measurement(
        training.train_step,
        rows,
        loss_scale,
        training.micro_batches,
        settings,
        ", ".join(filter(None, measured)),
        findings,
    )


def measurement_of_program(
    function: str,
    batch: str | Path,
    checkpoint: str | Path | None = None,
    loss_scale: float | None = None,
    findings: Sequence[Finding] = (),
) -> Measurement:
    """Build the network of a Python program, and return what an explanation of its overflows needs.

    Args:
        function (str): ``module.function``; the function takes no arguments and returns the train-step cell, or a
            network that returns its loss.
        batch (str): a file of one batch, as ``LossScaleMonitor(explain=True)`` writes it.
        checkpoint (str, optional): as in :class:`~mindformers_adaptive.mindformers.training_probe.TrainingSource`.
            Default: None, the weights that the function gives to the network.
        loss_scale (float, optional): the loss scale of the training. Default: None, the one of the train-step cell.
        findings (Sequence[Finding]): as in :class:`Measurement`. Default: nothing.

    Returns:
        Measurement.

    Raises:
        ValueError: if there is no such function, it does not return a Cell, the batch file is damaged, or the
            checkpoint has none of the network's weights.
        FileNotFoundError: if there is no such file.
    """
    rows = [tuple(map(Tensor, read_batch(batch)))]
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
    if checkpoint is not None:
        inner = network.network if isinstance(network, nn.TrainOneStepCell) else network
        weights = f"weights of {load_weights(inner, checkpoint)} (--checkpoint)"
    return Measurement(network, rows, loss_scale, measured=f"{weights}, batch {batch}", findings=findings)


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
