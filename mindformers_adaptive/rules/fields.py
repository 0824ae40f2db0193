"""The fields of a loss-scale update cell's state: the rule's own fields, the step counters and the largest gradient."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

# The largest step count in a saved state, about 34 years at one step per second. No process runs for another 34 years,
# so the int32 counters never overflow, and the graph of the update cell need not limit the counters.
STEP_LIMIT = 2**30

_LONGEST_VECTOR = 2**16


class DType:
    """The dtype of a field in a rule's state, such as ``float32`` or ``float32[16]``."""

    def __init__(self, name: str, shape: tuple[int, ...] = ()) -> None:
        self.name, self.shape = name, shape

    def __getitem__(self, length: Any) -> DType:
        if type(length) is not int or not 1 <= length <= _LONGEST_VECTOR or self.shape:
            raise ValueError(
                f"{self}[...] must have one length, an integer from 1 to {_LONGEST_VECTOR}, but got {length!r}. For a "
                f"vector of 8 numbers, write {self.name}[8]."
            )
        return DType(self.name, (length,))

    def __repr__(self) -> str:
        return f"{self.name}{list(self.shape) or ''}"


int32, float32 = DType("int32"), DType("float32")


class Field(NamedTuple):
    """A field in the state of a loss-scale update cell, which keeps each field as one Parameter.

    Attributes:
        name (str): the name of the field, and of the update cell's attribute that holds the Parameter.
        dtype (str): "int32" or "float32".
        shape (tuple[int, ...]): () or (n,).
        parts (tuple[str, ...]): the names of a vector's elements in ``state()``, records and reports. If empty, the
            vector appears there as a whole, under the name of the field.
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
        """tuple[str, ...]: the names that the field has in ``state()`` of the update cell."""
        return self.parts or (self.name,)

    def by_key(self, value: Any) -> dict[str, Any]:
        """Return the value of this state field as a dict, by the field's name or by the names of a vector's elements.

        Args:
            value (Union[int, float, Iterable]): the content of the Parameter, a number or the elements of a vector.

        Returns:
            dict[str, Any]; a vector without named parts becomes one tuple.
        """
        if self.parts:
            return dict(zip(self.parts, value, strict=True))
        return {self.name: tuple(value) if self.shape else value}

    def value_in(self, values: Mapping[str, Any]) -> Any:
        """Look this state field up in a dict, by its name or by the names of its elements, and return its value.

        Args:
            values (Mapping[str, Any]): values by name, for at least the names in ``keys``.

        Returns:
            Union[int, float, Sequence], a number or the elements of a vector.
        """
        return [values[part] for part in self.parts] if self.parts else values[self.name]


# Every loss-scale update cell has these step counters. In checkpoints, the first two counters have the same names as
# the step counters of MindSpore's and MindFormers' own cells.
STEP_FIELDS = (
    Field("cur_iter", parameter="current_iterator_step"),
    Field("last_overflow_iter", parameter="last_overflow_iterator_step"),
    Field("skipped_steps", parameter="skipped_steps"),
    Field("consecutive_overflows", parameter="consecutive_overflows"),
)

# If a rule needs gradients, the train step assigns the largest gradient to this Parameter of the update cell.
LARGEST_GRADIENT = Field("largest_gradient", "float32", parameter="largest_gradient")


def fields_of(rule: Any) -> tuple[Field, ...]:
    """Return the fields of a rule's own state.

    Args:
        rule (Union[Rule, type]): a rule, or its class, with ``state`` as
            :class:`~mindformers_adaptive.rules.rule.Rule` describes it.

    Raises:
        ValueError: if ``state`` describes a field in another way.
    """
    return tuple(_field(rule, name, kind) for name, kind in rule.state.items())


def kept_fields(rule: Any) -> tuple[Field, ...]:
    """Return the fields of a rule's own state that can change. The update cell keeps no other fields of this state.

    Args:
        rule (Union[Rule, type]): as of :func:`fields_of`.
    """
    return tuple(field for field in fields_of(rule) if field.name not in rule.fixed_state)


def is_of_this_package(rule_class: type) -> bool:
    """Return whether the class of a rule is defined in this package, and not by a user."""
    return rule_class.__module__.startswith("mindformers_adaptive.")


def form_of(rule: Any) -> int:
    """Return a checksum of the name of a rule and of the name, dtype, shape and named parts of each field in its state.

    Checkpoints hold this checksum, but not the names of a vector's parts. Without the checksum, a renamed part could be
    restored with the number of another part.

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
            f"The state of the rule {rule.name!r} declares the field {name!r} as {kind!r}, which is not supported. "
            "Write int32 or float32, float32[8] for a vector of 8 numbers, or a dict such as {'low': int32, 'high': "
            "int32} for a vector with named elements."
        )
    dtype = kinds[0].name
    if not isinstance(kind, Mapping):
        return Field(name, dtype, kind.shape, (), _parameter_name(rule, name, dtype, kind.shape))
    is_built_in = is_of_this_package(rule if isinstance(rule, type) else type(rule))
    # A user's rule may create the dict of a vector's named elements from a set, whose order differs between processes.
    # So sort the names.
    parts = tuple(kind) if is_built_in else tuple(sorted(kind, key=str))
    return Field(name, dtype, (len(kind),), parts, _parameter_name(rule, name, dtype, (len(kind),)))


def _parameter_name(rule: Any, name: str, dtype: str, shape: tuple[int, ...]) -> str:
    if name in rule.parameter_names and (dtype, shape) == ("int32", ()):
        return str(rule.parameter_names[name])
    if is_of_this_package(rule if isinstance(rule, type) else type(rule)):
        return f"{rule.name}_{name}"
    # The Parameter name of a field in a user's rule includes dtype and length. If a checkpoint had the same name with
    # another dtype or length, MindSpore would refuse the whole checkpoint.
    return "_".join(map(str, (rule.name, name, dtype, *shape)))
