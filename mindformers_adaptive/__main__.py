"""``python -m mindformers_adaptive`` is the program ``adaptive-loss-scale``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program as :func:`mindformers_adaptive.cli.program.main` does, and end it without a traceback at Ctrl-C.

    Args:
        arguments (Sequence[str], optional): the command line without the program's name. Default: None, ``sys.argv``.

    Returns:
        int, the exit code.
    """
    # A shell closes standard error with 2>&-. Without a replacement, messages would be printed among the results.
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    try:
        # Importing the program takes long enough to be interrupted.
        from mindformers_adaptive.cli import program

        return program.main(arguments)
    except KeyboardInterrupt:
        if "--traceback" in (sys.argv if arguments is None else arguments):
            raise
        print("adaptive-loss-scale: interrupted", file=sys.stderr)
        # The exit code that a shell reports for a program that SIGINT has ended.
        return 130


if __name__ == "__main__":
    sys.exit(main())
