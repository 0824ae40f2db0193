"""Keep MindFormers' lines off the terminal: they go to a file, and progress and this package's messages are shown."""

import argparse
import contextlib
import logging
import os
import sys
import warnings
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from mindformers_adaptive.cli.output import print_text, progress_bar, styled, wrapped

# The folder in which MindFormers writes its logs, below its output folder.
_FOLDER = "log"
# After a failure, show at most this number of the last lines.
_LAST = 20
# Log messages of files in this folder are this package's.
_PACKAGE = Path(__file__).parents[1]


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
def show_training(terminal: IO[str]) -> Iterator[list[Any]]:
    """Within :func:`lines_in_file`, show the progress of a training, and the log messages of this package.

    Yields:
        list[Callback], to be given to the training.
    """
    if terminal is sys.stderr:
        # There is no file, so MindFormers' lines themselves are shown.
        yield []
        return
    from mindformers_adaptive.monitor.training_progress import TrainingProgress

    # MindFormers removes the handlers of its logger when it sets the output folder, so look at each record instead.
    make_record = logging.getLogRecordFactory()

    def make_and_show(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make_record(*args, **kwargs)
        if Path(record.pathname).is_relative_to(_PACKAGE):
            _show(record.getMessage(), terminal, "warning" if record.levelno >= logging.WARNING else "")
        return record

    logging.setLogRecordFactory(make_and_show)
    with contextlib.ExitStack() as stack:
        stack.callback(logging.setLogRecordFactory, make_record)
        yield [TrainingProgress(lambda total: stack.enter_context(progress_bar(total, "steps", terminal, lines=True)))]


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
    saved = [os.dup(number) for number in (1, 2)]
    terminal = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="backslashreplace")

    def show(message: Any, *args: Any, **kwargs: Any) -> None:
        _show(f"warning: {message}", terminal, "warning")

    _point_to(target, target)
    # On its import, MindFormers sends warnings to its log. Import it first, so that they are shown instead.
    with contextlib.suppress(ImportError):
        import mindformers  # noqa: F401
    show_warning, warnings.showwarning = warnings.showwarning, show
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


def _show(text: str, terminal: IO[str], style: str = "") -> None:
    if not terminal.isatty():
        # In a file, grep finds the whole message on one line.
        print_text(text, terminal, wraps=False)
        return
    from tqdm import tqdm

    # A plain print would tear the progress bar apart.
    tqdm.write(styled(wrapped(text), style, terminal), file=terminal)
