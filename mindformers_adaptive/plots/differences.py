"""A picture of two series of checkpoints: where, and from which step on, their weights part."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mindformers_adaptive.gradients.difference import Series, by_group, parting
from mindformers_adaptive.gradients.groups import parameter_group
from mindformers_adaptive.plots import canvas

__all__ = ["draw_differences"]

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_differences(series: Series, group: Callable[[str], str | None] = parameter_group) -> Figure:
    """Draw the relative error of each group of Parameters over the steps of two series of checkpoints.

    Args:
        series (Mapping[int, list[ArrayDifference]]): by step, in increasing order, what
            :func:`mindformers_adaptive.gradients.difference.compare_arrays` returns.
        group (Callable): from a Parameter's name to its group. Default:
            :func:`mindformers_adaptive.gradients.groups.parameter_group`.

    Returns:
        Figure; the title says at which step they begin to part.

    Raises:
        ImportError: if matplotlib is missing.
    """
    figure = canvas.new_figure(10, 5.5)
    axes = figure.subplots()
    canvas.style_axes(axes, y_label="relative error")
    steps, errors = np.array([*series], np.float64), by_group(series, group)
    drawn = {name: np.where(np.isfinite(values), values, np.nan) for name, values in errors.items()}
    above = np.concatenate([values[values > 0] for values in drawn.values()])
    axes.set_yscale("log")
    if any((values == 0).any() for values in drawn.values()):
        # With a place for 0 below the smallest error.
        axes.set_yscale("symlog", linthresh=float(above.min(initial=1.0)), linscale=0.3)
        axes.set_ylim(bottom=0)
    for (name, values), (colour, dashes) in zip(drawn.items(), canvas.LINE_STYLES, strict=False):
        style: dict[str, Any] = {"color": colour, "linestyle": dashes, "marker": "o", "linewidth": 1.6}
        if name == "all":
            style |= {"color": "black", "linestyle": "solid", "linewidth": 2.4, "zorder": 1.9}
        axes.plot(steps, values, label=canvas.as_text(name), gid=name, **style)
    canvas.use_step_axis(axes, steps[0], steps[-1])
    canvas.legend_above(axes)
    canvas.headline(figure, canvas.as_text(parting(series)).partition(". ")[0])
    return figure
