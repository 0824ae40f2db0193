"""Strict JSON, in which NaN and the infinities are strings."""

from __future__ import annotations

import json
import math
from typing import Any

__all__ = ["NOT_FINITE", "json_text"]

# The strings that stand for the floats that JSON lacks.
NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def json_text(content: Any, indent: int | None = None) -> str:
    """Return a value as JSON; a float that is not finite becomes the string "nan", "inf" or "-inf".

    Args:
        content (Any): dicts, lists, tuples, strings, numbers, bools and None.
        indent (int, optional): spaces for each level. Default: None, everything on one line.

    Raises:
        TypeError: if there is anything else in it.

    Examples:
        >>> json_text({"loss": float("nan"), "ceilings": (2.0, float("inf"))})
        '{"loss": "nan", "ceilings": [2.0, "inf"]}'
        >>> NOT_FINITE[json.loads(json_text(float("-inf")))]
        -inf
    """
    return json.dumps(_replace_not_finite(content), indent=indent, allow_nan=False)


def _replace_not_finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _replace_not_finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_replace_not_finite(value) for value in content]
    return str(content) if isinstance(content, float) and not math.isfinite(content) else content
