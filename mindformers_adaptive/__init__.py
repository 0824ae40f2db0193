"""Adaptive loss scaling for MindSpore and MindFormers.

Importing this package does not import MindSpore: a name that needs it is loaded on first use, and raises an ImportError
that says what to install where MindSpore or MindFormers is missing.
"""

import importlib

__version__ = "1.0.0"

# Where each public name is defined, without the package's own name. For editors __init__.pyi has them too.
_MODULE_OF = {
    "AdaptiveLossScaleManager": "amp.manager",
    "AdaptiveLossScaleUpdateCell": "cells.update_cells",
    "AdaptiveLossScaler": "amp.scaler",
    "AdaptiveRule": "rules.adaptive",
    "FixedScaleTrainOneStepCell": "amp.train_network",
    "GradientGuidedLossScaleManager": "amp.manager",
    "GradientGuidedLossScaleUpdateCell": "cells.update_cells",
    "GradientGuidedLossScaler": "amp.scaler",
    "GradientRangeMonitor": "monitor.gradient_range_monitor",
    "GuidedRule": "rules.guided",
    "LossScaleMonitor": "monitor.loss_scale_monitor",
    "LossScaleState": "rules.adaptive",
    "Rule": "rules.rule",
    "RuleLossScaleManager": "amp.manager",
    "RuleLossScaleUpdateCell": "cells.update_cells",
    "RuleLossScaler": "amp.scaler",
    "Trainer": "integration.trainer",
    "build_train_network": "amp.train_network",
    "enable_loss_scale_on_cpu": "amp.train_network",
    "explain_overflow": "overflow.explain",
    "find_loss_scale": "gradients.ranges",
    "gradient_ranges": "gradients.ranges",
    "make_policy": "lab.policies",
    "register": "integration.registration",
    "scale_sense_from_megatron": "rules.megatron",
    "simulate_formats": "amp.simulated_formats",
    "window_ladder": "rules.ladder",
}
__all__ = [*_MODULE_OF]


def __getattr__(name: str) -> object:
    if name == "TextRule":
        raise ImportError("mindformers_adaptive has no TextRule any more: see mindformers_adaptive.Rule.")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mindformers_adaptive.text.install_hint import install_hint

    with install_hint(f"{__name__}.{name}"):
        value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
