"""Traces of ceilings (largest loss scales without overflow) and largest gradients that sweeps measured."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mindformers_adaptive.record.trace import Trace
from mindformers_adaptive.rules.formats import FLOAT16, find_format
from mindformers_adaptive.text.untrusted import printable

__all__ = ["from_gradient_ranges"]


def from_gradient_ranges(path: str | os.PathLike[str]) -> Trace:
    """Return the trace of the steps at which ``GradientRangeMonitor`` swept over loss scales.

    A sweep bounds the ceiling of its step. The lower bound is the largest scale below all scales that overflowed, the
    upper bound is the smallest scale that overflowed. The ceiling is assumed to be the lower bound. The largest
    gradient was measured at the largest scale that fits, and is unscaled. Steps between the sweeps are not in the
    trace.

    Args:
        path (str or os.PathLike): ``gradient_ranges.jsonl`` of a monitor with ``loss_scales``.

    Returns:
        Trace, named as the file.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if a line is not a sweep of that monitor, or the file is empty; the message names the line.

    Examples:
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp(), "gradient_ranges.jsonl")
        >>> tried = [{"loss_scale": 64.0, "overflow": False}, {"loss_scale": 512.0, "overflow": True}]
        >>> _ = file.write_text(json.dumps({"step": 100, "batches": [{"loss_scales": tried}]}))
        >>> trace = from_gradient_ranges(file)
        >>> trace.lower_bound.tolist(), trace.upper_bound.tolist()
        ([64.0], [512.0])
    """
    sweeps, gradient_format = [], FLOAT16
    for number, line in enumerate(Path(path).read_bytes().splitlines(), start=1):
        try:
            sweep = json.loads(line)
            sweeps.append(_bounds_and_gradient_of(sweep))
            gradient_format = find_format(sweep.get("gradient_format", FLOAT16))
        except (ArithmeticError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}:{number} is not a sweep over loss scales that GradientRangeMonitor wrote "
                f"({type(error).__name__}: {error}). Remove this line, or give another file."
            ) from error
    if not sweeps:
        raise ValueError(f"{path} must have at least 1 sweep, but is empty. Give the record of a GradientRangeMonitor.")
    lower, upper, gradients = np.array(sweeps, dtype=np.float64).T
    known = None if np.isnan(gradients).all() else gradients
    name = printable(Path(path).name)
    return Trace(name, lower, lower, upper, largest_gradient=known, gradient_format=gradient_format)


def _bounds_and_gradient_of(sweep: Mapping[str, Any]) -> tuple[float, float, float]:
    tried = [
        (float(ranges["loss_scale"]), ranges["overflow"])
        for batch in sweep["batches"]
        for ranges in batch["loss_scales"]
    ]
    upper = min((scale for scale, overflow in tried if overflow), default=math.inf)
    lower = max((scale for scale, overflow in tried if not overflow and scale < upper), default=0.0)
    # The recorded largest gradients are multiplied by the loss scale only, so dividing by the loss scale unscales them.
    largest = [
        ranges["overall"]["largest"] for ranges in sweep.get("loss_scales", []) if float(ranges["loss_scale"]) == lower
    ]
    return lower, upper, float(largest[0]) / lower if largest else math.nan
