"""What tests look for in a figure."""


def artist(axes, gid):
    """The only artist of a panel that goes by a name."""
    [artist] = artists(axes, gid)
    return artist


def artists(axes, gid):
    """All artists of a panel that go by a name."""
    return [artist for artist in axes.get_children() if artist.get_gid() == gid]


def points(axes, gid):
    """The x and y of a line or of marks, as lists."""
    x, y = artist(axes, gid).get_data()
    return list(x), list(y)


def title(figure):
    """The finding above the picture, on one line."""
    return figure.get_suptitle().replace("\n", " ")


def legend(axes):
    """The entries of a panel's legend."""
    return [text.get_text() for text in axes.get_legend().get_texts()]


def overlap(first, other):
    """Whether two boxes share any area."""
    return first.x0 < other.x1 and other.x0 < first.x1 and first.y0 < other.y1 and other.y0 < first.y1
