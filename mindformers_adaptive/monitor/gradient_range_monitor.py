"""``GradientRangeMonitor``: the ranges of gradients and weights during training, as JSON lines and for TensorBoard."""

import functools
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from mindformers.tools.logger import logger
from mindspore import nn

from mindformers_adaptive.gradients.backward import to_numpy
from mindformers_adaptive.gradients.layers import LayerOutputsError
from mindformers_adaptive.gradients.ranges import GradientSweep, checked_loss_scales
from mindformers_adaptive.monitor.recording_callback import RecordingCallback
from mindformers_adaptive.rules.checks import require_integer, require_names
from mindformers_adaptive.rules.formats import Format, find_format


class GradientRangeMonitor(RecordingCallback):
    """Callback that measures the gradients of every N-th step of a training, before the step is taken.

    It works with ``mindspore.train.Model`` and, after ``register()``, as ``type: GradientRangeMonitor`` in the
    ``callbacks`` of a MindFormers YAML file. For each loss scale it runs a forward and backward pass on the batch of
    the step, see :func:`mindformers_adaptive.gradients.ranges.gradient_ranges`; training takes the same steps as
    without it. The record is a file of JSON lines, each with ``step``, the ``loss_scale`` of the training and what
    ``GradientRanges.to_dict()`` returns. A run that is resumed continues it, and steps that it takes again replace the
    old ones.

    The gradients come from the gradient function of the train-step cell itself. For TensorBoard they are those at the
    loss scale of the training, divided as the cell divides them, so that their norm is the one that MindFormers logs:

    ========================================= ==================================================================
    tag                                       value
    ========================================= ==================================================================
    ``NAME``, ``NAME/norm``                   histogram and norm of a Parameter
    ``NAME/grad``, ``NAME/grad/norm``         histogram and norm of its gradient
    ``gradients/norm, largest, smallest``     of all gradients together
    ``gradients/zeros_share``                 share of gradients that are exactly 0
    ``gradients/infs_and_nans_share``         share that is inf or NaN; the other values ignore these
    ``gradients/underflowed_share``           share that is 0 only at this scale; with ``loss_scales``
    ``LAYER/output``, ``LAYER/output/norm``   histogram and norm of the output of a layer; with ``layers``
    ``LAYER/output_mbs0``, ``_mbs1``, ...     the histogram for each micro-batch, if gradients are accumulated
    ``LAYER/output/grad``, with ``/norm``     histogram and norm of the gradient of that output; with ``layers``
    ========================================= ==================================================================

    In data-sink mode the host does not see the batches: there the monitor warns once and does nothing.

    Args:
        every_n_steps (int): measure at the steps whose number is a multiple of this number. Default: 100, so that one
            more backward pass takes less than 1% of the time.
        loss_scales (Iterable[float], optional): further loss scales to try. Default: None, only the loss scale of the
            training, which cannot tell an underflow from a gradient of 0.
        record_path (str, optional): the file. Default: None, ``gradient_ranges.jsonl`` in the output folder of
            MindFormers, which is ``./output`` unless set otherwise.
        tensorboard_dir (str, optional): a folder for TensorBoard where the YAML file has no ``tensorboard`` section;
            with one, its folder is used. Default: None, no histograms without that section.
        all_ranks (bool): whether every process writes, each into files with its rank in the name, or only the first;
            all of them run the passes. Default: False, because with data parallel training the weights are the same.
        layers (Iterable[str], optional): layers whose outputs, and the gradients of these, are measured too, by name or
            by the name of their class, by a forward pass and a backward pass for each loss scale in PyNative mode.
            Default: None, no layer.
        gradient_format (Union[str, dict]): the format of the gradients in the backward pass, which the record names
            and pictures show: "float16", "bfloat16", "float8_e5m2", "float8_e4m3fn", "hifloat8", or the numbers of
            another, see :class:`~mindformers_adaptive.rules.formats.Format`. Default: "float16".

    Raises:
        TypeError: if an argument is not of its type.
        ValueError: if an argument is out of its range; in training, if the network has no train-step cell.

    Examples:
        >>> import json, pathlib, tempfile
        >>> from mindspore import Model, dataset
        >>> import numpy as np
        >>> net = nn.Dense(3, 2)
        >>> model = Model(net, nn.MSELoss(), nn.SGD(net.trainable_params(), learning_rate=0.1))
        >>> data = dataset.NumpySlicesDataset((np.ones((8, 3), np.float32), np.ones((8, 2), np.float32)))
        >>> file = pathlib.Path(tempfile.mkdtemp(), "gradients.jsonl")
        >>> model.train(1, data.batch(2), callbacks=[GradientRangeMonitor(every_n_steps=2, record_path=file)])
        >>> [json.loads(line)["step"] for line in file.read_text().splitlines()]
        [2, 4]
    """

    subject = "The range of gradients"
    file_name = "gradient_ranges.jsonl"
    every_step = False

    def __init__(
        self,
        every_n_steps: int = 100,
        loss_scales: Iterable[float] | None = None,
        record_path: str | os.PathLike[str] | None = None,
        tensorboard_dir: str | os.PathLike[str] | None = None,
        all_ranks: bool = False,
        layers: Iterable[str] | None = None,
        gradient_format: str | Mapping[str, Any] | Format = "float16",
    ) -> None:
        super().__init__(record_path, tensorboard_dir, all_ranks)
        self._every_n_steps = require_integer(
            "every_n_steps", every_n_steps, 1, "The default is 100.", unit="number of steps"
        )
        self._loss_scales = [] if loss_scales is None else checked_loss_scales(loss_scales)
        self._layers = () if layers is None else require_names("layers", layers)
        self._format = find_format(gradient_format)

    def on_train_begin(self, run_context: Any) -> None:
        """Find the train-step cell and the step to resume from, and open the record.

        Args:
            run_context (RunContext): MindSpore's information about the training.
        """
        params = run_context.original_args()
        self._train_step = _find_train_step(params.train_network)
        self._sweep: Any = GradientSweep(self._train_step, self._layers, self._format)
        self._warned: set[str] = set()
        self._open(params, getattr(self._train_step, "loss_scaling_manager", None))

    def on_train_step_begin(self, run_context: Any) -> None:
        """Measure the gradients if the number of the step is a multiple of ``every_n_steps``.

        Args:
            run_context (RunContext): MindSpore's information about the training.
        """
        params = run_context.original_args()
        self._last_step = step = self._ahead_of_model + params.cur_step_num
        if params.dataset_sink_mode or not params.train_dataset_element:
            self._warn_once(
                "GradientRangeMonitor cannot see the batches in data-sink mode and writes nothing. Set "
                "'runner_config.sink_mode' to False in the YAML file, or 'dataset_sink_mode' in Model.train()."
            )
        elif step % self._every_n_steps == 0:
            loss_scale = _loss_scale(self._train_step)
            if math.isfinite(loss_scale) and loss_scale > 0:
                self._measure(step, params.train_dataset_element, loss_scale)
            else:
                self._warn_once(f"GradientRangeMonitor measures no gradients while the loss scale is {loss_scale}.")

    def _release(self) -> None:
        super()._release()
        self._sweep = self._train_step = None

    def _measure(self, step: int, batch: Any, loss_scale: float) -> None:
        def observe(scale: float, gradients: Mapping[str, Any], of: str = "") -> None:
            if scale == loss_scale:
                for name, gradient in gradients.items():
                    self._add_histogram(f"{name}{of}/grad", gradient, step)

        outputs: dict[str, list[Any]] = {}

        def observe_output(name: str, output: Any) -> None:
            if self._writer is not None:
                outputs.setdefault(name, []).append(output.reshape(-1))

        scales = [loss_scale, *self._loss_scales]
        observers: dict[str, Any] = {"observe_output": observe_output}
        observers["observe_output_gradients"] = functools.partial(observe, of="/output")
        try:
            ranges = self._sweep(batch, scales, observe=observe, **observers)
        except LayerOutputsError as error:
            self._warn_once(f"{error} GradientRangeMonitor goes on without 'layers'.")
            self._sweep = GradientSweep(self._train_step, gradient_format=self._format)
            ranges = self._sweep(batch, scales, observe=observe)
        for tag, output in _by_micro_batch(outputs, _micro_batches(self._train_step)):
            self._add_histogram(tag, output, step)
        if self._writer is not None:
            for weight in self._sweep.weights:
                self._add_histogram(weight.name, to_numpy(weight), step)
        for tag, value in _scalars(ranges, loss_scale):
            self._add_scalar(tag, value, step)
        self._append([{"step": step, "loss_scale": loss_scale, **ranges.to_dict()}])

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            logger.warning("%s", message)
        self._warned.add(message)


