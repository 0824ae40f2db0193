"""A sweep over loss scales as its pictures need it: counts by group of Parameters and loss scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindformers_adaptive.gradients.parameter_groups import group_parameters
from mindformers_adaptive.gradients.statistics import ArrayStatistics, merge_statistics
from mindformers_adaptive.text.table import as_power_of_two

__all__ = ["LARGEST", "NORMAL", "SUBNORMAL", "SweepSeries", "series_of_sweep", "subnormal_share"]

# FP16 as exponents of 2: the smallest subnormal number, the smallest normal one and the largest, 65504.
SUBNORMAL, NORMAL, LARGEST = -24.0, -14.0, math.log2(65504.0)


@dataclass(frozen=True, eq=False)
class SweepSeries:
    """The gradients of a sweep, by loss scale and group of Parameters.

    Attributes:
        loss_scales (tuple[float, ...]): the scales, in increasing order.
        overflowed (tuple[bool, ...]): for each scale whether a batch overflowed.
        groups (dict[str, tuple[ArrayStatistics, ...]]): by group of Parameters the counts at each scale; smallest and
            norm are not set.
    """

    loss_scales: tuple[float, ...]
    overflowed: tuple[bool, ...]
    groups: dict[str, tuple[ArrayStatistics, ...]]

    @property
    def overall(self) -> tuple[ArrayStatistics, ...]:
        """The counts of all groups together at each scale."""
        return tuple(map(merge_statistics, zip(*self.groups.values(), strict=True)))

    def places(self, loss_scales: Sequence[float] | None) -> list[int]:
        """Return the places of some scales; of None the lowest, and the highest that did not overflow.

        Raises:
            ValueError: if there is no scale, or one that the sweep does not have.
        """
        if loss_scales is None:
            fits = [place for place, overflow in enumerate(self.overflowed) if not overflow]
            return sorted({0, fits[-1] if fits else len(self.loss_scales) - 1})
        if not len(loss_scales) or not set(loss_scales) <= set(self.loss_scales):
            listed = ", ".join(map(as_power_of_two, self.loss_scales))
            raise ValueError(
                f"'loss_scales' must be some of the sweep's, {listed}, but got {list(loss_scales)}. Choose from these, "
                "or run the sweep with the others."
            )
        return [self.loss_scales.index(scale) for scale in loss_scales]


def series_of_sweep(sweep: Mapping[str, Any], group: Callable[[str], str | None]) -> SweepSeries:
    """Return the series of a sweep.

    Args:
        sweep (Mapping): what ``GradientRanges.to_dict()`` returns, or its JSON file holds.
        group (Callable): from a Parameter's name to its group, or None.

    Raises:
        TypeError: if it is something else.
    """
    try:
        at_scales = sorted(sweep["loss_scales"], key=lambda one: float(one["loss_scale"]))
        counts = [{name: _counts(one) for name, one in at_scale["parameters"].items()} for at_scale in at_scales]
        grouped = group_parameters({name: one.size for name, one in counts[0].items()}, group)
        return SweepSeries(
            tuple(float(at_scale["loss_scale"]) for at_scale in at_scales),
            tuple(at_scale["overflowed_batches"] > 0 for at_scale in at_scales),
            {
                kind: tuple(merge_statistics(at_scale[name] for name in names) for at_scale in counts)
                for kind, names in grouped.items()
            },
        )
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise TypeError(
            "'sweep' must be what GradientRanges.to_dict() returns, with at least 1 loss scale, but got "
            f"{str(sweep)[:80]!r} of type {type(sweep).__name__} ({type(error).__name__}: {error}). Load the JSON file "
            "of a sweep, or take one line of a record of gradients."
        ) from error


def subnormal_share(counts: ArrayStatistics) -> float:
    """Return the share of gradients that are below the smallest normal number of FP16, without those that are 0."""
    return counts.share(sum(number for exponent, number in counts.histogram.items() if exponent < NORMAL)) or 0.0


def _counts(statistics: Mapping[str, Any]) -> ArrayStatistics:
    return ArrayStatistics(
        size=statistics["size"],
        zeros=statistics["zeros"],
        infs_and_nans=statistics["infs_and_nans"],
        largest=statistics.get("largest", 0.0),
        histogram={int(exponent): number for exponent, number in statistics["histogram"].items()},
        underflowed=statistics["underflowed"],
    )
