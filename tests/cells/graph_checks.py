"""Find the nodes and dtypes of an exported graph that are not allowed on an Ascend."""

import pydoc
import re

from mindspore import ops

# The compiler inserts these nodes to order and group values. They are not operators, so no documentation lists their
# platforms.
_FROM_THE_COMPILER = {"Load", "MakeTuple", "TupleGetItem", "UpdateState"}

_TENSOR_TYPES = {"FLOAT", "INT32", "BOOL"}

# Inputs that operators take as plain numbers only, such as an axis, a dtype or an index. The compiler reads them, so no
# kernel computes with an int64.
_PLAIN_CONSTANTS = {
    *(("INT64", name, 1) for name in ("Cast", "TupleGetItem", "Argmin", "ExpandDims")),
    *(("INT64", name, position) for name, position in (("Argmin", 2), ("Gather", 2), ("Gather", 3))),
    *((kind, "ReduceSum", position) for kind, position in (("TUPLE", 1), ("BOOL", 2), ("BOOL", 3))),
}


def control_flow(graph):
    return {*graph.control_flow} | ({f"{graph.graphs} graphs"} if graph.graphs > 1 else set())


def forbidden_tensors(graph):
    """Return a graph's tensors (Parameters, inputs, outputs, constants, nodes) that are not float32, int32 or bool."""
    return {
        (kind, position) for kind in graph.tensor_types.keys() - _TENSOR_TYPES for position in graph.tensor_types[kind]
    }


def forbidden_plain_constants(graph):
    return graph.plain_constants - _PLAIN_CONSTANTS


def plain_outputs(graph):
    """Return the outputs, such as numbers, that are not tensors. The host, not the Ascend, has to compute such outputs.

    The check of documented platforms misses TensorToScalar, because MindSpore documents it for Ascend.
    """
    return graph.plain_outputs


def undocumented_on_ascend(graph):
    return {name for name in graph.primitives - _FROM_THE_COMPILER if "Ascend" not in _documented_platforms(name)}


CHECKS = (control_flow, forbidden_tensors, forbidden_plain_constants, plain_outputs, undocumented_on_ascend)


def _documented_platforms(primitive):
    """Return a primitive's "Supported Platforms" from its docstring, or from another docstring to which it refers."""
    for module in (ops, ops.operations, ops.auto_generate):
        text = getattr(getattr(module, primitive, None), "__doc__", None) or ""
        reference = re.search(r"Refer to :(?:func|class):`(mindspore\.[\w.]+)`", text)
        text_referred_to = getattr(pydoc.locate(reference[1]), "__doc__", None) if reference else None
        for documentation in (text, text_referred_to or ""):
            platforms = re.search(r"Supported Platforms:\n(.+)", documentation)
            if platforms:
                return re.findall(r"\w+", platforms[1])
    return []
