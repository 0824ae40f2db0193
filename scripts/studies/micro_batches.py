"""Compare ways of loss scaling for the demo's Llama, trained in full and with LoRA, by the number of micro-batches.

    python -m scripts.studies.micro_batches [--again NAME] [--json FILE]

A large batch is the sum of micro-batches. The loss of each micro-batch is divided by their number before the backward
pass, so the gradients are smaller with more micro-batches. Here each step takes one micro-batch. Instead of the loss,
the loss scale is divided, which gives the same gradients; FP32 needs no division. Prints Markdown, and draws
docs/images/micro_batches.svg. Runs of the same seed have the same weights and data.
"""

import json
import os
import sys

import numpy as np

from mindformers_adaptive.plots import canvas
from scripts.studies.harm import percent
from scripts.studies.reporting import ROOT, output_to_stderr, study_parser, table, use_one_thread, versions, write_json
from scripts.studies.worth_report import interval, mean_and_interval

PICTURE = "docs/images/micro_batches.svg"
DATA = ROOT / "docs" / "figures" / "micro_batches.json"
TASKS = ("llama", "lora")
MICRO_BATCHES = (1, 64, 256, 1024)
WAYS = {
    "none": "FP16, no scaling",
    "fixed": "fixed 2^16",
    "dynamic": "MindSpore's dynamic, window 1000",
    "adaptive": "adaptive",
    "guided": "guided",
}
LOST = "gradient lost at the start: by norm; worst Parameter"
START, SEEDS = 2.0**16, 3
LLAMA = {"steps": 400, "seq_length": 32}
LOOK_EVERY = 400
# The picture shows these ways of scaling only, so that it is readable when small.
DRAWN = {"none": canvas.WARNING, "dynamic": canvas.SECOND, "adaptive": canvas.MAIN}


def main():
    parser = study_parser(__doc__, PICTURE)
    parser.add_argument("--again", metavar="NAME", help="train only by ways that have this in their names")
    arguments = parser.parse_args()
    with output_to_stderr():
        use_one_thread()
        result = {"tasks": {key: measure(key, again=arguments.again) for key in TASKS}}
    print("MindSpore {mindspore}, MindFormers {mindformers}, CPU, graph mode".format(**versions()))
    for name, rows in tables(result).items():
        print("\n".join(["", f"### {name}", "", *table(rows)]))
    print(f"\nDrawn: {os.path.relpath(canvas.save(draw(result), arguments.picture))}")
    write_json(arguments.json, {**versions(), **result})


def measure(key, steps=None, seeds=SEEDS, micro_batches=MICRO_BATCHES, again=None):
    """Train a task, and return its runs as lists with a run for each seed.

    FP32 has one list. FP16 has one list for each number of micro-batches and way of scaling. With ``again``, only ways
    that have it in their names are trained; all other runs come from docs/figures/micro_batches.json.
    """
    from scripts.studies.worth_tasks import task_of
    from scripts.studies.worth_training import FP32, METHODS, Trainings, divided

    task = task_of(key, LLAMA)
    trainings = Trainings(task, look_every=LOOK_EVERY)
    [fp32] = [method for method in METHODS if method.name == FP32]

    def runs(method):
        print(f"{task.name}: {method.name} from {method.start:g}", file=sys.stderr, flush=True)
        return [figures(trainings.run(method, seed, steps)) for seed in range(seeds)]

    earlier = json.loads(DATA.read_text(encoding="utf-8"))["tasks"][key] if again else None
    divided_runs = {
        str(count): {
            way: earlier["runs"][str(count)][way] if again and again not in way else runs(divided(way, START, count))
            for way in WAYS
        }
        for count in micro_batches
    }
    of_fp32 = earlier["fp32"] if again else runs(fp32)
    return {"name": task.name, "steps": steps or task.steps, "fp32": of_fp32, "runs": divided_runs}


def figures(run):
    """Return the results of a run as a dict.

    Returns:
        dict: ``quality``, the final loss; ``skipped``, the number of skipped steps; ``lost``, the share of the gradient
        that underflows in the first step, by norm; ``worst``, the same of the Parameter that loses most; ``looks``,
        pairs of a step and the loss measured at this step.
    """
    return {
        "quality": run["quality"],
        "skipped": len(run["skipped"]),
        "lost": run["looks"][0].get("lost"),
        "worst": run["looks"][0].get("worst"),
        "looks": [[look["step"], look["quality"]] for look in run["looks"]],
    }


def tables(result):
    """Return a table for each task, as a list of rows; the first row has the names of the columns."""
    return {key: task_table(task) for key, task in result["tasks"].items()}


def task_table(task):
    columns = ["micro-batches", "way of scaling", LOST, "skipped steps"]
    rows = [[*columns, "loss on held-out text", "more than FP32's"]]
    fp32 = np.array([run["quality"] for run in task["fp32"]])
    rows.append(["any", "FP32", "-", "0", f"{fp32.mean():.3f}", "-"])
    for count, ways in task["runs"].items():
        for way, runs in ways.items():
            qualities = np.array([run["quality"] for run in runs])
            rows.append(
                [
                    f"{int(count):,}",
                    WAYS[way],
                    lost(runs),
                    ", ".join(str(run["skipped"]) for run in runs),
                    f"{qualities.mean():.3f}",
                    interval(mean_and_interval(qualities - fp32), 3),
                ]
            )
    return rows


def lost(runs):
    """Return the shares of the gradient that underflow in the first step, as text for the column ``LOST``."""
    shares = [[run[share] for run in runs if run[share] is not None] for share in ("lost", "worst")]
    return "; ".join(percent(np.mean(of_runs)) for of_runs in shares) if all(shares) else "overflow"


def draw(result):
    """Draw the final loss over the number of micro-batches, with a panel for each task."""
    figure = canvas.new_figure(8, 4.2)
    panels = figure.subplots(1, len(result["tasks"]), squeeze=False)[0]
    for axes, task in zip(panels, result["tasks"].values(), strict=True):
        counts = list(task["runs"])
        fp32 = np.mean([run["quality"] for run in task["fp32"]])
        axes.axhline(fp32, color=canvas.MUTED, linestyle="--", label="FP32")
        for way, color in DRAWN.items():
            losses = [np.mean([run["quality"] for run in task["runs"][count][way]]) for count in counts]
            axes.plot(range(len(counts)), losses, "o-", color=color, linewidth=2, label=WAYS[way])
        axes.set_xticks(range(len(counts)), [f"{int(count):,}" for count in counts])
        axes.set_title(task["name"], fontsize=12)
        canvas.style_axes(axes, x_label="micro-batches", y_label="loss on held-out text")
    # The legend goes into the last panel, whose upper left corner is free.
    panels[-1].legend(fontsize=10, frameon=False, loc="upper left")
    return figure


if __name__ == "__main__":
    main()
