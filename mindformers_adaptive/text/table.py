"""Tables of plain text, aligned for a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

__all__ = ["text_table"]


def text_table(columns: Sequence[str], rows: Sequence[Mapping[str, Any]], digits: int = 2) -> str:
    """Return rows as aligned text; numbers are on the right, and a heading's words stand one below the other.

    Args:
        columns (Sequence[str]): the keys to show, in this order; their ``_`` are where a heading is broken.
        rows (Sequence[Mapping]): each row by column; None and nan are shown as ``-``.
        digits (int): decimals of numbers that are not integers. Default: 2.

    Examples:
        >>> print(text_table(["policy", "headroom_lost"], [{"policy": "fixed", "headroom_lost": 1.5}]))
                headroom
        policy      lost
        fixed       1.50
    """
    cells = [[_cell(row[column], digits) for column in columns] for row in rows]
    headings = [column.split("_") for column in columns]
    # Headings of fewer words stand at the bottom.
    upside_down = list(zip_longest(*(words[::-1] for words in headings), fillvalue=""))
    lines = [list(words) for words in upside_down[::-1]] + cells
    widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]
    to_the_left = [any(isinstance(row[column], str) for row in rows) for column in columns]
    return "\n".join(
        "  ".join(
            text.ljust(width) if left else text.rjust(width)
            for text, width, left in zip(line, widths, to_the_left, strict=True)
        ).rstrip()
        for line in lines
    )


def _cell(value: Any, digits: int) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)
