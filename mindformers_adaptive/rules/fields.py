"""The pieces of an update cell's state: a rule's own, what every cell counts, and what a train step hands to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from mindformers_adaptive.rules.functions import DType

__all__ = ["SIGNALS", "STEP_FIELDS", "STEP_LIMIT", "Field", "fields_of", "kept_fields"]

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


def _field(rule: Any, name: str, kind: Any) -> Field:
    parameter = rule.parameter_names.get(name, f"{rule.name}_{name}")
    kinds = list(kind.values()) if isinstance(kind, Mapping) else [kind]
    is_sound = kinds and all(isinstance(one, DType) and one.name == kinds[0].name for one in kinds)
    if not is_sound or (isinstance(kind, Mapping) and any(one.shape for one in kinds)):
        raise ValueError(
            f"The state of the rule {rule.name!r} has {name!r} as {kind!r}. Write int32 or float32, float32[8] for a "
            "vector of 8, or a dict of names with one of the two for a vector with named parts."
        )
    if isinstance(kind, Mapping):
        return Field(name, kinds[0].name, (len(kind),), tuple(kind), parameter)
    return Field(name, kind.name, kind.shape, (), parameter)
