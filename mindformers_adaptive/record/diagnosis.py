"""Find what is wrong with a training in its steps, one by one: while it trains, or afterwards in its log.

Each symptom that something other than the loss scaling is wrong has a class. The numbers that define a symptom, and the
text of its remedy, stand here and nowhere else. The numbers that other modules need too are in
:mod:`mindformers_adaptive.record.thresholds`.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from mindformers_adaptive.record.symptom import Finding, Seen, Sign, Symptom
from mindformers_adaptive.record.thresholds import COLLAPSE, HELD, LOW_SCALE, STUCK
from mindformers_adaptive.text.table import as_power_of_two, counted

# A loss has jumped if it is at least this many times as large as every loss before, or for some steps in a row at least
# _RISE times as large; and if it is at least this large.
_JUMP, _RISE, _STEPS_OF_RISE, _LEAST = 10.0, 3.0, 5, 10.0
# If the losses of this many steps in a row are inf or NaN, right after an update, that update may be to blame. After a
# bad batch, which is skipped, the next loss is finite again.
_BROKEN = 3
# At least this many overflows in a row, after a scale that had held, are a late streak if the loss or the norm of the
# gradients is at least _RISE times as large afterwards. A rise of the ceilings' noise costs one or two steps.
_LATE_STREAK = 5
# No gradient that is finite at a loss scale of 1 needs a scale below this one.
_VANISHING = 2.0**-20

# The loss and the gradient norm of a step.
_LossAndNorm = tuple[float | None, float | None]

_TO_END_TRAINING = (
    "To end a training at such a step, set check_for_nan_in_loss_and_grad: True in the YAML file; in a program, raise "
    "an error in a callback."
)
_LOWER_THE_RATE = "lower the learning rate or warm it up over more steps, and go back to a checkpoint before step"
_LOOK_AT_THE_MODEL = (
    "Usual remedies: softmax and normalization layers in float32 (softmax_compute_type, layernorm_compute_type), a "
    "lower learning rate or a longer warm-up, and going on from a checkpoint before the overflows began."
)


class LossJump(Symptom):
    """The update that was too large: after it the loss is far above all losses before, or stays inf or NaN.

    Examples:
        >>> jump = LossJump()
        >>> jump.feed(Seen(1, 4.2)) is None
        True
        >>> jump.feed(Seen(2, 10402.0)).text
        'The loss rose to 1.04e+04 in step 2, 2,477 times the largest loss before.'
    """

    kind = "loss jump"

    def __init__(self) -> None:
        super().__init__()
        # The largest loss before the present rise; the steps in a row of this rise, and their largest loss.
        self._largest, self._risen, self._largest_of_rise, self._first_high = 0.0, 0, 0.0, 0
        # Whether the present rise is an episode, and whether the loss of each step from 1 on was seen.
        self._is_said, self._has_all, self._last = False, True, 0
        # The last step with a finite loss, whether its update was applied, and the steps since with inf or NaN.
        self._last_finite, self._is_applied, self._bad, self._first_bad = 0, False, 0, 0

    def feed(self, seen: Seen) -> Sign | None:
        """Return the sign of an update that was too large; see :meth:`Symptom.feed`."""
        loss = seen.loss
        if loss is None:
            return None
        if self._has_all:
            self._has_all = seen.steps == 1 and seen.step == self._last + 1
            self._last = seen.step
        if not math.isfinite(loss):
            return self._feed_bad(seen.step)
        self._last_finite, self._is_applied, self._bad = seen.step, not seen.overflow, 0
        if not self._largest or loss < _LEAST or loss < _RISE * self._largest:
            self._largest = max(self._largest, abs(loss))
            self._present = None if self._is_said else self._present
            self._risen, self._is_said = 0, False
            return None
        self._risen += 1
        self._first_high = seen.step if self._risen == 1 else self._first_high
        self._largest_of_rise = max(self._largest_of_rise, loss) if self._risen > 1 else loss
        times = loss / self._largest
        if self._is_said:
            # After some time, take the losses of the rise as usual, to find the next rise above them.
            if self._risen >= HELD:
                self._largest, self._risen, self._is_said = self._largest_of_rise, 0, False
            return None
        if times < _JUMP and self._risen != _STEPS_OF_RISE:
            return None
        said = f"{times:,.0f}" if times >= _JUMP else f"{times:.2g}"
        # With losses that were not seen, or a loss that is the mean of several steps, this step need not be the first.
        when, before = ("in", "before") if self._has_all and times >= _JUMP else ("up to", "seen before")
        said = f"The loss rose to {loss:.3g} {when} step {seen.step}, {said} times the largest loss {before}."
        self._is_said, first = True, self._first_high
        return self._begin(
            first,
            said,
            f"Most often the update before step {first} was too large: {_LOWER_THE_RATE} {first}. If the loss falls "
            "back at once, look at the batch of that step.",
        )

    def _feed_bad(self, step: int) -> Sign | None:
        self._bad += 1
        self._first_bad = step if self._bad == 1 else self._first_bad
        if self._bad != _BROKEN or not self._is_applied or self._is_said:
            return None
        self._is_said = True
        return self._begin(
            self._first_bad,
            f"The loss was finite in step {self._last_finite}, and the next {_BROKEN} losses seen, from step "
            f"{self._first_bad} on, are inf or NaN.",
            f"If the update before step {self._first_bad} was too large, the weights are large now: {_LOWER_THE_RATE} "
            f"{self._first_bad}. If they are not, the batches from that step on have a bad value, or a value such as 0 "
            "whose logarithm is taken.",
        )


class BadLoss(Symptom):
    """A loss that is inf or NaN: its first step, the first such step that was applied, and its end.

    Args:
        batch (str): the file with the batch of the first step, or how to save that batch.

    Examples:
        >>> bad_loss = BadLoss("batch.npz")
        >>> bad_loss.feed(Seen(1, 2.5))
        >>> bad_loss.feed(Seen(2, math.nan)).text
        'The loss of step 2 is nan, and no loss scale can help: the loss has this value before it is scaled.'
        >>> bad_loss.feed(Seen(3, 2.5)).text
        'The loss was nan in step 2 only: look at that batch (batch.npz).'
    """

    kind = "bad loss"
    _HELPLESS = "no loss scale can help: the loss has this value before it is scaled"
    _REMEDY = "The value comes from the batch, from a weight, or from a layer of the forward pass."

    def __init__(self, batch: str) -> None:
        super().__init__()
        self._batch = batch
        self._begun: Seen | None = None
        self._is_told = self._has_changed = False
        self._last = self._first_bad = self._first_applied = 0
        self._known, self._bad, self._applied = 0, 0, 0
        # Whether a loss was the mean of several steps.
        self._is_mean = False

    def feed(self, seen: Seen) -> Sign | None:
        """Return the sign of a bad loss, or of its end; see :meth:`Symptom.feed`."""
        if seen.loss is None:
            return None
        self._known, self._is_mean = self._known + 1, self._is_mean or seen.steps > 1
        if math.isfinite(seen.loss):
            return None if self._begun is None else self._end(self._begun)
        self._bad, self._last = self._bad + 1, seen.step
        self._first_bad = self._first_bad or seen.step
        changes = ""
        if seen.is_applied_bad_loss:
            self._applied += 1
            self._first_applied = self._first_applied or seen.step - seen.steps + 1
            if not self._has_changed:
                self._has_changed = True
                changes = (
                    f" Step {seen.step} was not skipped, because its gradients did not overflow: the weights have "
                    f"changed. Go back to a checkpoint before this step. {_TO_END_TRAINING}"
                )
        text = f"The loss of step {seen.step} is {seen.loss}, and {self._HELPLESS}."
        if self._begun is None:
            self._begun = seen
            sign = self._begin(seen.step, text, f"{self._REMEDY}{changes}")
            self._is_told = sign is not None
            return sign
        return Sign(self.kind, f"{text}{changes}") if changes and self._is_told else None

    def _end(self, begun: Seen) -> Sign | None:
        self._begun, self._has_changed = None, False
        if not self._is_told:
            return None
        steps = f"step {begun.step}" if self._last == begun.step else f"steps {begun.step} to {self._last}"
        return Sign(self.kind, f"The loss was {begun.loss} in {steps} only: look at that batch ({self._batch}).")

    def finding(self) -> Finding | None:
        """Return how many losses were bad; see :meth:`Symptom.finding`."""
        if not self._bad:
            return None
        known = f"in {self._bad} of the {counted(self._known, 'step')} for which the log states it, first in"
        if self._is_mean:
            known = f"on {self._bad} of the {counted(self._known, 'line')} with a loss, first for"
        text = f"The loss was inf or NaN {known} step {self._first_bad}."
        remedy = f"N{self._HELPLESS[1:]}. {self._REMEDY}"
        if self._applied:
            these = "lines are about steps that" if self._is_mean else "steps"
            remedy += (
                f" {self._applied} of these {these} were not skipped and changed the weights: go back to a checkpoint "
                f"before step {self._first_applied}. {_TO_END_TRAINING}"
            )
        figures = {"steps": self._bad, "first_step": self._first_bad}
        return Finding(self.kind, self._first_bad, text, remedy, figures, is_over=self._begun is None)


class BadGradients(Symptom):
    """Gradients that are inf or NaN in steps that were applied, or at a loss scale of 1.

    Examples:
        >>> BadGradients().feed(Seen(7, overflow=False, gradient_norm=math.inf)).text
        'The norm of the gradients is inf in step 7, and the step was not skipped.'
    """

    kind = "bad gradients"

    def __init__(self) -> None:
        super().__init__()
        self._known = self._bad = self._applied = self._first_bad = self._first_applied = 0
        self._is_always_one = True

    def feed(self, seen: Seen) -> Sign | None:
        """Return the sign of bad gradients that were applied; see :meth:`Symptom.feed`."""
        self._is_always_one = self._is_always_one and seen.loss_scale == 1.0
        norm = seen.gradient_norm
        if norm is None:
            return None
        self._known += 1
        if math.isfinite(norm):
            self._present = None
            return None
        self._bad, self._first_bad = self._bad + 1, self._first_bad or seen.step
        if not seen.is_applied:
            return None
        self._applied, self._first_applied = self._applied + 1, self._first_applied or seen.step
        if self._present is not None:
            return None
        text = f"The norm of the gradients is {norm} in step {seen.step}, and the step was not skipped."
        return self._begin(seen.step, text, self._remedy())

    def finding(self) -> Finding | None:
        """Return how many gradients were bad; see :meth:`Symptom.finding`."""
        is_at_one = self._is_always_one and self._bad > self._applied
        if not (self._applied or is_at_one):
            return None
        bad, first = (self._bad, self._first_bad) if is_at_one else (self._applied, self._first_applied)
        text = (
            f"The norm of the gradients was inf or NaN in {bad} of the {counted(self._known, 'step')} for which the "
            f"log states it, first in step {first}."
        )
        remedy = "The loss scale was 1: no loss scale can help." if is_at_one else self._remedy()
        return Finding(self.kind, first, text, remedy, {"steps": bad, "first_step": first})

    def _remedy(self) -> str:
        return (
            "These steps were not skipped, so the weights may be inf or NaN since then: go back to a checkpoint before "
            f"step {self._first_applied}."
        )


class Collapse(Symptom):
    """Overflows in a row that no loss scale ends: ``limit`` of them, or a fifth as many while the scale stays the same.

    At least 10 are needed while the scale stays the same, or ``limit`` if that is less.

    Args:
        limit (int, optional): how many overflows in a row are a collapse; None if any number is no collapse.

    Examples:
        >>> collapse = Collapse(limit=2)
        >>> collapse.feed(Seen(1, overflow=True, loss_scale=2.0))
        >>> collapse.feed(Seen(2, overflow=True, loss_scale=1.0)).text.partition(":")[0]
        'Loss scaling has collapsed'
    """

    kind = "collapse"

    def __init__(self, limit: int | None) -> None:
        super().__init__()
        self._limit = math.inf if limit is None else limit
        self._stuck_from = math.inf if limit is None else min(limit, max(STUCK, limit // 5))
        # The overflows in a row, and how many of the last ones were at one loss scale.
        self._row = self._at_one_scale = self._told_rows = 0
        # The loss scale of the last overflow, and the scale after it.
        self._scale: float | None = None
        self._after: float | None = None
        self._row_began = self._row_ended = 0
        self._has_gap = self._is_told = self._is_falling = False

    def feed(self, seen: Seen) -> Sign | None:
        """Return the sign of a collapse, and one again after each ``limit`` more steps; see :meth:`Symptom.feed`."""
        if not seen.overflow:
            if self._row and seen.overflow is False:
                self._end()
            return None
        scale = seen.next_loss_scale if seen.loss_scale is None else seen.loss_scale
        if seen.consecutive_overflows is None and scale and self._after and scale > self._after:
            # Since the last overflow, a step that was not seen was applied: only such a step raises the scale.
            self._end()
        row = self._row + seen.steps if seen.consecutive_overflows is None else seen.consecutive_overflows
        if not self._row:
            self._row_began, self._has_gap = seen.step - row + 1, False
        elif seen.consecutive_overflows is None:
            self._has_gap = self._has_gap or seen.step - seen.steps != self._row_ended
        if scale is not None:
            # Overflows never raise the scale, so it was the same in steps in between that the host did not see.
            self._is_falling = self._scale is not None and scale < self._scale
            is_same = scale == self._scale and not (seen.loss_scale is None and self._has_gap)
            # A new scale belongs to this step. If only the scale after the step is known, it belongs to the next step.
            self._at_one_scale = self._at_one_scale + row - self._row if is_same else int(seen.loss_scale is not None)
        else:
            self._at_one_scale = 0
        self._scale, self._after = scale, seen.next_loss_scale
        self._row, self._row_ended = row, seen.step
        if row < self._limit and self._at_one_scale < self._stuck_from:
            return None
        rows_before, self._told_rows = self._told_rows, int(row // self._limit)
        if self._present is None:
            sign = self._begin(self._row_began, self._text(), self._remedy(seen), self._figures())
            self._is_told = sign is not None
            return sign
        return Sign(self.kind, self._text()) if self._is_told and self._told_rows > rows_before else None

    def _end(self) -> None:
        if self._present is not None:
            is_first = self._present is self._first
            self._first = self.finding() if is_first else self._first
            self._present = None
        self._row = self._at_one_scale = self._told_rows = 0
        self._scale = self._after = None

    def finding(self) -> Finding | None:
        """Return the present collapse with all of its steps, or else the first one; see :meth:`Symptom.finding`."""
        if self._present is None:
            return super().finding()
        return replace(self._present, text=self._text(), figures=self._figures())

    def _figures(self) -> dict[str, Any]:
        return {"steps": self._row, "first_step": self._row_began, "last_step": self._row_ended}

    def _text(self) -> str:
        at = ""
        if self._scale is not None and self._at_one_scale >= self._stuck_from:
            at = f", the last {self._at_one_scale} of them at a loss scale of {as_power_of_two(self._scale)}"
        elif self._scale is not None and self._at_one_scale:
            at = f", the last of them at a loss scale of {as_power_of_two(self._scale)}"
        steps = f"{self._row} steps in a row" if not self._has_gap else f"all {self._row} steps that the log shows"
        verdict = "Loss scaling seems to have collapsed" if self._has_gap else "Loss scaling has collapsed"
        return (
            f"{verdict}: {steps} have overflowed and changed no weight, from step {self._row_began} to step "
            f"{self._row_ended}{at}."
        )

    def _remedy(self, seen: Seen) -> str:
        if seen.loss is not None and not math.isfinite(seen.loss):
            cause = (
                f"The loss itself is {seen.loss}, which no loss scale can help: look for NaN or inf in the data and in "
                "the weights, such as the weights of the checkpoint that was loaded."
            )
        elif self._at_one_scale < self._stuck_from:
            cause = "The loss scale is still falling: a lower loss_scale_value would have skipped fewer steps."
            cause = cause if self._is_falling else ""
        elif self._scale is not None and self._scale > 1:
            # A rule that follows the gradients has no hysteresis.
            held = "min_loss_scale" if seen.follows_gradients else "min_loss_scale, hysteresis"
            cause = (
                "The loss scale stays where it is, although a lower one may fit: lower what holds it there, "
                f"{held} or a fixed scale."
            )
        else:
            cause = (
                "The loss scale falls no further (min_loss_scale), and no lower one would help: a layer computes "
                "values that its format cannot hold, such as a normalization in FP16, or the data or the weights have "
                "NaN or inf."
            )
        return f"{cause} {_LOOK_AT_THE_MODEL}".lstrip()


class LowScale(Symptom):
    """Overflows that brought the loss scale down to an unusually low one, which then held.

    Examples:
        >>> low_scale, steps = LowScale(), [(1, True, 256.0), *((step, False, 128.0) for step in range(2, 22))]
        >>> [sign.text for step in steps if (sign := low_scale.feed(Seen(step[0], None, *step[1:])))]
        ['Overflows brought the loss scale down to 2^7, which is unusually low: most trainings hold 2^10 and more.']
    """

    kind = "low scale"
    _VANISHED = (
        "No loss scale can help: the data or the weights have NaN or inf, or a layer computes values that "
        "its format cannot hold."
    )

    def __init__(self) -> None:
        super().__init__()
        # The lowest scale that has overflowed since an unusual scale did not; and the steps in a row without overflow
        # at one scale.
        self._overflowed, self._scale, self._clean, self._zeros = math.inf, 0.0, 0, 0

    def feed(self, seen: Seen) -> Sign | None:
        """Return the sign of an unusually low scale; see :meth:`Symptom.feed`."""
        after = seen.loss_scale if seen.next_loss_scale is None else seen.next_loss_scale
        # Where overflows are not stated, only the scale shows that it vanishes.
        if after is not None and seen.overflow is None:
            # A log may round a scale below 0.05 to 0, so a single 0 says little.
            self._zeros = self._zeros + 1 if after == 0.0 else 0
            if self._present is None and (0.0 < after < _VANISHING or self._zeros == 3):
                return self._begin(seen.step, f"The loss scale is {after:.3g} after step {seen.step}.", self._VANISHED)
            if after > LOW_SCALE:
                self._present = None
        scale = seen.loss_scale
        if scale is None or seen.overflow is None:
            self._clean = 0
            return None
        if seen.overflow:
            self._overflowed, self._clean = min(self._overflowed, scale), 0
            return None
        self._clean = self._clean + seen.steps if scale == self._scale else seen.steps
        self._scale = scale
        if self._clean < HELD:
            return None
        if scale > LOW_SCALE:
            self._overflowed, self._present = math.inf, None
        elif self._present is None and 1.0 < self._overflowed <= 2 * LOW_SCALE:
            return self._begin(
                seen.step,
                f"Overflows brought the loss scale down to {as_power_of_two(scale)}, which is unusually low: most "
                "trainings hold 2^10 and more.",
                "A lower start would skip fewer steps, but the cause would remain. Look for a layer whose weights or "
                "values are large, or a loss that is a sum instead of a mean.",
            )
        return None

    def finding(self) -> Finding | None:
        """Return the present low scale; see :meth:`Symptom.finding`. A scale that has recovered is no cause."""
        return self._present


class LateStreak(Symptom):
    """Overflows in a row, after a scale that had held, that leave a much larger loss or norm of the gradients."""

    kind = "late streak"

    def __init__(self) -> None:
        super().__init__()
        # The losses and gradient norms of the last steps without overflow, and of the steps after a streak.
        self._recent: deque[_LossAndNorm] = deque(maxlen=HELD)
        self._before: list[_LossAndNorm] = []
        self._after: list[_LossAndNorm] | None = None
        self._clean = self._streak = self._began = self._last = 0

    def feed(self, seen: Seen) -> Sign | None:
        """Return the sign of a late streak, some steps after its end; see :meth:`Symptom.feed`."""
        is_next, self._last = seen.step - seen.steps == self._last, seen.step
        sign = None
        if self._after is not None:
            self._after.append((seen.loss, seen.gradient_norm))
            if len(self._after) == HELD:
                sign, self._after = self._judge(self._after), None
        if seen.overflow:
            if not self._streak:
                self._before = list(self._recent) if self._clean >= HELD and is_next else []
                self._began = seen.step - seen.steps + 1
            self._streak, self._clean = self._streak + seen.steps if is_next else seen.steps, 0
            return sign
        if self._streak:
            if self._after is None and self._before and self._streak >= _LATE_STREAK and seen.overflow is False:
                self._after, self._end = [(seen.loss, seen.gradient_norm)], seen.step - seen.steps
            self._streak = 0
            self._recent.clear()
        if seen.overflow is None or not is_next:
            self._clean = 0
        if seen.overflow is False:
            self._clean += seen.steps
            self._recent.append((seen.loss, seen.gradient_norm))
        return sign

    def finding(self) -> Finding | None:
        """Return the first late streak; see :meth:`Symptom.finding`."""
        if self._first is None and self._after:
            self._judge(self._after)
        return self._first

    def _judge(self, after: list[_LossAndNorm]) -> Sign | None:
        rises = []
        for index, name in enumerate(("loss", "gradient norm")):
            was, now = (
                [value for each in steps if (value := each[index]) is not None and math.isfinite(value)]
                for steps in (self._before, after)
            )
            if was and now and (low := statistics.median(was)) > 0 and (high := statistics.median(now)) >= _RISE * low:
                rises.append(f"the {name} rose from {low:.3g} to {high:.3g}")
        if not rises:
            return None
        steps = self._end - self._began + 1
        return self._begin(
            self._began,
            f"After {HELD} or more steps without overflow, {steps} steps in a row were skipped, from step "
            f"{self._began} to {self._end}. Over these steps {' and '.join(rises)}.",
            f"A loss scale does not cause that: look at the updates and the data before these steps. "
            f"{_LOOK_AT_THE_MODEL}",
            {"steps": steps, "first_step": self._began, "last_step": self._end},
        )


class Diagnosis:
    """Feeds the steps of a training to all symptoms.

    Args:
        limit (int, optional): how many overflows in a row are a collapse, as in :class:`Collapse`. Default: 50.
        batch (str): as in :class:`BadLoss`. Default: "", how to save the batch.

    Examples:
        >>> diagnosis = Diagnosis()
        >>> import math
        >>> [sign.kind for loss in (3.0, 2.9, math.nan) for sign in diagnosis.feed(Seen(1, loss))]
        ['bad loss']
    """

    def __init__(self, limit: int | None = COLLAPSE, batch: str = "") -> None:
        bad_loss = BadLoss(batch or "LossScaleMonitor with explain: True saves it")
        # Of several symptoms that begin at the same step, the first one is the likeliest cause.
        self._symptoms = (LossJump(), bad_loss, BadGradients(), Collapse(limit), LowScale(), LateStreak())

    def feed(self, seen: Seen) -> list[Sign]:
        """Return what the symptoms say after a step.

        Args:
            seen (Seen): the next step, in the order of the steps.
        """
        return [sign for symptom in self._symptoms if (sign := symptom.feed(seen)) is not None]

    def findings(self) -> list[Finding]:
        """Return what was found in all steps so far, the likeliest cause first.

        A symptom that lasts comes before one that is over, and then the symptom that began first.
        """
        findings = [finding for symptom in self._symptoms if (finding := symptom.finding()) is not None]
        return sorted(findings, key=lambda finding: (finding.is_over, finding.step))


def diagnose(steps: Iterable[Seen]) -> list[Finding]:
    """Return what is wrong with a training, the likeliest cause first; an empty list if nothing is.

    Args:
        steps (Iterable[Seen]): the steps that are known, in their order.
    """
    diagnosis = Diagnosis()
    for seen in steps:
        diagnosis.feed(seen)
    return diagnosis.findings()
