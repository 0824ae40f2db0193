"""Distinguishes the -inf of masks from overflows. A mask hides values by -inf, which softmax turns into 0."""

from collections.abc import Iterator

from mindformers_adaptive.overflow.passes import CASTS, Call, Operand, Pass

# Operators that replace elements of a tensor by given values.
_FILLS = {"MaskedFill", "Select", "Where", "Fill", "FillV2", "Full", "FullLike", "MaskedScatter"}
# Parts of the names of operators that multiply. They can make NaN of the -inf in a mask, because inf times 0 is NaN.
MULTIPLIES = ("Mul", "Rmul", "Imul", "atmul", "Bmm", "Mm", "mm", "Conv", "Dense", "Linear", "Norm", "Div")


class Masks:
    """Distinguishes inf that comes from masks from inf that comes from overflows, in a recorded pass.

    A mask begins at an operator that fills in inf, or that computes -inf from values without weights and gradients,
    such as the logarithm of 0. A mask also begins at a batch, Parameter or Tensor that has -inf and gets no gradient.
    The mask continues through the calls that keep -inf as -inf.

    Args:
        seen (Pass): the pass.
    """

    def __init__(self, seen: Pass) -> None:
        self._pass = seen
        self._from_weights: set[int] = set()
        self._begins: set[int] = set()
        self.calls: set[int] = set()
        for call in seen.calls:
            if any(value.weight or value.source in self._from_weights for value in call.inputs):
                self._from_weights.add(call.index)
            if self._begins_mask(call):
                self._begins.add(call.index)
            if call.index in self._begins or self._goes_on(call):
                self.calls.add(call.index)
        for call in reversed(seen.calls):
            # If all inf and NaN inside a cell come from masks, the inf or NaN in the output of the cell comes from a
            # mask too. If any inf or NaN inside the cell comes from an overflow, the output of the cell overflows.
            inside = [each.index for each in seen.inside(call) if has_bad_output(each)] if has_bad_output(call) else []
            if inside and self.calls.issuperset(inside):
                self.calls.add(call.index)
            elif inside:
                self.calls.discard(call.index)

    def is_mask(self, call: Call, index: int) -> bool:
        """Return whether the inf in an input of a call comes from a mask, not from an overflow."""
        value = call.inputs[index]
        if value.is_computed:
            return value.source in self.calls
        if multiplies(call) or not value.reading.only_minus_inf:
            return False
        if value.weight or self._pass.sees_operators:
            return not call.gets_gradient(index)
        # In graph mode every value appears to get a gradient, so gradients cannot tell a mask from other values. Treat
        # a value as a mask if it holds only -inf and 0.
        return not value.reading.largest

    def overflowed_inputs(self, call: Call) -> list[Operand]:
        """Return the inputs of a call whose inf or NaN comes from an overflow, not from a mask."""
        bad = [index for index, value in enumerate(call.inputs) if not value.reading.finite]
        return [call.inputs[index] for index in bad if not self.is_mask(call, index)]

    def has_overflowed_output(self, call: Call) -> bool:
        """Return whether an output of a call has inf or NaN that comes from an overflow, not from a mask."""
        return has_bad_output(call) and call.index not in self.calls

    def joins_weights(self, call: Call) -> bool:
        """Return whether an input of a call combines a mask with values that depend on weights.

        In graph mode this is not known, so return True.
        """
        sources = [value.source for value in self._masked_inputs(call)]
        return not self._pass.sees_operators or any(source in self._from_weights for source in sources)

    def begins(self, call: Call) -> Iterator[tuple[Call, Operand | None]]:
        """Follow the masks in the inputs of a call back through earlier calls, and yield the calls where masks begin.

        Each call comes with its input that is the mask, or with None if the call itself computes the mask.
        """
        waiting, visited = [call], {call.index}
        while waiting:
            each = waiting.pop()
            for value in self._masked_inputs(each):
                if not value.is_computed or value.source is None:
                    yield each, value
                elif value.source not in visited:
                    visited.add(value.source)
                    waiting.append(self._pass.calls[value.source])
            if each.index in self._begins:
                yield each, None

    def _masked_inputs(self, call: Call) -> list[Operand]:
        return [
            value for index, value in enumerate(call.inputs) if not value.reading.finite and self.is_mask(call, index)
        ]

    def _begins_mask(self, call: Call) -> bool:
        if not call.operator or not all(value.reading.finite for value in call.inputs):
            return False
        if fills(call):
            return not any(reading.nans for reading in call.outputs)
        is_constant = call.index not in self._from_weights and not call.gradients
        return is_constant and has_bad_output(call) and _has_only_minus_inf(call)

    def _goes_on(self, call: Call) -> bool:
        masked = self._masked_inputs(call)
        if self.overflowed_inputs(call):
            return False
        if not masked:
            return call.kind in CASTS and any(value.source in self.calls for value in call.inputs)
        may_be_positive = call.kind == "Neg" or any(value.reading.positive_infs for value in masked)
        return _has_only_minus_inf(call) or (may_be_positive and not any(reading.nans for reading in call.outputs))


def multiplies(call: Call) -> bool:
    """Return whether a call multiplies its inputs. Masks are added, so an operator that multiplies applies no mask."""
    return call.operator and any(part in call.kind for part in MULTIPLIES)


def fills(call: Call) -> bool:
    """Return whether a call replaces elements of a tensor by given values."""
    return call.operator and call.kind in _FILLS


def has_bad_output(call: Call) -> bool:
    """Return whether an output of a call has inf or NaN."""
    return not all(reading.finite for reading in call.outputs)


def _has_only_minus_inf(call: Call) -> bool:
    return all(reading.finite or reading.only_minus_inf for reading in call.outputs)
