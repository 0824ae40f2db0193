"""Train-step cells with the names and arguments of ``mindspore.nn`` and ``mindformers.wrapper`` that run on CPU too.

A user changes one import line. On Ascend and GPU the cells are the stock ones in all they do.
"""

import mindformers.wrapper
from mindspore import nn

from mindformers_adaptive.overflow import detects_overflow_on_cpu
from mindformers_adaptive.update_cell import AdaptiveLossScaleUpdateCell

__all__ = [
    "AdaptiveLossScaleUpdateCell",
    "MFPipelineWithLossScaleCell",
    "MFTrainOneStepCell",
    "TrainOneStepWithLossScaleCell",
]


@detects_overflow_on_cpu
class TrainOneStepWithLossScaleCell(nn.TrainOneStepWithLossScaleCell):
    """``mindspore.nn.TrainOneStepWithLossScaleCell`` that detects overflow on CPU too."""


@detects_overflow_on_cpu
class MFTrainOneStepCell(mindformers.wrapper.MFTrainOneStepCell):
    """``mindformers.wrapper.MFTrainOneStepCell`` that detects overflow on CPU too."""


@detects_overflow_on_cpu
class MFPipelineWithLossScaleCell(mindformers.wrapper.MFPipelineWithLossScaleCell):
    """``mindformers.wrapper.MFPipelineWithLossScaleCell`` that detects overflow on CPU too."""
