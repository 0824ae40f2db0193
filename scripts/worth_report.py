"""The results of the trainings of worth_it.py, as Markdown and as a picture.

The tables have means over the seeds and their standard deviations. The picture shows the result of a training at each
fixed loss scale, and the share of gradients that underflow there.
"""

import math

import numpy as np
import reporting
from worth_training import FP32, METHODS, REACHED_AT, SETTLED, UNSCALED, fixed

from mindformers_adaptive.plots.canvas import CONTEXT, MAIN, MUTED, SECOND, WARNING, headline, new_figure, style_axes

EXPONENTS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 20, 24, 28, 32, 34, 36, 38, 40, 42, 44)
OURS = "ours, adaptive from the found scale"
# At and below it nothing was learned.
LOWEST = 0.0

COLUMNS = (
    "way of scaling",
    "start",
    "skipped at the start",
    "skipped later",
    "headroom lost, bits",
    "gradients that underflow",
)


def report(result):
    """The report, as lines of Markdown."""
    means = f"{result['seeds']} seed{'' if result['seeds'] == 1 else 's'}"
    yield f"MindSpore {result['mindspore']}, MindFormers {result['mindformers']}, CPU, graph mode; means over {means} ±"
    yield f"standard deviations. Skipped at the start: before {SETTLED} steps in a row were applied. Headroom lost:"
    yield "log2(ceiling / loss scale), the ceiling found by bisection on the real backward pass. Underflow: gradients"
    yield "that are 0, and not at the ceiling. Both are means over applied steps, every 10th, and every 30th of the"
    yield "Llama. Less FP32's: the difference to FP32 from the same weights and data. The last column: steps until the"
    yield f"result that FP32 has after {REACHED_AT:.0%} of its steps."
    for task in result["tasks"]:
        yield ""
        yield f"### {task['name']}: {task['about']}, {task['steps']} steps"
        yield ""
        yield from table(task)


def table(task):
    """The table of one task, as lines of Markdown."""
    columns = [*COLUMNS, f"{task['measure']} on data not trained on", "less FP32's", "steps to FP32's result"]
    rows = ([name, *cells(row, len(task["ways"][name]))] for name, row in summary(task).items())
    return reporting.table(columns, rows)


def cells(row, seeds):
    starts = sorted({f"2^{np.log2(start):g}" for start in row["start"]}, key=lambda text: float(text[2:]))
    reached = [step for step in row["reached"] if step is not None]
    until = spread(reached, 0) if reached else "never"
    return [
        "-" if row["headroom_lost"] is None else ", ".join(starts),
        spread(row["skipped_at_start"], 1),
        spread(row["skipped_later"], 1),
        "-" if row["headroom_lost"] is None else spread(row["headroom_lost"], 1),
        "-" if row["underflow"] is None else spread([100.0 * share for share in row["underflow"]], 2, " %"),
        spread(row["quality"], 4),
        spread(row["less_fp32"], 4),
        until if len(reached) in (0, seeds) else f"{until} ({len(reached)} of {seeds} seeds)",
    ]


def spread(values, digits, unit=""):
    mean, deviation = np.mean(values), np.std(values)
    return f"{mean:.{digits}f} ± {deviation:.{digits}f}{unit}"


def summary(task):
    """By way of scaling the figures of the table, each a list with a value a seed; None where there is none."""
    targets = [target(run, task["look_every"]) for run in task["ways"][FP32]]
    rows = {}
    for name, runs in task["ways"].items():
        starts = [at_the_start(run["skipped"], run["steps"]) for run in runs]
        rows[name] = {
            "start": [run["start"] for run in runs],
            "skipped_at_start": starts,
            "skipped_later": [len(run["skipped"]) - start for run, start in zip(runs, starts, strict=True)],
            "headroom_lost": over_looks(runs, lambda look: np.log2(look["ceiling"] / look["loss_scale"])),
            "underflow": over_looks(runs, lambda look: look["underflow"]),
            "quality": [run["quality"] for run in runs],
            "less_fp32": [run["quality"] - one["quality"] for run, one in zip(runs, task["ways"][FP32], strict=True)],
            "reached": [reached(run, goal, task["higher_is_better"]) for run, goal in zip(runs, targets, strict=True)],
        }
    return rows


