"""Run the steps of a loss-scaling rule in NumPy, thousands of runs side by side.

Each run is a *lane*: an index of the last axis of all arrays.
"""

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.rules.checks import SMALLEST_FLOAT32
from mindformers_adaptive.rules.operations import NUMPY, UNSHOWN, safe_exponents

_ONE = np.int32(1)
# What a step of a rule that needs gradients may take.
GRADIENT = ("largest_gradient", "gradient_known", "max_safe_exponent")


def arguments_of_step(step: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the values that a rule's step takes."""
    return tuple(inspect.signature(step).parameters)


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
            known, exponents = safe_exponents(values["largest_gradient"], *self._largest)
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
    """
    random, lanes = np.random.default_rng(0), 64
    dtypes = dict.fromkeys(("skipped_steps", "consecutive_overflows", "clean_steps"), (np.int32, ()))
    dtypes |= {key: (field.dtype, () if field.parts else field.shape) for field in rule.fields for key in field.keys}
    before = {
        name: random.integers(-(2**30), 2**30, (*shape, lanes)).astype(dtype) for name, (dtype, shape) in dtypes.items()
    }
    before["loss_scale"] = np.exp2(random.uniform(0, 30, lanes)).astype(np.float32)
    before["largest_gradient"] = random.uniform(0, 1, lanes).astype(np.float32)
    with np.errstate(all="ignore"):
        after = NumpyStep(rule)({**before, "overflow": random.random(lanes) < 0.5})
    return {
        name
        for name, result in after.items()
        if any(name != other and np.array_equal(result, value) for other, value in before.items())
    }


class Lanes:
    """Runs of a loss-scaling rule, computed side by side in NumPy.

    Args:
        rule (Rule): the rule.
        states (Sequence[NamedTuple]): the state of each lane before the first step.

    Attributes:
        loss_scale (NDArray): the loss scales of the next step, float32 of shape (lanes,).

    Examples:
        >>> from mindformers_adaptive.rules.adaptive import AdaptiveRule
        >>> rule = AdaptiveRule()
        >>> lanes = Lanes(rule, [rule.start(2.0**20), rule.start(2.0**19)])
        >>> lanes.step(np.array([True, True]), np.array([np.nan, np.nan]))
        >>> np.log2(lanes.loss_scale).tolist()
        [19.0, 18.0]
    """

    def __init__(self, rule: Any, states: Sequence[Any]) -> None:
        self._rule, self._step = rule, rule._numpy_step
        self._values = arrays_of(rule, states)
        self._has_warned = False

    @property
    def loss_scale(self) -> NDArray[np.float32]:
        return self._values["loss_scale"]

    @property
    def scale_window(self) -> NDArray[np.int32] | None:
        """NDArray, optional: the scale window of each lane (run) in steps, int32; None for rules without a window."""
        window = self._values.get("scale_window")
        return window if window is not None and window.ndim == 1 else None

    def watching(self) -> Any:
        """Return a context manager that turns off NumPy's own warnings and warns of subnormal numbers."""
        return np.errstate(all="ignore", under="call", call=self._notice)

    def step(self, overflow: NDArray[np.bool_], largest_gradient: NDArray[np.float64]) -> None:
        """Take one step of the loss-scaling rule in every lane (run).

        Args:
            overflow (NDArray): whether the step of each lane overflowed, bool of shape (lanes,).
            largest_gradient (NDArray): the largest gradient of each lane, float64 of shape (lanes,), nan if unknown.
        """
        with self.watching():
            self.advance(overflow, largest_gradient)

    def advance(self, overflow: NDArray[np.bool_], largest_gradient: NDArray[np.float64]) -> None:
        """Take one step of the rule in every lane (run). The caller must be in a context of :meth:`watching`."""
        values = self._values
        values["overflow"] = overflow
        if self._step.shows_gradients:
            # The step function takes float32 numbers. A gradient below the smallest normal float32 number becomes 0.
            gradient = np.asarray(largest_gradient)
            tiny = np.abs(gradient) < SMALLEST_FLOAT32
            values["largest_gradient"] = np.where(tiny, 0.0, gradient).astype(np.float32)
        values.update(self._step(values))
        # Make new arrays for the counters instead of changing the arrays in place. The step function may have returned
        # the array of a counter as a field of the rule, too, and this field must keep its value.
        values["skipped_steps"] = values["skipped_steps"] + overflow
        values["consecutive_overflows"] = (values["consecutive_overflows"] + _ONE) * overflow

    def states(self) -> list[Any]:
        """Return the rule states of all lanes (runs) as NamedTuples."""
        columns = []
        for key in self._rule.State._fields:
            array = self._values[key]
            if array.dtype == np.float32 and (np.abs(array[array != 0]) < SMALLEST_FLOAT32).any():
                self._notice()
            columns.append(array.tolist() if array.ndim == 1 else map(tuple, array.T.tolist()))
        return [self._rule.State(*lane) for lane in zip(*columns, strict=True)]

    def _notice(self, *_: Any) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"The rule {self._rule.name!r} computed a subnormal number (below 2^-126). Some devices flush such "
                "numbers to 0, so the rule could behave differently there. Clamp the value from below, for example by "
                "xp.maximum(x, smallest) with smallest = xp.floats(2.0**-100).",
                stacklevel=4,
            )


def arrays_of(rule: Any, states: Sequence[Any]) -> dict[str, NDArray[Any]]:
    """Return states of a rule as one array per value; its last axis has one index per state."""
    dtypes = {key: field.dtype for field in rule.fields for key in field.keys} | {"loss_scale": "float32"}
    columns = zip(rule.State._fields, zip(*states, strict=True), strict=True)
    return {key: np.array(column, dtypes.get(key, "int32")).T for key, column in columns}
