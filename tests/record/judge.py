"""Judge what the commands say about a log by the run that truly wrote it: each sentence, and each field of ``--json``.

A sentence is right only if the true run makes it true. A sentence that is not listed here counts as wrong.
"""

import itertools
import re
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np

from mindformers_adaptive.lab.analysis import analyze
from mindformers_adaptive.lab.ceilings import trace_of
from mindformers_adaptive.lab.replay import compare
from mindformers_adaptive.lab.running_rule import start_rule
from mindformers_adaptive.plots.run_series import series_of
from mindformers_adaptive.record.logs import read_log
from mindformers_adaptive.record.trace import Trace
from tests.record.program_logs import random_log

# A loss scale holds if this many steps in a row at it are without overflow.
HELD = 20


class Truth:
    """The steps that a log is about, as they truly were.

    Args:
        run, log: the true run, and its log.
        first, last (int): the numbers of the first and last step that the log is about, as the analysis says.
        is_numbered (bool): whether the log numbers its steps.
    """

    def __init__(self, run, log, first, last, is_numbered=True):
        self.run, self.log, self.is_numbered = run, log, is_numbered
        before = log.first_step - 1
        whole = run.whole.between(first - before, last - before) if is_numbered else run.whole
        self.first, self.steps = whole.first + before, len(whole)
        self.flags, self.used, self.after, self.loss = whole.overflow, whole.used, whole.after, whole.loss
        self.norm, self.ceiling, self.bad = whole.norm, whole.ceiling, ~np.isfinite(whole.loss)
        self.skipped = int(self.flags.sum())
        if not is_numbered:
            self.skipped = sum(int(part.overflow.sum()) for part in run.parts)
        self.scales = np.unique(np.concatenate([[*part.used, *part.after] for part in run.parts]))
        self.rounding = 0.0501 if log.rounds else 0.0

    def near(self, said, true):
        """Return whether a scale as it is said is one of the true scales, as exactly as the log prints them."""
        return bool(np.isclose(said, true, rtol=1e-3, atol=self.rounding).any())

    def occurs(self, *said):
        return all(self.near(scale, self.scales) for scale in said)

    def at(self, step):
        """Return the position of a step in the arrays."""
        position = step - self.first
        assert 0 <= position < self.steps, step
        return position

    def are_skipped(self, first, last):
        return bool(self.flags[self.at(first) : self.at(last) + 1].all())

    def are_steps(self, n):
        """Return whether there are ``n`` steps. A log that has lost lines may leave out some steps."""
        return n == self.steps or (self.log.is_damaged and n < self.steps)

    def counts(self, k, n):
        return self.are_steps(n) and self.skipped - (self.steps - n) <= k <= self.skipped

    def within(self, least, most, n):
        return self.are_steps(n) and least <= self.skipped <= most + self.steps - n

    def clean_rows(self):
        """Return the first and the last position of each row of at least ``HELD`` steps without overflow."""
        overflows = np.flatnonzero(np.concatenate([[True], self.flags, [True]])) - 1
        return [(a + 1, b - 1) for a, b in itertools.pairwise(overflows.tolist()) if b - a > HELD]

    def before_held(self):
        """Return how many steps were skipped before the first scale held; all of them if none held."""
        rows = self.clean_rows()
        return int(self.flags[: rows[0][0] if rows else self.steps].sum())

    def held(self, scale, from_step=None):
        """Return whether ``HELD`` steps in a row, at a scale or above it, were without overflow."""
        starts = (start for first, last in self.clean_rows() for start in range(first, last - HELD + 2))
        return any(
            from_step in (None, start + self.first)
            and self.used[start : start + HELD].min() >= scale * 0.999 - self.rounding
            for start in starts
        )

    def longest_row(self):
        return max((len(list(row)) for flag, row in itertools.groupby(self.flags) if flag), default=0)

    def is_in_range(self, low, high):
        """Return whether 95 % of the steps of the second half used a scale in a range."""
        half = self.used[self.steps // 2 :]
        within = (half >= low * 0.999 - self.rounding) & (half <= high * 1.001 + self.rounding)
        return bool(within.mean() >= 0.95)

    def is_settled(self, low, high):
        return self.is_in_range(low, high) and not self.flags[-HELD:].all()

    def stayed(self, scale):
        return all(self.near(scale, used) for used in self.used)

    def spans(self, low, high):
        """The scale after a step counts too, although the next step need not have used it after a restart."""
        both = np.append(self.used, self.after)
        return self.near(low, [self.used.min(), both.min()]) and self.near(high, [self.used.max(), both.max()])

    def moved(self, begin, end):
        return self.near(begin, self.used[0]) and self.near(end, self.after[-1])

    def collapsed(self, scale, n):
        return bool(self.flags[-n:].all()) and n <= self.steps and self.near(scale, self.after[-1])

    def rose_before_overflow(self, low, high):
        until = int(np.argmax(self.flags)) if self.flags.any() else self.steps
        scales = np.append(self.used[: until + 1], self.after[:until])
        return self.near(low, self.used[0]) and self.near(high, scales)

    def has_bad_lines(self, step, count=1, known=None):
        """Return whether lines can have a bad loss, such as the mean of the losses up to a step."""
        return count <= self.bad.sum() and self.bad[max(self.at(step) - 99, 0) : self.at(step) + 1].any()

    def has_bad_losses(self, count, step, known=None):
        """Of the losses that a log states, some may be bad; of all steps, the first and all of them must be named."""
        exact = count == self.bad.sum() and step == self.first + np.argmax(self.bad)
        return self.bad[self.at(step)] and (exact if known is None else count <= self.bad.sum())

    def loss_rose(self, loss, step, times):
        before = self.loss[: self.at(step)]
        before = before[np.isfinite(before)].max(initial=0.0)
        return bool(np.isclose(self.loss[self.at(step)], loss, rtol=0.01)) and before * times <= loss * 1.25

    def rose_up_to(self, loss, step):
        """Return whether a loss, or the mean of some losses up to a step, was so large."""
        losses = self.loss[max(self.at(step) - 99, 0) : self.at(step) + 1]
        return np.nanmin(losses) * 0.99 <= loss <= np.nanmax(losses) * 1.01

    def is_stuck(self, count, first, last, scale, at_one=1):
        used = self.used[max(self.at(last) - at_one + 1, 0) : self.at(last) + 1]
        is_row = count == last - first + 1 and self.are_skipped(first, last)
        return is_row and all(self.near(scale, each) for each in used)

    def are_shown_skipped(self, count, first, last):
        flags = self.flags[self.at(first) : self.at(last) + 1]
        return bool(flags[0] and flags[-1] and flags.sum() >= count)

    def fell_low(self, scale):
        falls = self.used[self.flags & (self.after < self.used)]
        return self.occurs(scale) and scale <= 2.0**7 and falls.min(initial=np.inf) <= 2.0**8

    def has_no_cause(self):
        """Return whether nothing should be changed: no collapse, bad loss, lost scale, or long search at first.

        A log that does not state each step need not show them, unless most steps are counted as skipped.
        """
        if not self.log.is_exact:
            return not (self.log.counts and HELD <= self.steps < 2 * self.skipped)
        highest = max((self.used[a : b + 1].max() for a, b in self.clean_rows()), default=np.inf)
        has_lower = self.before_held() > 2 and 1 <= highest < self.used[0]
        lost = [step for step in self.run.restarts if self.has_lost_scale(step)]
        # Megatron-LM prints no loss of a skipped step.
        bad = self.bad & ~self.flags if self.log.rounds else self.bad
        return self.longest_row() < 50 and not bad.any() and not lost and not has_lower

    def has_lost_scale(self, step, skipped=3):
        """Return whether a restart began at a far higher scale than the one before it, and skipped so many steps."""
        at = self.at(step)
        row = next((count for count, flag in enumerate(self.flags[at:]) if not flag), self.steps - at)
        return step in self.run.restarts and at > 0 and self.used[at] > 4 * self.after[at - 1] and row >= skipped

    def skipped_after(self, k, n, places, exact=True):
        flags = self.flags[self.steps - n :]
        true = int(flags.sum()), int((flags & ~np.append(False, flags[:-1])).sum())
        return (k == true[0] if exact else k <= true[0]) and places <= true[1]


# What the commands may say, and the condition for it. {k} is a whole number, {low:s} a loss scale, {loss:f} any number,
# and {:f} one that follows from the others.
SENTENCES = [
    ("No step of {n} was skipped.", lambda t, n: t.counts(0, n)),
    ("{k} of {n} steps were skipped ({:f}%).", Truth.counts),
    (
        "{k} of {n} steps were skipped ({:f}%): {a} at the start, because {scale:s} was too high, and {b} later.",
        lambda t, k, n, a, scale, b: (
            t.counts(k, n) and a == t.before_held() and a + b == k and t.near(scale, t.used[0]) and t.flags[0]
        ),
    ),
    ("At least {least} and at most {most} of {n} steps were skipped ({:f}% to {:f}%).", Truth.within),
    ("At most {most} of {n} steps were skipped ({:f}% to {:f}%).", lambda t, most, n: t.within(0, most, n)),
    ("The log does not show how many of its {n} steps were skipped.", Truth.are_steps),
    (
        "At least {least} steps were skipped. The log does not number all of its steps, so it is not known how many "
        "there were.",
        lambda t, least: least <= t.skipped and not t.is_numbered,
    ),
    ("The loss was inf or NaN in {count} steps, first in step {step}.", Truth.has_bad_losses),
    ("The loss was inf or NaN on {count} of the {:f} lines with a loss, first for step {step}.", Truth.has_bad_lines),
    ("The loss was inf or NaN on the only line with a loss, first for step {step}.", Truth.has_bad_lines),
    ("The loss scale stayed at {scale:s}.", Truth.stayed),
    ("The loss scale was {scale:s} on each line of the log.", lambda t, scale: t.occurs(scale)),
    ("The loss scale settled at {scale:s}.", lambda t, scale: t.is_settled(scale, scale)),
    ("The loss scale settled between {low:s} and {high:s}.", Truth.is_settled),
    ("The loss scale collapsed to {scale:s}: the last {n} steps were all skipped.", Truth.collapsed),
    ("The loss scale collapsed to {scale:s}.", lambda t, scale: t.collapsed(scale, 10)),
    ("The loss scale stayed at {scale:s}: the last {n} steps were all skipped.", Truth.collapsed),
    ("The loss scale rose from {begin:s} to {end:s}.", Truth.moved),
    ("The loss scale fell from {begin:s} to {end:s}.", Truth.moved),
    ("The loss scale moved between {low:s} and {high:s}.", Truth.spans),
    ("The log states loss scales between {a:s} and {b:s}; the last is {c:s}.", lambda t, a, b, c: t.occurs(a, b, c)),
    ("The log states a loss scale of {scale:s}; it rounds others.", lambda t, scale: t.occurs(scale)),
    ("The log states loss scales between {a:s} and {b:s}; it rounds others.", lambda t, a, b: t.occurs(a, b)),
    ("Its falls add up to at least {n} halvings.", lambda t, n: n <= t.run.halvings() + 1e-3),
    (
        "There was room at the start: the scale rose from {low:s} to {high:s} before any overflow.",
        Truth.rose_before_overflow,
    ),
    (
        "By the norms, there is room for {bits} bits more; values between the layers may leave less.",
        lambda t, bits: t.used[0] * 2.0**bits <= t.ceiling.min() * 1.001,
    ),
    # Causes outside loss scaling.
    (
        "The loss was inf or NaN in {count} of the {known} steps for which the log states it, first in step {step}.",
        Truth.has_bad_losses,
    ),
    (
        "{count} of these steps were not skipped and changed the weights: go back to a checkpoint before step {step}.",
        lambda t, count, step: count <= (t.bad & ~t.flags).sum() and not t.flags[t.at(step)],
    ),
    (
        "{count} of these lines are about steps that were not skipped and changed the weights: go back to a checkpoint "
        "before step {step}.",
        lambda t, count, step: count <= (bad := t.bad & ~t.flags).sum() and not bad[: t.at(step)].any(),
    ),
    ("The loss rose to {loss:f} in step {step}, {times:f} times the largest loss before.", Truth.loss_rose),
    (
        "The loss rose to {loss:f} up to step {step}, {:f} times the largest loss seen before.",
        lambda t, loss, step: t.rose_up_to(loss, step),
    ),
    (
        "The loss scale is {scale:s} after step {step}.",
        lambda t, scale, step: t.near(scale, t.after[t.at(step)]),
    ),
    (
        "The loss was finite in step {last}, and the next 3 losses seen, from step {step} on, are inf or NaN.",
        lambda t, last, step: not t.bad[t.at(last)] and t.bad[t.at(step)],
    ),
    (
        "The norm of the gradients was inf or NaN in {count} of the {:f} steps for which the log states it, first in "
        "step {step}.",
        lambda t, count, step: count <= np.isinf(t.norm).sum() and np.isinf(t.norm[t.at(step)]),
    ),
    *(
        (
            f"Loss scaling has collapsed: {{count}} steps in a row have overflowed and changed no weight, from step "
            f"{{first}} to step {{last}}, the last {at_one}of them at a loss scale of {{scale:s}}.",
            Truth.is_stuck,
        )
        for at_one in ("", "{at_one} ")
    ),
    (
        "Loss scaling has collapsed: {count} steps in a row have overflowed and changed no weight, from step {first} "
        "to {last}.",
        lambda t, count, first, last: count == last - first + 1 and t.are_skipped(first, last),
    ),
    *(
        (
            "Loss scaling seems to have collapsed: all {count} steps that the log shows have overflowed and changed no "
            f"weight, from step {{first}} to {{last}}{at}.",
            Truth.are_shown_skipped,
        )
        for at in ("", ", the last of them at a loss scale of {:s}", ", the last {:f} of them at a loss scale of {:s}")
    ),
    ("The loss itself is {:f}, which no loss scale can help", lambda t: t.bad.any()),
    (
        "The loss scale is still falling: a lower loss_scale_value would have skipped fewer steps.",
        lambda t: (t.after < t.used)[t.flags].any(),
    ),
    *(
        (f"The loss scale {text}", lambda t: (t.after == t.used)[t.flags].any())
        for text in ("stays where it is, although a lower one may fit", "falls no further (min_loss_scale)")
    ),
    (
        "Overflows brought the loss scale down to {scale:s}, which is unusually low: most trainings hold 2^10 and "
        "more.",
        Truth.fell_low,
    ),
    (
        "After 20 or more steps without overflow, {n} steps in a row were skipped, from step {first} to {last}.",
        lambda t, n, first, last: n == last - first + 1 and t.are_skipped(first, last),
    ),
    ("Over these steps the loss rose from {:f} to {:f}.", lambda t: True),
    ("Over these steps the gradient norm rose from {:f} to {:f}.", lambda t: True),
    ("The loss scale was 1: no loss scale can help.", lambda t: (t.used == 1).all()),
    # Advice.
    (
        "Start at {scale:s} (loss_scale_value: {value:f}) instead of {first:s}.",
        lambda t, scale, value, first: scale == value and t.near(first, t.used[0]),
    ),
    (
        "Start at {scale:s} (loss_scale_value: {value:f}) instead of {low:s} to {high:s}.",
        lambda t, scale, value, low, high: scale == value and low * 0.999 <= t.used[0] <= high * 1.001,
    ),
    ("Start at {scale:s} (loss_scale_value: {value:f}).", lambda t, scale, value: scale == value),
    ("{k} steps were skipped before step {step}.", lambda t, k, step: k == t.flags[: t.at(step)].sum()),
    ("At least {k} steps were skipped before step {step}.", lambda t, k, step: k <= t.flags[: t.at(step)].sum()),
    (
        "From step {step} on, {scale:s} held: 20 steps in a row were not skipped.",
        lambda t, step, scale: t.held(scale, step),
    ),
    ("{scale:s} is the power of two below it.", lambda t, scale: True),
    ("Scales up to {scale:s} held later, after they or lower ones overflowed.", lambda t, scale: t.held(scale)),
    (
        "The log begins at step {step}: if the run was resumed there, resume its loss scale too.",
        lambda t, step: step == t.first,
    ),
    (
        "The loss scale was {low:s} before step {step}, and at least {high:s} in it. {n} steps were skipped until the "
        "scale was down again.",
        lambda t, low, step, high, n: (
            t.has_lost_scale(step, n) and t.occurs(low) and t.used[t.at(step)] >= high * 0.999
        ),
    ),
    *(
        (f"{text} without the state of the loss scale.", lambda t: t.run.lost)
        for text in ("The run was restarted there", "So it is after a restart")
    ),
    ("After a scale had held, {k} of {n} steps were skipped, in {places} places.", Truth.skipped_after),
    (
        "After a scale had held, at least {k} of {n} steps were skipped, in {places} places.",
        lambda t, **values: t.skipped_after(**values, exact=False),
    ),
    (
        "At least {k} steps overflowed, and each line of the log has a loss scale of 1.",
        lambda t, k: k <= t.skipped and t.occurs(1.0),
    ),
    # Without advice.
    ("No step was skipped after the start: no rule would do better.", lambda t: t.before_held() == t.skipped),
    ("The log shows nothing that should be changed.", Truth.has_no_cause),
    (
        "Too few steps to judge: a loss scale counts as held after 20 steps without overflow. Overflows in the first "
        "steps are normal: each one halves the scale until a scale holds.",
        lambda t: t.steps < HELD or t.log.is_damaged,
    ),
    (
        "No loss scale has held: no 20 steps in a row were without overflow.",
        lambda t: not t.clean_rows(),
    ),
    (
        "The log does not show whether a loss scale has held: it leaves open which steps were skipped.",
        lambda t: not t.log.is_exact,
    ),
]

# Sentences that state nothing of the run: what to do, questions, and what holds for every run.
ADVICE = (
    r"(?:Find|Look|Keep|Resume|Take|Is this|Then|Usual|Most often|If|To end|Go back|Without a train|No loss scale can|"
    r"A lower start would|A loss scale does not cause|The value comes from|Measure|: lower what|: look|, and no lower)"
    r"\b.*?(?:[.?](?= |$)|$)"
)

# Titles of pictures begin with one of these phrases.
TITLES = [
    ("None of {n} steps skipped", lambda t, n: t.counts(0, n)),
    ("All {n} steps skipped", lambda t, n: t.counts(n, n)),
    ("{k} of {n} steps skipped", Truth.counts),
    ("{least} to {most} of {n} steps skipped", Truth.within),
    ("At least {least} steps skipped", lambda t, least: least <= t.skipped and not t.is_numbered),
    ("loss inf or NaN in {count} steps, first {step}", Truth.has_bad_losses),
    ("loss inf or NaN on {count} of {known} lines, first {step}", Truth.has_bad_lines),
]

_KINDS = {"": r"[\d,]+", "s": r"2\^-?\d+|inf|[\d.]+(?:e[-+]\d+)?", "f": r"[\d.,]+(?:e[-+]?\d+)?|inf|nan"}


def _compiled(table):
    """Return the sentences as regular expressions, with their conditions."""
    rows = []
    for text, check in table:
        pattern = re.sub(r"\bwere\b", "(?:was|were)", re.sub(r"\b(step|halving|line)s\b", r"\1s?", re.escape(text)))
        pattern = pattern.replace(r"to\ \{last", r"to\ (?:step\ )?\{last")
        for name, kind in re.findall(r"\\{(\w*)(?::(\w))?\\}", pattern):
            named = f"?P<{name}_{kind}>" if name else "?:"
            slot = rf"\{{{name}{':' * bool(kind)}{kind}\}}"
            pattern = pattern.replace(slot, f"({named}{_KINDS[kind]})", 1)
        rows.append((re.compile(pattern), check))
    return rows


_SENTENCES, _TITLES = _compiled(SENTENCES), _compiled(TITLES)


def _values(match):
    """Return the numbers in a sentence by their names."""
    values = {}
    for group, text in match.groupdict().items():
        name, _, kind = group.rpartition("_")
        text = text.replace(",", "")
        power = re.fullmatch(r"2\^(-?\d+)", text)
        values[name] = 2.0 ** int(power[1]) if power else float(text) if kind else int(text)
    return values


def judge_text(truth, text, table=_SENTENCES):
    """Yield the sentences of a text that the true run does not make true, and the rest after one that is not listed."""
    text = " ".join(text.split())
    while text:
        if match := re.match(ADVICE, text):
            text = text[match.end() :].lstrip()
            continue
        matches = [(match, check) for pattern, check in table if (match := pattern.match(text))]
        if not matches:
            yield f"not listed: {text[:150]}"
            return
        match, check = max(matches, key=lambda pair: pair[0].end())
        if not check(truth, **_values(match)):
            yield match[0]
        text = text[match.end() :].lstrip()


def judge_title(truth, title):
    """Yield what is wrong in the title of a picture, such as "2 of 40 steps skipped; loss scale stayed at 2^8"."""
    count, *parts = re.split("; (?=the lo|the o|lo|o)", re.sub(r"\$|\{|\}|\\mathdefault", "", title))
    yield from judge_text(truth, count, _TITLES)
    for part in parts:
        if part.startswith("loss inf"):
            yield from judge_text(truth, part, _TITLES)
        else:
            yield from judge_text(truth, f"The {part.removeprefix('the ')}.")


def _is_bounded(said, name, true):
    """Return whether a number and its bounds allow the true number."""
    prefix = f"{name}_" if name else ""
    exact, least, most = (said[key] for key in (name or "count", f"{prefix}at_least", f"{prefix}at_most"))
    return exact in (None, true) and least <= true and (most is None or true <= most)


def judge_fields(truth, said):
    """Yield the fields of ``Analysis.to_dict()`` that the true run contradicts."""
    t, skipped, start, loss, scale = truth, *(said[name] for name in ("skipped", "start_up", "loss", "loss_scale"))
    checks = [("skipped", _is_bounded(skipped, "", t.skipped), skipped)]
    # A lone line may count the skipped steps of only some of the steps up to it.
    if t.log.counts and t.is_numbered and len(t.log.lines) > 1:
        checks.append(("skipped, which the log counts", skipped["count"] == t.skipped, skipped))
    if t.is_numbered:
        checks += _checks_of_steps(t, skipped, start, loss, scale)
    yield from (f"{name}: {value}" for name, is_right, value in checks if not is_right)


def _checks_of_steps(t, skipped, start, loss, scale):
    """Return for each field of a log with numbered steps its name, whether it is right, and its value."""
    low, high = scale["first_at_least"], scale["first_at_most"]
    one_scale = {len(set(t.used)) == 1, len({*t.used, *t.after}) == 1}
    rights = {
        "ranges": all(t.are_skipped(*ends) for ends in skipped["ranges"]),
        "before_scale_held": _is_bounded(start, "before_scale_held", t.before_held()),
        "a_scale_held": start["a_scale_held"] in (None, bool(t.clean_rows())),
        "highest_held": not start["highest_held"] or t.held(start["highest_held"]),
        "held_scale": not start["held_scale"] or t.held(start["held_scale"], start["held_from_step"]),
        "bad_steps": not loss["bad_steps"] or t.has_bad_lines(loss["first_bad_step"], loss["bad_steps"]),
        "first": not isinstance(scale["first"], float) or t.near(scale["first"], t.used[0]),
        "first_at_least": low is None or low * 0.999 <= t.used[0] <= high * 1.001,
        "final": not isinstance(scale["final"], float) or t.near(scale["final"], t.after[-1]),
        **{
            name: scale[name] in (None, "inf") or t.occurs(scale[name])
            for name in ("last_stated", "smallest", "largest")
        },
        "stayed": scale["stayed"] in (None, *one_scale),
        "settled": not scale["settled"] or t.is_in_range(*scale["settled"]),
        "halvings_at_least": scale["halvings_at_least"] <= t.run.halvings() + 1e-3,
    }
    said = {**skipped, **start, **loss, **scale}
    rows = [(name, is_right, said[name]) for name, is_right in rights.items()]
    return [*rows, *(("phase", _is_phase(t, phase), phase) for phase in scale["phases"])]


def _is_phase(t, phase):
    """Return whether the scale moved so in these steps."""
    first, last = t.at(phase["first_step"]), t.at(phase["last_step"])
    before, end, kind = phase["scale_before"], phase["scale_after"], phase["kind"]
    used, after = t.used[first : last + 1], t.after[first : last + 1]
    if kind in ("jump", "restart") or t.run.restarts:
        # A log need not show that a restart has begun with another scale, or has taken steps again.
        return t.occurs(before, end)
    if kind in ("fall", "rise"):
        return t.near(before, used[0]) and t.near(end, after[-1]) and (before > end) == (kind == "fall")
    # Between two falls that have lines, the scale may have risen without a line.
    moves = (after < used) if kind in ("drop", "applied fall") else (after > used)
    moves &= t.flags[first : last + 1] == (kind in ("drop", "overflow rise"))
    return moves.sum() >= phase["changes"] and t.near(before, used) and t.near(end, after)


def judge_log(run, log, file):
    """Yield what is wrong in what ``analyze``, ``report`` and ``plot`` say about a log."""
    try:
        recorded = read_log(file, **log.options)
    except ValueError as error:
        # A log may be refused if it states no scale of a step that counts, or in words if two engines wrote it.
        may_refuse = run.restarts or len(log.lines) == 1 or (log.mixed and re.search("two|several", str(error)))
        if not may_refuse and any(re.search(r"scale\D*\d", line) for line in log.lines):
            yield f"refused: {error}"
        return
    analysis = analyze(recorded)
    said = analysis.to_dict()
    truth = Truth(run, log, said["steps"]["first"], said["steps"]["last"], recorded.is_numbered)
    if not log.is_damaged and not log.mixed:
        yield from judge_fields(truth, said)
    sentences = [*said["verdict"], *(advice["reason"] for advice in said["advice"])]
    sentences += [advice["change"].split("\n")[0].replace("value=", "value: ") for advice in said["advice"]]
    for start in (advice.figures for advice in analysis.advice if advice.rule == "start lower"):
        is_low = recorded.skipped & (recorded.used <= start["scale"]) & (recorded.last < start["reached_at"])
        if is_low.any():
            yield f"start at {start}, where steps {recorded.last[is_low]} have overflowed"
    if not said["advice"]:
        # The last lines name other commands.
        paragraph = analysis.text().split("\n\n")[1]
        sentences.append(re.split(r"\n(?:\d+ lines? of the log|All changes)", paragraph)[0])
    for sentence in sentences:
        yield from judge_text(truth, sentence)
    if recorded.is_numbered and not log.mixed and not run.restarts:
        yield from judge_stretches(truth, recorded)
    if recorded.is_numbered and not log.is_damaged and not log.mixed:
        yield from judge_comparison(truth, recorded)
    yield from (f"title: {wrong}" for wrong in judge_title(truth, series_of(recorded).finding()))


def judge_stretches(t, recorded):
    """Yield what the true run contradicts in the stretches of a log: bounds on skipped steps, and loss scales."""
    start, end = recorded.first - t.first, recorded.last - t.first
    skipped = np.array([t.flags[a : b + 1].sum() for a, b in zip(start, end, strict=True)])
    (fewest, most), (least, greatest) = (recorded.fewest, recorded.most), recorded.so_far.T
    if not ((fewest <= skipped) & (skipped <= most)).all():
        yield f"stretches: {fewest} to {most}, truly {skipped}"
    if not ((least <= np.cumsum(skipped)) & (np.cumsum(skipped) <= greatest)).all():
        yield f"stretches, so far: {least} to {greatest}, truly {np.cumsum(skipped)}"
    for stated, true in ((recorded.used, t.used), (recorded.after, t.after)):
        known = ~np.isnan(stated)
        if not np.allclose(stated[known], true[end[known]], rtol=1e-3, atol=t.rounding):
            yield f"scales of stretches: {stated}, truly {true[end]}"
    low, high = recorded.scale_ranges
    for index in np.flatnonzero(~np.isnan(low)).tolist():
        used = t.used[start[index] : end[index] + 1]
        if not low[index] * 0.999 - t.rounding <= used.min() <= used.max() <= high[index] * 1.001 + t.rounding:
            yield f"scale ranges: {low[index]} to {high[index]}, truly {used}"


RULES = {
    "adaptive": ("adaptive", "loss_scale_value", {}),
    "dynamic 20": ("dynamic", "init_loss_scale", {"scale_window": 20}),
    "dynamic 1000": ("dynamic", "init_loss_scale", {"scale_window": 1000}),
    "megatron": ("megatron", "initial_scale", {}),
}


def judge_comparison(t, recorded):
    """Yield what is wrong in a comparison of rules on a log, by a comparison of the rules on the true ceilings."""
    try:
        trace = trace_of(recorded)
    except ValueError as error:
        if t.log.is_exact and t.used.min() >= 1 and not t.run.restarts and t.steps >= HELD:
            yield f"compare refuses: {error}"
        return
    if not ((trace.lower_bound <= t.ceiling * 1.001) & (t.ceiling * 0.999 <= trace.upper_bound)).all():
        yield "compare: bounds of the ceilings"
    start = 2.0 ** np.floor(np.log2(np.clip(t.used[0], 1, 2.0**32)))
    makers = {name: partial(start_rule, rule, **{key: start}, **more) for name, (rule, key, more) in RULES.items()}
    said, true = (compare(makers, [each]) for each in (trace, Trace.exact("true", t.ceiling)))
    unknown = {name: (1 - measures[0].known_share) * t.steps for name, measures in said.measures.items()}
    with_low = "too low" in said.text().split("\n")[0]
    bad = {name: measures.skipped + measures.too_low * with_low for name, (measures,) in true.measures.items()}
    for name, (measures,) in said.measures.items():
        if unknown[name] < 0.5 and measures.skipped != true.measures[name][0].skipped:
            yield f"compare: {name} skips {measures.skipped}, truly {true.measures[name][0].skipped}"
    verdict = said.text().split("\n")[0]
    named = re.fullmatch(r"Fewest steps skipped(?: or over \d+ bits too low)?: (.*?)(?: and others)?\.", verdict)
    if named and named[1] != "the same for all rules":
        worst = max(bad[name] - unknown[name] for name in named[1].split(", "))
        if worst > min(bad[name] + unknown[name] for name in bad):
            yield f"compare: {verdict} Truly {bad}"
    elif not named and not verdict.startswith("No rule is named best: "):
        yield f"compare: not listed: {verdict}"
    if named and max(unknown.values()) > 0.1 * t.steps + 0.5:
        yield f"compare: names a rule, but does not know {unknown}"


def judge_seed(seed, folder):
    """Return the name of a random program, and what is wrong in what the commands say about its log of a random run."""
    name, run, log = random_log(np.random.default_rng(seed))
    file = Path(folder, "run.log")
    file.write_text("".join(log.lines))
    return name, list(judge_log(run, log, file))


def main():
    """Judge the runs of some seeds, "python -m tests.record.judge FIRST [LAST]", and print each kind of fault once."""
    faults = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(int(sys.argv[1]), int(sys.argv[-1]) + 1):
            try:
                name, wrong = judge_seed(seed, folder)
            except Exception as error:
                name, wrong = "", [f"{type(error).__name__}: {error}"]
            for text in wrong:
                kind = re.sub(r"2\^-?\d+|[\d,.]+", "#", text)[:40]
                faults.setdefault((name, kind), []).append(f"seed {seed}: {text[:400]}")
    for (name, _), texts in sorted(faults.items(), key=lambda pair: -len(pair[1])):
        print(f"{len(texts):3d} {name}, {texts[0]}")


if __name__ == "__main__":
    main()
