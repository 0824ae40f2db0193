"""The program ``adaptive-loss-scale``: it runs a subcommand and turns errors into messages and exit codes."""

import argparse
import difflib
import importlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from mindformers_adaptive.cli.output import UsageError, print_text, styled, wrapped
from mindformers_adaptive.text.install_hint import install_hint
from mindformers_adaptive.text.nearest import did_you_mean
from mindformers_adaptive.text.untrusted import printable

# The subcommands in the order in which a user needs them, each with a short description. A subcommand is a module of
# this package with add_arguments(parser), run(options), and a docstring, which is its help and ends with examples. If a
# subcommand accepts words that argparse does not know, its parser has the default others=[], which these words replace.
_GROUPS = {
    "before a training": {
        "find": "[*] the loss scale to start from, and the ranges of gradients",
        "why": "[*] which layer overflows, and what helps",
    },
    "training": {
        "train": "[*] train, fine-tune, evaluate or predict from a MindFormers YAML file",
    },
    "after a training": {
        "analyze": "what the loss scale did, and what to change",
        "report": "the same as one HTML page, for one run or several",
        "plot": "a picture of gradients, of weights, or of several runs",
        "diff": "compare two checkpoints, or gradients of two devices (needs MindSpore)",
        "inspect": "the loss-scale state in a checkpoint (a .ckpt file needs MindSpore)",
    },
    "choosing a rule": {
        "compare": "replay other rules on a log",
    },
    "help": {
        "megatron": "translate Megatron-LM arguments into a scale_sense section",
    },
}
COMMANDS = {name: purpose for commands in _GROUPS.values() for name, purpose in commands.items()}
# The options, of all subcommands, whose value is the path of an output file.
_WRITTEN = ("plot", "picture", "output", "gradients")
# Removed subcommands, each with what to use instead.
_REPLACED_BY = {
    "probe": "Use 'find --loss-scales SCALE ...', which prints the same tables",
    "versions": "Use '--version'",
    "simulate": "Use 'compare --rules NAME'",
    "tune": "'analyze' says what to change, and 'compare --rules' replays rules with other settings",
}

_EXIT_CODES = """\
Options may have underscores in place of hyphens, as MindFormers' options have: --train_dataset_dir.
exit codes: 0 success; 1 failure; 2 wrong usage"""
_EXAMPLES = """\
[*] needs MindSpore and MindFormers

examples:
  adaptive-loss-scale train --config my.yaml --train-dataset-dir my_data
  adaptive-loss-scale analyze output/log/rank_0/info.log
  adaptive-loss-scale compare output/loss_scale_record.jsonl
  adaptive-loss-scale find --config my.yaml --train-dataset-dir my_data
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program ``adaptive-loss-scale``, and return its exit code.

    Args:
        arguments (Sequence[str], optional): the command line without the program's name. Default: None, ``sys.argv``.

    Returns:
        int, the exit code: 0 success, 1 failure, 2 wrong usage.

    Examples:
        >>> main(["megatron", "--fp16", "--loss-scale", "1024"])
        runner_wrapper:
          type: MFTrainOneStepCell
          scale_sense:
            type: FixedLossScaleUpdateCell
            loss_scale_value: 1024.0
        0
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in COMMANDS:
        return _run(importlib.import_module(f"mindformers_adaptive.cli.{words[0]}"), words)
    # No subcommand is given, so print the help, the version or a usage error without importing all subcommands.
    description = f"Adaptive loss scaling for MindSpore and MindFormers.\n\n{_command_list()}"
    parser = _parser("adaptive-loss-scale", description, _EXAMPLES)
    if words and words[0] == "--version":
        versions = importlib.import_module("mindformers_adaptive.cli.versions")
        return _carry_out(lambda: print(versions.all_versions()), parser)
    parser.add_argument(
        "--version",
        action="store_true",
        help="show what a bug report needs: versions, platform, and whether the pair was tested",
    )
    if words and words[0] in _REPLACED_BY:
        parser.error(f"there is no command {words[0]!r} any more. {_REPLACED_BY[words[0]]}")
    if words and (nearest := did_you_mean(words[0], COMMANDS)):
        parser.error(f"argument COMMAND: invalid choice: {words[0]!r}. {nearest}".rstrip())
    commands = parser.add_subparsers(metavar="COMMAND", required=True, help="from the list above")
    for name in COMMANDS:
        commands.add_parser(name)
    parser.parse_args(words)
    parser.print_help()
    return 2


def _command_list() -> str:
    """Return a line of help for each subcommand. The first line of each group says when the group is needed."""
    return "\n".join(
        f"{when if index == 0 else '':<20}{name:<10}{purpose}"
        for when, commands in _GROUPS.items()
        for index, (name, purpose) in enumerate(commands.items())
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print what is wrong, without the usage, which is longer than the message."""
        problem = wrapped(f"{self.prog}: error: {printable(message, keep=chr(10))}")
        self.exit(2, f"{styled(problem, 'error', sys.stderr)}\nAll options: {self.prog} --help\n")


