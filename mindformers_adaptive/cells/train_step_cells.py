"""The public train-step cells: the cells of MindSpore and MindFormers, with overflow detection on a CPU too."""

from typing import Any

import mindformers.wrapper
from mindspore import nn

from mindformers_adaptive.cells.train_step import LossScaleTrainStep, PerTokenTrainStep

# The module from which users import the cells. MindFormers' log names this module.
_PUBLIC = "mindformers_adaptive.wrapper"


class TrainOneStepWithLossScaleCell(LossScaleTrainStep, nn.TrainOneStepWithLossScaleCell):
    """Train-step cell: ``mindspore.nn.TrainOneStepWithLossScaleCell`` that also detects overflow on CPU.

    Everything else is as in the stock cell. An overflowed step changes neither weights nor optimizer state.

    Args:
        network (nn.Cell): the network with its loss.
        optimizer (nn.Optimizer): of the network's weights.
        scale_sense (Union[nn.Cell, Tensor]): an update cell; or a fixed loss scale, float32 of shape () or (1,).

    Inputs:
        - **\\*inputs** (Tensor) - what the network takes.

    Outputs:
        tuple of the loss, a Tensor as the network returns it; the overflow flag, bool of shape (); and the loss scale
        for the next step, float32 of shape ().

    Raises:
        TypeError: if ``scale_sense`` has another type.
        ValueError: if ``optimizer`` divides the gradients by a loss scale too, or a Tensor ``scale_sense`` has another
            shape.

    Supported Platforms:
        ``Ascend`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from mindformers_adaptive.wrapper import AdaptiveLossScaleUpdateCell, TrainOneStepWithLossScaleCell
        >>> net = nn.Dense(3, 2)
        >>> optimizer = nn.Momentum(net.trainable_params(), learning_rate=0.1, momentum=0.9)
        >>> update_cell = AdaptiveLossScaleUpdateCell(loss_scale_value=2**12, scale_factor=2, scale_window=20)
        >>> train_step = TrainOneStepWithLossScaleCell(nn.WithLossCell(net, nn.MSELoss()), optimizer, update_cell)
        >>> target = Tensor(np.zeros((4, 2), np.float32))
        >>> loss, overflow, loss_scale = train_step(Tensor(np.full((4, 3), np.inf, np.float32)), target)
        >>> bool(overflow), float(loss_scale)
        (True, 2048.0)
    """

    __module__ = _PUBLIC

    def __init__(self, network: Any, optimizer: Any, scale_sense: Any, **options: Any) -> None:
        super().__init__(network, optimizer, scale_sense, **options)


