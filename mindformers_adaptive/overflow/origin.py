"""Finds the layer, and if possible the operator, in which the first inf or NaN of a pass through a network appeared."""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mindformers_adaptive.gradients.reading import Reading, largest_of
from mindformers_adaptive.overflow.masks import MULTIPLIES, Masks, fills, has_bad_output, multiplies
from mindformers_adaptive.overflow.passes import BATCH, CASTS, Call, Gradient, Operand, Pass

# Prefixes of the names of operators that overflow at small inputs.
_NEAR_ZERO = "Div RealDiv Truediv Rtruediv Itruediv Xdivy Log Rsqrt Sqrt Pow Reciprocal Inv"
_OVERFLOWS_NEAR_ZERO = tuple(_NEAR_ZERO.split())

# What overflows if a loss scale is too large for the dtype of the loss.
_LOSS_SCALE = "the loss scale itself"


@dataclass(frozen=True)
class Origin:
    """The place where an overflow begins: the cell or operator that first makes inf or NaN from finite values.

    Attributes:
        phase (str): "forward" or "backward".
        layer (str, optional): the name of the cell; "" is the whole network. None if no cell or operator was seen to
            overflow.
        layer_class (str): the class of the cell.
        operator (str): the operator in the cell, followed by the attribute of the cell that holds it, if any; "" if no
            operator was seen.
        what (str): a description of the value that is inf or NaN, such as "output".
        reading (Reading, optional): the magnitudes of that value.
        largest_input (float, optional): the largest finite magnitude among the inputs (forward) or among the incoming
            gradients (backward).
        largest_weight (float, optional): the largest finite magnitude among the Parameters that are used there.
        smallest_input (float, optional): the smallest magnitude of the forward inputs, for an operator that overflows
            near 0, such as a division.
        weight (str, optional): the Parameter or buffer that the value is, or the Parameter whose gradient the value is.
        source (str): the other layer that computed the largest input; "" if it is the same layer or is not known.
        hidden (bool): whether the loss is finite nevertheless, because a later operator swallows inf and NaN.
        mask (bool): whether a mask caused the NaN: its -inf values fill a whole row, or are multiplied by 0.
        narrowed (str): why a number of the mask is -inf, if the mask has been given as a finite number; "" otherwise.
    """

    phase: str
    layer: str | None
    layer_class: str = ""
    operator: str = ""
    what: str = ""
    reading: Reading | None = None
    largest_input: float | None = None
    largest_weight: float | None = None
    smallest_input: float | None = None
    weight: str | None = None
    source: str = ""
    hidden: bool = False
    mask: bool = False
    narrowed: str = ""

    @property
    def because(self) -> str:
        """Why finite values became inf or NaN, with a remedy, where the values show it; "" otherwise."""
        reading, kind = self.reading, self.operator.partition(" ")[0]
        if self.phase != "forward" or self.what != "output" or reading is None:
            return self.narrowed
        if self.largest_input is not None and self.largest_input > reading.limit:
            return (
                f"{self.largest_input:.5g} is inf in {reading.dtype}, whose largest number is {reading.limit:.5g}. "
                "Compute this in float32; a mask can take the largest number instead"
            )
        if self.smallest_input == 0.0 and kind.startswith(_OVERFLOWS_NEAR_ZERO):
            what = "the logarithm of 0 is -inf" if kind.startswith("Log") else "it divides by 0, or by a root of 0"
            return (
                f"an input has 0, and {what}. Look where the 0 comes from: the batch, a softmax, or a small number "
                f"that {reading.dtype} rounds to 0; keep the input above 0 by a maximum"
            )
        if reading.nans and kind.startswith(("Log", "Sqrt", "Rsqrt", "Pow")):
            return "an input is below 0, for which the result is NaN. Keep the input above 0 by a maximum"
        return self.narrowed

    @property
    def empties_row(self) -> bool:
        """Whether a mask caused the NaN by filling a whole row of attention scores with -inf.

        A mask can also cause NaN in another way: an -inf of the mask is multiplied by 0.
        """
        return self.mask and not any(part in self.operator.partition(" ")[0] for part in MULTIPLIES)


