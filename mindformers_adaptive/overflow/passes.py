"""The record of a pass through a network: the values at each cell and operator, forward and backward."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from mindformers_adaptive.gradients.reading import Reading

# The names of operators that only change the dtype of a tensor.
CASTS = {"Cast", "Astype", "To", "Type", "TypeAs"}

# The value of Operand.source for an input that is a part of the batch.
BATCH = -1


@dataclass(frozen=True, slots=True)
class Operand:
    """An input tensor of a recorded call of a cell or operator.

    Attributes:
        reading (Reading): the magnitudes in the tensor.
        source (int, optional): the index of the call that computed the tensor, or ``BATCH``; None if it is not known.
        weight (str, optional): the name of the Parameter, if the tensor is a Parameter.
        buffer (str, optional): the layer and its attribute, if the tensor is a constant Tensor that a layer holds.
    """

    reading: Reading
    source: int | None = None
    weight: str | None = None
    buffer: str | None = None

    @property
    def is_computed(self) -> bool:
        """Whether the tensor comes from a recorded call of a cell or operator."""
        return self.source is not None and self.source != BATCH


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient of an input or output of a recorded call of a cell or operator.

    Attributes:
        of_output (bool): whether the tensor is an output of the call; otherwise it is an input. The gradient of an
            output is the sum over all its uses; the gradient of an input is the contribution of this call.
        index (int): the index of the output or input.
        reading (Reading): the magnitudes in the gradient.
    """

    of_output: bool
    index: int
    reading: Reading


@dataclass(slots=True)
class Call:
    """The record of one call of a cell or operator in a pass.

    Attributes:
        index (int): the position of the call in the order in which calls begin.
        layer (str): the name of the cell, or of the innermost cell that calls the operator; "" is the whole network.
        kind (str): the class of the cell, or the name of the operator.
        operator (bool): whether the call is a call of an operator.
        parent (int, optional): the index of the call of the surrounding cell; None for the whole network.
        attribute (str): the attribute of the cell that holds the operator; "" if there is no such attribute.
        inputs (list[Operand]): the floating-point inputs.
        outputs (list[Reading]): the floating-point outputs.
        gradients (list[Gradient]): the gradients of inputs and outputs, in the order of the backward pass.
        largest_constant (float): the largest magnitude among the Python numbers that an operator was given; 0 if it was
            given none.
    """

    index: int
    layer: str
    kind: str
    operator: bool = False
    parent: int | None = None
    attribute: str = ""
    inputs: list[Operand] = field(default_factory=list)
    outputs: list[Reading] = field(default_factory=list)
    gradients: list[Gradient] = field(default_factory=list)
    largest_constant: float = 0.0

    @property
    def name(self) -> str:
        """The layer, followed by the layer's attribute that holds the operator, as in ``attention.batch_matmul``."""
        return ".".join(filter(None, (self.layer, self.attribute)))

    def gets_gradient(self, index: int) -> bool:
        """Return whether the backward pass computed a gradient of an input of this call."""
        return any(not gradient.of_output and gradient.index == index for gradient in self.gradients)


@dataclass(frozen=True)
class Pass:
    """The record of one forward and backward pass of a batch at one loss scale.

    Attributes:
        loss_scale (float): the loss scale of the pass.
        loss (float): the loss, not multiplied by the loss scale.
        calls (list[Call]): the calls, in the order in which they begin.
        backward (list[tuple[int, Gradient]]): the gradients in the order of the backward pass, each after the index of
            its call.
        weights (Mapping[str, Reading]): the gradient of each trainable Parameter, by name.
        loss_source (int, optional): the index of the call that computed the loss.
        sees_operators (bool): whether the pass shows operators, and which values get a gradient in training. In graph
            mode it shows neither. Default: True.
    """

    loss_scale: float
    loss: float
    calls: list[Call]
    backward: list[tuple[int, Gradient]]
    weights: Mapping[str, Reading]
    loss_source: int | None = None
    sees_operators: bool = True

    @property
    def overflow(self) -> bool:
        """Whether a gradient of a Parameter has inf or NaN, so that a train step would be skipped."""
        return not all(reading.finite for reading in self.weights.values())

    def inside(self, call: Call) -> Iterator[Call]:
        """Yield all calls of operators and inner cells that a call of a cell made, directly or through inner cells."""
        within = {call.index}
        for other in self.calls[call.index + 1 :]:
            if other.parent in within:
                within.add(other.index)
                yield other
