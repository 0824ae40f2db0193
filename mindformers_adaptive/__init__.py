"""Adaptive loss scaling for MindSpore and MindFormers.

Importing this package does not import MindSpore: a name that needs it is loaded on first use.
"""

import importlib

__version__ = "0.1.0"

_HOME_OF = {
    "AdaptiveLossScaleManager": "mindformers_adaptive.amp.manager",
    "AdaptiveLossScaleUpdateCell": "mindformers_adaptive.update_cell",
    "AdaptiveLossScaler": "mindformers_adaptive.amp.scaler",
    "AdaptiveRule": "mindformers_adaptive.rule",
    "FixedScaleTrainOneStepCell": "mindformers_adaptive.amp.fixed_scale",
    "GradientRangeMonitor": "mindformers_adaptive.callbacks.gradient_range_monitor",
    "LossScaleMonitor": "mindformers_adaptive.callbacks.loss_scale_monitor",
    "LossScaleState": "mindformers_adaptive.rule",
    "Trainer": "mindformers_adaptive.trainer",
    "build_train_network": "mindformers_adaptive.amp.train_network",
    "enable_loss_scale_on_cpu": "mindformers_adaptive.amp.train_network",
    "find_loss_scale": "mindformers_adaptive.gradients.finder",
    "gradient_ranges": "mindformers_adaptive.gradients.ranges",
    "make_policy": "mindformers_adaptive.lab.policies",
    "register": "mindformers_adaptive.registration",
    "window_ladder": "mindformers_adaptive.ladder",
}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
