"""What a symptom is fed, and what it returns: a step of a training, a sign for its log, and a finding at the end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple


class Seen(NamedTuple):
    """What is stated of a step of a training, or of a few steps with one outcome. A value that is not stated is None.

    Attributes:
        step (int): the number of the step, or of the last one.
        loss (float, optional): the loss before scaling; inf or NaN if it is bad.
        overflow (bool, optional): whether the step overflowed and was skipped.
        loss_scale (float, optional): the loss scale of the step.
        next_loss_scale (float, optional): the loss scale of the next step.
        gradient_norm (float, optional): the norm of the gradients; inf or NaN if it is bad.
        dropped_by_norm (bool, optional): whether the step was dropped because of its gradient norm.
        consecutive_overflows (int, optional): how many steps in a row have overflowed up to this one, where the device
            counts them.
        follows_gradients (bool): whether the rule follows the largest gradient, and so has no hysteresis.
        steps (int): the number of steps; ``overflow`` holds for each of them.
    """

    step: int
    loss: float | None = None
    overflow: bool | None = None
    loss_scale: float | None = None
    next_loss_scale: float | None = None
    gradient_norm: float | None = None
    dropped_by_norm: bool | None = None
    consecutive_overflows: int | None = None
    follows_gradients: bool = False
    steps: int = 1

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Seen:
        """Return the step that an entry of a record describes."""
        known = {name: entry[name] for name in cls._fields if name in entry}
        return cls(**known, follows_gradients="gradient_format" in entry)

    @property
    def is_applied(self) -> bool:
        """Whether the step surely changed the weights."""
        return self.overflow is False and not self.dropped_by_norm

    @property
    def is_applied_bad_loss(self) -> bool:
        """Whether the step changed the weights although its loss was inf or NaN.

        This happens if the gradients are finite nevertheless, because a train step skips an update only for its
        gradients.
        """
        return self.is_applied and self.loss is not None and not math.isfinite(self.loss)


class Sign(NamedTuple):
    """What a symptom says right after a step, for the log of the training.

    Attributes:
        kind (str): the kind of symptom, as in :class:`Finding`.
        text (str): what is seen.
        remedy (str): what to do; "" if an earlier sign has said so, and this sign only goes on with it.
    """

    kind: str
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Finding:
    """What a symptom has found in all steps.

    Attributes:
        kind (str): "loss jump", "bad loss", "bad gradients", "collapse", "low scale" or "late streak".
        step (int): the step at which it began.
        text (str): what was found.
        remedy (str): what to do.
        figures (dict): the numbers of the text by name, ready for JSON.
        is_over (bool): whether it had ended before the last step.
    """

    kind: str
    step: int
    text: str
    remedy: str
    figures: dict[str, Any] = field(default_factory=dict)
    is_over: bool = False


class Symptom:
    """The base class of symptoms. A symptom may come back: each time is an episode."""

    kind = ""

    def __init__(self) -> None:
        self._episodes = 0
        self._first: Finding | None = None
        # The finding of the latest episode, None after its end.
        self._present: Finding | None = None

    def feed(self, seen: Seen) -> Sign | None:
        """Return what to say after a step, or None.

        Args:
            seen (Seen): the next step.
        """
        raise NotImplementedError

    def finding(self) -> Finding | None:
        """Return what was found in all steps so far: the present episode, or else the first one; None without any."""
        return self._present or (self._first and replace(self._first, is_over=True))

    def _begin(self, step: int, text: str, remedy: str, figures: dict[str, Any] | None = None) -> Sign | None:
        """Begin an episode. Return its sign, or None if there were so many that this one would only fill the log."""
        self._present = Finding(self.kind, step, text, remedy, figures or {"first_step": step})
        self._first = self._first or self._present
        self._episodes += 1
        # Report the first four episodes, and then the 8th, 16th, 32nd and so on.
        if self._episodes > 4 and self._episodes & (self._episodes - 1):
            return None
        again = f" This has happened {self._episodes} times in this training." if self._episodes > 1 else ""
        return Sign(self.kind, f"{text}{again}", remedy)
