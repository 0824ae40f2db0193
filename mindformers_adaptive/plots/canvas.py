"""Common code of all pictures: matplotlib loaded on first use, one style, files that are never half written, and marks
that are thinned out where they lie too close together to be distinguished."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mindformers_adaptive.text.files import atomic_write, make_folder_of
from mindformers_adaptive.text.untrusted import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]

# The number of columns into which a panel is divided: about twice the panel's width in pixels, in a picture 1200 pixels
# wide.
_COLUMNS = 2000

# The colours of Okabe and Ito, https://jfly.uni-koeln.de/color, which people with colour blindness can distinguish.
MAIN, SECOND, WARNING = "#0072b2", "#009e73", "#d55e00"
PURPLE, FAINT = "#cc79a7", "#56b4e9"
MUTED, CONTEXT = "#5f5f5f", "#e3e3e3"

# Colour and dashes for the lines of a picture, in order. The dashes change where the colours repeat.
_COLOURS = (MAIN, WARNING, SECOND, PURPLE, "#e69f00", FAINT)
LINE_STYLES = tuple((colour, dashes) for dashes in ("solid", "dashed", "dotted", "dashdot") for colour in _COLOURS)

# If at least this share of the gradients underflow, pictures mark the share as a warning. A smaller share is harmless:
# the smallest gradients underflow first, and the command `find` calls it harmless to lose 20 % of a gradient's norm.
ALARMING = 0.01

_DOTS_PER_INCH = 120
_LABEL_SIZE = 10.5

_width_factor: ContextVar[float] = ContextVar("width_factor", default=1.0)

# A line with at most this many points has a mark at each point.
_FEW_POINTS = 50

# With more than _BAND_FROM steps, one point per step would fill the panel, so the steps are grouped into _BLOCKS
# blocks.
_BAND_FROM, _BLOCKS = 8000, 400

_CEILING = "#9a9a9a"


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, without a window and without matplotlib's global state.

    Args:
        width (float): the width in inches; 10 inches are 1200 pixels, at 120 dots per inch.
        height (float): the height in inches.

    Raises:
        ImportError: if matplotlib cannot be imported; the message says how to install it.

    Examples:
        >>> axes = new_figure(10, 5).subplots()
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"Pictures need matplotlib, which cannot be imported ({error}). Install it with the extra 'plot': "
            "pip install '.[plot]' in the clone of this package"
        ) from error
    size = (width * _width_factor.get(), height)
    figure = Figure(figsize=size, dpi=_DOTS_PER_INCH, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


@contextmanager
def narrower(factor: float) -> Iterator[None]:
    """Within a ``with`` block, make new figures narrower, but keep the size of their text."""
    token = _width_factor.set(factor)
    try:
        yield
    finally:
        _width_factor.reset(token)


def write_svg(figure: Figure, file: IO[bytes], transparent: bool = True) -> None:
    """Write a picture as SVG, with a transparent background or with its own background."""
    from matplotlib import rc_context

    # Without dates and random names, the SVG file changes only if the picture changes.
    with rc_context({"svg.hashsalt": "mindformers_adaptive", "svg.fonttype": "path"}):
        figure.savefig(file, format="svg", transparent=transparent, metadata={"Date": None})


def save(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a picture to a file. If writing fails, no partial file is left.

    Args:
        figure (Figure): the picture.
        path (str): a file whose name ends in .png or .svg. An existing file is replaced; missing folders are made.

    Returns:
        Path, the file.

    Raises:
        ValueError: if the name has another ending.
        OSError: if the file cannot be written; an existing file is then unchanged.

    Examples:
        >>> import tempfile
        >>> figure = new_figure(4, 3)
        >>> folder = tempfile.mkdtemp()
        >>> save(figure, Path(folder, "empty.png")).name
        'empty.png'
    """
    target = require_picture(path)
    make_folder_of(target)
    with atomic_write(target, "wb") as picture:
        if target.suffix.lower() == ".svg":
            write_svg(figure, picture, transparent=False)
        else:
            figure.savefig(picture, format="png", dpi=_DOTS_PER_INCH)
    return target


