"""What the gradients of a run show of the loss scales that it could have used."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mindformers_adaptive.lab.gradient_ceilings import implied_ceilings
from mindformers_adaptive.lab.recorded_run import RecordedRun
from mindformers_adaptive.text.table import as_power_of_two

__all__ = ["shown_by_gradients", "shown_in_words"]


def shown_by_gradients(run: RecordedRun) -> dict[str, Any] | None:
    """Return the loss scales that the gradients of the applied steps allowed, ready for JSON; None if none is known.

    Where the largest gradients are not known, the norm of all bounds them: no gradient is larger.

    Args:
        run (RecordedRun): any run.

    Returns:
        dict with ``by``, "largest gradients" or "norms"; ``steps``, of how many applied steps they are known; and
        ``lowest`` and ``median``, the scales that they allow, of norms at least so much.

    Examples:
        >>> flags = np.array([False, False])
        >>> arrays = np.array([1, 2]), np.array([64.0, 64.0]), flags, ~flags
        >>> run = RecordedRun("run", (), "jsonl", *arrays, gradient_norm=np.array([0.5, 2.0]))
        >>> shown_by_gradients(run)
        {'by': 'norms', 'steps': 2, 'lowest': 32752.0, 'median': 81880.0}
    """
    for name, gradients in (("largest gradients", run.largest_gradient), ("norms", run.gradient_norm)):
        if gradients is None:
            continue
        ceilings = implied_ceilings(np.where(run.overflow, np.nan, gradients), run.gradient_format)
        known = ceilings[np.isfinite(ceilings)]
        if len(known):
            extremes = {"lowest": float(known.min()), "median": float(np.median(known))}
            return {"by": name, "steps": len(known), **extremes}
    return None


def shown_in_words(shown: dict[str, Any]) -> str:
    """Return what :func:`shown_by_gradients` found as half a sentence."""
    at_least = "at least " if shown["by"] == "norms" else ""
    lowest, median = (as_power_of_two(2.0 ** math.floor(math.log2(shown[name]))) for name in ("lowest", "median"))
    scales = f"{at_least}{lowest} in each, {median} in the median"
    return f"the {shown['by']} of {shown['steps']} applied step(s) allowed {scales}"
