"""Run a loss-scaling rule in NumPy, thousands of runs side by side. Each run is a *lane*: an index of the last axis."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.rules.checks import SMALLEST_FLOAT32
from mindformers_adaptive.rules.step import NumpyStep

_ONE = np.int32(1)


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
        # Each call of Rule.step() creates a new Lanes object. So store the step on the rule and reuse it.
        if "_numpy_step" not in vars(rule):
            vars(rule)["_numpy_step"] = NumpyStep(rule)
        self._rule, self._step = rule, vars(rule)["_numpy_step"]
        self._values = arrays_of(rule, states)
        self._told: set[str] = set()

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
                self._notice("underflow", 0)
            columns.append(array.tolist() if array.ndim == 1 else map(tuple, array.T.tolist()))
        return [self._rule.State(*lane) for lane in zip(*columns, strict=True)]

    def _notice(self, kind: str, _: int) -> None:
        if kind not in self._told:
            self._told.add(kind)
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