def require_picture(path: str | os.PathLike[str]) -> Path:
    """Return the path of a picture, or raise ValueError if its name does not end in .png or .svg."""
    if Path(path).suffix.lower() not in (".png", ".svg"):
        raise ValueError(
            f"'path' must name a picture that ends in .png or .svg, but got {str(path)!r}. Change the ending."
        )
    return Path(path)


def headline(figure: Figure, finding: str) -> None:
    """Write a finding above a picture, as a title that is wrapped to the width of the picture."""
    figure.suptitle(finding, x=0.008, ha="left", fontsize=14, wrap=True)


def style_axes(axes: Axes, *, title: str = "", x_label: str = "", y_label: str = "") -> None:
    """Give a panel its style, the labels of its axes and, on the left, a title."""
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=10)
    if title:
        axes.set_title(title, loc="left", fontsize=11, color=MUTED, wrap=True)
    if x_label:
        axes.set_xlabel(x_label, fontsize=_LABEL_SIZE)
    if y_label:
        axes.set_ylabel(y_label, fontsize=_LABEL_SIZE)


def point_marker(points: int) -> str:
    """Return the marker of a line: "." for few points, because a single point between gaps draws no line, else ""."""
    return "." if points <= _FEW_POINTS else ""


def mark_above(axes: Axes, x: Floats, colour: str, label: str, gid: str) -> None:
    """Mark the given x positions, if any, at the upper edge of a panel."""
    if len(x):
        style: dict[str, Any] = {"linestyle": "none", "marker": "v", "clip_on": False, "color": colour}
        axes.plot(x, np.ones(len(x)), transform=axes.get_xaxis_transform(), label=label, gid=gid, **style)


def legend_above(axes: Axes) -> None:
    """Put the legend of a panel above the panel on the right, where it hides no data, in as many rows as needed."""
    figure: Any = axes.figure
    handles, names = axes.get_legend_handles_labels()
    if handles:
        # A line or mark in the legend is as wide as 5 letters, and an inch holds 13 letters.
        widths = [len(name) + 5 for name in names]
        room = int(figure.get_figwidth() * 13)
        columns = len(handles) if sum(widths) <= room else max(1, room // max(widths))
        position: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "borderaxespad": 0.2}
        axes.legend(ncols=columns, fontsize=10, frameon=False, columnspacing=1.4, handlelength=1.6, **position)


def legend_below(figure: Figure, handles: Sequence[Any]) -> None:
    """Put one legend for all panels of a picture below the panels, in a row."""
    position: dict[str, Any] = {"loc": "outside lower center", "ncols": len(handles)}
    figure.legend(handles=handles, frameon=False, fontsize=10, **position)


def use_power_of_two_axis(axes: Axes, lowest: float, highest: float) -> None:
    """Make the y axis logarithmic to base 2, with room below the lowest and above the highest value (both above 0)."""
    axes.set_yscale("log", base=2)
    axes.minorticks_off()
    margin = 2.0 ** max(1.0, 0.06 * (math.log2(highest) - math.log2(lowest)))
    axes.set_ylim(lowest / margin, highest * margin)


def use_step_axis(axes: Axes, first: float, last: float) -> None:
    """Make the x axis an axis of steps, with room before the first step and after the last."""
    room = max(0.01 * (last - first), 1.0)
    axes.set_xlim(first - room, last + room)
    axes.set_xlabel("step", fontsize=_LABEL_SIZE)
    axes.locator_params(axis="x", integer=True)
    axes.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")


def use_percent_axis(axes: Axes) -> None:
    """Make the y axis an axis of percentages: logarithmic, but linear below 0.001 %, so that it has room for 0."""
    axes.set_yscale("symlog", linthresh=1e-3, linscale=0.6)
    axes.set_ylim(-2e-4, 200)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.minorticks_off()


