"""``Rule``: the base class of all loss-scaling rules, from which users derive their rules too."""

import functools
import inspect
import math
import types
import warnings
from collections import namedtuple
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import numpy as np

from mindformers_adaptive.rules.checks import LARGEST_FLOAT32, require_positive, to_float32
from mindformers_adaptive.rules.description import OF_EVERY_RULE, arguments_of, check_description, checked_value
from mindformers_adaptive.rules.fields import Field, fields_of, is_of_this_package
from mindformers_adaptive.rules.formats import Format, find_format
from mindformers_adaptive.rules.lanes import Lanes, NumpyStep, arguments_of_step
from mindformers_adaptive.rules.operations import NUMPY
from mindformers_adaptive.rules.step_check import check_step


class _CheckedOnCreation(type):
    """Metaclass that freezes a rule's attributes after the constructor, and checks the rule and its step."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        rule = super().__call__(*args, **kwargs)
        # MindSpore compiles a rule's step once. A list that changes afterwards would contradict the compiled step, so
        # freeze lists.
        vars(rule).update({name: _frozen(value) for name, value in vars(rule).items()})
        check_description(rule, Rule)
        vars(rule)["_is_made"] = True
        if not is_of_this_package(cls):
            check_step(rule)
        if rule.moves_by_bits and rule.min_exponent > rule.max_exponent:
            raise ValueError(
                "There must be a power of two from 'min_loss_scale' to 'max_loss_scale', but got "
                f"{rule.min_loss_scale} and {rule.max_loss_scale}. Lower 'min_loss_scale' or raise 'max_loss_scale'."
            )
        return rule

    @property
    def __signature__(cls) -> inspect.Signature:
        """inspect.Signature: the signature of the rule's constructor, which __call__() of the metaclass would hide."""
        parameters = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
        return inspect.Signature(list(parameters.values())[1:])


