"""Measures how many bits each layer is away from overflow, and describes weights that a number format cannot hold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mindformers_adaptive.overflow.masks import Masks
from mindformers_adaptive.overflow.readings import CASTS, Call, Pass, Reading
from mindformers_adaptive.rules.formats import FLOAT16, Format

__all__ = ["LayerRange", "WeightsBeyond", "layer_ranges"]


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

    def to_dict(self) -> dict[str, object]:
        """Return the attributes as a dict, with the headroom: the bits left before overflow, or None if infinite."""
        both = {"forward": _to_dict(self.forward), "backward": _to_dict(self.backward)}
        return {"layer": self.layer, "layer_class": self.layer_class, **both}


def _to_dict(reading: Reading | None) -> dict[str, object] | None:
    if reading is None:
        return None
    return {**reading.to_dict(), "headroom": reading.headroom if math.isfinite(reading.headroom) else None}


def layer_ranges(passes: Sequence[Pass]) -> tuple[LayerRange, ...]:
    """Return the largest values of each layer over passes at one loss scale, in the order of execution.

    Values that depend on no weight and no input, such as a mask, are left out.

    Args:
        passes (Sequence[Pass]): one pass for each batch.
    """
    classes: dict[str, str] = {}
    forward: dict[str, Reading] = {}
    backward: dict[str, Reading] = {}
    for seen in passes:
        constant = _constant_calls(seen)
        masked = set(Masks(seen).calls)
        for call in seen.calls:
            if not call.operator:
                classes.setdefault(call.layer, call.kind)
            is_cast_of_masked = call.kind in CASTS and any(value.source in masked for value in call.inputs)
            if is_cast_of_masked or _is_as_large_as_a_constant(call, constant):
                masked.add(call.index)
            elif call.index not in constant and call.index not in masked:
                _keep_closest(forward, call.layer, call.outputs)
            _keep_closest(backward, call.layer, (gradient.reading for gradient in call.gradients))
    return tuple(LayerRange(name, kind, forward.get(name), backward.get(name)) for name, kind in classes.items())


def _constant_calls(seen: Pass) -> set[int]:
    constant: set[int] = set()
    for call in seen.calls:
        # In graph mode every value seems to get a gradient. So a call without inputs counts as constant there.
        gets_gradient = call.gradients and (seen.sees_operators or call.inputs)
        if all(_is_constant(call, index, constant) for index in range(len(call.inputs))) and not gets_gradient:
            constant.add(call.index)
    return constant


def _is_constant(call: Call, index: int, constant: set[int]) -> bool:
    value = call.inputs[index]
    is_from_constant = value.source is None or value.source in constant
    return value.weight is None and not call.gets_gradient(index) and is_from_constant


def _is_as_large_as_a_constant(call: Call, constant: set[int]) -> bool:
    """Return whether a sum is large only because of a constant summand, such as a mask added to attention scores."""
    if not call.operator or not call.kind.startswith(("Add", "Sub", "Radd", "Rsub")) or len(call.inputs) < 2:
        return False
    largest = max((reading.largest for reading in call.outputs), default=0.0)
    constants = [value.reading for index, value in enumerate(call.inputs) if _is_constant(call, index, constant)]
    return any(2.0 * reading.largest >= largest or not reading.finite for reading in constants)


def _keep_closest(closest: dict[str, Reading], layer: str, readings: Iterable[Reading]) -> None:
    for reading in readings:
        before = closest.get(layer)
        if before is None or (reading.headroom, -reading.infs_and_nans) < (before.headroom, -before.infs_and_nans):
            closest[layer] = reading


@dataclass(frozen=True)
class WeightsBeyond:
    """The weights that a format cannot hold: a cast to the format turns them into inf.

    Attributes:
        elements (int): the number of elements that the format cannot hold.
        parameters (tuple[str, ...]): the Parameters with such elements; the Parameter with the largest element is
            first.
        largest (float): the largest finite magnitude in these Parameters.
        infs_and_nans (int): the number of elements that are inf or NaN even before a cast.
        weight_format (Format): the format.
    """

    elements: int
    parameters: tuple[str, ...]
    largest: float
    infs_and_nans: int
    weight_format: Format = FLOAT16
