"""MindFormers' ``Trainer`` with adaptive loss scaling registered, and with an argument for a train-step cell."""

from __future__ import annotations

import copy
import inspect
import warnings
from typing import Any

import mindformers
import mindspore
from mindformers import TrainingArguments
from mindformers.models import PreTrainedModel
from mindformers.tools.register import MindFormerConfig
from mindformers.wrapper.wrapper import GradAccumulationCellWithTwoOutput
from mindspore import Tensor, nn
from mindspore.dataset.engine.datasets import Dataset

from mindformers_adaptive.mindformers.configuration_check import check_config
from mindformers_adaptive.mindformers.cpu_limits import check_cpu
from mindformers_adaptive.mindformers.keys import ACCUMULATION, PER_TOKEN, given_to_train_step, value_at
from mindformers_adaptive.mindformers.lost_precision import FIXED_SCALES
from mindformers_adaptive.mindformers.registration import register
from mindformers_adaptive.mindformers.run_configuration import as_text, save_configuration
from mindformers_adaptive.mindformers.workarounds import apply_workarounds
from mindformers_adaptive.rules import rule_of_cell


class Trainer(mindformers.Trainer):
    """``mindformers.Trainer`` that finds this package's classes and can train with a train-step cell of the user.

    ``register()`` is called first, so that ``TrainingArguments(scale_sense="AdaptiveLossScaleUpdateCell")`` and the
    names in a YAML file mean the classes of this package. Before it trains, it makes the changes that MindFormers needs
    on a CPU and to resume; see
    :func:`mindformers_adaptive.mindformers.workarounds.apply_workarounds`. Everything else is as in the stock class.

    Args:
        wrapper (nn.TrainOneStepCell, optional): a cell that makes one step of training, such as
            :class:`mindformers_adaptive.wrapper.MFTrainOneStepCell`. Exactly this cell is trained, with its model and
            its optimizer; leave ``model`` and ``optimizers`` out. The optimizer, loss scale and clipping in ``args``
            have no effect, and in parallel training nothing is put around the cell's network. Default: None,
            MindFormers builds the cell from ``args``.
        *args: arguments of ``mindformers.Trainer``.
        **kwargs: its arguments by name.

    Raises:
        TypeError: if ``wrapper`` is not a train-step cell, or does not train a model of MindFormers.
        ValueError: if ``wrapper`` has another model or optimizer than ``model`` or ``optimizers``; if its model would
            be built anew (``reset_model``, ``use_past``), because the cell would then train weights that are no longer
            the model's; if it is a stock cell on a CPU, where stock cells do not run.

    Examples:
        >>> from mindformers import TrainingArguments
        >>> from mindformers.models.llama import LlamaConfig, LlamaForCausalLM
        >>> from mindformers_adaptive.mindformers.trainer import Trainer
        >>> from mindformers_adaptive.wrapper import AdaptiveLossScaleUpdateCell, MFTrainOneStepCell
        >>> model = LlamaForCausalLM(LlamaConfig(num_layers=1, hidden_size=16, num_heads=2, vocab_size=16))
        >>> optimizer = nn.Momentum(model.trainable_params(), learning_rate=0.1, momentum=0.9)
        >>> update_cell = AdaptiveLossScaleUpdateCell(loss_scale_value=2**16, scale_factor=2, scale_window=20)
        >>> train_step = MFTrainOneStepCell(model, optimizer, scale_sense=update_cell)
        >>> trainer = Trainer(args=TrainingArguments(output_dir="output", sink_mode=False), wrapper=train_step)
        >>> trainer.model is model, trainer.optimizers is optimizer
        (True, True)
    """

    _checks_config = True

    def __init__(self, *args: Any, wrapper: nn.TrainOneStepCell | None = None, **kwargs: Any) -> None:
        register()
        arguments = inspect.signature(mindformers.Trainer).bind_partial(*args, **kwargs).arguments
        if wrapper is not None:
            _check_train_step(wrapper)
            _set_or_compare(arguments, "model", _model_of(wrapper, arguments.get("reset_model")))
            _set_or_compare(arguments, "optimizers", wrapper.optimizer)
        with warnings.catch_warnings():
            if wrapper is not None:
                # The warning that the loss is not scaled would be wrong, because the user's train-step cell scales the
                # loss.
                warnings.filterwarnings("ignore", message=".*the loss is not scaled")
            super().__init__(**arguments)
        self.wrapper: Any = wrapper
        if wrapper is not None:
            # MindFormers calls create_model_wrapper() to build a train-step cell. Replace this method by a method that
            # returns the user's train-step cell, because MindFormers does not use the user's cell otherwise.
            self.trainer.create_model_wrapper = self._give_wrapper
            if hasattr(wrapper, "scale_sense"):
                # On a resume, MindFormers replaces this loss scale by the loss scale of the checkpoint.
                loss_scale = MindFormerConfig(loss_scale_value=float(wrapper.scale_sense.asnumpy()))
                self.config.runner_wrapper.scale_sense = loss_scale

    def _config_init(self, args: Any = None, task_config: Any = None) -> Any:
        # When this method returns, the configuration is complete, and nothing has been built from it yet.
        config = mindformers.Trainer._config_init(args, task_config)
        if isinstance(args, TrainingArguments):
            _fit_window(args, config.runner_wrapper.scale_sense)
        if self._checks_config:
            check_config(config)
        self._sections = as_text(config)
        return config

    def _check_config_rules(self) -> None:
        # MindFormers calls this method when the arguments of train() are known, before it looks for a checkpoint.
        apply_workarounds(self.config)
        if self.wrapper is None:
            _keep_fixed_scale(self.trainer, self.config)
        super()._check_config_rules()

    def _init_model(self, is_train: bool = False) -> None:
        # Do not save the configuration if the user built the model or the data: the configuration need not describe
        # that model or data.
        built_by_user = isinstance(self.model, nn.Cell) or self.train_dataset is not None
        folder = save_configuration(self.config, self._sections) if is_train and not built_by_user else None
        super()._init_model(is_train)
        if is_train:
            self._watch_for_collapse(folder)
        if is_train and mindspore.get_context("device_target") == "CPU":
            if self._checks_config:
                check_cpu(self.config, self.model.config if self.is_model_instance else None)
            self._accumulate()

    def _watch_for_collapse(self, folder: str | None) -> None:
        # Without the callback CollapseWatch, a training that skips all its steps ends as if it had gone well.
        watch = MindFormerConfig(type="CollapseWatch", run_folder=folder)
        if not any(callback.get("type") == watch.type for callback in self.config.callbacks or []):
            self.config.callbacks = [*(self.config.callbacks or []), watch]

    def _accumulate(self) -> None:
        steps = take_accumulation_steps(self.config) if self.wrapper is None else 1
        if steps > 1:
            data = self.train_dataset
            if isinstance(data, Dataset) and data.get_batch_size() % steps:
                raise ValueError(
                    f"'train_dataset' must have batches that can be cut into {steps} micro-batches, the number in "
                    f"'gradient_accumulation_steps', but its batches have {data.get_batch_size()} samples. Make the "
                    f"batch size a multiple of {steps}, or leave the batching to MindFormers."
                )
            accumulate(self.trainer, steps)
        elif (ignored := self.config.runner_config.gradient_accumulation_steps or 1) > 1:
            warnings.warn(
                f"'runner_config.gradient_accumulation_steps' must be 1 with 'wrapper', but got {ignored}: no "
                "gradients are accumulated, because the train-step cell 'wrapper' is trained unchanged. To accumulate "
                "gradients, put nn.GradAccumulationCell around the model before you create 'wrapper'.",
                stacklevel=4,
            )

    def _give_wrapper(self, network: Any, optimizer: Any) -> Any:
        if network is not self.model:
            cell = type(network).__name__
            warnings.warn(
                f"MindFormers would put a {cell} around the model, but does not do so for a model in 'wrapper'. So the "
                f"model is trained without {cell}. If you need it, put {cell} around the model before you create "
                "'wrapper'.",
                stacklevel=2,
            )
        if hasattr(self.wrapper, "scale_sense"):
            restored = self.config.runner_wrapper.scale_sense.loss_scale_value
            if isinstance(restored, Tensor):
                self.wrapper.scale_sense.set_data(Tensor(restored.asnumpy().item(), mindspore.float32))
        return self.wrapper


