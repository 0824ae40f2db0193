"""Handle untrusted text: parse YAML from files and command lines, and escape control characters for a terminal."""

from __future__ import annotations

import os
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml

__all__ = ["parse_yaml", "printable", "read_yaml"]

# Limits for the nesting and the number of values of YAML text. The YAML file of a training has some hundred values, at
# most a dozen levels deep. PyYAML takes minutes for thousands of levels, and a few aliases of aliases can stand for
# billions of values.
_DEEPEST, _MOST_VALUES = 500, 100_000


def parse_yaml(text: str, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> Any:
    """Parse YAML text, and return its content as Python values.

    Args:
        text (str): the text.
        loader (type): a PyYAML loader that creates no Python objects of other classes. Default: ``SafeLoader``.

    Raises:
        ValueError: if the text is not YAML, is nested too deeply, or stands for too many values.

    Examples:
        >>> parse_yaml("rate: 0.5")
        {'rate': 0.5}
    """
    depths = accumulate((character in "[{") - (character in "]}") for character in text)
    if max(depths, default=0) > _DEEPEST:
        raise ValueError(f"the YAML text is nested more than {_DEEPEST} levels deep")
    try:
        content = yaml.load(text, Loader=loader)
    # PyYAML may raise any kind of error for a value that does not fit the value's YAML tag.
    except Exception as error:
        said = " ".join(str(error).split()).replace('in "<unicode string>",', "at")
        raise ValueError(said or type(error).__name__) from error
    waiting, values = [content], 0
    while waiting:
        value, values = waiting.pop(), values + 1
        if isinstance(value, list | dict):
            waiting += value.values() if isinstance(value, dict) else value
        if values > _MOST_VALUES:
            raise ValueError(
                f"the YAML text expands to more than {_MOST_VALUES:,} values, because of aliases such as *name; write "
                "the values without these aliases"
            )
    return content


def read_yaml(file: str | os.PathLike[str]) -> Any:
    """Parse a YAML file, and return its content as Python values.

    Args:
        file (str): the file.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if the file is not in UTF-8, or if :func:`parse_yaml` raises one.
    """
    try:
        return parse_yaml(Path(file).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} must be a file in YAML and UTF-8, but: {error}.") from error


def printable(text: str, keep: str = "") -> str:
    r"""Return a text with escapes in place of characters that move the cursor, change colours, or are not Unicode.

    Args:
        text (str): a text from outside, such as the name of a file.
        keep (str): characters to leave as they are. Default: "", none.

    Examples:
        >>> print(printable("red\x1b[31m.log"))
        red\x1b[31m.log
    """
    return "".join(
        each if each.isprintable() or each in keep else each.encode("unicode_escape").decode() for each in text
    )
