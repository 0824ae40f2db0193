"""Read any log by a regular expression whose named groups say what a line states about a step."""

import re
from typing import Any

from mindformers_adaptive.record.log_formats import LogFormat
from mindformers_adaptive.record.step import LARGEST_STEP, LogLine, Step
from mindformers_adaptive.rules.checks import with_type

GROUPS = ("step", "loss_scale", "overflow", "skipped", "total_skipped", "loss", "gradient_norm")

_TRUE = frozenset({"true", "1", "yes", "y", "on", "inf", "+inf", "-inf", "infinity", "nan", "overflow", "skipped"})
_FALSE = frozenset({"false", "0", "no", "n", "off", "none", "ok", "finite"})

# Only the first characters of a line are matched.
_LONGEST_LINE = 10_000


class Pattern(LogFormat):
    """The format of a log whose lines a regular expression describes.

    Args:
        pattern (str): a regular expression with named groups: ``step`` and at least one of ``loss_scale``, ``overflow``
            and ``skipped``.

    Raises:
        TypeError: if ``pattern`` is not text.
        ValueError: if ``pattern`` is no regular expression or does not have these groups.
    """

    name = "pattern"
    lists_overflows = True

    def __init__(self, pattern: str) -> None:
        if not isinstance(pattern, str):
            raise TypeError(f"'pattern' must be text, but got {with_type(pattern)}. Give a regular expression.")
        try:
            self._pattern = re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(
                f"'pattern' must be a regular expression of Python, but {pattern!r} is not: {error}. Correct it."
            ) from error
        groups = self._pattern.groupindex.keys()
        if unknown := sorted(groups - set(GROUPS)):
            raise ValueError(
                f"'pattern' must use only the groups {', '.join(GROUPS)}, but has {', '.join(unknown)}. Rename or "
                "remove them."
            )
        if "step" not in groups or not groups & {"loss_scale", "overflow", "skipped", "total_skipped"}:
            raise ValueError(
                "'pattern' must have the group (?P<step>...) and at least one of (?P<loss_scale>...), "
                "(?P<overflow>...), (?P<skipped>...) and (?P<total_skipped>...), but "
                f"{pattern!r} has {', '.join(groups) or 'no group'}. Add what is missing."
            )
        self.example = pattern

    def parse(self, line: str) -> Step | None:
        match = self._pattern.search(line[:_LONGEST_LINE])
        if match is None:
            return None
        texts = {name: text.strip() for name, text in match.groupdict().items() if text and text.strip()}
        values: dict[str, Any] = {name: _value(name, text) for name, text in texts.items()}
        if "step" not in values:
            is_overflow = values.get("overflow")
            return LogLine(overflow=True, next_loss_scale=values.get("loss_scale")) if is_overflow else None
        return LogLine(
            step=values["step"],
            next_loss_scale=values.get("loss_scale"),
            overflow=values.get("overflow"),
            skipped_since=values.get("skipped"),
            skipped_steps=values.get("total_skipped"),
            loss=values.get("loss"),
            gradient_norm=values.get("gradient_norm"),
        )


def _value(name: str, text: str) -> Any:
    """Return what a group states; raise ValueError if the text of the group cannot be read."""
    if name == "overflow":
        # Some programs print the flag as a float, such as 1.000000.
        word = re.sub(r"(?<=^[01])\.0+$", "", text.lower())
        if word not in _TRUE | _FALSE:
            raise ValueError(f"the group 'overflow' must be a word such as True, False, 1, 0, yes, no, but is {text!r}")
        return word in _TRUE
    number = re.sub(r"(?<=\d)[,_](?=\d{3}(?:\D|$))", "", text).rstrip(".,")
    try:
        if name not in ("step", "skipped", "total_skipped"):
            return float(number)
        whole = int(float(number)) if re.fullmatch(r"\d+\.0*", number) else int(number)
    except ValueError:
        raise ValueError(f"the group {name!r} must be a number, but is {text[:80]!r}") from None
    if not 0 <= whole <= LARGEST_STEP:
        raise ValueError(f"the group {name!r} must be from 0 to 2^53, but is {whole}")
    return whole