class LaunchedTrainer(Trainer):
    """Trainer for a configuration that ``load_config`` of the launcher has checked already."""

    _checks_config = False


def _keep_fixed_scale(trainer: Any, config: Any) -> None:
    """Make a trainer build its train-step cell with the configured fixed loss scale, not the scale in a checkpoint."""
    scale_sense = config.runner_wrapper and config.runner_wrapper.get("scale_sense")
    if isinstance(scale_sense, dict):
        if scale_sense.get("type") not in FIXED_SCALES:
            return
        scale_sense = MindFormerConfig(**copy.deepcopy(dict(scale_sense)))
    elif not isinstance(scale_sense, int | float):
        return
    create_model_wrapper = trainer.create_model_wrapper

    def create(*args: Any, **kwargs: Any) -> Any:
        # MindFormers has replaced the configured fixed loss scale by the loss scale of the checkpoint. Put the
        # configured loss scale back.
        trainer.config.runner_wrapper.scale_sense = scale_sense
        return create_model_wrapper(*args, **kwargs)

    trainer.create_model_wrapper = create


def _fit_window(args: Any, scale_sense: Any) -> None:
    """Replace a default scale window by the smallest window. Remove the window if the update cell does not take one."""
    if (rule := rule_of_cell(args.scale_sense)) is None:
        return
    is_default = args.loss_scale_window == TrainingArguments.loss_scale_window
    if "scale_window" not in rule.start_arguments:
        scale_sense.pop("scale_window", None)
    elif is_default:
        # The default scale window of MindFormers is 1000 steps. The adaptive rule may have no window of this length, so
        # start with the smallest window of the rule.
        scale_sense.scale_window = args.min_scale_window
    if "scale_window" not in scale_sense and not is_default:
        warnings.warn(
            f"'loss_scale_window' {args.loss_scale_window} is not used: {rule.cell} has no scale window. "
            "Leave 'loss_scale_window' out.",
            stacklevel=2,
        )


