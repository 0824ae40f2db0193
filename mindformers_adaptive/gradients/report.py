"""The result of a sweep over loss scales: statistics of the gradients by scale and Parameter, as tables and JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mindformers_adaptive.gradients.groups import group_parameters, parameter_group
from mindformers_adaptive.gradients.statistics import ArrayStatistics, merge_statistics
from mindformers_adaptive.rules.formats import FLOAT16, Format, find_format
from mindformers_adaptive.text.files import make_folder_of, write_json
from mindformers_adaptive.text.table import align, as_power_of_two

# The value of GradientRanges.measured if no checkpoint was loaded, so that the network has new weights.
NEW_WEIGHTS = "new weights"


@dataclass(frozen=True)
class ScaleRanges:
    """The gradients of one batch at one loss scale, as the backward pass returns them, multiplied by the loss scale.

    Attributes:
        loss_scale (float): the scale.
        loss (float): the loss, without the scale.
        parameters (dict[str, ArrayStatistics]): the statistics by Parameter name. Their reference is the highest scale
            of the batch without overflow, so ``underflowed`` and ``lost`` are None above it. The unit of ``lost``
            is the unit of the gradients that the optimizer takes.
        grad_scale_factor (float): what the train step divides the gradients by beside the loss scale: the number of
            tokens with MindFormers' ``calculate_per_token_loss``, else 1. For one of N micro-batches it is 1/N.
    """

    loss_scale: float
    loss: float
    parameters: Mapping[str, ArrayStatistics]
    grad_scale_factor: float = 1.0

    @property
    def overflow(self) -> bool:
        """Whether any gradient is inf or NaN, so that a training would skip the step."""
        return any(statistics.infs_and_nans for statistics in self.parameters.values())

    def unscaled(self) -> ScaleRanges:
        """Return the statistics, without histograms, of the unscaled gradients, which the optimizer takes."""
        divisor = self.loss_scale * self.grad_scale_factor
        return replace(self, parameters={name: each.divided_by(divisor) for name, each in self.parameters.items()})


@dataclass(frozen=True)
class GradientRanges:
    """The ranges of a network's gradients at several loss scales: the result of one sweep.

    Attributes:
        weights (dict[str, ArrayStatistics]): the weights, by Parameter name.
        batches (tuple[tuple[ScaleRanges, ...], ...]): for each batch the scales, in increasing order.
        outputs (dict[str, ArrayStatistics]): the outputs of the layers that were asked for, by their names, over all
            batches; they do not depend on the loss scale.
        gradient_format (Format): the format of the gradients in the backward pass. Default: float16.
        float16_weights (tuple[str, ...]): the names of the weights that are kept in float16. Default: none.
        measured (str): a description of the weights that were measured. Default: "", the weights that the network had.
        activation_gradients (tuple[tuple[ScaleRanges, ...], ...]): as ``batches``, the gradients of the outputs of
            these layers, by their names. Default: none.
        micro_batches (int): the number of micro-batches by which the loss was divided before the backward pass.
            Default: 1.

    Examples:
        >>> from mindformers_adaptive.gradients.statistics import array_statistics
        >>> at_1 = ScaleRanges(1.0, loss=0.5, parameters={"weight": array_statistics([0.0, 0.25])})
        >>> at_4 = ScaleRanges(4.0, loss=0.5, parameters={"weight": array_statistics([0.125, float("inf")])})
        >>> ranges = GradientRanges(weights={}, batches=((at_1, at_4),))
        >>> ranges.loss_scales, ranges.fitting_scales, ranges.overall(1.0).largest
        ((1.0, 4.0), (1.0,), 0.25)
    """

    weights: Mapping[str, ArrayStatistics]
    batches: tuple[tuple[ScaleRanges, ...], ...]
    outputs: Mapping[str, ArrayStatistics] = field(default_factory=dict)
    gradient_format: Format = FLOAT16
    float16_weights: tuple[str, ...] = ()
    measured: str = ""
    activation_gradients: tuple[tuple[ScaleRanges, ...], ...] = ()
    micro_batches: int = 1

    @property
    def loss_scales(self) -> tuple[float, ...]:
        """tuple[float, ...]: the scales of the sweep, in increasing order."""
        return tuple(ranges.loss_scale for ranges in self.batches[0])

    def parameters(self, loss_scale: float, unscaled: bool = False) -> dict[str, ArrayStatistics]:
        """Return the statistics of each Parameter's gradient at a loss scale, over all batches.

        Counts are added up, magnitudes are the extremes, and the norm is the root mean square over the batches.

        Args:
            loss_scale (float): one of ``loss_scales``.
            unscaled (bool): whether the gradients are divided as the train step does; then there is no histogram.
                Default: False, they are as the backward pass returns them.

        Returns:
            dict[str, ArrayStatistics], by Parameter name.

        Raises:
            ValueError: if the sweep does not have the scale.
        """
        at_scale = [ranges.unscaled() if unscaled else ranges for ranges in self._at(loss_scale)]
        names = dict.fromkeys(name for ranges in at_scale for name in ranges.parameters)
        merged = {
            name: merge_statistics(ranges.parameters[name] for ranges in at_scale if name in ranges.parameters)
            for name in names
        }
        return {name: replace(each, norm=each.norm / math.sqrt(len(at_scale))) for name, each in merged.items()}

    def overall(self, loss_scale: float, unscaled: bool = False) -> ArrayStatistics:
        """Return the statistics of all gradients together at a loss scale. Batches are merged as in :meth:`parameters`.

        Args:
            loss_scale (float): one of ``loss_scales``.
            unscaled (bool): as in :meth:`parameters`. Default: False.

        Returns:
            ArrayStatistics.

        Raises:
            ValueError: if the sweep does not have the scale.
        """
        return merge_statistics(self.parameters(loss_scale, unscaled).values())

    def groups(
        self, loss_scale: float, group: Callable[[str], str | None] = parameter_group
    ) -> dict[str, ArrayStatistics]:
        """Return the statistics of the gradients of each Parameter group at a loss scale, as :meth:`parameters` does.

        Args:
            loss_scale (float): one of ``loss_scales``.
            group (Callable): from a Parameter's name to its group or None, see :func:`group_parameters`. Default:
                :func:`parameter_group`.

        Returns:
            dict[str, ArrayStatistics], by group.

        Raises:
            ValueError: if the sweep does not have the scale.
        """
        counts = self.parameters(loss_scale)
        members = group_parameters({name: each.size for name, each in counts.items()}, group)
        return {kind: merge_statistics(counts[name] for name in names) for kind, names in members.items()}

    def overflowed_batches(self, loss_scale: float) -> int:
        """Return in how many batches the gradients overflowed at a loss scale.

        Args:
            loss_scale (float): one of ``loss_scales``.

        Returns:
            int.

        Raises:
            ValueError: if the sweep does not have the scale.
        """
        return sum(ranges.overflow for ranges in self._at(loss_scale))

    @property
    def fitting_scales(self) -> tuple[float, ...]:
        """tuple[float, ...]: the scales of the sweep at which no batch overflowed, in increasing order."""
        return tuple(scale for scale in self.loss_scales if not self.overflowed_batches(scale))

    def to_dict(self) -> dict[str, object]:
        """Return the results of the sweep as dicts, lists and numbers.

        Returns:
            dict[str, object], with ``gradient_format``, ``weights``, ``loss_scales``, ``batches``, ``outputs`` and
            ``activation_gradients``; with ``micro_batches`` where there are several, and ``measured`` where known.
        """
        return {
            **({"measured": self.measured} if self.measured else {}),
            **({"micro_batches": self.micro_batches} if self.micro_batches > 1 else {}),
            "gradient_format": self.gradient_format.to_config(),
            "weights": {
                "overall": merge_statistics(self.weights.values()).to_dict(),
                "parameters": {name: each.to_dict() for name, each in self.weights.items()},
            },
            "loss_scales": self._scales_to_dicts("parameters"),
            "batches": [
                {
                    "reference_loss_scale": max(
                        (ranges.loss_scale for ranges in batch if not ranges.overflow), default=None
                    ),
                    "grad_scale_factor": batch[0].grad_scale_factor,
                    "loss_scales": [
                        {"loss_scale": ranges.loss_scale, "loss": ranges.loss, "overflow": ranges.overflow}
                        for ranges in batch
                    ],
                }
                for batch in self.batches
            ],
            "outputs": {name: statistics.to_dict() for name, statistics in self.outputs.items()},
            "activation_gradients": replace(self, batches=self.activation_gradients)._scales_to_dicts("layers"),
        }

    def _scales_to_dicts(self, key: str) -> list[dict[str, object]]:
        return [
            {
                "loss_scale": scale,
                "overflowed_batches": self.overflowed_batches(scale),
                "overall": _with_lost_share(self.overall(scale)),
                key: {name: _with_lost_share(each) for name, each in self.parameters(scale).items()},
            }
            for scale in (self.loss_scales if self.batches else ())
        ]

    @classmethod
    def from_dict(cls, sweep: Mapping[str, Any]) -> GradientRanges:
        """Return the results of a sweep from the dict that :meth:`to_dict` returned, or that its JSON file holds.

        Args:
            sweep (Mapping): the dict; only its key ``loss_scales`` is required.

        Returns:
            GradientRanges, with the batches as one. The loss is nan, and what is lost is not known.

        Raises:
            TypeError: if it is something else.

        Examples:
            >>> found = GradientRanges({}, ((ScaleRanges(8.0, 1.0, {"w": ArrayStatistics(2, 1)}),),))
            >>> GradientRanges.from_dict(found.to_dict()).overall(8.0).zeros
            1
        """
        try:
            at_scales = _read_scales(sweep["loss_scales"], "parameters")
            if not at_scales:
                raise ValueError("no loss scale")
            weights = sweep.get("weights", {"parameters": {}})["parameters"]
            gradient_format = find_format(sweep.get("gradient_format", FLOAT16))
            of_outputs = _read_scales(sweep.get("activation_gradients", []), "layers")
            read = cls(_read(weights), (at_scales,), _read(sweep.get("outputs", {})), gradient_format)
            return replace(read, activation_gradients=(of_outputs,) if of_outputs else ())
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise TypeError(
                "'sweep' must be what GradientRanges.to_dict() returns, with at least 1 loss scale, but got "
                f"{str(sweep)[:80]!r} of type {type(sweep).__name__} ({type(error).__name__}: {error}). Load the JSON "
                "file of a sweep, or take one line of a record of gradients."
            ) from error

    def table(self, loss_scale: float | None = None) -> str:
        """Return a table of the sweep's statistics to print, by loss scale or by Parameter.

        Args:
            loss_scale (float, optional): a row for each Parameter at this scale. Default: None, a row for each scale.

        Returns:
            str; its largest, smallest and norm are those that the optimizer takes, unscaled, and the last column is
            :attr:`mindformers_adaptive.gradients.statistics.ArrayStatistics.lost_share`.

        Raises:
            ValueError: if the sweep does not have the scale.
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
        """Return a table to print, with the statistics of each layer's outputs.

        Returns:
            str, with a row for each layer.
        """
        lines = [["output of", *_COLUMNS], *([name, *_cells(each)] for name, each in self.outputs.items())]
        return align([line[:-1] for line in lines], to_the_left=[0])

    def save(self, file: str | Path) -> None:
        """Write the dict of :meth:`to_dict` to a JSON file. An interrupted write leaves no incomplete file.

        A loss that is not finite becomes the string "nan", "inf" or "-inf".

        Args:
            file (Union[str, Path]): the file; an existing file is replaced.

        Raises:
            OSError: if the file cannot be written.
        """
        make_folder_of(file)
        write_json(file, self.to_dict())

    def _at(self, loss_scale: float) -> list[ScaleRanges]:
        if loss_scale not in self.loss_scales:
            listed = ", ".join(map(as_power_of_two, self.loss_scales))
            raise ValueError(f"'loss_scale' must be one of the sweep's loss scales, {listed}, but got {loss_scale}.")
        index = self.loss_scales.index(loss_scale)
        return [batch[index] for batch in self.batches]


