"""Compare loss scales and rules by trainings in FP16 and in simulated 8-bit formats, on tasks of worth_it.py.

    python -m scripts.studies.formats_training

Each task is trained in FP32 and in each format: at fixed loss scales, by MindSpore's dynamic scaling and by both rules.
A pair of 8-bit formats names the format of the matrices first, then the format of the gradients. The script also draws
docs/images/quality_by_format.svg. With --again NAME, it trains only by the methods that have NAME in their names, and
takes the runs of all other methods from docs/figures/formats.json.
"""

import functools
import itertools
import json
import math
import sys

import numpy as np

from mindformers_adaptive.plots.canvas import MAIN, MUTED, SECOND, headline, new_figure, save, style_axes
from scripts.studies import reporting
from scripts.studies.worth_report import FP32, LOWEST, interval, mean_and_interval, mean_quality

PICTURE = "docs/images/quality_by_format.svg"
DATA = reporting.ROOT / "docs" / "figures" / "formats.json"

# The number formats to compare, by name. Each has two parts: the format of the inputs of matrix products and
# convolutions, and the format of the gradients. FP16 is not simulated, because the device can compute in FP16.
FP16 = "FP16"
FORMATS = {
    FP16: ("float16", "float16"),
    "FP8, E4M3 and E5M2": ("float8_e4m3fn", "float8_e5m2"),
    "HiF8": ("hifloat8", "hifloat8"),
}
# For each task, the number of seeds (of weights and data), and the fixed loss scales as exponents of 2.
TASKS = {
    "damped": (5, range(0, 29, 4)),
    "zero": (3, (0, 8, 16, 24)),
    "auxiliary": (3, (0, 4, 8, 12, 16)),
    "moving": (3, (0, 4, 8, 12, 16, 20)),
    "llama": (3, (0, 8, 16)),
    "lora": (3, (0, 8, 16)),
    "digits": (3, (0, 8, 16)),
}
LLAMA = {"steps": 80, "seq_length": 32}
# Ten seeds of the task "damped" in HiF8 cannot show whether R² is 0.02 higher with a fixed scale than with a rule. So
# train more seeds there.
MORE_SEEDS = {("damped", "HiF8"): 15}
PICTURED = "damped"

UNSCALED = "2^0"
DYNAMIC, ADAPTIVE, GUIDED = "MindSpore's dynamic, window 1000, from {}", "adaptive from {}", "guided from {}"
HIGH, FOUND_START = "2^24", "the found scale"
COMPARED = {
    "no scaling": UNSCALED,
    "MindSpore's dynamic": DYNAMIC.format(HIGH),
    "adaptive": ADAPTIVE.format(FOUND_START),
    "guided": GUIDED.format(FOUND_START),
    FP32: FP32,
}
# The number of steps that count as the start of a training. A good initial loss scale skips hardly any of them.
EARLY = 100
DIGITS = 5


def main():
    parser = reporting.study_parser(__doc__, PICTURE)
    parser.add_argument("--again", metavar="NAME", help="train only methods that have this in their names")
    arguments = parser.parse_args()
    tasks = json.loads(DATA.read_text(encoding="utf-8"))["tasks"] if arguments.again else {}
    # Keep the output of MindSpore and MindFormers out of the tables.
    with reporting.output_to_stderr():
        reporting.use_one_thread()
        for key, name in itertools.product(TASKS, FORMATS):
            measure(tasks, key, name, arguments.again, MORE_SEEDS.get((key, name), TASKS[key][0]))
            # Write the results after each task and format, because all trainings together take hours.
            reporting.write_json(arguments.json, {"tasks": tasks})
    for rows in tables({"tasks": tasks}).values():
        print("\n".join([*reporting.table(rows), ""]))
    print(f"Drawn: {save(draw(tasks[PICTURED]['formats']), arguments.picture)}", file=sys.stderr)


