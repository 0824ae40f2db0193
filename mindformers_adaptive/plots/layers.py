"""A picture of the largest values of each layer of a network, forward and backward, beside the limits of FP16."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mindformers_adaptive.overflow.explanation import Explanation
from mindformers_adaptive.overflow.headroom import LayerRange
from mindformers_adaptive.plots import canvas
from mindformers_adaptive.rules.formats import FLOAT16

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The largest height of a picture of layers, in inches. A taller picture is hard to look at.
_HIGHEST = 40.0
# The height of the row of one layer, in inches.
_LINE = 0.21


def draw_layers(explanation: Explanation) -> Figure:
    """Draw the largest value of each layer, forward and backward, in the order of execution from top to bottom.

    Values that overflowed are drawn at the right edge. Values in FP16 have filled marks, values in wider formats open
    marks.

    Args:
        explanation (Explanation): as :func:`mindformers_adaptive.overflow.explain.explain_overflow` returns it.

    Returns:
        Figure; its title is the first line of the explanation.

    Raises:
        ImportError: if matplotlib is missing.
        ValueError: if no layer was seen.
    """
    if not explanation.layers:
        raise ValueError("'explanation' must have at least 1 layer to draw. Explain a network that has cells inside.")
    names = [layer.layer or "(the network)" for layer in explanation.layers]
    figure = canvas.new_figure(11, min(2.4 + _LINE * len(names), _HIGHEST))
    axes = figure.subplots()
    lowest, largest = FLOAT16.exponents[1], FLOAT16.exponents[2]
    edge = largest + 4.0
    scale = canvas.power_of_two(explanation.layers_scale)
    phases = (("forward", "forward", canvas.MAIN, "o"), ("backward", f"backward at {scale}", canvas.WARNING, "D"))
    for phase, label, colour, mark in phases:
        _draw_phase(axes, explanation.layers, phase, edge, {"color": colour, "marker": mark, "label": label})
    limits: dict[str, Any] = {"colors": canvas.MUTED, "linewidth": 0.9, "linestyles": "dashed", "gid": "limits"}
    limits["label"] = f"FP16: $2^{{{lowest:.0f}}}$, {FLOAT16.largest:.0f}"
    axes.vlines((lowest, largest), 0, 1, transform=axes.get_xaxis_transform(), **limits)
    canvas.style_axes(axes, x_label="largest magnitude of the layer, log2; at the right edge: inf or NaN")
    axes.set_yticks(range(len(names)), [canvas.as_text(name) for name in names], fontsize=8)
    axes.set_ylim(len(names) - 0.3, -0.7)
    axes.set_xlim(None, edge + 1.0)
    canvas.legend_above(axes)
    canvas.headline(figure, explanation.headline.partition(":")[0].partition(";")[0].replace("_", r"\_"))
    return figure


def _draw_phase(axes: Axes, layers: Sequence[LayerRange], phase: str, edge: float, style: dict[str, Any]) -> None:
    readings = [(row, getattr(layer, phase)) for row, layer in enumerate(layers)]
    known = [
        (row, reading) for row, reading in readings if reading is not None and (reading.largest or not reading.finite)
    ]
    x = [math.log2(reading.largest) if reading.finite else edge for _, reading in known]
    filled = np.array([reading.dtype == "float16" for _, reading in known], bool)
    y = np.array([row for row, _ in known], np.float64)
    axes.plot(x, y, linestyle="none", markersize=5, fillstyle="none", gid=phase, **style)
    narrow = {**style, "label": "_"}
    axes.plot(np.array(x)[filled], y[filled], linestyle="none", markersize=5, gid=f"{phase} in FP16", **narrow)
