"""The program: it finds the subcommand, runs it, and turns what went wrong into a message and an exit code."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from mindformers_adaptive.cli.output import UsageError
from mindformers_adaptive.text.install_hint import install_hint

__all__ = ["COMMANDS", "main"]

# By name: what it does. Each is a module of this package with add_arguments(parser) and run(options), or, where another
# program of this package already does it, forward(arguments).
COMMANDS = {
    "train": "train, fine-tune, evaluate or predict from a YAML file of MindFormers",
    "inspect": "show the state of loss scaling that a checkpoint holds",
    "probe": "measure the ranges of gradients and weights at several loss scales",
    "find": "find the loss scale that a training should start from",
    "analyze": "say what the loss scale did in a run, from its log, and what to change",
    "simulate": "replay one policy on a trace",
    "compare": "replay several policies on traces, and compare them",
    "tune": "find the windows, factor and hysteresis that would have cost least on traces",
    "plot": "draw the record of a run or a sweep over loss scales",
    "megatron": "turn Megatron-LM's arguments into a scale_sense section",
}

_EXIT_CODES = "exit codes: 0 done; 1 what was asked failed; 2 wrong usage"
_EXAMPLES = """\
examples:
  adaptive-loss-scale train --config configs/tiny_llama_cpu_fp16.yaml --train_dataset_dir output/corpus
  adaptive-loss-scale analyze output/log/rank_0/info.log
  adaptive-loss-scale tune output/log/rank_0/info.log
  adaptive-loss-scale find --config my.yaml --train_dataset_dir my_data
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program.

    Args:
        arguments (Sequence[str], optional): the command line without the program's name. Default: None, ``sys.argv``.

    Returns:
        int, the exit code: 0 done, 1 what was asked failed, 2 wrong usage.

    Examples:
        >>> main(["megatron", "--fp16", "--loss-scale", "1024"])
        type: FixedLossScaleUpdateCell
        loss_scale_value: 1024.0
        0
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in COMMANDS:
        command = importlib.import_module(f"mindformers_adaptive.cli.{words[0]}")
        if not hasattr(command, "forward"):
            return _run(command, words)
        try:
            with install_hint(f"'{words[0]}'"):
                return int(command.forward(words[1:]) or 0)
        except ImportError as error:
            print(f"adaptive-loss-scale {words[0]}: error: {error}", file=sys.stderr)
            return 1
    # Help, or a usage error, for which no subcommand has to be imported.
    _main_parser().parse_args(words)
    _main_parser().print_help()
    return 2


def _run(command, words):  # type: ignore[no-untyped-def]
    parser = argparse.ArgumentParser(
        prog=f"adaptive-loss-scale {words[0]}",
        description=command.__doc__,
        epilog=f"{command.EXAMPLES}\n{_EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(parser)
    parser.add_argument("--traceback", action="store_true", help="show where in the program an error came from")
    options = parser.parse_args(words[1:])
    try:
        with install_hint(f"'{words[0]}'"):
            command.run(options)
        sys.stdout.flush()
    except UsageError as error:
        parser.error(str(error))
    except BrokenPipeError:
        # Who reads, such as `head`, has seen enough. What is left to be flushed at exit has to go somewhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        if options.traceback:
            raise
        print(f"adaptive-loss-scale {words[0]}: error: {error}", file=sys.stderr)
        return 1
    return 0


def _main_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="adaptive-loss-scale",
        description="Adaptive loss scaling for MindSpore and MindFormers.",
        epilog=f"{_EXAMPLES}\n{_EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, purpose in COMMANDS.items():
        commands.add_parser(name, help=purpose)
    return parser
