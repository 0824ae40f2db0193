"""Tells from a training whether the measured gradients were divided by the loss scale."""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["DivisionCheck"]

# Undivided gradients follow every move of the loss scale. To be certain, the check needs _MOVES moves, or one move up
# and one down. These moves must cover _BITS bits.
_MOVES = 3
_BITS = 2

# The change of the gradient may differ from the move of the loss scale by this part of the move.
_TOLERANCE = 0.25

# The moves must be so many times larger than the noise of the gradients. The noise is at least _LEAST_NOISE bits.
_CERTAINTY = 6
_LEAST_NOISE = 0.1


class _Step(NamedTuple):
    """log2 of the loss scale and of the largest gradient in one applied step."""

    scale: float
    gradient: float


class DivisionCheck:
    """Compares the largest gradient before and after each move of the loss scale.

    A gradient that is divided by the loss scale stays as it is when the loss scale moves. A gradient that is not
    divided moves by the same factor. The check compares the step after a move with the last step before it, and also
    with the step before that one: a single large gradient lowers the loss scale, and is gone in the next step.

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
        # The loss scale before and after each move that the gradients followed. The second list has only the moves
        # that two steps before the move confirm.
        self._moves: list[tuple[float, float]] = []
        self._confirmed: list[tuple[float, float]] = []
        self._squares_of_noise: list[float] = []

    def interrupt(self) -> None:
        """Do not compare the next step with the previous steps: a step is missing, or a checkpoint was loaded."""
        self._steps = []

    def add(self, loss_scale: float, largest_gradient: float) -> bool:
        """Add a step, and return whether the gradients are not divided.

        Args:
            loss_scale (float): the loss scale of the step.
            largest_gradient (float): the largest gradient that the step measured; inf if it overflowed.

        Returns:
            bool, True if the gradients have followed each move of the loss scale, and several moves were seen.
        """
        if not 0 < largest_gradient < math.inf:
            self.interrupt()
            return False
        self._steps = [*self._steps[-2:], _Step(math.log2(loss_scale), math.log2(largest_gradient))]
        if len(self._steps) < 2:
            return False
        before, after = self._steps[-2:]
        first = self._steps[0]
        was_constant = first is not before and first.scale == before.scale
        if after.scale != before.scale:
            self._compare(first if was_constant else before, before, after)
            return self._is_certain()
        if was_constant:
            self._squares_of_noise.append((after.gradient - first.gradient) ** 2)
        return False

    def _compare(self, first: _Step, before: _Step, after: _Step) -> None:
        move = after.scale - before.scale
        ratios = [(after.gradient - step.gradient) / move for step in (first, before)]
        if not all(abs(ratio - 1) <= _TOLERANCE for ratio in ratios):
            self._moves, self._confirmed = [], []
            return
        self._moves.append((before.scale, after.scale))
        if first is not before:
            self._confirmed.append((before.scale, after.scale))

    def _is_certain(self) -> bool:
        noise, moves = self._squares_of_noise, [after - before for before, after in self._confirmed]
        is_up_and_down = len({after > before for before, after in self._moves}) == 2
        if len(noise) < _MOVES or not (is_up_and_down or len(moves) >= _MOVES):
            return False
        scales = [scale for move in self._moves for scale in move]
        variance = max(sum(noise) / len(noise), _LEAST_NOISE**2)
        is_clear = sum(move**2 for move in moves) >= _CERTAINTY**2 * variance
        return is_clear and max(scales) - min(scales) >= _BITS
