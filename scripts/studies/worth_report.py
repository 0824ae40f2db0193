"""The results of the trainings of worth_it.py: measured values of each run, tables, and a picture.

Differences are paired by the seed, which gives weights and data, and have intervals of 95 % confidence (Student's t).
The picture shows the result of a training at each fixed loss scale, and the share of gradients that underflow there.
"""

import operator

import numpy as np
from scipy import stats

from mindformers_adaptive.plots.canvas import CONTEXT, MAIN, MUTED, SECOND, WARNING, headline, new_figure, style_axes
from scripts.studies.harm import LOST, lost_at

FP32, UNSCALED = "FP32", "FP16, no scaling"
WINDOW_20, WINDOW_1000 = (f"MindSpore's dynamic, window {window}" for window in (20, 1000))
MEGATRON, MINDFORMERS = "Megatron-LM's, window 1000, hysteresis 2", "MindFormers' adaptive"
ADAPTIVE_HIGH, OURS = "ours, adaptive from 2^32", "ours, adaptive from the found scale"
GUIDED_HIGH, GUIDED = "ours, guided from 2^32", "ours, guided from the found scale"

# The pairs of loss-scaling methods that the tables compare.
PAIRS = (
    (UNSCALED, FP32),
    (OURS, FP32),
    (GUIDED, FP32),
    (OURS, "fixed 2^16"),
    (OURS, WINDOW_20),
    (OURS, WINDOW_1000),
    (GUIDED, WINDOW_1000),
    (ADAPTIVE_HIGH, MINDFORMERS),
    (ADAPTIVE_HIGH, MEGATRON),
    (GUIDED, OURS),
    (GUIDED_HIGH, ADAPTIVE_HIGH),
)

# A run's start ends after this number of applied steps in a row, which is the smallest window of the adaptive rules.
SETTLED = 20
EXPONENTS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 20, 24, 28, 32, 34, 36, 38, 40, 42, 44)
# A training with this result or a lower result has learned nothing.
LOWEST = 0.0


def figures(runs):
    """Return the measured values of one method's runs, as ``Trainings.run`` returns them, as a dict for each seed.

    Returns:
        list[dict]: ``start``, the initial scale; ``skipped_at_start``, ``skipped_later``; ``headroom_lost`` in bits and
        ``underflow``, means over the applied steps with a measurement, or None; ``quality``.
    """
    rows = []
    for run in runs:
        at_start = skipped_at_the_start(run["skipped"], run["steps"])
        row = {"start": run["start"], "skipped_at_start": at_start, "skipped_later": len(run["skipped"]) - at_start}
        row["headroom_lost"] = over_looks(run, lambda look: np.log2(look["ceiling"] / look["loss_scale"]))
        row["underflow"] = over_looks(run, lambda look: look["underflow"])
        row["quality"] = run["quality"]
        rows.append(row)
    return rows


def skipped_at_the_start(skipped, steps):
    """Return how many steps a run skipped before it first applied ``SETTLED`` steps in a row."""
    gaps = np.diff([-1, *skipped, steps + SETTLED])
    return int(np.argmax(gaps > SETTLED))


def over_looks(run, figure):
    """Return the mean of a measured value over the applied steps with a measurement, or None without such steps."""
    applied = [look for look in run["looks"] if look["step"] not in run["skipped"]]
    seen = [figure(look) for look in applied if look.get("underflow") is not None]
    return float(np.mean(seen)) if seen else None


def tables(result):
    """Return the tables of a result by name, as lists of rows; the first row has the names of the columns."""
    shown = {"who_wins": who_wins(result)}
    for key, task in result["tasks"].items():
        shown[key] = task_table(task)
        shown[f"{key}_pairs"] = pair_table(task)
    return shown


def task_table(task):
    """Return the table of a task: the measured values of each scaling method, as means over the seeds."""
    columns = ["way of scaling", "start", "skipped at the start; later", "bits below the ceiling"]
    rows = [[*columns, LOST, f"{task['measure']} on data not trained on"]]
    for name, runs in task["runs"].items():
        scaled = runs[0]["headroom_lost"] is not None
        starts = sorted({run["start"] for run in runs})
        rows.append(
            [
                name,
                "-" if not scaled else ", ".join(f"2^{np.log2(start):g}" for start in starts),
                "; ".join(mean(runs, key, 1) for key in ("skipped_at_start", "skipped_later")),
                mean(runs, "headroom_lost", 1),
                lost_at(task["name"], mean_of(runs, "headroom_lost")),
                mean(runs, "quality", 4),
            ]
        )
    return rows


