"""Measures how many bits each layer is away from overflow."""

from collections.abc import Sequence
from dataclasses import dataclass

from mindformers_adaptive.gradients.reading import Reading
from mindformers_adaptive.overflow.masks import Masks
from mindformers_adaptive.overflow.passes import CASTS, Pass

# Prefixes of the names of operators that add or subtract.
_ADDS = ("Add", "Sub", "Radd", "Rsub")


@dataclass(frozen=True)
class LayerRange:
    """The largest values and gradients of a layer, over several passes at one loss scale.

    Attributes:
        layer (str): the name of the layer; "" is the whole network.
        layer_class (str): the class of the layer.
        forward (Reading, optional): the reading with the least headroom among the values that the layer computes; None
            if no floating-point value was seen.
        backward (Reading, optional): the reading with the least headroom among the gradients of the layer's values.
    """

    layer: str
    layer_class: str
    forward: Reading | None = None
    backward: Reading | None = None


def layer_ranges(passes: Sequence[Pass]) -> tuple[LayerRange, ...]:
    """Return the largest values of each layer over passes at one loss scale, in the order of execution.

    Values that depend on no weight and no input, such as a mask, are left out.

    Args:
        passes (Sequence[Pass]): one pass for each batch.
    """
    classes: dict[str, str] = {}
    forward: dict[str, list[Reading]] = {}
    backward: dict[str, list[Reading]] = {}
    for seen in passes:
        left_out = constants_and_masks(seen)
        for call in seen.calls:
            if not call.operator:
                classes.setdefault(call.layer, call.kind)
            if call.index not in left_out:
                forward.setdefault(call.layer, []).extend(call.outputs)
            backward.setdefault(call.layer, []).extend(gradient.reading for gradient in call.gradients)
    return tuple(
        LayerRange(name, kind, _closest(forward.get(name, [])), _closest(backward.get(name, [])))
        for name, kind in classes.items()
    )


def constants_and_masks(seen: Pass) -> set[int]:
    """Return the indexes of the calls whose outputs say nothing about how close a layer is to overflow.

    These outputs depend on no weight and no input, or they are large only because of an added constant such as a mask.
    """
    constant: set[int] = set()
    masked = set(Masks(seen).calls)
    for call in seen.calls:
        constants = [
            value.reading
            for index, value in enumerate(call.inputs)
            if not value.weight and not call.gets_gradient(index) and (value.source is None or value.source in constant)
        ]
        # In graph mode every value appears to get a gradient, so gradients cannot tell constants from other values.
        # Treat a call without inputs as constant in graph mode.
        gets_gradient = call.gradients and (seen.sees_operators or call.inputs)
        if len(constants) == len(call.inputs) and not gets_gradient:
            constant.add(call.index)
        # The sum of attention scores and a mask is large only because the mask is large on purpose. So do not report
        # such a sum as close to overflow.
        is_sum = call.operator and call.kind.startswith(_ADDS) and len(call.inputs) > 1
        half = max((reading.largest for reading in call.outputs), default=0.0) / 2
        is_as_large = is_sum and any(reading.largest >= half or not reading.finite for reading in constants)
        if is_as_large or (call.kind in CASTS and any(value.source in masked for value in call.inputs)):
            masked.add(call.index)
    return constant | masked


def _closest(readings: list[Reading]) -> Reading | None:
    """Return the reading with the least headroom.

    If several readings have inf or NaN, return the reading with the largest number of inf and NaN.
    """
    return min(readings, key=lambda reading: (reading.headroom, -reading.infs_and_nans), default=None)