def at_the_start(skipped, steps):
    """Return how many steps were skipped before ``SETTLED`` in a row were applied."""
    last = -1
    for count, step in enumerate([*skipped, steps + SETTLED]):
        if step - last > SETTLED:
            return count
        last = step
    return len(skipped)


def target(run, look_every):
    """Return the quality of a run of FP32 that the others have to reach."""
    step = int(REACHED_AT * run["steps"] / look_every) * look_every
    return next(look["quality"] for look in run["looks"] if look["step"] == step)


def reached(run, goal, higher_is_better):
    good_enough = np.greater_equal if higher_is_better else np.less_equal
    return next((look["step"] for look in run["looks"] if good_enough(look["quality"], goal)), None)


def over_looks(runs, figure):
    """Return the mean over the applied steps that were looked at, for each run; None without any."""
    means = []
    for run in runs:
        seen = [figure(look) for look in run["looks"] if not look["skipped"] and look.get("underflow") is not None]
        means += [float(np.mean(seen))] if seen else []
    return means or None


def sweep(trainings, seeds, exponents=EXPONENTS, steps=None):
    """Train at fixed scales, and once in FP32 and once with adaptive scaling from the found scale.

    Returns:
        dict: ``exponents``; ``quality``, ``underflow`` and ``skipped``, the shares and results by exponent, means over
        the seeds; ``fp32`` and ``ours``, the results; ``found``, log2 of the found scales.
    """
    methods = {method.name: method for method in METHODS}

    def mean_quality(method):
        return float(np.mean([trainings.run(method, seed, steps)["quality"] for seed in range(seeds)]))

    swept = {"exponents": list(exponents), "quality": [], "underflow": [], "skipped": []}
    for exponent in exponents:
        runs = [trainings.run(fixed(2.0**exponent), seed, steps) for seed in range(seeds)]
        underflow = over_looks(runs, lambda look: look["underflow"])
        swept["quality"].append(float(np.mean([run["quality"] for run in runs])))
        swept["underflow"].append(None if underflow is None else float(np.mean(underflow)))
        swept["skipped"].append(float(np.mean([len(run["skipped"]) / run["steps"] for run in runs])))
    return {
        **swept,
        "found": [math.log2(trainings.find(seed).loss_scale_value) for seed in range(seeds)],
        **{key: mean_quality(methods[name]) for key, name in (("fp32", FP32), ("unscaled", UNSCALED), ("ours", OURS))},
    }


def draw(swept):
    """Draw the quality against the loss scale; where gradients underflow or overflow, the picture is shaded."""
    figure = new_figure(9, 4.6)
    headline(
        figure,
        f"FP16 without loss scaling: R² {swept['unscaled']:.2f}. FP32: {swept['fp32']:.3f}. "
        f"Adaptive scaling: {swept['ours']:.3f}",
    )
    axes = figure.subplots()
    exponents, skipped = np.array(swept["exponents"], float), np.array(swept["skipped"])
    underflow = np.array([share or 0.0 for share in swept["underflow"]])
    axes.fill_between(
        exponents, underflow, color=WARNING, alpha=0.25, linewidth=0, label="share of gradients that underflow"
    )
    axes.fill_between(exponents, skipped, color=CONTEXT, linewidth=0, label="share of steps skipped for an overflow")
    axes.axhline(swept["fp32"], color=MUTED, linestyle="dashed", linewidth=1.2, label="FP32")
    axes.plot(exponents, np.maximum(swept["quality"], LOWEST), "o-", color=MAIN, label="FP16 at a fixed loss scale")
    axes.plot(
        np.mean(swept["found"]),
        swept["ours"],
        "D",
        color=SECOND,
        markersize=9,
        label="FP16, adaptive, from the scale that 'find' says",
    )
    axes.set_ylim(LOWEST, 1.05)
    axes.set_xlim(exponents[0], exponents[-1])
    ticks = [exponent for exponent in swept["exponents"] if exponent % 4 == 0]
    axes.set_xticks(ticks, [f"$2^{{{exponent}}}$" for exponent in ticks])
    style_axes(axes, x_label="loss scale", y_label="R² on data not trained on; shares")
    axes.legend(loc="center", fontsize=9.5, frameon=True, framealpha=0.9)
    return figure
