"""Tables of plain text, aligned for a terminal."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest
from typing import Any

__all__ = ["text_table"]


def text_table(
    columns: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    digits: int = 2,
    *,
    left: Collection[str] | None = None,
) -> str:
    """Return rows as aligned text, with the words of a heading one below the other.

    Args:
        columns (Sequence[str]): the keys to show, in this order. A heading is broken at each ``_``.
        rows (Sequence[Mapping]): each row by column; None and nan become ``-``.
        digits (int): decimals of numbers that are not integers. Default: 2.
        left (Collection[str], optional): the columns that are aligned on the left; the others are aligned on the right.
            Default: None, the columns that hold text.

    Examples:
        >>> print(text_table(["policy", "headroom_lost"], [{"policy": "fixed", "headroom_lost": 1.5}]))
                headroom
        policy      lost
        fixed       1.50
        >>> rows = [{"file": "a.ckpt", "step": "9", "note": "latest"}, {"file": "b.ckpt", "step": "10", "note": ""}]
        >>> print(text_table(["file", "step", "note"], rows, left=["file", "note"]))
        file    step  note
        a.ckpt     9  latest
        b.ckpt    10
    """
    cells = [[_cell(row[column], digits) for column in columns] for row in rows]
    headings = [column.split("_") for column in columns]
    # Headings of fewer words stand at the bottom.
    upside_down = list(zip_longest(*(words[::-1] for words in headings), fillvalue=""))
    lines = [list(words) for words in upside_down[::-1]] + cells
    widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]
    if left is None:
        left = [column for column in columns if any(isinstance(row[column], str) for row in rows)]
    return "\n".join(
        "  ".join(
            text.ljust(width) if column in left else text.rjust(width)
            for text, width, column in zip(line, widths, columns, strict=True)
        ).rstrip()
        for line in lines
    )


def _cell(value: Any, digits: int) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)