def _check_train_step(wrapper: Any) -> None:
    if not isinstance(wrapper, nn.TrainOneStepCell):
        raise TypeError(
            f"'wrapper' must be a train-step cell, but got {wrapper!r} of type {type(wrapper).__name__}. Give "
            "mindformers_adaptive.wrapper.MFTrainOneStepCell(model, optimizer, scale_sense=...). For 'scale_sense', "
            "give an update cell, or get_update_cell() of a loss-scale manager."
        )
    detection = getattr(wrapper, "get_overflow_status", None)
    stock = nn.TrainOneStepWithLossScaleCell.get_overflow_status
    on_cpu = mindspore.get_context("device_target") == "CPU"
    if on_cpu and getattr(detection, "__func__", None) is stock and not wrapper.ascend_910b_target:
        raise ValueError(
            f"'wrapper' must be able to detect an overflow on CPU, but {type(wrapper).__name__} of "
            f"{type(wrapper).__module__} cannot. Import the cell of the same name from mindformers_adaptive.wrapper."
        )


def _model_of(wrapper: Any, reset_model: Any) -> Any:
    # The model may be inside other cells, such as nn.GradAccumulationCell.
    models = [cell for _, cell in wrapper.network.cells_and_names() if isinstance(cell, PreTrainedModel)]
    if not models:
        raise TypeError(
            "'wrapper' must train a model of MindFormers, but its network is "
            f"{type(wrapper.network).__name__}. Train such a network with mindspore.train.Model(wrapper)."
        )
    if reset_model or getattr(models[0].config, "use_past", False):
        raise ValueError(
            "MindFormers must not rebuild the model in 'wrapper', but it rebuilds a model if reset_model=True or the "
            "configuration of the model has use_past=True. Leave 'reset_model' out, and create the model with "
            "use_past=False."
        )
    return models[0]


