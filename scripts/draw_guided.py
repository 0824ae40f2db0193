"""Draw adaptive and gradient-guided scaling on one made-up run: docs/images/guided.svg, from the rules in plain Python.

python scripts/draw_guided.py [FILE]
"""

import sys

import numpy as np
from draw_rule import PICTURE, STEPS, largest_scales

from mindformers_adaptive.lab.policies import make_policy
from mindformers_adaptive.lab.replay.simulate import replay
from mindformers_adaptive.lab.traces.gradients import with_gradients
from mindformers_adaptive.lab.traces.trace import Trace
from mindformers_adaptive.plots.canvas import CONTEXT, MAIN, WARNING, headline, new_figure, save, style_axes


def main():
    file = sys.argv[1] if len(sys.argv) > 1 else PICTURE.with_name("guided.svg")
    print(f"Drawn: {save(draw(with_gradients(Trace.exact('made up', largest_scales()))), file)}")


def draw(trace):
    """A panel for each rule, from the same start, on a trace whose gradients show the ceilings."""
    figure = new_figure(9, 5.6)
    panels = figure.subplots(2, 1, sharex=True, sharey=True)
    skipped = []
    steps = np.arange(1, STEPS + 1)
    for axes, name in zip(panels, ("adaptive", "guided"), strict=True):
        replayed = replay(make_policy(name, loss_scale_value=2.0**28), trace)
        scales, overflows = np.log2(replayed.loss_scale), replayed.overflow
        skipped.append(overflows.sum())
        axes.fill_between(steps, np.log2(trace.ceiling), 34, color=CONTEXT, linewidth=0, label="overflows here")
        axes.step(steps, scales, where="post", color=MAIN, linewidth=1.6, label="loss scale")
        axes.plot(steps[overflows], scales[overflows], "x", color=WARNING, markersize=5, label="skipped step")
        style_axes(axes, title=f"{name}: {replayed.measures.headroom_lost:.1f} bits of headroom lost", y_label="log2")
    panels[0].set(xlim=(0, STEPS), ylim=(3, 30))
    panels[0].legend(loc="upper right", framealpha=1)
    panels[1].set_xlabel("step")
    headline(figure, f"Steps skipped of {STEPS:,}: {skipped[0]} by the adaptive rule, {skipped[1]} by the guided one")
    return figure


if __name__ == "__main__":
    main()
