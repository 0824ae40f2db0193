"""Find what is wrong with a training in its steps, one by one: while it trains, or afterwards in its log."""

from __future__ import annotations

from collections.abc import Iterable

from mindformers_adaptive.record.symptom import Finding, Seen, Sign
from mindformers_adaptive.record.symptoms import BadGradients, BadLoss, Collapse, LateStreak, LossJump, LowScale
from mindformers_adaptive.record.thresholds import COLLAPSE

__all__ = ["Diagnosis", "Finding", "Seen", "Sign", "diagnose"]


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

    def feed_all(self, steps: Iterable[Seen]) -> None:
        """Feed many steps, without what the symptoms say after each of them."""
        feeds = [symptom.feed for symptom in self._symptoms]
        for seen in steps:
            for feed in feeds:
                feed(seen)

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
    diagnosis.feed_all(steps)
    return diagnosis.findings()
