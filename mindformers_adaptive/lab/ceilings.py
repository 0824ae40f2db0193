"""Traces of ceilings (largest loss scales without overflow), from a recorded run or from sweeps over loss scales."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.record.run import RecordedRun
from mindformers_adaptive.record.thresholds import DECIDED_FROM
from mindformers_adaptive.record.trace import Trace, consecutive_runs, implied_ceilings, just_below
from mindformers_adaptive.rules.formats import FLOAT16, find_format
from mindformers_adaptive.text.untrusted import printable


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


Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


def trace_of(run: RecordedRun) -> Trace:
    r"""Return the trace of ceilings (largest loss scales without overflow) that follows from a recorded run.

    A step that was applied at scale s has a ceiling of at least s, one that was skipped has one below s. Of a step
    whose scale or outcome the log does not state, nothing is known. Within these bounds the ceiling is assumed:

    - By gradients, where any are known: an applied step has the c that its largest gradient g shows, in FP16
      65504 / g; between two of them :math:`\log_2 c` is linear, for skipped steps and for those that show nothing. If
      after more than half of the series of skipped steps the gradients show more than the scale that was skipped, then
      something else overflows first, and all c are lowered by the median of the excess.
    - Else interpolated: at each series of consecutive skipped steps, with s the smallest scale that was skipped and a
      the scale of the next applied step, or s / 2 if that is smaller or there is none,
      :math:`\log_2 c = (\log_2 s + \log_2 a) / 2`. Between two of them :math:`\log_2 c` is linear in the place of
      the step, before the first and after the last it is constant. An applied step has at least the largest scale that
      the applied steps after it reach before the next skipped step. Without any skipped step c is the largest scale
      that was applied.

    Args:
        run (RecordedRun): a run whose log states the scale and the outcome of at least 90 % of its steps.

    Returns:
        Trace, with the run's name and the gradients of its applied steps.

    Raises:
        ValueError: if the log states too little.

    Examples:
        >>> trace_of(RecordedRun.of_steps([1, 2, 3], [4.0, 2.0, 2.0], [True, False, False])).ceiling.round(2).tolist()
        [2.83, 2.83, 2.83]
    """
    if (share := run.known_share) < DECIDED_FROM:
        raise ValueError(
            f"{run.name} states for {share:.0%} of its steps which loss scale they used and whether they were skipped, "
            f"and a replay needs {DECIDED_FROM:.0%}. Give a log with a line for each step: the record of "
            "LossScaleMonitor, or the log of Megatron-LM with --log-interval 1."
        )
    lengths = run.lengths
    low, high = (np.repeat(scale, lengths) for scale in run.scale_ranges)
    skipped, applied = (np.repeat(flags, lengths) & ~np.isnan(low) for flags in (run.skipped, run.applied))
    # A rule without a smallest loss scale can lower the scale to 0. No ceiling lies below 0, so an overflow at 0 would
    # contradict every ceiling: replace 0 by a tiny positive scale.
    scale = np.maximum(np.where(skipped, high, np.where(applied, low, 0.0)), np.finfo(np.float64).tiny)
    lower, below = np.where(applied, scale, 0.0), np.where(skipped, scale, np.inf)
    if (gradients := run.applied_gradients()) is None:
        ceiling = _interpolated(scale, skipped, applied)
    else:
        # The gradients are of the last steps of the stretches.
        of_steps = np.full(len(scale), np.nan)
        of_steps[np.cumsum(lengths) - 1] = gradients
        gradients = of_steps
        ceiling = _by_gradients(scale, skipped, implied_ceilings(gradients, run.gradient_format))
    ceiling = np.maximum(np.minimum(ceiling, just_below(below)), lower)
    return Trace(run.name, ceiling, lower, below, gradients, run.gradient_format)


def _skipped_series(scale: Floats, skipped: Flags) -> tuple[NDArray[np.int64], Floats]:
    """Return for each series of consecutive skipped steps the first and last index, and the smallest loss scale."""
    series = consecutive_runs(np.flatnonzero(skipped))
    between = np.minimum.reduceat(np.append(scale, np.inf), (series + np.array([0, 1])).ravel())
    return series, between[::2]


def _interpolated(scale: Floats, skipped: Flags, applied: Flags) -> Floats:
    if not skipped.any():
        return np.full_like(scale, scale.max(initial=0.0))
    series, smallest = _skipped_series(scale, skipped)
    following = np.append(np.where(applied, scale, np.inf), np.inf)[series[:, 1] + 1]
    anchors = (np.log2(smallest) + np.log2(np.minimum(following, smallest / 2))) / 2
    # All consecutive skipped steps get the same assumed ceiling.
    ceiling = np.exp2(np.interp(np.arange(len(scale)), series.ravel(), np.repeat(anchors, 2)))
    return np.maximum(ceiling, _reached(scale, applied))


def _reached(scale: Floats, applied: Flags) -> Floats:
    """Return for each applied step the largest scale of the applied steps from it up to the next other step, else 0.

    Without these ceilings, each scale of a run that climbs would seem the highest one.
    """
    reached = np.where(applied, scale, 0.0)
    for first, last in consecutive_runs(np.flatnonzero(applied)).tolist():
        row = slice(first, last + 1)
        reached[row] = np.maximum.accumulate(reached[row][::-1])[::-1]
    return reached


def _by_gradients(scale: Floats, skipped: Flags, shown: Floats) -> Floats:
    known = np.flatnonzero(~np.isnan(shown))
    exponents = np.interp(np.arange(len(scale)), known, np.log2(shown[known]))
    if skipped.any():
        series, smallest = _skipped_series(scale, skipped)
        after = known[np.minimum(np.searchsorted(known, series[:, 1]), len(known) - 1)]
        exponents -= max(float(np.median(exponents[after] - np.log2(smallest))), 0.0)
    return np.exp2(exponents)
