"""Adaptive loss scaling for MindSpore and MindFormers.

Importing this package does not import MindSpore: a name that needs it is loaded on first use, and raises an ImportError
that says what to install where MindSpore or MindFormers is missing.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# Where each public name is defined, without the package's own name. For editors a test holds the imports below to this.
_MODULE_OF = {
    "AdaptiveLossScaleManager": "amp.manager",
    "AdaptiveLossScaleUpdateCell": "cells.adaptive_update_cell",
    "AdaptiveLossScaler": "amp.scaler",
    "AdaptiveRule": "rules.adaptive",
    "FixedScaleTrainOneStepCell": "amp.fixed_scale",
    "GradientGuidedLossScaleManager": "amp.manager",
    "GradientGuidedLossScaleUpdateCell": "cells.text_update_cell",
    "GradientGuidedLossScaler": "amp.scaler",
    "GradientRangeMonitor": "monitor.gradient_range_monitor",
    "GuidedRule": "rules.guided",
    "LossScaleMonitor": "monitor.loss_scale_monitor",
    "LossScaleState": "rules.adaptive",
    "RuleLossScaleManager": "amp.manager",
    "RuleLossScaleUpdateCell": "cells.text_update_cell",
    "RuleLossScaler": "amp.scaler",
    "TextRule": "rules.text_rule",
    "Trainer": "integration.trainer",
    "build_train_network": "amp.train_network",
    "enable_loss_scale_on_cpu": "amp.train_network",
    "find_loss_scale": "gradients.recommendation",
    "gradient_ranges": "gradients.ranges",
    "make_policy": "lab.policies",
    "register": "integration.registration",
    "scale_sense_from_megatron": "rules.megatron",
    "window_ladder": "rules.ladder",
}
__all__ = [*_MODULE_OF]

if TYPE_CHECKING:
    from mindformers_adaptive.amp.fixed_scale import FixedScaleTrainOneStepCell as FixedScaleTrainOneStepCell
    from mindformers_adaptive.amp.manager import AdaptiveLossScaleManager as AdaptiveLossScaleManager
    from mindformers_adaptive.amp.manager import GradientGuidedLossScaleManager as GradientGuidedLossScaleManager
    from mindformers_adaptive.amp.manager import RuleLossScaleManager as RuleLossScaleManager
    from mindformers_adaptive.amp.scaler import AdaptiveLossScaler as AdaptiveLossScaler
    from mindformers_adaptive.amp.scaler import GradientGuidedLossScaler as GradientGuidedLossScaler
    from mindformers_adaptive.amp.scaler import RuleLossScaler as RuleLossScaler
    from mindformers_adaptive.amp.train_network import build_train_network as build_train_network
    from mindformers_adaptive.amp.train_network import enable_loss_scale_on_cpu as enable_loss_scale_on_cpu
    from mindformers_adaptive.cells.adaptive_update_cell import (
        AdaptiveLossScaleUpdateCell as AdaptiveLossScaleUpdateCell,
    )
    from mindformers_adaptive.cells.text_update_cell import (
        GradientGuidedLossScaleUpdateCell as GradientGuidedLossScaleUpdateCell,
    )
    from mindformers_adaptive.cells.text_update_cell import RuleLossScaleUpdateCell as RuleLossScaleUpdateCell
    from mindformers_adaptive.gradients.ranges import gradient_ranges as gradient_ranges
    from mindformers_adaptive.gradients.recommendation import find_loss_scale as find_loss_scale
    from mindformers_adaptive.integration.registration import register as register
    from mindformers_adaptive.integration.trainer import Trainer as Trainer
    from mindformers_adaptive.lab.policies import make_policy as make_policy
    from mindformers_adaptive.monitor.gradient_range_monitor import GradientRangeMonitor as GradientRangeMonitor
    from mindformers_adaptive.monitor.loss_scale_monitor import LossScaleMonitor as LossScaleMonitor
    from mindformers_adaptive.rules.adaptive import AdaptiveRule as AdaptiveRule
    from mindformers_adaptive.rules.adaptive import LossScaleState as LossScaleState
    from mindformers_adaptive.rules.guided import GuidedRule as GuidedRule
    from mindformers_adaptive.rules.ladder import window_ladder as window_ladder
    from mindformers_adaptive.rules.megatron import scale_sense_from_megatron as scale_sense_from_megatron
    from mindformers_adaptive.rules.text_rule import TextRule as TextRule


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mindformers_adaptive.text.install_hint import install_hint

    with install_hint(f"{__name__}.{name}"):
        value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