def mean(runs, key, digits):
    value = mean_of(runs, key)
    return "-" if value is None else f"{value:.{digits}f}"


def mean_of(runs, key):
    """Return the mean of a measured value over the runs that have it, or None."""
    values = [run[key] for run in runs if run[key] is not None]
    return float(np.mean(values)) if values else None


def mean_quality(runs):
    return float(np.mean([run["quality"] for run in runs]))


def pair_table(task):
    """Return a table of paired differences between two methods, with their confidence intervals."""
    rows = [["of", "minus", task["measure"], "better", "skipped steps", "fewer skipped"]]
    for first, second in pairs_of(task):
        quality, skipped = (difference(task, first, second, figure) for figure in (quality_of, skipped_of))
        better = winner(quality, first, second, task["higher_is_better"])
        rows.append([first, second, interval(quality, 4), better, interval(skipped, 1), winner(skipped, first, second)])
    return rows


def pairs_of(task):
    return [pair for pair in PAIRS if set(pair) <= set(task["runs"])]


def who_wins(result):
    """Return a table of method pairs: the tasks on which the first method is better, is worse, or shows no difference.

    A difference is shown if its confidence interval does not contain 0.
    """
    rows = [["of", "against", "better", "worse", "no difference shown"]]
    for first, second in PAIRS:
        won = {first: [], second: [], "-": []}
        for task in result["tasks"].values():
            if (first, second) in pairs_of(task):
                quality = difference(task, first, second, quality_of)
                won[winner(quality, first, second, task["higher_is_better"])].append(task["name"])
        rows.append([first, second, *("; ".join(names) or "-" for names in won.values())])
    return rows


quality_of = operator.itemgetter("quality")


def skipped_of(run):
    return run["skipped_at_start"] + run["skipped_later"]


def difference(task, first, second, figure):
    """Return the mean difference between two methods, paired by seed, and half the width of its confidence interval.

    With one seed, the half width is nan.
    """
    pairs = zip(task["runs"][first], task["runs"][second], strict=True)
    return mean_and_interval(np.array([figure(value) - figure(other) for value, other in pairs], float))


def mean_and_interval(values):
    """Return the mean of an array, and half the width of its confidence interval, which is nan for one value."""
    with np.errstate(invalid="ignore"):
        half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=min(1, len(values) - 1)) / len(values) ** 0.5
    return float(np.mean(values)), float(half)


def interval(result, digits):
    middle, half = result
    return f"{middle:+.{digits}f} ± {half:.{digits}f}"


def winner(result, first, second, higher_is_better=False):
    """Return the better of two methods, or ``-`` if the confidence interval of their difference contains 0."""
    middle, half = result
    if not abs(middle) > half:
        return "-"
    return first if (middle > 0) == higher_is_better else second


def draw(swept):
    """Draw the quality against the loss scale, and shade loss scales at which gradients underflow or overflow."""
    figure = new_figure(9, 4.6)
    finding = "FP16 without loss scaling: R² {unscaled:.2f}. FP32: {fp32:.3f}. Adaptive scaling: {ours:.3f}"
    headline(figure, finding.format(**swept))
    axes = figure.subplots()
    exponents, skipped = np.array(swept["exponents"], float), np.array(swept["skipped"])
    axes.fill_between(
        exponents, swept["underflow"], color=WARNING, alpha=0.25, linewidth=0, label="share of gradients that underflow"
    )
    axes.fill_between(exponents, skipped, color=CONTEXT, linewidth=0, label="share of steps skipped for an overflow")
    axes.axhline(swept["fp32"], color=MUTED, linestyle="dashed", linewidth=1.2, label="FP32")
    axes.plot(exponents, np.maximum(swept["quality"], LOWEST), "o-", color=MAIN, label="FP16 at a fixed loss scale")
    ours = "FP16, adaptive, from the scale that 'find' says"
    axes.plot(np.mean(swept["found"]), swept["ours"], "D", color=SECOND, markersize=9, label=ours)
    axes.set(xlim=(exponents[0], exponents[-1]), ylim=(LOWEST, 1.05))
    ticks = [exponent for exponent in swept["exponents"] if exponent % 4 == 0]
    axes.set_xticks(ticks, [f"$2^{{{exponent}}}$" for exponent in ticks])
    style_axes(axes, x_label="loss scale", y_label="R² on data not trained on; shares")
    axes.legend(loc="center", fontsize=9.5, frameon=True, framealpha=0.9)
    return figure
