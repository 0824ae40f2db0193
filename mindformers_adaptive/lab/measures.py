"""The measures of a replayed rule: skipped steps, steps that were too low, and bits below the ceiling."""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mindformers_adaptive.record.trace import Trace
from mindformers_adaptive.rules.checks import LARGEST_FLOAT32, SMALLEST_FLOAT32

# The smallest and the largest normal float32 number. A step with a ceiling above the largest number never overflows; a
# step with a ceiling below the smallest number always overflows.
SMALLEST_LOSS_SCALE, LARGEST_LOSS_SCALE = SMALLEST_FLOAT32, LARGEST_FLOAT32

# Down to this many bits below the ceiling, FP16 loses at most 0.1 % of the gradient in each of the trainings that
# `python -m scripts.studies.harm` measures.
FREE_BITS = 16


@dataclass(frozen=True)
class Measures:
    r"""The measures of a rule that was replayed on a trace, such as skipped steps and bits below the ceiling.

    Step t has the ceiling :math:`c_t`, and the rule used the loss scale :math:`s_t`. The step was *skipped* if it
    overflowed (:math:`s_t > c_t`), otherwise *applied*:

    .. code-block:: text

        skipped                 number of t with s_t > c_t
        too_low                 number of applied t with log2(c_t / s_t) > 16 bits and c_t <= the largest float32
        headroom_lost           mean of log2(c_t / s_t), in bits, over the applied t with c_t <= the largest float32
        steps_to_first_applied  number of steps before the first applied one, all of them skipped
        known_share             share of t where the trace knows, and does not assume, what happens at s_t

    Down to 16 bits (``FREE_BITS``) below the ceiling, FP16 loses next to nothing of the gradient, so ``headroom_lost``
    is no loss in itself: steps that are ``too_low`` are.

    ``steps``, the length of the trace, and all other counts are integers.

    Attributes:
        headroom_lost (float): in bits; nan if there is no step to measure headroom at.
        steps_to_first_applied (int): the number of all steps if no step is applied.
        known_share (float): from 0 to 1.

    Examples:
        >>> trace = Trace.exact("sudden drop", [8.0, 8.0, 2.0, 2.0])
        >>> measures = measure(trace, [4.0, 4.0, 4.0, 2.0])
        >>> measures.skipped, measures.headroom_lost
        (1, 0.6666666666666666)
    """

    steps: int
    skipped: int
    too_low: int
    headroom_lost: float
    steps_to_first_applied: int
    known_share: float

    def as_dict(self) -> dict[str, float | None]:
        """Return the measures of a replay by name, ready for JSON: nan becomes None."""
        headroom = None if math.isnan(self.headroom_lost) else self.headroom_lost
        return {**dataclasses.asdict(self), "headroom_lost": headroom}


def overflows(loss_scale: float, ceiling: float) -> bool:
    """Return whether a step overflows: its loss scale is above the ceiling, or is not a positive float32 number.

    At a scale of 0 or beyond float32 the unscaled gradients are nan, whatever the ceiling is.

    Examples:
        >>> overflows(8.0, 4.0), overflows(4.0, 4.0), overflows(float("inf"), float("inf"))
        (True, False, True)
    """
    return not 0.0 < loss_scale <= min(ceiling, LARGEST_LOSS_SCALE)


def overflow_flags(loss_scale: NDArray[np.float64], ceiling: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return for each loss scale and ceiling, broadcast to a common shape, whether the step overflows."""
    return ~((loss_scale > 0.0) & (loss_scale <= np.minimum(ceiling, LARGEST_LOSS_SCALE)))


def measure(trace: Trace, loss_scale: ArrayLike) -> Measures:
    """Return the measures of a rule on a trace, from the loss scales that it used.

    Args:
        trace (Trace): the replayed trace, with at least one step.
        loss_scale (ArrayLike): the scale of each step, shape (steps,).

    Raises:
        ValueError: if the trace is empty or the shapes do not fit.
    """
    used = np.asarray(loss_scale, dtype=np.float64)
    if len(trace) == 0:
        raise ValueError(f"The trace {trace.name!r} must have at least 1 step, but got none. Leave this trace out.")
    if used.shape != (len(trace),):
        raise ValueError(
            f"'loss_scale' must have one number for each of the {len(trace)} steps of the trace {trace.name!r}, but "
            f"got shape {used.shape}. Give the scale of each step."
        )
    skipped = overflow_flags(used, trace.ceiling)
    measured = ~skipped & (trace.ceiling <= LARGEST_LOSS_SCALE)
    bits = np.log2(trace.ceiling[measured] / used[measured])
    return Measures(
        steps=len(trace),
        skipped=int(skipped.sum()),
        too_low=int((bits > FREE_BITS).sum()),
        headroom_lost=float(bits.mean()) if len(bits) else math.nan,
        steps_to_first_applied=len(trace) if skipped.all() else int(np.argmin(skipped)),
        known_share=float(trace.known(used).mean()),
    )
