"""The result of a sweep over loss scales: statistics by scale, Parameter and group, as tables and JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mindformers_adaptive.gradients.statistics import ArrayStatistics, merge_statistics
from mindformers_adaptive.text.atomic_file import atomic_write
from mindformers_adaptive.text.json_text import json_text
from mindformers_adaptive.text.table import align, as_power_of_two

__all__ = ["MOST_GROUPS", "GradientRanges", "ScaleRanges", "group_parameters", "parameter_group"]

# More rows of histograms are too many to compare.
MOST_GROUPS = 6
_OTHERS = "others"
_ORDER = ("embedding", "attention", "feed forward", "norm", "output")

# The first pattern that matches counts. A norm may be named after the layer behind it, as in attention_norm, so norm
# comes first; the last layer of a block may be called output, so output comes last.
_KINDS = (
    ("norm", r"norm|(^|[._])(ln|bn)\d*([._]|$)|\.(gamma|beta)$"),
    ("embedding", r"embed|(^|\.)w[tp]e(\.|$)"),
    ("attention", r"attention|attn"),
    ("feed forward", r"feed_?forward|ffn|mlp|expert|intermediate|(layers?|blocks?|h)\.\d+\.output"),
    ("output", r"(^|[._])(head|classifier|pooler|output(_layer)?)(\.|$)"),
)


def parameter_group(name: str) -> str | None:
    """Return the group of a Parameter, or None if its name matches no group.

    The lower-case name is searched in this order: norm (``norm``, ``ln_1``, ``bn2``, ``.gamma``),
    embedding (``embed``, ``wte``, ``wpe``), attention (``attention``, ``attn``), feed forward (``feed_forward``,
    ``ffn``, ``mlp``, ``expert``), output (``head``, ``output_layer``).

    Args:
        name (str): the Parameter's name.

    Examples:
        >>> parameter_group("model.layers.0.attention.wq.weight")
        'attention'
        >>> parameter_group("model.layers.0.attention_norm.weight")
        'norm'
        >>> parameter_group("conv1.weight") is None
        True
    """
    return next((kind for kind, pattern in _KINDS if re.search(pattern, name.lower())), None)


def group_parameters(
    sizes: Mapping[str, int], group: Callable[[str], str | None] = parameter_group
) -> dict[str, list[str]]:
    """Return the Parameters of each group.

    Parameters without a group are grouped by the first component of their names that is not common to all of them. Of
    more than six groups, the five with the most elements stay and the rest are ``"others"``.

    Args:
        sizes (Mapping[str, int]): by Parameter name, how many elements it has.
        group (Callable): from a name to its group or None. Default: :func:`parameter_group`.

    Returns:
        dict[str, list[str]]: by group the names of its Parameters; first the groups that :func:`parameter_group`
        knows, from embedding to output.

    Examples:
        >>> group_parameters({"net.conv1.weight": 9, "net.conv1.bias": 1, "net.norm.gamma": 2})
        {'norm': ['net.norm.gamma'], 'conv1': ['net.conv1.weight', 'net.conv1.bias']}
    """
    kinds = {name: group(name) for name in sizes}
    shared = _shared_components([name for name, kind in kinds.items() if kind is None])
    groups: dict[str, list[str]] = {kind: [] for kind in _ORDER}
    for name, kind in kinds.items():
        groups.setdefault(kind or name.split(".")[shared], []).append(name)
    groups = {kind: members for kind, members in groups.items() if members}
    if len(groups) <= MOST_GROUPS:
        return groups
    largest = sorted(groups, key=lambda kind: -sum(sizes[name] for name in groups[kind]))[: MOST_GROUPS - 1]
    kept = {kind: names for kind, names in groups.items() if kind in largest}
    rest = [name for kind, names in groups.items() if kind not in largest for name in names]
    return {**kept, _OTHERS: [*kept.pop(_OTHERS, []), *rest]}


def _shared_components(names: list[str]) -> int:
    """Return how many leading components all names share; each name keeps at least one more before its last."""
    split = [name.split(".")[:-1] for name in names]
    same = [len(set(components)) == 1 for components in zip(*split, strict=False)]
    return same.index(False) if False in same else max(len(same) - 1, 0)


@dataclass(frozen=True)
class ScaleRanges:
    """The gradients of one batch at one loss scale, as the backward pass returns them: multiplied by the scale.

    Attributes:
        loss_scale (float): the scale.
        loss (float): the loss, without the scale.
        parameters (dict[str, ArrayStatistics]): by Parameter name; the reference is the highest scale of the batch that
            did not overflow, so that ``underflowed`` and ``lost`` are None at the scales above it. The unit of ``lost``
            is that of the gradients as the optimizer takes them.
        grad_scale_factor (float): what the train step divides the gradients by beside the loss scale: the number of
            tokens with MindFormers' ``calculate_per_token_loss``, else 1.
    """

    loss_scale: float
    loss: float
    parameters: Mapping[str, ArrayStatistics]
    grad_scale_factor: float = 1.0

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

    def parameters(self, loss_scale: float, unscaled: bool = False) -> dict[str, ArrayStatistics]:
        """Return the statistics of each Parameter's gradient at a scale, over all batches.

        Counts are added up, magnitudes are the extremes, and the norm is the root mean square over the batches.

        Args:
            loss_scale (float): one of ``loss_scales``.
            unscaled (bool): whether the gradients are divided as the train step does; then there is no histogram.
                Default: False, they are as the backward pass returns them.

        Raises:
            ValueError: if the sweep does not have the scale.
        """
        at_scale = [one.unscaled() if unscaled else one for one in self._at(loss_scale)]
        merged = {name: merge_statistics(one.parameters[name] for one in at_scale) for name in at_scale[0].parameters}
        return {name: replace(each, norm=each.norm / math.sqrt(len(at_scale))) for name, each in merged.items()}

    def overall(self, loss_scale: float, unscaled: bool = False) -> ArrayStatistics:
        """Return the statistics of all gradients together at a scale, over all batches, as :meth:`parameters` does."""
        return merge_statistics(self.parameters(loss_scale, unscaled).values())

    def groups(
        self, loss_scale: float, group: Callable[[str], str | None] = parameter_group
    ) -> dict[str, ArrayStatistics]:
        """Return the statistics of each group of Parameters at a scale, over all batches, as :meth:`parameters` does.

        Args:
            loss_scale (float): one of ``loss_scales``.
            group (Callable): from a Parameter's name to its group or None, see :func:`group_parameters`.
        """
        counts = self.parameters(loss_scale)
        members = group_parameters({name: each.size for name, each in counts.items()}, group)
        return {kind: merge_statistics(counts[name] for name in names) for kind, names in members.items()}

    def overflowed_batches(self, loss_scale: float) -> int:
        """Return how many batches overflowed at a scale, one of ``loss_scales``."""
        return sum(ranges.overflow for ranges in self._at(loss_scale))

    @property
    def fitting_scales(self) -> tuple[float, ...]:
        """The scales of the sweep at which no batch overflowed, in increasing order."""
        return tuple(scale for scale in self.loss_scales if not self.overflowed_batches(scale))

    def to_dict(self) -> dict[str, object]:
        """Return everything as dicts, lists and numbers."""
        return {
            "weights": {
                "overall": merge_statistics(self.weights.values()).to_dict(),
                "parameters": {name: each.to_dict() for name, each in self.weights.items()},
            },
            "loss_scales": [
                {
                    "loss_scale": scale,
                    "overflowed_batches": self.overflowed_batches(scale),
                    "overall": _with_lost_share(self.overall(scale)),
                    "parameters": {name: _with_lost_share(each) for name, each in self.parameters(scale).items()},
                }
                for scale in self.loss_scales
            ],
            "batches": [
                {
                    "reference_loss_scale": max((one.loss_scale for one in batch if not one.overflow), default=None),
                    "grad_scale_factor": batch[0].grad_scale_factor,
                    "loss_scales": [
                        {"loss_scale": one.loss_scale, "loss": one.loss, "overflow": one.overflow} for one in batch
                    ],
                }
                for batch in self.batches
            ],
            "outputs": {name: statistics.to_dict() for name, statistics in self.outputs.items()},
        }

    @classmethod
    def from_dict(cls, sweep: Mapping[str, Any]) -> GradientRanges:
        """Return the sweep that :meth:`to_dict` returned, or its JSON file holds, with its batches as one.

        The loss is nan, and what is lost is not known.

        Args:
            sweep (Mapping): only ``loss_scales`` must be there.

        Raises:
            TypeError: if it is something else.

        Examples:
            >>> found = GradientRanges({}, ((ScaleRanges(8.0, 1.0, {"w": ArrayStatistics(2, 1)}),),))
            >>> GradientRanges.from_dict(found.to_dict()).overall(8.0).zeros
            1
        """
        try:
            at_scales = [
                ScaleRanges(float(one["loss_scale"]), math.nan, _read(one["parameters"]))
                for one in sweep["loss_scales"]
            ]
            if not at_scales:
                raise ValueError("no loss scale")
            at_scales.sort(key=lambda one: one.loss_scale)
            weights = sweep.get("weights", {"parameters": {}})["parameters"]
            return cls(_read(weights), (tuple(at_scales),), _read(sweep.get("outputs", {})))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise TypeError(
                "'sweep' must be what GradientRanges.to_dict() returns, with at least 1 loss scale, but got "
                f"{str(sweep)[:80]!r} of type {type(sweep).__name__} ({type(error).__name__}: {error}). Load the JSON "
                "file of a sweep, or take one line of a record of gradients."
            ) from error

    def table(self, loss_scale: float | None = None) -> str:
        """Return a table to print; its largest, smallest and norm are those that the optimizer takes, unscaled.

        The last column is :attr:`mindformers_adaptive.gradients.statistics.ArrayStatistics.lost_share`.

        Args:
            loss_scale (float, optional): a row for each Parameter at this scale. Default: None, a row for each scale.
        """
        if loss_scale is None:
            lines = [["loss scale", "overflowed", *_COLUMNS]]
            for scale in self.loss_scales:
                overflowed = f"{self.overflowed_batches(scale)}/{len(self.batches)}"
                lines.append([as_power_of_two(scale), overflowed, *_cells(self.overall(scale, unscaled=True))])
        else:
            rows = {**self.parameters(loss_scale, unscaled=True), "all": self.overall(loss_scale, unscaled=True)}
            lines = [[f"at {as_power_of_two(loss_scale)}", *_COLUMNS], *([name, *_cells(rows[name])] for name in rows)]
        return align(lines, to_the_left=[0])

    def output_table(self) -> str:
        """Return a table of the outputs of layers to print, a row for each layer."""
        lines = [["output of", *_COLUMNS], *([name, *_cells(each)] for name, each in self.outputs.items())]
        return align([line[:-1] for line in lines], to_the_left=[0])

    def save(self, file: str | Path) -> None:
        """Write :meth:`to_dict` to a JSON file, which appears whole or not at all.

        A loss that is not finite becomes the string "nan", "inf" or "-inf".

        Args:
            file (str): the file; one that is there is replaced.
        """
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as report:
            report.write(json_text(self.to_dict(), indent=2) + "\n")

    def _at(self, loss_scale: float) -> list[ScaleRanges]:
        if loss_scale not in self.loss_scales:
            listed = ", ".join(map(as_power_of_two, self.loss_scales))
            raise ValueError(f"'loss_scale' must be one of the sweep's, {listed}, but got {loss_scale}.")
        place = self.loss_scales.index(loss_scale)
        return [batch[place] for batch in self.batches]


def _with_lost_share(statistics: ArrayStatistics) -> dict[str, object]:
    return {**statistics.to_dict(), "lost_share": statistics.lost_share}


def _read(statistics: Mapping[str, Mapping[str, Any]]) -> dict[str, ArrayStatistics]:
    return {name: ArrayStatistics.from_dict(each) for name, each in statistics.items()}


_COLUMNS = ("largest", "smallest", "norm", "zeros", "underflowed", "inf/nan", "lost")


def _cells(statistics: ArrayStatistics) -> list[str]:
    smallest = "-" if statistics.smallest is None else f"{statistics.smallest:.2e}"
    counts = (statistics.zeros, statistics.underflowed, statistics.infs_and_nans)
    shares = [*map(statistics.share, counts), statistics.lost_share]
    percents = ["-" if share is None else f"{share:.3%}" for share in shares]
    return [f"{statistics.largest:.2e}", smallest, f"{statistics.norm:.3g}", *percents]
