"""Train from a loss scale that is far too low, and measure how long a rule takes until the loss scale fits again.

    python -m scripts.studies.low_start [--again NAME] [--json FILE]

A loss scale is far too low after a row of bad batches, or if a resumed run starts at 1 because its state is lost. The
demo's model trains as one of 256 micro-batches, from a loss scale of 1, where FP16 loses part of the gradient. Prints
Markdown, and draws docs/images/low_start.svg. Runs of the same seed have the same weights and data.

This script trains by adaptive and by guided scaling. Dynamic scaling with a window of 1000 raises no scale within 400
steps, so from 1 it takes the steps of a fixed scale of 1. These runs, and dynamic scaling from 2^16, which fits, are in
docs/figures/micro_batches.json.

Gradient accumulation over 256 micro-batches divides the loss by 256. Here the loss scale is divided instead, which
gives the same gradients. The script prints and draws the loss scale as it is in a YAML file.
"""

import json
import math
import sys

import numpy as np

from mindformers_adaptive.lab.measures import FREE_BITS
from mindformers_adaptive.plots import canvas
from scripts.studies import micro_batches
from scripts.studies.reporting import ROOT, output_to_stderr, report, study_parser, use_one_thread
from scripts.studies.worth_report import interval, mean_and_interval

PICTURE = "docs/images/low_start.svg"
DATA = ROOT / "docs" / "figures" / "low_start.json"
MICRO_BATCHES = 256
START = 1.0
SEEDS, STEPS, LOOK_EVERY = micro_batches.SEEDS, micro_batches.LLAMA["steps"], 40
RULES = ("adaptive", "guided")

# The runs by name: the way in docs/figures/micro_batches.json, or the rule that this script trains by; the name in the
# table; log2 of the loss scale if it stays; and the colour in the picture.
DYNAMIC, FITTING = "dynamic", "fitting"
RUNS = {
    DYNAMIC: ("none", "dynamic, window 1000", 0, canvas.WARNING),
    "adaptive": ("adaptive", "adaptive", None, canvas.MAIN),
    "guided": ("guided", "gradient-guided", None, canvas.SECOND),
    FITTING: ("dynamic", "dynamic from 2^16, which fits", 16, canvas.MUTED),
}


def main():
    parser = study_parser(__doc__, PICTURE)
    parser.add_argument("--again", metavar="NAME", help="train only by rules that have this in their names")
    arguments = parser.parse_args()
    again = arguments.again or ""
    runs = json.loads(DATA.read_text(encoding="utf-8"))["runs"] if again else {}
    with output_to_stderr():
        use_one_thread()
        new = measure([rule for rule in RULES if again in rule])
    result = {"steps": STEPS, "runs": runs | new}
    report(arguments, result, tables(result), canvas.save(draw(result), arguments.picture))


def measure(rules):
    """Train by each of the rules with each seed; return a list of summaries by the name of the rule."""
    from scripts.studies.worth_tasks import task_of
    from scripts.studies.worth_training import Trainings

    trainings, summaries = Trainings(task_of("llama", micro_batches.LLAMA), LOOK_EVERY), {}
    for rule in rules:
        method = method_of(rule)
        for seed in range(SEEDS):
            print(f"{rule}, seed {seed}", file=sys.stderr, flush=True)
            summaries.setdefault(rule, []).append(summary(trainings.run(method, seed)))
    return summaries


def method_of(rule):
    """Return the method that starts from ``START``. Loss scale and floor are divided by the number of micro-batches."""
    from mindformers_adaptive.wrapper import AdaptiveLossScaleUpdateCell, GradientGuidedLossScaleUpdateCell
    from scripts.studies.worth_training import Method

    floor = START / MICRO_BATCHES
    cell = {
        "adaptive": lambda scale: AdaptiveLossScaleUpdateCell(scale, 2, 20, min_loss_scale=floor),
        "guided": lambda scale: GradientGuidedLossScaleUpdateCell(scale, min_loss_scale=floor),
    }[rule]
    return Method(rule, cell, floor)


