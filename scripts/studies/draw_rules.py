"""Draw how the rules move the loss scale in one synthetic run, computed by the rules in NumPy.

    python -m scripts.studies.draw_rules

Draws docs/images/scale_and_window.svg, with loss scale and window of the adaptive rule, and docs/images/guided.svg,
with the loss scales of the adaptive and the gradient-guided rule.
"""

from pathlib import Path

import numpy as np

from mindformers_adaptive import start_rule, window_ladder
from mindformers_adaptive.lab.replay import replay
from mindformers_adaptive.plots.canvas import CONTEXT, MAIN, SECOND, WARNING, headline, new_figure, save, style_axes
from mindformers_adaptive.record.trace import Trace
from scripts.studies.synthetic import with_gradients

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "images"
STEPS = 1900
FALL, RECOVERY = 1100, 1400


def main():
    # Add gradients that show the ceilings, for the guided rule. The adaptive rule does not use gradients.
    trace = with_gradients(Trace.exact("made up", largest_scales()))
    for file, draw in (("scale_and_window.svg", draw_scale_and_window), ("guided.svg", draw_guided)):
        figure = new_figure(9, 5.6)
        headline(figure, draw(figure, trace))
        print(f"Drawn: {save(figure, FOLDER / file)}")


def largest_scales():
    """Return the largest loss scale without overflow at each step; it falls by 2^10 and recovers later."""
    random = np.random.default_rng(3)
    exponents = 19.5 + 0.5 * np.sin(np.arange(STEPS) / 90) + random.normal(0, 0.35, STEPS)
    exponents[FALL:RECOVERY] -= 10
    return np.exp2(exponents)


def draw_scale(axes, trace, rule):
    """Draw a rule's loss scale, which starts at 2^28, and the loss scales that overflow; return the rule's replay."""
    replayed = replay(start_rule(rule, loss_scale_value=2.0**28), trace)
    steps, scales, overflows = np.arange(1, STEPS + 1), np.log2(replayed.loss_scale), replayed.overflow
    axes.fill_between(steps, np.log2(trace.ceiling), 34, color=CONTEXT, linewidth=0, label="overflows here")
    axes.step(steps, scales, where="post", color=MAIN, linewidth=1.6, label="loss scale")
    axes.plot(steps[overflows], scales[overflows], "x", color=WARNING, markersize=5, label="skipped step")
    return replayed


def draw_scale_and_window(figure, trace):
    """Draw loss scale and window of the adaptive rule; return the headline of the picture."""
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    replayed = draw_scale(upper, trace, "adaptive")
    upper.set_ylim(5, 30)
    upper.legend(loc="upper right", framealpha=1)
    style_axes(upper, y_label="loss scale, log2")

    lower.step(np.arange(1, STEPS + 1), replayed.scale_window, where="post", color=SECOND, linewidth=1.6)
    lower.set_yscale("log")
    # Every window has a grid line, but the lines at 30 and 40 have no labels, because the labels would not fit.
    names, windows = {1: "1 (hidden)", 30: "", 40: ""}, (1, *window_ladder(1000, 20))
    lower.set_yticks(windows, [names.get(window, str(window)) for window in windows])
    lower.minorticks_off()
    lower.set(xlim=(0, STEPS), ylim=(0.8, 700))
    style_axes(lower, x_label="step", y_label="scale window, steps")
    style = {"arrowprops": {"arrowstyle": "->"}, "fontsize": 9}
    lower.annotate("every third raise:\none window up", (300, 40), (330, 4.5), **style)
    lower.annotate("third drop in a row:\nwindow 1", (FALL + 2, 1.05), (760, 1.6), **style)
    figure.align_ylabels()
    finding = "a stable scale widens the window, a falling one resets it"
    return f"{replayed.overflow.sum()} of {STEPS:,} steps skipped: {finding}"


def draw_guided(figure, trace):
    """Draw the loss scale of each rule in a panel; return the headline of the picture."""
    panels = figure.subplots(2, 1, sharex=True, sharey=True)
    skipped = []
    for axes, rule in zip(panels, ("adaptive", "guided"), strict=True):
        replayed = draw_scale(axes, trace, rule)
        skipped.append(replayed.overflow.sum())
        style_axes(axes, title=f"{rule}: {replayed.measures.headroom_lost:.1f} bits below the ceiling", y_label="log2")
    panels[0].set(xlim=(0, STEPS), ylim=(3, 30))
    panels[0].legend(loc="upper right", framealpha=1)
    panels[1].set_xlabel("step")
    return f"Steps skipped of {STEPS:,}: {skipped[0]} by the adaptive rule, {skipped[1]} by the guided one"


if __name__ == "__main__":
    main()
