"""Shared code of the scripts: arguments, Markdown tables, a standard output with only the report, one thread."""

import argparse
import contextlib
import importlib.metadata
import json
import os
import sys
import textwrap
from pathlib import Path

from mindformers_adaptive.text.files import atomic_write, json_text

ROOT = Path(__file__).resolve().parents[2]
# Lines of data files. They may be longer than lines of code, so that a run fits on a line.
LINE_LENGTH = 200


def positive(text):
    """Return the positive integer that a text holds, or raise an error for the command line."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, but got {text}")
    return number


def study_parser(description, picture=None):
    """Return a parser for the options of a study, with ``--json``, and with ``--picture`` if the study draws one.

    Args:
        description (str): the docstring of the script; its first line is shown.
        picture (str, optional): where the picture goes by default, from the top folder of the project. Default: None.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    add_json_option(parser)
    if picture is not None:
        parser.add_argument("--picture", type=Path, default=ROOT / picture, help=f"file (default: {picture})")
    return parser


def add_json_option(parser):
    """Add the option ``--json``, which accepts only a file that can be written."""
    parser.add_argument("--json", type=_file_to_write, metavar="FILE", help="also write the result to this file")


def _file_to_write(text):
    file = Path(text)
    if not file.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(file.parent)!r}. Create it, or give another path")
    if file.exists() and not file.is_file():
        raise argparse.ArgumentTypeError(f"{text!r} exists, but is not a regular file. Give another path")
    return file


def versions():
    """Return the versions of MindSpore and MindFormers by their names."""
    return {name: importlib.metadata.version(name) for name in ("mindspore", "mindformers")}


def write_json(file, result):
    """Write a result to a file as JSON. Without a file (None, as without the option ``--json``), write nothing."""
    if file is not None:
        with atomic_write(file) as lines:
            lines.write(compact_json(json.loads(json_text(result))) + "\n")


def compact_json(value, indent=""):
    """Return a value as JSON in few lines: what fits is on one line, and lists of numbers fill their lines.

    Examples:
        >>> run = {"seed": 0, "skipped": [*range(18)], "way": "guided"}
        >>> print(compact_json({"steps": 2, "runs": [run, run]}))
        {
         "steps": 2,
         "runs": [
          {"seed": 0, "skipped": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17], "way": "guided"},
          {"seed": 0, "skipped": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17], "way": "guided"}
         ]
        }
    """
    text, inner = json.dumps(value), indent + " "
    if len(indent + text) <= LINE_LENGTH or not isinstance(value, dict | list):
        return text
    if isinstance(value, dict):
        rows = [f"{inner}{json.dumps(key)}: {compact_json(each, inner)}" for key, each in value.items()]
        return "\n".join(["{", ",\n".join(rows), f"{indent}}}"])
    if any(isinstance(each, dict | list | str) for each in value):
        rows = [inner + compact_json(each, inner) for each in value]
        return "\n".join(["[", ",\n".join(rows), f"{indent}]"])
    filled = textwrap.fill(text[1:-1], LINE_LENGTH, initial_indent=inner, subsequent_indent=inner)
    return "\n".join(["[", filled, f"{indent}]"])


def table(rows):
    """Yield the lines of a table in Markdown; the first row has the names of the columns.

    Examples:
        >>> list(table([["step", "loss"], ["1", "2.5"]]))
        ['| step | loss |', '|---|---|', '| 1 | 2.5 |']
    """
    columns, *body = rows
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "---|" * len(columns)
    for row in body:
        yield "| " + " | ".join(row) + " |"


def with_captions(tables, captions):
    """Yield the lines of several tables, each below its caption; the first row of a table has the column names."""
    for name, rows in tables.items():
        yield from ["", captions[name], "", *table(rows)]


def report(arguments, result, tables, picture=None):
    """Print versions and tables of a study on a CPU, and write its result to the file of ``--json``.

    Args:
        arguments (Namespace): the options, from :func:`study_parser`.
        result (dict): the result.
        tables (dict[str, list]): the tables; the first row of each has the names of the columns.
        picture (Path, optional): the file of the picture. Default: None, there is no picture.
    """
    print("MindSpore {mindspore}, MindFormers {mindformers}, CPU, graph mode".format(**versions()))
    for rows in tables.values():
        print("\n".join(["", *table(rows)]))
    if picture is not None:
        print(f"\nDrawn: {os.path.relpath(picture)}")
    write_json(arguments.json, {**versions(), **result})


@contextlib.contextmanager
def output_to_stderr():
    """Send everything that is written to standard output, also by C++ code, to standard error."""
    sys.stdout.flush()
    standard_output = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(standard_output, 1)
        os.close(standard_output)


def use_one_thread():
    """Compute with one thread, so that the same seeds give the same results. Call this before the first graph."""
    import mindspore

    mindspore.set_device("CPU")
    mindspore.device_context.cpu.op_tuning.threads_num(1)
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
