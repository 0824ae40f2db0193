"""Loaded by MindFormers' ``auto_register``; registers the whole plugin as it is loaded.

MindFormers copies this file into ``./modules`` of the working folder and imports the copy, so everything is imported
from the installed package: a class defined here would exist twice.
"""

from mindformers_adaptive import (
    AdaptiveLossScaleUpdateCell,
    GradientGuidedLossScaleUpdateCell,
    RuleLossScaleUpdateCell,
    register,
)

__all__ = ["AdaptiveLossScaleUpdateCell", "GradientGuidedLossScaleUpdateCell", "RuleLossScaleUpdateCell"]

register()
