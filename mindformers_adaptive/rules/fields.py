"""The pieces of an update cell's state: a rule's own, what every cell counts, and what a train step hands to it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from mindformers_adaptive.rules.functions import DType

__all__ = ["LARGEST_GRADIENT", "STEP_FIELDS", "STEP_LIMIT", "Field", "fields_of", "form_of", "is_of_this_package"]
__all__ += ["kept_fields"]

# The most steps that a saved state may have, about 34 years at a step a second. No process takes as many again, after
# which int32 would wrap; so the graph of an update needs no limit.
STEP_LIMIT = 2**30


class Field(NamedTuple):
    """A piece of a state, which the update cell keeps as one Parameter.

    Attributes:
        name (str): the attribute of the update cell.
        dtype (str): "int32" or "float32".
        shape (tuple[int, ...]): () or (n,).
        parts (tuple[str, ...]): what the elements of a vector are called in ``state()``, in records and in reports.
            Without it, a vector stands there as a whole, by the field's name.
        parameter (str): the Parameter's name in checkpoints.

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
            values (Mapping[str, Any]): values by name, among them the values of ``keys``.

        Returns:
            Union[int, float, Sequence], a number or the elements of a vector.
        """
        return [values[part] for part in self.parts] if self.parts else values[self.name]


# What every update cell counts. MindSpore's and MindFormers' own cells have the same names in checkpoints.
STEP_FIELDS = (
    Field("cur_iter", parameter="current_iterator_step"),
    Field("last_overflow_iter", parameter="last_overflow_iterator_step"),
    Field("skipped_steps", parameter="skipped_steps"),
    Field("consecutive_overflows", parameter="consecutive_overflows"),
)

# What a train step hands to the update cell of a rule that needs gradients, in a Parameter that it assigns.
LARGEST_GRADIENT = Field("largest_gradient", "float32", parameter="largest_gradient")


def fields_of(rule: Any) -> tuple[Field, ...]:
    """Return the fields of a rule's own state.

    Args:
        rule (Union[Rule, type]): a rule, or its class, with ``state`` as
            :class:`~mindformers_adaptive.rules.rule.Rule` describes it.

    Raises:
        ValueError: if ``state`` has something else.
    """
    return tuple(_field(rule, name, kind) for name, kind in rule.state.items())


def kept_fields(rule: Any) -> tuple[Field, ...]:
    """Return the fields of a rule's own state that the update cell keeps: those that can change.

    Args:
        rule (Union[Rule, type]): as of :func:`fields_of`.
    """
    return tuple(field for field in fields_of(rule) if field.name not in rule.fixed_state)


def is_of_this_package(rule_class: type) -> bool:
    """Return whether this package brings a rule, and no user."""
    return rule_class.__module__.startswith("mindformers_adaptive.")


def form_of(rule: Any) -> int:
    """Return a number that tells the form of a rule's state: the rule's name, its fields, their dtypes and parts.

    Checkpoints hold it. A vector has no names in a checkpoint, so without it a renamed part would take the number of
    another one.

    Args:
        rule (Union[Rule, type]): as of :func:`fields_of`.

    Returns:
        int, from 1 to 2**31 - 1.
    """
    fields = sorted((field.name, field.dtype, field.shape, field.parts) for field in fields_of(rule))
    return zlib.crc32(repr((rule.name, fields)).encode()) % (2**31 - 1) + 1


def _field(rule: Any, name: str, kind: Any) -> Field:
    kinds = list(kind.values()) if isinstance(kind, Mapping) else [kind]
    is_sound = kinds and all(isinstance(dtype, DType) and dtype.name == kinds[0].name for dtype in kinds)
    if not is_sound or (isinstance(kind, Mapping) and any(dtype.shape for dtype in kinds)):
        raise ValueError(
            f"The state of the rule {rule.name!r} has {name!r} as {kind!r}. Write int32 or float32, float32[8] for a "
            "vector of 8, or a dict of names with one of the two for a vector with named parts."
        )
    dtype = kinds[0].name
    if not isinstance(kind, Mapping):
        return Field(name, dtype, kind.shape, (), _parameter_name(rule, name, dtype, kind.shape))
    is_built_in = is_of_this_package(rule if isinstance(rule, type) else type(rule))
    # Sorted, because a dict made from a set has another order in each process.
    parts = tuple(kind) if is_built_in else tuple(sorted(kind, key=str))
    return Field(name, dtype, (len(kind),), parts, _parameter_name(rule, name, dtype, (len(kind),)))


def _parameter_name(rule: Any, name: str, dtype: str, shape: tuple[int, ...]) -> str:
    if name in rule.parameter_names and (dtype, shape) == ("int32", ()):
        return str(rule.parameter_names[name])
    if is_of_this_package(rule if isinstance(rule, type) else type(rule)):
        return f"{rule.name}_{name}"
    # MindSpore refuses a whole checkpoint in which a Parameter of this name has another dtype or length.
    return "_".join(map(str, (rule.name, name, dtype, *shape)))
