"""Pictures of the lab: replays on a trace, and rules by skipped steps and bits below the ceiling."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from mindformers_adaptive.lab.measures import FREE_BITS, LARGEST_LOSS_SCALE, SMALLEST_LOSS_SCALE
from mindformers_adaptive.lab.replay import Comparison, Replay
from mindformers_adaptive.plots import canvas
from mindformers_adaptive.plots.canvas import Floats, one_per_column
from mindformers_adaptive.record.trace import Trace, implied_ceilings
from mindformers_adaptive.text.table import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# The ceiling of a step is the largest loss scale without overflow. The ceilings that a trace's gradients imply have a
# separate line, if in more than a share _FEW of the steps they differ from the trace's ceilings by at least
# _SAME_BITS bits.
_SAME_BITS, _FEW = 0.05, 0.05


def draw_replays(trace: Trace, replays: Mapping[str, Replay]) -> Figure:
    """Draw replays of rules on a trace: the ceiling of the trace, and each rule's loss scale and skipped steps.

    On a long trace each line becomes a line of medians, within a band from the lowest to the highest value. If the
    trace has largest gradients, the ceiling that they imply has a line too, unless it equals the ceiling of the trace.

    Args:
        trace (Trace): the replayed trace.
        replays (Mapping[str, Replay]): the results of :func:`mindformers_adaptive.lab.replay.replay` on this trace, by
            the name of the rule; at least one.

    Returns:
        Figure of two panels over the same steps, 1200 pixels wide; the lower panel counts the skipped steps.

    Raises:
        ImportError: if matplotlib is missing.
        ValueError: if a replay has another number of steps than the trace.

    Examples:
        >>> from mindformers_adaptive.lab.running_rule import start_rule
        >>> from mindformers_adaptive.lab.replay import replay
        >>> trace = Trace.exact("sudden drop", [8.0, 8.0, 2.0, 2.0])
        >>> draw_replays(trace, {"fixed": replay(start_rule("fixed", loss_scale_value=4.0), trace)}).get_suptitle()
        'sudden drop'
    """
    figure = canvas.new_figure(10, 5.2 + 0.32 * len(replays))
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[4.2, 0.6 + 0.32 * len(replays)])
    _draw_ceiling(upper, trace, replays)
    canvas.style_axes(upper, y_label="loss scale, log2")
    steps = np.arange(1, len(trace) + 1, dtype=np.float64)
    canvas.style_axes(lower, title="skipped steps")
    for row, ((name, result), (colour, dashes)) in enumerate(zip(replays.items(), canvas.LINE_STYLES, strict=False)):
        # The first line is the widest and the last line the narrowest, so that all stay visible where they overlap.
        width = 1.2 + 2.6 * (1 - (row + 1) / len(replays))
        line: dict[str, Any] = {"color": colour, "linestyle": dashes, "linewidth": width, "gid": name}
        canvas.draw_steps(upper, steps, result.loss_scale, label=canvas.as_text(name), **line)
        skipped = one_per_column(np.flatnonzero(result.overflow) + 1)
        style: dict[str, Any] = {"linestyle": "none", "marker": "|", "markersize": 11, "markeredgewidth": 1.0}
        lower.plot(skipped, np.full(len(skipped), row), color=colour, gid=name, **style)
    names = [f"{canvas.as_text(name)} ({result.measures.skipped:,})" for name, result in replays.items()]
    lower.set_yticks(range(len(replays)), names)
    lower.set_ylim(len(replays) - 0.4, -0.6)
    lower.grid(visible=False, axis="y")
    canvas.use_step_axis(lower, 1, len(trace))
    canvas.legend_above(upper)
    canvas.headline(figure, canvas.as_text(trace.name))
    return figure


def _draw_ceiling(axes: Axes, trace: Trace, replays: Mapping[str, Replay]) -> None:
    """Draw the ceiling of a trace, shade above it, and fit the axis to loss scales and ceilings that FP32 can hold."""
    gradients = np.full(len(trace), np.nan) if trace.largest_gradient is None else trace.largest_gradient
    shown = implied_ceilings(gradients, trace.gradient_format)
    scales = np.concatenate([trace.ceiling, shown, *(result.loss_scale for result in replays.values())])
    scales = scales[(scales >= SMALLEST_LOSS_SCALE) & (scales <= LARGEST_LOSS_SCALE)]
    canvas.use_power_of_two_axis(axes, scales.min(), scales.max())
    # A ceiling is known exactly if the step does not overflow at the ceiling, but at the next larger float64.
    exact = (trace.ceiling <= trace.lower_bound) & (trace.upper_bound <= np.nextafter(trace.ceiling, np.inf))
    label = "ceiling" if exact.all() else "ceiling, partly assumed"
    steps = np.arange(1, len(trace) + 1, dtype=np.float64)
    canvas.draw_ceiling(axes, steps, trace.ceiling, label)
    # The ceilings that the gradients imply have their own line, unless it nearly equals the line of the trace's
    # ceilings.
    with np.errstate(divide="ignore", invalid="ignore"):
        differs = np.abs(np.log2(shown / trace.ceiling)) >= _SAME_BITS
    known = np.isfinite(shown)
    if differs.sum() > _FEW * known.sum():
        style: dict[str, Any] = {"color": canvas.MUTED, "linestyle": "dotted", "linewidth": 1.0, "gid": "shown"}
        values = np.clip(shown[known], *axes.get_ylim())
        canvas.draw_steps(axes, steps[known], values, opacity=0.1, label="what the gradients show", **style)


# The axis of skipped steps is logarithmic if a result has more than this many times the median number of skipped steps.
_LOG_SKIPPED_FROM = 50.0

# If there are at most this many results, each has its own colour and a legend entry; otherwise only the best
# results do.
_NAMED = 12

# The text of a legend entry is wrapped after at most this many letters.
_LETTERS = 34


def draw_comparison(comparison: Comparison) -> Figure:
    """Draw skipped steps against bits below the ceiling for the rules of a comparison, as means over its traces.

    Below the ceiling, 16 bits are free, see :class:`~mindformers_adaptive.lab.measures.Measures`.

    Args:
        comparison (Comparison): what :func:`mindformers_adaptive.lab.replay.compare` returned.

    Returns:
        Figure; the legend names up to 12 rules, first those that skip fewest. Rules without headroom are not drawn;
        the picture gives their number.

    Raises:
        ImportError: if matplotlib is missing.
        ValueError: if no rule has headroom.
    """
    means = comparison.means()
    # An unknown mean is None in ``means``; the conversion to a float array turns it into nan.
    skipped, below = np.array([(mean["skipped"], mean["headroom_lost"]) for mean in means.values()], float).T
    where = comparison.traces[0] if len(comparison.traces) == 1 else f"mean of {len(comparison.traces)} traces"
    return draw_skips(skipped, below, list(means), where)


def draw_skips(skipped: ArrayLike, bits_below: ArrayLike, names: Sequence[str], where: str) -> Figure:
    """Draw skipped steps against bits below the ceiling.

    Args:
        skipped (ArrayLike): skipped steps of each rule, shape (rules,).
        bits_below (ArrayLike): the mean bits of each rule below the ceiling, shape (rules,). Rules with nan are
            not drawn; the picture gives their number.
        names (Sequence[str]): the name of each rule.
        where (str): the trace or traces, for the title.

    Returns:
        Figure; the legend names up to 12 rules, first those that skip fewest.

    Raises:
        ImportError: if matplotlib is missing.
        ValueError: if no rule has headroom.

    Examples:
        >>> draw_skips([1, 5], [3.0, 1.0], ["torch", "adaptive"], "drop").get_suptitle()
        'drop: skipped steps and bits below the ceiling'
    """
    x, y = np.asarray(skipped, np.float64), np.asarray(bits_below, np.float64)
    measured = np.isfinite(x) & np.isfinite(y)
    if not measured.any():
        raise ValueError(
            f"At least 1 of the {len(names)} results must have a headroom, but in each result all steps were skipped "
            "or had no ceiling. Compare on another trace."
        )
    x, y, shown = x[measured], y[measured], np.array(names, object)[measured].tolist()
    figure = canvas.new_figure(10, 6.2)
    axes = figure.subplots()
    x_label = "skipped steps"
    if len(x) < len(measured):
        x_label += f"; {counted(len(measured) - len(x), 'result')} without headroom not shown"
    y_label = f"bits below the ceiling, mean of applied steps ({FREE_BITS} are free)"
    canvas.style_axes(axes, x_label=x_label, y_label=y_label)
    if y.max() > FREE_BITS:
        axes.axhline(FREE_BITS, color=canvas.MUTED, linewidth=1.2, label=f"free up to {FREE_BITS} bits", gid="free")
    _draw_points(axes, x, y, shown)
    figure.legend(loc="outside right upper", frameon=False, fontsize=10)
    canvas.headline(figure, f"{canvas.as_text(where)}: skipped steps and bits below the ceiling")
    return figure


def _draw_points(axes: Axes, x: Floats, y: Floats, names: Sequence[str]) -> None:
    """Draw the results; results with the same coordinates share one entry of the legend."""
    together: dict[tuple[float, float], list[str]] = {}
    for point, name in sorted(zip(zip(x.tolist(), y.tolist(), strict=True), names, strict=True)):
        together.setdefault(point, []).append(name)
    named, unnamed = [*together][:_NAMED], np.array([*together][_NAMED:]).reshape(-1, 2).T
    if unnamed.size:
        axes.plot(*unnamed, "o", color=canvas.MUTED, alpha=0.55, markersize=6, label="not named", gid="not named")
    for point, (colour, dashes) in zip(named, canvas.LINE_STYLES, strict=False):
        called = canvas.as_text(textwrap.fill(", ".join(together[point]), _LETTERS))
        style: dict[str, Any] = {"color": colour, "marker": "o" if dashes == "solid" else "D", "linestyle": "none"}
        style |= {"markersize": 8, "zorder": 3}
        axes.plot(*np.reshape(point, (2, 1)), label=called, gid="rule", **style)
    if x.max() > _LOG_SKIPPED_FROM * max(float(np.median(x)), 1.0):
        axes.set_xscale("symlog", linthresh=1.0)
    axes.margins(x=0.12, y=0.14)
    axes.xaxis.set_major_formatter(lambda steps, _: f"{steps:,.6g}")
