"""Draw how scale and window move: docs/images/scale_and_window.svg, from the rule in plain Python.

python scripts/draw_rule.py [FILE]
"""

import sys
from pathlib import Path

import numpy as np

from mindformers_adaptive.plots.canvas import CONTEXT, MAIN, SECOND, WARNING, headline, new_figure, save, style_axes
from mindformers_adaptive.rules.adaptive import AdaptiveRule

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "scale_and_window.svg"
STEPS = 1900
FALL, RECOVERY = 1100, 1400


def main():
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE
    print(f"Drawn: {save(draw(largest_scales()), file)}")


def largest_scales():
    """A made-up run: the largest scale without overflow, step by step; it falls by 2^10 and recovers later."""
    random = np.random.default_rng(3)
    exponents = 19.5 + 0.5 * np.sin(np.arange(STEPS) / 90) + random.normal(0, 0.35, STEPS)
    exponents[FALL:RECOVERY] -= 10
    return np.exp2(exponents)


def replay(ceilings):
    """The rule, the scale and the window that it used in each step, and whether the step overflowed."""
    rule = AdaptiveRule()
    state = rule.start(2.0**28)
    scales, windows = [], []
    for ceiling in ceilings:
        scales.append(state.loss_scale)
        windows.append(state.scale_window)
        state = rule.step(state, state.loss_scale > ceiling)
    return rule, np.log2(scales), windows, np.array(scales) > ceilings


def draw(ceilings):
    rule, scales, windows, overflows = replay(ceilings)
    steps = np.arange(1, STEPS + 1)
    figure = new_figure(9, 5.6)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    upper.fill_between(steps, np.log2(ceilings), 34, color=CONTEXT, linewidth=0, label="overflows here")
    upper.step(steps, scales, where="post", color=MAIN, linewidth=1.6, label="loss scale")
    upper.plot(steps[overflows], scales[overflows], "x", color=WARNING, markersize=5, label="skipped step")
    upper.set_ylim(5, 30)
    upper.legend(loc="upper right", framealpha=1)
    style_axes(upper, y_label="loss scale, log2")

    lower.step(steps, windows, where="post", color=SECOND, linewidth=1.6)
    lower.set_yscale("log")
    # Every window has a grid line; 30 and 40 have no room for a label.
    names = {1: "1 (hidden)", 30: "", 40: ""}
    lower.set_yticks([1, *rule.ladder], [names.get(window, str(window)) for window in (1, *rule.ladder)])
    lower.minorticks_off()
    lower.set(xlim=(0, STEPS), ylim=(0.8, 700))
    style_axes(lower, x_label="step", y_label="scale window, steps")
    for text, point, place in (
        ("every third raise:\none window up", (300, 40), (330, 4.5)),
        ("third drop in a row:\nwindow 1", (FALL + 2, 1.05), (760, 1.6)),
    ):
        lower.annotate(text, point, place, arrowprops={"arrowstyle": "->"}, fontsize=9)
    figure.align_ylabels()
    finding = "a stable scale widens the window, a falling one resets it"
    headline(figure, f"{overflows.sum()} of {STEPS:,} steps skipped: {finding}")
    return figure


if __name__ == "__main__":
    main()
