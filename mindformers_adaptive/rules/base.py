"""What a rule of loss scaling is: the pieces of its state, the signals that it needs, its arguments, and one step."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, ClassVar, NamedTuple

import numpy as np

from mindformers_adaptive.rules.checks import LARGEST_FLOAT32, require_positive

__all__ = ["DEFAULT_LOSS_SCALE", "SIGNALS", "STEP_FIELDS", "STEP_LIMIT"]
__all__ += ["Field", "Rule", "to_integer", "to_number"]

# The initial loss scale of MindFormers' TrainingArguments.
DEFAULT_LOSS_SCALE = 2.0**16

# Steps are counted up to here: about 34 years at a step a second, and far from where int32 would wrap.
STEP_LIMIT = 2**30


class Field(NamedTuple):
    """A piece of a rule's state, which the update cell keeps as one Parameter.

    Attributes:
        name (str): the attribute of the update cell.
        dtype (str): "int32" or "float32".
        shape (tuple[int, ...]): () or (n,).
        parts (tuple[str, ...]): what the elements of a vector are called in ``state()``, in records and in reports.
            Without it, a vector stands there as a whole, by the field's name.
        parameter (str): the Parameter's name in checkpoints. Default: the rule's name, ``_`` and ``name``.

    Examples:
        >>> field = Field("mean", "float32")
        >>> field.shape, field.parts
        ((), ())
    """

    name: str
    dtype: str = "int32"
    shape: tuple[int, ...] = ()
    parts: tuple[str, ...] = ()
    parameter: str = ""

    @property
    def keys(self) -> tuple[str, ...]:
        """tuple[str, ...]: the names under which ``state()`` shows it."""
        return self.parts or (self.name,)

    def by_key(self, value: Any) -> dict[str, Any]:
        """Return what its Parameter holds, by the names of ``keys``.

        Args:
            value (Union[int, float, Iterable]): what the Parameter holds, a number or the elements of a vector.

        Returns:
            dict[str, Any], with a vector without named parts as a tuple.
        """
        if self.parts:
            return dict(zip(self.parts, value, strict=True))
        return {self.name: tuple(value) if self.shape else value}

    def value_in(self, values: Mapping[str, Any]) -> Any:
        """Return what its Parameter holds.

        Args:
            values (Mapping[str, Any]): values by name, among them those of ``keys``.

        Returns:
            Union[int, float, Sequence], a number or the elements of a vector.
        """
        return [values[part] for part in self.parts] if self.parts else values[self.name]


# What every update cell counts. The names in checkpoints are those of MindSpore's and MindFormers' own cells.
STEP_FIELDS = (
    Field("cur_iter", parameter="current_iterator_step"),
    Field("last_overflow_iter", parameter="last_overflow_iterator_step"),
    Field("skipped_steps", parameter="skipped_steps"),
    Field("consecutive_overflows", parameter="consecutive_overflows"),
)

# What a train step can hand to an update cell beside the overflow flag, in a Parameter that it assigns.
SIGNALS = {"largest_gradient": Field("largest_gradient", "float32", parameter="largest_gradient")}


class Rule:
    """A rule of loss scaling.

    A subclass has the attributes below, each argument of its constructor as an attribute of the same name, and
    :meth:`step`. A rule of one's own is a :class:`~mindformers_adaptive.rules.text_rule.TextRule`.

    Attributes:
        name (str): of the policy, and of the kind of state in a checkpoint.
        title (str): what messages call it.
        cell (str): the update cell's type in a YAML file.
        fields (tuple[Field, ...]): its state beside the loss scale and ``STEP_FIELDS``.
        signals (tuple[str, ...]): names in ``SIGNALS`` that it needs beside the overflow flag.
        recorded (tuple[str, ...]): what of the state stands in the record of each step.
        start_arguments (tuple[str, ...]): arguments of :meth:`start` beside the loss scale.
        usual_arguments (tuple[str, ...]): those that a YAML section always shows.
        moves_by_one_factor (bool): whether the scale falls at overflows only and rises at applied steps only, by one
            factor at a time, so that the scales in a log tell which steps were skipped. Default: False.
        grid (Mapping[str, Sequence]): for some arguments, the values that ``tune`` tries.
        lanes (Callable): takes rules of this class with equal ``lane_shapes``, and the state of each before the first
            step, and returns their runs, to be stepped side by side: an object as
            :class:`~mindformers_adaptive.rules.text_rule.Lanes`, with ``loss_scale``, ``scale_window``, ``step()`` and
            ``states()``. A rule in plain Python has none.

    Args:
        min_loss_scale (float): the floor of the loss scale, above 0. Default: 1.0, MindSpore's.
        max_loss_scale (float, optional): the cap of the loss scale. Default: None, the largest finite float32.

    Raises:
        TypeError: if a bound is not a number.
        ValueError: if a bound is not finite and above 0, or the first is above the second.

    Examples:
        >>> from mindformers_adaptive.rules.adaptive import AdaptiveRule
        >>> rule = AdaptiveRule(scale_factor=2, max_scale_window=1000, min_scale_window=20)
        >>> isinstance(rule, Rule), rule.name, rule.signals
        (True, 'adaptive', ())
        >>> rule.step(rule.start(2.0**16, 20), overflow=True).loss_scale
        32768.0
    """

    name: ClassVar[str] = ""
    title: ClassVar[str] = "loss scaling"
    cell: ClassVar[str] = "RuleLossScaleUpdateCell"
    fields: tuple[Field, ...] = ()
    signals: ClassVar[tuple[str, ...]] = ()
    recorded: ClassVar[tuple[str, ...]] = ()
    start_arguments: ClassVar[tuple[str, ...]] = ()
    usual_arguments: ClassVar[tuple[str, ...]] = ("loss_scale_value",)
    moves_by_one_factor: bool = False
    grid: ClassVar[Mapping[str, Sequence[Any]]] = {}
    lanes: ClassVar[type[Any]]

    def __init__(self, min_loss_scale: float = 1.0, max_loss_scale: float | None = None) -> None:
        self.min_loss_scale = require_positive("min_loss_scale", min_loss_scale)
        self.max_loss_scale = (
            LARGEST_FLOAT32 if max_loss_scale is None else require_positive("max_loss_scale", max_loss_scale)
        )
        if self.min_loss_scale > self.max_loss_scale:
            raise ValueError(
                f"'min_loss_scale' must not be above 'max_loss_scale', but got {self.min_loss_scale} and "
                f"{self.max_loss_scale}. Lower the first or raise the second."
            )

    def start(self, loss_scale_value: float, *, argument: str = "loss_scale_value") -> Any:
        """Return the state before the first step.

        Args:
            loss_scale_value (float): the initial scale, within the bounds.
            argument (str): the name of ``loss_scale_value`` in messages. Default: "loss_scale_value".

        Returns:
            NamedTuple, with ``loss_scale`` and the names of :meth:`own_keys`.
        """
        raise NotImplementedError

    def step(self, state: Any, overflow: bool, largest_gradient: float | None = None) -> Any:
        """Return the state after a step; ``state`` itself is not changed.

        Args:
            state (NamedTuple): before the step.
            overflow (bool): whether the step overflowed and was skipped.
            largest_gradient (float, optional): the largest absolute value of its gradients, unscaled and before
                clipping, if it was applied. Ignored by a rule without this signal. Default: None, not known.

        Returns:
            NamedTuple, as :meth:`start` returns it.
        """
        raise NotImplementedError

    @property
    def arguments(self) -> dict[str, Any]:
        """dict: the constructor's arguments, by name."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    @classmethod
    def all_arguments(cls) -> dict[str, Any]:
        """Return the constructor's arguments, the initial loss scale and ``start_arguments`` with their defaults.

        Returns:
            dict[str, Any], the usual ones first; ``inspect.Parameter.empty`` for an argument without a default.

        Examples:
            >>> from mindformers_adaptive.rules.guided import GuidedRule
            >>> list(GuidedRule.all_arguments().items())[:3]
            [('loss_scale_value', 65536.0), ('exchange_rate', 1.0), ('scale_factor', 2)]
        """
        of_start = inspect.signature(cls.start).parameters
        defaults = {name: parameter.default for name, parameter in inspect.signature(cls).parameters.items()}
        defaults |= {name: of_start[name].default for name in cls.start_arguments}
        defaults["loss_scale_value"] = DEFAULT_LOSS_SCALE
        return {name: defaults[name] for name in dict.fromkeys((*cls.usual_arguments, *defaults))}

    @classmethod
    def values_fit(cls, **arguments: Any) -> bool:
        """Return whether arguments, each in its range, fit each other; a grid leaves out those that do not.

        Args:
            **arguments (Any): some of :meth:`all_arguments`, by name. The others have their defaults.

        Returns:
            bool, True for a rule whose arguments do not depend on each other.
        """
        return True

    def short_label(self, arguments: Mapping[str, Any]) -> tuple[str, set[str]]:
        """Return a short name of the rule with these arguments.

        Args:
            arguments (Mapping[str, Any]): those of :meth:`all_arguments`, by name.

        Returns:
            tuple[str, set[str]], the short name, and the arguments that it tells.
        """
        return self.name or type(self).__name__, set()

    @property
    def lane_shapes(self) -> tuple[Any, ...]:
        """tuple: what has to be equal for rules of one class to be stepped side by side."""
        return ()

    @classmethod
    def all_fields(cls) -> tuple[Field, ...]:
        """Return the fields of the state that the update cell keeps.

        Returns:
            tuple[Field, ...], the rule's own, with names for their Parameters, then ``STEP_FIELDS`` and the signals.
        """
        own = (field._replace(parameter=field.parameter or f"{cls.name}_{field.name}") for field in cls.fields)
        return (*own, *STEP_FIELDS, *(SIGNALS[name] for name in cls.signals))

    @classmethod
    def own_keys(cls) -> tuple[str, ...]:
        """Return the names of its own state.

        Returns:
            tuple[str, ...], without the loss scale, the step counters and the signals.
        """
        return tuple(key for field in cls.fields for key in field.keys)

    def checked_start(self, loss_scale_value: float, argument: str) -> float:
        """Check an initial loss scale.

        Args:
            loss_scale_value (float): the initial scale, within the bounds.
            argument (str): the name of ``loss_scale_value`` in messages.

        Returns:
            float, rounded to float32.

        Raises:
            TypeError: if ``loss_scale_value`` is not a number.
            ValueError: if it is not finite, not positive or out of its bounds.
        """
        loss_scale = require_positive(argument, loss_scale_value)
        if not self.min_loss_scale <= loss_scale <= self.max_loss_scale:
            raise ValueError(
                f"'{argument}' must lie between 'min_loss_scale' ({self.min_loss_scale}) and 'max_loss_scale' "
                f"({self.max_loss_scale}), but got {loss_scale}. Change the value or that bound."
            )
        return loss_scale

    def to_values(self, state: Any, steps: int, last_event: int | None = None) -> dict[str, Any]:
        """Return what the update cell holds after so many steps that led to a state.

        Args:
            state (NamedTuple): the state of the rule.
            steps (int): how many steps were taken, 0 for the start.
            last_event (int, optional): the step of the last overflow or raise. Default: None, the last step.

        Returns:
            dict, as ``state()`` of the update cell returns it, without the signals.

        Examples:
            >>> from mindformers_adaptive.rules.adaptive import AdaptiveRule
            >>> rule = AdaptiveRule()
            >>> values = rule.to_values(rule.step(rule.start(2.0**16), overflow=False), steps=1)
            >>> values["cur_iter"], values["last_overflow_iter"]
            (2, 0)
            >>> rule.from_values(2.0**16, values).clean_steps
            1
        """
        steps = min(steps, STEP_LIMIT - 1)
        last_event = steps if last_event is None else min(last_event, steps)
        values = {**state._asdict(), "cur_iter": steps + 1, "last_overflow_iter": last_event}
        keys = [key for field in (*self.fields, *STEP_FIELDS) for key in field.keys]
        return {key: min(values[key], STEP_LIMIT) if isinstance(values[key], int) else values[key] for key in keys}

    def from_values(self, loss_scale: float, values: Mapping[str, Any]) -> Any:
        """Return the state that :meth:`to_values` would turn into these values.

        Args:
            loss_scale (float): the loss scale of the state.
            values (Mapping[str, Any]): as :meth:`to_values` returns them.

        Returns:
            NamedTuple, as :meth:`start` returns it.
        """
        state = self.start(loss_scale)
        return state._replace(**{name: values[name] for name in state._fields if name in values})

    def repair_loss_scale(self, loss_scale: float, name: str) -> float:
        """Return a restored loss scale, moved to the nearer bound with a warning if it is out of bounds.

        Args:
            loss_scale (float): the restored loss scale.
            name (str): the Parameter or argument that holds it.

        Returns:
            float, within the bounds; where the rule needs a power of two, the nearest one below.

        Raises:
            ValueError: if it is not finite and above 0.
        """
        if not (math.isfinite(loss_scale) and loss_scale > 0):
            raise ValueError(
                f"The checkpoint has '{name}' {loss_scale}; a loss scale must be finite and above 0. Resume from "
                f"another checkpoint, or set '{name}'."
            )
        bounded = min(max(loss_scale, self.min_loss_scale), self.max_loss_scale)
        if bounded != loss_scale:
            warnings.warn(
                f"The checkpoint has '{name}' {loss_scale}, which is not between 'min_loss_scale' and "
                f"'max_loss_scale': {bounded} is used.",
                stacklevel=3,
            )
        return bounded

    def repair(
        self, values: Mapping[str, Any], loss_scale: float, restored: Collection[str] | None = None
    ) -> tuple[dict[str, Any], list[str]]:
        """Return values that the rule can go on with, and a sentence for each thing that had to be changed.

        Args:
            values (dict): as ``state()`` of the update cell returns it.
            loss_scale (float): for the next step, within the bounds.
            restored (Collection[str], optional): the fields that a checkpoint had, by name. Default: None, all.

        Returns:
            tuple[dict, list[str]]; the list is empty where nothing had to be changed.
        """
        repaired: dict[str, Any] = dict(values)
        problems = self._keep_within(repaired, "cur_iter", 1, STEP_LIMIT, 1)
        last_step = repaired["cur_iter"] - 1
        problems += self._keep_within(repaired, "last_overflow_iter", 0, last_step, last_step, ", the last step")
        problems += self._keep_within(repaired, "skipped_steps", 0, STEP_LIMIT, 0)
        skipped, meaning = repaired["skipped_steps"], ", the number of skipped steps"
        problems += self._keep_within(repaired, "consecutive_overflows", 0, skipped, 0, meaning)
        return repaired, self._repair_own(repaired, loss_scale, restored) + problems

    def _keep_within(
        self, values: dict[str, Any], key: str, least: int, most: int, otherwise: int, meaning: str = ""
    ) -> list[str]:
        """Set a counter that no run can reach to another value, and return a sentence if it was one."""
        value = values[key]
        if least <= value <= most:
            return []
        values[key] = otherwise
        name = next(field.parameter for field in self.all_fields() if field.name == key)
        limits = f"must lie between {least} and {most}{meaning}"
        return [f"The checkpoint has '{name}' {value}, which {limits}: {otherwise} is used."]

    def _repair_own(self, values: dict[str, Any], loss_scale: float, restored: Collection[str] | None) -> list[str]:
        """Change the rule's own values where it cannot go on with them, and return a sentence for each problem."""
        problem = self._missing_state(values, restored) or self.find_state_problem(values)
        if problem is None:
            return []
        start = self.to_values(self.start(loss_scale), values["cur_iter"] - 1)
        values |= {key: start[key] for key in (*self.own_keys(), "last_overflow_iter")}
        return [f"{problem}: it starts afresh at loss scale {loss_scale:g}."]

    def _missing_state(self, values: Mapping[str, Any], restored: Collection[str] | None) -> str | None:
        if restored is None or "cur_iter" not in restored:
            return None
        there = [field.name in restored for field in self.fields]
        if all(there) or values["cur_iter"] <= 1:
            return None
        if any(there):
            return f"The checkpoint has an older form of the state of {self.title}"
        return f"The checkpoint has {values['cur_iter'] - 1} steps but no state of {self.title}"

    def find_state_problem(self, values: Mapping[str, Any]) -> str | None:
        """Say why the rule cannot go on from its own part of a state.

        Args:
            values (Mapping[str, Any]): as ``state()`` of the update cell returns it.

        Returns:
            str, optional: the reason, for a sentence; None if it can go on.

        Examples:
            >>> from mindformers_adaptive.rules.guided import GuidedRule
            >>> rule = GuidedRule()
            >>> values = rule.to_values(rule.start(2.0**16), steps=0)
            >>> rule.find_state_problem(values) is None
            True
            >>> rule.find_state_problem({**values, "contradictions": 7})
            'The checkpoint has a state of gradient-guided scaling that this cell cannot have'
        """
        if all(np.isfinite(values[key]).all() for key in self.own_keys()):
            return None
        return f"The checkpoint has a state of {self.title} that is not finite"

    def describe_fresh_start(self, values: Mapping[str, Any]) -> str:
        """Return how training goes on where a checkpoint has no state.

        Args:
            values (Mapping[str, Any]): as ``state()`` of the update cell returns it.

        Returns:
            str, for a sentence.
        """
        return f"with a fresh state of {self.title}"


def to_integer(name: str, value: Any) -> int:
    """Return a counter of a state as an int32, whether it is a number or a tensor of one element; raise TypeError."""
    number = to_number(value)
    if isinstance(number, bool) or not isinstance(number, Integral):
        raise TypeError(f"'{name}' must be an integer, but got {value!r}. Give what state_dict() returned.")
    if not -(2**31) <= int(number) < 2**31:
        raise ValueError(f"'{name}' must fit into 32 bits, but got {number}. Give what state_dict() returned.")
    return int(number)


def to_real(name: str, value: Any) -> float:
    """Return a number of a state as a float, whether it is a number or a tensor of one element; raise TypeError."""
    number = to_number(value)
    if isinstance(number, bool) or not isinstance(number, Real):
        raise TypeError(f"'{name}' must be a number, but got {value!r}. Give what state_dict() returned.")
    return float(number)


def to_number(value: Any) -> Any:
    """Return a tensor of one element, of whatever library, as its number, and a number as it is."""
    return value.item() if hasattr(value, "item") else value
