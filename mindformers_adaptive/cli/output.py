"""Functions that subcommands share: values from the command line, usage errors, printing, progress bars.

The help of the program needs this module, and must start quickly. So NumPy and PyYAML are imported on first use.
"""

import argparse
import os
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import IO, Any

from mindformers_adaptive.text.untrusted import printable, read_power

# Styles of text on a terminal, as parameters of the ANSI code "select graphic rendition".
_STYLES = {"answer": "1", "error": "1;31", "warning": "33"}

# Lines of prose have at most this number of columns. Lines that begin like a command are for pasting.
_WIDTH = 100
_COMMANDS = ("adaptive-loss-scale", "print(", "python ")

# The text beside a progress bar changes at most once in this time. Reading a step waits for the device.
_SECONDS = 0.5


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
    from mindformers_adaptive.text.untrusted import parse_yaml

    with wrong_usage():
        power = read_power(text)
    try:
        return parse_yaml(text, _value_loader()) if power is None else power
    except ValueError as error:
        hint = "put brackets, braces and colons in quotes"
        raise UsageError(f"{text!r} is not a value in YAML, {error}; {hint}") from error


def read_scale(text: str) -> float:
    """Convert a text to a loss scale, or raise UsageError if it is not positive; the ``type`` of an argument."""
    from mindformers_adaptive.rules.checks import require_positive

    with wrong_usage():
        return require_positive("SCALE", read_value(text))


def integer(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    """Return a ``type`` for argparse that accepts integers from ``least`` to ``most`` (default: the largest int32)."""
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


def add_pattern_argument(parser: argparse.ArgumentParser) -> None:
    """Declare ``--pattern``, which reads logs of any format."""
    parser.add_argument(
        "--pattern",
        type=_read_pattern,
        metavar="REGEX",
        help="read a log of another format: a regular expression with the groups (?P<step>...) and at least one of "
        "loss_scale, overflow and skipped; also loss and gradient_norm",
    )


def add_python_argument(parser: argparse.ArgumentParser) -> None:
    """Declare ``--python`` and ``--no-python``, which choose between settings as Python and as YAML."""
    text = "give settings as Python, or with --no-python as YAML; default: Python for the record of a training without "
    parser.add_argument("--python", action=argparse.BooleanOptionalAction, help=f"{text}a YAML file")


def _read_pattern(text: str) -> str:
    from mindformers_adaptive.record.pattern import Pattern

    with wrong_usage():
        return Pattern(text).example


def read_picture(text: str) -> str:
    """Return the file name of a picture, or raise UsageError if it is invalid; the ``type`` of an argparse argument."""
    from mindformers_adaptive.plots.canvas import require_picture

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

    A number that is not finite becomes the string "nan", "inf" or "-inf". On a terminal, the first line of a text is
    bold, because it is the answer.
    """
    from mindformers_adaptive.text.files import json_text

    if options.json:
        print_text(json_text(content(), indent=2), wraps=False)
        return
    answer, *more = text().split("\n", 1)
    print_text(answer, style="answer")
    for lines in more:
        print_text(lines)


def print_answer(options: argparse.Namespace, answer: Any) -> None:
    """Print an answer that has ``details()``, which are printed too with ``--details``."""

    def text() -> str:
        details = answer.details()
        return f"{answer}\n{details if options.details or not details else 'More: --details'}"

    print_result(options, answer.to_dict, text)


def print_text(text: str, file: IO[str] | None = None, style: str = "", wraps: bool = True) -> None:
    """Print a text that may have any characters, such as file names. Characters that cannot be shown are escaped.

    Long lines of prose are wrapped, unless ``wraps`` is False.
    """
    file = file or sys.stdout
    encoding = getattr(file, "encoding", None) or "utf-8"
    shown = printable(wrapped(text) if wraps else text, keep="\n").encode(encoding, "backslashreplace").decode(encoding)
    print(styled(shown, style, file), file=file)


def wrapped(text: str) -> str:
    """Return a text whose lines of prose have at most 100 columns, or as many as the variable COLUMNS says.

    Rows of tables, which have several spaces in a row, and commands to paste are left as they are.
    """
    return "\n".join(_wrapped_line(line, int(os.environ.get("COLUMNS") or _WIDTH)) for line in text.split("\n"))


def _wrapped_line(line: str, width: int) -> str:
    indent = line[: len(line) - len(line.lstrip())]
    is_command = line.strip().startswith(_COMMANDS) and ": error: " not in line
    if len(line) <= width or "  " in line.strip() or is_command:
        return line
    # A command within a sentence stays on one line.
    command = rf"{_COMMANDS[0]} [^':\n]*?(?=[.,;]?(?:'| \(|[.,;] |$))"
    unbreakable = re.sub(command, lambda match: match[0].replace(" ", "\0"), line)
    lines = textwrap.wrap(unbreakable, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")


def styled(text: str, style: str, file: IO[str]) -> str:
    """Return a text with codes for a style, if a file is a terminal that shows colours and the user wants colours."""
    if not style or not file.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m"


@contextmanager
def progress_bar(
    total: int | None, what: str, file: IO[str] | None = None, lines: bool = False
) -> Iterator[Callable[..., None]]:
    """Show a progress bar if the output is a terminal.

    Args:
        total (int, optional): the number of steps, None if it is not known beforehand.
        what (str): what is being done, as the label of the bar.
        file (IO, optional): where to show the bar. Default: None, standard error.
        lines (bool): print about ten lines of progress if the output is no terminal. Default: False.

    Yields:
        Callable, to be called with the total number of steps done so far and, optionally, with a function that returns
        the text to show beside it. This function is called only when the progress is shown.
    """
    file = file or sys.stderr
    if not file.isatty():
        part = max(1, -(-(total or 100) // 10))
        printed = [0]

        def print_line(done: int, text: Callable[[], str] | None = None) -> None:
            if lines and done // part > printed[0]:
                printed[0] = done // part
                of_total = "" if total is None else f" of {total}"
                print(f"{what}: {done}{of_total}{f', {text()}' if text else ''}", file=file, flush=True)

        yield print_line
        return
    from tqdm import tqdm

    with tqdm(total=total, desc=what, leave=False, file=file) as bar:
        shown = [0.0]

        def move_bar(done: int, text: Callable[[], str] | None = None) -> None:
            if text and (done == total or time.monotonic() - shown[0] > _SECONDS):
                bar.set_postfix_str(text(), refresh=False)
                shown[0] = time.monotonic()
            bar.update(done - bar.n)

        yield move_bar


@cache
def _value_loader() -> Any:
    """Return a YAML loader that reads 1e-4 as a number. In YAML 1.1, only 1.0e-4 is a number."""
    import yaml

    class ValueLoader(yaml.SafeLoader):
        pass

    number = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
    ValueLoader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("+-.0123456789"))  # type: ignore[no-untyped-call]
    return ValueLoader
