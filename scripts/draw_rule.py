"""Draw how scale and window move: docs/images/scale_and_window.svg, from the rule in plain Python.

python scripts/draw_rule.py [FILE]
"""

import sys
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from mindformers_adaptive.rule.adaptive_rule import AdaptiveRule

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "scale_and_window.svg"
STEPS = 1900
FALL, RECOVERY = 1100, 1400


def main():
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE
    figure = draw(largest_scales())
    # Without a date the file changes only where the picture does.
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None, dpi=120)
    print(f"Drawn: {file}")


def largest_scales():
    """A made-up run: the largest scale without overflow, step by step; it falls by 2^10 and recovers later."""
    random = np.random.default_rng(3)
    exponents = 19.5 + 0.5 * np.sin(np.arange(STEPS) / 90) + random.normal(0, 0.35, STEPS)
    exponents[FALL:RECOVERY] -= 10
    return np.exp2(exponents)


def replay(ceilings):
    rule = AdaptiveRule()
    state = rule.start(2.0**28)
    states, overflows = [], []
    for ceiling in ceilings:
        states.append(state)
        overflows.append(state.loss_scale > ceiling)
        state = rule.step(state, overflows[-1])
    return rule, states, np.array(overflows)


def draw(ceilings):
    rule, states, overflows = replay(ceilings)
    steps = np.arange(1, len(states) + 1)
    scales = np.log2([state.loss_scale for state in states])
    windows = [state.scale_window for state in states]

    plt.rcParams.update({"font.family": "sans-serif", "svg.hashsalt": "scale_and_window", "svg.fonttype": "path"})
    figure, (upper, lower) = plt.subplots(
        2, 1, figsize=(9, 5.6), sharex=True, height_ratios=[3, 2], layout="constrained"
    )
    upper.fill_between(steps, np.log2(ceilings), 34, color="#f2d7d5", linewidth=0, label="overflows here")
    upper.step(steps, scales, where="post", color="#1f4e79", linewidth=1.6, label="loss scale")
    upper.plot(steps[overflows], scales[overflows], "x", color="#c0392b", markersize=5, label="skipped step")
    upper.set(ylabel="loss scale, log2", ylim=(5, 30))
    upper.set_title(
        f"{overflows.sum()} of {STEPS} steps skipped: the window grows while the scale is settled, "
        "and lets go when it is not",
        fontsize=11,
        loc="left",
    )
    upper.legend(loc="upper right", framealpha=1)

    lower.step(steps, windows, where="post", color="#1e8449", linewidth=1.6)
    lower.set_yscale("log")
    # All windows have a line; 30 and 40 have no room for a label.
    names = {1: "1 (hidden)", 30: "", 40: ""}
    lower.set_yticks([1, *rule.ladder], [names.get(window, str(window)) for window in (1, *rule.ladder)])
    lower.minorticks_off()
    lower.set(xlabel="step", ylabel="scale window, steps", xlim=(0, STEPS), ylim=(0.8, 700))
    lower.annotate(
        "every third raise:\none window up",
        xy=(300, 40),
        xytext=(330, 4.5),
        arrowprops={"arrowstyle": "->"},
        fontsize=9,
    )
    lower.annotate(
        "third drop in a row:\nwindow 1",
        xy=(FALL + 2, 1.05),
        xytext=(760, 1.6),
        arrowprops={"arrowstyle": "->"},
        fontsize=9,
    )
    for axes in (upper, lower):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.align_ylabels()
    return figure


if __name__ == "__main__":
    main()