def _set_or_compare(arguments: dict[str, Any], name: str, value: object) -> None:
    argument = arguments.get(name)
    if argument is not None and argument is not value:
        raise ValueError(
            f"'{name}' must be the same {type(value).__name__} object as in 'wrapper', but got a different object "
            f"of type {type(argument).__name__}. Leave '{name}' out, so that the object in 'wrapper' is used."
        )
    arguments[name] = value


class MeanOverMicroBatches(nn.Cell):
    """Splits a batch into micro-batches and returns their mean loss; their gradients are accumulated.

    Args:
        network (Cell): returns the loss of a micro-batch, a Tensor.
        micro_batches (int): the number of micro-batches, at least 1.

    Inputs:
        - **inputs** (tuple[Tensor]) - the inputs of the network. Their first axis is the batch, with a length that is
          a multiple of ``micro_batches``.

    Outputs:
        Tensor, of the shape and dtype of the network's loss.

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor
        >>> network = MeanOverMicroBatches(nn.WithLossCell(nn.Identity(), nn.MSELoss()), 2)
        >>> float(network(Tensor(np.array([[1.0], [3.0]], np.float32)), Tensor(np.zeros((2, 1), np.float32))))
        5.0
    """

    def __init__(self, network: nn.Cell, micro_batches: int) -> None:
        super().__init__(auto_prefix=False)
        # MindSpore's nn.GradAccumulationCell returns the sum of the micro-batches' losses. On Ascend the train-step
        # cell turns this sum into a mean, but on a CPU it does not, so the sum is divided below.
        self.network = nn.GradAccumulationCell(network, micro_batches)
        self.micro_batches = micro_batches

    def construct(self, *inputs: Any) -> Any:
        return self.network(*inputs) / self.micro_batches


def take_accumulation_steps(config: Any) -> int:
    """Take ``runner_config.gradient_accumulation_steps`` out of a configuration, and return it.

    The batch size is multiplied by this number, as MindFormers does in semi-automatic parallel mode. In other modes
    MindFormers would set the number of steps to 1.

    Args:
        config (MindFormerConfig): the configuration of a training; changed in place.

    Returns:
        int, to be given to :func:`accumulate`; 1 for no accumulation.
    """
    steps = value_at(config, ACCUMULATION) or 1
    if steps > 1:
        config.runner_config.gradient_accumulation_steps = 1
        config.runner_config.batch_size *= steps
    return steps


def accumulate(trainer: Any, steps: int) -> None:
    """Make a trainer split each training batch into micro-batches, and add up their gradients.

    Args:
        trainer (BaseTrainer): MindFormers' trainer of a task; changed in place, before its ``set_config()``.
        steps (int): the number of micro-batches, by which the batch size in its configuration was multiplied.
    """
    wrap_network = trainer.wrap_network_with_tool_cells
    check_batch_size = trainer._check_global_batch_size_for_auto_parallel
    reset_batch_size = trainer._reset_dataset_batch_size

    def wrap(network: Any) -> Any:
        # With a per-token loss, MindFormers needs the sum of losses and the number of tokens, not a mean loss.
        per_token = given_to_train_step(trainer.config, PER_TOKEN)
        cell = GradAccumulationCellWithTwoOutput if per_token else MeanOverMicroBatches
        return cell(wrap_network(network), steps)

    def check() -> None:
        check_batch_size()
        # The model sees the samples of one micro-batch at a time.
        trainer.config.runner_config.mini_batch_size //= steps

    def reset() -> None:
        reset_batch_size()
        # Evaluation does not accumulate gradients, so its batch size stays as configured.
        if trainer.config.eval_dataset is not None:
            trainer.config.eval_dataset.batch_size //= steps

    trainer.wrap_network_with_tool_cells = wrap
    trainer._check_global_batch_size_for_auto_parallel = check
    trainer._reset_dataset_batch_size = reset
