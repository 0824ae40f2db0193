"""Where the first value that is not finite came from: the layer, and the operator where it was seen."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from mindformers_adaptive.overflow.readings import CASTS, FILLS, Call, Gradient, Operand, Pass, Reading, largest_of

__all__ = ["Origin", "find_origin"]


@dataclass(frozen=True)
class Origin:
    """The first place in the order of execution whose inputs are finite, and whose output or gradient is not.

    Attributes:
        phase (str): "forward" or "backward".
        layer (str, optional): the cell; "" is the whole network. None where nothing was seen to overflow.
        layer_class (str): its class.
        operator (str): the operator inside, with the name by which the cell knows it; "" where the cell has none, or it
            was not seen.
        what (str): which value is not finite, in words.
        reading (Reading, optional): its magnitudes.
        largest_input (float, optional): the largest finite magnitude that went in: forward of the inputs, backward of
            the gradients.
        largest_weight (float, optional): likewise of the Parameters that went in.
        weight (str, optional): the Parameter, where the value is one or is the gradient of one.
        source (str): the other layer that the largest input came from; "" where it is the same, or not known.
        hidden (bool): whether the loss is finite all the same, because an operator in between swallows inf and NaN.
    """

    phase: str
    layer: str | None
    layer_class: str = ""
    operator: str = ""
    what: str = ""
    reading: Reading | None = None
    largest_input: float | None = None
    largest_weight: float | None = None
    weight: str | None = None
    source: str = ""
    hidden: bool = False

    def to_dict(self) -> dict[str, object]:
        """Return everything by name."""
        reading = None if self.reading is None else {**self.reading.to_dict(), "limit": self.reading.limit}
        return {**vars(self), "reading": reading}


def find_origin(one: Pass) -> Origin | None:
    """Return where a pass overflowed, or None if it did not.

    A value is followed back only from a loss or a gradient that is not finite: an inf in a mask, which softmax takes
    away again, is none. The gradient of each value is seen twice, where it is used and where it was made, so that a sum
    over several uses that overflows can be told from what is added up.

    Args:
        one (Pass): the pass.

    Returns:
        Origin; its ``layer`` is None where no cell or operator was seen to make the first such value.
    """
    # The loss is the first output of the whole network.
    losses = [reading for call in one.calls[:1] for reading in call.outputs[:1]]
    if not (math.isfinite(one.loss) and all(reading.finite for reading in losses)):
        return _forward_origin(one)
    return _backward_origin(one) if one.overflow else None


def _forward_origin(one: Pass) -> Origin:
    """Follow the values that are not finite from the loss to where they began."""
    begin = one.loss_source
    if begin is None or begin < 0 or not _outputs_bad(one.calls[begin]):
        begin = next((call.index for call in reversed(one.calls) if _outputs_bad(call)), None)
    return Origin("forward", None) if begin is None else _followed_back(one, begin)


def _followed_back(one: Pass, begin: int) -> Origin:
    """Follow the values that are not finite from a call to where they began.

    Where all of them are -inf of a mask, what makes NaN of these is the origin, such as softmax of a row of them.
    """
    waiting, seen = [begin], {begin}
    found: list[tuple[bool, int, Origin]] = []
    while waiting:
        call = one.calls[waiting.pop()]
        bad = [value for value in call.inputs if not value.reading.finite]
        before = {value.source for value in bad if value.source is not None and value.source >= 0}
        # What a cell returns that nobody was seen to make comes from within.
        before |= {each.index for each in one.inside(call) if _outputs_bad(each)}
        for value in bad:
            if value.weight or value.source == -1:
                found.append((False, call.index, _given_to(one, call, value)))
            elif value.source is None:
                unseen = _bad_before(one, call)
                before |= unseen
                if not unseen:
                    found.append((True, call.index, _given_to(one, call, value)))
        if not bad and not before:
            if not _outputs_bad(call):
                # What it made was written to later, where nobody saw it.
                return Origin("forward", None)
            found.append((call.operator and call.kind in FILLS, call.index, _made_by(one, call)))
        waiting += before - seen
        seen |= before
    is_mask, _, origin = min(found, key=lambda each: each[:2])
    makers = [one.calls[index] for index in seen if _makes_nan(one.calls[index])] if is_mask else []
    if makers:
        maker = min(makers, key=lambda call: (not call.operator, call.index))
        return dataclasses.replace(_made_by(one, maker), what="output, NaN made of the -inf of a mask")
    return origin


def _makes_nan(call: Call) -> bool:
    given = [value.reading for value in call.inputs]
    return not any(reading.has_nan for reading in given) and any(reading.has_nan for reading in call.outputs)


def _bad_before(one: Pass, call: Call) -> set[int]:
    """The calls that may have led to a value of unknown origin: earlier ones in the same cell, or what it was given."""
    around = None if call.parent is None else one.calls[call.parent]
    if around is None:
        return set()
    siblings = {each.index for each in one.inside(around) if each.index < call.index and _outputs_bad(each)}
    if siblings:
        return siblings
    bad = [value for value in around.inputs if not value.reading.finite]
    known = {value.source for value in bad if value.source is not None and value.source >= 0}
    return known or (_bad_before(one, around) if bad else set())


def _outputs_bad(call: Call) -> bool:
    return not all(reading.finite for reading in call.outputs)


def _inputs_bad(call: Call) -> bool:
    return not all(value.reading.finite for value in call.inputs)


def _made_by(one: Pass, call: Call) -> Origin:
    """The origin is a call with finite inputs: an operator, or a cell in which nothing was seen to overflow."""
    bad = next(reading for reading in call.outputs if not reading.finite)
    weights = [value.weight for value in call.inputs if value.weight]
    given = [value.reading for value in call.inputs if not value.weight]
    named = weights[0] if weights and call.operator and not given else None
    made = _origin_at("forward", one, call, "output", bad, largest_of(given))
    return dataclasses.replace(made, weight=named, source=_source_of(one, call))


def _origin_at(phase: str, one: Pass, call: Call, what: str, reading: Reading, largest_input: float | None) -> Origin:
    weight = _largest_weight(one, call)
    return Origin(phase, call.layer, _class_of(one, call), _operator(call), what, reading, largest_input, weight)


def _source_of(one: Pass, call: Call) -> str:
    given = [value for value in call.inputs if not value.weight]
    sizes = [(value.reading.largest, value.source) for value in given if value.source is not None and value.source >= 0]
    _, source = max(sizes, key=lambda pair: pair[0], default=(0.0, call.index))
    layer = one.calls[source].layer
    return "" if layer == call.layer else layer


def _given_to(one: Pass, call: Call, value: Operand) -> Origin:
    """The origin is what a call was given by no call that was seen."""
    reading = value.reading
    if value.weight:
        return Origin("forward", call.layer, _class_of(one, call), "", "weight", reading, weight=value.weight)
    if value.source is not None:
        return Origin("forward", "", one.calls[0].kind, "", "batch", reading)
    around = one.calls[call.parent if call.parent is not None else 0]
    what = f"a value that it gives to {_operator(call) or call.name}"
    largest = largest_of(value.reading for value in around.inputs)
    return Origin("forward", around.layer, around.kind, "", what, reading, largest)


def _backward_origin(one: Pass) -> Origin:
    """The first gradient that is not finite, in the order in which they came: all that came before it were finite."""
    for index, gradient in one.backward:
        if not gradient.reading.finite:
            call = one.calls[index]
            if not call.operator or not (_outputs_bad(call) or _inputs_bad(call)):
                return _gradient_origin(one, call, gradient)
            # Forward values were not finite already; an operator such as ReLU or a maximum hid that from the loss.
            return dataclasses.replace(_followed_back(one, index), hidden=True)
    name = next(name for name, reading in one.weights.items() if not reading.finite)
    users = [call for call in one.calls if any(value.weight == name for value in call.inputs)]
    what, given = "gradient of a weight", None
    if not users:
        return Origin("backward", None, what=what, reading=one.weights[name], weight=name)
    if len(layers := dict.fromkeys(call.layer for call in users)) > 1:
        what = f"sum of the gradients that {' and '.join(layers)} give to a weight that they share"
        given = largest_of(each.reading for call in users for each in call.gradients if not each.of_output)
    last = users[0]
    return Origin("backward", last.layer, _class_of(one, last), "", what, one.weights[name], given, weight=name)


def _gradient_origin(one: Pass, call: Call, gradient: Gradient) -> Origin:
    reading = gradient.reading
    if gradient.of_output and call.parent is None:
        what = f"the loss scale itself, as the loss is in {reading.dtype}"
        return Origin("backward", "", call.kind, "", what, reading)
    if gradient.of_output:
        # What uses the output has been gone through: what is left is the sum, or code around it that was not seen.
        around = one.calls[call.parent or 0]
        used = list(_uses(one, call))
        which = "sum of the gradients" if len(used) > 1 else "gradient"
        what = f"{which} of the output of {call.name or call.kind}"
        return Origin("backward", around.layer, around.kind, "", what, reading, largest_of(used))
    value = call.inputs[gradient.place]
    incoming = largest_of(each.reading for each in call.gradients if each.of_output)
    weight = _weight_behind(one, value)
    what = "gradient of its weight" if weight else "gradient of its input"
    inside = [each for inner in one.inside(call) for each in inner.inputs if not each.weight]
    if value.source is not None and sum(each.source == value.source for each in inside) > 1:
        what = "sum of the gradients of its input, which it uses more than once"
    return dataclasses.replace(_origin_at("backward", one, call, what, reading, incoming), weight=weight)


def _weight_behind(one: Pass, value: Operand) -> str | None:
    """The Parameter that a value is, or was before it was cast."""
    while value.weight is None and value.source is not None and value.source >= 0:
        maker = one.calls[value.source]
        if maker.kind not in CASTS or not maker.inputs:
            return None
        value = maker.inputs[0]
    return value.weight


def _uses(one: Pass, call: Call) -> Iterator[Reading]:
    """The gradients that the users of a call's output give back."""
    for other in one.calls:
        for each in other.gradients:
            if not each.of_output and other.inputs[each.place].source == call.index:
                yield each.reading


def _largest_weight(one: Pass, call: Call) -> float | None:
    """The largest Parameter that goes into a call, or else into its layer, which may use it after a cast."""
    for calls in ([call], [each for each in one.calls if each.layer == call.layer]):
        if weights := [value.reading for each in calls for value in each.inputs if value.weight]:
            return largest_of(weights)
    return None


def _class_of(one: Pass, call: Call) -> str:
    return one.calls[call.parent].kind if call.operator and call.parent is not None else call.kind


def _operator(call: Call) -> str:
    return " ".join(filter(None, (call.kind, call.attribute))) if call.operator else ""
