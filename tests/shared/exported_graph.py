"""Export the graph that MindSpore's compiler makes of a cell as MindIR, and read the graph back.

This needs no Ascend. The exported graph does not show nodes that the backend of a device fuses or inserts later.
"""

import tempfile
from pathlib import Path

import mindspore
from google.protobuf.message import Message
from mindspore import Parameter, Tensor, nn
from mindspore import dtype as mstype
from mindspore.train.mind_ir_pb2 import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

# Nodes that order or group values. Every other node is a kernel that the device has to launch.
BOOKKEEPING = frozenset({"Constant", "Load", "MakeTuple", "TupleGetItem", "UpdateState", "Depend"})

# The kind of a node that runs another graph instead of a primitive.
_CALL = "Call"
# Types of values that carry no data and only fix the order of side effects (monads).
_MONADS = frozenset({"UMONAD", "IOMONAD"})

_COLLECTIVES = frozenset({"AllGather", "AllReduce", "AlltoAll", "Broadcast", "ReduceScatter"})
_CONTROL_FLOW = frozenset({_CALL, "Partial", "Switch", "SwitchLayer"})


class LossScaleHolder(nn.Cell):
    """A cell that owns a loss scale and passes it to its update cell, as a train-step cell does.

    Args:
        update_cell (Cell): called with the loss scale and ``overflow``.
        loss_scale_value (float): the initial loss scale.

    Inputs:
        - **overflow** (Tensor) - bool of shape ().

    Outputs:
        the outputs of ``update_cell``.
    """

    def __init__(self, update_cell, loss_scale_value):
        # Add no prefix to the names of the update cell's Parameters, so that they have the same names as in a
        # train-step cell.
        super().__init__(auto_prefix=False)
        self.update_cell = update_cell
        self.loss_scale = Parameter(Tensor(loss_scale_value, mstype.float32), name="loss_scale")

    def construct(self, overflow):
        return self.update_cell(self.loss_scale, overflow)


def export_update_cell(update_cell):
    """Return the :class:`ExportedGraph` of an update cell in a :class:`LossScaleHolder`.

    Examples:
        >>> from mindspore import nn
        >>> graph = export_update_cell(nn.DynamicLossScaleUpdateCell(2**16, 2, 1000))
        >>> graph.control_flow
        []
    """
    return export_graph(LossScaleHolder(update_cell, update_cell.get_loss_scale()), Tensor(True))


def export_graph(cell, *inputs):
    """Return the :class:`ExportedGraph` of a cell for inputs of these shapes and dtypes."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "graph.mindir")
        mindspore.export(cell, *inputs, file_name=str(file), file_format="MINDIR")
        return ExportedGraph(ModelProto.FromString(file.read_bytes()))


class ExportedGraph:
    """The graph of a cell, with all graphs that it calls or that its attributes contain.

    Args:
        model (ModelProto): a parsed MindIR file.

    Attributes:
        graphs (int): the number of graphs; above 1 where there are branches, loops or calls.
    """

    def __init__(self, model):
        self._model = model
        self._primitive_of = {f"REF::{primitive.name}": primitive.op_type for primitive in model.primitives}
        graphs = list(_find(model, GraphProto))
        self.graphs = len(graphs)
        self._nodes = [node for graph in graphs for node in graph.node]

    @property
    def kernels(self):
        """list[str]: the primitive of every node that is a kernel."""
        return [name for name in map(self._kind, self._nodes) if name not in BOOKKEEPING]

    @property
    def primitives(self):
        """set[str]: every primitive that a graph node runs, or that a graph node gets as an input."""
        return {*map(self._kind, self._nodes), *self._primitive_of.values()} - {"Constant", _CALL}

    @property
    def control_flow(self):
        """list[str]: an entry for each control-flow node: ``Switch``, ``SwitchLayer``, ``Partial``, or ``Call``."""
        return [kind for kind in map(self._kind, self._nodes) if kind in _CONTROL_FLOW]

    @property
    def collectives(self):
        """list[tuple[str, str, tuple[int, ...]]]: primitive, output dtype and output shape of each collective."""
        constants = []
        for node in self._nodes:
            if self._kind(node) in _COLLECTIVES:
                [tensor] = _find(node.attribute[0], TensorProto)
                constants.append((self._kind(node), TensorProto.DataType.Name(tensor.data_type), tuple(tensor.dims)))
        return constants

    @property
    def tensor_types(self):
        """dict[str, set[str]]: for each dtype (named as in MindIR), the Parameters and primitives with such tensors.

        The tensors are Parameters, inputs, outputs and constants, and the outputs of every node, also in tuples.
        The sets hold names of Parameters, inputs and outputs; a node is represented by its primitive.
        """
        places = {}
        for owner, tensor in self._tensors(self._model, owner=""):
            places.setdefault(TensorProto.DataType.Name(tensor.data_type), set()).add(owner)
        return places

    @property
    def plain_constants(self):
        """set[tuple[str, str, int]]: the graph nodes' inputs that are constants other than tensors, such as an axis.

        Each entry has the type of the constant, the primitive of the node, and the position of this input.
        """
        types = {}
        for node in self._nodes:
            if self._kind(node) == "Constant" and not list(_find(node, TensorProto)):
                types[node.output[0]] = _type(node.attribute[0])
        return {
            (types[name], self._kind(node), position)
            for node in self._nodes
            for position, name in enumerate(node.input)
            if types.get(name, "UMONAD") not in _MONADS
        }

    @property
    def plain_outputs(self):
        """set[tuple[str, str]]: type and primitive of each graph node that outputs something other than a tensor.

        The type is, for example, the type of a number, which the host computes. Outputs in a tuple are listed too.
        """
        types = {
            (_type(output), self._kind(node))
            for node in self._nodes
            if self._kind(node) != "Constant"
            for output in _find(node.attribute[0], AttributeProto)
        }
        return {(kind, name) for kind, name in types if kind not in {"TENSORS", "TUPLE", *_MONADS}}

    def _kind(self, node):
        if not node.op_type.startswith("REF::"):
            return node.op_type
        return self._primitive_of.get(node.op_type, _CALL)

    def _tensors(self, message, owner):
        if isinstance(message, TensorProto):
            yield owner or _short(message.name), message
        elif isinstance(message, NodeProto):
            owner = self._kind(message)
        elif isinstance(message, ValueInfoProto):
            owner = _short(message.name)
        for part in _parts(message):
            yield from self._tensors(part, owner)


def _find(message, kind):
    """Yield every message of a type that a protobuf message contains, at any depth."""
    if isinstance(message, kind):
        yield message
    for part in _parts(message):
        yield from _find(part, kind)


def _parts(message):
    """Yield the fields of a protobuf message that are messages themselves."""
    for field, value in message.ListFields():
        if field.message_type is not None:
            yield from [value] if isinstance(value, Message) else value


def _type(attribute):
    return AttributeProto.AttributeType.Name(attribute.type)


def _short(name):
    """Return the name of a Parameter without the name of the graph, which MindIR puts in front."""
    return name.partition(":")[2]
