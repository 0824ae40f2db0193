"""Functions that subcommands share: values from the command line, usage errors, printing, progress bars."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import IO, Any

import yaml

from mindformers_adaptive.plots.canvas import require_picture
from mindformers_adaptive.rules.checks import LARGEST_INT32, require_positive
from mindformers_adaptive.text.files import json_text
from mindformers_adaptive.text.untrusted import parse_yaml, printable

__all__ = ["UsageError", "add_output_arguments", "integer", "print_result", "print_text", "progress_bar"]
__all__ += ["read_picture", "read_scale", "read_source", "read_value", "require_file", "wrong_usage"]


class UsageError(argparse.ArgumentTypeError):
    """Raised for an invalid command line; the program then exits with status 2."""


@contextmanager
def wrong_usage(where: str = "") -> Iterator[None]:
    """Turn an error about a value in the ``with`` block into a UsageError whose message begins with ``where``."""
    try:
        yield
    except (UsageError, ArithmeticError, OSError, TypeError, ValueError) as error:
        raise UsageError(f"{where}{error}") from error


def read_value(text: str) -> Any:
    """Read a text as a YAML value, with 1e-4 and 2^16 as numbers. Raise UsageError if the text is not valid YAML."""
    power = re.fullmatch(r"\s*2(?:\^|\*\*)(-?\d+)\s*", text)
    try:
        return 2.0 ** int(power[1]) if power else parse_yaml(text, _ValueLoader)
    except OverflowError as error:
        raise UsageError(f"{text!r} is too large: give at most 2^127, the largest power of two in float32") from error
    except ValueError as error:
        hint = "put brackets, braces and colons in quotes"
        raise UsageError(f"{text!r} is not a value in YAML, {error}; {hint}") from error


def read_scale(text: str) -> float:
    """Convert a text to a loss scale, or raise UsageError if it is not positive; the ``type`` of an argument."""
    with wrong_usage():
        return require_positive("SCALE", read_value(text))


def integer(least: int, most: int = LARGEST_INT32) -> Callable[[str], int]:
    """Return a ``type`` for argparse that accepts integers from ``least`` to ``most``."""
    return partial(_read_integer, least, most)


def _read_integer(least: int, most: int, text: str) -> int:
    value = int(text) if re.fullmatch(r"\s*[-+]?[0-9]{1,20}\s*", text) else None
    if value is None or not least <= value <= most:
        raise UsageError(f"must be an integer from {least} to {most}, but got {text!r}")
    return value


def read_source(text: str) -> str:
    """Return the path of an input file or folder, or raise UsageError for an empty path. Used as argparse ``type``."""
    if not text:
        raise UsageError("must name a file or folder, but is empty")
    return text


def read_picture(text: str) -> str:
    """Return the file name of a picture, or raise UsageError if it is invalid; the ``type`` of an argparse argument."""
    with wrong_usage():
        return require_file(str(require_picture(text)))


def require_file(text: str) -> str:
    """Return the name of a file to write, or raise UsageError if it is a folder."""
    if os.path.isdir(text):
        raise UsageError(f"must name a file, but {text!r} is a folder")
    return text


def add_output_arguments(parser: argparse.ArgumentParser, picture: str = "") -> None:
    """Declare ``--json``; if ``picture``, the help text of ``--plot``, is given, also declare ``--plot``."""
    if picture:
        parser.add_argument("--plot", type=read_picture, metavar="FILE", help=picture)
    parser.add_argument("--json", action="store_true", help="print JSON for machines")


def print_result(options: argparse.Namespace, content: Callable[[], Any], text: Callable[[], str]) -> None:
    """Print a result as text or, with ``--json``, its content as JSON.

    A number that is not finite becomes the string "nan", "inf" or "-inf".
    """
    print_text(json_text(content(), indent=2) if options.json else text())


def print_text(text: str, file: IO[str] | None = None) -> None:
    """Print a text that may have any characters, such as file names. Characters that cannot be shown are escaped."""
    encoding = getattr(file or sys.stdout, "encoding", None) or "utf-8"
    print(printable(text, keep="\n").encode(encoding, "backslashreplace").decode(encoding), file=file)


@contextmanager
def progress_bar(total: int | None, what: str) -> Iterator[Callable[[int], None]]:
    """Show a progress bar if the output is a terminal.

    Args:
        total (int, optional): the number of steps, None if it is not known beforehand.
        what (str): what is being done, as the label of the bar.

    Yields:
        Callable, to be called with the total number of steps done so far.
    """
    from tqdm import tqdm

    with tqdm(total=total, desc=what, disable=None, leave=False) as bar:
        yield lambda done: bar.update(done - bar.n)


class _ValueLoader(yaml.SafeLoader):
    """A YAML loader that reads 1e-4 as a number. In YAML 1.1, only 1.0e-4 is a number."""


_ValueLoader.add_implicit_resolver(  # type: ignore[no-untyped-call]
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("+-.0123456789")
)
