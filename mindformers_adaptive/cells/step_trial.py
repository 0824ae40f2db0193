"""Try the step of a user's rule where it trains: the compiled step must equal the step in NumPy, in random steps."""

from __future__ import annotations

import os
import warnings
from typing import Any

import numpy as np
from mindspore import Tensor, context, jit
from mindspore.communication._comm_helper import GlobalComm
from numpy.typing import NDArray

from mindformers_adaptive.cells.graph_form import GraphStep
from mindformers_adaptive.rules.checks import LARGEST_FLOAT32, SMALLEST_FLOAT32
from mindformers_adaptive.rules.fields import STEP_LIMIT
from mindformers_adaptive.rules.lanes import arrays_of
from mindformers_adaptive.rules.rule import Rule
from mindformers_adaptive.rules.step import NumpyStep

__all__ = ["can_try", "try_rule"]

_STEPS = 200
# In every second step, a value of the state is replaced by an extreme one with this probability.
_EXTREME = 0.2
_FLOATS = (0.0, 1.0, -1.0, 2.0**-100, 2.0**100, LARGEST_FLOAT32, np.inf, -np.inf, np.nan)
_INTS = (0, 1, -1, 1000, STEP_LIMIT, 2**31 - 1, -(2**31))
_GRADIENTS = (0.0, SMALLEST_FLOAT32, 1.0, 65504.0, LARGEST_FLOAT32, np.inf, np.nan)
_COUNTS = ("skipped_steps", "consecutive_overflows", "clean_steps")


def can_try() -> bool:
    """Return whether steps can run: not before init() of a parallel training, nor in a dry run, which gives zeros."""
    is_parallel = context.get_auto_parallel_context("parallel_mode") != "stand_alone"
    return (GlobalComm.INITED or not is_parallel) and not os.environ.get("MS_SIMULATION_LEVEL")


def try_rule(rule: Rule) -> None:
    """Compare random steps of a rule in NumPy with the same steps of its compiled form, on the present device.

    Raises:
        ValueError: if the two compute different values. The message has the values before the step, and both results.

    Warns:
        UserWarning: if a float of the state differs by its rounding.
    """
    graph, before = GraphStep(rule), _random_steps(rule)
    # In these modes MindSpore would distribute the inputs of a compiled function. So run its operators one by one.
    is_distributed = context.get_auto_parallel_context("parallel_mode") in ("semi_auto_parallel", "auto_parallel")
    compiled = graph.function if is_distributed else jit(graph.function)
    with np.errstate(all="ignore"):
        after = NumpyStep(rule)(dict(before))
    is_rounded = False
    for step in range(_STEPS):
        inputs = [Tensor(_value(rule, name, before, step)) for name in graph.inputs]
        for name, result in zip(graph.outputs, compiled(*inputs), strict=True):
            ours, theirs = _value(rule, name, after, step), result.asnumpy()
            # Devices may flush subnormal numbers to 0.
            ours, theirs = (value * (np.abs(value) >= SMALLEST_FLOAT32) for value in (ours, theirs))
            if np.array_equal(ours, theirs, equal_nan=True):
                continue
            if theirs.dtype != np.float32 or name == "loss_scale" or not np.allclose(ours, theirs, equal_nan=True):
                values = ", ".join(f"{key}={_value(rule, key, before, step).tolist()}" for key in graph.inputs)
                raise ValueError(
                    f"The rule {rule.name!r} computes {name!r} differently in MindSpore and in NumPy: "
                    f"{theirs.tolist()} and {ours.tolist()}, in a step from {values}. Write the step with other "
                    "operations, so that replays show what the training does."
                )
            is_rounded = True
    if is_rounded:
        warnings.warn(
            f"The rule {rule.name!r} rounds a float of its state differently in MindSpore and in NumPy. Replays of a "
            "training can differ from it in the last digits.",
            stacklevel=2,
        )


def _random_steps(rule: Rule) -> dict[str, NDArray[Any]]:
    """Return the values before random steps: of a run of the rule, and in every second step some extreme ones."""
    random = np.random.default_rng(0)
    overflow = random.random(_STEPS) < 0.3
    gradients = np.exp2(random.uniform(-30, 10, _STEPS))
    gradients = np.where(random.random(_STEPS) < 0.2, random.choice(_GRADIENTS, _STEPS), gradients)
    states = [rule.start(rule.nearest_scale(min(max(rule.min_loss_scale, 2.0**16), rule.max_loss_scale)))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for flag, gradient in zip(overflow[1:].tolist(), gradients[1:].tolist(), strict=True):
            states.append(rule.step(states[-1], flag, gradient))
    before = arrays_of(rule, states)
    for name, values in before.items():
        is_extreme = (random.random(values.shape) < _EXTREME) & (np.arange(_STEPS) % 2 == 1)
        if name == "loss_scale":
            extremes: Any = [rule.nearest_scale(rule.min_loss_scale), rule.nearest_scale(rule.max_loss_scale)]
        else:
            extremes = _FLOATS if values.dtype == np.float32 else [0, 1, STEP_LIMIT] if name in _COUNTS else _INTS
        before[name] = np.where(is_extreme, random.choice(extremes, values.shape), values).astype(values.dtype)
    return {**before, "overflow": overflow, "largest_gradient": gradients.astype(np.float32)}


def _value(rule: Rule, name: str, values: dict[str, NDArray[Any]], step: int) -> NDArray[Any]:
    """Return the value of an input or result of the compiled step: a number, or a vector of a field's parts."""
    parts = next((field.parts for field in rule.fields if field.name == name), ())
    return np.array([values[part][step] for part in parts]) if parts else np.asarray(values[name][..., step])
