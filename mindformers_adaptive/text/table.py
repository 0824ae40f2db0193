"""Plain-text tables, aligned for a terminal, and loss scales in a readable form, such as 2^16."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any


def text_table(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as an aligned text table with a header line. Columns of text are aligned left, numbers right.

    Args:
        columns (Mapping): the header of each column, with its unit, by the key of the column in the rows.
        rows (Sequence[Mapping]): each row by key; None and nan become ``-``, and a float has 1 decimal.

    Examples:
        >>> print(text_table({"rule": "rule", "lost": "bits below the ceiling"}, [{"rule": "fixed", "lost": 1.5}]))
        rule   bits below the ceiling
        fixed                     1.5
    """
    cells = [[_cell(row[column]) for column in columns] for row in rows]
    texts = [index for index, column in enumerate(columns) if any(isinstance(row[column], str) for row in rows)]
    return align([[*columns.values()], *cells], to_the_left=texts)


def counted(number: int, noun: str) -> str:
    """Return a number with a noun, which is in the plural unless the number is 1.

    Examples:
        >>> counted(1, "step"), counted(12000, "step")
        ('1 step', '12,000 steps')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def align(lines: Sequence[Sequence[str]], to_the_left: Collection[int]) -> str:
    """Return lines of cells with their columns aligned, as one text.

    Args:
        lines (Sequence[Sequence[str]]): the cells of each line; all lines have the same number of cells.
        to_the_left (Collection[int]): the columns, from 0, to align to the left; all others are aligned to the right.

    Examples:
        >>> print(align([["file", "step"], ["a.ckpt", "20"]], to_the_left=[0]))
        file    step
        a.ckpt    20
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in to_the_left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def as_power_of_two(loss_scale: float) -> str:
    """Return a loss scale as 2^n if it is a power of two, else as a plain number.

    Logs print only eight digits of a scale, so a scale close to a power of two is shown as that power.

    Examples:
        >>> as_power_of_two(65536.0), as_power_of_two(3.0), as_power_of_two(float("inf"))
        ('2^16', '3', 'inf')
    """
    if not 0.0 < loss_scale < math.inf:
        return f"{loss_scale:g}"
    exponent = round(math.log2(loss_scale))
    # ldexp() avoids 2.0**exponent, which may overflow.
    return f"2^{exponent}" if math.isclose(math.ldexp(loss_scale, -exponent), 1.0, rel_tol=1e-6) else f"{loss_scale:g}"


def _cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return f"{value:.1f}" if isinstance(value, float) else str(value)