def find_origin(seen: Pass, forward_is_harmless: bool = False) -> Origin | None:
    """Return where a forward or backward pass overflowed, or None if the pass did not overflow.

    Start from a loss or gradient that is inf or NaN, and follow the bad values back. An inf that reaches neither is no
    overflow, such as an inf in a mask that softmax turns into 0. The gradient of each value is recorded twice: where
    the value is used and where it is computed. This separates an overflow in the sum over several uses from an overflow
    in a summand.

    Args:
        seen (Pass): the pass.
        forward_is_harmless (bool): whether inf and NaN in the forward pass are known to do no harm, because the
            gradients of the same batch are finite at another loss scale. Default: False.

    Returns:
        Origin; its ``layer`` has the value None if no cell or operator was seen to compute the first inf or NaN.
    """
    if not math.isfinite(seen.loss):
        begin = max(seen.loss_source or 0, 0)
        return _followed_back(seen, Masks(seen), begin if has_bad_output(seen.calls[begin]) else 0)
    return _backward_origin(seen, forward_is_harmless) if seen.overflow else None


def operator_of(seen: Pass, origin: Origin) -> Call | None:
    """Return the call of the operator in which a pass overflowed, or None if no operator is known.

    If the loss scale itself overflows in the dtype of the loss, this is the operator that computed the loss.
    """
    if origin.what.startswith(_LOSS_SCALE) and seen.loss_source is not None:
        call = seen.calls[seen.loss_source]
        return call if call.operator else None
    kind = origin.operator.partition(" ")[0]
    alike = [call for call in seen.calls if call.operator and (call.layer, call.kind) == (origin.layer, kind)]
    return next((call for call in alike if has_bad_output(call)), next(iter(alike), None))


def _followed_back(seen: Pass, masks: Masks, begin: int) -> Origin:
    """Follow inf and NaN from the call of a cell or operator back to the origin of inf and NaN.

    Prefer a call that turns finite values into inf or NaN, then a value that no call computes, such as a weight.
    """
    waiting, visited = [begin], {begin}
    candidates: list[tuple[int, int, Origin]] = []
    while waiting:
        call = seen.calls[waiting.pop()]
        bad = masks.overflowed_inputs(call)
        before = _bad_sources(seen, bad)
        # The inf or NaN in the output of a cell may also come from a call inside the cell, even if the path from that
        # call to the output was not seen.
        before |= {each.index for each in seen.inside(call) if masks.has_overflowed_output(each)}
        for value in bad:
            if value.source in before:
                continue
            is_known = value.weight or value.buffer or value.source == BATCH
            if not is_known and (earlier := _bad_before(seen, masks, call)):
                before |= earlier
            else:
                candidates.append((1 if is_known else 2, call.index, _given_to(seen, call, value)))
        if not bad and not before and has_bad_output(call):
            candidates.append((0, call.index, _made_of_mask(seen, masks, call) or _made_by(seen, call)))
        waiting += before - visited
        visited |= before
    if not candidates:
        return Origin("forward", None)
    return min(candidates, key=lambda candidate: candidate[:2])[2]


def _is_unknown(value: Operand) -> bool:
    """Return whether a value has inf or NaN and comes from no recorded call, batch, weight or buffer."""
    return not (value.reading.finite or value.source is not None or value.weight or value.buffer)


def _bad_sources(seen: Pass, values: Iterable[Operand]) -> set[int]:
    """Return the calls that computed the values, if the outputs of these calls have inf or NaN."""
    sources = {value.source for value in values if value.source is not None and value.source != BATCH}
    return {source for source in sources if has_bad_output(seen.calls[source])}


