"""Keep MindFormers' lines off the terminal: they go to a file, and progress and this package's messages are shown."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from mindformers_adaptive.cli.output import print_text, progress_bar, styled

__all__ = ["add_verbose", "is_one_of_several", "lines_in_file", "show_training"]

# The folder in which MindFormers writes its logs, below its output folder.
_FOLDER = "log"
# After a failure, show at most this number of the last lines.
_LAST = 20

# A log line of this package: its level and its message.
_MESSAGE = re.compile(r"\[mindformers_adaptive/[^\]]*\] - (\w+) - (.*)")
# The start of a log line of MindFormers or MindSpore.
_START = re.compile(r"\d{4}-\d\d-\d\d |\[\w+\] ")
_STEP = re.compile(r"Epoch:\[\s*(\d+)/\s*(\d+)\], step:\[\s*(\d+)/\s*(\d+)\]")


def add_verbose(parser: argparse.ArgumentParser) -> None:
    """Declare ``--verbose``."""
    parser.add_argument("--verbose", action="store_true", help="show all lines that MindFormers prints")


def is_one_of_several() -> bool:
    """Return whether this process was started as one of several that train together, with a log file for each."""
    return any(name in os.environ for name in ("MS_ROLE", "RANK_TABLE_FILE", "OMPI_COMM_WORLD_RANK"))


@contextlib.contextmanager
def lines_in_file(
    command: str, output_dir: str | os.PathLike[str] = "output", verbose: bool = False
) -> Iterator[IO[str]]:
    """Write what the block prints to ``log/COMMAND.log`` in the output folder. Warnings are shown all the same.

    The lines of MindSpore's C++ code go to the file too. If MindSpore or MindFormers fails, the last lines are shown.

    Args:
        command (str): the subcommand, for the name of the file.
        output_dir (str): the output folder of MindFormers. Default: "output", MindFormers' default.
        verbose (bool): write nothing to a file; what the block prints goes to standard error instead. Default: False.

    Yields:
        a stream to what was standard error before.
    """
    file = Path(output_dir, _FOLDER, f"{command}.log")
    lines = None if verbose or not _are_files() else _opened(file)
    if lines is None:
        with contextlib.redirect_stdout(sys.stderr):
            yield sys.stderr
        return
    with lines:
        print_text(f"The lines of MindFormers go to {file}; --verbose shows them.", sys.stderr)
        before = file.stat().st_size
        with _redirected(lines.fileno()) as terminal:
            try:
                yield terminal
            except Exception as error:
                if not _was_raised_here(error):
                    _print_last(file, before, terminal)
                raise


@contextlib.contextmanager
def show_training(terminal: IO[str], output_dir: str | os.PathLike[str] = "output") -> Iterator[None]:
    """Within :func:`lines_in_file`, show each step of a training as progress, and the messages of this package."""
    file, stopped = Path(output_dir, _FOLDER, "train.log"), threading.Event()
    if terminal is sys.stderr:
        # There is no file, so the lines themselves are shown.
        yield
        return
    reader = threading.Thread(target=_follow, args=(file, file.stat().st_size, terminal, stopped), daemon=True)
    reader.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        stopped.set()
        reader.join()


def _are_files() -> bool:
    """Return whether standard output and standard error belong to the process. A caller may have replaced them."""
    try:
        return (sys.stdout.fileno(), sys.stderr.fileno()) == (1, 2)
    except OSError:
        return False


def _opened(file: Path) -> IO[bytes] | None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        return file.open("ab")
    except OSError:
        return None


@contextlib.contextmanager
def _redirected(target: int) -> Iterator[IO[str]]:
    """Send standard output and standard error, of Python and of C++, to a file; yield the former standard error."""
    show_warning: Any = warnings.showwarning
    saved = [os.dup(number) for number in (1, 2)]
    terminal = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="backslashreplace")

    def show(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        show_warning(message, category, filename, lineno, file or terminal, line)

    _point_to(target, target)
    warnings.showwarning = show
    try:
        yield terminal
    finally:
        warnings.showwarning = show_warning
        _point_to(*saved)
        terminal.close()
        for number in saved:
            os.close(number)


def _point_to(*targets: int) -> None:
    for number, target, stream in zip((1, 2), targets, (sys.stdout, sys.stderr), strict=True):
        stream.flush()
        os.dup2(target, number)


def _was_raised_here(error: Exception) -> bool:
    """Return whether the code of this package raised an error, whose message then says enough."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    name = "" if trace is None else trace.tb_frame.f_globals.get("__name__", "")
    return str(name).startswith("mindformers_adaptive.")


def _print_last(file: Path, start: int, terminal: IO[str]) -> None:
    with file.open("rb") as lines:
        lines.seek(start)
        last = deque(lines, _LAST)
    print_text("".join(line.decode("utf-8", "replace") for line in last).rstrip(), terminal)
    print_text(f"These are the last lines of {file}.", terminal)


def _follow(file: Path, start: int, terminal: IO[str], stopped: threading.Event) -> None:
    """Show what a training writes to a file, until the training stops."""
    with contextlib.ExitStack() as stack, file.open("rb") as lines:
        lines.seek(start)
        progress: Callable[[int], None] | None = None
        shown, unfinished = False, b""
        while True:
            # Ask before the last read, so that the last read sees all lines.
            is_last = stopped.wait(0.5)
            *whole, unfinished = (unfinished + lines.read()).split(b"\n")
            for line in whole:
                text = line.decode("utf-8", "replace")
                if message := _MESSAGE.search(text):
                    style = "warning" if message[1] in ("WARNING", "ERROR") else ""
                    _show(message[2], terminal, style)
                # A message may have several lines, of which only the first begins like a log line.
                elif shown and not _START.match(text):
                    _show(text, terminal)
                shown = bool(message) or (shown and not _START.match(text))
                if step := _STEP.search(text):
                    epoch, epochs, number, of = map(int, step.groups())
                    if progress is None:
                        bar = progress_bar(epochs * of, "steps", terminal, lines=True)
                        progress = stack.enter_context(bar)
                    progress((epoch - 1) * of + number)
            if is_last:
                return


def _show(text: str, terminal: IO[str], style: str = "") -> None:
    if not terminal.isatty():
        print_text(text, terminal)
        return
    from tqdm import tqdm

    # tqdm prints a line above its bar.
    tqdm.write(styled(text, style, terminal), file=terminal)