def loss_division(micro_batches: int) -> str:
    """Return a phrase that says by how many micro-batches a measured loss was divided; "" for a single micro-batch.

    Examples:
        >>> loss_division(4)
        'as one of 4 micro-batches, with its loss divided by 4 before the backward pass'
    """
    if micro_batches == 1:
        return ""
    return f"as one of {micro_batches} micro-batches, with its loss divided by {micro_batches} before the backward pass"


def _with_lost_share(statistics: ArrayStatistics) -> dict[str, object]:
    return {**statistics.to_dict(), "lost_share": statistics.lost_share}


def _read(statistics: Mapping[str, Mapping[str, Any]]) -> dict[str, ArrayStatistics]:
    return {name: ArrayStatistics.from_dict(each) for name, each in statistics.items()}


def _read_scales(at_scales: Iterable[Mapping[str, Any]], key: str) -> tuple[ScaleRanges, ...]:
    read = [ScaleRanges(float(ranges["loss_scale"]), math.nan, _read(ranges[key])) for ranges in at_scales]
    return tuple(sorted(read, key=lambda ranges: ranges.loss_scale))


_COLUMNS = ("largest", "smallest", "norm", "zeros", "underflowed", "inf/nan", "lost")


def _cells(statistics: ArrayStatistics) -> list[str]:
    smallest = "-" if statistics.smallest is None else f"{statistics.smallest:.2e}"
    counts = (statistics.zeros, statistics.underflowed, statistics.infs_and_nans)
    shares = [*map(statistics.share, counts), statistics.lost_share]
    percents = ["-" if share is None else f"{share:.3%}" for share in shares]
    if statistics.size and statistics.infs_and_nans == statistics.size:
        # All values are inf or NaN, so there is no largest finite value.
        return ["-", smallest, "-", *percents]
    return [f"{statistics.largest:.2e}", smallest, f"{statistics.norm:.3g}", *percents]
