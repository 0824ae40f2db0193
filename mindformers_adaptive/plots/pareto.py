"""The picture of skipped steps against headroom lost: which of several results no other one beats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mindformers_adaptive.lab.replay.simulate import Comparison, pareto_front
from mindformers_adaptive.plots.canvas import MAIN, MUTED, as_text, count, dress, headline, legend_above, new_figure
from mindformers_adaptive.plots.labels import listed, place_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_comparison", "draw_pareto_front"]

_Floats = NDArray[np.float64]

# So many times as many skipped steps as the median need a logarithmic axis.
_LOG_SKIPPED_FROM = 50.0

# Up to so many results are all named; of more, so many of those on the front.
_ALL_NAMED, _NAMED_ON_FRONT = 24, 10


def draw_comparison(comparison: Comparison) -> Figure:
    """Draw skipped steps against headroom lost for the policies of a comparison, in the mean over its traces.

    Args:
        comparison (Comparison): what :func:`mindformers_adaptive.lab.replay.simulate.compare` returned.

    Returns:
        Figure, see :func:`draw_pareto_front`.

    Raises:
        ImportError: if matplotlib is missing.
    """
    means = comparison.means()
    skipped, headroom = ([_number(mean[what]) for mean in means.values()] for what in ("skipped", "headroom_lost"))
    where = comparison.traces[0] if len(comparison.traces) == 1 else f"mean of {len(comparison.traces)} traces"
    return draw_pareto_front(skipped, headroom, list(means), where=where, kind="policies")


def draw_pareto_front(
    skipped: ArrayLike,
    headroom_lost: ArrayLike,
    names: Sequence[str] | None = None,
    *,
    where: str = "",
    kind: str = "results",
) -> Figure:
    """Draw skipped steps against headroom lost, with those results on a line that no other one beats in both.

    Args:
        skipped (ArrayLike): skipped steps of each result, shape (results,); a column of a sweep, for example.
        headroom_lost (ArrayLike): likewise, in bits; results without any (nan) are left out, and the picture says how
            many.
        names (Sequence[str], optional): what each result is called. Up to 24 results are all named, of more ten
            on the front. Default: None, no names.
        where (str): on what they were measured, for the title. Default: "", nothing.
        kind (str): what the results are of, for the title. Default: "results".

    Returns:
        Figure; the title says how many results are on the front.

    Raises:
        ImportError: if matplotlib is missing.
        ValueError: if there is no result with headroom, or the arguments do not have one length.

    Examples:
        >>> draw_pareto_front([1, 5, 9], [3.0, 1.0, 2.0], ["torch", "adaptive", "fixed"]).get_suptitle()
        'torch and adaptive are on the Pareto front of skipped steps and headroom lost'
    """
    x, y = np.asarray(skipped, np.float64), np.asarray(headroom_lost, np.float64)
    called = [""] * len(x) if names is None else list(names)
    if not len(x) == len(y) == len(called) or x.shape != y.shape:
        raise ValueError(
            "'skipped', 'headroom_lost' and 'names' must have one entry for each result, but got "
            f"{x.shape}, {y.shape} and {len(called)}. Give lists of one length."
        )
    there = np.isfinite(x) & np.isfinite(y)
    if not there.any():
        raise ValueError(
            "At least 1 result must have headroom to measure, but none of "
            f"{len(x)} has: all steps were skipped or had no ceiling. Compare on another trace."
        )
    x, y, called = x[there], y[there], [name for name, is_there in zip(called, there, strict=True) if is_there]
    front = pareto_front(x, y)
    figure = new_figure(10, 6.2)
    axes = figure.subplots()
    left_out = "" if there.all() else f"; {count(int((~there).sum()), 'result')} without headroom not shown"
    dress(axes, x_label=f"skipped steps{left_out}", y_label="headroom lost, bits in the mean of applied steps")
    corners = _draw_points(axes, x, y, front)
    legend_above(axes)
    place_labels(axes, x, y, _shown_names(called, x, front), corners)
    finding = _front_finding(front, called, kind)
    headline(figure, f"{as_text(where)}: {finding}" if where else finding)
    return figure


def _draw_points(axes: Axes, x: _Floats, y: _Floats, front: NDArray[np.bool_]) -> tuple[_Floats, _Floats]:
    """Draw the results and the front; return the corners of its line, x and y."""
    axes.plot(x[~front], y[~front], "o", color=MUTED, alpha=0.55, markersize=6, label="beaten by another", gid="beaten")
    order = np.lexsort((y[front], x[front]))
    corners_x, corners_y = np.repeat(x[front][order], 2)[1:], np.repeat(y[front][order], 2)[:-1]
    axes.plot(corners_x, corners_y, color=MAIN, linewidth=1.2, gid="front line")
    axes.plot(x[front], y[front], "o", color=MAIN, markersize=8, label="Pareto front", gid="front", zorder=3)
    if x.max() > _LOG_SKIPPED_FROM * max(float(np.median(x)), 1.0):
        axes.set_xscale("symlog", linthresh=1.0)
    axes.margins(x=0.12, y=0.14)
    axes.xaxis.set_major_formatter(lambda steps, _: f"{steps:,.6g}")
    return corners_x, corners_y


def _shown_names(names: Sequence[str], x: _Floats, front: NDArray[np.bool_]) -> list[str]:
    """Return the names to write: of too many, those at places along the front that lie evenly between its ends."""
    if len(names) <= _ALL_NAMED:
        return list(names)
    steps = np.unique(x[front])
    chosen = steps[np.linspace(0, len(steps) - 1, min(_NAMED_ON_FRONT, len(steps))).astype(np.intp)]
    shown = front & np.isin(x, chosen)
    return [name if show else "" for name, show in zip(names, shown.tolist(), strict=True)]


def _front_finding(front: NDArray[np.bool_], names: Sequence[str], kind: str) -> str:
    best = [name for name, on_front in zip(names, front.tolist(), strict=True) if on_front and name]
    if not best or len(best) > 3:
        said = f"{int(front.sum()):,} of {len(front):,} {kind} are on the Pareto front"
    else:
        said = f"{listed(best)} {'is' if len(best) == 1 else 'are'} on the Pareto front"
    return f"{said} of skipped steps and headroom lost"


def _number(value: float | None) -> float:
    return math.nan if value is None else value
