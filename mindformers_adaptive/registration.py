"""Registration with MindFormers: after ``register()`` its YAML files find this package's classes."""

from mindformers.tools.register import MindFormerModuleType, MindFormerRegister

from mindformers_adaptive import wrapper

__all__ = ["register"]

# The short names that MindFormers gives to its own wrappers beside their class names.
_STOCK_ALIASES = {
    "loss_scale_wrapper": wrapper.TrainOneStepWithLossScaleCell,
    "mf_wrapper": wrapper.MFTrainOneStepCell,
    "pipeline_wrapper": wrapper.MFPipelineWithLossScaleCell,
}


def register():
    """Put the update cell and the train-step cells into MindFormers' registry under the stock names.

    What a YAML file calls ``AdaptiveLossScaleUpdateCell``, ``TrainOneStepWithLossScaleCell``, ``MFTrainOneStepCell``
    and ``MFPipelineWithLossScaleCell`` is from then on the class of that name in
    :mod:`mindformers_adaptive.wrapper`. Calling it again changes nothing.

    Examples:
        >>> from mindformers.tools.register import MindFormerRegister
        >>> from mindformers_adaptive import AdaptiveLossScaleUpdateCell, register
        >>> register()
        >>> MindFormerRegister.get_cls("wrapper", "AdaptiveLossScaleUpdateCell") is AdaptiveLossScaleUpdateCell
        True
    """
    for name in wrapper.__all__:
        _register_wrapper(name, getattr(wrapper, name))
    for alias, cell in _STOCK_ALIASES.items():
        _register_wrapper(alias, cell)


def _register_wrapper(name, cell):
    MindFormerRegister.register_cls(cell, module_type=MindFormerModuleType.WRAPPER, alias=name)
