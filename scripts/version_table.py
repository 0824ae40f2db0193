"""Run the tests with other pairs of MindSpore and MindFormers, and print a table of what passed.

    python scripts/version_table.py
    python scripts/version_table.py --pairs 2.7.0+1.6.0 --only resume

Each pair is installed into a .venv of its own, as ``scripts/test_pair.sh`` does. The output of the tests goes to
``output/version_table``.
"""

import argparse
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from study import table

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "output" / "version_table"
PAIRS = ("2.7.0+1.6.0", "2.10.0+1.9.0")

# MindFormers' trainers leave settings in their process that change how later graphs compile; see scripts/test.sh.
_TRAINERS = ("tests/checkpoint", "tests/gradients", "tests/integration")
_TWO_WORKERS = ("--numprocesses", "2", "--dist", "loadgroup")
# Columns of the table, and the runs of pytest that each adds up.
SUITES = {
    "not slow": (
        ("-m", "not slow", *_TWO_WORKERS, *(f"--ignore={folder}" for folder in _TRAINERS)),
        ("-m", "not slow", *_TWO_WORKERS, *_TRAINERS),
    ),
    "resume": ((*_TWO_WORKERS, "tests/integration/test_resume.py"),),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", nargs="+", default=PAIRS, metavar="MINDSPORE+MINDFORMERS")
    parser.add_argument("--only", choices=SUITES, action="append", help="run this column only")
    arguments = parser.parse_args()
    columns = arguments.only or list(SUITES)
    OUTPUT.mkdir(parents=True, exist_ok=True)
    rows = [[*pair.split("+"), *(run(pair, column) for column in columns)] for pair in arguments.pairs]
    print("\n".join(table(["MindSpore", "MindFormers", *columns], rows)))


def run(pair, column):
    """Run a column's tests with a pair, and return how many passed, failed and were skipped, as text."""
    counts = Counter()
    for number, arguments in enumerate(SUITES[column]):
        log = OUTPUT / f"{pair} {column} {number}.log"
        command = ["bash", str(ROOT / "scripts" / "test_pair.sh"), *pair.split("+"), *arguments]
        with log.open("w") as output:
            subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        found = read_counts(log.read_text(encoding="utf-8", errors="replace"))
        if not found:
            print(f"The tests did not come to an end, see {log.relative_to(ROOT)}", file=sys.stderr)
            found = {"not run to the end": 1}
        counts.update(found)
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.items())


def read_counts(text):
    """Return the counts in the last line of pytest's output by outcome; empty without such a line.

    Examples:
        >>> read_counts("== 1 failed, 20 passed, 2 skipped in 3.00s ==")
        {'failed': 1, 'passed': 20, 'skipped': 2}
    """
    ends = re.findall(r"^=* ?((?:\d+ \w+,? ?)+) in [\d.]+s", text, re.MULTILINE)
    counted = re.findall(r"(\d+) (\w+)", ends[-1]) if ends else []
    return {outcome: int(count) for count, outcome in counted if outcome != "deselected"}


if __name__ == "__main__":
    main()
