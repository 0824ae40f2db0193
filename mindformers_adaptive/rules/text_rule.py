"""Rules whose step is one text: a function that NumPy runs, and that MindSpore compiles into the update cell."""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mindformers_adaptive.rules.base import Rule
from mindformers_adaptive.rules.checks import LARGEST_FLOAT32, SMALLEST_FLOAT32
from mindformers_adaptive.rules.formats import FLOAT16, Format, find_format
from mindformers_adaptive.rules.text_check import check_text

__all__ = [
    "BOUNDS",
    "Lanes",
    "TextRule",
    "as_array",
    "max_safe_exponent",
    "possible_exponents",
    "safe_exponents",
]

# What a text can take by the name of a parameter, beside the rule's fields and constants.
_COUNTS = ("skipped_steps", "consecutive_overflows")
_SHOWN = ("largest_gradient", "gradient_known", "max_safe_exponent")
BOUNDS = ("min_exponent", "max_exponent", "min_loss_scale", "max_loss_scale")


class Lanes:
    """Runs of text rules of one class side by side: their states as arrays, with one lane for each run.

    Args:
        rules (Sequence[TextRule]): of each lane.
        states (Sequence[NamedTuple]): of each lane, before the first step.

    Attributes:
        loss_scale (NDArray): float64 of shape (lanes,), for the next step.

    Examples:
        >>> from mindformers_adaptive.rules.guided import GuidedRule
        >>> rules = [GuidedRule(), GuidedRule(exchange_rate=5)]
        >>> lanes = Lanes(rules, [rule.start(2.0**20) for rule in rules])
        >>> lanes.step(np.array([True, False]), np.array([np.nan, 1.0]))
        >>> np.log2(lanes.loss_scale).tolist()
        [10.0, 10.0]
    """

    def __init__(self, rules: Sequence[TextRule], states: Sequence[Any]) -> None:
        first = rules[0]
        self._text, self._inputs, self._by_bits = type(first).text, first.inputs, first.moves_by_bits
        self._fields, self._state_class = first.fields, first.State
        self._shows = bool(first.signals)
        self._largest = np.array([rule.gradient_format.largest for rule in rules])
        self._constants = _constants_of(tuple(rules))
        self.loss_scale = np.array([state.loss_scale for state in states], np.float64)
        values = [state._asdict() for state in states]
        # The lanes are the last axis.
        self._values = {
            field.name: np.array([field.value_in(each) for each in values], field.dtype).T for field in self._fields
        }
        for name in _COUNTS:
            self._values[name] = np.array([getattr(state, name) for state in states], np.int32)

    @property
    def scale_window(self) -> NDArray[np.int64] | None:
        """NDArray, optional: the windows in steps, int64 of shape (lanes,); None for rules without one."""
        for field in self._fields:
            if "scale_window" in field.keys:
                return np.asarray(field.by_key(self._values[field.name])["scale_window"], np.int64)
        return None

    def run(self, overflow: NDArray[np.bool_], largest_gradient: NDArray[np.float64]) -> Mapping[str, Any]:
        """Return what the text returns for a step; the state stays as it is."""
        given = {**self._constants, **self._values, "overflow": overflow}
        given["loss_scale"] = self.loss_scale.astype(np.float32)
        if self._by_bits:
            given["exponent"] = np.frexp(self.loss_scale)[1].astype(np.int32) - np.int32(1)
        if self._shows:
            known, given["max_safe_exponent"] = safe_exponents(largest_gradient, self._largest)
            given["gradient_known"] = known & ~overflow
            given["largest_gradient"] = np.asarray(largest_gradient, np.float32)
        with np.errstate(all="ignore"):
            return self._text(*[given[name] for name in self._inputs])

    def step(self, overflow: NDArray[np.bool_], largest_gradient: NDArray[np.float64]) -> None:
        """Take a step in every lane.

        Args:
            overflow (NDArray): bool of shape (lanes,).
            largest_gradient (NDArray): float64 of shape (lanes,), nan where it is not known.
        """
        after = self.run(overflow, largest_gradient)
        bounds = self._constants
        if self._by_bits:
            exponent = np.clip(after["exponent"], bounds["min_exponent"], bounds["max_exponent"])
            self.loss_scale = np.ldexp(1.0, np.broadcast_to(exponent, overflow.shape))
        else:
            bounded = np.clip(after["loss_scale"], bounds["min_loss_scale"], bounds["max_loss_scale"])
            self.loss_scale = np.where(np.isnan(bounded), self.loss_scale, bounded.astype(np.float64))
        lanes = self.loss_scale.shape
        for field in self._fields:
            self._values[field.name] = np.broadcast_to(after[field.name], (*field.shape, *lanes))
        self._values["skipped_steps"] = self._values["skipped_steps"] + overflow
        self._values["consecutive_overflows"] = np.where(overflow, self._values["consecutive_overflows"] + 1, 0)

    def states(self) -> list[Any]:
        """Return the state of each lane as the rules have it."""
        values = {"loss_scale": self.loss_scale.tolist()}
        for field in self._fields:
            array = self._values[field.name]
            is_vector = field.shape and not field.parts
            values |= field.by_key(map(tuple, array.T.tolist()) if is_vector else array.tolist())
        values |= {name: self._values[name].tolist() for name in _COUNTS}
        return [
            self._state_class(**dict(zip(values, lane, strict=True))) for lane in zip(*values.values(), strict=True)
        ]


