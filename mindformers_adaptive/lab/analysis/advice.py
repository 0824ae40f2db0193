"""A piece of advice on a recorded run, and when a change is worth it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mindformers_adaptive.lab.replay.measures import Measures, cost

__all__ = ["TOLERABLE", "Advice", "lost"]

# Skipped steps that a change has to save more than.
TOLERABLE = 2.0


@dataclass(frozen=True)
class Advice:
    """Something to change.

    Attributes:
        rule (str): "start lower", "start higher", "larger window", "smaller window", "moving window", "more
            hysteresis", "less hysteresis", "short run" or "collapse".
        change (str): what to change.
        reason (str): why, with figures.
        figures (dict): the figures by name, ready for JSON.
        settings (dict): the cell's arguments that make the change; those for windows are in the tuning.
    """

    rule: str
    change: str
    reason: str
    figures: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


def lost(measures: Measures) -> float:
    """The cost of a run in skipped steps."""
    return cost(measures) * measures.steps / 1000.0
