"""What subcommands share: values from the command line, usage errors, progress bars, JSON."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import yaml

from mindformers_adaptive.text.files import json_text

__all__ = ["UsageError", "add_json_argument", "print_result", "progress_bar", "read_scale", "read_value"]


class UsageError(argparse.ArgumentTypeError):
    """Invalid command line; the program exits with status 2."""


def read_value(text: str) -> Any:
    """Return a value as YAML reads it, with 1e-4 and 2^16 as numbers, or raise UsageError."""
    power = re.fullmatch(r"\s*2(?:\^|\*\*)(-?\d+)\s*", text)
    if power:
        return 2.0 ** int(power[1])
    try:
        return yaml.load(text, Loader=_ValueLoader)
    except yaml.YAMLError as error:
        raise UsageError(f"{text!r} is not a value in YAML; put brackets, braces and colons in quotes") from error


def read_scale(text: str) -> float:
    """Return a loss scale that was typed, or raise UsageError; a ``type`` for argparse, which adds the argument."""
    value = read_value(text)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"a loss scale must be a number, as 512 or 2^9, but got {text!r}")
    return float(value)


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Declare ``--json``."""
    parser.add_argument("--json", action="store_true", help="print JSON for machines")


def print_result(options: argparse.Namespace, content: Callable[[], Any], text: Callable[[], str]) -> None:
    """Print a result as text or, with ``--json``, its content as JSON.

    A number that is not finite becomes the string "nan", "inf" or "-inf".
    """
    print(json_text(content(), indent=2) if options.json else text())


@contextmanager
def progress_bar(total: int | None, what: str) -> Iterator[Callable[[int], None]]:
    """Show a progress bar if the output is a terminal.

    Args:
        total (int, optional): the number of steps, None if it is not known beforehand.
        what (str): what is being done.

    Yields:
        Callable, to be called with the number of steps done.
    """
    from tqdm import tqdm

    with tqdm(total=total, desc=what, disable=None, leave=False) as bar:
        yield lambda done: bar.update(done - bar.n)


class _ValueLoader(yaml.SafeLoader):
    """YAML in which 1e-4 is a number; YAML 1.1 wants 1.0e-4."""


_ValueLoader.add_implicit_resolver(  # type: ignore[no-untyped-call]
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("+-.0123456789")
)