def _made_of_mask(seen: Pass, masks: Masks, call: Call) -> Origin | None:
    """Return the origin if the inf or NaN in the output of a call comes from a mask, or seems to; otherwise None."""
    begins = list(masks.begins(call))
    if not begins:
        return None
    # A mask hides values by adding -inf to them, and a later softmax turns the -inf into 0. So a -inf that is
    # multiplied, or that reaches the loss unchanged, does not belong to a mask.
    reaches_loss = not any(reading.nans for reading in call.outputs)
    if reaches_loss or multiplies(call) or not masks.joins_weights(call):
        for origin_call, value in begins:
            if value is not None:
                return _given_to(seen, origin_call, value)
            if reaches_loss or not fills(origin_call):
                return _made_by(seen, origin_call)
    origin = _made_by(seen, call)
    # A mask of a number such as -1e9 becomes -inf where it is cast to float16.
    constants = (_made_by(seen, begin) for begin, value in begins if value is None)
    narrowed = next((constant.because for constant in constants if constant.because), "")
    return dataclasses.replace(origin, what="output, NaN made of the -inf of a mask", mask=True, narrowed=narrowed)


def _bad_before(seen: Pass, masks: Masks, call: Call) -> set[int]:
    """Return the calls that may have computed an input with inf or NaN whose source is unknown.

    These are the earlier calls in the same cell, or else the sources of the bad inputs of that cell.
    """
    if call.parent is None:
        return set()
    around = seen.calls[call.parent]
    earlier = [each for each in seen.inside(around) if each.index < call.index]
    siblings = {each.index for each in earlier if masks.has_overflowed_output(each)}
    if siblings:
        return siblings
    bad = masks.overflowed_inputs(around)
    return _bad_sources(seen, bad) or (_bad_before(seen, masks, around) if bad else set())


def _made_by(seen: Pass, call: Call) -> Origin:
    """Return the origin of an overflow in a call, an operator or cell that made inf or NaN from finite inputs."""
    bad = next(reading for reading in call.outputs if not reading.finite)
    weights = [value.weight for value in call.inputs if value.weight]
    inputs = [value.reading for value in call.inputs if not value.weight]
    named = weights[0] if weights and call.operator and not inputs else None
    largest = largest_of(inputs) if call.largest_constant <= bad.limit else call.largest_constant
    origin = _origin_at("forward", seen, call, "output", bad, largest)
    return dataclasses.replace(origin, weight=named, source=_source_of(seen, call))


def _origin_at(phase: str, seen: Pass, call: Call, what: str, reading: Reading, largest_input: float | None) -> Origin:
    weight, smallest = largest_weight(seen, call), None
    if call.operator and call.kind.startswith(_OVERFLOWS_NEAR_ZERO):
        smallest = min((v.reading.smallest for v in call.inputs if v.reading.smallest is not None), default=None)
    return Origin(
        phase, call.layer, _class_of(seen, call), _operator(call), what, reading, largest_input, weight, smallest
    )


def _source_of(seen: Pass, call: Call) -> str:
    sizes = [(value.reading.largest, value.source) for value in call.inputs if value.is_computed and not value.weight]
    _, source = max(sizes, key=lambda pair: pair[0], default=(0.0, call.index))
    layer = seen.calls[source if source is not None else call.index].layer
    return "" if layer == call.layer else layer


def _given_to(seen: Pass, call: Call, value: Operand) -> Origin:
    """Return the origin of an inf or NaN that no recorded call computed: a weight, buffer, batch or unseen operator."""
    reading = value.reading
    if value.weight or value.buffer:
        what = "weight" if value.weight else "buffer"
        layer = call.layer if value.weight else (value.buffer or "").rpartition(".")[0]
        kind = next((each.kind for each in seen.calls if each.layer == layer and not each.operator), "")
        return Origin("forward", layer, kind, "", what, reading, weight=value.weight or value.buffer)
    if value.source == BATCH:
        return Origin("forward", "", seen.calls[0].kind, "", "batch", reading)
    around = seen.calls[call.parent or 0]
    while around.parent is not None and any(_is_unknown(each) for each in around.inputs):
        # The enclosing cell already has an input with inf or NaN of unknown source. So the inf or NaN arose further
        # out: look at the next outer cell.
        call, around = around, seen.calls[around.parent]
    what = f"a value that it gives to {_operator(call) or call.name}, from an operator that cannot be seen"
    largest = largest_of(each.reading for each in around.inputs)
    return Origin("forward", around.layer, around.kind, "", what, reading, largest)


