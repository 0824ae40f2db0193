"""MindFormers' PyNative trainer with loss scaling."""

from __future__ import annotations

import functools
import importlib.metadata
import math
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindspore import Tensor, amp, ops
from mindspore import dtype as mstype

from mindformers_adaptive.cells.scaler import SCALERS, RuleLossScaler
from mindformers_adaptive.mindformers.checkpoint_callback import CommonInfoWithLossScale
from mindformers_adaptive.mindformers.checkpoint_reader import FILE_NAME, read_sidecar
from mindformers_adaptive.mindformers.pynative_callbacks import connect, release
from mindformers_adaptive.mindformers.pynative_section import SECTION, check_config, read_config, read_section
from mindformers_adaptive.monitor.loss_scale_monitor import LossScaleMonitor
from mindformers_adaptive.text.install_hint import install_hint

if TYPE_CHECKING:
    # trainer_class() adds this base class, which exists only where hyper-parallel is installed.
    from mindformers.pynative.trainer.trainer import Trainer as _Trainer
else:
    _Trainer = object

__all__ = ["LossScaledTraining", "make_scaler", "restore", "stock_trainer", "trainer_class"]


def make_scaler(section: object) -> Any:
    """Return the loss scaler that a section ``training.loss_scale`` describes.

    Args:
        section (Union[float, dict]): as :func:`~mindformers_adaptive.mindformers.pynative_section.read_section` takes
            it.

    Returns:
        RuleLossScaler, or a subclass.

    Raises:
        TypeError, ValueError: as in ``read_section``.

    Examples:
        >>> make_scaler({"type": "AdaptiveLossScale", "loss_scale_value": 1024}).state()["loss_scale"]
        1024.0
    """
    arguments = read_section(section)
    rule, loss_scale = arguments.pop("rule"), arguments.pop("loss_scale_value")
    if rule in SCALERS:
        return SCALERS[rule](loss_scale, **arguments)
    return RuleLossScaler(rule, loss_scale, **arguments)


def stock_trainer() -> Any:
    """Return the module ``mindformers.pynative.trainer.trainer``.

    Raises:
        ImportError: if MindFormers is older than 2.0.0, or hyper-parallel, which that trainer needs, is not installed.
    """
    with install_hint("MindFormers' PyNative trainer"):
        version = importlib.metadata.version("mindformers")
        if int(version.partition(".")[0]) < 2:
            raise ImportError(
                "The PyNative trainer with loss scaling needs MindFormers 2.0.0 or newer, but this is MindFormers "
                f"{version}, whose PyNative trainer differs. Install MindFormers 2, or use the graph-mode "
                "trainer, which can run in PyNative mode too (context.mode: 1)."
            )
        from mindformers.pynative.trainer import trainer

        return trainer


def trainer_class() -> type:
    """Return a subclass of MindFormers' PyNative trainer ``mindformers.pynative.trainer.Trainer`` that scales the loss.

    Returns:
        type, :class:`LossScaledTraining` with MindFormers' trainer as its second base.

    Raises:
        ImportError: as in :func:`stock_trainer`.
    """
    return type("Trainer", (LossScaledTraining, stock_trainer().Trainer), {"__doc__": LossScaledTraining.__doc__})


def _with_loss_scale(create_common_info: Callable[[Any], Any], train_step: Any, state: Any) -> CommonInfoWithLossScale:
    """Return what a ``CheckpointCallback`` saves as ``common.json``; saving it also saves the loss-scaling state."""
    info = CommonInfoWithLossScale(train_step)
    info.__dict__.update(vars(create_common_info(state)))
    return info


