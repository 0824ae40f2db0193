"""A ``build_train_network`` for any loss-scale manager, on CPU too, and a train-step cell with a fixed loss scale."""

import warnings
from typing import Any

import mindspore.train.amp
from mindspore import Tensor, amp, context, nn, ops
from mindspore import dtype as mstype

from mindformers_adaptive.cells.loads import GivesMemoryBack, observe_loads
from mindformers_adaptive.cells.manager import AdaptiveLossScaleManager, RuleLossScaleManager
from mindformers_adaptive.cells.refusals import refuse_dividing_optimizer, warn_of_large_factor
from mindformers_adaptive.cells.train_step_cells import TrainOneStepWithLossScaleCell
from mindformers_adaptive.cells.unscaling import multiply_in_float32
from mindformers_adaptive.rules.checks import require_positive

# Keep MindSpore's own function here, because enable_loss_scale_in_model() replaces it in MindSpore's module.
_stock_build_train_network = amp.build_train_network
_GRADIENT_ACCUMULATION = {"GradAccumulationCell", "GradAccumulation"}


def build_train_network(
    network: Any, optimizer: Any, loss_fn: Any = None, level: str = "O0", boost_level: str = "O0", **kwargs: Any
) -> Any:
    """Build a train-step cell as ``mindspore.amp.build_train_network`` does; accept a loss-scale manager on CPU too.

    Arguments, result and errors are the same as of the stock function. With a manager that skips overflowed steps the
    result is :class:`mindformers_adaptive.wrapper.TrainOneStepWithLossScaleCell`, except with ``boost_level``, pipeline
    stages or gradient accumulation, for which MindSpore has cells of its own that do not run on CPU.

    Args:
        network (nn.Cell): the network.
        optimizer (nn.Optimizer): updates its Parameters.
        loss_fn (nn.Cell, optional): the loss function; None if `network` returns the loss. Default: None.
        level (str): 'O0', 'O1', 'O2', 'O3' or 'auto', see ``mindspore.amp.auto_mixed_precision``. Default: 'O0'.
        boost_level (str): 'O0', 'O1' or 'O2'. Default: 'O0'.
        **kwargs: ``loss_scale_manager``, ``keep_batchnorm_fp32``, ``cast_model_type``.

    Returns:
        nn.Cell, the train-step cell, in training mode.

    Raises:
        TypeError: if ``loss_scale_manager`` is an update cell or a loss scaler, or not a manager.
        ValueError: if the optimizer divides the gradients too; on CPU, if a manager is used together with
            ``boost_level``, pipeline stages or gradient accumulation.

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, amp, nn
        >>> from mindformers_adaptive import build_train_network
        >>> net = nn.Dense(3, 2)
        >>> optimizer = nn.Momentum(net.trainable_params(), learning_rate=0.1, momentum=0.9)
        >>> manager = amp.DynamicLossScaleManager(init_loss_scale=2**16)
        >>> train_step = build_train_network(net, optimizer, nn.MSELoss(), level="O2", loss_scale_manager=manager)
        >>> inputs = Tensor(np.full((4, 3), np.inf, np.float32)), Tensor(np.zeros((4, 2), np.float32))
        >>> loss, overflow, loss_scale = train_step(*inputs)
        >>> bool(overflow), float(loss_scale)
        (True, 32768.0)
    """
    # At mixed-precision level O2, MindSpore uses a DynamicLossScaleManager by default.
    default = amp.DynamicLossScaleManager() if level == "O2" else None
    manager = kwargs.get("loss_scale_manager", default)
    _refuse_cell_as_manager(manager)
    update_cell = manager.get_update_cell() if isinstance(manager, amp.LossScaleManager) else None
    if isinstance(manager, amp.DynamicLossScaleManager):
        loss_scale = manager.get_loss_scale()
        warn_of_large_factor(type(manager).__name__, manager.scale_factor, loss_scale, "init_loss_scale")
    if isinstance(manager, amp.LossScaleManager):
        _check_division(optimizer, manager.get_loss_scale(), update_cell)
    option = None if update_cell is None else _what_needs_a_stock_cell(network, boost_level)
    if option and context.get_context("device_target") == "CPU":
        raise ValueError(
            f"'loss_scale_manager' must be None or FixedLossScaleManager(drop_overflow_update=False) with {option} on "
            f"CPU, but got {type(manager).__name__}. For this manager, MindSpore's train-step cell with {option} does "
            f"not run on CPU. Leave out the manager or {option}, or put TrainOneStepWithLossScaleCell around the "
            "network yourself."
        )
    if update_cell is None or option:
        train_step = _stock_build_train_network(network, optimizer, loss_fn, level, boost_level, **kwargs)
        if type(train_step) is nn.TrainOneStepCell:
            return _TrainOneStepCell(train_step.network, optimizer, train_step.sens).set_train()
        train_step.loads_in_place = True
        observe_loads(train_step)
        return train_step
    # MindSpore's build_train_network adds mixed precision and the loss function to the network, and wraps the network
    # in a train-step cell. Take only the network, with mixed precision and loss function, out of that cell.
    unscaled = {**kwargs, "loss_scale_manager": None}
    with_loss = _stock_build_train_network(network, optimizer, loss_fn, level, boost_level, **unscaled).network
    return TrainOneStepWithLossScaleCell(with_loss, optimizer, scale_sense=update_cell).set_train()


