"""What subcommands share: numbers as people type them, wrong usage, progress, JSON."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import yaml

__all__ = ["UsageError", "add_json_argument", "print_json", "progress_bar", "read_scale", "read_value"]


class UsageError(Exception):
    """What was typed cannot be meant; the program exits with 2."""


def read_value(text: str) -> Any:
    """Return a value as YAML reads it, or a power of two from ``2^16``."""
    power = re.fullmatch(r"\s*2(?:\^|\*\*)(-?\d+)\s*", text)
    return 2.0 ** int(power[1]) if power else yaml.safe_load(text)


def read_scale(argument: str, text: str) -> float:
    """Return a loss scale that was typed for an argument, or raise UsageError."""
    value = read_value(text)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"argument {argument}: a loss scale must be a number, as 512 or 2^9, but got {text!r}")
    return float(value)


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Declare ``--json``."""
    parser.add_argument("--json", action="store_true", help="print JSON for machines")


def print_json(content: Any) -> None:
    """Print a value as JSON; a number that is not finite becomes the string "nan", "inf" or "-inf"."""
    print(json.dumps(_finite(content), indent=2, allow_nan=False))


@contextmanager
def progress_bar(total: int | None, what: str) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal, and none elsewhere.

    Args:
        total (int, optional): how many there are, None if that is not known beforehand.
        what (str): what is being done.

    Yields:
        Callable, to be called with how many are done.
    """
    from tqdm import tqdm

    with tqdm(total=total, desc=what, disable=None, leave=False) as bar:
        yield lambda done: bar.update(done - bar.n)


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return str(content)
    return content