def _find_train_step(train_network: Any) -> Any:
    for _, cell in train_network.cells_and_names():
        if isinstance(cell, nn.TrainOneStepCell):
            return cell
    raise ValueError(
        "GradientRangeMonitor must be used with a train-step cell, a subclass of nn.TrainOneStepCell, but the network "
        f"that is trained is a {type(train_network).__name__}. Use one of the train-step cells in "
        "mindformers_adaptive.wrapper, or derive your cell from one."
    )


def _micro_batches(train_step: Any) -> int:
    """Return the number of micro-batches into which MindSpore's accumulation cell or pipeline cell splits a batch."""
    return next((cell.micro_size for _, cell in train_step.cells_and_names() if hasattr(cell, "micro_size")), 1)


def _by_micro_batch(outputs: Mapping[str, list[Any]], micro_batches: int) -> Iterator[tuple[str, Any]]:
    """Yield, for each micro-batch of each layer, a TensorBoard tag and the layer's outputs, of shape (elements,)."""
    for name, calls in outputs.items():
        # Outputs cannot be split by micro-batch if the layer is not called equally often in each micro-batch.
        parts = micro_batches if len(calls) % micro_batches == 0 else 1
        length = len(calls) // parts
        for index in range(parts):
            number = f"_mbs{index}" if parts > 1 else ""
            yield f"{name}/output{number}", np.concatenate(calls[index * length : (index + 1) * length])


def _loss_scale(train_step: Any) -> float:
    scale = getattr(train_step, "scale_sense", None)
    # MindSpore's train-step cells with a constant loss scale keep the scale in `sens`, which is None for a scale of 1.
    return float(train_step.sens or 1.0) if scale is None else float(scale.asnumpy().item())


def _scalars(ranges: Any, loss_scale: float) -> Iterator[tuple[str, float]]:
    measured = {"": ranges.weights, "/grad": ranges.parameters(loss_scale, unscaled=True), "/output": ranges.outputs}
    if ranges.activation_gradients:
        of_outputs = replace(ranges, batches=ranges.activation_gradients)
        measured["/output/grad"] = of_outputs.parameters(loss_scale, unscaled=True)
    for suffix, group in measured.items():
        for name, statistics in group.items():
            yield f"{name}{suffix}/norm", statistics.norm
    overall = ranges.overall(loss_scale, unscaled=True)
    for name in ("norm", "largest", "smallest"):
        yield f"gradients/{name}", getattr(overall, name)
    for name in ("zeros", "infs_and_nans", "underflowed"):
        yield f"gradients/{name}_share", overall.share(getattr(overall, name))
