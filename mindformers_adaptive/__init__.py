"""Adaptive loss scaling for MindSpore and MindFormers.

Importing this package does not import MindSpore: a name that needs it is loaded on first use, and raises an ImportError
that says what to install where MindSpore or MindFormers is missing.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mindformers_adaptive.amp.fixed_scale import FixedScaleTrainOneStepCell
    from mindformers_adaptive.amp.guided_manager import GradientGuidedLossScaleManager
    from mindformers_adaptive.amp.guided_scaler import GradientGuidedLossScaler
    from mindformers_adaptive.amp.manager import AdaptiveLossScaleManager
    from mindformers_adaptive.amp.scaler import AdaptiveLossScaler
    from mindformers_adaptive.amp.train_network import build_train_network, enable_loss_scale_on_cpu
    from mindformers_adaptive.cells.guided_update_cell import GradientGuidedLossScaleUpdateCell
    from mindformers_adaptive.cells.update_cell import AdaptiveLossScaleUpdateCell
    from mindformers_adaptive.gradients.ranges import gradient_ranges
    from mindformers_adaptive.gradients.recommendation import find_loss_scale
    from mindformers_adaptive.integration.registration import register
    from mindformers_adaptive.integration.trainer import Trainer
    from mindformers_adaptive.lab.policies import make_policy
    from mindformers_adaptive.monitor.gradient_range_monitor import GradientRangeMonitor
    from mindformers_adaptive.monitor.loss_scale_monitor import LossScaleMonitor
    from mindformers_adaptive.rules.adaptive import AdaptiveRule, LossScaleState
    from mindformers_adaptive.rules.ladder import window_ladder
    from mindformers_adaptive.rules.megatron import scale_sense_from_megatron

__all__ = [
    "AdaptiveLossScaleManager",
    "AdaptiveLossScaleUpdateCell",
    "AdaptiveLossScaler",
    "AdaptiveRule",
    "FixedScaleTrainOneStepCell",
    "GradientGuidedLossScaleManager",
    "GradientGuidedLossScaleUpdateCell",
    "GradientGuidedLossScaler",
    "GradientRangeMonitor",
    "LossScaleMonitor",
    "LossScaleState",
    "Trainer",
    "build_train_network",
    "enable_loss_scale_on_cpu",
    "find_loss_scale",
    "gradient_ranges",
    "make_policy",
    "register",
    "scale_sense_from_megatron",
    "window_ladder",
]

# Where each name is defined, without the package's own name. A test holds this to the imports above.
_MODULE_OF = {
    "AdaptiveLossScaleManager": "amp.manager",
    "AdaptiveLossScaleUpdateCell": "cells.update_cell",
    "AdaptiveLossScaler": "amp.scaler",
    "AdaptiveRule": "rules.adaptive",
    "FixedScaleTrainOneStepCell": "amp.fixed_scale",
    "GradientGuidedLossScaleManager": "amp.guided_manager",
    "GradientGuidedLossScaler": "amp.guided_scaler",
    "GradientGuidedLossScaleUpdateCell": "cells.guided_update_cell",
    "GradientRangeMonitor": "monitor.gradient_range_monitor",
    "LossScaleMonitor": "monitor.loss_scale_monitor",
    "LossScaleState": "rules.adaptive",
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
