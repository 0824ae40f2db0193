"""Ceilings in pictures: the scales at which steps overflow, and how far below them a run stayed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.plots.canvas import CONTEXT
from mindformers_adaptive.plots.thinning import gather

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_ceiling", "draw_steps", "headroom_text"]

_Floats = NDArray[np.float64]

# The lines of more steps than that would fill the panel; they are gathered into blocks.
_BAND_FROM, _BLOCKS = 8000, 400

_CEILING = "#9a9a9a"


def draw_steps(
    axes: Axes, step: _Floats, values: _Floats, opacity: float = 0.25, **style: Any
) -> tuple[_Floats, _Floats]:
    """Draw values over the steps, those of a long run as medians within a band.

    Returns:
        tuple of two arrays, x and y of the upper edge.
    """
    if len(values) <= _BAND_FROM:
        axes.step(step, values, where="post", **style)
        return step, values
    middle, lowest, median, highest = gather(step, values, _BLOCKS)
    axes.plot(middle, median, **{**style, "linewidth": max(1.6, style["linewidth"])})
    axes.fill_between(middle, lowest, highest, color=style["color"], alpha=opacity, linewidth=0)
    return middle, highest


def draw_ceiling(axes: Axes, step: _Floats, ceiling: _Floats, label: str) -> None:
    """Draw the ceilings of steps, and shade what is above them; the limits of the axis are final."""
    bottom, top = axes.get_ylim()
    style: dict[str, Any] = {"label": label, "gid": "ceiling", "color": _CEILING, "linewidth": 0.8, "zorder": 1.5}
    x, edge = draw_steps(axes, step, np.clip(ceiling, bottom, top), opacity=0.15, **style)
    drawn: Literal["post"] | None = "post" if len(x) == len(step) else None
    axes.fill_between(x, edge, top, step=drawn, color=CONTEXT, linewidth=0, label="overflows", gid="overflows")


def headroom_text(loss_scale: _Floats, ceiling: _Floats) -> str:
    """Say how far scales were below the ceilings that the gradients show; "" where nothing is known.

    Args:
        loss_scale (NDArray), ceiling (NDArray): of shape (steps,); nan where they are not known.

    Examples:
        >>> headroom_text(np.array([4.0, 8.0, 8.0]), np.array([32.0, 32.0, np.nan]))
        '2.5 bits below the ceiling'
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        bits = np.log2(ceiling / loss_scale)
    bits = bits[np.isfinite(bits)]
    if not len(bits):
        return ""
    middle = float(np.median(bits))
    if abs(middle) < 0.05:
        return "at the ceiling"
    return f"{abs(middle):.1f} bits {'below' if middle > 0 else 'above'} the ceiling"