def enable_loss_scale_in_model() -> None:
    """Let ``mindspore.train.Model`` and ``mindspore.amp`` build the train-step cells of this package.

    From then on both build their train-step cells with :func:`build_train_network`. Call it before the first ``Model``
    is made; calling it again changes nothing. On CPU every loss-scale manager needs it. A manager whose rule needs the
    largest gradient, as :class:`~mindformers_adaptive.cells.manager.GradientGuidedLossScaleManager`, needs it on every
    device.

    Examples:
        >>> from mindspore import nn
        >>> from mindspore.amp import FixedLossScaleManager
        >>> from mindspore.train import Model
        >>> enable_loss_scale_in_model()
        >>> net = nn.Dense(3, 2)
        >>> optimizer = nn.Momentum(net.trainable_params(), learning_rate=0.1, momentum=0.9)
        >>> model = Model(net, nn.MSELoss(), optimizer, loss_scale_manager=FixedLossScaleManager())
    """
    amp.build_train_network = build_train_network
    mindspore.train.amp.build_train_network = build_train_network


def _refuse_cell_as_manager(manager: object) -> None:
    if isinstance(manager, (nn.Cell, amp.LossScaler)):
        raise TypeError(
            f"'loss_scale_manager' must be a loss-scale manager, but got the update cell or loss scaler "
            f"{type(manager).__name__}. Give {_manager_like(manager)} with the same arguments."
        )


def _manager_like(scaler_or_cell: object) -> str:
    cell = getattr(scaler_or_cell, "update_cell", scaler_or_cell)
    kinds = (*RuleLossScaleManager.__subclasses__(), RuleLossScaleManager)
    manager_class: type[object] = next(
        (kind for kind in kinds if isinstance(cell, kind.cell_class)), AdaptiveLossScaleManager
    )
    return manager_class.__name__


def _what_needs_a_stock_cell(network: Any, boost_level: str) -> str | None:
    """Return the option in use, such as ``boost_level``, that needs a special train-step cell of MindSpore, or None."""
    if boost_level != "O0":
        return f"boost_level={boost_level!r}"
    if context.get_auto_parallel_context("pipeline_stages") > 1:
        return "pipeline_stages above 1"
    if any(cell.cls_name in _GRADIENT_ACCUMULATION for _, cell in network.cells_and_names()):
        return "gradient accumulation"
    return None


