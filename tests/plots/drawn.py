"""Functions with which tests find the parts of a figure."""

from matplotlib.collections import Collection
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text


def artist(axes, gid):
    """Return the matplotlib artist whose gid is ``gid`` in a panel; there must be exactly one."""
    [artist] = artists(axes, gid)
    return artist


def artists(axes, gid):
    """Return all matplotlib artists whose gid is ``gid`` in a panel."""
    return [artist for artist in axes.get_children() if artist.get_gid() == gid]


def points(axes, gid):
    """Return the x and y coordinates of a line or of marks in a panel, as lists."""
    x, y = artist(axes, gid).get_data()
    return list(x), list(y)


def title(figure):
    """Return the title of a picture as one line."""
    return figure.get_suptitle().replace("\n", " ")


def legend(axes):
    """Return the entries of a panel's legend."""
    return [text.get_text() for text in axes.get_legend().get_texts()]


def overlap(first, other):
    """Return whether two bounding boxes in a picture share any area."""
    return first.x0 < other.x1 and other.x0 < first.x1 and first.y0 < other.y1 and other.y0 < first.y1


def content(figure):
    """Return what a picture shows apart from its layout: all texts, and the data of all lines, areas and bars."""
    shown = [text.get_text() for text in figure.findobj(Text)]
    shown += [line.get_xydata().tobytes() for line in figure.findobj(Line2D)]
    shown += [path.vertices.tobytes() for areas in figure.findobj(Collection) for path in areas.get_paths()]
    patches = [patch.get_patch_transform().transform_path(patch.get_path()) for patch in figure.findobj(Patch)]
    return shown + [path.vertices.tobytes() for path in patches]
