"""Handle untrusted text: parse YAML from files and command lines, and escape control characters for a terminal."""

from __future__ import annotations

import os
import re
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from mindformers_adaptive.text.files import refuse_pipe

if TYPE_CHECKING:
    import yaml

# Limits for the nesting and the number of values of YAML text. The YAML file of a training has some hundred values, at
# most a dozen levels deep. PyYAML takes minutes for thousands of levels, and a few aliases of aliases can stand for
# billions of values.
_DEEPEST, _MOST_VALUES = 500, 100_000


def parse_yaml(text: str, loader: type[yaml.SafeLoader] | None = None) -> Any:
    """Parse YAML text, and return its content as Python values.

    Args:
        text (str): the text.
        loader (type, optional): a PyYAML loader that creates no Python objects of other classes. Default: None,
            ``SafeLoader``.

    Raises:
        ValueError: if the text is not YAML, is nested too deeply, or stands for too many values.

    Examples:
        >>> parse_yaml("rate: 0.5")
        {'rate': 0.5}
    """
    # The help of the program imports this module, but needs no YAML.
    import yaml

    depths = accumulate((character in "[{") - (character in "]}") for character in text)
    if max(depths, default=0) > _DEEPEST:
        raise ValueError(f"the YAML text is nested more than {_DEEPEST} levels deep")
    try:
        content = yaml.load(text, Loader=loader or yaml.SafeLoader)
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
    refuse_pipe(file)
    try:
        with open(file, encoding="utf-8") as lines:
            return parse_yaml(lines.read())
    except ValueError as error:
        raise ValueError(f"{file} must be a file in YAML and UTF-8, but: {error}.") from error


def read_power(text: str) -> float | None:
    """Return the number that a text such as 2^16 or 2**16 stands for, or None for any other text.

    Raises:
        ValueError: if the number is too large for a float.

    Examples:
        >>> read_power("2^16"), read_power("65536")
        (65536.0, None)
    """
    power = re.fullmatch(r"\s*2(?:\^|\*\*)(-?\d{1,9})\s*", text)
    try:
        return 2.0 ** int(power[1]) if power else None
    except OverflowError as error:
        raise ValueError(f"{text!r} is too large: give at most 2^127, the largest power of two in float32") from error


def with_powers(value: Any) -> Any:
    """Return a value of a YAML file in which each text such as 2^16, also in sections and lists, is a number.

    Raises:
        ValueError: if a number is too large for a float.

    Examples:
        >>> with_powers({"type": "AdaptiveLossScale", "loss_scale_value": "2^16"})
        {'type': 'AdaptiveLossScale', 'loss_scale_value': 65536.0}
    """
    if isinstance(value, str):
        power = read_power(value)
        return value if power is None else power
    if isinstance(value, dict):
        # Change the section in place: a section of MindFormers is a dict of a class of its own.
        for key in value:
            value[key] = with_powers(value[key])
    return [*map(with_powers, value)] if isinstance(value, list) else value


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
