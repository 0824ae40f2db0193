"""Run the program ``adaptive-loss-scale`` as ``python -m mindformers_adaptive``."""

import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program like :func:`mindformers_adaptive.cli.program.main`, but without a traceback on Ctrl-C.

    Args:
        arguments (Sequence[str], optional): the command line without the program's name. Default: None, ``sys.argv``.

    Returns:
        int, the exit code.
    """
    # If a shell closes standard error (`2>&-`), sys.stderr is None. print(file=None) would write error messages to
    # standard output, so discard them instead.
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    try:
        # Import the program inside the try block, because a user may press Ctrl-C during the import.
        from mindformers_adaptive.cli import program

        return program.main(arguments)
    except KeyboardInterrupt:
        if "--traceback" in (sys.argv if arguments is None else arguments):
            raise
        print("adaptive-loss-scale: interrupted", file=sys.stderr)
        # 130 is the exit code that a shell reports for a program that SIGINT has ended.
        return 130


if __name__ == "__main__":
    sys.exit(main())
