"""A sweep over loss scales as its pictures need it: the counts of each group of Parameters at each scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindformers_adaptive.gradients.statistics import ArrayStatistics, merge_statistics
from mindformers_adaptive.plots.parameter_groups import group_parameters
from mindformers_adaptive.text.power_of_two import as_power_of_two

__all__ = ["SweepSeries", "series_of_sweep"]


@dataclass(frozen=True, eq=False)
class SweepSeries:
    """What is drawn of a sweep.

    Attributes:
        loss_scales (tuple[float, ...]): the scales, in increasing order.
        overflowed (tuple[float, ...]): for each scale the share of batches that overflowed.
        groups (dict[str, tuple[ArrayStatistics, ...]]): by group of Parameters the counts at each scale; largest,
            smallest and norm are not set.
    """

    loss_scales: tuple[float, ...]
    overflowed: tuple[float, ...]
    groups: dict[str, tuple[ArrayStatistics, ...]]

    def overall(self, place: int) -> ArrayStatistics:
        """Return the counts of all groups together at the scale of a place."""
        return merge_statistics(found[place] for found in self.groups.values())

    def places(self, loss_scales: Sequence[float] | None) -> list[int]:
        """Return the places of some scales; of None the lowest, and the highest that did not overflow.

        Raises:
            ValueError: if there is no scale, or one that the sweep does not have.
        """
        if loss_scales is None:
            fits = [place for place, share in enumerate(self.overflowed) if share == 0]
            return sorted({0, fits[-1] if fits else len(self.loss_scales) - 1})
        listed = ", ".join(map(as_power_of_two, self.loss_scales))
        absent = [scale for scale in loss_scales if scale not in self.loss_scales]
        if absent or not len(loss_scales):
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
        at_scales = sorted(sweep["loss_scales"], key=lambda found: float(found["loss_scale"]))
        counts = [{name: _counts(found) for name, found in one["parameters"].items()} for one in at_scales]
        sizes = {name: found.size for name, found in counts[0].items()}
        grouped = group_parameters(sizes, group)
        batches = max(len(sweep["batches"]), 1)
        return SweepSeries(
            tuple(float(found["loss_scale"]) for found in at_scales),
            tuple(found["overflowed_batches"] / batches for found in at_scales),
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


def _counts(found: Mapping[str, Any]) -> ArrayStatistics:
    return ArrayStatistics(
        size=found["size"],
        zeros=found["zeros"],
        infs_and_nans=found["infs_and_nans"],
        histogram={int(exponent): count for exponent, count in found["histogram"].items()},
        underflowed=found["underflowed"],
    )
