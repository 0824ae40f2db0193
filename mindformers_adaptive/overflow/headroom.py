"""How far each layer is from overflow, in bits, and which weights a format cannot hold."""

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
    """The largest values of a layer over some passes at one loss scale.

    Attributes:
        layer (str): its name; "" is the whole network.
        layer_class (str): its class.
        forward (Reading, optional): of what it computes, the reading with the least headroom; None where nothing of
            floating point was seen.
        backward (Reading, optional): the same for the gradients of its values.
    """

    layer: str
    layer_class: str
    forward: Reading | None = None
    backward: Reading | None = None

    def to_dict(self) -> dict[str, object]:
        """Return everything by name, with the headroom in bits; None for one without end."""
        both = {"forward": _to_dict(self.forward), "backward": _to_dict(self.backward)}
        return {"layer": self.layer, "layer_class": self.layer_class, **both}


def _to_dict(reading: Reading | None) -> dict[str, object] | None:
    if reading is None:
        return None
    return {**reading.to_dict(), "headroom": reading.headroom if math.isfinite(reading.headroom) else None}


def layer_ranges(passes: Sequence[Pass]) -> tuple[LayerRange, ...]:
    """Return the largest values of each layer over passes at one loss scale, in the order of execution.

    What no weight and no input can change, such as a mask, is left out.

    Args:
        passes (Sequence[Pass]): one for each batch.
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
        # A cell that was looked into is known by what it returns, from the operator that made it.
        gets_gradient = call.gradients and (seen.sees_operators or call.inputs)
        if all(_is_constant(call, index, constant) for index in range(len(call.inputs))) and not gets_gradient:
            constant.add(call.index)
    return constant


def _is_constant(call: Call, index: int, constant: set[int]) -> bool:
    value = call.inputs[index]
    is_from_constant = value.source is None or value.source in constant
    return value.weight is None and not call.gets_gradient(index) and is_from_constant


def _is_as_large_as_a_constant(call: Call, constant: set[int]) -> bool:
    """Whether a sum is as large as it is by what is added to it, as a mask is to the scores of attention."""
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
    """The weights that a format cannot hold: they are inf as soon as they are cast to it.

    Attributes:
        elements (int): how many.
        parameters (tuple[str, ...]): the Parameters that have some, the one with the largest first.
        largest (float): the largest magnitude.
        infs_and_nans (int): how many are inf or NaN as they are.
        weight_format (Format): the format.
    """

    elements: int
    parameters: tuple[str, ...]
    largest: float
    infs_and_nans: int
    weight_format: Format = FLOAT16
