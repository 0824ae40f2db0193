"""Train on batches of two kinds in turn, one with a much larger loss, and count which batches each rule skips.

    python -m scripts.studies.batches_in_turn [--json FILE]

Several data sets in a fixed order can have losses of very different size. Here every 2nd to 100th batch has a loss that
is 2^11 or 2^14 times as large, in trainings of a small network in FP16 on a CPU. If a rule skips all these batches, the
network never learns from them. Prints Markdown. A second run on the same machine prints the same.
"""

import dataclasses
import itertools
import sys

import numpy as np

from scripts.studies.reporting import output_to_stderr, report, study_parser, use_one_thread

RULES = {"dynamic": "dynamic, window 1000", "adaptive": "adaptive", "guided": "gradient-guided"}
DEPTHS, PERIODS = (11, 14), (2, 3, 10, 100)
START, STEPS = 2.0**16, 900


def main():
    arguments = study_parser(__doc__).parse_args()
    with output_to_stderr():
        use_one_thread()
        runs = {rule: train(rule, itertools.product(PERIODS, DEPTHS), STEPS) for rule in RULES}
    result = {"steps": STEPS, "rules": runs}
    report(arguments, result, tables(result))


def train(rule, turns, steps):
    """Train by a rule, with each pair of a period and a depth in ``turns``.

    Returns:
        list[dict]: for each run its ``period`` and ``depth``, and the numbers, from 0, of the ``skipped`` steps.
    """
    from scripts.studies.worth_tasks import SMALL_TASKS
    from scripts.studies.worth_training import Trainings, divided

    task, runs = SMALL_TASKS["moving"], []
    method = divided(rule, START, 1)
    trainings = Trainings(task)
    training, weights = trainings.compiled(method.dtype, method.cell), trainings.weights(0)
    for period, depth in turns:
        print(f"{rule}: every {period} batches, 2^{depth}", file=sys.stderr, flush=True)
        # The batch of step 0 has the usual loss, the batch of step 1 the larger loss.
        batch = dataclasses.replace(task, burst=(1, 2, 2.0**depth)).data(seed=0).batch
        batches = (batch(int(is_large(step, period))) for step in range(steps))
        record = training.run(START, weights, batches)
        skipped = [step for step, row in enumerate(record) if row["overflow"]]
        runs.append({"period": period, "depth": depth, "skipped": skipped})
    return runs


def is_large(step, period):
    return step % period == period - 1


def tables(result):
    """Return the only table of a result, as {name: rows}; the first row has the names of the columns."""
    rows = [["larger loss in", "such batches", *(f"{name}: skipped" for name in RULES.values())]]
    for period in PERIODS:
        counts = []
        for rule in RULES:
            of_period = [run for run in result["rules"][rule] if run["period"] == period]
            skipped = [sum(is_large(step, period) for step in run["skipped"]) for run in of_period]
            counts.append(", ".join(map(str, skipped)))
        rows.append([f"1 of {period}", str(result["steps"] // period), *counts])
    return {"skipped": rows}


def untrained(result, rule):
    """Return, for each run of a rule, the share of the batches with a larger loss that its second half skips."""
    shares = []
    for run in result["rules"][rule]:
        half = range(result["steps"] // 2, result["steps"])
        large = [step for step in half if is_large(step, run["period"])]
        shares.append(np.isin(large, run["skipped"]).mean())
    return shares


if __name__ == "__main__":
    main()
