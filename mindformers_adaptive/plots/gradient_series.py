"""A record of gradients as its pictures need it: where the gradients of each group of Parameters lie, step by step."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.gradients.statistics import ArrayStatistics
from mindformers_adaptive.plots.run_series import Floats
from mindformers_adaptive.plots.sweep_series import SweepSeries, series_of_sweep, subnormal_share

__all__ = ["GradientSeries", "GroupSeries", "is_gradient_record", "series_of_gradients"]

# The edges of the bands of magnitudes, as shares of the gradients.
_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True, eq=False)
class GroupSeries:
    """The gradients of a group of Parameters; all arrays are float64.

    Attributes:
        bands (NDArray): of shape (5, steps): 5, 25, 50, 75 and 95 % of the gradients that are not 0 have a magnitude
            below 2 to this power, without the loss scale. As measured at the highest loss scale that did not overflow;
            nan if every one did.
        largest (NDArray): of shape (steps,), likewise the exponent of the largest magnitude.
        underflowed (NDArray): of shape (steps,), the share of the gradients that underflows at the loss scale of the
            training; nan where that is not known.
        subnormal (NDArray): of shape (steps,), likewise the share that is subnormal in FP16.
    """

    bands: Floats
    largest: Floats
    underflowed: Floats
    subnormal: Floats


@dataclass(frozen=True, eq=False)
class GradientSeries:
    """The gradients of a run, at those steps that were measured.

    Attributes:
        step (NDArray): float64 of shape (steps,), increasing.
        loss_scale (NDArray): float64 of shape (steps,), that of the training; nan where it is not known.
        overflow (NDArray): bool of shape (steps,), whether the gradients overflowed at that scale.
        groups (dict[str, GroupSeries]): by group of Parameters.
        overall (GroupSeries): all gradients together.
    """

    step: Floats
    loss_scale: Floats
    overflow: NDArray[np.bool_]
    groups: dict[str, GroupSeries]
    overall: GroupSeries


def is_gradient_record(record: Iterable[Mapping[str, object]]) -> bool:
    """Return whether lines are those of ``GradientRangeMonitor``'s record."""
    return any("loss_scales" in line for line in record)


def series_of_gradients(record: Sequence[Mapping[str, Any]], group: Callable[[str], str | None]) -> GradientSeries:
    """Return the series of a record of gradients.

    Args:
        record (Sequence[Mapping]): the lines, as :func:`mindformers_adaptive.monitor.record.read_record` returns them.
        group (Callable): from a Parameter's name to its group, or None.

    Raises:
        TypeError: if a line is not a sweep over loss scales.
        ValueError: if there is no line with gradients.
    """
    lines = [line for line in record if "missing_steps" not in line]
    if not lines:
        raise ValueError(
            "There must be at least 1 step with gradients to draw, but there is none. Let the run take 'every_n_steps' "
            "steps, or check that the file is the record of GradientRangeMonitor."
        )
    group = functools.cache(group)
    sweeps = [series_of_sweep(line, group) for line in lines]
    places = _training_places(lines, sweeps)
    at_steps = list(zip(sweeps, places, strict=True))
    kinds = dict.fromkeys(kind for sweep in sweeps for kind in sweep.groups)

    def series(counts: Callable[[SweepSeries], Sequence[ArrayStatistics] | None]) -> GroupSeries:
        rows = [_row(sweep, counts(sweep), place) for sweep, place in at_steps]
        *bands, largest, underflowed, subnormal = np.array(rows, np.float64).T
        return GroupSeries(np.array(bands), largest, underflowed, subnormal)

    return GradientSeries(
        step=np.array([line["step"] for line in lines], np.float64),
        loss_scale=np.array([math.nan if place is None else sweep.loss_scales[place] for sweep, place in at_steps]),
        overflow=np.array([place is not None and sweep.overflowed[place] for sweep, place in at_steps]),
        groups={kind: series(lambda sweep, kind=kind: sweep.groups.get(kind)) for kind in kinds},  # type: ignore[misc]
        overall=series(lambda sweep: sweep.overall),
    )


def _training_places(lines: Sequence[Mapping[str, Any]], sweeps: Sequence[SweepSeries]) -> list[int | None]:
    """Return for each step the place of the training's loss scale among the measured ones, None if it is not known."""
    always = set.intersection(*(set(sweep.loss_scales) for sweep in sweeps))
    places: list[int | None] = []
    for line, sweep in zip(lines, sweeps, strict=True):
        # A record without the training's scale was measured at it and at the same other scales in every step.
        others = [scale for scale in sweep.loss_scales if scale not in always or len(sweep.loss_scales) == 1]
        scale = line.get("loss_scale", others[0] if len(others) == 1 else None)
        places.append(sweep.loss_scales.index(scale) if scale in sweep.loss_scales else None)
    return places


def _row(sweep: SweepSeries, counts: Sequence[ArrayStatistics] | None, place: int | None) -> list[float]:
    """Return bands, largest, underflowed and subnormal of one step; counts of None are those of an absent group."""
    row = [math.nan] * (len(_QUANTILES) + 3)
    if counts is None:
        return row
    fits = [place for place, overflowed in enumerate(sweep.overflowed) if not overflowed]
    if fits and counts[fits[-1]].histogram:
        best, unscaled = counts[fits[-1]], math.log2(sweep.loss_scales[fits[-1]])
        exponents, numbers = np.array(sorted(best.histogram.items())).T
        edges = np.append(exponents[0], exponents + 1)
        below = np.append(0, np.cumsum(numbers)) / numbers.sum()
        row[: len(_QUANTILES)] = (np.interp(_QUANTILES, below, edges) - unscaled).tolist()
        row[-3] = (math.log2(best.largest) if best.largest else float(edges[-1])) - unscaled
    if place is not None and not sweep.overflowed[place]:
        training = counts[place]
        share = training.share(training.underflowed)
        row[-2] = math.nan if share is None else share
        row[-1] = subnormal_share(training)
    return row
