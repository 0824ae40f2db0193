"""Suggest a pattern for a log of an unknown program: one that reads the lines of this log."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from mindformers_adaptive.record.pattern import Pattern

__all__ = ["suggest_pattern"]

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
