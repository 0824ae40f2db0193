"""The updates of weights in FP16 that are too small to change them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mindformers_adaptive.gradients.statistics import ArrayStatistics
from mindformers_adaptive.rules.formats import FLOAT16

__all__ = ["LostUpdates", "lost_updates"]


@dataclass(frozen=True)
class LostUpdates:
    """How many float16 weights stay the same after an update as large as the learning rate, because of rounding.

    Updates of Adam are hardly ever larger than the learning rate.

    Attributes:
        learning_rate (float): the size of the updates.
        share (float): the share of all weights in float16 that such an update leaves as they are.
        parameter (str): the Parameter with the largest share.
        parameter_share (float): the share of that Parameter's weights.
    """

    learning_rate: float
    share: float
    parameter: str
    parameter_share: float

    def __str__(self) -> str:
        return (
            f"Weights are kept in FP16. An update as large as the learning rate, {self.learning_rate:g}, is lost in "
            f"{self.share:.1%} of them, and in {self.parameter_share:.1%} of {self.parameter}, at any loss scale. "
            "Smaller ones are lost in more. Keep the weights in float32 (in YAML, 'param_init_type: float32')."
        )


def lost_updates(weights: Mapping[str, ArrayStatistics], learning_rate: float) -> LostUpdates | None:
    """Count the weights in float16 that an update as large as the learning rate leaves unchanged.

    Args:
        weights (Mapping[str, ArrayStatistics]): the statistics of the weights in float16, by Parameter name.
        learning_rate (float): above 0.

    Returns:
        LostUpdates, or None without weights.

    Examples:
        >>> from mindformers_adaptive.gradients.statistics import array_statistics
        >>> lost_updates({"norm": array_statistics([1.0, 0.5, 0.25])}, learning_rate=2.0**-12).share
        0.3333333333333333
    """
    counts = {name: _lost(each, learning_rate) for name, each in weights.items()}
    if not counts:
        return None
    shares = {name: count / max(weights[name].size, 1) for name, count in counts.items()}
    worst = max(shares, key=lambda name: shares[name])
    size = sum(each.size for each in weights.values())
    return LostUpdates(learning_rate, sum(counts.values()) / max(size, 1), worst, shares[worst])


def _lost(weights: ArrayStatistics, update: float) -> int:
    # Do not count an update of exactly half the distance to the next float16 number: the new weight is rounded to the
    # even one of the two neighbouring numbers, so some weights change and some do not.
    lowest = int(math.log2(FLOAT16.smallest_normal))
    quanta = {exponent: FLOAT16.quantum(max(exponent, lowest)) for exponent in weights.histogram}
    of_zeros = weights.zeros if update < FLOAT16.smallest_subnormal / 2 else 0
    return of_zeros + sum(count for exponent, count in weights.histogram.items() if update < quanta[exponent] / 2)
