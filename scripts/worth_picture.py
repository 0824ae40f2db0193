"""The picture of worth_it.py: what a training comes to at each fixed loss scale, and what underflows there."""

import math

import numpy as np
from worth_report import over_looks
from worth_training import FP32, UNSCALED, WAYS, fixed

from mindformers_adaptive.plots.canvas import CONTEXT, MAIN, MUTED, SECOND, WARNING, headline, new_figure, style_axes

__all__ = ["EXPONENTS", "draw", "sweep"]

EXPONENTS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 20, 24, 28, 32, 34, 36, 38, 40, 42, 44)
OURS = "ours, adaptive from the found scale"
# At and below it nothing was learned.
LOWEST = 0.0


def sweep(trainings, seeds, exponents=EXPONENTS, steps=None):
    """Train at fixed scales, and once in FP32 and once with adaptive scaling from the found scale.

    Returns:
        dict: ``exponents``; ``quality``, ``underflow`` and ``skipped``, the shares and results by exponent, means over
        the seeds; ``fp32`` and ``ours``, the results; ``found``, log2 of the found scales.
    """
    ways = {way.name: way for way in WAYS}
    points = []
    for exponent in exponents:
        runs = [trainings.run(fixed(2.0**exponent), seed, steps) for seed in range(seeds)]
        underflow = over_looks(runs, lambda look: look["underflow"])
        points.append(
            (
                float(np.mean([run["quality"] for run in runs])),
                None if underflow is None else float(np.mean(underflow)),
                float(np.mean([len(run["skipped"]) / run["steps"] for run in runs])),
            )
        )
    results = {
        key: float(np.mean([trainings.run(ways[name], seed, steps)["quality"] for seed in range(seeds)]))
        for key, name in (("fp32", FP32), ("unscaled", UNSCALED), ("ours", OURS))
    }
    quality, underflow, skipped = zip(*points, strict=True)
    found = [math.log2(trainings.find(seed)) for seed in range(seeds)]
    return {
        "exponents": list(exponents),
        "quality": list(quality),
        "underflow": list(underflow),
        "skipped": list(skipped),
        "found": found,
        **results,
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
    exponents = np.array(swept["exponents"], float)
    underflow = np.array([np.nan if share is None else share for share in swept["underflow"]])
    underflow = np.nan_to_num(underflow)
    skipped = np.array(swept["skipped"])
    shaded = {"linewidth": 0, "step": None}
    axes.fill_between(
        exponents, underflow, color=WARNING, alpha=0.25, label="share of gradients that underflow", **shaded
    )
    axes.fill_between(exponents, skipped, color=CONTEXT, label="share of steps skipped for an overflow", **shaded)
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
