"""Read any log by a regular expression whose named groups say what a line states about a step, or suggest one."""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from mindformers_adaptive.record.log_formats import LogFormat
from mindformers_adaptive.record.step import LARGEST_STEP, LogLine, Step
from mindformers_adaptive.rules.checks import with_type

GROUPS = ("step", "loss_scale", "overflow", "skipped", "total_skipped", "loss", "gradient_norm")

_TRUE = frozenset({"true", "1", "yes", "y", "on", "inf", "+inf", "-inf", "infinity", "nan", "overflow", "skipped"})
_FALSE = frozenset({"false", "0", "no", "n", "off", "none", "ok", "finite"})

# Only the first characters of a line are matched.
_LONGEST_LINE = 10_000

# Look for steps in at most this many lines that name a loss scale, and in this many first characters of a line.
_LINES, _WIDTH = 500, 2000

_AFTER = r"""["']?\s*(?:[:=|]\s*|\s+)\[?["']?"""
# How lines name the number of the step, the best way first. fairseq's num_updates leaves out skipped steps.
_STEPS = (
    rf"\bglobal_?\s?step{_AFTER}",
    rf"\b(?:step|iteration|iter|it){_AFTER}",
    rf"\b(?:steps|iterations|iters|updates?|batch){_AFTER}",
    # The counter of a progress bar, such as "| 40/9999 [" or "[ 10/3065]".
    r"[|(\[] *(?=\d+ ?/ ?\d+ ?[\[)\]])",
    r": *(?=\d+ / \d+ )",
)
_SCALE = rf"\b(?:\w+_|loss |grad )?(?:scaler?|scaling_sens|loss_scaling){_AFTER}"
_OVERFLOW = rf"\b(?:overflow|overflow cond|cond){_AFTER}"
_NUMBER, _WHOLE, _WORD = r"[-+.\w]+", r"\d+", r"[\w.]+"

_FAIRSEQ = r"epoch \d+: +(?P<step>\d+) / |(?P<overflow>overflow) detected.*loss scale to: (?P<loss_scale>\S+)"


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


def suggest_pattern(lines: Sequence[str]) -> str | None:
    """Return a pattern that reads the lines of a log which name a loss scale, or None if none is found.

    Args:
        lines (Sequence[str]): the lines of the log.

    Examples:
        >>> print(suggest_pattern(["step 7 | loss 2.5 | scale: 1024.0", "step 8 | loss 2.5 | scale: 1024.0"]))
        step (?P<step>\\d+).*?scale: (?P<loss_scale>[-+.\\w]+)
    """
    lines = [line[:_WIDTH] for line in lines]
    named = [line for line in lines if re.search(f"{_SCALE}[.\\d]", line, re.I)][:_LINES]
    # fairseq prints the mean of the loss scale beside num_updates, and the loss scale itself at an overflow.
    if any("num_updates" in line for line in named):
        return _FAIRSEQ if any("overflow detected" in line for line in lines) else None
    # A line that differs from the others, such as a line of settings, must not decide.
    candidates = dict.fromkeys(pattern for line in named[:3] + named[-3:] for pattern in _of_line(line))
    if named == [] and (table := _of_table(lines)):
        candidates, named = {table: None}, lines[:_LINES]
    read = {pattern: _steps_read(pattern, named) for pattern in candidates}
    best = max(read, key=lambda pattern: read[pattern], default=None)
    return best if best is not None and read[best] else None


def _steps_read(pattern: str, lines: Sequence[str]) -> int:
    """Return in how many of the lines a pattern finds a step of its own, with a loss scale."""
    read, steps = Pattern(pattern), set()
    for line in lines:
        try:
            step = read.parse(line)
        except ValueError:
            continue
        if step is not None and step.next_loss_scale is not None:
            steps.add(step.step)
    # A line of step 0 alone may be about the state before the first step.
    return len(steps - {0})


def _of_line(line: str) -> Iterator[str]:
    """Yield the patterns of a line: for each place where it may name its step."""
    scale = re.search(f"({_SCALE})({_NUMBER})", line, re.I)
    overflow = re.search(f"({_OVERFLOW})({_WORD})", line, re.I)
    if scale is None:
        return
    required = [("loss_scale", scale, _NUMBER)]
    for name in _STEPS:
        for step in re.finditer(rf"({name})({_WHOLE})(?![\w.]*\.\d)", line, re.I):
            for optional in ([("overflow", overflow, _WORD)], []) if overflow else ([],):
                parts = sorted([("step", step, _WHOLE), *required, *optional], key=lambda part: part[1].start())
                if all(first[1].end() <= second[1].start() for first, second in pairwise(parts)):
                    yield ".*?".join(f"{_escaped(match[1])}(?P<{group}>{value})" for group, match, value in parts)


def _of_table(lines: Sequence[str]) -> str | None:
    """Return the pattern of a table whose first line names its columns, as in a CSV file."""
    heading = next(filter(None, lines), "")
    words = {f"(?P<step>{_WHOLE})": _STEPS[:3], f"(?P<loss_scale>{_NUMBER})": (_SCALE,)}
    words[f"(?P<overflow>{_WORD})"] = (_OVERFLOW,)
    for separator in ",;\t":
        names = [f"{name.strip()}:" for name in heading.split(separator)]
        groups: dict[int, str] = {}
        for group, ways in words.items():
            columns = [index for word in ways for index, name in enumerate(names) if re.search(word, name, re.I)]
            groups |= dict.fromkeys(columns[:1], group)
        if len({"step", "loss_scale"} & set(re.findall(r"<(\w+)>", "".join(groups.values())))) == 2:
            other = f"[^{re.escape(separator)}]*"
            return "^" + separator.join(groups.get(index, other) for index in range(max(groups) + 1))
    return None


def _escaped(text: str) -> str:
    """Return text as a pattern that also matches if the number of spaces differs."""
    parts = [re.escape(part).replace(r"\-", "-") for part in re.split(r"\s{2,}", text)]
    return r"\s+".join(parts).replace(r"\ ", " ")
