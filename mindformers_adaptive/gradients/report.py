"""The result of a sweep over loss scales: statistics by scale and Parameter, as tables and JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from mindformers_adaptive.gradients.statistics import ArrayStatistics, merge_statistics
from mindformers_adaptive.text.atomic_file import atomic_write
from mindformers_adaptive.text.json_text import json_text
from mindformers_adaptive.text.table import align, as_power_of_two

__all__ = ["GradientRanges", "LostGradient", "ScaleRanges"]


class LostGradient(NamedTuple):
    """What FP16 lost of a gradient at a loss scale, by underflow and by the coarseness of subnormal numbers.

    Attributes:
        lost (float): the norm of the difference to the reference, both divided as the train step does.
        norm (float): the norm of the reference, the gradient at the highest scale of the batch that did not overflow.
    """

    lost: float
    norm: float


@dataclass(frozen=True)
class ScaleRanges:
    """The gradients of one batch at one loss scale, as the backward pass returns them: multiplied by the scale.

    Attributes:
        loss_scale (float): the scale.
        loss (float): the loss, without the scale.
        parameters (dict[str, ArrayStatistics]): by Parameter name; ``underflowed`` counts against the highest scale of
            the batch that did not overflow, and is None at the scales above it.
        grad_scale_factor (float): what the train step divides the gradients by beside the loss scale: the number of
            tokens with MindFormers' ``calculate_per_token_loss``, else 1.
        lost (dict[str, LostGradient]): by Parameter name what the scale loses; empty without a reference.
    """

    loss_scale: float
    loss: float
    parameters: Mapping[str, ArrayStatistics]
    grad_scale_factor: float = 1.0
    lost: Mapping[str, LostGradient] = field(default_factory=dict)

    @property
    def overall(self) -> ArrayStatistics:
        """All Parameters together."""
        return merge_statistics(self.parameters.values())

    @property
    def overflow(self) -> bool:
        """Whether any gradient is inf or NaN: such a step is skipped."""
        return any(statistics.infs_and_nans for statistics in self.parameters.values())

    def unscaled(self) -> ScaleRanges:
        """Return the gradients as the optimizer takes them, without histograms."""
        divisor = self.loss_scale * self.grad_scale_factor
        return replace(self, parameters={name: each.divided_by(divisor) for name, each in self.parameters.items()})


@dataclass(frozen=True)
class GradientRanges:
    """The result of one sweep.

    Attributes:
        weights (dict[str, ArrayStatistics]): the weights, by Parameter name.
        batches (tuple[tuple[ScaleRanges, ...], ...]): for each batch the scales, in increasing order.
        outputs (dict[str, ArrayStatistics]): the outputs of the layers that were asked for, by their names, over all
            batches; they do not depend on the loss scale.
    """

    weights: Mapping[str, ArrayStatistics]
    batches: tuple[tuple[ScaleRanges, ...], ...]
    outputs: Mapping[str, ArrayStatistics] = field(default_factory=dict)

    @property
    def loss_scales(self) -> tuple[float, ...]:
        """The scales of the sweep, in increasing order."""
        return tuple(ranges.loss_scale for ranges in self.batches[0])

    def reference(self, batch: int) -> float | None:
        """Return the highest loss scale that did not overflow in a batch, or None if every one did."""
        return max((ranges.loss_scale for ranges in self.batches[batch] if not ranges.overflow), default=None)

    def parameters(self, loss_scale: float, unscaled: bool = False) -> dict[str, ArrayStatistics]:
        """Return the statistics of each Parameter's gradient at a scale, over all batches.

        Counts are added up, magnitudes are the extremes, and the norm is the root mean square over the batches.

        Args:
            loss_scale (float): one of ``loss_scales``.
            unscaled (bool): whether the gradients are divided as the train step does; then there is no histogram.
                Default: False, they are as the backward pass returns them.

        Raises:
            KeyError: if the sweep does not have the scale.
        """
        at_scale = self._at(loss_scale, unscaled)
        names = at_scale[0].parameters
        return {name: _over_batches([ranges.parameters[name] for ranges in at_scale]) for name in names}

    def overall(self, loss_scale: float, unscaled: bool = False) -> ArrayStatistics:
        """Return the statistics of all gradients together at a scale, over all batches, as :meth:`parameters` does."""
        return _over_batches([ranges.overall for ranges in self._at(loss_scale, unscaled)])

    def overflowed_batches(self, loss_scale: float) -> int:
        """Return how many batches overflowed at a scale, one of ``loss_scales``."""
        return sum(ranges.overflow for ranges in self._at(loss_scale))

    def lost_share(self, loss_scale: float, names: Iterable[str] | None = None) -> float | None:
        """Return the norm of what a scale loses of gradients, as a share of their norm, over all batches.

        0 is nothing; 1 is everything. What is lost is the difference to the highest scale that did not overflow:
        gradients that became 0, and the rounding of those that became subnormal numbers.

        Args:
            loss_scale (float): one of ``loss_scales``.
            names (Iterable[str], optional): of some Parameters. Default: None, all of them.

        Returns:
            float; None where it is not known, because a batch has no reference at or above the scale, or because all
            these gradients are 0 at every scale.
        """
        at_scale = self._at(loss_scale)
        chosen = list(at_scale[0].parameters if names is None else names)
        if not all(ranges.lost for ranges in at_scale):
            return None
        parts = [ranges.lost[name] for ranges in at_scale for name in chosen]
        norm = math.hypot(*(part.norm for part in parts))
        return math.hypot(*(part.lost for part in parts)) / norm if norm > 0 else None

    def to_dict(self) -> dict[str, object]:
        """Return everything as dicts, lists and numbers."""
        return {
            "weights": {
                "overall": merge_statistics(self.weights.values()).to_dict(),
                "parameters": {name: statistics.to_dict() for name, statistics in self.weights.items()},
            },
            "loss_scales": [
                {
                    "loss_scale": scale,
                    "overflowed_batches": self.overflowed_batches(scale),
                    "overall": {**self.overall(scale).to_dict(), "lost_share": self.lost_share(scale)},
                    "parameters": {
                        name: {**each.to_dict(), "lost_share": self.lost_share(scale, [name])}
                        for name, each in self.parameters(scale).items()
                    },
                }
                for scale in self.loss_scales
            ],
            "batches": [
                {
                    "reference_loss_scale": self.reference(place),
                    "grad_scale_factor": batch[0].grad_scale_factor,
                    "loss_scales": [
                        {"loss_scale": ranges.loss_scale, "loss": ranges.loss, "overflow": ranges.overflow}
                        for ranges in batch
                    ],
                }
                for place, batch in enumerate(self.batches)
            ],
            "outputs": {name: statistics.to_dict() for name, statistics in self.outputs.items()},
        }

    def table(self, loss_scale: float | None = None) -> str:
        """Return a table to print; its largest, smallest and norm are those that the optimizer takes, unscaled.

        The last column is :meth:`lost_share`.

        Args:
            loss_scale (float, optional): a row for each Parameter at this scale. Default: None, a row for each scale.
        """
        if loss_scale is None:
            lines = [["loss scale", "overflowed", *_COLUMNS, "lost"]]
            for scale in self.loss_scales:
                overflowed = f"{self.overflowed_batches(scale)}/{len(self.batches)}"
                cells = _cells(self.overall(scale, unscaled=True))
                lines.append([as_power_of_two(scale), overflowed, *cells, _percent(self.lost_share(scale))])
        else:
            rows = self.parameters(loss_scale, unscaled=True)
            lines = [[f"at {as_power_of_two(loss_scale)}", *_COLUMNS, "lost"]]
            lines += [
                [name, *_cells(each), _percent(self.lost_share(loss_scale, [name]))] for name, each in rows.items()
            ]
            overall = _cells(self.overall(loss_scale, unscaled=True))
            lines.append(["all", *overall, _percent(self.lost_share(loss_scale))])
        return align(lines, to_the_left=[0])

    def output_table(self) -> str:
        """Return a table of the outputs of layers to print, a row for each layer."""
        return align([["output of", *_COLUMNS], *([name, *_cells(it)] for name, it in self.outputs.items())], [0])

    def save(self, file: str | Path) -> None:
        """Write :meth:`to_dict` to a JSON file, which appears whole or not at all.

        A loss that is not finite becomes the string "nan", "inf" or "-inf".

        Args:
            file (str): the file; one that is there is replaced.
        """
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as report:
            report.write(json_text(self.to_dict(), indent=2) + "\n")

    def _at(self, loss_scale: float, unscaled: bool = False) -> list[ScaleRanges]:
        if loss_scale not in self.loss_scales:
            listed = ", ".join(map(as_power_of_two, self.loss_scales))
            raise KeyError(f"'loss_scale' must be one of the sweep's, {listed}, but got {loss_scale}.")
        place = self.loss_scales.index(loss_scale)
        return [batch[place].unscaled() if unscaled else batch[place] for batch in self.batches]


_COLUMNS = ("largest", "smallest", "norm", "zeros", "underflowed", "inf/nan")


def _over_batches(statistics: list[ArrayStatistics]) -> ArrayStatistics:
    merged = merge_statistics(statistics)
    return replace(merged, norm=merged.norm / math.sqrt(len(statistics)))


def _cells(statistics: ArrayStatistics) -> list[str]:
    shares = [statistics.share(n) for n in (statistics.zeros, statistics.underflowed, statistics.infs_and_nans)]
    return [
        f"{statistics.largest:.2e}",
        "-" if statistics.smallest is None else f"{statistics.smallest:.2e}",
        f"{statistics.norm:.3g}",
        *map(_percent, shares),
    ]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.3%}"
