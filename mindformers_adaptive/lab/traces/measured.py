"""Traces of ceilings that were measured: by gradient sweeps in a training, or by other means."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from mindformers_adaptive.lab.traces.trace import Trace

__all__ = ["from_ceilings", "from_gradient_ranges"]

_FORMAT = (
    'Write {"ceilings": [65536.0, "inf", ...]} or {"steps": [{"step": 1, "ceiling": 65536.0}, ...]}, each ceiling a '
    'number of at least 0 or "inf".'
)


def from_ceilings(path: str | os.PathLike[str]) -> Trace:
    """Return the trace of ceilings that were measured and written to a JSON file.

    The file holds one object with either ``"ceilings"``, a list, or ``"steps"``, a list of objects with ``"step"`` (an
    integer, increasing) and ``"ceiling"``. A ceiling is a number of at least 0, or the text "inf" for a step that no
    scale overflows. ``"name"`` is optional; other keys are ignored.

    Args:
        path (str or os.PathLike): the file.

    Returns:
        Trace, whose ceilings are known, named as in the file or else as the file.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is not JSON of this form.

    Examples:
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp(), "sweep.json")
        >>> _ = file.write_text('{"ceilings": [65536.0, "inf"]}')
        >>> from_ceilings(file).ceiling.tolist()
        [65536.0, inf]
    """
    try:
        measured = json.loads(Path(path).read_bytes(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be a JSON file of ceilings, but: {error}. {_FORMAT}") from error
    if not isinstance(measured, dict):
        raise ValueError(f"{path} must hold a JSON object, but holds a {type(measured).__name__}. {_FORMAT}")
    ceilings = measured.get("ceilings")
    if ceilings is None and _increasing(measured.get("steps")):
        ceilings = [step.get("ceiling") for step in measured["steps"]]
    if not isinstance(ceilings, list) or not ceilings:
        raise ValueError(f"{path} must hold ceilings, or steps that increase, but has none that can be read. {_FORMAT}")
    name = measured.get("name", Path(path).stem)
    return Trace.exact(str(name), [_require_ceiling(path, place, value) for place, value in enumerate(ceilings)])


def from_gradient_ranges(path: str | os.PathLike[str]) -> Trace:
    """Return the trace of the steps at which ``GradientRangeMonitor`` swept over loss scales.

    A sweep bounds the ceiling of its step: at least the largest scale below all that overflowed, and below the smallest
    that did. The lower bound is assumed. The largest gradient is that of the largest scale that fits, unscaled. Steps
    between the sweeps are not in the trace.

    Args:
        path (str or os.PathLike): ``gradient_ranges.jsonl`` of a monitor with ``loss_scales``.

    Returns:
        Trace, named as the file.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if a line is no sweep of that monitor, or there is none; the message names the line.

    Examples:
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp(), "gradient_ranges.jsonl")
        >>> tried = [{"loss_scale": 64.0, "overflow": False}, {"loss_scale": 512.0, "overflow": True}]
        >>> _ = file.write_text(json.dumps({"step": 100, "batches": [{"loss_scales": tried}]}))
        >>> trace = from_gradient_ranges(file)
        >>> trace.lower_bound.tolist(), trace.upper_bound.tolist()
        ([64.0], [512.0])
    """
    sweeps = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), start=1):
        try:
            sweeps.append(_bounds_and_gradient_of(json.loads(line)))
        except (KeyError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}:{number} is no sweep of GradientRangeMonitor ({type(error).__name__}: {error}). Take the line "
                "out, or give another file."
            ) from error
    if not sweeps:
        raise ValueError(f"{path} must have at least 1 sweep, but is empty. Give the record of a GradientRangeMonitor.")
    lower, upper, gradients = np.array(sweeps, dtype=np.float64).T
    known = None if np.isnan(gradients).all() else gradients
    return Trace(Path(path).name, lower, lower, upper, largest_gradient=known)


def _bounds_and_gradient_of(sweep: Mapping[str, Any]) -> tuple[float, float, float]:
    tried = [(float(one["loss_scale"]), one["overflow"]) for batch in sweep["batches"] for one in batch["loss_scales"]]
    upper = min((scale for scale, overflow in tried if overflow), default=math.inf)
    lower = max((scale for scale, overflow in tried if not overflow and scale < upper), default=0.0)
    # Multiplied by the scale, and by nothing else.
    largest = [one["overall"]["largest"] for one in sweep.get("loss_scales", []) if float(one["loss_scale"]) == lower]
    return lower, upper, float(largest[0]) / lower if largest else math.nan


def _increasing(steps: object) -> bool:
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        return False
    numbers = [step.get("step") for step in steps]
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
        return False
    return all(later > earlier for earlier, later in pairwise(numbers))


def _require_ceiling(path: object, place: int, value: object) -> float:
    if value == "inf":
        return math.inf
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1e300:
        raise ValueError(
            f"Each ceiling in {path} must be a number of at least 0, but number {place} is {value!r}. {_FORMAT}"
        )
    return float(value)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
