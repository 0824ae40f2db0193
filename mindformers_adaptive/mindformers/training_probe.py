"""Measure the gradients of a training that a MindFormers YAML file describes, at several loss scales."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mindspore
from mindformers.tools.register import MindFormerConfig
from mindspore import nn
from mindspore.dataset.engine.datasets import Dataset

from mindformers_adaptive.gradients.ranges import DEFAULT_LOSS_SCALES, checked_loss_scales, gradient_ranges
from mindformers_adaptive.gradients.report import NEW_WEIGHTS, GradientRanges
from mindformers_adaptive.mindformers.checkpoint_arrays import load_newest
from mindformers_adaptive.mindformers.keys import micro_batches_of, value_at
from mindformers_adaptive.mindformers.launcher import load_config
from mindformers_adaptive.rules.checks import require_integer
from mindformers_adaptive.text.files import refuse_pipe

# Each loss is a mean over many tokens, so batches differ little, and a few of them represent the data.
DEFAULT_BATCHES = 4


def probe(
    source: TrainingSource,
    loss_scales: Iterable[float] = DEFAULT_LOSS_SCALES,
    batches: int = DEFAULT_BATCHES,
    *,
    layers: Iterable[str] = (),
    progress: Callable[[int], object] | None = None,
    observe: Callable[..., object] | None = None,
    gradient_format: Any = "float16",
) -> GradientRanges:
    """Measure the gradients at several loss scales, with the model and the data of a MindFormers YAML file.

    The backward pass is made by the train-step cell that a training would use, in one process, with the weights that
    the training would start from; ``measured`` of the result says which weights. If a step of the training adds up
    several micro-batches and divides their losses before the backward pass, each batch is measured as one micro-batch;
    see :func:`~mindformers_adaptive.mindformers.keys.micro_batches_of`.

    Args:
        source (TrainingSource): the YAML file, the checkpoint and the data.
        loss_scales (Iterable[float]): the loss scales, in any order. Default: 2^0, 2^4, ..., 2^32.
        batches (int): how many batches of the training data. Default: 4.
        layers (Iterable[str]): layers whose outputs and output gradients are measured too, given by name or by the
            name of their class. Default: none.
        progress (Callable, optional): called with the number of backward passes done; there are
            ``batches * len(loss_scales)``, and with ``layers`` twice as many. Default: None.
        observe (Callable, optional): called with the loss scale and the gradients of each backward pass. Default:
            None.
        gradient_format (Union[str, dict, Format]): the format of the gradients in the backward pass, as in
            :func:`~mindformers_adaptive.gradients.ranges.gradient_ranges`. Default: "float16".

    Returns:
        GradientRanges, for :func:`mindformers_adaptive.gradients.recommendation.recommend_loss_scale` as well.

    Raises:
        TypeError: if ``batches`` is not an integer, a loss scale not a number, or a layer not a string.
        ValueError: if ``batches`` is below 1, the checkpoint has none of the network's weights, or the network has no
            such layer.
        FileNotFoundError: if there is no such file, or no checkpoint in the folder.
    """
    require_integer("batches", batches, 1, f"The default is {DEFAULT_BATCHES}.", unit="number of batches")
    loss_scales = checked_loss_scales(loss_scales)
    training = source.build_at_start()
    rows = itertools.islice(training.dataset.create_tuple_iterator(num_epochs=1), batches)
    ranges = gradient_ranges(
        training.train_step,
        rows,
        loss_scales,
        layers=layers,
        progress=progress,
        observe=observe,
        gradient_format=gradient_format,
        micro_batches=training.micro_batches,
    )
    return dataclasses.replace(ranges, measured=training.weights)


class Training(NamedTuple):
    """The train step and the data that a YAML file describes, built in one process for a measurement.

    Attributes:
        train_step (Cell): the train-step cell, with the model as its ``network``. Its optimizer is a stand-in that has
            the network's Parameters but no state.
        dataset (Dataset): the data in batches, or in micro-batches if gradients are accumulated.
        micro_batches (int): see :func:`~mindformers_adaptive.mindformers.keys.micro_batches_of`.
        weights (str): which weights the model has, in words.
    """

    train_step: nn.Cell
    dataset: Dataset
    micro_batches: int
    weights: str = NEW_WEIGHTS


@dataclasses.dataclass(frozen=True)
class TrainingSource:
    """The files that describe a training: its YAML file, its checkpoint and its data.

    Attributes:
        config_path (str): the YAML file.
        checkpoint (str, optional): a ``.ckpt`` or ``.safetensors`` file, or a folder, whose newest checkpoint is taken.
            Default: None, the checkpoint that the YAML file says to load, or new weights if it names no checkpoint.
        train_dataset_dir (str, optional): the training data, instead of those that the YAML file names. Default: None.
        overrides (Mapping): values by dotted key that replace values of the YAML file. Default: none.
    """

    config_path: str | Path
    checkpoint: str | Path | None = None
    train_dataset_dir: str | Path | None = None
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def with_values(self, values: Mapping[str, Any]) -> TrainingSource:
        """Return a copy in which further values, by dotted key, replace values of the YAML file."""
        return dataclasses.replace(self, overrides={**self.overrides, **values})

    def read_file(self) -> Any:
        """Return the MindFormerConfig of the YAML file with the overrides, for a training in one process."""
        values = {**self.overrides, "use_parallel": False}
        return load_config(self.config_path, values, may_add=tuple(values))

    def build(self) -> Training:
        """Build the train-step cell, with new weights, and the training data as MindFormers' trainer does.

        Returns:
            Training.

        Raises:
            FileNotFoundError: if there is no such file.
        """
        config, micro_batches = self._read_config()
        return Training(*_build(config), micro_batches)

    def build_at_start(self) -> Training:
        """Build the training as :meth:`build` does, with the weights that the training would start from.

        Returns:
            Training.

        Raises:
            FileNotFoundError: if there is no such file, or no checkpoint in the folder.
            ValueError: if the checkpoint has none of the network's weights.
        """
        _require_checkpoint("'checkpoint'", self.checkpoint)
        config, micro_batches = self._read_config()
        named = {"--checkpoint": self.checkpoint, "load_checkpoint": config.load_checkpoint}
        named["checkpoint.load_path"] = value_at(config, "checkpoint.load_path")
        key, path = next(((key, path) for key, path in named.items() if path), ("", None))
        if self.checkpoint is None:
            remedy = " Give another checkpoint with --checkpoint, or use new weights with --options load_checkpoint=''."
            _require_checkpoint(f"'{key}' of the YAML file", path, remedy)
        training = Training(*_build(config), micro_batches)
        if path is None:
            return training
        return training._replace(weights=f"weights of {load_weights(training.train_step.network, path)} ({key})")

    def _read_config(self) -> tuple[Any, int]:
        overrides = {"run_mode": "train", **self.overrides}
        if self.train_dataset_dir is not None:
            overrides["train_dataset.data_loader.dataset_dir"] = str(self.train_dataset_dir)
        # The measurement runs in one process, however many processes the training has.
        one_process = {**overrides, "use_parallel": False}
        config = load_config(self.config_path, one_process, may_add=("run_mode", "use_parallel"))
        is_parallel = overrides.get("use_parallel", MindFormerConfig(str(self.config_path)).use_parallel)
        device_target = value_at(config, "context.device_target") or mindspore.get_context("device_target")
        micro_batches = micro_batches_of(config, bool(is_parallel), device_target)
        if config.runner_config:
            config.runner_config.gradient_accumulation_steps = 1
        return config, micro_batches


def _require_checkpoint(name: str, path: Any, remedy: str = "") -> None:
    if path is not None and not (str(path) and Path(path).exists()):
        raise FileNotFoundError(f"{name} must name a file or folder, but there is no {str(path)!r}.{remedy}")
    if path is not None:
        refuse_pipe(path)


def _build(config: Any) -> tuple[Any, Any]:
    from mindformers.core.context import build_context
    from mindformers.core.parallel_config import build_parallel_config
    from mindformers.dataset import build_dataset, check_dataset_config
    from mindformers.trainer.base_trainer import BaseTrainer

    if not (config.get("train_dataset") and config.get("train_dataset_task")):
        raise ValueError(
            "The YAML file must say which data to train on, but has no 'train_dataset' or no 'train_dataset_task'. Add "
            "both sections; --train-dataset-dir only says where the data lies."
        )
    build_context(config)
    build_parallel_config(config)
    order_of_inputs = config.train_dataset.pop("construct_args_key", None)
    trainer = BaseTrainer()
    trainer.set_config(config, is_full_config=True)
    check_dataset_config(config)
    dataset = build_dataset(config.train_dataset_task)
    network = trainer.create_network(
        {
            "parallel_config": config.parallel_config,
            "moe_config": config.moe_config,
            "dataset_config": config.train_dataset,
            "calculate_per_token_loss": getattr(config, "calculate_per_token_loss", False),
            "batch_size": config.runner_config.mini_batch_size,
        }
    )
    if order_of_inputs is not None:
        network = trainer.warp_data_order_with_tool_cells(network, order_of_inputs)
    network = trainer.wrap_network_with_tool_cells(network)
    return trainer.create_model_wrapper(network, nn.SGD(network.trainable_params(), learning_rate=0.0)), dataset


def load_weights(network: Any, checkpoint: str | Path) -> str:
    """Load the weights of a checkpoint into a network; everything else in the checkpoint is ignored.

    Args:
        network (Cell): changed in place.
        checkpoint (str): a ``.ckpt`` or ``.safetensors`` file, or a folder of them, of ``rank_N`` folders or of
            MindFormers' ``checkpoint:`` format, of which the newest is taken.

    Returns:
        str, the file or folder that was read.

    Raises:
        FileNotFoundError: if there is no such path, or no checkpoint in the folder.
        ValueError: if the checkpoint has none of the network's weights.
    """
    newest, loaded = load_newest(str(checkpoint))
    wanted = {weight.name for weight in network.get_parameters()}
    missing = sorted(wanted - loaded.keys())
    if not wanted & loaded.keys():
        raise ValueError(
            f"'checkpoint' must hold the network's weights, such as {missing[0]!r}, but {newest.path} has none of "
            "them. Give a checkpoint of this model."
        )
    if missing:
        warnings.warn(
            f"{newest.path} does not have {len(missing)} of the network's {len(wanted)} Parameters, such as "
            f"{missing[0]!r}: they keep their initial values.",
            stacklevel=2,
        )
    mindspore.load_param_into_net(network, {name: value for name, value in loaded.items() if name in wanted})
    return str(newest.path)