class TextRule(Rule):
    """A rule whose step is a function of arrays, written once.

    ``text`` is a plain function of a module, made of the functions in :mod:`mindformers_adaptive.rules.backend` and of
    arithmetic and comparisons, without branches and loops. Its parameters name what it takes:

    ========================= ======= =================================================================================
    a field of the rule       --      its value before the step
    a key of ``constants``    --      that constant
    ``loss_scale``            float32 the loss scale of the step; or, where the scale is a power of two,
    ``exponent``              int32   its log2
    ``overflow``              bool    whether the step overflowed and was skipped
    ``consecutive_overflows`` int32   overflowed steps in a row before this step
    ``skipped_steps``         int32   overflowed steps before this step
    ``largest_gradient``      float32 the signal: the largest absolute gradient, unscaled
    ``gradient_known``        bool    whether the step was applied, and that is a number above 0
    ``max_safe_exponent``     int32   then the largest n with ``largest_gradient * 2**n`` within the gradient format
    ``min_exponent``, ``max_exponent``, ``min_loss_scale``, ``max_loss_scale``: the bounds of the scale
    ===================================================================================================================

    It returns a dict: the ``loss_scale`` or the ``exponent`` for the next step, and each field. A scale beyond the
    bounds is moved to the nearer one, and NaN leaves the scale as it is. Numbers in it are constants of the module, or
    written as ``int32(1)`` or ``float32(0.5)``.

    Attributes:
        text (Callable): the function.
        constants (Mapping): numbers and vectors, int or float, that the text takes; set by the constructor.
        State (type): the NamedTuple of its states.
        inputs (tuple[str, ...]): what the text takes, in the order of its parameters.
        keeps_bounds (bool): whether an exponent that the text returns is always within the bounds. Default: False.
        moves_by_bits (bool): whether the scale is always a power of two, because the text takes ``exponent``.

    Args:
        min_loss_scale, max_loss_scale (float): the bounds of the scale, as of
            :class:`~mindformers_adaptive.rules.base.Rule`, with its defaults.
        gradient_format (Union[str, Mapping, Format]): the format of the gradients, for ``max_safe_exponent``; as
            :func:`~mindformers_adaptive.rules.formats.find_format` takes it. Default: "float16".

    Raises:
        ValueError: when the class is made, if ``text`` has something that MindSpore cannot compile for every device;
            when the rule is first used, if it takes or returns something unknown, or of another dtype or shape.

    Examples:
        >>> from mindformers_adaptive.rules.guided import GuidedRule
        >>> rule = GuidedRule()
        >>> issubclass(GuidedRule, TextRule), rule.moves_by_bits
        (True, True)
        >>> state = rule.step(rule.start(2.0**16), overflow=False, largest_gradient=1.0)
        >>> state.loss_scale, state.skipped_steps
        (256.0, 0)
    """

    text: ClassVar[Callable[..., Mapping[str, Any]]]
    State: ClassVar[type[Any]]
    inputs: ClassVar[tuple[str, ...]] = ()
    moves_by_bits: ClassVar[bool] = False
    keeps_bounds: ClassVar[bool] = False
    lanes = Lanes
    constants: Mapping[str, Any] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "text" in vars(cls):
            check_text(cls.name, cls.text)
            cls.inputs = tuple(inspect.signature(cls.text).parameters)
            cls.moves_by_bits = "exponent" in cls.inputs
        cls.State = namedtuple(f"{cls.__name__}State", ["loss_scale", *cls.own_keys(), *_COUNTS])  # type: ignore[misc]

    def __init__(
        self,
        min_loss_scale: float = 1.0,
        max_loss_scale: float | None = None,
        gradient_format: str | Mapping[str, Any] | Format = "float16",
    ) -> None:
        super().__init__(min_loss_scale, max_loss_scale)
        self.gradient_format = find_format(gradient_format)
        self.min_exponent = math.ceil(math.log2(self.min_loss_scale))
        self.max_exponent = math.frexp(self.max_loss_scale)[1] - 1
        if self.moves_by_bits and self.min_exponent > self.max_exponent:
            raise ValueError(
                "There must be a power of two from 'min_loss_scale' to 'max_loss_scale', but got "
                f"{self.min_loss_scale} and {self.max_loss_scale}. Lower the first or raise the second."
            )

    def start_values(self, loss_scale: float) -> dict[str, Any]:
        """Return the rule's own state before the first step.

        Args:
            loss_scale (float): the initial scale, a power of two where the rule needs one.

        Returns:
            dict[str, Any], by the names of :meth:`own_keys`; what is left out starts at 0.
        """
        return {}

    def start(self, loss_scale_value: float, *, argument: str = "loss_scale_value") -> Any:
        """Return the state before the first step.

        Args:
            loss_scale_value (float): the initial scale, within the bounds. Where the scale is a power of two, another
                number gives a warning, and the nearest power of two below is used that lies within the bounds.
            argument (str): the name of ``loss_scale_value`` in messages. Default: "loss_scale_value".

        Returns:
            NamedTuple, ``State`` of the class: ``loss_scale``, the rule's own state, ``skipped_steps`` and
            ``consecutive_overflows``.

        Raises:
            TypeError: if ``loss_scale_value`` is not a number.
            ValueError: if it is not finite, not positive or out of its bounds.
        """
        loss_scale = self.checked_start(loss_scale_value, argument)
        power = self._power_of_two(loss_scale)
        if power != loss_scale:
            warnings.warn(
                f"'{argument}' must be a power of two here, but got {loss_scale}: training starts at {power}.",
                stacklevel=2,
            )
        values: dict[str, Any] = {"loss_scale": power, **dict.fromkeys(_COUNTS, 0)}
        for field in self.fields:
            values |= field.by_key(np.zeros(field.shape, field.dtype).tolist())
        state = self.State(**{**values, **self.start_values(power)})
        self._try_text(state)
        return state

    def step(self, state: Any, overflow: bool, largest_gradient: float | None = None) -> Any:
        lanes = Lanes([self], [state])
        lanes.step(np.array([overflow]), np.array([math.nan if largest_gradient is None else largest_gradient]))
        return lanes.states()[0]

    @property
    def lane_shapes(self) -> tuple[Any, ...]:
        """tuple: the shapes of the fields and constants; lanes keep them in common arrays."""
        return (*(field.shape for field in self.fields), *(np.shape(value) for value in self.constants.values()))

    def repair_loss_scale(self, loss_scale: float, name: str) -> float:
        bounded = super().repair_loss_scale(loss_scale, name)
        power = self._power_of_two(bounded)
        if power != bounded:
            warnings.warn(
                f"The checkpoint has '{name}' {bounded}, and this cell needs a power of two: {power} is used.",
                stacklevel=3,
            )
        return power

    def _power_of_two(self, loss_scale: float) -> float:
        if not self.moves_by_bits:
            return loss_scale
        return math.ldexp(1.0, max(math.frexp(loss_scale)[1] - 1, self.min_exponent))

    def _try_text(self, state: Any) -> None:
        """Run the text once on two lanes, and refuse what would go wrong later."""
        if getattr(self, "_is_tried", False):
            return
        known = {"loss_scale", "exponent", "overflow", *_COUNTS, *BOUNDS, *self.constants}
        known |= {field.name for field in self.fields} | (set(_SHOWN) if self.signals else set())
        for name in self.inputs:
            if name not in known:
                signal = " It needs signals = ('largest_gradient',)." if name in _SHOWN else ""
                self._refuse(f"takes {name!r}, which is none of {', '.join(sorted(known))}.{signal}")
        for overflow in (True, False):
            lanes = Lanes([self, self], [state, state])
            after = lanes.run(np.array([overflow, False]), np.array([1.0, math.nan]))
            scale = "exponent" if self.moves_by_bits else "loss_scale"
            expected = {field.name: (field.dtype, (*field.shape, 2)) for field in self.fields}
            expected[scale] = ("int32" if self.moves_by_bits else "float32", (2,))
            if not isinstance(after, dict) or after.keys() != expected.keys():
                names = sorted(after) if isinstance(after, dict) else type(after).__name__
                self._refuse(f"must return a dict with {', '.join(sorted(expected))}, but returns {names}.")
            for name, (dtype, shape) in expected.items():
                value = np.asarray(after[name])
                if value.dtype != dtype or np.broadcast_shapes(value.shape, shape) != shape:
                    self._refuse(
                        f"must return {name!r} as {dtype} of shape {shape[:-1]}, but returns {value.dtype} of shape "
                        f"{value.shape[:-1]}. Put {dtype}(...) around it, or correct the field."
                    )
        self._is_tried = True

    def _refuse(self, problem: str) -> NoReturn:
        raise ValueError(f"The text of the rule {self.name!r} {problem}")


