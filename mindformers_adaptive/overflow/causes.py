"""Finds what stands out in passes and weights: a layer where values or gradients grow, large weights, a low scale."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mindformers_adaptive.overflow.headroom import constants_and_masks
from mindformers_adaptive.overflow.origin import largest_weight
from mindformers_adaptive.overflow.passes import Call, Pass
from mindformers_adaptive.text.table import as_power_of_two, counted

# A layer or Parameter stands out if it is at least this many times as large as others of its kind, and above a size
# that others of its kind rarely have: a growth of 8 in a layer, or a weight of 8.
_FACTOR, _LEAST = 64.0, 8.0
# All matrices together are large if the median of their largest weights is at least this. New weights, and an embedding
# of normally distributed numbers, have about 5 and less.
_LARGE = 32.0
# If no loss scale above this one holds, the scale is unusually low. With a mean as the loss, 2^10 and more hold.
_LOW_SCALE = 2.0**7


@dataclass(frozen=True)
class Cause:
    """Something that stands out in a network, and could be the cause of its overflows.

    Attributes:
        kind (str): "growth", "weights" or "scale".
        text (str): what stands out, with its numbers.
        layer (str): the layer, or the Parameter for "weights"; "" for "scale" and where all weights are large.
        factor (float, optional): how many times larger it is than others of its kind. Default: None, not compared.
    """

    kind: str
    text: str
    layer: str = ""
    factor: float | None = None

    def __str__(self) -> str:
        return self.text


class _Growth(NamedTuple):
    """By which factor the largest value (forward) or gradient (backward) grows in a call of a cell."""

    call: Call
    factor: float
    at_least: bool


def growing_layers(passes: Sequence[Pass]) -> list[Cause]:
    """Return the layer in which values grow most and that in which gradients do, as far as the layers stand out.

    A layer is compared with the other layers of its class, or with all layers if no other has its class.

    Args:
        passes (Sequence[Pass]): one pass for each batch.
    """
    by_layer: dict[str, list[tuple[str, _Growth, float]]] = {}
    for seen in passes[:1]:
        for what, growths in (("values", _forward(seen)), ("gradients", _backward(seen))):
            if (largest := _outstanding(seen, growths)) is not None:
                by_layer.setdefault(largest[0].call.layer, []).append((what, *largest))
    return [_growth_cause(passes[0], layer, entries) for layer, entries in by_layer.items()]


def _growth_cause(seen: Pass, layer: str, entries: Sequence[tuple[str, _Growth, float]]) -> Cause:
    grown = [f"{what} {'at least ' if g.at_least else ''}{g.factor:.3g} times" for what, g, _ in entries]
    limits = [f"{other:.2g}" for _, _, other in entries]
    call = entries[0][1].call
    weight = largest_weight(seen, call)
    text = (
        f"{layer} ({call.kind}) makes {' and '.join(grown)} as large, comparable layers at most "
        f"{' and '.join(limits)} times"
    )
    if weight is not None:
        text += f". Its largest weight is {weight:.4g}"
    return Cause("growth", text, layer, max(growth.factor / other for _, growth, other in entries))


def _forward(seen: Pass) -> list[_Growth]:
    left_out = constants_and_masks(seen)
    growths = []
    for call in _layers(seen):
        inputs = [value.reading for value in call.inputs if not value.weight]
        if call.index in left_out or not inputs or not all(reading.finite for reading in inputs):
            continue
        # Values below 1 are raised on purpose, by a normalization or the logarithm of a softmax, so count them as 1.
        largest = max(1.0, *(reading.largest for reading in inputs))
        outputs = [reading.largest if reading.finite else reading.limit for reading in call.outputs]
        at_least = not all(reading.finite for reading in call.outputs)
        growths.append(_Growth(call, max(outputs, default=0.0) / largest, at_least))
    return growths


def _backward(seen: Pass) -> list[_Growth]:
    norms = [call for call in seen.calls if "Norm" in call.kind]
    normalizing = {index for norm in norms for index in (norm.index, *_around(seen, norm))}
    growths = []
    for call in _layers(seen):
        outputs = [gradient.reading for gradient in call.gradients if gradient.of_output]
        inputs = [
            gradient.reading
            for gradient in call.gradients
            if not gradient.of_output and not call.inputs[gradient.index].weight
        ]
        before = max((reading.largest for reading in outputs), default=0.0)
        # A value that overflowed in the forward pass makes the gradients inf, so their growth says nothing.
        values = [*call.outputs, *(value.reading for value in call.inputs)]
        if not before or not inputs or not all(reading.finite for reading in (*outputs, *values)):
            continue
        factor = max(reading.largest if reading.finite else reading.limit for reading in inputs) / before
        if call.index in normalizing:
            # A normalization, alone or in a block, raises small values to about 1, and the gradients by the same
            # factor.
            factor *= min(1.0, max((v.reading.largest for v in call.inputs if not v.weight), default=1.0))
        growths.append(_Growth(call, factor, not all(reading.finite for reading in inputs)))
    return growths


def _layers(seen: Pass) -> Iterable[Call]:
    return (call for call in seen.calls if not call.operator and call.parent is not None)


def _outstanding(seen: Pass, growths: Sequence[_Growth]) -> tuple[_Growth, float] | None:
    """Return the growth that stands out most, and the largest growth of comparable layers; None if none stands out."""
    standing = []
    for growth in growths:
        if growth.factor < _LEAST:
            continue
        around = _around(seen, growth.call)
        comparable = [
            other
            for other in growths
            if other.call.layer != growth.call.layer
            and other.call.index not in around
            and growth.call.index not in _around(seen, other.call)
        ]
        alike = [other for other in comparable if other.call.kind == growth.call.kind] or comparable
        # A layer without comparable layers must stand out from a layer that changes nothing.
        most = max((other.factor for other in alike), default=0.0) or 1.0
        # A normalization after a layer that grows makes values much smaller, so another one seems to make them larger.
        least = 1.0 if "Norm" in growth.call.kind else most
        if growth.factor >= _FACTOR * max(most, least):
            standing.append((growth, most))
    # A layer around the layer that grows stands out too. Name the inner one.
    inner = [pair for pair in standing if not any(pair[0].call.index in _around(seen, g.call) for g, _ in standing)]
    return max(inner, key=lambda pair: pair[0].factor / pair[1], default=None)


def _around(seen: Pass, call: Call) -> set[int]:
    """Return the indexes of the calls of cells around a call."""
    around = set()
    while call.parent is not None:
        around.add(call.parent)
        call = seen.calls[call.parent]
    return around


def large_weights(sizes: Mapping[str, tuple[int, float]]) -> list[Cause]:
    """Return the Parameter whose largest weight stands out, or say that all matrices are large.

    Matrices are compared with matrices, and vectors with vectors.

    Args:
        sizes (Mapping): for each Parameter, by name, its number of dimensions and its largest finite magnitude.

    Examples:
        >>> sizes = {"first": (2, 0.1), "second": (2, 0.2), "third": (2, 300.0), "bias": (1, 0.0)}
        >>> print(*large_weights(sizes))
        third has a weight of 300, where the median of the largest weights of 2 other Parameters is 0.15
    """
    causes = []
    for is_matrix in (True, False):
        kind = {name: size for name, (dims, size) in sizes.items() if (dims > 1) is is_matrix and size > 0}
        medians = {
            name: statistics.median([size for other, size in kind.items() if other != name] or [math.inf])
            for name in kind
        }
        beyond = [name for name, size in kind.items() if size >= _limit(medians[name])]
        if beyond:
            name = max(beyond, key=lambda each: kind[each])
            more = f" (and {len(beyond) - 1} more Parameters are as far above the others)" if len(beyond) > 1 else ""
            text = (
                f"{name} has a weight of {kind[name]:.4g}, where the median of the largest weights of "
                f"{counted(len(kind) - 1, 'other Parameter')} is {medians[name]:.2g}{more}"
            )
            causes.append(Cause("weights", text, name, kind[name] / medians[name]))
        elif is_matrix and kind and (size := statistics.median(kind.values())) >= _LARGE:
            text = (
                f"the weights are large: the median of the largest weights of {counted(len(kind), 'Parameter')} is "
                f"{size:.4g}, in most trainings it is below 8. Most often an update was too large: lower the learning "
                "rate, and go back to a checkpoint before it"
            )
            causes.append(Cause("weights", text))
    return causes


def _limit(median: float) -> float:
    """Return the size from which a weight stands out among weights of a median size."""
    # After an update that was too large, the other weights have grown too. A weight of 512 stands out then as well.
    return max(_LEAST, min(_FACTOR * median, max(_FACTOR * _LEAST, _LEAST * median)))


def low_scale(overflowing_scale: float | None) -> list[Cause]:
    """Return a cause if the backward pass overflows even at an unusually low loss scale.

    Args:
        overflowing_scale (float, optional): the lowest loss scale at which the backward pass overflows; None if none.
    """
    if overflowing_scale is None or overflowing_scale > 2 * _LOW_SCALE:
        return []
    text = (
        f"gradients overflow even at a loss scale of {as_power_of_two(overflowing_scale)}, which is unusually low: "
        "most trainings hold 2^10 and more. The gradients are large, or the loss is a sum instead of a mean"
    )
    return [Cause("scale", text)]
