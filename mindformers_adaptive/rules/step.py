"""The NumPy form of a rule's step, for many lanes (runs) side by side."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.rules.operations import NUMPY, UNSHOWN, exponents_of

# What a step of a rule that needs gradients may take.
GRADIENT = ("largest_gradient", "gradient_known", "max_safe_exponent")


def arguments_of_step(step: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the values that a rule's step takes."""
    return tuple(inspect.signature(step).parameters)


def results_of_step(rule: Any) -> tuple[str, ...]:
    """Return the names of the values that the step of a rule returns."""
    keys = [key for field in rule.fields for key in field.keys]
    clean = ["clean_steps"] if rule.counts_clean_steps else []
    return ("exponent" if rule.moves_by_bits else "loss_scale", *keys, *clean)


def keeps_bounds(rule: Any) -> bool:
    """Return whether the rule's own step keeps the loss scale within its bounds.

    This is ``keeps_bounds`` of the class that defines make_step(), because it describes that method.
    """
    owner = next(owner for owner in (rule, *type(rule).__mro__) if "make_step" in vars(owner))
    return bool(vars(owner).get("keeps_bounds", False))


class NumpyStep:
    """The step of a rule in NumPy. Arrays have an index for each lane (run) as the last axis."""

    def __init__(self, rule: Any) -> None:
        self._step = rule.make_step(NUMPY)
        self._arguments = arguments_of_step(self._step)
        self._is_by_bits, self._is_clipped = rule.moves_by_bits, not keeps_bounds(rule)
        self.shows_gradients = not {*GRADIENT}.isdisjoint(self._arguments)
        self._largest = np.frexp(np.float64(rule.gradient_format.largest))
        names = ("min_exponent", "max_exponent") if self._is_by_bits else ("min_loss_scale", "max_loss_scale")
        dtype = np.int32 if self._is_by_bits else np.float32
        self._bounds = [dtype(getattr(rule, name)) for name in names]

    def __call__(self, values: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return the loss scale and the state after a step.

        Args:
            values (dict): the state, overflow and largest gradient by name, arrays of shape (..., lanes). Values that
                the step takes besides are added to the dict.
        """
        if self._is_by_bits:
            values["exponent"] = np.frexp(values["loss_scale"])[1].astype(np.int32) - np.int32(1)
        if self.shows_gradients:
            known, exponents = exponents_of(values["largest_gradient"], *self._largest)
            values["gradient_known"] = known = known & ~values["overflow"]
            values["max_safe_exponent"] = np.where(known, exponents, np.int32(UNSHOWN))
            if "largest_gradient" in self._arguments:
                values["largest_gradient"] = np.where(known, values["largest_gradient"], np.float32(0))
        after: dict[str, NDArray[Any]] = self._step(*map(values.__getitem__, self._arguments))
        if self._is_clipped:
            scale = "exponent" if self._is_by_bits else "loss_scale"
            after = {name: _in_all_lanes(value, values["overflow"]) for name, value in after.items()}
            wanted, (lowest, highest) = after[scale], self._bounds
            bounded = np.minimum(np.maximum(wanted, lowest), highest)
            after[scale] = np.where(wanted == wanted, bounded, values[scale])
        if self._is_by_bits:
            after["loss_scale"] = np.ldexp(np.float32(1), after["exponent"])
        return after


def _in_all_lanes(value: NDArray[Any], like: NDArray[Any]) -> NDArray[Any]:
    """Repeat a result that is a constant, and so lacks an element for each lane."""
    return np.broadcast_to(value, (*value.shape[:-1], *like.shape)) if value.shape[-1:] != like.shape else value


def handed_on(rule: Any) -> set[str]:
    """Return the results of a rule's step that are another value from before the step, unchanged.

    They are found by their values in a step from random states: x * 1 is x, too.

    Args:
        rule (Rule): the rule.
    """
    random, lanes = np.random.default_rng(0), 64
    before = {"loss_scale": np.exp2(random.uniform(0, 30, lanes)), "largest_gradient": random.uniform(0, 1, lanes)}
    before = {name: values.astype(np.float32) for name, values in before.items()}
    for field in rule.fields:
        for key in field.keys:
            shape = (*(() if field.parts else field.shape), lanes)
            is_integer = field.dtype == "int32"
            numbers = random.integers(-(2**30), 2**30, shape) if is_integer else random.uniform(-1, 1, shape)
            before[key] = numbers.astype(field.dtype)
    for name in ("skipped_steps", "consecutive_overflows", "clean_steps"):
        before.setdefault(name, random.integers(0, 2**30, lanes).astype(np.int32))
    with np.errstate(all="ignore"):
        after = NumpyStep(rule)({**before, "overflow": random.random(lanes) < 0.5})
    return {
        name
        for name, result in after.items()
        for other, value in before.items()
        if name != other and result.dtype == value.dtype and np.array_equal(result, value)
    }