def measure(tasks, key, name, again, seeds):
    """Train a task in a number format, and add the runs to ``tasks``; see :func:`train` for ``again``."""
    trainings, methods = trainings_in(key, name)
    task = tasks.setdefault(key, about(trainings.task))
    of_format = task["formats"].setdefault(name, {"found": [], "runs": {}})
    train(trainings, methods, of_format["runs"], again, seeds)
    of_format["found"] = of_format["found"] or [found(trainings.recommendation(seed)) for seed in range(seeds)]


def train(trainings, methods, runs, again, seeds):
    """Train by each method that ``runs`` lacks, or that has ``again`` in its name, and put its runs into ``runs``."""
    for method, how in methods.items():
        if method not in runs or (again and again in method):
            print(f"{trainings.task.name}, {trainings.formats}: {method}", file=sys.stderr, flush=True)
            runs[method] = [summary(trainings.run(how, seed)) for seed in range(seeds)]


def about(task):
    keys = ("name", "about", "steps", "measure", "higher_is_better")
    return {key: getattr(task, key) for key in keys} | {"formats": {}}


def trainings_in(key, name):
    """Return the object that trains a task in a number format, such as FP16, and a dict of the loss-scaling methods."""
    from mindformers_adaptive.wrapper import GradientGuidedLossScaleUpdateCell
    from scripts.studies.worth_tasks import task_of
    from scripts.studies.worth_training import FOUND, METHODS, Method, Trainings, adaptive, dynamic, fixed

    task = task_of(key, LLAMA)
    guided = functools.partial(GradientGuidedLossScaleUpdateCell, gradient_format=FORMATS[name][1])
    methods = {FP32: METHODS[0], **{f"2^{exponent}": fixed(2.0**exponent) for exponent in TASKS[key][1]}}
    methods[DYNAMIC.format(HIGH)] = dynamic(1000)
    for start, value in ((HIGH, 2.0**24), (FOUND_START, FOUND)):
        methods[ADAPTIVE.format(start)] = Method(ADAPTIVE, adaptive, value)
        methods[GUIDED.format(start)] = Method(GUIDED, guided, value)
    # Only the quality at the end is needed. So set look_every to all steps, to skip the measurements in between.
    formats = None if name == FP16 else FORMATS[name]
    return Trainings(task, look_every=task.steps, formats=formats), methods


def summary(run):
    early = sum(step < EARLY for step in run["skipped"])
    counts = {"skipped_early": early, "skipped_later": len(run["skipped"]) - early}
    return {"quality": round(run["quality"], DIGITS), "start": run["start"], **counts}


def found(recommendation):
    """Return whether find_loss_scale() says that scaling is needed, and the share of gradients lost without scaling.

    The share refers to the norm of a Parameter's gradient, and is the largest over the Parameters.
    """
    share = recommendation.verdicts[0].parameter_share
    return {"needs_scaling": recommendation.needs_scaling, "lost": None if share is None else round(share, DIGITS)}


def qualities(runs):
    return np.array([run["quality"] for run in runs])


def less_best_fixed(task, runs, method):
    """Return, by seed, how much better a method's result is than the best fixed scale's result; negative if worse.

    The best of many noisy means is too good by chance. So, for each seed, the fixed scale is the best scale on all
    other seeds, and its result on this seed is compared.
    """
    sign = 1.0 if task["higher_is_better"] else -1.0
    fixed = [sign * qualities(runs[name]) for name in runs if name.startswith("2^")]
    without_seed = [[np.delete(each, seed).mean() for each in fixed] for seed in range(len(fixed[0]))]
    best = np.array([fixed[int(np.argmax(means))][seed] for seed, means in enumerate(without_seed)])
    return sign * qualities(runs[method]) - best