def restore(scaler: Any, folder: str) -> None:
    """Restore a loss scaler from the ``loss_scale.json`` of a checkpoint, or warn if that is not possible.

    Args:
        scaler (RuleLossScaler): changed in place, if the checkpoint has a usable state.
        folder (str): the checkpoint folder of one step.

    Warns:
        UserWarning: if there is no such file, or it cannot be used; loss scaling starts afresh then.

    Examples:
        >>> import tempfile
        >>> from mindformers_adaptive import AdaptiveLossScaler
        >>> from mindformers_adaptive.mindformers.checkpoint_reader import write_sidecar
        >>> scaler, folder = AdaptiveLossScaler(2.0**16), tempfile.mkdtemp()
        >>> write_sidecar(folder, 512.0, {**scaler.state(), "cur_iter": 8})
        >>> restore(scaler, folder)
        >>> scaler.state()["loss_scale"], scaler.state()["cur_iter"]
        (512.0, 8)
    """
    try:
        saved = read_sidecar(folder)
        if saved is None:
            raise ValueError(
                f"{folder} has no {FILE_NAME}: the training that saved this checkpoint did not scale the loss"
            )
        loss_scale, state = saved
        scaler.update_cell.load_state({**state, "loss_scale": loss_scale})
    except (TypeError, ValueError) as error:
        warnings.warn(f"{str(error).rstrip('.')}. Loss scaling starts afresh, at the initial loss scale.", stacklevel=2)


class _Step:
    """A stand-in for the network that monitors search: it holds the loss scale and the update cell of a loss scaler."""

    def __init__(self, scaler: Any) -> None:
        self.scale_sense, self.loss_scaling_manager = scaler.scale_value, scaler.update_cell

    def cells_and_names(self) -> Iterator[tuple[str, _Step]]:
        yield "", self


class _NoUpdate:
    """A stand-in for the optimizer in a step that overflowed: it changes no weight, optimizer state or step count."""

    def __init__(self, optimizer: Any) -> None:
        self.parameters = optimizer.parameters

    def __call__(self, gradients: Any) -> Any:
        return gradients


