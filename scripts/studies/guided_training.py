"""Train the demo's model with adaptive and with gradient-guided loss scaling, and print the skipped steps as Markdown.

python -m scripts.studies.guided_training [--json FILE] [--picture FILE]
"""

import itertools
import math
import sys
from collections import defaultdict

import numpy as np

from mindformers_adaptive.plots.canvas import save
from mindformers_adaptive.plots.runs import draw_runs
from mindformers_adaptive.rules.formats import FLOAT16
from scripts.studies import reporting

RULES = ("guided", "adaptive")
STARTS = (2**32, 2**10)
STEPS, SEEDS = 400, 3
LAST = 20
# A test repeats only this many steps at the beginning of a run, and compares their losses.
EARLY = slice(10, 20)


def main():
    parser = reporting.study_parser(__doc__)
    parser.add_argument("--picture", help="draw both rules' runs of the first seed from 2^32 to this PNG or SVG file")
    arguments = parser.parse_args()
    # Keep the output of MindSpore and MindFormers out of the printed table.
    with reporting.output_to_stderr():
        runs = trainings()
    result = {"steps": STEPS, "seeds": SEEDS, "trainings": []}
    for start, rule in itertools.product(STARTS, RULES):
        result["trainings"].append({"from": start, "rule": rule, "runs": list(map(summary, runs[rule, start]))})
    [rows] = tables(result).values()
    print("\n".join(reporting.table(rows)))
    reporting.write_json(arguments.json, result)
    if arguments.picture:
        drawn = {rule: runs[rule, STARTS[0]][0] for rule in RULES}
        print(f"Drawn: {save(draw_runs(drawn), arguments.picture)}", file=sys.stderr)


def trainings():
    """Return the records of the trainings by rule and initial scale, one for each seed of weights and sample order."""
    import mindspore

    from scripts.studies.worth_training import LlamaTraining

    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")
    runs = defaultdict(list)
    for rule in RULES:
        training = LlamaTraining(rule, STEPS)
        for start, seed in itertools.product(STARTS, range(SEEDS)):
            print(f"{rule} from {start}, seed {seed}", file=sys.stderr, flush=True)
            runs[rule, start].append(training.run(start, seed))
    return runs


def summary(record):
    """Return a summary of a run. A test repeats the first steps of the run, and compares them with the summary.

    The summary has the steps skipped before and after the first applied step, and the mean losses of the last applied
    steps and of the ``EARLY`` steps. ``scales`` has log2 of the loss scale at each step, with an exclamation mark after
    an overflow, or with a slash and log2 of the largest scale that the gradients allow, if they were measured.
    """
    flags = [row["overflow"] for row in record]
    before = flags.index(False)
    applied = [row["loss"] for row in record if not row["overflow"]]
    early = [row["loss"] for row in record[EARLY]]
    after = sum(flags[before:])
    losses = {"loss": float(np.mean(applied[-LAST:])), "early": float(np.mean(early))}
    return {"before": before, "after": after, **losses, "scales": " ".join(map(scale_of, record))}


def scale_of(row):
    exponent = f"{math.log2(row['loss_scale']):g}"
    if row["overflow"]:
        return f"{exponent}!"
    gradient = row["largest_gradient"]
    return exponent if gradient is None else f"{exponent}/{math.floor(math.log2(FLOAT16.largest / gradient))}"


def tables(result):
    """Return the only table of a result, as {name: rows}; the first row has the names of the columns."""
    rows = [["from", "rule", "skipped before the first applied step", "skipped after it", "final loss"]]
    for training in result["trainings"]:
        before, after, losses = ([run[name] for run in training["runs"]] for name in ("before", "after", "loss"))
        listed = (", ".join(map(str, numbers)) for numbers in (before, after))
        each = ", ".join(f"{loss:.3f}" for loss in losses)
        start = f"2^{training['from'].bit_length() - 1}"
        rows.append([start, training["rule"], *listed, each])
    return {"trainings": rows}


if __name__ == "__main__":
    main()
