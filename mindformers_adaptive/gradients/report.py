"""The result of a sweep over loss scales: statistics by scale, Parameter and group, as tables and JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mindformers_adaptive.gradients.groups import group_parameters, parameter_group
from mindformers_adaptive.gradients.signed import SignedHistogram, merge_signed, read_signed, signed_histogram
from mindformers_adaptive.rules.formats import FLOAT16, Format, find_format
from mindformers_adaptive.text.files import atomic_write, json_text
from mindformers_adaptive.text.table import align, as_power_of_two

__all__ = ["ArrayStatistics", "GradientRanges", "ScaleRanges", "array_statistics", "merge_statistics"]


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
        """Whether any gradient is inf or NaN. Such a step is skipped."""
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
        gradient_format (Format): the format of the gradients in the backward pass. Default: float16.
        float16_weights (tuple[str, ...]): the names of the weights that are kept in float16. Default: none.
        measured (str): which weights these are, in words. Default: "", those that the network had.
        activation_gradients (tuple[tuple[ScaleRanges, ...], ...]): as ``batches``, the gradients of the outputs of
            these layers, by their names. Default: none.

    Examples:
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

    @property
    def loss_scales(self) -> tuple[float, ...]:
        """tuple[float, ...]: the scales of the sweep, in increasing order."""
        return tuple(ranges.loss_scale for ranges in self.batches[0])

    def parameters(self, loss_scale: float, unscaled: bool = False) -> dict[str, ArrayStatistics]:
        """Return the statistics of each Parameter's gradient at a scale, over all batches.

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
        at_scale = [one.unscaled() if unscaled else one for one in self._at(loss_scale)]
        names = dict.fromkeys(name for one in at_scale for name in one.parameters)
        merged = {
            name: merge_statistics(one.parameters[name] for one in at_scale if name in one.parameters) for name in names
        }
        return {name: replace(each, norm=each.norm / math.sqrt(len(at_scale))) for name, each in merged.items()}

    def overall(self, loss_scale: float, unscaled: bool = False) -> ArrayStatistics:
        """Return the statistics of all gradients together at a scale, over all batches, as :meth:`parameters` does.

        Args:
            loss_scale (float): one of ``loss_scales``.
            unscaled (bool): as there. Default: False.

        Returns:
            ArrayStatistics.

        Raises:
            ValueError: if the sweep does not have the scale.
        """
        return merge_statistics(self.parameters(loss_scale, unscaled).values())

    def groups(
        self, loss_scale: float, group: Callable[[str], str | None] = parameter_group
    ) -> dict[str, ArrayStatistics]:
        """Return the statistics of each group of Parameters at a scale, over all batches, as :meth:`parameters` does.

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
        """Return how many batches overflowed at a scale.

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
        """Return everything as dicts, lists and numbers.

        Returns:
            dict[str, object], with ``gradient_format``, ``weights``, ``loss_scales``, ``batches``, ``outputs`` and
            ``activation_gradients``, and with ``measured`` where it is known.
        """
        return {
            **({"measured": self.measured} if self.measured else {}),
            "gradient_format": self.gradient_format.to_config(),
            "weights": {
                "overall": merge_statistics(self.weights.values()).to_dict(),
                "parameters": {name: each.to_dict() for name, each in self.weights.items()},
            },
            "loss_scales": self._scales_to_dicts("parameters"),
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
        """Return the sweep that :meth:`to_dict` returned, or its JSON file holds.

        Args:
            sweep (Mapping): only ``loss_scales`` must be there.

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
        """Return a table to print.

        Args:
            loss_scale (float, optional): a row for each Parameter at this scale. Default: None, a row for each scale.

        Returns:
            str; its largest, smallest and norm are those that the optimizer takes, unscaled, and the last column is
            :attr:`mindformers_adaptive.gradients.report.ArrayStatistics.lost_share`.

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
        """Return a table of the outputs of layers to print.

        Returns:
            str, with a row for each layer.
        """
        lines = [["output of", *_COLUMNS], *([name, *_cells(each)] for name, each in self.outputs.items())]
        return align([line[:-1] for line in lines], to_the_left=[0])

    def save(self, file: str | Path) -> None:
        """Write :meth:`to_dict` to a JSON file, which appears whole or not at all.

        A loss that is not finite becomes the string "nan", "inf" or "-inf".

        Args:
            file (Union[str, Path]): the file; one that is there is replaced.

        Raises:
            OSError: if the file cannot be written.
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


def _read_scales(at_scales: Iterable[Mapping[str, Any]], key: str) -> tuple[ScaleRanges, ...]:
    read = [ScaleRanges(float(one["loss_scale"]), math.nan, _read(one[key])) for one in at_scales]
    return tuple(sorted(read, key=lambda one: one.loss_scale))


_COLUMNS = ("largest", "smallest", "norm", "zeros", "underflowed", "inf/nan", "lost")


def _cells(statistics: ArrayStatistics) -> list[str]:
    smallest = "-" if statistics.smallest is None else f"{statistics.smallest:.2e}"
    counts = (statistics.zeros, statistics.underflowed, statistics.infs_and_nans)
    shares = [*map(statistics.share, counts), statistics.lost_share]
    percents = ["-" if share is None else f"{share:.3%}" for share in shares]
    if statistics.size and statistics.infs_and_nans == statistics.size:
        # There is no number to be the largest.
        return ["-", smallest, "-", *percents]
    return [f"{statistics.largest:.2e}", smallest, f"{statistics.norm:.3g}", *percents]


_Floats = NDArray[np.float64]

# An array is read in pieces of this many elements, so that the float64 copies stay small.
_PIECE = 2**20

# Of the smallest subnormal of float64.
_LOWEST_EXPONENT = -1074


@dataclass(frozen=True)
class ArrayStatistics:
    """The magnitudes of one array, or of several together.

    Attributes:
        size (int): number of elements.
        zeros (int): how many of them are exactly 0.
        infs_and_nans (int): how many of them are inf or NaN; the attributes below ignore these.
        largest (float): the largest magnitude; 0.0 if there is none.
        smallest (float, optional): the smallest magnitude above 0; None if there is none.
        norm (float): the square root of the sum of the squares, in float64.
        histogram (dict[int, int]): how many magnitudes lie in [2^e, 2^(e+1)), by exponent e; in increasing order,
            without empty ones. Those of FP16 lie between e = -24 and e = 15.
        underflowed (int, optional): how many elements are 0 here and not 0 in the reference; None without a reference.
        lost (float, optional): the norm of the difference to the reference; None without a reference, and for an array
            that is not finite.
        reference_norm (float): the norm of the reference, in the unit of ``lost``.
        signed (SignedHistogram, optional): of the values with their signs; None where it was not measured, or none is
            finite.
    """

    size: int
    zeros: int = 0
    infs_and_nans: int = 0
    largest: float = 0.0
    smallest: float | None = None
    norm: float = 0.0
    histogram: dict[int, int] = field(default_factory=dict)
    underflowed: int | None = None
    lost: float | None = None
    reference_norm: float = 0.0
    signed: SignedHistogram | None = None

    @property
    def lost_share(self) -> float | None:
        """The norm of what underflow and the coarseness of subnormal numbers lost, as a share of the norm.

        0 is nothing, 1 is everything, and what is rounded wrongly in several layers can be more than there is; None
        where it is not known, or where all of the reference is 0.
        """
        return self.lost / self.reference_norm if self.lost is not None and self.reference_norm > 0 else None

    def subnormal_share(self, gradient_format: Format = FLOAT16) -> float:
        """Return the share of elements below the smallest normal number of a format, without those that are 0."""
        _, normal, _ = gradient_format.exponents
        return self.share(sum(number for exponent, number in self.histogram.items() if exponent < normal)) or 0.0

    def share(self, count: int | None) -> float | None:
        """Return a count as a share of all elements, between 0 and 1; None for None, and 0.0 for an empty array."""
        if count is None:
            return None
        return count / self.size if self.size else 0.0

    def divided_by(self, divisor: float) -> ArrayStatistics:
        """Return the statistics of the array divided by a positive number, without the histogram of magnitudes."""
        smallest = None if self.smallest is None else self.smallest / divisor
        divided = replace(self, largest=self.largest / divisor, smallest=smallest, norm=self.norm / divisor)
        signed = None if self.signed is None else self.signed.divided_by(divisor)
        return replace(divided, histogram={}, signed=signed)

    def to_dict(self) -> dict[str, object]:
        """Return all but what is lost, as JSON can hold it, and the counts as shares too."""
        plain = {name: value for name, value in vars(self).items() if name not in ("lost", "reference_norm")}
        counts = {"zeros": self.zeros, "underflowed": self.underflowed, "infs_and_nans": self.infs_and_nans}
        return {
            **plain,
            **{f"{name}_share": self.share(count) for name, count in counts.items()},
            "histogram": {str(exponent): count for exponent, count in self.histogram.items()},
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> ArrayStatistics:
        """Return the statistics that :meth:`to_dict` returned, or that a JSON file holds.

        Raises:
            KeyError: if there is no histogram.
            TypeError: if there is no size.
        """
        known = {one.name: content[one.name] for one in fields(cls) if one.name in content}
        known["signed"] = read_signed(content.get("signed"))
        return cls(**{**known, "histogram": {int(exponent): n for exponent, n in content["histogram"].items()}})


def array_statistics(
    array: ArrayLike, reference: ArrayLike | None = None, ratio: float = 1.0, unit: float = 1.0
) -> ArrayStatistics:
    """Return the statistics of an array.

    Args:
        array (ArrayLike): of any shape and any real dtype.
        reference (ArrayLike, optional): finite, of the same shape, to count what underflowed and to measure what is
            lost. Default: None, these are not known.
        ratio (float): what the array would be as a multiple of the reference if nothing were lost. Default: 1.
        unit (float): what ``lost`` and ``reference_norm`` are divided by. Default: 1.

    Examples:
        >>> statistics = array_statistics([0.0, -0.25, 3.0, float("inf")])
        >>> statistics.largest, statistics.smallest, statistics.zeros, statistics.infs_and_nans, statistics.histogram
        (3.0, 0.25, 1, 1, {-2: 1, 1: 1})
        >>> statistics = array_statistics([0.0, 1.0], reference=[6.0, 2.0], ratio=0.5)
        >>> statistics.underflowed, statistics.lost
        (1, 3.0)
    """
    flat, expected = np.asarray(array).reshape(-1), None if reference is None else np.asarray(reference).reshape(-1)
    pieces = []
    for start in range(0, max(flat.size, 1), _PIECE):
        piece = slice(start, start + _PIECE)
        at_best = None if expected is None else ratio * expected[piece].astype(np.float64)
        pieces.append(_piece_statistics(flat[piece].astype(np.float64), at_best, unit))
    return merge_statistics(pieces)


def merge_statistics(statistics: Iterable[ArrayStatistics]) -> ArrayStatistics:
    """Return the statistics of several arrays as if they were one.

    Args:
        statistics (Iterable[ArrayStatistics]): one for each array; where ``underflowed`` or ``lost`` is None in any of
            them, it is None.

    Examples:
        >>> together = merge_statistics([array_statistics([3.0, 0.0]), array_statistics([4.0])])
        >>> together.norm, together.size, together.histogram
        (5.0, 3, {1: 1, 2: 1})
    """
    parts = list(statistics)
    histogram: Counter[int] = Counter()
    for part in parts:
        histogram.update(part.histogram)
    underflows = [part.underflowed for part in parts if part.underflowed is not None]
    lost = [part.lost for part in parts if part.lost is not None]
    return ArrayStatistics(
        size=sum(part.size for part in parts),
        zeros=sum(part.zeros for part in parts),
        infs_and_nans=sum(part.infs_and_nans for part in parts),
        largest=max((part.largest for part in parts), default=0.0),
        smallest=min((part.smallest for part in parts if part.smallest is not None), default=None),
        norm=math.hypot(*(part.norm for part in parts)),
        histogram=dict(sorted(histogram.items())),
        underflowed=sum(underflows) if len(underflows) == len(parts) else None,
        lost=math.hypot(*lost) if len(lost) == len(parts) else None,
        reference_norm=math.hypot(*(part.reference_norm for part in parts)),
        signed=merge_signed(part.signed for part in parts),
    )


def _piece_statistics(piece: _Floats, expected: _Floats | None, unit: float) -> ArrayStatistics:
    # float64 holds the squares and every subnormal of float32.
    magnitudes = np.abs(piece)
    finite = magnitudes[np.isfinite(magnitudes)]
    nonzero = finite[finite > 0]
    # The mantissa of frexp lies in [0.5, 1), so its exponents are one higher.
    counts = np.bincount(np.frexp(nonzero)[1] - _LOWEST_EXPONENT - 1)
    is_finite = finite.size == piece.size
    return ArrayStatistics(
        size=piece.size,
        zeros=finite.size - nonzero.size,
        infs_and_nans=piece.size - finite.size,
        largest=float(nonzero.max(initial=0.0)),
        smallest=float(nonzero.min()) if nonzero.size else None,
        norm=float(np.sqrt(np.sum(np.square(nonzero)))),
        histogram={int(place) + _LOWEST_EXPONENT: int(counts[place]) for place in np.flatnonzero(counts)},
        underflowed=None if expected is None else int(np.count_nonzero((piece == 0) & (expected != 0))),
        lost=float(np.linalg.norm(piece - expected)) / unit if is_finite and expected is not None else None,
        reference_norm=0.0 if expected is None else float(np.linalg.norm(expected)) / unit,
        signed=signed_histogram(piece),
    )
