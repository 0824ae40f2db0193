"""Registration with MindFormers, so that class names in its YAML files mean the classes of this package."""

from collections.abc import Callable
from typing import Any

from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindformers.trainer import base_trainer

from mindformers_adaptive import wrapper
from mindformers_adaptive.mindformers.callbacks import (
    CheckpointMonitor,
    CommonInfo,
    TrainingStateMonitor,
    restores_sidecar,
)
from mindformers_adaptive.mindformers.configuration_check import OWN_AUTO_REGISTER
from mindformers_adaptive.monitor.collapse_watch import CollapseWatch
from mindformers_adaptive.monitor.gradient_range_monitor import GradientRangeMonitor
from mindformers_adaptive.monitor.loss_scale_monitor import LossScaleMonitor

# Further names of this package's wrapper classes: short names, which MindFormers lacks, and MindFormers' own short
# names.
_ALIASES = {
    "AdaptiveLossScale": wrapper.AdaptiveLossScaleUpdateCell,
    "GradientGuidedLossScale": wrapper.GradientGuidedLossScaleUpdateCell,
    "loss_scale_wrapper": wrapper.TrainOneStepWithLossScaleCell,
    "mf_wrapper": wrapper.MFTrainOneStepCell,
    "pipeline_wrapper": wrapper.MFPipelineWithLossScaleCell,
}


def register() -> None:
    """Put this package's classes into MindFormers' registry under the names of MindFormers' own classes.

    From then on ``AdaptiveLossScaleUpdateCell``, ``TrainOneStepWithLossScaleCell``, ``MFTrainOneStepCell`` and
    ``MFPipelineWithLossScaleCell`` in a YAML file mean the classes of :mod:`mindformers_adaptive.wrapper`, and
    ``CheckpointMonitor`` and ``TrainingStateMonitor`` the classes of :mod:`mindformers_adaptive.mindformers.callbacks`.
    MindFormers' trainer restores the state of loss scaling from its ``checkpoint:`` format. The callbacks
    ``LossScaleMonitor`` and ``GradientRangeMonitor`` are registered. Calling it again changes nothing.

    ``AdaptiveLossScale`` is a second name for ``AdaptiveLossScaleUpdateCell``, and ``GradientGuidedLossScale`` for
    ``GradientGuidedLossScaleUpdateCell``. MindFormers has no classes of these names, so a training that uses them fails
    if this package is missing. The line
    ``auto_register: adaptive_loss_scaling...`` in a YAML file is accepted and has no effect.

    Examples:
        >>> from mindformers.tools.register import MindFormerRegister
        >>> from mindformers_adaptive import AdaptiveLossScaleUpdateCell, register
        >>> register()
        >>> MindFormerRegister.get_cls("wrapper", "AdaptiveLossScaleUpdateCell") is AdaptiveLossScaleUpdateCell
        True
    """
    wrappers = {name: getattr(wrapper, name) for name in wrapper.__all__} | _ALIASES
    for name, cell in wrappers.items():
        MindFormerRegister.register_cls(cell, module_type=MindFormerModuleType.WRAPPER, alias=name)
    for callback in (CheckpointMonitor, CollapseWatch, GradientRangeMonitor, LossScaleMonitor, TrainingStateMonitor):
        MindFormerRegister.register_cls(callback, module_type=MindFormerModuleType.CALLBACK)
    # Replace load_checkpoint in the module of MindFormers' trainer. The trainer loads the checkpoint after it has built
    # the train-step cell. So the replacement is in time, even if this function runs only when that cell is built.
    load_checkpoint = getattr(base_trainer, "load_checkpoint", None)
    if load_checkpoint is not None and not hasattr(load_checkpoint, "restores_sidecar"):
        base_trainer.load_checkpoint = restores_sidecar(load_checkpoint)
        base_trainer.CommonInfo = CommonInfo
    auto_register = MindFormerRegister.auto_register
    if not hasattr(auto_register, "leaves_out_own"):
        MindFormerRegister.auto_register = staticmethod(_leaves_out_own(auto_register))


def _leaves_out_own(auto_register: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``MindFormerRegister.auto_register`` so that it skips this package's already registered classes."""

    def register_others(class_reference: object, *args: Any, **kwargs: Any) -> None:
        if not str(class_reference).startswith(OWN_AUTO_REGISTER):
            auto_register(class_reference, *args, **kwargs)

    register_others.leaves_out_own = True  # type: ignore[attr-defined]
    return register_others
