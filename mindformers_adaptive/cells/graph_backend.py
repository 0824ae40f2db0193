"""The functions that the text of a rule is made of, for MindSpore, and the form of a text that is compiled with them.

Each has the name and the meaning of that in :mod:`mindformers_adaptive.rules.backend`; those that are not defined here
are MindSpore's own.
"""

import sys
import types

import numpy as np
from mindspore import Tensor, ops
from mindspore import dtype as mstype

from mindformers_adaptive.rules import backend
from mindformers_adaptive.rules.text_check import functions_of_text
from mindformers_adaptive.rules.text_rule import as_array

__all__ = ["count", "float32", "graph_form", "int32", "to_tensor"]

_sum = ops.ReduceSum()

# Those that mindspore.ops has by another name, or something else by this name.
absolute = ops.abs
argmin = ops.Argmin(axis=0, output_type=mstype.int32)
where = ops.select


def int32(x):
    """Return numbers or flags as int32."""
    return ops.cast(x, mstype.int32)


def float32(x):
    """Return numbers or flags as float32."""
    return ops.cast(x, mstype.float32)


def count(flags):
    """Return how many flags of a vector are true, int32."""
    # In float32, exact up to 2**24 flags, because Ascend sums float32.
    return ops.cast(_sum(ops.cast(flags, mstype.float32)), mstype.int32)


def graph_form(text):
    """Return the text of a rule as a function that MindSpore compiles.

    It is the same code, with names that lead to the functions of this module and to Tensors. MindSpore looks names up
    in the module that a function says it is from, so there is a second module for each that has a text.

    Args:
        text (function): of arrays, checked by :func:`~mindformers_adaptive.rules.text_check.check_text`.
    """
    name = f"{text.__module__}_in_mindspore"
    module = sys.modules.setdefault(name, types.ModuleType(name, "The texts of rules, as MindSpore compiles them."))
    names = vars(module)
    functions = functions_of_text(text)
    for original in functions.values():
        for used in original.__code__.co_names:
            value = original.__globals__.get(used)
            if isinstance(value, int | float | np.ndarray):
                names[used] = to_tensor(value)
            elif value is not None and value is getattr(backend, getattr(value, "__name__", ""), None):
                names[used] = globals().get(value.__name__) or getattr(ops, value.__name__)
        form = types.FunctionType(original.__code__, names, original.__name__)
        form.__module__ = name
        names[original.__name__] = form
    return names[text.__name__]


def to_tensor(value):
    """Return a number or an array as a Tensor of float32, int32 or bool."""
    return Tensor(as_array(value))
