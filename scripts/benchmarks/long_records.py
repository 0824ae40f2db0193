"""Measure the time and memory that commands need for the record of a long run, by the number of steps.

    python -m scripts.benchmarks.long_records
    python -m scripts.benchmarks.long_records --steps 10000 100000

Each command runs in a separate process. Times are processor times, without the start of Python. Machines differ, so
compare the times with the time for parsing each line of the record as JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from mindformers_adaptive.record.step import FIELDS
from mindformers_adaptive.rules.adaptive import AdaptiveRule
from mindformers_adaptive.rules.lanes import Lanes
from scripts.studies.reporting import ROOT, add_json_option, positive, table, versions, write_json

PROGRAM = "import sys; from mindformers_adaptive.cli.program import main; sys.argv[0] = 'program'; sys.exit(main())"
READ = "import json, sys\nwith open(sys.argv[1]) as file:\n    for line in file:\n        json.loads(line)"
RESUME = """
import sys
from mindformers_adaptive.record.writer import RunRecord
record = RunRecord(sys.argv[1])
record.resume(int(sys.argv[2]) - 10, 7)
record.close()
"""
WRITE = (
    "import sys; from scripts.benchmarks.long_records import write_record; write_record(sys.argv[1], int(sys.argv[2]))"
)
WINDOWS = [f"dynamic:scale_window={window}" for window in (20, 200, 1000)]
JSON = "JSON alone"


def commands(record, picture, steps):
    """Return, by command name, the arguments with which to start Python for each command that reads a record.

    The last command, "resume", also changes the record.
    """
    return {
        JSON: ["-c", READ, record],
        "analyze": ["-c", PROGRAM, "analyze", record],
        "analyze --plot": ["-c", PROGRAM, "analyze", record, "--plot", picture],
        "compare": ["-c", PROGRAM, "compare", record, "--rules", *WINDOWS],
        "resume": ["-c", RESUME, record, str(steps)],
    }


def write_record(path, steps):
    """Write the record that LossScaleMonitor would write for a run of the adaptive rule with wandering ceilings."""
    random = np.random.default_rng(0)
    noise, level, wander = random.normal(0, 0.02, steps).tolist(), 0.0, []
    for change in noise:
        level = 0.9995 * level + change
        wander.append(level)
    ceilings = np.exp2(18 + np.array(wander) - 6 * (random.random(steps) < 0.001)).tolist()
    losses, rule = random.uniform(2, 3, steps).tolist(), AdaptiveRule()
    lanes, unknown = Lanes(rule, [rule.start(2.0**16)]), dict.fromkeys(("largest_gradient", "gradient_norm"))
    with open(path, "w", encoding="utf-8") as file, lanes.watching():
        for step, (ceiling, loss) in enumerate(zip(ceilings, losses, strict=True), start=1):
            before = float(lanes.loss_scale[0])
            overflow = before > ceiling
            lanes.advance(np.array([overflow]), np.array([np.nan]))
            [state] = lanes.states()
            values = {"step": step, "loss": loss, "overflow": overflow, "loss_scale": before, "dropped_by_norm": False}
            values |= {"next_loss_scale": state.loss_scale, **unknown}
            line = {name: values[name] if name in values else getattr(state, name) for name in FIELDS}
            file.write(json.dumps({"run": 7, **line} if step == 1 else line) + "\n")


def run(command):
    """Run Python with some arguments; return its processor time in seconds and its peak memory in MB."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL, env=environment)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"The command {' '.join(command[2:])} failed with exit code {process.returncode}")
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def measure(lengths):
    """Return, for each command, its time in seconds and its memory at each length of the record."""
    start, _ = min(run(["-c", "pass"]) for _ in range(3))
    measurements = {}
    with tempfile.TemporaryDirectory() as folder:
        record, picture = str(Path(folder, "record.jsonl")), str(Path(folder, "run.png"))
        for steps in lengths:
            # Write the record in a separate process too. Otherwise, later processes would inherit the peak memory that
            # this process needs to write the record.
            run(["-c", WRITE, record, str(steps)])
            for name, command in commands(record, picture, steps).items():
                seconds, memory = run(command)
                measurements.setdefault(name, []).append((max(seconds - start, 0.001), memory))
    return measurements


def tables(result):
    """Return the only table of a measurement, as {name: rows}; the first row has the names of the columns."""
    measurements, lengths = result["found"], result["steps"]
    growth = f"times as long, {lengths[0]:,} to {lengths[-1]:,} steps"
    rows = [["command", *(f"{steps:,} steps, s" for steps in lengths), growth, f"times {JSON}", "MB"]]
    alone = measurements[JSON][-1][0]
    for name, measured in measurements.items():
        seconds = [value for value, _ in measured]
        ratios = f"{seconds[-1] / seconds[0]:.0f}", f"{seconds[-1] / alone:.1f}"
        rows.append([name, *(f"{value:.2f}" for value in seconds), *ratios, f"{measured[-1][1]:.0f}"])
    return {"commands": rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", nargs="+", type=positive, default=[10_000, 100_000, 1_000_000])
    add_json_option(parser)
    arguments = parser.parse_args()
    result = {**versions(), "steps": arguments.steps, "found": measure(arguments.steps)}
    print("\n".join(table(tables(result)["commands"])))
    write_json(arguments.json, result)


if __name__ == "__main__":
    main()
