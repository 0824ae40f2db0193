"""The table of this package's public names: where users import each name from, and which module defines the name.

The packages load their public names on first use (:func:`lazy_names`). The stubs for editors and the API reference have
the same names.
"""

import importlib
from collections.abc import Callable

from mindformers_adaptive.text.install_hint import install_hint

__all__ = ["PUBLIC", "lazy_names"]

_PACKAGE = "mindformers_adaptive"

# The titles of the API reference. Under each title: public names without the prefix "mindformers_adaptive.", each with
# the module that defines it. The modules "wrapper" and "rules" serve only to offer such names, so these two modules
# import the names at once, not on first use.
PUBLIC: dict[str, dict[str, str]] = {
    "Update cells": {
        "AdaptiveLossScaleUpdateCell": "cells.update_cells",
        "GradientGuidedLossScaleUpdateCell": "cells.update_cells",
        "RuleLossScaleUpdateCell": "cells.update_cells",
        "wrapper.NoLossScaleUpdateCell": "wrapper",
    },
    "Train-step cells": {
        "wrapper.MFTrainOneStepCell": "wrapper",
        "wrapper.MFPipelineWithLossScaleCell": "wrapper",
        "wrapper.TrainOneStepWithLossScaleCell": "wrapper",
        "FixedScaleTrainOneStepCell": "cells.train_network",
    },
    "Managers and scalers": {
        "AdaptiveLossScaleManager": "cells.manager",
        "GradientGuidedLossScaleManager": "cells.manager",
        "RuleLossScaleManager": "cells.manager",
        "AdaptiveLossScaler": "cells.scaler",
        "GradientGuidedLossScaler": "cells.scaler",
        "RuleLossScaler": "cells.scaler",
    },
    "Training": {
        "Trainer": "mindformers.trainer",
        "register": "mindformers.registration",
        "build_train_network": "cells.train_network",
        "enable_loss_scale_in_model": "cells.train_network",
        "scale_sense_from_megatron": "rules.megatron",
    },
    "Monitors and records": {
        "LossScaleMonitor": "monitor.loss_scale_monitor",
        "GradientRangeMonitor": "monitor.gradient_range_monitor",
        "monitor.RunRecord": "record.writer",
        "monitor.read_record": "record.writer",
    },
    "Gradients": {
        "explain_overflow": "overflow.explain",
        "find_loss_scale": "gradients.ranges",
        "gradient_ranges": "gradients.ranges",
        "overflow.Explanation": "overflow.explanation",
        "gradients.GradientSweep": "gradients.ranges",
        "gradients.LayerOutputs": "gradients.layers",
        "gradients.LossScaleRecommendation": "gradients.recommendation",
        "gradients.Verdict": "gradients.recommendation",
        "gradients.GradientRanges": "gradients.report",
    },
    "Rules": {
        "AdaptiveRule": "rules.adaptive",
        "GuidedRule": "rules.guided",
        "Rule": "rules.rule",
        "LossScaleState": "rules.adaptive",
        "window_ladder": "rules.ladder",
        "rules.find_rule": "rules",
        "rules.make_rule": "rules",
        "rules.Format": "rules.formats",
        "rules.find_format": "rules.formats",
    },
    "The lab": {
        "start_rule": "lab.running_rule",
        "lab.analyze": "lab.analysis",
        "lab.read_log": "record.logs",
        "lab.compare": "lab.replay",
        "lab.replay.replay": "lab.replay",
        "lab.from_gradient_ranges": "lab.ceilings",
        "lab.RecordedRun": "record.run",
        "lab.Trace": "record.trace",
    },
}

# Removed public names, each with what to use instead.
_GONE = {
    "TextRule": f"{_PACKAGE}.Rule",
    "lab.tune": f"{_PACKAGE}.lab.analyze, which says what to change, or {_PACKAGE}.lab.compare",
    "lab.synthetic_trace": "scripts/studies/synthetic.py in the repository",
    "lab.synthetic_traces": "scripts/studies/synthetic.py in the repository",
    "simulate_formats": "scripts/studies/simulated_formats.py in the repository",
}

# Former public names that still work, each with its present name.
_RENAMED = {"enable_loss_scale_on_cpu": "enable_loss_scale_in_model", "make_policy": "start_rule"}


def lazy_names(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package that loads its public names on first use.

    Args:
        package (str): the ``__name__`` of the package.

    Raises:
        ImportError: from ``__getattr__``, if MindSpore or MindFormers is missing; the message says what to install.
    """
    prefix = package.removeprefix(_PACKAGE).removeprefix(".")
    names = {
        name.rpartition(".")[2]: module
        for group in PUBLIC.values()
        for name, module in group.items()
        if name.rpartition(".")[0] == prefix
    }

    def load(name: str) -> object:
        name = _RENAMED.get(name, name)
        if (gone := f"{prefix}.{name}".lstrip(".")) in _GONE:
            raise ImportError(f"{package} no longer has {name}. Use {_GONE[gone]} instead.")
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with install_hint(f"{package}.{name}"):
            return getattr(importlib.import_module(f"{_PACKAGE}.{names[name]}"), name)

    return load, lambda: sorted(names), list(names)