def say_instead(axes: Axes, text: str) -> None:
    """Write into an empty panel of a picture the reason why the panel shows no data."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", fontsize=11, color=MUTED)
    axes.set_yticks([])


def draw_steps(axes: Axes, step: Floats, values: Floats, opacity: float = 0.25, **style: Any) -> tuple[Floats, Floats]:
    """Draw values over steps; with many steps, draw medians within a band from the lowest to the highest value.

    Returns:
        tuple of two arrays: x and y of the line, or of the upper edge of the band.
    """
    if len(values) <= _BAND_FROM:
        axes.step(step, values, where="post", **style)
        return step, values
    middle, lowest, median, highest = gather(step, values, _BLOCKS)
    axes.plot(middle, median, **{**style, "linewidth": max(1.6, style["linewidth"])})
    axes.fill_between(middle, lowest, highest, color=style["color"], alpha=opacity, linewidth=0)
    return middle, highest


def draw_ceiling(axes: Axes, step: Floats, ceiling: Floats, label: str) -> None:
    """Draw each step's ceiling, and shade the loss scales above it. The limits of the y axis must be set before."""
    bottom, top = axes.get_ylim()
    style: dict[str, Any] = {"label": label, "gid": "ceiling", "color": _CEILING, "linewidth": 0.8, "zorder": 1.5}
    x, edge = draw_steps(axes, step, np.clip(ceiling, bottom, top), opacity=0.15, **style)
    drawn: Literal["post"] | None = "post" if len(x) == len(step) else None
    axes.fill_between(x, edge, top, step=drawn, color=CONTEXT, linewidth=0, label="overflows", gid="overflows")


def power_of_two(value: float) -> str:
    """Return a number above 0 as a power of two in matplotlib's notation for formulas.

    Examples:
        >>> power_of_two(65536.0), power_of_two(1000.0)
        ('$2^{16}$', '$2^{9.97}$')
    """
    exponent = round(math.log2(value), 2)
    return f"$2^{{{exponent:g}}}$"


def percent(share: float | None) -> str:
    """Return a share as a percentage of two significant digits. Only a share of exactly 0 reads 0; only 1 reads 100.

    A share of None is "not known".

    Examples:
        >>> percent(0.12345), percent(1.0), percent(0.0), percent(0.00000812)
        ('12 %', '100 %', '0 %', '0.00081 %')
    """
    if share is None:
        return "not known"
    if 0.99 < share < 1.0:
        return "over 99 %"
    return f"{np.format_float_positional(100.0 * share, precision=2, fractional=False, trim='-')} %"


def as_text(name: str) -> str:
    """Return a name with control characters escaped, and dollar signs too, which would begin a formula in matplotlib.

    Examples:
        >>> print(as_text("run $1"))
        run \\$1
    """
    return printable(name).replace("$", r"\$")


def one_per_column(x: ArrayLike, columns: int = _COLUMNS) -> Floats:
    """Return the x positions of the marks to draw: the first mark in each of the narrow columns that divide a panel.

    Args:
        x (ArrayLike): of shape (marks,), increasing.
        columns (int): the number of columns into which the range of x is cut. Default: 2000.

    Returns:
        NDArray, float64, increasing: all positions if there are at most ``columns`` marks.

    Examples:
        >>> one_per_column([0, 1, 2, 99], columns=2).tolist()
        [0.0, 99.0]
    """
    across = np.asarray(x, np.float64)
    if len(across) <= columns:
        return across
    column = np.floor((across - across[0]) / np.ptp(across) * columns)
    return across[np.unique(column, return_index=True)[1]]


def gather(x: ArrayLike, y: ArrayLike, blocks: int) -> tuple[Floats, Floats, Floats, Floats]:
    """Group the points of a line into blocks, whose medians show the line without its noise.

    Args:
        x (ArrayLike): of shape (points,), increasing.
        y (ArrayLike): of shape (points,); inf and nan are ignored.
        blocks (int): the number of blocks, whose sizes differ by at most one point; at most the number of points.

    Returns:
        tuple of four float64 arrays of shape (blocks,): the middle of each block in x, and the lowest, the median and
        the highest y in it, nan where a block has no finite number.

    Examples:
        >>> middle, _, median, highest = gather([1, 2, 3, 4, 5, 6], [1, 2, 900, 5, float("nan"), 7], 2)
        >>> middle.tolist(), median.tolist(), highest.tolist()
        ([2.0, 5.0], [2.0, 6.0], [900.0, 7.0])
    """
    rows = []
    for block in np.array_split(np.column_stack([x, y]), blocks):
        across, values = block.T
        finite = values[np.isfinite(values)]
        extremes = (finite.min(), np.median(finite), finite.max()) if len(finite) else (math.nan,) * 3
        rows.append(((across[0] + across[-1]) / 2, *extremes))
    middle, lowest, median, highest = np.array(rows, np.float64).T
    return middle, lowest, median, highest