class Rule(metaclass=_CheckedOnCreation):
    """A loss-scaling rule: a state, and a function that computes the state after each training step.

    A subclass has :meth:`make_step`, which returns the step, an ordinary function. NumPy runs this function for many
    runs side by side, and MindSpore compiles the same function for the update cell. A subclass may have
    :meth:`first_state`, and a constructor that keeps each argument as an attribute of the same name. Once the rule is
    made its attributes cannot change: a list becomes a tuple, a set a frozenset, and a dict or an array a copy that is
    read only.

    Attributes:
        name (str): the name of the rule, in rules and checkpoints.
        title (str): the name of the rule in messages. Default: "loss scaling".
        state (Mapping): the values that the rule keeps from step to step, besides the loss scale: ``int32``,
            ``float32``, ``float32[8]`` for a vector of 8, or a dict of names for a vector with named parts.
        needs_gradients (bool): whether it needs the largest gradient of each step beside the overflow flag. Default:
            False.
        recorded (tuple[str, ...]): the names of the state values that the record of each step has.

    Args:
        min_loss_scale (float): the floor of the loss scale, above 0. Default: 1.0, MindSpore's.
        max_loss_scale (float, optional): the upper bound of the loss scale. Default: None, the largest finite float32.
        gradient_format (Union[str, Mapping, Format]): the format of the gradients, for ``max_safe_exponent``; as
            :func:`~mindformers_adaptive.rules.formats.find_format` takes it. Default: "float16".

    Raises:
        TypeError: if an argument is not of its type.
        ValueError: if an argument is out of its range, or the step is invalid; the message says in which line, and what
            to write instead.

    Examples:
        >>> from mindformers_adaptive.rules import Rule
        >>> class Halve(Rule):
        ...     name = "halve"
        ...
        ...     def make_step(self, xp):
        ...         half = xp.floats(0.5)
        ...
        ...         def step(loss_scale, overflow):
        ...             return {"loss_scale": xp.where(overflow, loss_scale * half, loss_scale)}
        ...
        ...         return step
        >>> rule = Halve()
        >>> rule.step(rule.start(1024.0), overflow=True).loss_scale
        512.0
    """

    name: ClassVar[str] = ""
    title: str = "loss scaling"
    state: Mapping[str, Any] = {}
    needs_gradients: bool = False
    recorded: tuple[str, ...] = ()

    # Only the rules of this package set the attributes below.

    # The ``type`` of the rule's update cell in a YAML file.
    cell: ClassVar[str] = "RuleLossScaleUpdateCell"
    # Parameter names by field, for fields whose Parameter is not named "<rule>_<field>".
    parameter_names: ClassVar[Mapping[str, str]] = {}
    # The state fields that never change in a training with this rule's arguments, and their constant values. The update
    # cell needs no Parameter for such a field.
    fixed_state: Mapping[str, int] = {}
    # Arguments of start() besides the initial loss scale.
    start_arguments: ClassVar[tuple[str, ...]] = ()
    # Arguments that a YAML section for this rule always shows, even with default values.
    usual_arguments: ClassVar[tuple[str, ...]] = ("loss_scale_value",)
    # Fields that earlier versions of the rule had, and by which a checkpoint of these versions is recognized.
    former_fields: ClassVar[tuple[Field, ...]] = ()
    # Whether the state has clean_steps, the number of steps since the last overflow or raise. The update cell stores
    # this number as the difference of two step counters.
    counts_clean_steps: ClassVar[bool] = False
    # Fields that a checkpoint must have to contain a state of this rule; None means all fields of the rule.
    identifying_fields: ClassVar[tuple[str, ...] | None] = None
    # Whether the loss scale that the step returns always lies between min_loss_scale and max_loss_scale.
    keeps_bounds: ClassVar[bool] = False

    def __init__(
        self,
        min_loss_scale: float = 1.0,
        max_loss_scale: float | None = None,
        gradient_format: str | Mapping[str, Any] | Format = "float16",
    ) -> None:
        self.min_loss_scale = require_positive("min_loss_scale", min_loss_scale)
        self.max_loss_scale = (
            LARGEST_FLOAT32 if max_loss_scale is None else require_positive("max_loss_scale", max_loss_scale)
        )
        if self.min_loss_scale > self.max_loss_scale:
            raise ValueError(
                f"'min_loss_scale' must not be above 'max_loss_scale', but got {self.min_loss_scale} and "
                f"{self.max_loss_scale}. Lower 'min_loss_scale' or raise 'max_loss_scale'."
            )
        self.gradient_format = find_format(gradient_format)

    def __repr__(self) -> str:
        # An error while the rule is created may show it, before it has all attributes.
        names = [name for name in arguments_of(type(self)) if name in vars(self)]
        return f"{type(self).__name__}({', '.join(f'{name}={vars(self)[name]!r}' for name in names)})"

    @property
    def min_exponent(self) -> int:
        """int: log2 of the smallest power of two within the bounds of the loss scale."""
        return math.ceil(math.log2(self.min_loss_scale))

    @property
    def max_exponent(self) -> int:
        """int: log2 of the largest power of two within the bounds of the loss scale."""
        return math.frexp(self.max_loss_scale)[1] - 1

    def first_state(self, loss_scale: float) -> Mapping[str, Any]:
        """Return the initial values of the rule's own state fields. A subclass may override this method.

        Args:
            loss_scale (float): the initial scale; a power of two where the rule moves the exponent.

        Returns:
            Mapping[str, Any], numbers by the names of the state fields and their parts; a field that is left out
            starts at 0.
        """
        return {}

    def make_step(self, xp: Any) -> Any:
        """Return the function that computes the state after a training step. Every subclass must define this method.

        The arguments of the function are some of these names: ``loss_scale``, float32, or ``exponent``, int32, its
        log2, for a rule whose scale is always a power of two; ``overflow``, bool; the names of the state;
        ``skipped_steps`` and ``consecutive_overflows``, int32, the overflowed steps before this one, in all and in a
        row; with ``needs_gradients`` also ``largest_gradient``, float32; ``gradient_known``, bool;
        ``max_safe_exponent``, int32. The function returns a dict with the next ``loss_scale`` or ``exponent`` and the
        next value of each name of the state. A loss scale beyond its bounds becomes the nearer bound; NaN keeps the
        old loss scale.

        Args:
            xp (Namespace): the operations, of NumPy or of MindSpore. ``xp.ints(...)`` and ``xp.floats(...)`` make
                constants, ``xp.tabulate(...)`` a table; call them here and not in the returned function.

        Returns:
            Callable, from values to a dict of values.
        """
        raise NotImplementedError

    def find_state_problem(self, values: Mapping[str, Any]) -> str | None:
        """Return why the rule cannot continue from a restored state, or None. A subclass may check its own fields.

        Called only for a state from a checkpoint or ``load_state_dict()``, never for a state that training steps
        computed.

        Args:
            values (Mapping[str, Any]): as ``state()`` of the update cell returns it; all numbers are finite that are
                finite in the first state.

        Returns:
            str, optional: the reason, as part of a message; the rule's own state then starts afresh. None if there is
            no problem.
        """
        return None

    def fit_state(self, values: dict[str, Any], restored: Collection[str] | None) -> list[str]:
        """Adapt a restored state to the arguments of this rule, and return a sentence for each change.

        A subclass may fit its own fields, such as a window that was longer before.

        Args:
            values (dict): as ``state()`` of the update cell returns it; is changed.
            restored (Collection[str], optional): the names of the fields that a checkpoint had; None for all.

        Returns:
            list[str], a sentence for each change.
        """
        return []

    def start(self, loss_scale_value: float, *, argument: str = "loss_scale_value") -> Any:
        """Return the state of the rule before the first training step.

        Args:
            loss_scale_value (float): the initial scale, within the bounds. Where the scale is a power of two, another
                number gives a warning, and the nearest power of two below is used that lies within the bounds.
            argument (str): the name of ``loss_scale_value`` in messages. Default: "loss_scale_value".

        Returns:
            NamedTuple: ``loss_scale``, the rule's own state, ``skipped_steps`` and ``consecutive_overflows``.

        Raises:
            TypeError: if ``loss_scale_value`` is not a number.
            ValueError: if it is not finite, not positive or out of its bounds, or the first state is not of its dtypes.
        """
        loss_scale = require_positive(argument, loss_scale_value)
        if not self.min_loss_scale <= loss_scale <= self.max_loss_scale:
            raise ValueError(
                f"'{argument}' must lie between 'min_loss_scale' ({self.min_loss_scale}) and 'max_loss_scale' "
                f"({self.max_loss_scale}), but got {loss_scale}. Change the value or one of the bounds."
            )
        power = self.nearest_scale(loss_scale)
        if power != loss_scale:
            warnings.warn(
                f"'{argument}' must be a power of two for the rule {self.name!r}, but got {loss_scale}. "
                f"Training starts at {power} instead.",
                stacklevel=2,
            )
        first = self.first_state(power)
        if not isinstance(first, Mapping):
            raise ValueError(
                f"The first state of the rule {self.name!r} must be a dict, but is {first!r}. Return a dict from "
                "first_state()."
            )
        values: dict[str, Any] = {}
        for field in self.fields:
            zeros = np.zeros(field.shape, field.dtype).tolist()
            for key, zero in field.by_key(zeros).items():
                values[key] = checked_value(self, key, field.dtype, first.get(key, zero), zero)
        if unknown := [key for key in first if key not in values]:
            raise ValueError(
                f"The first state of the rule {self.name!r} has {', '.join(map(repr, unknown))}, but the rule's "
                f"attribute 'state' declares only {', '.join(values) or '{}'}. Correct first_state() or 'state'."
            )
        return self.State(**{**dict.fromkeys(self.State._fields, 0), **values, "loss_scale": power})

    def step(self, state: Any, overflow: bool, largest_gradient: float | None = None) -> Any:
        """Return the state of the rule after a training step; ``state`` itself is not changed.

        Args:
            state (NamedTuple): the state before the step.
            overflow (bool): whether the step overflowed and was skipped.
            largest_gradient (float, optional): the largest absolute value of its gradients, unscaled and before
                clipping, if it was applied. Ignored by a rule that needs no gradients. Default: None, not known.

        Returns:
            NamedTuple, as :meth:`start` returns it.

        Raises:
            TypeError: if ``overflow`` is neither True nor False, or ``state`` is not one of this rule.
        """
        if getattr(state, "_fields", None) != self.State._fields:
            raise TypeError(
                f"'state' must be a state from start() or step() of the rule {self.name!r}, but got {state!r}."
            )
        if overflow not in (0, 1):
            raise TypeError(f"'overflow' must be True or False, but got {overflow!r}. Give one of the two.")
        gradient = math.nan if largest_gradient is None else to_float32(largest_gradient)
        lanes = Lanes(self, [state])
        lanes.step(np.array([bool(overflow)]), np.array([gradient]))
        return lanes.states()[0]

    @functools.cached_property
    def fields(self) -> tuple[Field, ...]:
        """tuple[Field, ...]: the fields of the rule's state, which the update cell keeps as Parameters."""
        return fields_of(self)

    @functools.cached_property
    def State(self) -> Any:  # noqa: N802
        """type: the NamedTuple class of this rule's states."""
        keys = [key for field in self.fields for key in field.keys]
        clean = ["clean_steps"] if self.counts_clean_steps else []
        names = ("loss_scale", *keys, *clean, "skipped_steps", "consecutive_overflows")
        return _state_class(f"{type(self).__name__}State", names)

    @functools.cached_property
    def moves_by_bits(self) -> bool:
        """bool: whether the loss scale is always a power of two, because the rule's step takes ``exponent``."""
        return "exponent" in arguments_of_step(self.make_step(NUMPY))

    @functools.cached_property
    def _numpy_step(self) -> NumpyStep:
        return NumpyStep(self)

    @property
    def arguments(self) -> dict[str, Any]:
        """dict: the arguments of the rule's constructor, by name."""
        return {name: getattr(self, name) for name in arguments_of(type(self))}

    def nearest_scale(self, loss_scale: float) -> float:
        """Return a loss scale that the rule can use, within the bounds: the given loss scale or a power of two near it.

        Args:
            loss_scale (float): the loss scale, which must lie within the bounds.

        Returns:
            float: the given loss scale; if the rule needs a power of two, the nearest one that is not larger.
        """
        if not self.moves_by_bits:
            return loss_scale
        return math.ldexp(1.0, max(math.frexp(loss_scale)[1] - 1, self.min_exponent))

    def __setattr__(self, name: str, value: object) -> None:
        if "_is_made" in vars(self):
            raise AttributeError(
                f"The rule {self.name!r} cannot change its {name!r} after it is created. Make another rule with the "
                "new value."
            )
        if name in OF_EVERY_RULE:
            raise ValueError(
                f"The rule {self.name!r} assigns self.{name}, but the class Rule needs this name. Choose another name."
            )
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        derived = ("State", "fields", "moves_by_bits", "_numpy_step")
        return {name: _thawed(value) for name, value in vars(self).items() if name not in derived}

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        vars(self).update({name: _frozen(value) for name, value in attributes.items()})


@functools.cache
def _state_class(name: str, fields: tuple[str, ...]) -> Any:
    """Return a NamedTuple class for states of a rule. Pickle restores a state by creating the class again."""

    def reduce(state: Any) -> tuple[Any, ...]:
        return _state_of, (name, fields, *state)

    return type(name, (namedtuple(name, fields),), {"__slots__": (), "__reduce__": reduce})


def _state_of(name: str, fields: tuple[str, ...], *values: Any) -> Any:
    return _state_class(name, fields)(*values)


def _frozen(value: Any) -> Any:
    if type(value) in (list, tuple):
        return tuple(map(_frozen, value))
    if type(value) is set:
        return frozenset(value)
    if type(value) is dict:
        return types.MappingProxyType({key: _frozen(part) for key, part in value.items()})
    if isinstance(value, np.ndarray):
        value = value.copy()
        value.flags.writeable = False
    return value


def _thawed(value: Any) -> Any:
    """Return a value that :func:`_frozen` made, with plain dicts, because read-only dicts cannot be pickled."""
    if type(value) is tuple:
        return tuple(map(_thawed, value))
    return {key: _thawed(part) for key, part in value.items()} if type(value) is types.MappingProxyType else value
