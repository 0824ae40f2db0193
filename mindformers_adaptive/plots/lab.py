"""The picture of what policies did on a trace: ceiling, loss scales and skipped steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from mindformers_adaptive.lab.replay.measures import LARGEST_LOSS_SCALE, SMALLEST_LOSS_SCALE, Measures
from mindformers_adaptive.lab.replay.simulate import Replay
from mindformers_adaptive.lab.traces.trace import Trace
from mindformers_adaptive.plots.canvas import (
    CONTEXT,
    LINE_STYLES,
    as_text,
    count,
    dress,
    headline,
    legend_above,
    new_figure,
    use_power_of_two_axis,
    use_step_axis,
)
from mindformers_adaptive.plots.labels import listed
from mindformers_adaptive.plots.thinning import gather, thin_marks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_replays"]

_Floats = NDArray[np.float64]

# Of more steps than that the lines would fill the panel; they are gathered into blocks.
_BAND_FROM, _BLOCKS = 8000, 400

_CEILING = "#9a9a9a"


def draw_replays(trace: Trace, replays: Mapping[str, Replay]) -> Figure:
    """Draw what policies did on a trace: its ceiling, the loss scale of each policy, and the steps that each skipped.

    Of long traces each line becomes medians within a band of all values; skipped steps stay.

    Args:
        trace (Trace): what was replayed.
        replays (Mapping[str, Replay]): by the policies' names, what
            :func:`mindformers_adaptive.lab.replay.simulate.replay` returned on this trace; at least one.

    Returns:
        Figure of two panels over the same steps, 1200 pixels wide; the title says who skipped fewest steps and who
        lost least headroom.

    Raises:
        ImportError: if matplotlib is missing.
        ValueError: if there is no replay, or one is of another number of steps.

    Examples:
        >>> from mindformers_adaptive.lab.policies import make_policy
        >>> from mindformers_adaptive.lab.replay.simulate import replay
        >>> trace = Trace.exact("sudden drop", [8.0, 8.0, 2.0, 2.0])
        >>> draw_replays(trace, {"fixed": replay(make_policy("fixed", loss_scale_value=4.0), trace)}).get_suptitle()
        'sudden drop: fixed skipped 2 of 4 steps and lost 1.0 bits of headroom'
    """
    _require_replays(trace, replays)
    figure = new_figure(10, 5.2 + 0.32 * len(replays))
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[4.2, 0.6 + 0.32 * len(replays)])
    _draw_ceiling(upper, trace, replays)
    dress(upper, y_label="loss scale, log2")
    dress(lower, title="skipped steps")
    step = np.arange(1, len(trace) + 1)
    for row, ((name, found), (colour, dashes)) in enumerate(zip(replays.items(), LINE_STYLES, strict=False)):
        # Where lines lie on each other, the first is the widest, so that all of them are seen.
        line: dict[str, Any] = {
            "color": colour,
            "linestyle": dashes,
            "linewidth": 1.2 + 2.6 * (1 - (row + 1) / len(replays)),
        }
        _draw_steps(upper, found.loss_scale, label=as_text(name), gid=name, **line)
        skipped = step[found.overflow]
        kept = skipped[thin_marks(skipped, np.zeros(len(skipped)))]
        style = {"linestyle": "none", "marker": "|", "markersize": 11, "markeredgewidth": 1.0, "color": colour}
        lower.plot(kept, np.full(len(kept), row), gid=name, **style)
    names = [f"{as_text(name)} ({found.measures.skipped:,})" for name, found in replays.items()]
    lower.set_yticks(range(len(replays)), names)
    lower.set_ylim(len(replays) - 0.4, -0.6)
    lower.grid(visible=False, axis="y")
    use_step_axis(lower, 1, len(trace))
    legend_above(upper, columns=7)
    headline(figure, f"{as_text(trace.name)}: {_finding({name: one.measures for name, one in replays.items()})}")
    return figure


def _draw_ceiling(axes: Axes, trace: Trace, replays: Mapping[str, Replay]) -> None:
    """Shade where steps overflow, and choose the axis: all scales, and the ceilings as far as they are numbers."""
    bounded = trace.ceiling[(trace.ceiling >= SMALLEST_LOSS_SCALE) & (trace.ceiling <= LARGEST_LOSS_SCALE)]
    scales = np.concatenate([bounded, *(found.loss_scale for found in replays.values())])
    scales = scales[(scales > 0) & np.isfinite(scales)]
    lowest, highest = (float(scales.min()), float(scales.max())) if len(scales) else (1.0, 2.0)
    use_power_of_two_axis(axes, lowest, highest)
    bottom, top = axes.get_ylim()
    shown = np.clip(trace.ceiling, bottom, top)
    # What lies right at the ceiling is known not to overflow, and what lies right above it to overflow.
    exact = (trace.ceiling <= trace.lower_bound) & (trace.upper_bound <= np.nextafter(trace.ceiling, np.inf))
    label = "ceiling" if exact.all() else "ceiling, partly assumed"
    step, edge = _draw_steps(axes, shown, label=label, gid="ceiling", color=_CEILING, linewidth=0.8, zorder=1.5)
    drawn: Literal["post"] | None = "post" if len(step) == len(trace) else None
    axes.fill_between(step, edge, top, step=drawn, color=CONTEXT, linewidth=0, label="overflows", gid="overflows")


def _draw_steps(axes: Axes, values: _Floats, **style: Any) -> tuple[_Floats, _Floats]:
    """Draw values over the steps, those of a long run as medians within a band; return the upper edge, x and y."""
    step = np.arange(1, len(values) + 1, dtype=np.float64)
    if len(values) <= _BAND_FROM:
        axes.step(step, values, where="post", **style)
        return step, values
    found = gather(step, values, _BLOCKS)
    axes.plot(found.middle, found.median, **{**style, "linewidth": max(1.6, style["linewidth"])})
    colour = style["color"]
    axes.fill_between(
        found.middle, found.lowest, found.highest, color=colour, alpha=0.15 if colour == _CEILING else 0.25, linewidth=0
    )
    return found.middle, found.highest


def _finding(measures: Mapping[str, Measures]) -> str:
    if len(measures) == 1:
        [(name, only)] = measures.items()
        headroom = "" if math.isnan(only.headroom_lost) else f" and lost {only.headroom_lost:.1f} bits of headroom"
        return f"{as_text(name)} skipped {only.skipped:,} of {count(only.steps, 'step')}{headroom}"
    fewest = min(found.skipped for found in measures.values())
    [steps] = {found.steps for found in measures.values()}
    least = min(
        (found.headroom_lost for found in measures.values() if not math.isnan(found.headroom_lost)), default=None
    )
    said = f"{listed([name for name, found in measures.items() if found.skipped == fewest])} skipped fewest steps "
    said += f"({fewest:,} of {steps:,})"
    if least is None:
        return said
    best = listed([name for name, found in measures.items() if found.headroom_lost == least])
    return f"{said}, {best} lost least headroom ({least:.1f} bits)"


def _require_replays(trace: Trace, replays: Mapping[str, Replay]) -> None:
    if not replays:
        raise ValueError("'replays' must have at least 1 entry, but got none. There is nothing to draw.")
    for name, found in replays.items():
        if len(found.loss_scale) != len(trace):
            raise ValueError(
                f"'replays' must be of the trace {trace.name!r} with {len(trace)} steps, but {name!r} has "
                f"{len(found.loss_scale)}. Replay it on this trace."
            )
