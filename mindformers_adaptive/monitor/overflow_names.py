"""Which Parameters' gradients overflowed, in a line of the log and in the message of a collapse."""

from collections.abc import Mapping, Sequence

__all__ = ["HOW_TO_NAME", "OverflowNames", "overflowed_in"]

HOW_TO_NAME = "To have the Parameters named whose gradients overflow, set track_per_parameter=True in the update cell."

_MOST_NAMES = 3


class OverflowNames:
    """Makes one line for each row of overflows, at the first of its steps whose Parameters are known.

    Examples:
        >>> step = {"step": 7, "overflow": True, "loss_scale": 1024.0, "consecutive_overflows": 1}
        >>> names = OverflowNames()
        >>> names.check(step | {"overflowed_parameters": ["weight", "bias"]})
        'Loss scaling: at loss scale 1024.0, step 7 had inf or NaN in the gradients of weight, bias.'
        >>> names.check(step | {"step": 8, "consecutive_overflows": 2, "overflowed_parameters": ["bias"]})
    """

    def __init__(self) -> None:
        self._named_row: int | None = None

    def check(self, entry: Mapping[str, object]) -> str | None:
        """Return the line for a step, or None.

        Args:
            entry (Mapping): a step, with ``step``, ``loss_scale``, ``consecutive_overflows`` and, where they are known,
                ``overflowed_parameters``.
        """
        what, step, consecutive = overflowed_in(entry), entry["step"], entry["consecutive_overflows"]
        if what is None or not isinstance(step, int) or not isinstance(consecutive, int):
            return None
        row = step - consecutive
        if row == self._named_row:
            return None
        self._named_row = row
        scale = entry["loss_scale"]
        where = "" if scale is None else f"at loss scale {scale}, "
        return f"Loss scaling: {where}{what}"


def overflowed_in(entry: Mapping[str, object]) -> str | None:
    """Return a sentence that names the Parameters whose gradients overflowed in a step, or None if nothing is known.

    Args:
        entry (Mapping): a step, with ``step`` and, where they are known, ``overflowed_parameters``.

    Examples:
        >>> overflowed_in({"step": 7, "overflowed_parameters": ["a", "b", "c", "d"]})
        'step 7 had inf or NaN in the gradients of a, b, c and 1 more.'
        >>> overflowed_in({"step": 7, "overflowed_parameters": []})
        'step 7 overflowed, but had neither inf nor NaN in the gradients of the Parameters.'
    """
    names = entry.get("overflowed_parameters")
    if not isinstance(names, Sequence):
        return None
    if not names:
        return f"step {entry['step']} overflowed, but had neither inf nor NaN in the gradients of the Parameters."
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"step {entry['step']} had inf or NaN in the gradients of {', '.join(names[:_MOST_NAMES])}{more}."