@functools.lru_cache(maxsize=16)
def _constants_of(rules: tuple[TextRule, ...]) -> dict[str, NDArray[Any]]:
    """The constants of all lanes: float32 or int32, a scalar of shape (lanes,), a vector of shape (n, lanes or 1)."""
    names = (*BOUNDS, *rules[0].constants)
    found = {}
    for name in names:
        each = [as_array(rule.constants[name] if name in rule.constants else getattr(rule, name)) for rule in rules]
        same = all(np.array_equal(each[0], one) for one in each)
        found[name] = each[0][..., np.newaxis] if same else np.stack(each, axis=-1)
    return found


def as_array(value: ArrayLike) -> NDArray[Any]:
    """Return a number or a vector as an array of int32, float32 or bool."""
    array = np.asarray(value)
    return array if array.dtype == np.bool_ else array.astype(np.float32 if array.dtype.kind == "f" else np.int32)


def possible_exponents(gradient_format: Format) -> range:
    """Return what :func:`max_safe_exponent` can be, of normal float32 numbers; the first is that of the largest ones.

    But for that one, ``largest * 2**-n`` is a normal float32 number for each n.
    """
    _, exponent = math.frexp(gradient_format.largest)
    return range(exponent - 129, exponent + 126)


def max_safe_exponent(largest_gradient: float | None, gradient_format: Format = FLOAT16) -> int | None:
    """Return log2 of the largest power of two at which a gradient stays within a format, or None if it shows nothing.

    It is the largest integer n with ``largest_gradient * 2**n <= largest``, in FP16 65504. That needs comparisons only
    and no logarithm, whose last bit differs from device to device; so a device finds the same n, by counting how many
    of the numbers largest * 2**-n are at least as large as the gradient.

    Args:
        largest_gradient (float, optional): an absolute value, unscaled. 0, a number that is not finite or below the
            normal float32 numbers, which devices flush to 0, and None show nothing.
        gradient_format (Format): the format. Default: float16.

    Examples:
        >>> max_safe_exponent(1.0), max_safe_exponent(65504 / 2.0**18), max_safe_exponent(float("inf"))
        (15, 18, None)
    """
    gradient = math.nan if largest_gradient is None else largest_gradient
    known, exponents = safe_exponents(gradient, gradient_format.largest)
    return int(exponents) if known else None


def safe_exponents(largest_gradient: ArrayLike, largest: ArrayLike = FLOAT16.largest) -> tuple[Any, Any]:
    """Return for each gradient whether it shows something, and :func:`max_safe_exponent`, bool and int32.

    Args:
        largest_gradient (ArrayLike): absolute values, unscaled.
        largest (ArrayLike): the largest number of the format, or of that of each gradient. Default: that of float16.

    Examples:
        >>> known, exponents = safe_exponents([1.0, 0.0])
        >>> known.tolist(), int(exponents[0])
        ([True, False], 15)
    """
    with np.errstate(over="ignore"):
        gradient = np.asarray(largest_gradient, np.float64).astype(np.float32)
    known = (gradient >= SMALLEST_FLOAT32) & (gradient <= LARGEST_FLOAT32)
    fraction, exponent = np.frexp(np.where(known, gradient, np.float32(1.0)))
    largest_fraction, largest_exponent = np.frexp(np.asarray(largest, np.float64))
    return known, (largest_exponent - exponent - (fraction > largest_fraction)).astype(np.int32)
