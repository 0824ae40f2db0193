"""Run loss-scaling rules in NumPy, thousands side by side. Each run is a *lane*: one index of the arrays' last axis."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.rules.checks import SMALLEST_FLOAT32
from mindformers_adaptive.rules.description import is_of_this_package
from mindformers_adaptive.rules.numpy_form import NumpyStep, lower_to_numpy

__all__ = ["Lanes"]

_ONE = np.int32(1)


class Lanes:
    """Runs of loss-scaling rules, computed side by side in NumPy. The rules may differ only in constants.

    Args:
        rules (Sequence[Rule]): the rule of each lane; all of one class, with equal ``rule.traced.shape``.
        states (Sequence[NamedTuple]): the state of each lane before the first step.

    Attributes:
        loss_scale (NDArray): the loss scales of the next step, float32 of shape (lanes,).

    Examples:
        >>> from mindformers_adaptive.rules.adaptive import AdaptiveRule
        >>> rules = [AdaptiveRule(), AdaptiveRule(scale_factor=4)]
        >>> lanes = Lanes(rules, [rule.start(2.0**20) for rule in rules])
        >>> lanes.step(np.array([True, True]), np.array([np.nan, np.nan]))
        >>> np.log2(lanes.loss_scale).tolist()
        [19.0, 18.0]
    """

    def __init__(self, rules: Sequence[Any], states: Sequence[Any]) -> None:
        rule = rules[0]
        self._rule, self._fields, self._count = rule, rule.fields, len(rules)
        self._step = _step_of(rules)
        self._values = self._arrays(states)
        self._shows = "largest_gradient" in self._step.inputs
        numbers = [field for field in self._fields if field.parts or not field.shape]
        window = [field for field in numbers if "scale_window" in field.keys]
        self._window = (window[0].name, window[0].keys.index("scale_window")) if window else None
        self._told: set[str] = set()

    def _arrays(self, states: Sequence[Any]) -> dict[str, NDArray[Any]]:
        """Return the states of rules as one array per field; its last axis has one index per lane (run)."""
        rows = [state._asdict() for state in states]
        arrays = {field.name: np.array([field.value_in(row) for row in rows], field.dtype).T for field in self._fields}
        clean = ("clean_steps",) if self._rule.counts_clean_steps else ()
        for name in (*clean, "skipped_steps", "consecutive_overflows"):
            arrays[name] = np.array([row[name] for row in rows], np.int32)
        return {**arrays, "loss_scale": np.array([row["loss_scale"] for row in rows], np.float32)}

    @property
    def loss_scale(self) -> NDArray[np.float32]:
        return self._values["loss_scale"]

    @property
    def scale_window(self) -> NDArray[np.int32] | None:
        """NDArray, optional: the scale window of each lane (run) in steps, int32; None for rules without a window."""
        if self._window is None:
            return None
        name, part = self._window
        window = self._values[name]
        return window if window.ndim == 1 else window[part]

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
        if self._shows:
            # The step function takes float32 numbers. A gradient below the smallest normal float32 number becomes 0.
            gradient = np.asarray(largest_gradient)
            tiny = np.abs(gradient) < SMALLEST_FLOAT32
            values["largest_gradient"] = np.where(tiny, 0.0, gradient).astype(np.float32)
        after = self._step.function(self._count, *map(values.__getitem__, self._step.inputs))
        values.update(zip(self._step.outputs, after, strict=True))
        # Make new arrays for the counters instead of changing the arrays in place. The step function may have returned
        # the array of a counter as a field of the rule, too, and this field must keep its value.
        values["skipped_steps"] = values["skipped_steps"] + overflow
        values["consecutive_overflows"] = (values["consecutive_overflows"] + _ONE) * overflow

    def states(self) -> list[Any]:
        """Return the rule states of all lanes (runs) as NamedTuples."""
        names = ("loss_scale", "skipped_steps", "consecutive_overflows", "clean_steps")
        columns = {name: self._values[name].tolist() for name in names if name in self._values}
        for field in self._fields:
            array = self._values[field.name]
            if field.dtype == "float32" and (np.abs(array[array != 0]) < SMALLEST_FLOAT32).any():
                self._notice("underflow", 0)
            is_vector = field.shape and not field.parts
            columns |= field.by_key(map(tuple, array.T.tolist()) if is_vector else array.tolist())
        return [
            self._rule.State(**dict(zip(columns, lane, strict=True))) for lane in zip(*columns.values(), strict=True)
        ]

    def _notice(self, kind: str, _: int) -> None:
        if kind not in self._told:
            self._told.add(kind)
            warnings.warn(
                f"The rule {self._rule.name!r} computed a subnormal number (below 2^-126). Some devices flush such "
                "numbers to 0, so the rule could behave differently there. Clamp the value from below, for example by "
                "maximum(x, 2.0**-100).",
                stacklevel=4,
            )


def _step_of(rules: Sequence[Any]) -> NumpyStep:
    first, steps = rules[0], [rule.traced for rule in rules]
    # Watch only users' rules for subnormal numbers: the rules of this package never compute one.
    is_watched = not is_of_this_package(type(first))
    if any(rule is not first for rule in rules):
        shape = steps[0].shape
        if any(step.shape != shape for step in steps):
            raise ValueError("All 'rules' must have the same traced.shape. Group the rules by traced.shape first.")
        return lower_to_numpy(first.name, steps, is_watched)
    # Each call of Rule.step() creates a new Lanes object. So store the generated function on the rule and reuse it.
    if "_single" not in vars(first):
        vars(first)["_single"] = lower_to_numpy(first.name, steps[:1], is_watched)
    step: NumpyStep = vars(first)["_single"]
    return step
