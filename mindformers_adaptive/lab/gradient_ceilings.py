"""Traces of ceilings (largest loss scales without overflow) and largest gradients: measured in sweeps, or synthetic."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mindformers_adaptive.record.trace import Trace
from mindformers_adaptive.rules.checks import require_integer
from mindformers_adaptive.rules.formats import FLOAT16, Format, find_format
from mindformers_adaptive.text.untrusted import printable

__all__ = ["MOST_STEPS", "checked_steps", "from_gradient_ranges", "random_of", "with_gradients"]

# The largest number of steps in a trace: more steps than any training has, and the replay of such a trace still fits
# into memory.
MOST_STEPS = 10**7

_PLAIN_INTEGER = "Write it without quotes and without a decimal point."


def with_gradients(
    trace: Trace, offset: float = 0.0, spread: float = 0.0, seed: int = 0, gradient_format: Format = FLOAT16
) -> Trace:
    r"""Return a copy of a trace with gradients that imply the trace's ceilings, or too high or too low ceilings.

    :math:`largest\_gradient_t = largest / (c_t \cdot 2^{offset + spread \cdot n_t})`, where *largest* is the
    largest number of the format, :math:`c_t` the ceiling, and :math:`n_t` are independent standard normal numbers.

    Args:
        trace (Trace): the trace that the gradients are added to.
        offset (float): how many bits the ceilings that the gradients imply are too high, as when activation gradients
            overflow first. A negative offset makes them too low, as when a gradient is summed in float32. Default: 0.
        spread (float): standard deviation of the offset, in bits. Default: 0.
        seed (int): seed of the random offsets, at least 0. Default: 0.
        gradient_format (Format): the format of the gradients. Default: float16.

    Examples:
        >>> with_gradients(Trace.exact("calm", [2.0**16] * 3), offset=3.0).largest_gradient.tolist()
        [0.12493896484375, 0.12493896484375, 0.12493896484375]
    """
    noise = random_of(seed, "offset").standard_normal(len(trace)) if spread else 0.0
    with np.errstate(divide="ignore", over="ignore"):
        gradients = gradient_format.largest / trace.ceiling / np.exp2(offset + spread * noise)
    shown = np.broadcast_to(gradients, trace.ceiling.shape)
    return dataclasses.replace(trace, largest_gradient=shown, gradient_format=gradient_format)


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


def random_of(seed: int, symbol: str) -> np.random.Generator:
    """Return a random generator for one symbol of a formula. Different symbols get independent random numbers."""
    return np.random.default_rng([require_integer("seed", seed, 0, _PLAIN_INTEGER, most=2**63), *symbol.encode()])


def checked_steps(steps: int) -> int:
    """Return ``steps`` if it is an integer from 1 to ``MOST_STEPS``, else raise an error."""
    return require_integer("steps", steps, 1, _PLAIN_INTEGER, most=MOST_STEPS)