def summary(run):
    """Return the results of a run as a dict.

    Returns:
        dict: ``quality``, the loss at the end; ``skipped``, the number of skipped steps; ``scales``, pairs of a step
        and log2 of the loss scale from this step on; ``ceilings``, pairs of a step and log2 of its ceiling; ``lost``
        and ``worst``, the shares of the gradient that underflow in the first step, by norm, and for the Parameter that
        loses most.
    """
    exponents = [math.log2(scale * MICRO_BATCHES) for scale in run["scales"]]
    changes = [step for step, exponent in enumerate(exponents) if not step or exponent != exponents[step - 1]]
    seen = [look for look in run["looks"] if look.get("ceiling")]
    return {
        "quality": run["quality"],
        "skipped": len(run["skipped"]),
        "lost": seen[0]["lost"],
        "worst": seen[0]["worst"],
        "scales": [[step, exponents[step]] for step in changes],
        "ceilings": [[look["step"], math.log2(look["ceiling"] * MICRO_BATCHES)] for look in seen],
    }


def runs_of(result, name):
    """Return the runs of a name in ``RUNS``, trained by this script or by scripts/studies/micro_batches.py."""
    if name in result["runs"]:
        return result["runs"][name]
    way, _, exponent, _ = RUNS[name]
    data = json.loads(micro_batches.DATA.read_text(encoding="utf-8"))
    runs = data["tasks"]["llama"]["runs"][str(MICRO_BATCHES)][way]
    return [{**run, "scales": [[0, exponent]]} for run in runs]


def back(result, name):
    """Return the mean number of steps until the loss scale fits, as text.

    It fits if it is at most ``FREE_BITS`` below the median ceiling of the adaptive run of the seed.
    """
    steps = []
    for run, adaptive in zip(runs_of(result, name), result["runs"]["adaptive"], strict=False):
        lowest = lowest_that_fits(adaptive)
        steps.append(next((step for step, exponent in run["scales"] if exponent >= lowest), None))
    return f"over {result['steps']}" if None in steps else f"{np.mean(steps):.0f}"


def reached(result, name):
    """Return the mean loss scale after the last step, as text."""
    return f"2^{np.mean([run['scales'][-1][1] for run in runs_of(result, name)]):.0f}"


def lowest_that_fits(run):
    return float(np.median([ceiling for _, ceiling in run["ceilings"]])) - FREE_BITS


def tables(result):
    """Return the only table of a result, as {name: rows}; the first row has the names of the columns."""
    columns = ["rule, from a loss scale of 1", micro_batches.LOST, "steps until the scale fits"]
    columns.append(f"loss scale after {result['steps']} steps")
    rows = [[*columns, "loss on held-out text", "more than from 2^16"]]
    fitting = qualities(result, FITTING)
    for name, (_, title, *_) in RUNS.items():
        runs = runs_of(result, name)
        losses = qualities(result, name)
        more = "-" if name == FITTING else interval(mean_and_interval(losses - fitting), 3)
        scales = back(result, name), reached(result, name)
        rows.append([title, micro_batches.lost(runs), *scales, f"{losses.mean():.3f}", more])
    return {"runs": rows}


def qualities(result, name):
    return np.array([run["quality"] for run in runs_of(result, name)])


def draw(result):
    """Draw the loss scales of the first seed's runs, with the loss at the end."""
    figure = canvas.new_figure(9, 4.2)
    canvas.headline(figure, "From a loss scale that is far too low: the demo's model as one of 256 micro-batches")
    axes = figure.subplots()
    steps, ceilings = np.array(result["runs"]["adaptive"][0]["ceilings"]).T
    steps, ceilings = np.append(steps, result["steps"]), np.append(ceilings, ceilings[-1])
    top = ceilings.max() + 2
    axes.fill_between(steps + 1, ceilings, top, color=canvas.CONTEXT, linewidth=0, label="overflows here")
    axes.axhspan(-1, lowest_that_fits(result["runs"]["adaptive"][0]), color=canvas.WARNING, alpha=0.12, linewidth=0)
    axes.text(result["steps"] * 0.6, 1.2, "here FP16 loses a part of the gradient", ha="center", fontsize=9.5)
    for name, (_, title, _, colour) in RUNS.items():
        run = runs_of(result, name)[0]
        starts, exponents = zip(*run["scales"], strict=True)
        edges = [*(start + 1 for start in starts), result["steps"] + 1]
        label = f"{title}: loss {run['quality']:.2f}"
        axes.stairs(exponents, edges, baseline=None, color=colour, linewidth=1.8, label=label)
    axes.set(xlim=(1, result["steps"]), ylim=(-1, top))
    canvas.style_axes(axes, x_label="step", y_label="loss scale, log2")
    axes.legend(fontsize=9, loc="center", bbox_to_anchor=(0.5, 0.69), ncols=2, frameon=False)
    return figure


if __name__ == "__main__":
    main()