def _check_division(optimizer: object, loss_scale: float, update_cell: object) -> None:
    """Raise ValueError if gradients would be divided by the loss scale twice; warn if they would not be divided."""
    if update_cell is not None:
        refuse_dividing_optimizer(optimizer)
        return
    divided_by = getattr(optimizer, "loss_scale", 1.0)
    name = type(optimizer).__name__
    if divided_by != loss_scale:
        warnings.warn(
            f"With drop_overflow_update=False the optimizer must divide the gradients by {loss_scale}, but {name} has "
            f"loss_scale={divided_by}: the gradients are {loss_scale / divided_by} times too large. Create {name} with "
            f"loss_scale={loss_scale}, or use FixedScaleTrainOneStepCell, which divides them for any optimizer.",
            stacklevel=3,
        )


# A cast to FP16 rounds this number and all larger numbers to inf.
_INFINITE_IN_FLOAT16 = 65520

_map = ops.HyperMap()


class _TrainOneStepCell(GivesMemoryBack, nn.TrainOneStepCell):
    """MindSpore's train-step cell; a checkpoint can be loaded into it while it trains."""


class FixedScaleTrainOneStepCell(GivesMemoryBack, nn.TrainOneStepCell):
    """Train-step cell that uses a fixed loss scale, and itself divides the gradients by this scale.

    ``FixedLossScaleManager(loss_scale, drop_overflow_update=False)`` leaves that division to the optimizer, and some
    optimizers, such as ``nn.AdamWeightDecay``, do not divide. No step is skipped: an overflow reaches the optimizer.
    To skip them use ``TrainOneStepWithLossScaleCell(..., scale_sense=nn.FixedLossScaleUpdateCell(loss_scale))``.

    Args:
        network (nn.Cell): the network that returns the loss.
        optimizer (nn.Optimizer): made without a ``loss_scale``, or with 1.
        loss_scale (float): what the loss is multiplied and the gradients are divided by. Default: 128.0, as
            ``amp.FixedLossScaleManager``.

    Inputs:
        - **inputs** (Tensor) - the inputs of `network`.

    Outputs:
        Tensor, the loss, not scaled.

    Raises:
        TypeError: if ``loss_scale`` is not a number.
        ValueError: if ``loss_scale`` is not finite and above 0, or the optimizer divides by a loss scale too; at the
            first step, if the loss is float16 and ``loss_scale`` 65520 or more.

    Supported Platforms:
        ``Ascend`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from mindformers_adaptive import FixedScaleTrainOneStepCell
        >>> net = nn.Dense(3, 2, weight_init="ones", bias_init="zeros")
        >>> optimizer = nn.AdamWeightDecay(net.trainable_params(), learning_rate=0.01)
        >>> train_step = FixedScaleTrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer, loss_scale=1024)
        >>> float(train_step(Tensor(np.ones((4, 3), np.float32)), Tensor(np.zeros((4, 2), np.float32))))
        9.0
    """

    def __init__(self, network: Any, optimizer: Any, loss_scale: float = 128.0) -> None:
        loss_scale = require_positive("loss_scale", loss_scale)
        refuse_dividing_optimizer(optimizer)
        super().__init__(network, optimizer, loss_scale)
        self.reciprocal = Tensor(1.0 / loss_scale, mstype.float32)
        self._observe_loads()

    def construct(self, *inputs: Any) -> Any:
        loss = self.network(*inputs)
        if loss.dtype == mstype.float16 and self.sens >= _INFINITE_IN_FLOAT16:
            raise ValueError(
                f"'loss_scale' must be below {_INFINITE_IN_FLOAT16} if the loss is in float16, because larger "
                f"scales are inf in float16, but got {self.sens}. Return the loss in float32, or give a smaller scale."
            )
        sens = ops.fill(loss.dtype, loss.shape, self.sens)
        grads = self.grad(self.network, self.weights)(*inputs, sens)
        grads = _map(ops.partial(multiply_in_float32, self.reciprocal), grads)
        grads = self.grad_reducer(grads)
        return ops.depend(loss, self.optimizer(grads))
