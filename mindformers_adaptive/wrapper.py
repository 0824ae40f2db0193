"""Train-step cells that also run on CPU; names and arguments are as in ``mindspore.nn`` and ``mindformers.wrapper``.

To use these cells, a user changes one import line. On Ascend the cells compute the same as the stock cells. On every
device, checkpoints of these cells keep the state of loss scaling.
"""

from mindformers_adaptive.text.install_hint import install_hint

with install_hint(__name__):
    from mindformers_adaptive.cells.train_step_cells import (
        MFPipelineWithLossScaleCell,
        MFTrainOneStepCell,
        TrainOneStepWithLossScaleCell,
    )
    from mindformers_adaptive.cells.update_cells import (
        AdaptiveLossScaleUpdateCell,
        GradientGuidedLossScaleUpdateCell,
        NoLossScaleUpdateCell,
        RuleLossScaleUpdateCell,
    )

__all__ = ["AdaptiveLossScaleUpdateCell", "GradientGuidedLossScaleUpdateCell", "MFPipelineWithLossScaleCell"]
__all__ += ["MFTrainOneStepCell", "NoLossScaleUpdateCell", "RuleLossScaleUpdateCell", "TrainOneStepWithLossScaleCell"]
