"""Tells from a training whether the measured gradients were divided by the loss scale."""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["DivisionCheck"]

# The noise is known from so many pairs of steps between which the loss scale did not move.
_LEAST_PAIRS = 3

# The check needs at least so many moves.
_LEAST_MOVES = 2

# The moves must be so many times larger than the noise of the gradients, which is at least _LEAST_NOISE bits. The
# squares of the moves must add up to at least _LEAST_SQUARES.
_CERTAINTY = 6
_LEAST_NOISE = 0.15
_LEAST_SQUARES = 3

# On average the gradients must change by as much as the loss scale, up to this part.
_TOLERANCE = 0.4

# What is left of the changes then may have so many times the variance of the noise.
_MOST_LEFT = 2


class _Step(NamedTuple):
    """log2 of the loss scale and of the largest gradient in one applied step."""

    scale: float
    gradient: float


class _Moves:
    """Sums over moves of the loss scale and the changes of the gradient with them, in bits."""

    def __init__(self) -> None:
        self.count = 0
        self.squares = self.changes = self.products = 0.0

    def add(self, move: float, change: float) -> None:
        self.count += 1
        self.squares += move**2
        self.changes += change**2
        self.products += move * change

    def are_followed(self, variance: float) -> bool:
        """Return whether the gradient surely changes with the moves, where its noise has this variance."""
        if self.count < _LEAST_MOVES or self.squares < max(_LEAST_SQUARES, _CERTAINTY**2 * variance):
            return False
        left = (self.changes - 2 * self.products + self.squares) / self.count
        return abs(self.products / self.squares - 1) <= _TOLERANCE and left <= _MOST_LEFT * variance


class DivisionCheck:
    """Compares the largest gradient before and after each move of the loss scale.

    A gradient that is divided by the loss scale stays as it is when the loss scale moves. A gradient that is not
    divided moves by the same factor. The check compares the step after a move with the second last step before it: a
    single large gradient lowers the loss scale, and is gone in the next step. It takes all moves together, because the
    gradients of two steps can differ by more than a move.

    Examples:
        >>> check = DivisionCheck()
        >>> scales = [2.0**bits for bits in range(8) for _ in range(3)]
        >>> any(check.add(scale, 0.5 * scale) for scale in scales)
        True
        >>> any(DivisionCheck().add(scale, 0.5) for scale in scales)
        False
    """

    def __init__(self) -> None:
        self._steps: list[_Step] = []
        self._all, self._confirmed = _Moves(), _Moves()
        # The number of pairs of steps between which the loss scale did not move, and their summed squared changes.
        self._pairs, self._noise = 0, 0.0

    def interrupt(self) -> None:
        """Do not compare the next step with the previous steps: a step is missing, or a checkpoint was loaded."""
        self._steps = []

    def add(self, loss_scale: float, largest_gradient: float) -> bool:
        """Add a step, and return whether the gradients are not divided.

        Args:
            loss_scale (float): the loss scale of the step.
            largest_gradient (float): the largest gradient that the step measured; inf if it overflowed.

        Returns:
            bool, True if the gradients have followed the moves of the loss scale, and enough moves were seen.
        """
        if not 0 < largest_gradient < math.inf:
            self.interrupt()
            return False
        self._steps = [*self._steps[-2:], _Step(math.log2(loss_scale), math.log2(largest_gradient))]
        if len(self._steps) < 2:
            return False
        first, before, after = self._steps[0], *self._steps[-2:]
        was_constant = first is not before and first.scale == before.scale
        if not was_constant:
            first = before
        move, change = after.scale - before.scale, after.gradient - first.gradient
        if move != 0:
            self._all.add(move, change)
            if was_constant:
                self._confirmed.add(move, change)
            return self._is_certain()
        if was_constant:
            self._pairs += 1
            self._noise += change**2
        return False

    def _is_certain(self) -> bool:
        if self._pairs < _LEAST_PAIRS:
            return False
        variance = max(self._noise / self._pairs, _LEAST_NOISE**2)
        # Among gradients without noise there is no single large one, so the last step before a move tells enough.
        is_quiet = variance == _LEAST_NOISE**2
        return self._confirmed.are_followed(variance) or (is_quiet and self._all.are_followed(variance))
