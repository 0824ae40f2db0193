"""Checks of the arguments of callbacks: each returns the argument, or raises TypeError or ValueError."""

import os
from pathlib import Path

from mindformers_adaptive.rule.checks import require_integer

__all__ = ["require_choice", "require_count", "require_path"]


def require_path(name: str, value: object) -> Path | None:
    """Return an argument as a Path, or None if it was left out."""
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike):
        raise TypeError(
            f"'{name}' must be a path, but got {value!r} of type {type(value).__name__}. Give it as text, or leave it "
            "out."
        )
    if not str(value):
        raise ValueError(f"'{name}' must be a path, but got ''. Give the name of a file or folder, or leave it out.")
    return Path(value)


def require_count(name: str, value: object, hint: str) -> int:
    """Return an argument that is a number of steps as an int."""
    return require_integer(name, value, 1, f"Give 1 or more; {hint}.", unit="number of steps")


def require_choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    """Return an argument that is one of a few words."""
    if not isinstance(value, str) or value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"'{name}' must be one of {listed}, but got {value!r}.")
    return value
