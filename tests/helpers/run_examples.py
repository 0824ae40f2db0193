"""Run Python files, each in a process of its own, with MindSpore and MindFormers imported only once.

    run_examples.py FILE ...

Each FILE is run by a fork of this process, with its output in FILE.out. So nothing that one does is seen by another.
Those that fail are printed; the exit code is their number.
"""

import os
import runpy
import sys
import traceback
from pathlib import Path

import mindformers  # noqa: F401

import mindformers_adaptive.wrapper  # noqa: F401


def main(files):
    return sum(run(Path(file)) for file in files)


def run(file):
    """Run one file in a fork; return whether it failed."""
    output = file.with_suffix(".out")
    child = os.fork()
    if child:
        failed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
        if failed:
            print(f"{file.read_text()}\n{output.read_text()[-2000:]}", file=sys.stderr)
        return failed
    with output.open("w") as opened:
        os.dup2(opened.fileno(), 1)
        os.dup2(opened.fileno(), 2)
    status = 1
    try:
        runpy.run_path(str(file), run_name="__main__")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