def _parser(program: str, description: str, examples: str) -> argparse.ArgumentParser:
    epilog = f"{examples}\n{_EXIT_CODES}"
    return _Parser(program, description=description, epilog=epilog, formatter_class=_Layout)


class _Layout(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        # A wide terminal must not make lines of help that are too long to read.
        super().__init__(prog, width=min(shutil.get_terminal_size().columns, 100) - 2)


def _run(command: Any, words: list[str]) -> int:
    description, start, examples = (command.__doc__ or "").partition("\nexample")
    paragraphs = [wrapped(" ".join(each.split())) for each in description.split("\n\n")]
    parser = _parser(f"adaptive-loss-scale {words[0]}", "\n\n".join(paragraphs), f"{start.lstrip()}{examples}")
    command.add_arguments(parser)
    parser.add_argument("--traceback", action="store_true", help="show where in the program an error came from")
    options, unknown = parser.parse_known_intermixed_args([_with_hyphens(word) for word in words[1:]])
    if "others" in options:
        options.others = unknown
    elif unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{_nearest(unknown, parser, options)}")
    if same := _read_and_written(options):
        parser.error(f"{same!r} is both an input and the output, so it would be overwritten. Give another output file")

    def run() -> None:
        with install_hint(f"'{words[0]}'"):
            command.run(options)

    return _carry_out(run, parser, options.traceback)


def _read_and_written(options: argparse.Namespace) -> str | None:
    """Return the path of an output file if another option names the same file as an input, else None."""
    names: dict[bool, list[str]] = {True: [], False: []}
    for name, value in vars(options).items():
        words = value if isinstance(value, list) else [value]
        names[name in _WRITTEN] += [word for word in words if isinstance(word, str) and os.path.exists(word)]
    return next(
        (written for written in names[True] if any(os.path.samefile(written, other) for other in names[False])), None
    )


def _carry_out(run: Callable[[], None], parser: argparse.ArgumentParser, traceback: bool = False) -> int:
    """Call a function that prints a result, print its error if it fails, and return the exit code."""
    try:
        if sys.stdout is None:
            raise OSError("The standard output must be open, but is closed. Redirect it to a file, or to /dev/null.")
        run()
        sys.stdout.flush()
    except UsageError as error:
        print_text(f"{parser.prog}: error: {error}", sys.stderr, "error")
        parser.exit(2)
    except BrokenPipeError:
        # The reader of the output, such as `head`, has stopped. Redirect stdout, so that the flush at exit succeeds.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        if traceback:
            raise
        print_text(f"{parser.prog}: error: {_message(error)}", sys.stderr, "error")
        return 1
    return 0


def _message(error: Exception) -> str:
    if isinstance(error, ImportError | OSError | RuntimeError | TypeError | ValueError) and str(error):
        return str(error)
    # For an error not listed above, put its type before its message: the message of a KeyError is only the key.
    said = f"{type(error).__name__}: {error}".removesuffix(": ")
    return f"{said}. Run the command again with --traceback to see where it comes from."


def _nearest(words: Sequence[str], parser: argparse.ArgumentParser, options: argparse.Namespace) -> str:
    """Return a hint that names the known options most similar to the first unknown option."""
    option = next((word.partition("=")[0] for word in words if word.startswith("-")), "")
    similar: dict[str, str] = getattr(options, "similar", {})
    known = {name: name for action in parser._actions for name in action.option_strings} | similar
    if similar and "." in option:
        return f". A key of the YAML file is set by --options {option.lstrip('-')}=VALUE"
    nearest = [known[name] for name in difflib.get_close_matches(option, known, n=2)]
    return f". Did you mean {' or '.join(nearest)}?" if nearest else ""


def _with_hyphens(word: str) -> str:
    """Return an option's name with hyphens, as in this program. MindFormers' options have underscores."""
    return re.sub(r"^--[a-z_]+(?=$|=)", lambda option: option[0].replace("_", "-"), word)
