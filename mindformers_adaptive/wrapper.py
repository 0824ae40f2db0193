"""Train-step cells with the names and arguments of ``mindspore.nn`` and ``mindformers.wrapper`` that run on CPU too.

A user changes one import line. On Ascend and GPU the cells are the stock ones in all they do.
"""

import mindformers.wrapper
from mindspore import nn

from mindformers_adaptive.overflow import DetectsOverflowOnCPU
from mindformers_adaptive.update_cell import AdaptiveLossScaleUpdateCell

__all__ = [
    "AdaptiveLossScaleUpdateCell",
    "MFPipelineWithLossScaleCell",
    "MFTrainOneStepCell",
    "TrainOneStepWithLossScaleCell",
]


class TrainOneStepWithLossScaleCell(DetectsOverflowOnCPU, nn.TrainOneStepWithLossScaleCell):
    """``mindspore.nn.TrainOneStepWithLossScaleCell`` that detects overflow on CPU too."""


class MFTrainOneStepCell(DetectsOverflowOnCPU, mindformers.wrapper.MFTrainOneStepCell):
    """``mindformers.wrapper.MFTrainOneStepCell`` that detects overflow on CPU too."""


class MFPipelineWithLossScaleCell(DetectsOverflowOnCPU, mindformers.wrapper.MFPipelineWithLossScaleCell):
    """``mindformers.wrapper.MFPipelineWithLossScaleCell`` that detects overflow on CPU too."""