def _backward_origin(seen: Pass, forward_is_harmless: bool) -> Origin:
    """Return where the first inf or NaN among the gradients of a pass came from; all earlier gradients are finite."""
    masks = Masks(seen)
    for index, gradient in seen.backward:
        if not gradient.reading.finite:
            call = seen.calls[index]
            if forward_is_harmless or not (masks.has_overflowed_output(call) or masks.overflowed_inputs(call)):
                return _gradient_origin(seen, call, gradient)
            # The forward pass had inf or NaN already, and an operator such as ReLU or a maximum hid that from the
            # loss.
            return dataclasses.replace(_followed_back(seen, masks, index), hidden=True)
    name = next(name for name, reading in seen.weights.items() if not reading.finite)
    users = [call for call in seen.calls if any(value.weight == name for value in call.inputs)]
    what, largest = "gradient of a weight", None
    if not users:
        return Origin("backward", None, what=what, reading=seen.weights[name], weight=name)
    if len(layers := dict.fromkeys(call.layer for call in users)) > 1:
        what = f"sum of the gradients that {' and '.join(layers)} give to a weight that they share"
        largest = largest_of(each.reading for call in users for each in call.gradients if not each.of_output)
    last = users[0]
    return Origin("backward", last.layer, _class_of(seen, last), "", what, seen.weights[name], largest, weight=name)


def _gradient_origin(seen: Pass, call: Call, gradient: Gradient) -> Origin:
    reading = gradient.reading
    if gradient.of_output and call.parent is None:
        what = f"{_LOSS_SCALE}, as the loss is in {reading.dtype}"
        return Origin("backward", "", call.kind, "", what, reading)
    if gradient.of_output:
        # The gradients that flow back from all cells that use this output are finite. So the overflow is in the sum of
        # these gradients, or in code around the cell that was not seen.
        around = seen.calls[call.parent or 0]
        used = list(_uses(seen, call))
        which = "sum of the gradients" if len(used) > 1 else "gradient"
        what = f"{which} of the output of {call.name or call.kind}"
        return Origin("backward", around.layer, around.kind, "", what, reading, largest_of(used))
    value = call.inputs[gradient.index]
    incoming = largest_of(each.reading for each in call.gradients if each.of_output)
    weight = _weight_behind(seen, value)
    what = "gradient of its weight" if weight else "gradient of its input"
    inside = [each for inner in seen.inside(call) for each in inner.inputs if not each.weight]
    if value.source is not None and sum(each.source == value.source for each in inside) > 1:
        what = "sum of the gradients of its input, which it uses more than once"
    return dataclasses.replace(_origin_at("backward", seen, call, what, reading, incoming), weight=weight)


def _weight_behind(seen: Pass, value: Operand) -> str | None:
    """Return the name of a Parameter if a value is this Parameter or was cast from it; otherwise None."""
    while value.weight is None and value.is_computed and value.source is not None:
        maker = seen.calls[value.source]
        if maker.kind not in CASTS or not maker.inputs:
            return None
        value = maker.inputs[0]
    return value.weight


def _uses(seen: Pass, call: Call) -> Iterator[Reading]:
    """Yield the gradients that flow back to the output of a call from the calls that use the output."""
    for other in seen.calls:
        for each in other.gradients:
            if not each.of_output and other.inputs[each.index].source == call.index:
                yield each.reading


def largest_weight(seen: Pass, call: Call) -> float | None:
    """Return the largest magnitude in the Parameters that a call of a cell or operator uses; None if it uses none.

    An operator without a Parameter as input may use a cast Parameter. So take all Parameters of its layer instead.
    """
    for calls in ([call], [each for each in seen.calls if each.layer == call.layer]):
        if weights := [value.reading for each in calls for value in each.inputs if value.weight]:
            return largest_of(weights)
    return None


def _class_of(seen: Pass, call: Call) -> str:
    return seen.calls[call.parent].kind if call.operator and call.parent is not None else call.kind


def _operator(call: Call) -> str:
    return " ".join(filter(None, (call.kind, call.attribute))) if call.operator else ""