def tables(result):
    """Return the tables of a result by name, as lists of rows; the first row has the names of the columns."""
    differences = [["task", "format", "seeds", *(f"{name}, less the best fixed scale" for name in COMPARED)]]
    starts = [["task", "format", "found scales", "skipped by adaptive, steps 1-100", "skipped by guided, steps 1-100"]]
    verdicts = [
        ["task", "format", "lost without scaling", "find: is scaling needed (seeds)", "is the result worse without"]
    ]
    for task in result["tasks"].values():
        for name, of_format in task["formats"].items():
            runs, rows = of_format["runs"], [task["name"], name]
            less = {column: less_best_fixed(task, runs, method) for column, method in COMPARED.items()}
            each = [interval(mean_and_interval(values), 4) for values in less.values()]
            differences.append([*rows, str(len(runs[FP32])), *each])
            of_rules = [runs[rule.format(FOUND_START)] for rule in (ADAPTIVE, GUIDED)]
            scales = ", ".join(f"2^{math.log2(scale):g}" for scale in sorted({run["start"] for run in of_rules[0]}))
            starts.append([*rows, scales, *(most_skipped(of_rule) for of_rule in of_rules)])
            verdicts.append([*rows, *verdict(of_format["found"], less["no scaling"])])
    quality = quality_table(result["tasks"][PICTURED])
    return {"quality": quality, "differences": differences, "starts": starts, "verdicts": verdicts}


def quality_table(task):
    """Return the table of mean results of a task, with a row for each method and a column for each number format."""
    rows = [["loss scale", *task["formats"]]]
    of_formats = [of_format["runs"] for of_format in task["formats"].values()]
    digits = 3 if task["higher_is_better"] else 4
    for method in of_formats[0]:
        rows.append([method, *(f"{mean_quality(runs[method]):.{digits}f}" for runs in of_formats)])
    return rows


def most_skipped(runs):
    return f"{np.mean([run['skipped_early'] for run in runs]):.1f}; at most {max(run['skipped_early'] for run in runs)}"


def verdict(founds, less):
    """Return the last three cells of a row in the table "verdicts", about training without loss scaling.

    They show the share of a gradient that is lost, for how many seeds ``find`` says that scaling is needed, and whether
    the result is worse.
    """
    lost = [recommendation["lost"] for recommendation in founds if recommendation["lost"] is not None]
    ends = dict.fromkeys(f"{100 * share:.0f}" for share in (min(lost), max(lost)))
    shares = f"{' to '.join(ends)} %"
    said = [{True: "yes", False: "no", None: "not known"}[recommendation["needs_scaling"]] for recommendation in founds]
    counts = "; ".join(f"{word} ({said.count(word)})" for word in dict.fromkeys(said))
    middle, half = mean_and_interval(less)
    suffers = "yes" if middle < -half else "no difference shown" if abs(middle) <= half else "no"
    return shares, counts, suffers


def draw(formats):
    """Draw the quality of training at each fixed loss scale, with a panel for each number format."""
    figure = new_figure(10, 3.9)
    headline(figure, "The format decides which loss scale is needed")
    panels = figure.subplots(1, len(formats), sharey=True)
    for axes, (name, of_format) in zip(panels, formats.items(), strict=True):
        runs = of_format["runs"]
        fixed = {int(method[2:]): mean_quality(runs[method]) for method in runs if method.startswith("2^")}
        axes.axhline(mean_quality(runs[FP32]), color=MUTED, linestyle="dashed", linewidth=1.2, label="FP32")
        axes.plot([*fixed], np.maximum([*fixed.values()], LOWEST), "o-", color=MAIN, label="at a fixed loss scale")
        rule = ADAPTIVE.format(FOUND_START)
        start = np.mean([math.log2(run["start"]) for run in runs[rule]])
        axes.plot(start, mean_quality(runs[rule]), "D", color=SECOND, markersize=8, label=f"{rule}, at its start")
        axes.set_ylim(LOWEST, 1.05)
        axes.set_xticks(range(0, 33, 8), [f"$2^{{{exponent}}}$" for exponent in range(0, 33, 8)])
        style_axes(axes, title=name, x_label="loss scale", y_label="R² on data not trained on" * (axes is panels[0]))
    panels[0].legend(loc="center right", fontsize=8.5, frameon=True, framealpha=0.9)
    return figure


if __name__ == "__main__":
    main()