class MFTrainOneStepCell(PerTokenTrainStep, mindformers.wrapper.MFTrainOneStepCell):
    """Train-step cell: ``mindformers.wrapper.MFTrainOneStepCell`` that also detects overflow on CPU.

    Everything else is as in the stock cell. An overflowed step changes neither weights nor optimizer state.

    Args:
        network (nn.Cell): the model, which returns its loss.
        optimizer (nn.Optimizer): the optimizer of the model's weights.
        use_clip_grad (bool): whether the gradients are clipped by their global norm. Default: False.
        max_grad_norm (float): the norm to which they are clipped. Default: 1.0.
        scale_sense (Union[nn.Cell, int, float, Tensor]): an update cell; or a fixed loss scale, as a Tensor of shape ()
            or (1,). Default: 1.0.
        *more: further arguments of the stock cell, by position.
        **kwargs: all other arguments of the stock cell, such as ``local_norm`` and ``use_skip_data_by_global_norm``.

    Inputs:
        - **\\*inputs** (Tensor) - what the model takes.

    Outputs:
        tuple of the loss, float32 of shape (); the overflow flag, bool of shape (); the loss scale for the next step,
        float32 of shape (); the learning rate, float32 of shape (); and the global norm of the gradients, float32 of
        shape (), or None without ``use_clip_grad``.

    Raises:
        TypeError: if ``scale_sense`` has another type.
        ValueError: if ``optimizer`` divides the gradients by a loss scale too, or a Tensor ``scale_sense`` has another
            shape; if steps are to be dropped by a norm that is not calculated.

    Supported Platforms:
        ``Ascend`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from mindformers_adaptive.wrapper import AdaptiveLossScaleUpdateCell, MFTrainOneStepCell
        >>> net = nn.Dense(3, 2)
        >>> optimizer = nn.Momentum(net.trainable_params(), learning_rate=0.1, momentum=0.9)
        >>> update_cell = AdaptiveLossScaleUpdateCell(loss_scale_value=2**12, scale_factor=2, scale_window=20)
        >>> net_with_loss = nn.WithLossCell(net, nn.MSELoss())
        >>> train_step = MFTrainOneStepCell(net_with_loss, optimizer, use_clip_grad=True, scale_sense=update_cell)
        >>> outputs = train_step(Tensor(np.ones((4, 3), np.float32)), Tensor(np.zeros((4, 2), np.float32)))
        >>> bool(outputs[1]), float(outputs[2])
        (False, 4096.0)
    """

    __module__ = _PUBLIC
    stock_grads_for_legacy = getattr(mindformers.wrapper.MFTrainOneStepCell, "grads_for_legacy", None)
    stock_grads_for_mcore = getattr(mindformers.wrapper.MFTrainOneStepCell, "grads_for_mcore", None)

    def __init__(
        self,
        network: Any,
        optimizer: Any,
        use_clip_grad: bool = False,
        max_grad_norm: float = 1.0,
        scale_sense: Any = 1.0,
        *more: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(network, optimizer, use_clip_grad, max_grad_norm, scale_sense, *more, **kwargs)


class MFPipelineWithLossScaleCell(PerTokenTrainStep, mindformers.wrapper.MFPipelineWithLossScaleCell):
    """Train-step cell: ``mindformers.wrapper.MFPipelineWithLossScaleCell`` that also detects overflow on CPU.

    Everything else is as in the stock cell. It can be made only in semi-automatic or automatic parallel mode, which
    MindSpore does not compile for CPU. In a YAML file for several pipeline stages MindFormers' trainer takes it in
    place of ``MFTrainOneStepCell`` by itself::

        parallel_config:
          pipeline_stage: 2
          micro_batch_num: 8

    Args:
        network (nn.Cell): the model in an ``nn.PipelineCell``.
        optimizer (nn.Optimizer): the optimizer of the model's weights.
        use_clip_grad (bool): whether the gradients are clipped by their global norm. Default: True.
        max_grad_norm (float): the norm to which they are clipped. Default: 1.0.
        scale_sense (Union[nn.Cell, int, float, Tensor]): an update cell; or a fixed loss scale, as a Tensor of shape ()
            or (1,). Default: 1.0.
        micro_batch_num (int): into how many micro batches a batch is cut. Default: 1.
        *more: further arguments of the stock cell, by position.
        **kwargs: all other arguments of the stock cell.

    Inputs:
        - **\\*inputs** (Tensor) - what the model takes.

    Outputs:
        the same tuple as :class:`MFTrainOneStepCell` returns.

    Raises:
        TypeError: if ``scale_sense`` has another type.
        ValueError: if the parallel mode is not one of these two; otherwise as for :class:`MFTrainOneStepCell`.

    Supported Platforms:
        ``Ascend`` ``CPU``

    Examples:
        >>> from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
        >>> from mindformers_adaptive import register
        >>> register()
        >>> MindFormerRegister.get_cls(MindFormerModuleType.WRAPPER, "MFPipelineWithLossScaleCell").__module__
        'mindformers_adaptive.wrapper'
    """

    __module__ = _PUBLIC
    clips_before_detection = True
    stock_grads_for_legacy = getattr(mindformers.wrapper.MFPipelineWithLossScaleCell, "grads_for_legacy", None)
    stock_grads_for_mcore = getattr(mindformers.wrapper.MFPipelineWithLossScaleCell, "grads_for_mcore", None)

    def __init__(
        self,
        network: Any,
        optimizer: Any,
        use_clip_grad: bool = True,
        max_grad_norm: float = 1.0,
        scale_sense: Any = 1.0,
        *more: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(network, optimizer, use_clip_grad, max_grad_norm, scale_sense, *more, **kwargs)
