"""Compare the results of random loss-scaling rules in NumPy and in update cells: ``python -m scripts.random_rules``.

Each rule is generated from its seed and written to a readable module. In NumPy, the rule is computed alone, and side by
side with rules of other arguments. The exit code is 1 if any result differs.
"""

import argparse
import collections
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# How many rules share a graph, and how many rules run in one process. Both numbers are small, because MindSpore frees
# all memory of a compiled graph only when the process ends.
TOGETHER, OF_A_PROCESS = 5, 100
# The results of a rule: all steps are the same; the package refuses the rule; the rule warns of a subnormal number; or
# some steps differ.
OUTCOMES = ("same", "refused", "noticed", "different")


def main():
    """Compare random rules in NumPy and in update cells, and print the number of rules by outcome (``OUTCOMES``)."""
    arguments = read_arguments()
    counts = collections.Counter()
    last = arguments.first + arguments.programs
    for first in range(arguments.first, last, OF_A_PROCESS):
        programs = min(OF_A_PROCESS, last - first)
        if arguments.programs <= OF_A_PROCESS:
            counts += compare_rules(first, programs, arguments.steps, Path(arguments.folder))
        else:
            counts += in_a_process(first, programs, arguments)
            print(f"{first + programs - arguments.first} rules: {told(counts)}", flush=True)
    print(told(counts))
    return 1 if counts["different"] else 0


def read_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=100, help="how many rules. Default: 100")
    parser.add_argument("--first", type=int, default=1000, help="the seed of the first. Default: 1000")
    parser.add_argument("--steps", type=int, default=40, help="steps of each rule. Default: 40")
    folder = Path(tempfile.gettempdir()) / "random_rules"
    parser.add_argument("--folder", default=folder, help=f"where the modules are written. Default: {folder}")
    return parser.parse_args()


def told(counts):
    return ", ".join(f"{name} {counts[name]}" for name in OUTCOMES)


def in_a_process(first, programs, arguments):
    """Compare rules in a new process, and count the rules by outcome. If the process dies, count all as "different"."""
    command = [sys.executable, "-m", "scripts.random_rules", "--first", first, "--programs", programs]
    command += ["--steps", arguments.steps, "--folder", arguments.folder]
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    *lines, last = done.stdout.splitlines() or [""]
    if done.returncode not in (0, 1) or not last.startswith("same "):
        seeds = f"{first} to {first + programs - 1}"
        print(f"The process for the seeds {seeds} failed with exit code {done.returncode}. Its output:", done.stdout)
        return collections.Counter(different=programs)
    print(*lines, sep="\n", end="\n" if lines else "", flush=True)
    return collections.Counter({name: int(number) for name, number in map(str.split, last.split(", "))})


def compare_rules(first, programs, steps, folder):
    """Compare rules, and return the number of rules by outcome; print the rules that are "refused" or "different"."""
    os.environ.setdefault("GLOG_v", "3")
    from scripts.random_rules.compare import compare, make_rule

    folder.mkdir(parents=True, exist_ok=True)
    counts, waiting = collections.Counter(), []
    for seed in range(first, first + programs):
        try:
            waiting.append(make_rule(seed, folder))
        except ValueError as error:
            counts["refused"] += 1
            print(f"{seed} refused: {error}", flush=True)
        if waiting and (len(waiting) == TOGETHER or seed == first + programs - 1):
            for rule, outcome in zip(waiting, compare(waiting, steps), strict=True):
                counts[outcome if outcome in OUTCOMES else "different"] += 1
                if outcome not in OUTCOMES:
                    print(f"{rule.seed} different: {outcome} ({rule.path})", flush=True)
            waiting = []
    return counts


if __name__ == "__main__":
    sys.exit(main())
