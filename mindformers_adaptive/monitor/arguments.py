"""Checks of the arguments of callbacks: each returns the argument, or raises TypeError or ValueError."""

import os
from pathlib import Path

__all__ = ["require_choice", "require_path"]


def require_path(name: str, value: object) -> Path | None:
    """Return a path as a Path, or None if it was left out."""
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike):
        raise TypeError(
            f"'{name}' must be a path, but got {value!r} of type {type(value).__name__}. Give text, or leave it out."
        )
    if not str(value):
        raise ValueError(f"'{name}' must be a path, but got ''. Give the name of a file or folder, or leave it out.")
    return Path(value)


def require_choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    """Return an argument that must be one of a few words."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"'{name}' must be one of {', '.join(map(repr, choices))}, but got {value!r}.")
    return value
