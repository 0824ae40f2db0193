"""Runs the passes of a network at several loss scales, to find the lowest one that overflows."""

import math
from collections.abc import Callable
from typing import Any

from mindformers_adaptive.overflow.origin import Origin, find_origin
from mindformers_adaptive.overflow.passes import Gradient, Pass

# A function that runs batches at a loss scale.
Run = Callable[[list[Any], float], list[Pass]]

# Try no loss scale above this limit. Training usually starts at 2^32.
HIGHEST = 2.0**40
# To find out whether the forward pass overflows, repeat a pass at a loss scale that is lower by this factor. If the
# pass still overflows, the cause is the forward pass, not the gradients.
_FAR_BELOW = 2.0**-20


class PassesAtScales:
    """The passes of a network on the same batches at several loss scales, and where they overflow.

    Args:
        run (Callable): runs batches at a loss scale.
        batches (list): the batches.
        loss_scale (float): the first loss scale to run.
        forward_is_harmless (bool): whether inf in the forward pass is known to do no harm. Default: False.
    """

    def __init__(self, run: Run, batches: list[Any], loss_scale: float, forward_is_harmless: bool = False) -> None:
        self._run, self._batches = run, batches
        self._by_scale: dict[float, list[Pass]] = {}
        # For each loss scale that was run: the first pass that overflows and its batch, or None.
        self._first_bad: dict[float, tuple[Pass, Any] | None] = {}
        # inf in the forward pass does no harm if the gradients of the same batches are finite at some loss scale.
        self.forward_is_harmless = forward_is_harmless
        self.loss_scale = self.closest_scale = loss_scale
        self.overflow = self.overflows_at(loss_scale)

    def overflows_at(self, scale: float) -> bool:
        """Run the batches at a loss scale, if that was not done before, and return whether a batch overflows."""
        if scale not in self._by_scale:
            self._by_scale[scale] = passes = self._run(self._batches, scale)
            pairs = zip(passes, self._batches, strict=True)
            self._first_bad[scale] = next((pair for pair in pairs if _overflows(pair[0])), None)
            self.forward_is_harmless |= self._first_bad[scale] is None
        return self._first_bad[scale] is not None

    @property
    def closest(self) -> list[Pass]:
        """list[Pass]: the passes in which the distance of layers from overflow is measured, at ``closest_scale``."""
        return self._by_scale[self.closest_scale]

    def passes_at(self, scale: float) -> list[Pass]:
        return self._by_scale[scale]

    @property
    def scales(self) -> dict[float, bool]:
        return {scale: pair is not None for scale, pair in self._first_bad.items()}

    @property
    def worst(self) -> tuple[Pass, Any]:
        """tuple[Pass, tuple]: the first pass and batch that overflow, at the lowest loss scale that overflows."""
        bad = {scale: pair for scale, pair in self._first_bad.items() if pair is not None}
        return bad[min(bad)]

    @property
    def origin(self) -> Origin | None:
        return find_origin(self.worst[0], self.forward_is_harmless) if any(self.scales.values()) else None

    @property
    def safe(self) -> float:
        return max((scale for scale, overflow in self.scales.items() if not overflow), default=0.0)

    @property
    def forward(self) -> bool:
        return self.origin is not None and self.origin.phase == "forward"

    @property
    def limit(self) -> float:
        """float: the largest loss scale, a power of two, at which the recorded gradients should not overflow."""
        # An operator without a gradient, such as Sign, hides an overflow in the gradient of its output from the
        # weights. So leave out the gradients that overflowed in a pass without an overflow.
        harmless = [each for scale, passes in self._by_scale.items() if not self.scales[scale] for each in passes]
        hidden = {_position(*pair) for each in harmless for pair in each.backward if not pair[1].reading.finite}
        recorded = [pair for each in self.closest for pair in each.backward if _position(*pair) not in hidden]
        readings = [gradient.reading for _, gradient in recorded]
        readings += [reading for each in self.closest for reading in each.weights.values()]
        bits = min((reading.headroom for reading in readings), default=math.inf)
        return 2.0 ** math.floor(min(math.log2(self.closest_scale) + bits, 120))


def _position(index: int, gradient: Gradient) -> tuple[int, bool, int]:
    """Return the call, and the input or output of the call, to which a recorded gradient belongs."""
    return index, gradient.of_output, gradient.index


def _overflows(seen_pass: Pass) -> bool:
    return seen_pass.overflow or find_origin(seen_pass) is not None


def run_at_scales(run: Run, batches: list[Any], loss_scale: float) -> PassesAtScales:
    """Run at most 3 passes of each batch, at different loss scales, and return their results."""
    seen = PassesAtScales(run, batches, loss_scale)
    origin = seen.origin
    if origin and origin.phase == "forward" and not origin.hidden:
        return seen
    if seen.overflow:
        seen.closest_scale = min(loss_scale, 1.0)
        overflows_at_lowest = seen.overflows_at(seen.closest_scale)
        if seen.forward:
            # An inf in the forward pass may be intended. It does no harm if nothing overflows at a much lower loss
            # scale.
            seen.forward_is_harmless = not any(map(_overflows, run(batches, seen.closest_scale * _FAR_BELOW)))
        if seen.forward or overflows_at_lowest:
            return seen
    limit = seen.limit
    # Try the lowest loss scale that should overflow: a higher loss scale could let several layers overflow, and hide
    # the layer that overflows first.
    above = 2 * limit
    highest = min(loss_scale, HIGHEST) if seen.overflow else HIGHEST
    if not 1.0 <= above <= highest:
        return seen
    if not seen.overflows_at(above):
        # The gradients that should have overflowed do not reach a weight. Try the limit of the other gradients.
        if (above := min(2 * seen.limit, highest)) not in seen.scales:
            seen.overflows_at(above)
    elif loss_scale < limit:
        seen.overflows_at(limit)
    return seen