class LossScaledTraining(_Trainer):
    """Mixin that adds loss scaling to MindFormers' PyNative trainer, in the class that :func:`trainer_class` returns.

    The loss scale multiplies the initial gradients of the backward pass and of the auxiliary losses, so that the loss
    itself stays as it is. The gradients are divided by the loss scale before their norm is computed and they are
    clipped. All micro-batches of a step and all processes share one decision: if any gradient has an inf or a NaN, the
    optimizer is not called, so the weights, the optimizer's state and its step count, which sets the learning rate, do
    not change. The trainer's own ``global_step``, the position in the data, still increases.
    ``TrainerState.loss_scale`` is the loss scale of the next step, ``skipped_steps`` counts the overflows, and
    checkpoints keep the state in ``loss_scale.json``.

    Args:
        config (Union[str, dict]): the YAML file, or its content, with the section ``training.loss_scale``.
        *args (Any): arguments of MindFormers' trainer.
        loss_scaler (RuleLossScaler, optional): the loss scaler to use instead of the section. Default: None.
        **kwargs (Any): arguments of MindFormers' trainer.

    Raises:
        TypeError: if the section, or a value in it, is of the wrong type.
        ValueError: if neither or both of the section and ``loss_scaler`` are given, or a value is out of its range.
    """

    optimizer: Any

    def __init__(self, config: Any = None, *args: Any, loss_scaler: Any = None, **kwargs: Any) -> None:
        config, section = read_config(config)
        if (section is None) == (loss_scaler is None):
            sources = "neither" if section is None else "both"
            raise ValueError(
                f"The loss scale must come from '{SECTION}' in 'config' or from 'loss_scaler', but got {sources}. Give "
                "exactly one. To train without loss scaling, use mindformers.pynative.trainer.Trainer."
            )
        if not isinstance(loss_scaler, RuleLossScaler | None):
            raise TypeError(
                f"'loss_scaler' must be a loss scaler of this package, but got {type(loss_scaler).__name__}. Give an "
                "AdaptiveLossScaler, or a RuleLossScaler with a rule of your own."
            )
        # A loss scaler that the user gave has checked its arguments already, so check only the other settings here.
        check_config(config, 1.0 if section is None else section)
        self.scaler = make_scaler(section) if loss_scaler is None else loss_scaler
        super().__init__(config, *args, **kwargs)

    def _create_callback_handler(self, callbacks: Any, config: Any) -> Any:
        MindFormerRegister.register_cls(LossScaleMonitor, module_type=MindFormerModuleType.CALLBACK)
        handler = super()._create_callback_handler(callbacks, config)
        step = _Step(self.scaler)
        handler.callbacks = connect(handler.callbacks, step)
        for callback in handler.callbacks:
            if create := getattr(callback, "_create_common_info", None):
                callback._create_common_info = functools.partial(_with_loss_scale, create, step)
        return handler

    def train(self, *args: Any, **kwargs: Any) -> None:
        """Train as MindFormers' trainer does, with the same arguments; then close the files of the monitors."""
        try:
            super().train(*args, **kwargs)
        finally:
            release(self.callback_handler.callbacks)

    def _init_train_state(self) -> Any:
        self.state = super()._init_train_state()
        self._show_state()
        return self.state

    def _show_state(self) -> None:
        self.state.loss_scale = float(self.scaler.scale_value.asnumpy())
        self.state.skipped_steps = int(self.scaler.update_cell.skipped_steps.asnumpy())

    def _load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> None:
        super()._load_checkpoint(checkpoint_path, *args, **kwargs)
        if not self.config.checkpoint.no_load_optim and self.state.global_step:
            restore(self.scaler, stock_trainer().get_checkpoint_path(checkpoint_path))
            self._show_state()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Take a step as MindFormers' trainer does, with the auxiliary losses multiplied by the loss scale too."""
        from mindformers.pynative.transformers.experimental_attention_variant.indexer import _IndexerLossAutoScaler
        from mindformers.pynative.transformers.moe.moe_utils import _MoEAuxLossAutoScaler
        from mindformers.pynative.transformers.multi_token_prediction import _MTPLossAutoScaler

        sense = stock_trainer().get_loss_sense(
            parallelism=self.config.parallelism,
            enable_parallel=self.enable_parallel,
            gradient_accumulation_steps=self.num_accumulation_steps,
            apply_gradient_accumulation=True,
        )
        for auxiliary in (_IndexerLossAutoScaler, _MoEAuxLossAutoScaler, _MTPLossAutoScaler):
            auxiliary.set_loss_scale(sense * self.state.loss_scale)
        return super().training_step(*args, **kwargs)

    def _forward_backward(self, model: Any, inputs: Any) -> Any:
        # MindFormers lets the loss be multiplied before backward() only through get_loss_sense().
        module = stock_trainer()
        get_loss_sense = module.get_loss_sense
        module.get_loss_sense = lambda **arguments: get_loss_sense(**arguments) * self.state.loss_scale
        try:
            return super()._forward_backward(model, inputs)
        finally:
            module.get_loss_sense = get_loss_sense

    def _optimizer_update(self) -> Any:
        optimizer = self.optimizer
        with stock_trainer()._no_grad():
            if self._decide(self._unscale(optimizer.parameters)):
                self.optimizer = _NoUpdate(optimizer)
        try:
            return super()._optimizer_update()
        finally:
            self.optimizer = optimizer
            self._show_state()

    def _unscale(self, parameters: Any) -> tuple[Any, ...]:
        """Divide the gradients of this process by the loss scale in place, and return them."""
        from mindformers.pynative.trainer.utils import get_grad

        gradients = [gradient for gradient in map(get_grad, parameters) if gradient is not None]
        local = [each.to_local() if hasattr(each, "to_local") else each for each in gradients]
        unscaled = self.scaler.unscale(tuple(local)) if local else ()
        for gradient, divided in zip(local, unscaled, strict=True):
            # Overwrite the gradient by copy_(), because mul_() leaves a Tensor unchanged on a CPU.
            gradient.copy_(divided)
        return tuple(local)

    def _decide(self, gradients: tuple[Any, ...]) -> bool:
        """Tell the loss scaler whether the step overflowed in any process, and return whether it did."""
        # All processes decide together whether to skip the step, including a process that has no gradients.
        overflow, largest = bool(gradients) and not bool(amp.all_finite(gradients)), 0.0
        if gradients and self.scaler.rule.needs_gradients:
            each = [ops.cast(gradient, mstype.float32).abs().max() for gradient in gradients]
            largest = math.inf if overflow else float(ops.stack(each).max())
        if self.enable_parallel:
            module = stock_trainer()
            seen = Tensor(np.array([overflow, largest], np.float32))
            module.all_reduce(seen, op=ops.ReduceOp.MAX)
            overflow, largest = bool(seen.asnumpy()[0]), float(seen.asnumpy()[1])
        # Of all gradients, a loss-scaling rule needs only the largest.
        self.scaler.adjust(Tensor(not overflow), (Tensor([largest], mstype.float32),))
        return overflow
